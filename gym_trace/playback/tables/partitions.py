"""Parts of a trace for other processes. Each pickles only what it needs to find its episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from gym_trace.data.layout import Path
from gym_trace.data.values import Array
from gym_trace.errors import InvalidOption, MissingExtra
from gym_trace.playback.episode_index import RecordedEpisodes, finished_view, index_of

try:
    import pyarrow as pa

    from gym_trace.playback.tables.columns import ArrowColumn, columns_of
    from gym_trace.playback.tables.dataset import STEPS, Share, TraceDataset, share_of
except ImportError as missing:
    raise MissingExtra(f"tables need pyarrow ({missing}): pip install 'gym-trace[parquet]'") from missing


class Handle(Protocol):
    """Some episodes of a trace, picklable; see gym_trace.playback.trace.TraceHandle."""

    def open(self) -> Any: ...


@dataclass(frozen=True)
class Partition:
    """Consecutive episodes of a trace. Picklable, and small however large the trace is.

    Attributes:
        directory: directory of the trace, or the root of its storage.
        first: index of its first episode in the trace. episodes: number of episodes. steps: number of their steps.

    Examples:
        >>> part, *_ = gym_trace.open_trace("traces/cartpole").partitions(4)
        >>> part.first, part.episodes, part.steps
        (0, 7, 131)
    """

    directory: str
    first: int
    episodes: int
    steps: int
    _handle: Handle = field(repr=False)
    _columns: Mapping[Path, ArrowColumn] = field(repr=False)

    def open(self) -> Any:
        """Return a Trace, a view with these episodes as they were when the partition was made.

        Raises TraceNotFound; TraceError if they were changed or removed.

        Examples:
            >>> part, *_ = gym_trace.open_trace("traces/cartpole").partitions(4)
            >>> part.open()[0].outcome
            'terminated'
        """
        return self._handle.open()

    def to_arrow(self, columns: Sequence[str] | None = None, where: Any = None, table: str = STEPS) -> Any:
        """Read the rows of a table; see Trace.to_arrow. Episodes have their indices in the trace.

        Examples:
            >>> part, *_ = gym_trace.open_trace("traces/cartpole").partitions(4)
            >>> part.to_arrow(["reward"]).read_all().num_rows == part.steps
            True
        """
        return to_arrow(TraceDataset(table, [self.share]), columns, where)

    @property
    def share(self) -> Share:
        return Share(self.directory, self.open, self.first, self._columns)


def partitions_of(trace: RecordedEpisodes, count: int, handle_of: Callable[[Any], Handle]) -> list[Partition]:
    """Return the finished episodes of a trace in about equal parts; see Trace.partitions. Raises InvalidOption."""
    if count < 1:
        raise InvalidOption(f"partitions({count!r}): pass 1 or more")
    is_finished = index_of(trace).finished
    if not is_finished.any():
        return []
    columns = columns_of(finished_view(trace))
    steps = np.where(is_finished, index_of(trace)["steps"], 0)
    cuts = np.unique([0, *_cuts(trace, np.cumsum(steps), count).tolist(), len(trace)]).tolist()
    return [
        Partition(
            str(trace.directory),
            begin,
            int(np.count_nonzero(is_finished[begin:end])),
            int(steps[begin:end].sum()),
            handle_of(trace[begin:end]),
            columns,
        )
        for begin, end in pairwise(cuts)
        if is_finished[begin:end].any()
    ]


def _cuts(trace: RecordedEpisodes, ends: Array, count: int) -> Array:
    """Return where parts begin: after about the same number of steps, if possible at the begin of a chunk.

    ends: (episodes,) number of steps to the end of each episode.
    """
    ideal: Array = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count) + 1
    ideal = ideal[ideal < len(ends)]
    writers, rows = index_of(trace)["writer"], index_of(trace).rows
    chunks = np.zeros(len(ends), np.int64)
    for number, reader in enumerate(index_of(trace).readers):
        mine = np.flatnonzero(writers == number)
        chunks[mine] = np.searchsorted(reader.chunk_bounds, reader.parts.first_of(rows[mine]), side="right")
    begins = np.flatnonzero((np.diff(writers) != 0) | (np.diff(chunks) != 0)) + 1
    if not len(begins):
        return ideal
    behind = np.searchsorted(begins, ideal)
    after, before = begins[behind.clip(max=len(begins) - 1)], begins[(behind - 1).clip(min=0)]
    near = np.where(abs(after - ideal) < abs(ideal - before), after, before)
    is_near = abs(ends[near - 1] - ends[ideal - 1]) <= ends[-1] / (2 * count)
    chosen: Array = np.where(is_near, near, ideal)
    return chosen


def dataset_of(trace: RecordedEpisodes, table: str) -> TraceDataset:
    """Return a table of a trace; see Trace.to_dataset. Raises InvalidOption."""
    return TraceDataset(table, [share_of(trace)])


def to_arrow(dataset: TraceDataset, columns: Sequence[str] | None, where: Any) -> pa.RecordBatchReader:
    """Return a reader of the batches of a table. where: a condition as text, a pyarrow expression, or None."""
    if isinstance(where, str):
        dataset, where = dataset.where(where), None
    return dataset.scanner(columns, where).to_reader()
