"""Segments gathered to chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gym_trace.format import wire
from gym_trace.format.column_encoder import is_large
from gym_trace.format.trace_writer import TraceWriter
from gym_trace.model.deltas import FrameRows
from gym_trace.model.layout import Path
from gym_trace.model.packing import pack, unpack
from gym_trace.model.returns import numbers_of
from gym_trace.model.values import ABSENT, Array
from gym_trace.recording.segment import Columns, Rows, Segment
from gym_trace.recording.splitting import decoded_bytes, most_bytes, most_rows, readable, rows_in

SMALL_CHUNK, FRAME_CHUNK = 1 << 20, 24 << 20  # raw bytes a chunk, without and with frames
_CELL = wire.VALUE_SIZE + 24  # bytes that a small row of a column counts as a value


class ChunkWriter:
    """Joins segments to chunks and writes them. Large rows, such as images, are encoded at once, and not kept.

    Args:
        open_writer: makes the files when there is something to write.
        chunk_bytes: how much makes a chunk.
    """

    def __init__(self, open_writer: Callable[[], TraceWriter], chunk_bytes: int):
        self.writer: TraceWriter | None = None
        self._open_writer = open_writer
        self.chunk_bytes = chunk_bytes
        self.chunks = 0  # written so far
        self._pieces: list[tuple[Array, Columns]] = []
        self._size = self._decoded = self._rows = 0
        self._kinds: dict[Path, object] = {}  # of each column so far: dtype and row shape if its rows are large
        self._forms: dict[Path, object] = {}  # likewise, of all: these, or that they are values

    def add(self, segment: Segment) -> None:
        """Adds a segment to the chunk, and writes that when it is full. Raises OSError."""
        for part in readable(segment):
            self._add(part)

    def _add(self, segment: Segment) -> None:
        kinds = {path: _kind(rows) for path, rows in segment.columns.items()}
        mixed = any(self._kinds.get(path, kind) != kind for path, kind in kinds.items())
        if self._pieces:  # rows that lack an annotation can be filled in only where it is not large
            names = {path for path in (*kinds, *self._kinds) if path[0] == "annotations"}
            mixed = mixed or any(self._kinds.get(path) != kinds.get(path) for path in names)
        count, decoded = rows_in(segment), decoded_bytes(segment)
        forms = {path: _form(rows) for path, rows in segment.columns.items()}
        is_full = self._size + segment.size > self.chunk_bytes or self._decoded + decoded > most_bytes()
        is_full = is_full or self._rows + count > most_rows()
        if self._pieces and forms != self._forms:  # what is typed in one and not in the other becomes values
            cells = (self._rows + count) * len({**forms, **self._forms})
            is_full = is_full or cells * _CELL > most_bytes()
        if mixed or is_full:  # large rows of two kinds cannot be in one column
            self.write()
        if self.writer is None:
            self.writer = self._open_writer()
        small: Columns = {}
        for path, rows in segment.columns.items():
            if isinstance(rows, FrameRows) or (isinstance(rows, np.ndarray) and is_large(rows)):
                self.writer.feed(path, rows)
            else:
                small[path] = rows
        self._kinds.update(kinds)
        self._forms.update(forms)
        self._pieces.append((segment.fragments, small))
        self._size += segment.size
        self._decoded += decoded
        self._rows += count
        if self._size >= self.chunk_bytes:
            self.write()

    def write(self) -> None:
        """Writes what was added since the last chunk. Raises OSError."""
        if self._pieces and self.writer is not None:
            fragments, columns = _joined(self._pieces)
            self._pieces, self._kinds, self._forms = [], {}, {}
            self._size = self._decoded = self._rows = 0
            _add_up(columns.get(("rewards",)), fragments)
            self.writer.write(fragments, columns)
            self.chunks += 1


def _form(rows: Rows) -> object:
    if isinstance(rows, FrameRows):
        return rows.dtype, rows.shape
    return (rows.dtype, rows.shape[1:]) if isinstance(rows, np.ndarray) else list


def _kind(rows: Rows) -> object:
    large = isinstance(rows, FrameRows) or (isinstance(rows, np.ndarray) and is_large(rows))
    return _form(rows) if large else None


def _joined(pieces: list[tuple[Array, Columns]]) -> tuple[Array, Columns]:
    """One fragment table and one set of columns for consecutive pieces; fragments that go on become one."""
    if len(pieces) == 1:
        return pieces[0]
    table, totals = _joined_tables([fragments for fragments, _ in pieces])
    joined: Columns = {}
    for path in dict.fromkeys(path for _, columns in pieces for path in columns):
        parts = [columns.get(path) for _, columns in pieces]
        if path[0] == "annotations":  # a piece may lack one that others have
            parts = [[PACKED_ABSENT] * steps if part is None else part for part, steps in zip(parts, totals)]
        joined[path] = joined_rows([part for part in parts if part is not None])
    return table, joined


def _joined_tables(tables: list[Array]) -> tuple[Array, list[int]]:
    """The fragment tables as one, and how many steps each of them had."""
    table = wire.join_fragments(tables)
    ends = np.cumsum([len(piece) for piece in tables])
    steps = np.append(0, np.cumsum(table["steps"], dtype=np.int64))
    totals = np.diff(steps[ends], prepend=0).tolist()
    begins = ends[:-1]  # of tables but the first one, each once, where they have rows; np.unique would load numpy.ma
    begins = begins[(np.diff(ends) > 0) & (begins > 0)]
    before, after = table[begins - 1], table[begins]
    goes_on = (before["episode"] == after["episode"]) & (before["flags"] & wire.STOPS == 0)
    goes_on &= (before["flags"] & wire.LEADS | before["steps"]) != 0
    goes_on &= after["flags"] & (wire.STARTS | wire.LEADS) == 0
    if not goes_on.any():
        return table, totals
    is_first = np.ones(len(table), np.bool_)
    is_first[begins[goes_on]] = False
    first = np.flatnonzero(is_first)
    joined = table.take(np.append(first[1:], len(table)) - 1)  # fancy indexing copies structured rows field by field
    for name in ("first_step", "seed", "start_time", "clock_offset"):
        joined[name] = table[name][first]
    joined["steps"] = np.add.reduceat(table["steps"], first)
    joined["flags"] = np.bitwise_or.reduceat(table["flags"], first)
    return joined, totals


def joined_rows(pieces: Sequence[Array | list[bytes]]) -> Array | list[bytes]:
    """Rows of one column as one: typed if all are alike, otherwise one MessagePack value a row."""
    arrays = [piece for piece in pieces if isinstance(piece, np.ndarray)]
    if len(arrays) == len(pieces):
        first = arrays[0]
        if all(array.dtype == first.dtype and array.shape[1:] == first.shape[1:] for array in arrays):
            return np.concatenate(arrays)
    values: list[bytes] = []
    for piece in pieces:
        values += [pack(value) for value in piece] if isinstance(piece, np.ndarray) else piece
    return values


def _add_up(rewards: Array | list[bytes] | None, fragments: Array) -> None:
    """Sets the reward sum of each fragment; the rewards, None if they are large, are those of their steps in turn."""
    filled = np.flatnonzero(fragments["steps"])
    if filled.size:
        steps = fragments["steps"].astype(np.int64)
        begins = (np.cumsum(steps) - steps)[filled]
        with np.errstate(all="ignore"):  # rewards may be anything, and so may their sum
            numbers = (
                np.full(steps.sum(), np.nan) if rewards is None else _numbers(rewards).astype(np.float64, copy=False)
            )
            fragments["reward_sum"][filled] = np.add.reduceat(numbers, begins)


def _numbers(rewards: Array | list[bytes]) -> Array:
    return numbers_of(rewards if isinstance(rewards, np.ndarray) else list(map(unpack, rewards)))


PACKED_ABSENT = pack(ABSENT)
