"""What a column is: its descriptor, and what is demanded of one that was read (docs/FORMAT.md, section 3)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.model.values import dtype_from

ZSTD, SHUFFLE, XOR, CONSTANT, CHANGES = 1, 2, 4, 8, 16  # bits of an encoding
MSGPACK = "msgpack"
_TOO_LARGE = 1 << 32  # for any number of a descriptor, of which one is a checksum

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
        return math.prod(self.shape) * item_size(self.dtype)

    @property
    def full_size(self) -> int:
        """Bytes that all rows take once decoded; of a msgpack column, the bytes of its values."""
        if self.dtype != MSGPACK:
            return self.rows * self.row_size
        return self.rows * self.raw if self.encoding & CONSTANT else self.raw


def is_path(path: tuple[Any, ...]) -> bool:
    """Whether this can be a column path: one of text and numbers of up to 64 bits."""
    return bool(path) and all(type(p) is str or (type(p) is int and p.bit_length() <= 64) for p in path)


@lru_cache(maxsize=256)
def item_size(dtype: str) -> int:
    return int(dtype[2:]) if dtype.startswith("|V") else dtype_from(dtype).itemsize


def parse_column(descriptor: Any) -> Column:
    """A descriptor read from a file, every field of it checked. Raises CorruptTrace."""
    try:
        path, dtype, shape, rows, encoding, stored, raw, crc = descriptor
        column = Column(tuple(path), dtype, tuple(shape), rows, encoding, stored, raw, crc)
        numbers = (*column.shape, rows, encoding, stored, raw, crc)
    except (TypeError, ValueError) as error:
        raise CorruptTrace("a column descriptor is malformed") from error
    if not all(type(number) is int and 0 <= number < _TOO_LARGE for number in numbers):
        raise CorruptTrace("a number in a column descriptor is out of range")
    if not is_path(column.path):
        raise CorruptTrace("a column path is malformed")
    if len(column.shape) > wire.MAX_DIMENSIONS:
        raise CorruptTrace(
            f"the rows of a column have {len(column.shape)} dimensions, the limit is {wire.MAX_DIMENSIONS}"
        )
    if rows > wire.MAX_ROWS:
        raise CorruptTrace(f"a column claims {rows} rows, more than the limit of {wire.MAX_ROWS}")
    if encoding > 31 or (not encoding & ZSTD and stored != raw):
        raise CorruptTrace("a column encoding is malformed")
    if dtype == MSGPACK:
        if encoding & (SHUFFLE | XOR | CHANGES) or (not encoding & CONSTANT and raw < rows * wire.LENGTH.itemsize):
            raise CorruptTrace("a msgpack column is malformed")
        size = rows * wire.VALUE_SIZE + (rows if encoding & CONSTANT else 1) * raw
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
    if max(size, raw) > wire.MAX_COLUMN:
        raise CorruptTrace(f"a column claims {max(size, raw)} bytes, more than the limit of {wire.MAX_COLUMN}")
    return column
