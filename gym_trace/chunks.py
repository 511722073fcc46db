"""Segments gathered to chunks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gym_trace.encoder import Rows, Segment
from gym_trace.format import wire
from gym_trace.format.codec import is_large
from gym_trace.format.writer import TraceWriter
from gym_trace.layout import Path
from gym_trace.values import ABSENT, Array, pack


class ChunkWriter:
    """Joins segments to chunks and writes them. Large rows, such as images, are encoded at once, and not kept.

    Args:
        open_writer: makes the files when there is something to write.
        chunk_bytes: how much makes a chunk.
    """

    def __init__(self, open_writer: Callable[[], TraceWriter], chunk_bytes: int):
        self.writer: TraceWriter | None = None
        self._open_writer = open_writer
        self._chunk_bytes = chunk_bytes
        self._segments: list[Segment] = []
        self._size = 0
        self._kinds: dict[Path, object] = {}  # of each column so far: dtype and row shape if its rows are large

    def add(self, segment: Segment) -> None:
        """Adds a segment to the chunk, and writes that when it is full. Raises OSError."""
        kinds = {path: _kind(rows) for path, rows in segment.columns.items()}
        if any(self._kinds.get(path, kind) != kind for path, kind in kinds.items()):
            self.write()  # large rows of two kinds cannot be in one column
        if self.writer is None:
            self.writer = self._open_writer()
        for path, kind in kinds.items():
            if kind is not None:
                rows = segment.columns.pop(path)
                assert isinstance(rows, np.ndarray)
                self.writer.feed(path, rows)
        self._kinds.update(kinds)
        self._segments.append(segment)
        self._size += segment.size
        if self._size >= self._chunk_bytes:
            self.write()

    def write(self) -> None:
        """Writes what was added since the last chunk. Raises OSError."""
        if self._segments and self.writer is not None:
            fragments, columns = _joined(self._segments)
            self._segments, self._size, self._kinds = [], 0, {}
            self.writer.write(fragments, columns)


def _kind(rows: Rows) -> object:
    return (rows.dtype, rows.shape[1:]) if isinstance(rows, np.ndarray) and is_large(rows) else None


def _joined(segments: list[Segment]) -> tuple[Array, dict[Path, Rows]]:
    """One fragment table and one set of columns for consecutive segments; fragments that go on become one."""
    tables, totals = _joined_tables([segment.fragments for segment in segments])
    if len(segments) == 1:
        return tables, segments[0].columns
    columns: dict[Path, Rows] = {}
    for path in dict.fromkeys(path for segment in segments for path in segment.columns):
        pieces = [segment.columns.get(path) for segment in segments]
        if path[0] == "annotations":  # a segment may lack one that others have
            pieces = [
                [_PACKED_ABSENT] * steps if piece is None else piece for piece, steps in zip(pieces, totals)
            ]  # fmt: skip
        columns[path] = _joined_rows([piece for piece in pieces if piece is not None])
    return tables, columns


def _joined_tables(tables: list[Array]) -> tuple[Array, list[int]]:
    """The fragment tables as one, and how many steps each of them had."""
    steps = [int(table["steps"].sum()) for table in tables]
    table = np.concatenate(tables)
    begins = np.cumsum([len(piece) for piece in tables])[:-1]
    gone = []
    for i in begins[(begins > 0) & (begins < len(table))].tolist():
        before, after = table[i - 1], table[i]
        goes_on = before["episode"] == after["episode"] and not before["flags"] & wire.STOPS
        if (
            goes_on
            and before["flags"] & wire.LEADS | before["steps"]
            and not after["flags"] & (wire.STARTS | wire.LEADS)
        ):
            for name in ("first_step", "seed", "start_time", "clock_offset"):
                after[name] = before[name]
            after["steps"] += before["steps"]
            with np.errstate(all="ignore"):
                after["reward_sum"] += before["reward_sum"]
            after["flags"] |= before["flags"]
            gone.append(i - 1)
    return np.delete(table, gone), steps


def _joined_rows(pieces: list[Rows]) -> Rows:
    arrays = [piece for piece in pieces if isinstance(piece, np.ndarray)]
    if len(arrays) == len(pieces):
        first = arrays[0]
        if all(array.dtype == first.dtype and array.shape[1:] == first.shape[1:] for array in arrays):
            return np.concatenate(arrays)
    values: list[bytes] = []
    for piece in pieces:
        values += [pack(value) for value in piece] if isinstance(piece, np.ndarray) else piece
    return values


_PACKED_ABSENT = pack(ABSENT)
