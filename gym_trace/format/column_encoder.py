"""Columns to bytes: filters under zstd, and the choice between them (docs/FORMAT.md, section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import zstandard

from gym_trace.errors import UnstorableValue
from gym_trace.format import transforms, wire
from gym_trace.format.columns import CHANGES, CONSTANT, MSGPACK, SHUFFLE, XOR, ZSTD, Column, Path, Piece
from gym_trace.model.deltas import DeltaRows
from gym_trace.model.values import Array

_SAMPLE_BYTES = 256 << 10  # on which the encodings of a column are tried
_LARGE_SAMPLE = 1 << 20  # of large rows, of which the first one, kept whole, must not outweigh the others
_PIECE_BYTES = 512 << 10  # of large rows are filtered and compressed at a time, while the processor's cache holds them
_CHANGES_BYTES = 4 << 20  # of rows that are compared at a time, which touches less memory
_LITTLE, _HARDER = 1024, 3  # bytes that change in a large row, so few that they can take so many levels of zstd more
_LITTLE_CHUNK = 256 << 10  # bytes of a chunk of such rows, about: zstd takes less memory, and looks more closely
_QUICK, _QUICK_SIZE = -1, 1.03  # a level several times as fast as 1: for columns that get hardly larger under it
_TELLING_BYTES = 16 << 10  # fewer do not tell how much larger
_WORTHWHILE = 0.98  # large rows that do not get smaller than this are not compressed at all
_LEAST_BYTES = 256  # fewer are not worth the call, which hands the interpreter lock to the loop being recorded
_LEAST_ROWS = 2  # fewer large rows do not tell what the next ones are like
_RETRY_AFTER = 64  # chunks, after which the encodings of a column are tried again


def is_large(rows: Array) -> bool:
    """Whether the rows are such as are best encoded piece by piece."""
    return len(rows) > 0 and _is_large(rows.nbytes // len(rows))


def _is_large(row_size: int) -> bool:
    return row_size >= wire.LARGE_ROW


class Workspace:
    """What encoders of columns share that take turns."""

    def __init__(self, level: int):
        self.level = level or 3  # which is what zstd takes 0 for
        self.compressor = zstandard.ZstdCompressor(level=self.level)
        self.compress: Callable[[Any], bytes] = self.compressor.compress
        self.compress_quickly: Callable[[Any], bytes] = self.compress
        if level == 1:  # which is to be quick
            self.compress_quickly = zstandard.ZstdCompressor(level=_QUICK).compress


class _Habit:
    """What has proved best for rows of one kind so far."""

    def __init__(self) -> None:
        self.encoding = 0
        self.compressible = True
        self.quick = False  # whether the quicker level does
        self.patience = 0  # chunks between trials; 0 before the first one
        self.until_trial = 0


class ColumnEncoder:
    """Encodes one column, chunk after chunk, under the encoding that has proved best on its rows."""

    def __init__(self, path: Path, workspace: Workspace):
        self._path = path
        self._workspace = workspace
        self._habits = (_Habit(), _Habit())  # of small rows, and of large ones
        self._compressors: dict[bool, zstandard.ZstdCompressor] = {}  # of streams, which do not take turns: if harder
        self._stream: _Stream | None = None
        self._changes_little = False  # the stream, if it is one of changes, and before it begins the last one

    def feed(self, rows: Array | DeltaRows) -> None:
        """Encodes some of the large rows of a chunk, of one dtype and shape; they are not to change until finish()."""
        if self._stream is None:
            shape = rows.shape if isinstance(rows, DeltaRows) else rows.shape[1:]
            row_size = rows.row_size if isinstance(rows, DeltaRows) else rows.nbytes // len(rows)
            encoding = self._choice(rows, row_size)
            self._stream = _Stream(self._stream_compressor(encoding), rows.dtype, shape, encoding)
        if isinstance(rows, DeltaRows):
            self._stream.feed_deltas(rows)
        else:
            self._stream.feed(transforms.as_bytes(rows))

    def finish(self) -> tuple[Column, list[Piece]]:
        """The column of all rows fed since the last call, its bytes in pieces."""
        stream, self._stream = self._stream, None
        assert stream is not None
        pieces = stream.finish()
        if self._changes_little and not stream.changes_little:  # it is time to see what suits the rows now
            self._habits[True].until_trial = 0
        self._changes_little = stream.changes_little
        column = self._column(stream.dtype.str, stream.shape, stream.rows, stream.encoding, stream.raw, pieces)
        return column, pieces

    def _stream_compressor(self, encoding: int) -> zstandard.ZstdCompressor:
        little = bool(encoding & CHANGES) and self._changes_little
        if little not in self._compressors:
            level = min(22, self._workspace.level + _HARDER * little) or 1  # 0 would be 3
            size = _LITTLE_CHUNK if little else 0  # not known
            parameters = zstandard.ZstdCompressionParameters.from_level(level, source_size=size)
            self._compressors[little] = zstandard.ZstdCompressor(compression_params=parameters)
        return self._compressors[little]

    def encode(self, rows: Array) -> tuple[Column, bytes]:
        """rows: any array of shape (rows, *row shape) and a plain little-endian or void dtype, C-contiguous."""
        if is_large(rows):
            self.feed(rows)
            column, pieces = self.finish()
            return column, b"".join(pieces)
        flat = transforms.as_bytes(rows)
        constant = len(flat) > 1 and flat.shape[1] > 0 and _all_rows_equal(flat)
        encoding, compress = 0, self._workspace.compress
        if constant:
            flat = flat[:1]
        else:
            encoding = self._choice(rows, flat.shape[1])
            if self._habits[False].quick:
                compress = self._workspace.compress_quickly
        filtered = _filter(flat, encoding, rows.dtype.itemsize)
        blob, encoding = _squeezed(filtered, flat, encoding, compress)
        dtype = f"|V{rows.dtype.itemsize}" if rows.dtype.names else rows.dtype.str
        return self._column(dtype, rows.shape[1:], len(rows), encoding | CONSTANT * constant, flat.size, [blob]), blob

    def encode_values(self, packed: list[bytes]) -> tuple[Column, bytes]:
        """packed: one MessagePack value a row."""
        constant = len(packed) > 1 and packed.count(packed[0]) == len(packed)
        if constant and len(packed) * (wire.VALUE_SIZE + len(packed[0])) <= wire.MAX_VALUES:
            raw = packed[0]
        else:
            constant = False
            raw = np.fromiter(map(len, packed), wire.LENGTH, len(packed)).tobytes() + b"".join(packed)
        if len(raw) > wire.MAX_VALUES:
            raise UnstorableValue(f"{'/'.join(map(str, self._path))}: {len(raw)} bytes at once, too many for a trace")
        blob, encoding = _squeezed(raw, raw, 0, self._workspace.compress)
        return self._column(MSGPACK, (), len(packed), encoding | CONSTANT * constant, len(raw), [blob]), blob

    def _column(
        self, dtype: str, shape: tuple[int, ...], rows: int, encoding: int, raw: int, pieces: Sequence[Piece]
    ) -> Column:
        crc = 0
        for piece in pieces:
            crc = crc32(piece, crc)
        return Column(self._path, dtype, shape, rows, encoding, sum(map(len, pieces)), raw, crc)

    def _choice(self, rows: Array | DeltaRows, row_size: int) -> int:
        """What proved smallest on a sample of these rows, tried again now and then; of small ones the filters alone."""
        large = _is_large(row_size)
        habit = self._habits[large]
        if large and len(rows) < _LEAST_ROWS:
            return habit.encoding | ZSTD * habit.compressible if habit.patience else CHANGES | ZSTD
        if large and isinstance(rows, DeltaRows):
            self._changes_little = rows.changed <= _LITTLE * len(rows)
        if large and self._changes_little and (isinstance(rows, DeltaRows) or habit.encoding == CHANGES):
            return CHANGES | ZSTD  # no other encoding is worth a trial
        if (
            rows.dtype.names and not large
        ):  # a table: not larger than by a tenth under this, in little more than half of the time
            return SHUFFLE
        habit.until_trial -= 1
        if habit.until_trial < 0 and len(rows) * row_size:
            tried = max(8, (_LARGE_SAMPLE if large else _SAMPLE_BYTES) // row_size)
            sample = next(rows.arrays(tried)) if isinstance(rows, DeltaRows) else transforms.as_bytes(rows[:tried])
            self._try(habit, sample, rows.dtype.itemsize)
            # A column that has just begun may not look like the rest of it: try the first chunks again soon.
            habit.patience = min(_RETRY_AFTER, 4 * habit.patience + 3)
            habit.until_trial = habit.patience
        return habit.encoding | ZSTD * (large and habit.compressible)

    def _try(self, habit: _Habit, sample: Array, item_size: int) -> None:
        """Chooses what makes the sample smallest."""
        sizes: dict[int, int] = {}
        for candidate in _candidates(sample, item_size):
            sizes[candidate] = self._size_under(candidate, sample, item_size)
            if candidate == CHANGES and self._changes_little:  # no other is worth it
                break
        # Transforms cost time: a costlier one has to be smaller by 2 %.
        best = min(sizes, key=lambda c: sizes[c] * (1 + 0.02 * c.bit_count()))
        habit.compressible = sizes[best] < _WORTHWHILE * sample.nbytes
        habit.encoding = best if habit.compressible else 0
        quick = self._workspace.compress_quickly
        if not _is_large(sample.shape[1]) and sample.nbytes >= _TELLING_BYTES:
            filtered = _filter(sample, habit.encoding, item_size)
            habit.quick = len(quick(filtered)) <= _QUICK_SIZE * sizes[best]

    def _size_under(self, encoding: int, sample: Array, item_size: int) -> int:
        workspace = self._workspace
        if not _is_large(sample.shape[1]):
            return len(workspace.compress(_filter(sample, encoding, item_size)))
        dtype, shape = np.dtype(f"V{item_size}"), (sample.shape[1] // item_size,)
        stream = _Stream(workspace.compressor, dtype, shape, encoding | ZSTD)
        stream.feed(sample)
        if encoding & CHANGES:
            self._changes_little = stream.changes_little
        return sum(map(len, stream.finish()))


def _squeezed(
    filtered: Array | bytes, plain: Array | bytes, encoding: int, compress: Callable[[Any], bytes]
) -> tuple[bytes, int]:
    size = filtered.nbytes if isinstance(filtered, np.ndarray) else len(filtered)
    if size >= _LEAST_BYTES:
        blob = compress(filtered)
        if len(blob) < size:
            return blob, encoding | ZSTD
    return plain.tobytes() if isinstance(plain, np.ndarray) else plain, 0


def _candidates(flat: Array, item_size: int) -> list[int]:
    """The encodings that may suit the rows."""
    shuffles = [SHUFFLE, SHUFFLE | XOR] if item_size > 1 else []
    return [*([CHANGES] if _is_large(flat.shape[1]) else []), 0, XOR, *shuffles]


def _all_rows_equal(flat: Array) -> bool:
    if flat[0].tobytes() != flat[-1].tobytes() or flat[0].tobytes() != flat[len(flat) // 2].tobytes():
        return False
    return bool((transforms.widest(flat[1:]) == transforms.widest(flat[:-1])).all())


def _filter(flat: Array, encoding: int, item_size: int) -> Array:
    """The bytes of flat under the transforms of encoding."""
    if encoding & XOR:
        flat = transforms.xor(flat, np.zeros(flat.shape[1], np.uint8), np.empty_like(flat))
    return transforms.shuffle(flat, item_size) if encoding & SHUFFLE else flat.reshape(-1)


class _Stream:
    """The large rows of one chunk, transformed and compressed as they come."""

    def __init__(
        self, compressor: zstandard.ZstdCompressor, dtype: np.dtype[Any], shape: tuple[int, ...], encoding: int
    ):
        self.dtype, self.shape, self.encoding = dtype, shape, encoding
        row_size = dtype.itemsize * math.prod(shape)
        self.rows = self.raw = 0
        self._object = compressor.compressobj() if encoding & ZSTD else None
        self._pieces: list[Piece] = []
        self._step = max(1, (_CHANGES_BYTES if encoding & CHANGES else _PIECE_BYTES) // row_size)
        self._room = np.empty((self._step if encoding & (XOR | CHANGES) else 0, row_size), np.uint8)
        self._before = np.zeros(row_size, np.uint8)

    def feed(self, flat: Array) -> None:
        if self.rows == 0 and self.encoding & CHANGES:  # the first row is kept whole
            self._add(flat[0])
            self._before[:] = flat[0]
            self.rows, flat = 1, flat[1:]
        for i in range(0, len(flat), self._step):
            self._add(self._transformed(flat[i : i + self._step]))
        self.rows += len(flat)

    def feed_deltas(self, frames: DeltaRows) -> None:
        if not self.encoding & CHANGES:
            for piece in frames.arrays(self._step):
                self.feed(piece)
            return
        skip = self.rows == 0
        if skip:
            (first,) = next(frames.arrays(1))
            self._add(first)
        slots = frames.slots[skip:]
        whole = sum(isinstance(slot, bytes) for slot in slots)
        step = self._step if whole > self._step else len(slots)  # of whole ones the places take up to 8 times as much
        for i in range(0, len(slots), step or 1):
            self._add(transforms.packed_changes(slots[i : i + step], frames.row_size))
        self.rows += len(frames)

    def _transformed(self, piece: Array) -> Array | bytes:
        room, before, last = self._room[: len(piece)], self._before, piece[-1]
        if self.encoding & CHANGES:
            result: Array | bytes = transforms.changes(piece, before, room.view(np.bool_))
        else:
            if self.encoding & XOR:
                piece = transforms.xor(piece, before, room)
            result = transforms.shuffle(piece, self.dtype.itemsize) if self.encoding & SHUFFLE else piece
        before[:] = last
        return result

    def _add(self, data: Array | bytes) -> None:
        raw = memoryview(data if isinstance(data, bytes) else data.data).cast("B")
        self.raw += len(raw)
        if self._object is not None:
            self._pieces.append(self._object.compress(raw))
        else:
            self._pieces.append(bytes(raw) if self.encoding & XOR else raw)  # which is made in room that is used again

    @property
    def changes_little(self) -> bool:
        """Whether rows are kept as changes, and these are few."""
        return bool(self.encoding & CHANGES) and self.rows > 1 and self.raw - len(self._before) <= _LITTLE * self.rows

    def finish(self) -> list[Piece]:
        if self._object is not None:
            self._pieces.append(self._object.flush())
        return self._pieces
