"""The lanes of a trace: the episodes of one environment, in order."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from gym_trace.playback.trace import Trace
from gym_trace.playback.writer_reader import WriterReader

_ONE_BY_ONE = ("SyncVectorEnv", "AsyncVectorEnv")  # vector environments whose lanes are separate environments


class Lane(NamedTuple):
    """Episodes of one lane of one writer, in recorded order.

    indices: of the episodes, or of their parts, in the trace.
    follows: for each, whether it began where the one before it here had ended, with nothing in between.
    """

    writer: WriterReader
    lane: int
    indices: list[int]
    follows: list[bool]


def lanes_of(trace: Trace, writers: Collection[int] | None = None) -> list[Lane]:
    """Return all lanes of a trace. For a view, take those of view.whole: earlier episodes may have to be played.

    writers: indices of the writers whose lanes are wanted; None: all.
    """
    table, lanes = trace.episodes, []
    for number, writer in enumerate(trace.readers):
        if writers is not None and number not in writers:
            continue
        mine = np.flatnonzero(table["writer"] == number)
        if not len(mine):
            continue
        known = np.unique(table["episode_id"][mine])
        gapless = not (writer.about.filters_episodes or writer.about.filters_frames)
        for lane in np.unique(table["lane"][mine]).tolist():
            indices = mine[table["lane"][mine] == lane]
            indices = indices[np.lexsort((table["first_step"][indices], table["episode_id"][indices]))]
            rows = table[indices]
            whole = (rows["first_step"] == 0) & ~np.isin(rows["outcome"], ("lost", "running"))
            ids = rows["episode_id"]
            there = np.searchsorted(known, ids) if writer.about.is_vector else np.arange(len(ids))
            next_id = np.diff(ids) == np.diff(there)  # of every id between them, the episode is here
            follows = np.append(False, gapless & whole[:-1] & (rows["first_step"][1:] == 0) & next_id)
            lanes.append(Lane(writer, lane, indices.tolist(), follows.tolist()))
    return lanes


def inseparable(writer: WriterReader) -> str:
    """Return why no lane of a vector environment can be played alone; "" if one can."""
    if not writer.about.is_vector:
        return ""
    described = writer.about.environment
    name = str(described.get("class")).rpartition(".")[2]
    if name not in _ONE_BY_ONE:
        return f"{name} steps all its lanes together: single lanes cannot be replayed"
    if isinstance(wrappers := described.get("wrappers"), list) and wrappers:
        return f"{wrappers[0]} wrapped all its lanes: single lanes cannot be replayed"
    return ""
