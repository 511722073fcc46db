"""Columns as bytes: filters under zstd, and the choice between them (docs/FORMAT.md, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import zstandard

from gym_trace.errors import CorruptTrace, UnstorableValue
from gym_trace.format import transforms, wire
from gym_trace.format.buffers import Buffers, common
from gym_trace.frames import FrameRows
from gym_trace.values import Array, dtype_from, objects, unpack

ZSTD, SHUFFLE, XOR, CONSTANT, CHANGES = 1, 2, 4, 8, 16
MSGPACK = "msgpack"
_MAX_WINDOW = 128 << 20
_VALUE_SIZE = 64  # bytes that a decoded value takes at least, if it is no more than that
_SAMPLE_BYTES = 128 << 10  # on which the encodings of a column are tried
_LARGE_SAMPLE = 1 << 20  # of large rows, of which the first one, kept whole, must not outweigh the others
_PIECE_BYTES = 512 << 10  # of large rows are filtered and compressed at a time, while the processor's cache holds them
_CHANGES_BYTES = 4 << 20  # of rows that are compared at a time, which touches less memory
_LITTLE, _HARDER = 1024, 4  # bytes that change in a large row, so few that they can take so many levels of zstd more
_WORTHWHILE = 0.98  # large rows that do not get smaller than this are not compressed at all
_LEAST_BYTES = 256  # fewer are not worth the call, which hands the interpreter lock to the loop being recorded
_LEAST_ROWS = 2  # fewer large rows do not tell what the next ones are like
_RETRY_AFTER = 64  # chunks, after which the encodings of a column are tried again

Path = tuple[str | int, ...]
Piece = bytes | memoryview


class Column(NamedTuple):
    """How one column lies in a record: the descriptor of docs/FORMAT.md."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    rows: int
    encoding: int
    stored: int
    raw: int
    crc: int

    def descriptor(self) -> list[Any]:
        """As it is stored: of plain arrays, because a tuple would become an extension type."""
        return [list(self.path), self.dtype, list(self.shape), *self[3:]]

    @property
    def row_size(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * _item_size(self.dtype)

    @property
    def full_size(self) -> int:
        """Bytes that all rows take once decoded; of a msgpack column, the bytes of its values."""
        if self.dtype != MSGPACK:
            return self.rows * self.row_size
        return self.rows * self.raw if self.encoding & CONSTANT else self.raw


def _item_size(dtype: str) -> int:
    return int(dtype[2:]) if dtype.startswith("|V") else dtype_from(dtype).itemsize


def parse_column(descriptor: Any) -> Column:
    """A descriptor read from a file, every field of it checked. Raises CorruptTrace."""
    try:
        path, dtype, shape, rows, encoding, stored, raw, crc = descriptor
        column = Column(tuple(path), dtype, tuple(shape), rows, encoding, stored, raw, crc)
        numbers = (*column.shape, rows, encoding, stored, raw, crc)
    except (TypeError, ValueError) as error:
        raise CorruptTrace("a column descriptor is malformed") from error
    if not all(type(number) is int and 0 <= number <= wire.MAX_COLUMN * 2 for number in numbers):
        raise CorruptTrace("a number in a column descriptor is out of range")
    if not column.path or not all(type(part) in (str, int) for part in column.path):
        raise CorruptTrace("a column path is malformed")
    if rows > wire.MAX_ROWS:
        raise CorruptTrace(f"a column claims {rows} rows, more than the limit of {wire.MAX_ROWS}")
    if encoding > 31 or (not encoding & ZSTD and stored != raw):
        raise CorruptTrace("a column encoding is malformed")
    if dtype == MSGPACK:
        if encoding & (SHUFFLE | XOR | CHANGES) or (not encoding & CONSTANT and raw < rows * wire.LENGTH.itemsize):
            raise CorruptTrace("a msgpack column is malformed")
        size = rows * _VALUE_SIZE + (rows if encoding & CONSTANT else 1) * raw
        if raw > wire.MAX_VALUES or size > 2 * wire.MAX_VALUES:
            raise CorruptTrace(f"a msgpack column claims {raw} bytes, more than the limit of {wire.MAX_VALUES}")
    else:
        is_table = dtype in (f"|V{wire.FRAGMENT.itemsize}", f"|V{wire.CHUNK_ENTRY.itemsize}")
        if is_table and rows > wire.MAX_TABLE:
            raise CorruptTrace(f"a table claims {rows} rows, more than the limit of {wire.MAX_TABLE}")
        if not is_table and dtype_from(dtype).itemsize == 0:
            raise CorruptTrace(f"not a dtype of a column: {dtype}")
        size = rows * column.row_size
        if encoding & CHANGES:
            fits = not encoding & ~(ZSTD | CHANGES) and rows > 0 and column.row_size >= wire.LARGE_ROW
            fits = fits and column.row_size <= raw <= 8 * size
        else:
            fits = raw == (min(rows, 1) * column.row_size if encoding & CONSTANT else size)
        if not fits:
            raise CorruptTrace("the size of a column does not fit its rows")
    if max(size, raw) > wire.MAX_COLUMN or len(column.shape) > 32:
        raise CorruptTrace(f"a column claims {max(size, raw)} bytes, more than the limit of {wire.MAX_COLUMN}")
    return column


# ---------------------------------------------------------------------------------------------------------------------
# Encoding


def is_large(rows: Array) -> bool:
    """Whether the rows are such as are best encoded piece by piece."""
    return len(rows) > 0 and _is_large(rows.nbytes // len(rows))


def _is_large(row_size: int) -> bool:
    return row_size >= wire.LARGE_ROW


class ColumnEncoder:
    """Encodes one column, chunk after chunk, under the encoding that has proved best on its rows."""

    def __init__(self, path: Path, level: int):
        self._path = path
        self._compressor = zstandard.ZstdCompressor(level=level)
        self._harder = zstandard.ZstdCompressor(level=min(22, level + _HARDER))
        self._compress: Callable[[Any], bytes] = self._compressor.compress
        self._encoding = 0
        self._compressible = True
        self._changes_little = False
        self._chunks_until_trial = self._patience = 0
        self._stream: _Stream | None = None
        self._buffers = Buffers()  # memory for filtered rows: the first touch of fresh memory takes long

    def feed(self, rows: Array | FrameRows) -> None:
        """Encodes some of the large rows of a chunk, of one dtype and shape; they are not to change until finish()."""
        if self._stream is None:
            shape = rows.shape if isinstance(rows, FrameRows) else rows.shape[1:]
            row_size = rows.row_size if isinstance(rows, FrameRows) else rows.nbytes // len(rows)
            tried = max(8, _LARGE_SAMPLE // row_size)
            sample = next(rows.arrays(tried)) if isinstance(rows, FrameRows) else transforms.as_bytes(rows[:tried])
            encoding = self._choice(sample, rows.dtype.itemsize) | ZSTD * self._compressible
            compressor = self._harder if encoding & CHANGES and self._changes_little else self._compressor
            self._stream = _Stream(compressor, rows.dtype, shape, encoding)
        if isinstance(rows, FrameRows):
            self._stream.feed_frames(rows)
        else:
            self._stream.feed(transforms.as_bytes(rows))

    def finish(self) -> tuple[Column, list[Piece]]:
        """The column of all rows fed since the last call, its bytes in pieces."""
        stream, self._stream = self._stream, None
        assert stream is not None
        pieces = stream.finish()
        column = self._column(stream.dtype.str, stream.shape, stream.rows, stream.encoding, stream.raw, pieces)
        return column, pieces

    def encode(self, rows: Array) -> tuple[Column, bytes]:
        """rows: any array of shape (rows, *row shape) and a plain little-endian or void dtype, C-contiguous."""
        if is_large(rows):
            self.feed(rows)
            column, pieces = self.finish()
            return column, b"".join(pieces)
        flat = transforms.as_bytes(rows)
        constant = len(flat) > 1 and flat.shape[1] > 0 and _all_rows_equal(flat)
        if constant:
            flat, encoding = flat[:1], 0
        else:
            encoding = self._choice(flat, rows.dtype.itemsize)
        filtered = _filter(flat, encoding, rows.dtype.itemsize, self._buffers.take)
        blob, encoding = self._squeezed(filtered, flat, encoding)
        dtype = f"|V{rows.dtype.itemsize}" if rows.dtype.names else rows.dtype.str
        return self._column(dtype, rows.shape[1:], len(rows), encoding | CONSTANT * constant, flat.size, [blob]), blob

    def encode_values(self, packed: list[bytes]) -> tuple[Column, bytes]:
        """packed: one MessagePack value a row."""
        constant = len(packed) > 1 and packed.count(packed[0]) == len(packed)
        if constant and len(packed) * (_VALUE_SIZE + len(packed[0])) <= wire.MAX_VALUES:
            raw = packed[0]
        else:
            constant = False
            raw = np.fromiter(map(len, packed), wire.LENGTH, len(packed)).tobytes() + b"".join(packed)
        if len(raw) > wire.MAX_VALUES:
            raise UnstorableValue(f"{'/'.join(map(str, self._path))}: {len(raw)} bytes at once, too many for a trace")
        blob, encoding = self._squeezed(raw, raw, 0)
        return self._column(MSGPACK, (), len(packed), encoding | CONSTANT * constant, len(raw), [blob]), blob

    def _column(
        self, dtype: str, shape: tuple[int, ...], rows: int, encoding: int, raw: int, pieces: Sequence[Piece]
    ) -> Column:
        crc = 0
        for piece in pieces:
            crc = wire.checksum(piece, crc)
        return Column(self._path, dtype, shape, rows, encoding, sum(map(len, pieces)), raw, crc)

    def _squeezed(self, filtered: Array | bytes, plain: Array | bytes, encoding: int) -> tuple[bytes, int]:
        size = filtered.nbytes if isinstance(filtered, np.ndarray) else len(filtered)
        if size >= _LEAST_BYTES:
            blob = self._compress(filtered)
            if len(blob) < size:
                return blob, encoding | ZSTD
        return plain.tobytes() if isinstance(plain, np.ndarray) else plain, 0

    def _choice(self, flat: Array, item_size: int) -> int:
        """The filters for these rows: what proved smallest on a sample of them, tried again now and then."""
        if _is_large(flat.shape[1]) and len(flat) < _LEAST_ROWS:
            return self._encoding if self._patience else CHANGES
        self._chunks_until_trial -= 1
        if self._chunks_until_trial < 0 and flat.size:
            size = _LARGE_SAMPLE if _is_large(flat.shape[1]) else _SAMPLE_BYTES
            sample = np.ascontiguousarray(flat[: max(8, size // max(1, flat.shape[1]))])
            sizes = {c: self._size_under(c, sample, item_size) for c in _candidates(flat, item_size)}
            # Transforms cost time: a costlier one has to be smaller by 2 %.
            self._encoding = min(sizes, key=lambda c: sizes[c] * (1 + 0.02 * c.bit_count()))
            self._compressible = sizes[self._encoding] < _WORTHWHILE * sample.nbytes
            if not self._compressible:
                self._encoding = 0
            # A column that has just begun may not look like the rest of it: try the first chunks again soon.
            self._patience = min(_RETRY_AFTER, 2 * self._patience + 1)
            self._chunks_until_trial = self._patience
        return self._encoding

    def _size_under(self, encoding: int, sample: Array, item_size: int) -> int:
        if not _is_large(sample.shape[1]):
            return len(self._compress(_filter(sample, encoding, item_size, self._buffers.take)))
        stream = _Stream(self._compressor, np.dtype(f"V{item_size}"), (sample.shape[1] // item_size,), encoding | ZSTD)
        stream.feed(sample)
        if encoding & CHANGES:
            self._changes_little = stream.raw - sample.shape[1] <= _LITTLE * len(sample)
        return sum(map(len, stream.finish()))


def _candidates(flat: Array, item_size: int) -> list[int]:
    """The encodings that may suit the rows."""
    shuffles = [SHUFFLE, SHUFFLE | XOR] if item_size > 1 else []
    return [0, XOR, *shuffles, *([CHANGES] if _is_large(flat.shape[1]) else [])]


def _all_rows_equal(flat: Array) -> bool:
    if flat[0].tobytes() != flat[-1].tobytes() or flat[0].tobytes() != flat[len(flat) // 2].tobytes():
        return False
    return bool((transforms.widest(flat[1:]) == transforms.widest(flat[:-1])).all())


def _filter(flat: Array, encoding: int, item_size: int, room: Callable[[int], Array]) -> Array:
    """The bytes of flat under the transforms of encoding. room: gives byte arrays of a size."""
    if encoding & XOR:
        flat = transforms.xor(flat, np.zeros(flat.shape[1], np.uint8), room(flat.size).reshape(flat.shape))
    return transforms.shuffle(flat, item_size, room) if encoding & SHUFFLE else flat.reshape(-1)


class _Stream:
    """The large rows of one chunk, transformed and compressed as they come."""

    def __init__(
        self, compressor: zstandard.ZstdCompressor, dtype: np.dtype[Any], shape: tuple[int, ...], encoding: int
    ):
        self.dtype, self.shape, self.encoding = dtype, shape, encoding
        row_size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
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

    def feed_frames(self, frames: FrameRows) -> None:
        if not self.encoding & CHANGES:
            for piece in frames.arrays(self._step):
                self.feed(piece)
            return
        skip = self.rows == 0
        if skip:
            (first,) = next(frames.arrays(1))
            self._add(first)
        if len(frames) > skip:
            self._add(transforms.packed_changes(frames.slots[skip:], frames.row_size))
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
        raw = memoryview(data).cast("B")  # type: ignore[arg-type]
        self.raw += len(raw)
        if self._object is not None:
            self._pieces.append(self._object.compress(raw))
        else:
            self._pieces.append(bytes(raw) if self.encoding & XOR else raw)  # which is made in room that is used again

    def finish(self) -> list[Piece]:
        if self._object is not None:
            self._pieces.append(self._object.flush())
        return self._pieces


# ---------------------------------------------------------------------------------------------------------------------
# Decoding


def decode(column: Column, blob: bytes | memoryview, room: Callable[[int], Array] | None = None) -> Array:
    """The rows of a column as a writable array of the caller's own; of a msgpack column, an array of objects.

    room: gives byte arrays of a size to decode into; None: fresh ones.

    Raises CorruptTrace. The memory taken is bounded by what parse_column has allowed.
    """
    try:
        if column.dtype == MSGPACK:
            return _decode_values(column, blob)
        return _decode_typed(column, blob, room or _fresh)
    except MemoryError as error:
        raise CorruptTrace(f"a column claims {column.full_size} bytes, more than there is memory for") from error


def decode_rows(column: Column, blob: bytes | memoryview, begin: int, out: Array) -> None:
    """Fills out with the rows from begin on of a column whose encoding is CHANGES. Raises CorruptTrace."""
    changes = common().take(column.raw)
    _inflate(column, blob, changes)
    transforms.undo_changes(changes, column.rows, begin, transforms.as_bytes(out))


def packed_values(column: Column, blob: bytes | memoryview) -> list[bytes]:
    """The rows of a msgpack column as they were packed. Raises CorruptTrace."""
    view, bounds = _value_bounds(column, blob)
    return [bytes(view[a:b]) for a, b in bounds]


def _fresh(size: int) -> Array:
    return np.empty(size, np.uint8)


def _decode_typed(column: Column, blob: bytes | memoryview, room: Callable[[int], Array]) -> Array:
    row_size, rows = column.row_size, column.rows
    kept = min(rows, 1) if column.encoding & CONSTANT else rows
    flat = room(kept * row_size).reshape(kept, row_size)
    if column.encoding & (SHUFFLE | CHANGES):
        transformed = common().take(column.raw)
        _inflate(column, blob, transformed)
        if column.encoding & CHANGES:
            transforms.undo_changes(transformed, rows, 0, flat)
        else:
            transforms.undo_shuffle(transformed, flat, _item_size(column.dtype))
    else:
        _inflate(column, blob, flat.reshape(-1))
    if column.encoding & XOR:
        transforms.undo_xor(flat)
    if column.encoding & CONSTANT:
        row, flat = flat, room(rows * row_size).reshape(rows, row_size)
        flat[:] = row
    dtype = np.dtype(column.dtype) if column.dtype.startswith("|V") else dtype_from(column.dtype)
    return flat.reshape(-1).view(dtype).reshape(rows, *column.shape)


def _inflate(column: Column, blob: bytes | memoryview, out: Array) -> None:
    """Fills out, exactly, with the decompressed bytes of blob."""
    if not column.encoding & ZSTD:
        out[:] = np.frombuffer(blob, np.uint8)
        return
    try:
        if zstandard.frame_content_size(blob) not in (column.raw, -1):  # -1: it does not say
            raise CorruptTrace("a compressed column does not have the size it should")
        reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).stream_reader(blob)
        target: Any = memoryview(out)  # type: ignore[arg-type]
        filled = 0
        # A truncated frame ends early without an error: count what comes.
        while filled < len(out) and (count := reader.readinto(target[filled:])):
            filled += count
        if filled != len(out) or reader.read(1):
            raise CorruptTrace("a compressed column does not have the size it should")
    except zstandard.ZstdError as error:
        raise CorruptTrace(f"a column does not decompress: {error}") from error


def _decode_values(column: Column, blob: bytes | memoryview) -> Array:
    view, bounds = _value_bounds(column, blob)
    return objects([unpack(view[a:b]) for a, b in bounds])  # also equal ones one by one: they must not share memory


def _value_bounds(column: Column, blob: bytes | memoryview) -> tuple[memoryview, list[tuple[int, int]]]:
    """The decompressed bytes of a msgpack column, and where in them the value of each row begins and ends."""
    raw = common().take(column.raw)
    _inflate(column, blob, raw)
    view = memoryview(raw.data)
    if column.encoding & CONSTANT:
        return view, [(0, len(raw))] * column.rows
    lengths = raw[: column.rows * wire.LENGTH.itemsize].view(wire.LENGTH)
    ends = lengths.astype(np.int64).cumsum() + lengths.nbytes
    if (ends[-1] if column.rows else 0) != len(raw):
        raise CorruptTrace("the values of a column do not fill it")
    return view, list(zip((ends - lengths).tolist(), ends.tolist()))
