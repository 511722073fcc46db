"""Bytes to columns (docs/FORMAT.md, section 3). Nothing of what was read is trusted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import zstandard

from gym_trace.errors import CorruptTrace
from gym_trace.format import transforms, wire
from gym_trace.format.buffers import common
from gym_trace.format.columns import CHANGES, CONSTANT, MSGPACK, SHUFFLE, XOR, ZSTD, Column, item_size
from gym_trace.model.containers import MAX_CONTAINERS, Containers
from gym_trace.model.packing import unpack
from gym_trace.model.values import Array, dtype_from, objects

_MAX_WINDOW = 128 << 20


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
            transforms.undo_shuffle(transformed, flat, item_size(column.dtype))
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
        target = out.data
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
    containers = Containers() if column.full_size > MAX_CONTAINERS else None
    return objects([unpack(view[a:b], containers) for a, b in bounds])  # equal ones, too: they must not share memory


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
