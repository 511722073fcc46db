"""A trace as exporters read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from gym_trace.envs.spaces import restore
from gym_trace.errors import InvalidOption, TraceError
from gym_trace.format import wire
from gym_trace.format.columns import MSGPACK, Column
from gym_trace.interop import identity
from gym_trace.interop.steps.choice import choose
from gym_trace.interop.steps.windows import Window, step_windows
from gym_trace.model.episode import Episode
from gym_trace.model.layout import Layout, Leaf, Path
from gym_trace.model.schema import Layouts
from gym_trace.model.values import Array, dtype_from
from gym_trace.playback.trace import Trace
from gym_trace.playback.writer_reader import WriterReader

Progress = Callable[[int, int], None]  # steps done, steps in all


class Form(NamedTuple):
    """What the rows of a column really are, whatever its space says.

    mixed: whether some of them have another dtype, all of whose values this one holds.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    mixed: bool = False


class Source:
    """A trace, or a view of one, that is exported: its episodes that are over, in the wanted order.

    Attributes:
        trace: these.
        running: how many others are being recorded still.
        steps: how many there are in all.
        layouts: of observations and actions, the same for all episodes.
    """

    def __init__(self, trace: Trace, on_progress: Progress | None = None):
        """Raises InvalidOption if there is no episode, or they are of several kinds; CorruptTrace."""
        over = trace.episodes["outcome"] != "running"
        self.running = int(np.count_nonzero(~over))
        self.trace = trace if over.all() else trace[over]
        if not len(self.trace):
            raise InvalidOption(f"{trace.directory}: there is no episode that could be exported")
        for reader in self.trace.readers:
            for damage in reader.damage:
                raise damage.error()
        try:
            self._agreed = [self.trace.writer_agreed_on(name) for name in ("observation_space", "action_space")]
        except TraceError as error:
            told = "choose episodes of one kind, such as --where 'writer == \"…\"'"
            raise InvalidOption(f"{error}; they cannot be exported together: {told}") from error
        if any(reader.about.has_only_statistics for reader in self._having):
            raise InvalidOption(f"{trace.directory}: holds statistics of episodes alone, and no steps to export")
        self.layouts: Layouts = self._agreed[0].layouts
        self.steps = int(self.trace.episodes["steps"].sum())
        self._on_progress, self._done = on_progress, 0

    @property
    def episodes(self) -> Array:
        """The table of the episodes, as trace.episodes."""
        return self.trace.episodes

    @property
    def _having(self) -> list[WriterReader]:
        return [self.trace.readers[number] for number in np.unique(self.episodes["writer"]).tolist()]

    @property
    def observation_space(self) -> Any:
        """The gymnasium space; a StandIn for what is not known well enough."""
        return restore(self._agreed[0].schema["observation_space"], stand_in=True)

    @property
    def action_space(self) -> Any:
        """The gymnasium space; a StandIn for what is not known well enough."""
        return restore(self._agreed[1].schema["action_space"], stand_in=True)

    @property
    def plain_spaces(self) -> tuple[Any, Any]:
        """Both as plain data (docs/FORMAT.md, section 5)."""
        return self._agreed[0].schema["observation_space"], self._agreed[1].schema["action_space"]

    @cached_property
    def environment(self) -> dict[str, Any]:
        """What is known of the environment: id, spec (JSON), wrappers, class; of the first writer."""
        return self._having[0].env_spec

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What people say of the trace: author, license, description, tags …"""
        return self.trace.facts

    @cached_property
    def about(self) -> str:
        """JSON text, from which an import makes writers, spaces and facts again."""
        return identity.about(self.trace)

    def identity(self, episode: Episode) -> str:
        """JSON text, from which an import has what is known of an episode beside its steps. Raises CorruptTrace."""
        return identity.identity(episode, self.episodes[episode.index], bool(self.is_part[episode.index]))

    def identities(self, places: Array) -> list[str]:
        """The same of the episodes at some places, for a fraction of the time. Raises CorruptTrace."""
        return identity.identities(self.trace, places, self.is_part)

    # -- what there is ------------------------------------------------------------------------------------------------

    @cached_property
    def is_part(self) -> Array:
        """(episodes,) bool: whether it is only some of the steps of an episode, of which others were filtered out."""
        whole, mine = self.trace.whole.episodes, self.episodes
        part = whole["first_step"] > 0
        keys = np.stack([whole["writer"].astype(np.int64), whole["episode_id"]], axis=1)
        _, places, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
        part |= counts[places.reshape(-1)] > 1
        found: Array = part[self.trace.chosen] if len(whole) != len(mine) else part
        return found

    @cached_property
    def forms(self) -> dict[Path, Form | None]:
        """Of each column that has rows what these are; None: values of any kind, or of forms that cannot be joined.

        The paths: ("observations", …) and ("actions", …), one a leaf, ("rewards",), ("infos",), ("annotations", name).
        Reads what chunks say of themselves, not their rows. Raises CorruptTrace.
        """
        found: dict[Path, Form | None] = {}
        counts: dict[Path, int] = {}
        chunks = 0
        for column in self._columns():
            if column is None:
                chunks += 1
                continue
            counts[column.path] = counts.get(column.path, 0) + 1
            form = None if column.dtype == MSGPACK else Form(dtype_from(column.dtype), column.shape)
            if counts[column.path] > 1:
                form = _joined(found[column.path], form)
            found[column.path] = form
        for path in found:
            if path[0] == "annotations" and counts[path] < chunks:  # nothing is there in some rows
                found[path] = None
        for leaf in (*self.layouts.observations.leaves(), *self.layouts.actions.leaves()):
            found.setdefault(leaf.path, None if leaf.dtype is None else Form(leaf.dtype, leaf.shape))
        found.setdefault(("rewards",), Form(np.dtype(np.float64), ()))
        return found

    def _columns(self) -> Iterator[Column | None]:
        """What has rows in each chunk with something of these episodes; None before those of each chunk with steps."""
        table, rows_of = self.episodes, self.trace.rows
        for number, reader in enumerate(self.trace.readers):
            mine = np.zeros(len(reader.parts.table) + 1, np.bool_)  # one more for -1, which is never chosen
            mine[rows_of[table["writer"] == number]] = True
            chosen = mine[reader.parts.of_fragment]
            for chunk in range(reader.chunk_count):
                begin, end = reader.chunk_bounds[chunk : chunk + 2].tolist()
                if not chosen[begin:end].any():
                    continue
                if reader.fragments["steps"][begin:end].any():
                    yield None
                for column in reader.columns_of(chunk):
                    if column.rows and column.path[0] not in ("fragments", "starts"):
                        yield column

    def has_flags_within(self) -> bool:
        """Whether a step before the last one of an episode is terminated or truncated."""
        table, rows_of = self.episodes, self.trace.rows
        for number, reader in enumerate(self.trace.readers):
            parts, chosen = reader.parts, np.zeros(len(reader.parts.table), np.bool_)
            chosen[rows_of[table["writer"] == number]] = True
            last = np.zeros(len(parts.fragments), np.bool_)
            last[parts.first[1:] - 1] = True
            flagged = reader.fragments["flags"][parts.fragments] & (wire.TERMINATED | wire.TRUNCATED) > 0
            if (flagged & ~last & np.repeat(chosen, np.diff(parts.first))).any():
                return True
        return False

    # -- reading ------------------------------------------------------------------------------------------------------

    def windows(self, *columns: str) -> Iterator[Window]:
        """The steps of all episodes in their order, some at a time; each episode has one window at least.

        columns: "observations", "actions", "rewards", "terminations", "truncations", "infos", "annotations", or leaves
        of them ("observations/image"); none: all that there are. Raises CorruptTrace.
        """
        choice = choose(self.trace, columns or None)
        for window in step_windows(self.trace, range(len(self.trace)), choice):
            yield window
            self.advance(window.steps)

    def advance(self, steps: int) -> None:
        """Tells whoever waits that these are written; windows() does so by itself."""
        self._done += steps
        if self._on_progress is not None:
            self._on_progress(min(self._done, self.steps), self.steps)


def flags(window: Window) -> tuple[Array, Array]:
    """(terminations, truncations) of the steps of a window for formats in which a flag is where an episode ends.

    Those within an episode are False; the last step of one that came to no end, or of a part of one, is truncated.
    """
    pair = np.zeros((2, window.steps), np.bool_)
    if window.closes and window.steps:
        terminated = bool(window.columns["terminations"][-1])
        pair[:, -1] = terminated, bool(window.columns["truncations"][-1]) or not terminated
    return pair[0], pair[1]


def leaves_of(layout: Layout, tree: Any) -> list[tuple[Leaf, Array]]:
    """Each leaf of a column of a window with its rows. Raises InvalidOption where rows lack the structure."""
    if isinstance(layout, Leaf):
        return [(layout, np.asarray(tree))]
    if isinstance(tree, np.ndarray):
        raise InvalidOption("some values have not the structure of their space, and cannot be exported")
    keys = range(len(layout.children)) if layout.keys is None else layout.keys
    return [pair for key, child in zip(keys, layout.children) for pair in leaves_of(child, tree[key])]


def _joined(one: Form | None, other: Form | None) -> Form | None:
    """What holds the rows of both, exactly."""
    if one is None or other is None or one.shape != other.shape:
        return None
    if one.dtype == other.dtype:
        return one
    dtype = np.result_type(one.dtype, other.dtype)
    exact = all(np.can_cast(form.dtype, dtype, "safe") for form in (one, other))
    wide = dtype.kind == "f" and {one.dtype.kind, other.dtype.kind} & set("iu")
    if not exact or (wide and max(one.dtype.itemsize, other.dtype.itemsize) > 4):
        return None
    return Form(dtype, one.shape, mixed=True)
