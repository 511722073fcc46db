"""Transforms of row bytes before compression, and their inverses (docs/FORMAT.md, section 3)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from gym_trace.data.deltas import Slot, word_of
from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace
from gym_trace.format import wire

_COUNT = np.dtype("<u4")
MOST_DISTINCT = 1 << 16  # rows of a dictionary
_NARROW = 16  # bytes; elements up to this size are shuffled in one pass
_WIDE_AT_ONCE = 2048  # wider elements per pass, so that a block stays in the processor's cache


def as_bytes(rows: Array) -> Array:
    """Return the bytes of a C-contiguous array as a (rows, row size) view."""
    row_size = rows.dtype.itemsize * math.prod(rows.shape[1:])
    if rows.size == 0:
        return np.empty((len(rows), row_size), np.uint8)
    return rows.reshape(-1).view(np.uint8).reshape(len(rows), row_size)


def widest(flat: Array) -> Array:
    """Return a view with the widest integers that divide a row: loops over wide integers are faster."""
    for dtype in (np.uint64, np.uint32, np.uint16):
        if flat.shape[1] % np.dtype(dtype).itemsize == 0:
            return flat.view(dtype)
    return flat


# -- XOR with the row before ------------------------------------------------------------------------------------------


def xor(flat: Array, before: Array, out: Array, together: int = 0) -> Array:
    """XOR each row with its predecessor into out. before: predecessor of the first row.

    together: rows of a group that is XORed by itself, with a `before` of zeros. 0: all rows are one group.
    """
    np.bitwise_xor(widest(flat[:1]), widest(before[None]), out=widest(out[:1]))
    np.bitwise_xor(widest(flat[1:]), widest(flat[:-1]), out=widest(out[1:]))
    if together:
        out[::together] = flat[::together]
    return out


def undo_xor(flat: Array, together: int = 0) -> None:
    """Undo xor() in place, for a `before` of zeros."""
    for begin in range(0, len(flat), together or max(1, len(flat))):
        wide = widest(flat[begin : begin + together] if together else flat)
        if wide.shape[1] <= 64:
            np.bitwise_xor.accumulate(wide, axis=0, out=wide)
            continue
        for i in range(1, len(wide)):
            np.bitwise_xor(wide[i], wide[i - 1], out=wide[i])


# -- bytes grouped by their position in the element -------------------------------------------------------------------


def shuffle(flat: Array, item_size: int, together: int = 0) -> Array:
    """Return a copy with the bytes grouped: over `together` rows (0: all), or within each row if rows are large."""
    out = np.empty(flat.size, np.uint8)
    for elements, planes in _groups(flat, out, item_size, together):
        for part in _parts(elements.shape[1], item_size):
            planes[:, :, part] = elements[:, part].transpose(0, 2, 1)
    return out


def undo_shuffle(planes: Array, out: Array, item_size: int, with_xor: bool = False, together: int = 0) -> None:
    """Undo shuffle(): write the bytes of planes to out, (rows, row size), in their original order.

    with_xor: also undo_xor().
    """
    for elements, sources in _groups(out, planes, item_size, together):
        if item_size > _NARROW:
            for part in _parts(elements.shape[1], item_size):
                elements[:, part] = sources[:, :, part].transpose(0, 2, 1)
        else:
            for j in range(item_size):  # one strided pass per byte is several times faster than one transposing copy
                elements[:, :, j] = sources[:, j]
    if with_xor:
        undo_xor(out, together)


def _groups(flat: Array, planes: Array, item_size: int, together: int) -> Iterator[tuple[Array, Array]]:
    """Yield (groups, elements, item size) of flat and (groups, item size, elements) of planes, by size of the group."""
    size = flat.shape[1] * (1 if flat.shape[1] >= wire.LARGE_ROW else together or len(flat))
    whole = flat.size // size * size if size else 0
    for begin, end, group in ((0, whole, size), (whole, flat.size, flat.size - whole)):
        if begin < end:
            elements, some = flat.reshape(-1)[begin:end], planes.reshape(-1)[begin:end]
            count = (end - begin) // group
            yield elements.reshape(count, -1, item_size), some.reshape(count, item_size, -1)


def _parts(count: int, item_size: int) -> list[slice]:
    """Split `count` elements into slices that fit the processor's cache; narrow elements stay in one slice."""
    if item_size <= _NARROW:
        return [slice(0, count)]
    return [slice(begin, begin + _WIDE_AT_ONCE) for begin in range(0, count, _WIDE_AT_ONCE)]


# -- changed words only -----------------------------------------------------------------------------------------------


def _gap_type(width: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype("<u2" if width <= 1 << 16 else "<u4")


def changes(flat: Array, before: Array, differs: Array) -> bytes:
    """Pack the words of each row that differ from the row before, with their positions.

    Args:
        before: predecessor of the first row.
        differs: scratch buffer with at least one boolean per word of flat.
    """
    words, first = flat.view(word_of(flat.shape[1])), before.view(word_of(flat.shape[1]))
    width = words.shape[1]
    differs = differs.reshape(-1)[: words.size].reshape(words.shape)
    np.not_equal(words[:1], first, out=differs[:1])
    np.not_equal(words[1:], words[:-1], out=differs[1:])
    at = differs.reshape(-1).nonzero()[0]
    counts = np.diff(np.searchsorted(at, np.arange(0, words.size + 1, width)))
    return _changes(counts, words.reshape(-1)[at].tobytes(), at % width, width)


def packed_changes(slots: list[Slot], row_size: int) -> bytes:
    """Pack rows whose changed words are known, like changes()."""
    word = word_of(row_size)
    width = row_size // word.itemsize
    whole = any(isinstance(slot, bytes) for slot in slots)
    everywhere = np.arange(width if whole else 0, dtype=np.uint32).tobytes()
    changes = [(everywhere, slot) if isinstance(slot, bytes) else slot for slot in slots]
    counts = np.fromiter((len(words) for _, words in changes), np.int64, len(changes)) // word.itemsize
    positions = np.frombuffer(b"".join([positions for positions, _ in changes]), np.uint32)
    return _changes(counts, b"".join([words for _, words in changes]), positions, width)


def _changes(counts: Array, words: bytes, positions: Array, width: int) -> bytes:
    gaps = np.empty(len(positions), _gap_type(width))
    np.subtract(positions[1:], positions[:-1], out=gaps[1:], casting="unsafe")
    starts = (counts.cumsum() - counts)[counts > 0]
    gaps[starts] = positions[starts]
    count = len(counts).to_bytes(_COUNT.itemsize, "little")
    return b"".join((count, counts.astype(_COUNT).tobytes(), words, gaps.tobytes()))


def undo_changes(data: Array, rows: int, begin: int, out: Array) -> None:
    """Undo changes(): write the rows from begin on to out.

    Args:
        data: bytes of the first row, then the results of changes() for all other rows.
        rows: total number of rows in data.

    Raises CorruptTrace.
    """
    word = word_of(out.shape[1])
    if len(data) < out.shape[1]:
        raise CorruptTrace("the changes of a column end early")
    frame, words = data[: out.shape[1]].copy().view(word), out.view(word)  # the previous row, and the rows wanted
    width, gap_type = words.shape[1], _gap_type(words.shape[1])
    offset, i, end_row = out.shape[1], 1, begin + len(out)

    def take(dtype: np.dtype[np.unsignedinteger], count: int) -> Array:
        nonlocal offset
        start, offset = offset, offset + count * dtype.itemsize
        if offset > len(data):
            raise CorruptTrace("the changes of a column end early")
        return np.frombuffer(data, dtype, count, start)

    if begin == 0 < end_row:
        words[0] = frame
    while i < end_row:
        count = int(take(_COUNT, 1)[0])
        if not 0 < count <= rows - i:
            raise CorruptTrace("the changes of a column do not match its rows")
        counts = take(_COUNT, count).astype(np.int64)
        ends = counts.cumsum()
        if ends[-1] > len(data):
            raise CorruptTrace("the changes of a column end early")
        values, positions = take(word, int(ends[-1])), _positions(take(gap_type, int(ends[-1])), counts, ends, width)
        before = min(count, max(0, begin - i))  # rows to skip
        if before:
            passed = int(ends[before - 1])
            frame[positions[:passed]] = values[:passed]  # the last value of a repeated position wins
        at = 0 if before == 0 else int(ends[before - 1])
        for row, end in enumerate(ends[before : end_row - i].tolist(), i + before - begin):
            if row > 0:
                frame = words[row - 1]
            words[row] = frame
            words[row, positions[at:end]] = values[at:end]
            at = end
        i += count
    if i >= rows and offset != len(data):
        raise CorruptTrace("excess bytes after the changes of a column")


def _positions(gaps: Array, counts: Array, ends: Array, width: int) -> Array:
    """Return the positions of changes in their rows. Raises CorruptTrace."""
    sums = gaps.cumsum(dtype=np.int64)
    begins = ends - counts
    filled = counts > 0
    before = np.zeros(len(counts), np.int64)
    before[filled] = np.where(begins[filled] > 0, sums[begins[filled] - 1], 0)
    positions = sums - np.repeat(before, counts)
    if len(positions) and (positions[ends[filled] - 1].max() >= width or counts.max() > width):
        raise CorruptTrace("a change of a column is outside its row")
    return positions


# -- distinct rows ----------------------------------------------------------------------------------------------------


def code_bits(distinct: int) -> int:
    """Return the bits of a code for this many distinct rows: 1, 2, 4, 8 or 16."""
    return next(bits for bits in (1, 2, 4, 8, 16) if distinct <= 1 << bits)


def table_end(encoded: Array, row_size: int) -> int:
    """Return the number of bytes before the codes of a dictionary."""
    return _COUNT.itemsize + int(encoded[: _COUNT.itemsize].view(_COUNT)[0]) * row_size


def dictionary(flat: Array, out: Array, most: int) -> int:
    """Write the distinct rows of flat to out, then a code for each row.

    Return the number of bytes; 0 if more than `most` rows are distinct, or out is too small.
    """
    row_size = flat.shape[1]
    distinct, codes = _distinct_rows(flat)
    bits = code_bits(len(distinct)) if 0 < len(distinct) <= most else 0
    begin, end = _COUNT.itemsize, _COUNT.itemsize + distinct.size
    size: int = end + -(-len(flat) * bits // 8)
    if not bits or size > len(out):
        return 0
    out[:begin].view(_COUNT)[0] = len(distinct)
    xor(distinct, np.zeros(row_size, np.uint8), out[begin:end].reshape(-1, row_size))
    out[end:size] = _packed_codes(codes, bits)
    return size


def _distinct_rows(flat: Array) -> tuple[Array, Array]:
    """Return the distinct rows, sorted by their bytes, and the index of each row among them."""
    row_size = flat.shape[1]
    words = widest(flat)
    if words.shape[1] == 1:  # several times faster; numbers are sorted like their bytes if these are swapped
        numbers, codes = np.unique(words.reshape(-1).byteswap(), return_inverse=True)
        return as_bytes(numbers.byteswap()), codes
    rows = flat.view(f"V{row_size}").reshape(-1).tolist()
    index = {row: i for i, row in enumerate(sorted(set(rows)))}
    distinct = np.frombuffer(b"".join(index), np.uint8).reshape(-1, row_size)
    return distinct, np.fromiter(map(index.__getitem__, rows), np.intp, len(rows))


def _packed_codes(codes: Array, bits: int) -> Array:
    if bits >= 8:
        return codes.astype(f"<u{bits // 8}").view(np.uint8)
    return np.packbits(codes.astype(np.uint8)[:, None] >> np.arange(bits, dtype=np.uint8) & 1, bitorder="little")


def undo_dictionary(data: Array, out: Array) -> None:
    """Undo dictionary(): write all rows to out, (rows, row size). Raises CorruptTrace."""
    rows, row_size = out.shape
    if len(data) < _COUNT.itemsize:
        raise CorruptTrace("the size of a dictionary does not match its rows")
    begin, end = _COUNT.itemsize, table_end(data, row_size)
    distinct = (end - begin) // row_size
    if not 0 < distinct <= min(rows, MOST_DISTINCT) or len(data) != end + -(-rows * code_bits(distinct) // 8):
        raise CorruptTrace("the size of a dictionary does not match its rows")
    table = data[begin:end].reshape(distinct, row_size).copy()
    undo_xor(table)
    codes = _unpacked_codes(data[end:], code_bits(distinct))[:rows]
    if codes.max() >= distinct:
        raise CorruptTrace("a code of a column is outside its table")
    np.take(table, codes, axis=0, out=out, mode="clip")  # with "raise", it would copy


def _unpacked_codes(packed: Array, bits: int) -> Array:
    if bits >= 8:
        return packed.copy().view(f"<u{bits // 8}")  # a copy, as the bytes may be unaligned
    return (packed[:, None] >> np.arange(0, 8, bits, dtype=np.uint8) & np.uint8((1 << bits) - 1)).reshape(-1)
