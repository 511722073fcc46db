"""The lanes of a trace: the episodes of one environment, in order."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from gym_trace.playback.episode_index import index_of
from gym_trace.playback.trace import Trace
from gym_trace.playback.writer_reader import WriterReader

_SEPARABLE = ("SyncVectorEnv", "AsyncVectorEnv")  # vector environments whose lanes are separate environments


class Lane(NamedTuple):
    """Episodes of one lane of one writer, in recorded order.

    Attributes:
        indices: indices in the trace of the episodes, or of their parts.
        follows: True for each episode that began right where the one before it in this list had ended.
        lacks_earlier: True for each episode whose environment had played others that are not here, or not whole: they
            were filtered out, by the recording or by an edit, or dropped.
    """

    writer: WriterReader
    lane: int
    indices: list[int]
    follows: list[bool]
    lacks_earlier: list[bool]

    @property
    def renders(self) -> bool:
        """True if there must be one environment at a time: MuJoCo renders black frames after another one is closed."""
        return self.writer.about.environment.get("render_mode") is not None


def lanes_of(trace: Trace, writers: Collection[int] | None = None) -> list[Lane]:
    """Return the lanes of a trace. For a view, pass whole_of(view): earlier episodes may have to be replayed.

    writers: indices of the writers; None: all.
    """
    table, lanes = trace.episodes, []
    for number, writer in enumerate(index_of(trace).readers):
        if writers is not None and number not in writers:
            continue
        own = np.flatnonzero(table["writer"] == number)
        if not len(own):
            continue
        all_ids = np.unique(table["episode_id"][own])
        is_unfiltered = not (writer.about.filters_episodes or writer.about.filters_frames)
        for lane in np.unique(table["lane"][own]).tolist():
            indices = own[table["lane"][own] == lane]
            indices = indices[np.lexsort((table["first_step"][indices], table["episode_id"][indices]))]
            rows = table[indices]
            whole = (rows["first_step"] == 0) & ~np.isin(rows["outcome"], ("lost", "running"))
            ids = rows["episode_id"]
            ranks = np.searchsorted(all_ids, ids) if writer.about.is_vector else np.arange(len(ids))
            is_gapless = np.diff(ids) == np.diff(ranks)  # the trace has all episodes with ids in between
            follows = np.append(False, is_unfiltered & whole[:-1] & (rows["first_step"][1:] == 0) & is_gapless)
            count = writer.about.recorder.get("num_envs", 1)  # lanes, whose first episodes have the first ids
            is_late = (ids >= (count if type(count) is int else 1)) | writer.about.filters_episodes
            is_late[1:] = True
            starts = np.maximum.accumulate(np.where(follows, 0, np.arange(len(ids))))
            lanes.append(Lane(writer, lane, indices.tolist(), follows.tolist(), is_late[starts].tolist()))
    return lanes


def inseparable(writer: WriterReader) -> str:
    """Return why the lanes of a vector environment cannot be replayed one by one; "" if they can."""
    if not writer.about.is_vector:
        return ""
    description = writer.about.environment
    name = str(description.get("class")).rpartition(".")[2]
    if name not in _SEPARABLE:
        return f"{name} steps all its lanes together: single lanes cannot be replayed"
    if isinstance(wrappers := description.get("wrappers"), list) and wrappers:
        return f"{wrappers[0]} wrapped all its lanes: single lanes cannot be replayed"
    return ""
