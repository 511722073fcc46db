"""ExportSource: what exporters read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from gym_trace.data.episode import Episode
from gym_trace.data.layout import Path
from gym_trace.data.schema import Layouts
from gym_trace.data.values import Array
from gym_trace.envs.spaces import restore
from gym_trace.errors import InvalidOption
from gym_trace.exchange.formats import identity
from gym_trace.exchange.formats.steps.windows import (
    Window,
    exported_episode,
    is_terminated,
    step_windows,
    with_repeated_final,
)
from gym_trace.format import wire
from gym_trace.playback.column_selection import select_columns
from gym_trace.playback.episode_columns import repeated_steps
from gym_trace.playback.episode_index import finished_view, index_of, readers_with_episodes, whole_of, writer_agreed_on
from gym_trace.playback.episode_table import Columns
from gym_trace.playback.row_types import RowType, row_types
from gym_trace.playback.scan import EPISODE, KEPT, LEFT_OUT, REPEATED, Scan
from gym_trace.playback.trace import Trace

_IDENTITIES_AT_ONCE = 1024
Progress = Callable[[int, int], None]  # (steps done, total steps)


class ExportSource:
    """A trace or view to export: its finished episodes, in order.

    Attributes:
        trace: the finished episodes.
        running: number of episodes still being recorded, which are skipped.
        steps: total number of steps.
        layouts: layouts of observations and actions, the same for all episodes.
        finals: treatment of unknown final observations; see Exporter.
        branch_prefix: (episodes,) number of first steps to leave out, as they repeat the episode branched from.

    Examples:
        >>> source = gym_trace.formats.ExportSource(gym_trace.open_trace("traces/cartpole"))
        >>> len(source.episodes), source.environment["id"]
        (20, 'CartPole-v1')
    """

    def __init__(
        self,
        trace: Trace,
        on_progress: Progress | None = None,
        finals: str = REPEATED,
        keeps_branch_prefix: bool = False,
    ):
        """Raises InvalidOption if there is no episode, or spaces differ between writers; CorruptTrace."""
        self.finals, self._keeps_branch_prefix = finals, keeps_branch_prefix
        self.trace = finished_view(trace)
        self.running = len(trace) - len(self.trace)
        self._agreed = [writer_agreed_on(self.trace, name) for name in ("observation_space", "action_space")]
        self.layouts: Layouts = self._agreed[0].layouts
        self.branch_prefix = repeated_steps(index_of(self.trace), index_of(self.trace).readers) * (
            not keeps_branch_prefix
        )
        self.steps = int(episode_columns(self)["steps"].sum())
        self._on_progress, self._done = on_progress, 0
        self._identities: tuple[int, list[str]] = -1, []  # index of an episode; identities from this episode on

    @cached_property
    def episodes(self) -> Array:
        """Return trace.episodes with the counts and returns of the exported steps."""
        table = self.trace.episodes
        if self.branch_prefix.any():
            table = table.copy()
            table["first_step"] += self.branch_prefix
            table["steps"] -= self.branch_prefix
            for index, episode in enumerate(self.trace.scan(columns=["rewards"])):
                total = np.asarray(episode[int(self.branch_prefix[index]) :].total_reward)
                table["return"][index] = total if total.ndim == 0 else np.nan
        if self.finals != LEFT_OUT or table["has_final_observation"].all():
            return table
        table = table.copy()
        shorter = ~table["has_final_observation"] & ~self._is_terminated & (table["steps"] > 0)
        table["steps"][shorter] -= 1
        table["has_final_observation"][shorter] = True
        return table

    @cached_property
    def _is_terminated(self) -> Array:
        """Return (episodes,) bool: the terminated flag of the last step of each."""
        writers, rows = index_of(self.trace)["writer"], index_of(self.trace).rows
        found = np.zeros(len(writers), np.bool_)
        for number in np.unique(writers).tolist():
            mine = writers == number
            found[mine] = is_terminated(index_of(self.trace).readers[number], rows[mine])
        return found

    def lost_branch_prefix(self) -> str:
        """Describe the loss of steps that repeat the episode branched from; "" without any."""
        count = int(self.branch_prefix.sum())
        return f"{count:,} steps that repeat the episode branched from are left out" if count else ""

    def lost_states(self) -> str:
        """Describe the loss of recorded states; "" without any."""
        batches = (batch for reader in readers_with_episodes(self.trace) for batch in reader.read_batches)
        has_states = any(path[0] == "states" for batch in batches for path in batch.totals)
        return "states of the environment are not kept" if has_states else ""

    def unknown_finals(self) -> str:
        """Describe the loss by unknown final observations; "" without any, or if the format can mark them."""
        unknown = ~index_of(self.trace)["has_final_observation"] & (index_of(self.trace)["steps"] > 0)
        if self.finals == KEPT or not unknown.any():
            return ""
        count, ended = int(np.count_nonzero(unknown)), int(np.count_nonzero(unknown & self._is_terminated))
        text = f"unknown final observation in {count:,} {'episode' if count == 1 else 'episodes'}"
        if self.finals == REPEATED:
            return f"{text}: the previous one is repeated"
        omitted = f"the last step of {count - ended:,}, not terminated, is omitted" if count > ended else ""
        repeated = f"in {ended:,}, terminated, the previous one is repeated" if ended else ""
        return f"{text}: {'; '.join(filter(None, (omitted, repeated)))}"

    @property
    def observation_space(self) -> Any:
        """Return the gymnasium space; a StandIn if it cannot be rebuilt."""
        return restore(self._agreed[0].schema["observation_space"], stand_in=True)

    @property
    def action_space(self) -> Any:
        """Return the gymnasium space; a StandIn if it cannot be rebuilt."""
        return restore(self._agreed[1].schema["action_space"], stand_in=True)

    @property
    def plain_spaces(self) -> tuple[Any, Any]:
        """Return both spaces as plain data (docs/FORMAT.md, section 5)."""
        return self._agreed[0].schema["observation_space"], self._agreed[1].schema["action_space"]

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Return id, spec (JSON), wrappers and class of the environment of the first writer."""
        return readers_with_episodes(self.trace)[0].env_spec

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Return the facts of the trace: author, license, description, tags …"""
        return self.trace.facts

    @cached_property
    def about(self) -> str:
        """Return JSON text, from which an import restores writers, spaces and facts."""
        return identity.about(self.trace)

    def identity(self, episode: Episode) -> str:
        """Return JSON text, from which an import restores the metadata of an episode. Raises CorruptTrace."""
        index = episode.index
        if len(episode) != index_of(self.trace)["steps"][index]:
            return identity.identity(episode, self.episodes[index], bool(self.is_part[index]))
        begin = index - index % _IDENTITIES_AT_ONCE
        if self._identities[0] != begin:
            indices = np.arange(begin, min(begin + _IDENTITIES_AT_ONCE, len(self.trace)))
            self._identities = begin, identity.identities(self.trace, indices, self.is_part)
        return self._identities[1][index - begin]

    def identities(self, indices: Array) -> list[str]:
        """Return identity() of the episodes at these indices, faster. Raises CorruptTrace."""
        if (episode_columns(self)["steps"][indices] != index_of(self.trace)["steps"][indices]).any():
            cuts = self.finals, self._keeps_branch_prefix
            episodes = (exported_episode(self.trace, self.trace[index], *cuts) for index in indices.tolist())
            return [self.identity(episode) for episode in episodes]
        return identity.identities(self.trace, indices, self.is_part)

    # -- columns and flags ---------------------------------------------------------------------------------------------

    @cached_property
    def is_part(self) -> Array:
        """Return (episodes,) bool: True for parts of episodes, whose other steps were filtered out."""
        whole = index_of(whole_of(self.trace))
        is_part, ids = whole["first_step"] > 0, whole["episode_id"]
        for begin, end in pairwise(whole.bounds.tolist()):
            _, of_episode, counts = np.unique(ids[begin:end], return_inverse=True, return_counts=True)
            is_part[begin:end] |= counts[of_episode] > 1
        exported: Array = is_part[index_of(self.trace).whole_indices] | (self.branch_prefix > 0)
        return exported

    @cached_property
    def forms(self) -> dict[Path, RowType | None]:
        """Return the RowType of each column; None: arbitrary values, or types that no RowType can hold.

        Paths: ("observations", …) and ("actions", …), one per leaf, ("rewards",), ("infos",), ("annotations", name).
        Reads the headers of chunks, not their rows. Raises CorruptTrace.
        """
        return row_types(self.trace)

    def form_of_rewards(self) -> RowType | None:
        """Return the RowType of the rewards; numbers of several types are float64, as in Episode.rewards."""
        form = self.forms["rewards",]
        columns = (window.columns["rewards",] for window in (self.survey("rewards") if form is None else ()))
        if form is None and all(rows.ndim == 1 and rows.dtype.kind in "biuf" for rows in columns):
            return RowType(np.dtype(np.float64), (), mixed=True)
        return form

    def has_flags_within(self) -> bool:
        """Return True if a step before the last one of an episode is terminated or truncated."""
        writers, rows_of = index_of(self.trace)["writer"], index_of(self.trace).rows
        for number, reader in enumerate(index_of(self.trace).readers):
            parts, chosen = reader.parts, np.zeros(len(reader.parts), np.bool_)
            chosen[rows_of[writers == number]] = True
            last = np.zeros(len(parts.fragments), np.bool_)
            last[parts.first[1:] - 1] = True
            flagged = reader.fragments.flags[parts.fragments] & (wire.TERMINATED | wire.TRUNCATED) > 0
            if (flagged & ~last & np.repeat(chosen, np.diff(parts.first))).any():
                return True
        return False

    # -- reading ------------------------------------------------------------------------------------------------------

    def windows(self, *columns: str, checked: bool = True, states: bool = False) -> Iterator[Window]:
        """Yield the steps of all episodes in order, some at a time; each episode has at least one window.

        columns: "observations", "actions", "rewards", "terminations", "truncations", "infos", "annotations", or leaves
        of them ("observations/image"); none: all. Raises CorruptTrace; InvalidOption for rows that lack the structure
        of their space, unless checked is False. states: also those of the environment, ("states", name).
        """
        leaves = {leaf.path for layout in self.layouts[:2] for leaf in layout.leaves()}
        for window in self.survey(*columns, states=states):
            unlike = [path for path in window.columns if path[0] in ("observations", "actions") and path not in leaves]
            if checked and unlike:
                raise InvalidOption("some values lack the structure of their space; cannot export")
            yield window
            self.advance(window.steps)

    def survey(self, *columns: str, states: bool = False) -> Iterator[Window]:
        """Yield as windows() does, unchecked and without progress: to survey columns before they are written."""
        selection = select_columns(self.trace, columns or None)
        if states:
            selection = selection._replace(columns=selection.columns | {"states"})
        return step_windows(self.trace, selection, finals=self.finals, prefix=self._keeps_branch_prefix)

    def runs(self, *columns: str) -> Scan:
        """Return a Scan of the steps, with many episodes per block; the caller must call advance()."""
        selected = select_columns(self.trace, columns or None).columns
        return Scan(index_of(self.trace), selected, order=EPISODE, finals=self.finals, prefix=self._keeps_branch_prefix)

    def scan(self) -> Iterator[tuple[Episode, Any]]:
        """Yield whole episodes with all columns, and their observations. Raises CorruptTrace."""
        for whole in self.trace.scan():
            episode = exported_episode(self.trace, whole, self.finals, self._keeps_branch_prefix)
            observations = episode.observations
            if self.finals != KEPT and len(episode) and not episode.has_final_observation:
                observations = with_repeated_final(observations)
            yield episode, observations

    def advance(self, steps: int) -> None:
        """Report that these steps are written. windows() calls this itself."""
        self._done += steps
        if self._on_progress is not None:
            self._on_progress(min(self._done, self.steps), self.steps)


def episode_columns(source: ExportSource) -> Columns:
    """Return the columns of source.episodes, which are computed one by one where all recorded steps are exported."""
    content = index_of(source.trace)
    is_cut = source.finals == LEFT_OUT and not content["has_final_observation"].all()
    return source.episodes if is_cut or source.branch_prefix.any() else content


def flags(window: Window) -> tuple[Array, Array]:
    """Return (terminations, truncations) of the steps of a window, for formats that end episodes with a flag.

    Flags within an episode are False; the last step of an incomplete episode, or of a part of one, is truncated.
    """
    pair = np.zeros((2, window.steps), np.bool_)
    if window.closes and window.steps:
        terminated = bool(window.columns[("terminations",)][-1])
        pair[:, -1] = terminated, bool(window.columns[("truncations",)][-1]) or not terminated
    return pair[0], pair[1]
