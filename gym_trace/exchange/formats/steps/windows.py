"""Steps in windows: some steps of one episode at a time, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.episode import Episode
from gym_trace.data.layout import Path
from gym_trace.data.trees import mapped
from gym_trace.data.values import Array
from gym_trace.format import wire
from gym_trace.playback.column_selection import ColumnSelection
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.scan import EPISODE, KEPT, LEFT_OUT, OnDamage, Scan
from gym_trace.playback.trace import Trace
from gym_trace.playback.writer_reader import WriterReader


class Window(NamedTuple):
    """Consecutive steps of an episode.

    Attributes:
        episode: the episode, without steps that finals or prefix leave out.
        writer: its writer.
        start: index of the first of these steps in the episode.
        steps: number of steps.
        opens: True for the first steps of the episode, or after a gap: no other window has the observation before.
        closes: True for the last steps of the episode.
        has_placeholder: True if the last row of observations is unknown.
        columns: rows by path, one per leaf of a space: ("observations", "image"), ("rewards",), ("annotations", name).
            Observations have one more row than the others. Values of any type, such as infos, are objects. Columns
            that were not recorded are missing, such as infos or annotations. Rows that lack the structure of their
            space have the path of the space, ("observations",).
    """

    episode: Episode
    writer: WriterReader
    start: int
    steps: int
    opens: bool
    closes: bool
    has_placeholder: bool
    columns: dict[Path, Array]

    @property
    def first_step(self) -> int:
        """Return the index of the first of these steps in the whole episode."""
        return self.episode.first_step + self.start


def step_windows(
    trace: Trace,
    selection: ColumnSelection,
    episodes: Iterable[int] | None = None,
    steps: slice | list[slice] = slice(None),
    on_damage: OnDamage | None = None,
    finals: str = KEPT,
    prefix: bool = True,
) -> Iterator[Window]:
    """Yield the selected columns in windows, episode by episode. An episode without steps is one empty window.

    Args:
        episodes: indices, in any order. None: all.
        steps, on_damage, finals, prefix: see Scan, which reads them.
    """
    indices = np.arange(len(trace)) if episodes is None else np.fromiter(episodes, np.int64)
    index, episode = -1, None
    for runs in Scan(
        index_of(trace),
        selection.columns,
        indices,
        order=EPISODE,
        steps=steps,
        finals=finals,
        prefix=prefix,
        on_damage=on_damage,
    ):
        fields = (runs.episode, runs.starts_at, runs.lengths, runs.opens, runs.closes, ~runs.final_known)
        bounds = [offsets.tolist() for offsets in (runs.observation_offsets, runs.step_offsets)]
        for run, (run_episode, start, run_steps, opens, closes, has_placeholder) in enumerate(
            zip(*(field.tolist() for field in fields))
        ):
            if episode is None or run_episode != index:
                index, episode = run_episode, exported_episode(trace, trace[run_episode], finals, prefix)
            columns = runs.columns
            if len(runs) > 1:
                observation_rows, step_rows = (slice(*offsets[run : run + 2]) for offsets in bounds)
                columns = {
                    path: rows[observation_rows if path[0] == "observations" else step_rows]
                    for path, rows in columns.items()
                }
            yield Window(episode, runs.reader, start, run_steps, opens, closes, has_placeholder, columns)


def exported_episode(trace: Trace, episode: Episode, finals: str, prefix: bool) -> Episode:
    """Return an episode of a trace without the steps that finals and prefix leave out; see Scan."""
    if not prefix and episode.prefix:
        episode = episode[episode.prefix :]
    if finals == LEFT_OUT and len(episode) and not episode.has_final_observation:
        reader, row = index_of(trace).locate(episode.index)
        if not is_terminated(reader, np.array([row]))[0]:
            episode = episode[: len(episode) - 1]
    return episode


def is_terminated(writer: WriterReader, rows: Array) -> Array:
    """Return (rows,) bool: the terminated flag of the last step of each of these episodes of a writer."""
    flags: Array = writer.fragments.flags[writer.parts.last_of(rows)] & wire.TERMINATED > 0
    return flags


def with_repeated_final(tree: Any) -> Any:
    """Return observations with the last row replaced by the one before."""
    return mapped(lambda rows: np.concatenate((rows[:-1], rows[-2:-1])), tree)
