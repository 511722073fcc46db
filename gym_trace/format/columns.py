"""Column descriptors, and the checks of one that was read (docs/FORMAT.md, section 3)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.model.values import dtype_from

ZSTD, SHUFFLE, XOR, CONSTANT, CHANGES = 1, 2, 4, 8, 16  # encoding bits
MSGPACK = "msgpack"
STEP_COLUMNS = ("actions", "rewards", "infos", "annotations")  # roots of the columns with one row per step
_TOO_LARGE = 1 << 32  # for any number in a descriptor; the checksum may have 32 bits

Path = tuple[str | int, ...]
Piece = bytes | memoryview


class Column(NamedTuple):
    """Descriptor of one column in a record (docs/FORMAT.md)."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    rows: int
    encoding: int
    stored: int
    raw: int
    crc: int

    def descriptor(self) -> list[Any]:
        """Return the stored form: lists, because MessagePack would store a tuple as an extension type."""
        return [list(self.path), self.dtype, list(self.shape), *self[3:]]

    @property
    def row_size(self) -> int:
        return math.prod(self.shape) * item_size(self.dtype)

    @property
    def full_size(self) -> int:
        """Bytes of all decoded rows; for a msgpack column, bytes of all packed values."""
        if self.dtype != MSGPACK:
            return self.rows * self.row_size
        return self.rows * self.raw if self.encoding & CONSTANT else self.raw


def is_path(path: tuple[Any, ...]) -> bool:
    """Return True if path is a valid column path: strings and integers of up to 64 bits."""
    return bool(path) and all(type(p) is str or (type(p) is int and p.bit_length() <= 64) for p in path)


@lru_cache(maxsize=256)
def item_size(dtype: str) -> int:
    return int(dtype[2:]) if dtype.startswith("|V") else dtype_from(dtype).itemsize


def parse_column(descriptor: Any) -> Column:
    """Parse a descriptor read from a file and check every field. Raises CorruptTrace."""
    try:
        path, dtype, shape, rows, encoding, stored, raw, crc = descriptor
        column = Column(tuple(path), dtype, tuple(shape), rows, encoding, stored, raw, crc)
        numbers = (*column.shape, rows, encoding, stored, raw, crc)
    except (TypeError, ValueError) as error:
        raise CorruptTrace("malformed column descriptor") from error
    if not all(type(number) is int and 0 <= number < _TOO_LARGE for number in numbers):
        raise CorruptTrace("number out of range in a column descriptor")
    if not is_path(column.path):
        raise CorruptTrace("malformed column path")
    if len(column.shape) > wire.MAX_DIMENSIONS:
        raise CorruptTrace(f"column with rows of {len(column.shape)} dimensions; the limit is {wire.MAX_DIMENSIONS}")
    if rows > wire.MAX_ROWS:
        raise CorruptTrace(f"column declares {rows} rows; the limit is {wire.MAX_ROWS}")
    if encoding > 31 or (not encoding & ZSTD and stored != raw):
        raise CorruptTrace("malformed column encoding")
    if dtype == MSGPACK:
        if encoding & (SHUFFLE | XOR | CHANGES) or (not encoding & CONSTANT and raw < rows * wire.LENGTH.itemsize):
            raise CorruptTrace("malformed msgpack column")
        size = rows * wire.VALUE_SIZE + (rows if encoding & CONSTANT else 1) * raw
        if raw > wire.MAX_VALUES or size > 2 * wire.MAX_VALUES:
            raise CorruptTrace(f"msgpack column declares {raw} bytes; the limit is {wire.MAX_VALUES}")
    else:
        is_table = dtype in (f"|V{wire.FRAGMENT.itemsize}", f"|V{wire.CHUNK_ENTRY.itemsize}")
        if is_table and rows > wire.MAX_TABLE:
            raise CorruptTrace(f"table declares {rows} rows; the limit is {wire.MAX_TABLE}")
        if not is_table and dtype_from(dtype).itemsize == 0:
            raise CorruptTrace(f"invalid column dtype: {dtype}")
        size = rows * column.row_size
        if encoding & CHANGES:
            fits = not encoding & ~(ZSTD | CHANGES) and rows > 0 and column.row_size >= wire.LARGE_ROW
            fits = fits and column.row_size <= raw <= 8 * size
        else:
            fits = raw == (min(rows, 1) * column.row_size if encoding & CONSTANT else size)
        if not fits:
            raise CorruptTrace("the size of a column does not match its rows")
    if max(size, raw) > wire.MAX_COLUMN:
        raise CorruptTrace(f"column declares {max(size, raw)} bytes; the limit is {wire.MAX_COLUMN}")
    return column
