"""Join segments into chunks, and split what readers would reject as too large (docs/FORMAT.md, section 9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.deltas import DeltaRows
from gym_trace.data.layout import Path
from gym_trace.data.packing import pack, unpack
from gym_trace.data.returns import numbers_of
from gym_trace.data.values import ABSENT, Array
from gym_trace.data.vocabulary import OPTIONAL_ROOTS
from gym_trace.format import wire
from gym_trace.format.batch_files import BatchFiles
from gym_trace.format.columns import STEP_COLUMNS, LargeRows, is_large
from gym_trace.format.ring.segment import AnyRows, ColumnRows, Columns, Segment, size_of
from gym_trace.format.wire import ENDS, HAS_INITIAL, PLACEHOLDER, STARTS, STOPS, TERMINATED, TRUNCATED

SMALL_CHUNK, LARGE_CHUNK = 1 << 20, 24 << 20  # raw bytes per chunk, without and with large values
FULL_CHUNK = 9 << 20  # same for compacted small rows: eight chunks of a recorder, with their fragments
FULL_ROWS = 80_000  # rows of a compacted chunk: to read one episode, columns that are not in blocks are decoded whole
_SMALL_GROUP, _LARGE_GROUP = 1 << 19, 3 << 19  # minimum raw bytes of a group of lanes, without and with large values
_VALUE_MEMORY = wire.VALUE_SIZE + 24  # estimated bytes in memory of a small MessagePack value
_MAX_DIMENSIONS = 32
_EXACT = 1 << 53  # float64 holds integers up to this exactly
PACKED_ABSENT = pack(ABSENT)


class _RowType(NamedTuple):
    """Dtype and shape of the rows of a column; dtype is None for MessagePack values."""

    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] = ()
    large: bool = False


class ChunkWriter:
    """Joins segments into chunks and writes them. Large rows, such as images, are encoded part by part, not joined.

    Args:
        open_writer: opens the writer's files; called with the first segment.
        chunk_bytes: raw size at which a chunk is written; None: SMALL_CHUNK or LARGE_CHUNK.
        is_edit: True for segments from chunks: their fragments, reward sums and column types stay as they are.
        fills_chunks: True to write chunks of full_size(), or of FULL_ROWS.
    """

    def __init__(
        self,
        open_writer: Callable[[], BatchFiles],
        chunk_bytes: int | None,
        is_edit: bool = False,
        fills_chunks: bool = False,
    ):
        self.writer: BatchFiles | None = None
        self._open_writer = open_writer
        self._chunk_bytes = chunk_bytes
        self._is_edit, self._fills_chunks = is_edit, fills_chunks
        self._slab = 0  # sequence number of the chunk's slab; 0 for none
        self._is_later_chunk = False  # True if another chunk of the same slab precedes
        self._parts: list[tuple[Array, Columns]] = []  # fragments and small rows since the last chunk
        self._large: dict[Path, LargeRows] = {}  # large rows since the last chunk
        self._size = self._decoded_bytes = self._rows = self._values = 0
        self._row_types: dict[Path, _RowType] = {}  # by column of the chunk

    def add(self, segment: Segment) -> None:
        """Add a segment; write the chunk when it is full. Raises OSError."""
        for part in [segment] if self._is_edit else split_to_limits(segment):
            self._add(part)

    def _add(self, segment: Segment) -> None:
        row_types = {path: _row_type(rows) for path, rows in segment.columns.items()}
        count, decoded, values = rows_in(segment), decoded_bytes(segment), value_bytes(segment)
        full = self._full_size(row_types, self._values + values)
        is_full = self._size + segment.size > full or self._decoded_bytes + decoded > most_bytes()
        is_full = is_full or self._rows + count > (FULL_ROWS if self._fills_chunks else most_rows())
        if self._is_edit:
            is_full = is_full or not self._has_same_types(row_types)
        elif self._parts and row_types != self._row_types:  # columns of mixed types become MessagePack values
            values = (self._rows + count) * len({**row_types, **self._row_types})
            is_full = is_full or values * _VALUE_MEMORY > most_bytes() or self._cannot_join(row_types)
        if is_full:
            self.write(more=True)
        if self.writer is None:
            self.writer = self._open_writer()
        small: Columns = {}
        for path, rows in segment.columns.items():
            if isinstance(rows, DeltaRows) or (isinstance(rows, np.ndarray) and row_types[path].large):
                self._large.setdefault(path, LargeRows([], self._is_later_chunk)).parts.append(rows)
            else:
                small[path] = rows
        self._row_types.update(row_types)
        self._parts.append((segment.fragments, small))
        self._size += segment.size
        self._decoded_bytes += decoded
        self._rows += count
        self._values += values

    def _full_size(self, row_types: dict[Path, _RowType], values: int) -> int:
        """Return the raw size at which a chunk with these columns, and this size of its values, is full."""
        if self._chunk_bytes is not None:
            return self._chunk_bytes
        is_large = any(row_type.large for row_type in (*row_types.values(), *self._row_types.values()))
        if self._fills_chunks:
            return full_size(is_large, values)
        return LARGE_CHUNK if is_large else SMALL_CHUNK

    def _has_same_types(self, row_types: dict[Path, _RowType]) -> bool:
        """Return True if the columns of the chunk have these types. Segments without steps lack columns of steps."""
        own, other = ({path for path in types if path[0] in STEP_COLUMNS} for types in (self._row_types, row_types))
        is_same = not (own and other) or own == other
        return is_same and all(self._row_types.get(path, row_type) == row_type for path, row_type in row_types.items())

    def _cannot_join(self, row_types: dict[Path, _RowType]) -> bool:
        """Return True if a column would mix large rows with other rows, or with missing annotations."""
        new_large, own_large = (
            {path: row_type for path, row_type in types.items() if row_type.large}
            for types in (row_types, self._row_types)
        )
        shared = (
            path
            for path in {**new_large, **own_large}
            if path[0] in OPTIONAL_ROOTS or path in row_types.keys() & self._row_types
        )
        return any(new_large.get(path) != own_large.get(path) for path in shared)

    def write_slab(self, sequence: int, segments: list[Segment], pending: Sequence[Any]) -> None:
        """Write the segments of a slab; seal the batch if due. Raises OSError.

        pending: descriptions of the pending actions, for the metadata.
        """
        self._slab, self._is_later_chunk = sequence, False
        for number, group in enumerate(split_by_lanes(segments)):
            if number:
                self.write(more=True)
            for segment in group:
                self.add(segment)
        self.write(pending=pending)
        if self.writer is not None:
            self.writer.seal_if_due()

    def write(self, more: bool = False, pending: Sequence[Any] = ()) -> None:
        """Write everything added since the last chunk. Raises OSError.

        more: True if another chunk of the same slab follows. pending: see BatchFiles.write().
        """
        if self._parts and self.writer is not None:
            fragments, columns = _joined(self._parts, self._is_edit)
            large, self._large = self._large, {}
            self._parts, self._row_types = [], {}
            self._size = self._decoded_bytes = self._rows = self._values = 0
            if not self._is_edit:
                add_reward_sums(columns.get(("rewards",)), fragments)
            self.writer.write(fragments, {**large, **columns}, (self._slab, more) if self._slab else None, pending)
            self._is_later_chunk = more and self._slab > 0
            if self._is_edit:
                self.writer.seal_if_due()


def _row_type(rows: AnyRows) -> _RowType:
    if isinstance(rows, list):
        return _RowType()
    if isinstance(rows, DeltaRows):
        return _RowType(rows.dtype, rows.shape, large=True)
    return _RowType(rows.dtype, rows.shape[1:], is_large(rows))


def _joined(parts: list[tuple[Array, Columns]], is_edit: bool) -> tuple[Array, Columns]:
    """Join consecutive parts. A fragment that continues the previous part's last fragment is merged into it."""
    if len(parts) == 1:
        return parts[0]
    tables = [fragments for fragments, _ in parts]
    table, steps_of_parts = (wire.join_fragments(tables), [0] * len(parts)) if is_edit else _joined_tables(tables)
    joined: Columns = {}
    for path in dict.fromkeys(path for _, columns in parts for path in columns):
        all_rows = [columns.get(path) for _, columns in parts]
        if path[0] in OPTIONAL_ROOTS:  # a part with steps may lack an annotation of another part
            absent = [[PACKED_ABSENT] * steps if steps else None for steps in steps_of_parts]
            all_rows = [other if rows is None else rows for rows, other in zip(all_rows, absent)]
        joined[path] = joined_rows([rows for rows in all_rows if rows is not None])
    return table, joined


def _joined_tables(tables: list[Array]) -> tuple[Array, list[int]]:
    """Join fragment tables; return the joined table and the number of steps in each of the tables."""
    table = wire.join_fragments(tables)
    ends = np.cumsum([len(part) for part in tables])
    steps = np.append(0, np.cumsum(table["steps"], dtype=np.int64))
    steps_of_tables = np.diff(steps[ends], prepend=0).tolist()
    begins = ends[:-1]  # starts of all nonempty tables except the first; np.unique would import numpy.ma
    begins = begins[(np.diff(ends) > 0) & (begins > 0)]
    before, after = table[begins - 1], table[begins]
    continues = (before["episode"] == after["episode"]) & (before["flags"] & STOPS == 0)
    continues &= (before["flags"] & HAS_INITIAL | before["steps"]) != 0
    continues &= after["flags"] & (STARTS | HAS_INITIAL) == 0
    if not continues.any():
        return table, steps_of_tables
    is_first = np.ones(len(table), np.bool_)
    is_first[begins[continues]] = False
    first = np.flatnonzero(is_first)
    joined = table.take(np.append(first[1:], len(table)) - 1)  # fancy indexing copies structured rows field by field
    for name in ("first_step", "seed", "start_time", "clock_offset"):
        joined[name] = table[name][first]
    joined["steps"] = np.add.reduceat(table["steps"], first)
    joined["flags"] = np.bitwise_or.reduceat(table["flags"], first)
    return joined, steps_of_tables


def joined_rows(parts: Sequence[ColumnRows]) -> ColumnRows:
    """Join the rows of one column: typed if dtype and shape agree, otherwise one MessagePack value per row."""
    arrays = [rows for rows in parts if isinstance(rows, np.ndarray)]
    if len(arrays) == len(parts):
        first = arrays[0]
        if all(array.dtype == first.dtype and array.shape[1:] == first.shape[1:] for array in arrays):
            return np.concatenate(arrays)
    values: list[bytes] = []
    for rows in parts:
        values += [pack(value) for value in rows] if isinstance(rows, np.ndarray) else rows
    return values


def add_reward_sums(rewards: ColumnRows | None, fragments: Array) -> None:
    """Set the reward sum of each fragment; NaN if rewards is None: they are large."""
    filled = np.flatnonzero(fragments["steps"])
    if filled.size:
        steps = fragments["steps"].astype(np.int64)
        if isinstance(rewards, np.ndarray) and rewards.strides == (0,):  # equal rewards
            reward = float(_numbers(rewards[:1])[0])
            if reward.is_integer() and abs(reward) * len(rewards) < _EXACT:
                fragments["reward_sum"][filled] = reward * steps[filled]
                return
        begins = (np.cumsum(steps) - steps)[filled]
        with np.errstate(all="ignore"):  # rewards may be infinite, or NaN
            numbers = (
                np.full(steps.sum(), np.nan) if rewards is None else _numbers(rewards).astype(np.float64, copy=False)
            )
            fragments["reward_sum"][filled] = np.add.reduceat(numbers, begins)


def _numbers(rewards: ColumnRows) -> Array:
    return numbers_of(rewards if isinstance(rewards, np.ndarray) else list(map(unpack, rewards)))


def full_size(is_large: bool, values: int) -> int:
    """Return the raw size of a compacted chunk. is_large: it has large rows. values: value_bytes() of its values."""
    return LARGE_CHUNK if is_large else SMALL_CHUNK if values > SMALL_CHUNK else FULL_CHUNK


# -- splitting -------------------------------------------------------------------------------------------------------


def most_rows() -> int:
    """Return the maximum number of rows and fragments in a chunk."""
    return min(wire.MAX_TABLE, wire.MAX_ROWS) // 2


def most_bytes() -> int:
    """Return the maximum of decoded_bytes() in a chunk of several rows: low enough for every column encoding."""
    return min(wire.MAX_VALUES // 2, wire.MAX_COLUMN // 8, wire.CHUNK_BYTES // 4)


def decoded_bytes(segment: Segment) -> int:
    """Return the bytes of a segment, with the overhead per MessagePack value."""
    return segment.size + wire.VALUE_SIZE * sum(len(r) for r in segment.columns.values() if isinstance(r, list))


def value_bytes(segment: Segment) -> int:
    """Return the bytes of the MessagePack values of a segment, with the overhead per value: they have no blocks."""
    return sum(size_of(r) + wire.VALUE_SIZE * len(r) for r in segment.columns.values() if isinstance(r, list))


def rows_in(segment: Segment) -> int:
    """Return an upper bound on the rows and fragments of a segment."""
    return len(segment.fragments) + max(map(len, segment.columns.values()), default=0)


def split_by_lanes(segments: list[Segment]) -> list[list[Segment]]:
    """Split the segments of a slab into groups of lanes for separate chunks, so that reading an episode decodes less.

    A group has at least _LARGE_GROUP bytes if rows are large, or _SMALL_GROUP, so that scans do not become slower.
    """
    is_large = any(_row_type(rows).large for segment in segments for rows in segment.columns.values())
    most_groups = sum(segment.size for segment in segments) // (_LARGE_GROUP if is_large else _SMALL_GROUP)
    if most_groups < 2:
        return [segments]
    tables = [np.ascontiguousarray(segment.fragments["lane"]) for segment in segments]
    if not all(bool((table[1:] >= table[:-1]).all()) for table in tables):
        return [segments]
    lanes = _distinct(np.sort(np.concatenate([_distinct(table) for table in tables])))
    bounds = lanes[:: -(-len(lanes) // most_groups)][1:]
    if not len(bounds):
        return [segments]
    parts = [_by_lanes(segment, bounds) for segment in segments]
    return [[part for part in group if len(part.fragments)] for group in zip(*parts)]


def _distinct(ascending: Array) -> Array:
    distinct: Array = ascending[np.diff(ascending, prepend=-1) != 0]  # np.unique would import numpy.ma
    return distinct


def _by_lanes(segment: Segment, bounds: Array) -> list[Segment]:
    """Split a segment, whose fragments are ordered by lane, before each lane in bounds."""
    table = segment.fragments
    cuts = [0, *np.searchsorted(table["lane"], bounds).tolist(), len(table)]
    steps = _prefix_sums(table["steps"])
    observations = steps + _prefix_sums(table["flags"] & HAS_INITIAL != 0)
    starts = _prefix_sums(table["flags"] & STARTS != 0)
    parts = []
    for begin, end in pairwise(cuts):
        columns: dict[Path, AnyRows] = {}
        for path, rows in segment.columns.items():
            before = starts if path == ("starts",) else observations if path[0] == "observations" else steps
            if before[begin] < before[end]:
                columns[path] = _cut(rows, int(before[begin]), int(before[end]))
        size = table[begin:end].nbytes + sum(map(size_of, columns.values()))
        parts.append(Segment(table[begin:end], columns, size))
    return parts


def split_to_limits(segment: Segment) -> Iterator[Segment]:
    """Split a segment into segments that each fit a chunk. Yield it unchanged if it is small enough."""
    if any(isinstance(rows, np.ndarray) and rows.ndim > _MAX_DIMENSIONS + 1 for rows in segment.columns.values()):
        columns = {path: _as_values(rows) for path, rows in segment.columns.items()}
        segment = segment._replace(columns=columns)
    if decoded_bytes(segment) <= most_bytes() and rows_in(segment) <= most_rows():
        yield segment
    else:
        yield from _Splitter(segment).segments()


def _as_values(rows: AnyRows) -> AnyRows:
    return [pack(row) for row in rows] if isinstance(rows, np.ndarray) and rows.ndim > _MAX_DIMENSIONS + 1 else rows


class _Splitter:
    """Splits a segment between its smallest parts: initial observations, steps, and fragments that have neither."""

    def __init__(self, segment: Segment):
        self._columns = segment.columns
        self._fragments = table = segment.fragments
        self._has_initial = (table["flags"] & HAS_INITIAL != 0).astype(np.int64)
        self._counts = np.maximum(1, self._has_initial + table["steps"])  # parts of each fragment
        ends = np.cumsum(self._counts)
        # The fragment of each part, and the index of the part in it.
        self._owners = np.repeat(np.arange(len(table)), self._counts)
        self._within = np.arange(ends[-1]) - np.repeat(ends - self._counts, self._counts)
        first = self._within == 0
        is_initial = first & (self._has_initial != 0)[self._owners]
        is_step = ~is_initial & (table["steps"] != 0)[self._owners]
        # Number of rows of each kind before each part.
        self._starts = _prefix_sums(first & (table["flags"] & STARTS != 0)[self._owners])
        self._observations, self._steps = _prefix_sums(is_initial | is_step), _prefix_sums(is_step)
        sizes = first * wire.FRAGMENT.itemsize
        for path, rows in segment.columns.items():
            sizes += np.diff(_prefix_sums(_sizes(rows))[self._rows_before(path)])
        self._sizes = _prefix_sums(sizes)

    def segments(self) -> Iterator[Segment]:
        """Yield segments of as many parts as fit."""
        begin, count = 0, len(self._owners)
        while begin < count:
            end = int(np.searchsorted(self._sizes, self._sizes[begin] + most_bytes(), "right")) - 1
            end = min(max(begin + 1, end), begin + most_rows(), count)
            columns = {path: rows for path, rows in self._cut_columns(begin, end) if len(rows)}
            yield Segment(self._cut_fragments(begin, end), columns, int(self._sizes[end] - self._sizes[begin]))
            begin = end

    def _rows_before(self, path: Path) -> Array:
        if path == ("starts",):
            return self._starts
        return self._observations if path[0] == "observations" else self._steps

    def _cut_columns(self, begin: int, end: int) -> Iterator[tuple[Path, AnyRows]]:
        for path, rows in self._columns.items():
            before = self._rows_before(path)
            yield path, _cut(rows, int(before[begin]), int(before[end]))

    def _cut_fragments(self, begin: int, end: int) -> Array:
        first, last = int(self._owners[begin]), int(self._owners[end - 1])
        table = self._fragments[first : last + 1].copy()
        # Number of smallest parts of the first fragment before `begin`, and of the last one from `end` on.
        done, left = int(self._within[begin]), int(self._counts[last] - 1 - self._within[end - 1])
        if left:  # only the segment with the last step has the fields for the end of the fragment
            table["steps"][-1] -= left
            table["flags"][-1] &= ~np.uint32(TERMINATED | TRUNCATED | STOPS | ENDS | PLACEHOLDER)
            for name in ("outcome", "duration", "clock_drift"):
                table[name][-1] = 0
        if done:
            steps = done - int(self._has_initial[first])
            table["steps"][0] -= steps
            table["first_step"][0] += steps
            table["flags"][0] &= ~np.uint32(STARTS | HAS_INITIAL)
            for name in ("seed", "start_time", "clock_offset"):
                table[name][0] = 0
        return table


def _prefix_sums(numbers: Array) -> Array:
    """Return the sum of the numbers before each index, and at the end the sum of all."""
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
