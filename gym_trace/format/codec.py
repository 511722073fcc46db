"""Columns as bytes: filters under zstd, and the choice between them (docs/FORMAT.md, section 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import zstandard

from gym_trace.errors import CorruptTrace, UnstorableValue
from gym_trace.format import wire
from gym_trace.values import Array, dtype_from, objects, unpack

ZSTD, SHUFFLE, XOR, CONSTANT = 1, 2, 4, 8
MSGPACK = "msgpack"
_MAX_WINDOW = 128 << 20
_VALUE_SIZE = 64  # bytes that a decoded value takes at least, if it is no more than that
_SAMPLE_BYTES = 128 << 10  # on which the encodings of a column are tried
_LEAST_BYTES = 256  # fewer are not worth the call, which hands the interpreter lock to the loop being recorded
_RETRY_AFTER = 64  # chunks, after which the encodings of a column are tried again

Path = tuple[str | int, ...]


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
    if encoding > 15 or (not encoding & ZSTD and stored != raw):
        raise CorruptTrace("a column encoding is malformed")
    if dtype == MSGPACK:
        if encoding & (SHUFFLE | XOR) or (not encoding & CONSTANT and raw < rows * wire.LENGTH.itemsize):
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
        if raw != (min(rows, 1) * column.row_size if encoding & CONSTANT else size):
            raise CorruptTrace("the size of a column does not fit its rows")
    if max(size, raw) > wire.MAX_COLUMN or len(column.shape) > 32:
        raise CorruptTrace(f"a column claims {max(size, raw)} bytes, more than the limit of {wire.MAX_COLUMN}")
    return column


# ---------------------------------------------------------------------------------------------------------------------
# Encoding


class ColumnEncoder:
    """Encodes the pieces of one column, chunk after chunk, under the encoding that has proved best on its rows."""

    def __init__(self, path: Path, level: int):
        self._path = path
        self._compress: Callable[[Any], bytes] = zstandard.ZstdCompressor(level=level).compress
        self._encoding = 0
        self._scratch = np.empty(0, np.uint8)
        self._chunks_until_trial = 0

    def encode(self, rows: Array) -> tuple[Column, bytes]:
        """rows: any array of shape (rows, *row shape) and a plain little-endian or void dtype, C-contiguous."""
        flat = _as_bytes(rows)
        constant = len(flat) > 1 and flat.shape[1] > 0 and _all_rows_equal(flat)
        if constant:
            flat, encoding = flat[:1], 0
        else:
            encoding = self._choice(flat, rows.dtype.itemsize)
        filtered = _filter(flat, encoding, rows.dtype.itemsize, self._scratch_like(flat, encoding))
        blob, encoding = self._squeezed(filtered, flat, encoding)
        dtype = f"|V{rows.dtype.itemsize}" if rows.dtype.names else rows.dtype.str
        return self._column(dtype, rows.shape[1:], len(rows), encoding | CONSTANT * constant, flat.size, blob), blob

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
        return self._column(MSGPACK, (), len(packed), encoding | CONSTANT * constant, len(raw), blob), blob

    def _scratch_like(self, flat: Array, encoding: int) -> Array:
        """Memory for XORed rows. Kept, because the first touch of fresh memory costs more than the XOR itself."""
        if encoding & XOR and self._scratch.size < flat.size:
            self._scratch = np.empty(flat.size, np.uint8)
        return self._scratch[: flat.size].reshape(flat.shape) if encoding & XOR else flat

    def _column(
        self, dtype: str, shape: tuple[int, ...], rows: int, encoding: int, raw: int, blob: bytes
    ) -> Column:  # fmt: skip
        return Column(self._path, dtype, shape, rows, encoding, len(blob), raw, wire.checksum(blob))

    def _squeezed(self, filtered: Array | bytes, plain: Array | bytes, encoding: int) -> tuple[bytes, int]:
        size = filtered.nbytes if isinstance(filtered, np.ndarray) else len(filtered)
        if size >= _LEAST_BYTES:
            blob = self._compress(filtered)
            if len(blob) < size:
                return blob, encoding | ZSTD
        return plain.tobytes() if isinstance(plain, np.ndarray) else plain, 0

    def _choice(self, flat: Array, item_size: int) -> int:
        """The filters for these rows: what proved smallest on a sample of them, tried again now and then."""
        self._chunks_until_trial -= 1
        if self._chunks_until_trial < 0 and flat.size:
            sample = np.ascontiguousarray(flat[: max(8, _SAMPLE_BYTES // max(1, flat.shape[1]))])
            candidates = [0, XOR] if item_size == 1 else [0, SHUFFLE, XOR, SHUFFLE | XOR]
            mixed = np.empty_like(sample)
            sizes = {c: len(self._compress(_filter(sample, c, item_size, mixed))) for c in candidates}
            # Filters cost time: a costlier one has to be smaller by 2 %.
            self._encoding = min(candidates, key=lambda c: sizes[c] * (1 + 0.02 * c.bit_count()))
            # A column that has just begun may not look like the rest of it: try the first full chunks again soon.
            self._chunks_until_trial = _RETRY_AFTER if sample.nbytes >= _SAMPLE_BYTES else 2
        return self._encoding


def _as_bytes(rows: Array) -> Array:
    """A (rows, row size) view of the bytes of a C-contiguous array."""
    row_size = rows.dtype.itemsize * int(np.prod(rows.shape[1:], dtype=np.int64))
    if rows.size == 0:
        return np.empty((len(rows), row_size), np.uint8)
    return rows.reshape(-1).view(np.uint8).reshape(len(rows), row_size)


def _all_rows_equal(flat: Array) -> bool:
    if flat[0].tobytes() != flat[-1].tobytes() or flat[0].tobytes() != flat[len(flat) // 2].tobytes():
        return False
    return bool((_widest(flat[1:]) == _widest(flat[:-1])).all())


def _widest(flat: Array) -> Array:
    """The same bytes as rows of the widest integers that divide a row: wide loops are fast loops."""
    for dtype in (np.uint64, np.uint32, np.uint16):
        if flat.shape[1] % np.dtype(dtype).itemsize == 0:
            return flat.view(dtype)
    return flat


def _filter(flat: Array, encoding: int, item_size: int, mixed: Array) -> Array:
    """The bytes of flat under the filters of encoding; mixed: room for the XORed rows."""
    if encoding & XOR:
        mixed[:1] = flat[:1]
        np.bitwise_xor(_widest(flat[1:]), _widest(flat[:-1]), out=_widest(mixed[1:]))
        flat = mixed
    if encoding & SHUFFLE:
        return np.ascontiguousarray(flat.reshape(-1, item_size).T).reshape(-1)
    return flat.reshape(-1)


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


def packed_values(column: Column, blob: bytes | memoryview) -> list[bytes]:
    """The rows of a msgpack column as they were packed. Raises CorruptTrace."""
    view, bounds = _value_bounds(column, blob)
    return [bytes(view[a:b]) for a, b in bounds]


def _fresh(size: int) -> Array:
    return np.empty(size, np.uint8)


def _decode_typed(column: Column, blob: bytes | memoryview, room: Callable[[int], Array]) -> Array:
    row_size, rows = column.row_size, column.rows
    kept = min(rows, 1) if column.encoding & CONSTANT else rows
    flat = room(kept * row_size)
    if column.encoding & SHUFFLE:
        planes = room(flat.size)
        _inflate(column, blob, planes)
        _unshuffle(planes, flat, _item_size(column.dtype))
    else:
        _inflate(column, blob, flat)
    if column.encoding & XOR:
        _undo_xor(flat.reshape(kept, row_size) if row_size else flat.reshape(kept, 0))
    if column.encoding & CONSTANT:
        row, flat = flat.reshape(kept, row_size), room(rows * row_size)
        flat.reshape(rows, row_size)[:] = row
    dtype = np.dtype(column.dtype) if column.dtype.startswith("|V") else dtype_from(column.dtype)
    return flat.view(dtype).reshape(rows, *column.shape)


def _inflate(column: Column, blob: bytes | memoryview, out: Array) -> None:
    """Fills out, exactly, with the decompressed bytes of blob."""
    if not column.encoding & ZSTD:
        out[:] = np.frombuffer(blob, np.uint8)
        return
    try:
        if zstandard.frame_content_size(blob) != column.raw:
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


def _unshuffle(planes: Array, out: Array, item_size: int) -> None:
    elements, sources = out.reshape(-1, item_size), planes.reshape(item_size, -1)
    for j in range(item_size):  # one strided pass a byte is several times faster than one transposing copy
        elements[:, j] = sources[j]


def _undo_xor(flat: Array) -> None:
    wide = _widest(flat)
    if wide.shape[1] <= 64:
        np.bitwise_xor.accumulate(wide, axis=0, out=wide)
        return
    for i in range(1, len(wide)):
        np.bitwise_xor(wide[i], wide[i - 1], out=wide[i])


def _decode_values(column: Column, blob: bytes | memoryview) -> Array:
    view, bounds = _value_bounds(column, blob)
    return objects([unpack(view[a:b]) for a, b in bounds])  # also equal ones one by one: they must not share memory


def _value_bounds(column: Column, blob: bytes | memoryview) -> tuple[memoryview, list[tuple[int, int]]]:
    """The decompressed bytes of a msgpack column, and where in them the value of each row begins and ends."""
    raw = np.empty(column.raw, np.uint8)
    _inflate(column, blob, raw)
    view = memoryview(raw.data)
    if column.encoding & CONSTANT:
        return view, [(0, len(raw))] * column.rows
    lengths = raw[: column.rows * wire.LENGTH.itemsize].view(wire.LENGTH)
    ends = lengths.astype(np.int64).cumsum() + lengths.nbytes
    if (ends[-1] if column.rows else 0) != len(raw):
        raise CorruptTrace("the values of a column do not fill it")
    return view, list(zip((ends - lengths).tolist(), ends.tolist()))
