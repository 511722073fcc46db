"""Split segments to fit the limits of readers (docs/FORMAT.md, section 9)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gym_trace.format import wire
from gym_trace.format.wire import ENDS, LEADS, PLACEHOLDER, STARTS, STOPS, TERMINATED, TRUNCATED
from gym_trace.model.deltas import DeltaRows
from gym_trace.model.layout import Path
from gym_trace.model.packing import pack
from gym_trace.model.values import Array
from gym_trace.ring.segment import AnyRows, Segment

_DIMENSIONS = 32  # of a row


def most_rows() -> int:
    """Return the limit of rows in a chunk, including fragments without rows."""
    return min(wire.MAX_TABLE, wire.MAX_ROWS) // 2


def most_bytes() -> int:
    """Return the limit of bytes in a chunk of several rows: low enough for every column encoding."""
    return min(wire.MAX_VALUES // 2, wire.MAX_COLUMN // 8, wire.CHUNK_BYTES // 4)


def decoded_bytes(segment: Segment) -> int:
    """Return the bytes of a segment for that limit, with the overhead per value."""
    return segment.size + wire.VALUE_SIZE * sum(len(r) for r in segment.columns.values() if isinstance(r, list))


def rows_in(segment: Segment) -> int:
    """Return an upper bound on the rows and fragments of a segment."""
    return len(segment.fragments) + max(map(len, segment.columns.values()), default=0)


def readable(segment: Segment) -> Iterator[Segment]:
    """Split a segment into segments that each fit a chunk; yield it unchanged if it is small enough."""
    if any(isinstance(rows, np.ndarray) and rows.ndim > _DIMENSIONS + 1 for rows in segment.columns.values()):
        columns = {path: _as_values(rows) for path, rows in segment.columns.items()}
        segment = segment._replace(columns=columns)
    if decoded_bytes(segment) <= most_bytes() and rows_in(segment) <= most_rows():
        yield segment
    else:
        yield from _Atoms(segment).segments()


def _as_values(rows: AnyRows) -> AnyRows:
    return [pack(row) for row in rows] if isinstance(rows, np.ndarray) and rows.ndim > _DIMENSIONS + 1 else rows


class _Atoms:
    """A segment as its smallest parts: leading observations, steps, and fragments that have neither."""

    def __init__(self, segment: Segment):
        self._columns = segment.columns
        self._fragments = table = segment.fragments
        self._leads = (table["flags"] & LEADS != 0).astype(np.int64)
        self._counts = np.maximum(1, self._leads + table["steps"])
        ends = np.cumsum(self._counts)
        self._owners = np.repeat(np.arange(len(table)), self._counts)
        self._within = np.arange(ends[-1]) - np.repeat(ends - self._counts, self._counts)
        first = self._within == 0
        lead = first & (self._leads != 0)[self._owners]
        step = ~lead & (table["steps"] != 0)[self._owners]
        # Number of rows of each kind before each atom.
        self._starts = _before(first & (table["flags"] & STARTS != 0)[self._owners])
        self._observations, self._steps = _before(lead | step), _before(step)
        sizes = first * wire.FRAGMENT.itemsize
        for path, rows in segment.columns.items():
            sizes += np.diff(_before(_sizes(rows))[self._before(path)])
        self._sizes = _before(sizes)

    def segments(self) -> Iterator[Segment]:
        """Yield segments of as many atoms as fit."""
        begin, count = 0, len(self._owners)
        while begin < count:
            end = int(np.searchsorted(self._sizes, self._sizes[begin] + most_bytes(), "right")) - 1
            end = min(max(begin + 1, end), begin + most_rows(), count)
            columns = {path: rows for path, rows in self._cut_columns(begin, end) if len(rows)}
            yield Segment(self._cut_fragments(begin, end), columns, int(self._sizes[end] - self._sizes[begin]))
            begin = end

    def _before(self, path: Path) -> Array:
        if path == ("starts",):
            return self._starts
        return self._observations if path[0] == "observations" else self._steps

    def _cut_columns(self, begin: int, end: int) -> Iterator[tuple[Path, AnyRows]]:
        for path, rows in self._columns.items():
            before = self._before(path)
            yield path, _cut(rows, int(before[begin]), int(before[end]))

    def _cut_fragments(self, begin: int, end: int) -> Array:
        first, last = int(self._owners[begin]), int(self._owners[end - 1])
        table = self._fragments[first : last + 1].copy()
        done, left = int(self._within[begin]), int(self._counts[last] - 1 - self._within[end - 1])
        if left:  # the data of its end goes to the part with the end
            table["steps"][-1] -= left
            table["flags"][-1] &= ~np.uint32(TERMINATED | TRUNCATED | STOPS | ENDS | PLACEHOLDER)
            for name in ("outcome", "duration", "clock_drift"):
                table[name][-1] = 0
        if done:
            steps = done - int(self._leads[first])
            table["steps"][0] -= steps
            table["first_step"][0] += steps
            table["flags"][0] &= ~np.uint32(STARTS | LEADS)
            for name in ("seed", "start_time", "clock_offset"):
                table[name][0] = 0
        return table


def _before(numbers: Array) -> Array:
    return np.concatenate([[0], np.cumsum(numbers, dtype=np.int64)])


def _sizes(rows: AnyRows) -> Array:
    """Return the bytes of each row."""
    if isinstance(rows, list):
        return np.fromiter(map(len, rows), np.int64, len(rows)) + wire.VALUE_SIZE
    size = rows.row_size if isinstance(rows, DeltaRows) else rows.nbytes // max(1, len(rows))
    return np.full(len(rows), size, np.int64)


def _cut(rows: AnyRows, begin: int, end: int) -> AnyRows:
    if not isinstance(rows, DeltaRows):
        return rows[begin:end]
    before = rows.before
    if begin:
        before = DeltaRows(rows.dtype, rows.shape, rows.slots[:begin], before).after()
    return DeltaRows(rows.dtype, rows.shape, rows.slots[begin:end], before)
