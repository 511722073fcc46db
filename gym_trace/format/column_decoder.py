"""Decode columns (docs/FORMAT.md, section 3). Input is untrusted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import zstandard

from gym_trace.errors import CorruptTrace
from gym_trace.format import kernels, transforms, wire
from gym_trace.format.columns import CHANGES, CONSTANT, MSGPACK, SHUFFLE, XOR, ZSTD, Column, item_size
from gym_trace.model.containers import MAX_CONTAINERS, Containers
from gym_trace.model.packing import unpack
from gym_trace.model.values import Array, dtype_from, objects

_MAX_WINDOW = 128 << 20


def decode(column: Column, blob: bytes | memoryview) -> Array:
    """Return the rows of a column as a writable array; for a msgpack column, an array of objects.

    The array of an unencoded column shares the memory of blob, if blob is writable.

    Raises CorruptTrace. Memory is bounded by the limits of parse_column.
    """
    try:
        if column.dtype == MSGPACK:
            return _decode_values(column, blob)
        return _decode_typed(column, blob)
    except MemoryError as error:
        raise CorruptTrace(f"column declares {column.full_size} bytes, more than the available memory") from error


def decode_rows(column: Column, blob: bytes | memoryview, begin: int, out: Array) -> None:
    """Decode rows, starting at begin, of a column with encoding CHANGES into out. Raises CorruptTrace."""
    kernels.undo_changes(_inflated(column, blob), column.rows, begin, transforms.as_bytes(out))


def packed_values(column: Column, blob: bytes | memoryview) -> list[bytes]:
    """Return the packed rows of a msgpack column. Raises CorruptTrace."""
    view, bounds = _value_bounds(column, blob)
    return [bytes(view[a:b]) for a, b in bounds]


def unpacked(packed: Sequence[bytes]) -> Array:
    """Return rows of a msgpack column as an array of objects. Raises CorruptTrace."""
    containers = Containers() if sum(map(len, packed)) > MAX_CONTAINERS else None
    return objects([unpack(value, containers) for value in packed])


def _decode_typed(column: Column, blob: bytes | memoryview) -> Array:
    row_size, rows = column.row_size, column.rows
    kept = min(rows, 1) if column.encoding & CONSTANT else rows
    flat = _inflated(column, blob)
    if column.encoding & (SHUFFLE | CHANGES):
        transformed, flat = flat, np.empty((kept, row_size), np.uint8)
        if column.encoding & CHANGES:
            kernels.undo_changes(transformed, rows, 0, flat)
        else:
            kernels.undo_shuffle(transformed, flat, item_size(column.dtype), bool(column.encoding & XOR))
    elif column.encoding & XOR:
        kernels.undo_xor(flat.reshape(kept, row_size))
    flat = flat.reshape(kept, row_size)
    if column.encoding & CONSTANT:
        row, flat = flat, np.empty((rows, row_size), np.uint8)
        flat[:] = row
    dtype = np.dtype(column.dtype) if column.dtype.startswith("|V") else dtype_from(column.dtype)
    return flat.reshape(-1).view(dtype).reshape(rows, *column.shape)


def _inflated(column: Column, blob: bytes | memoryview) -> Array:
    """Decompress blob to exactly the declared size, into a writable array."""
    if not column.encoding & ZSTD:
        stored = np.frombuffer(blob, np.uint8)
        return stored if stored.flags.writeable else stored.copy()
    out = np.empty(column.raw, np.uint8)
    try:
        if zstandard.frame_content_size(blob) not in (column.raw, -1):  # -1: unknown
            raise CorruptTrace("wrong size of a compressed column")
        reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).stream_reader(blob)
        target = out.data
        filled = 0
        # A truncated frame ends early without an error, so count the bytes.
        while filled < len(out) and (count := reader.readinto(target[filled:])):
            filled += count
        if filled != len(out) or reader.read(1):
            raise CorruptTrace("wrong size of a compressed column")
        return out
    except zstandard.ZstdError as error:
        raise CorruptTrace(f"decompressing a column failed: {error}") from error


def _decode_values(column: Column, blob: bytes | memoryview) -> Array:
    view, bounds = _value_bounds(column, blob)
    containers = Containers() if column.full_size > MAX_CONTAINERS else None
    # Equal values are unpacked again: they must not share memory.
    return objects([unpack(view[a:b], containers) for a, b in bounds])


def _value_bounds(column: Column, blob: bytes | memoryview) -> tuple[memoryview, list[tuple[int, int]]]:
    """Return the decompressed bytes of a msgpack column, and the begin and end of each row in them."""
    raw = _inflated(column, blob)
    view = memoryview(raw.data)
    if column.encoding & CONSTANT:
        return view, [(0, len(raw))] * column.rows
    lengths = raw[: column.rows * wire.LENGTH.itemsize].view(wire.LENGTH)
    ends = lengths.astype(np.int64).cumsum() + lengths.nbytes
    if (ends[-1] if column.rows else 0) != len(raw):
        raise CorruptTrace("the values of a column do not match its size")
    return view, list(zip((ends - lengths).tolist(), ends.tolist()))
