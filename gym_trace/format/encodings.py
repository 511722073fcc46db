"""Encodings of the rows of a column, before compression (docs/FORMAT.md, section 3).

Each encoding is an object in ENCODINGS; nothing else lists them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gym_trace.data.values import Array
from gym_trace.format import kernels, transforms, wire

# Bits that an encoding may have in addition: CONSTANT only those of equal size, BLOCKS only those with in_blocks.
ZSTD, CONSTANT, BLOCKS = 1, 8, 64
_SHUFFLE, _XOR, _CHANGES, _DICTIONARY = 2, 4, 16, 32
_PIECE_BYTES = 512 << 10  # large rows are encoded and compressed in pieces that fit the processor's cache


def _of_equal_size(raw: int, rows: int, row_size: int) -> bool:
    return raw == rows * row_size


class Encoding(NamedTuple):
    """A way to store the bytes of rows.

    Attributes:
        bits: bits of the encoding in a column descriptor.
        applies: applies(row_size, item_size) is True if the encoder should try it.
        encode: encode(rows, before, scratch, item_size, together) returns the stored bytes; None if it saves nothing.
            rows: (n, row size) uint8. before: (row size,) uint8, the row before them; zeros for the first rows.
            scratch: uint8, at least as large as rows; the result may lie in it. together: size of the blocks of rows
            that are encoded by themselves; 0: all rows are one block.
        decode: decode(data, out, item_size, together) writes all rows to out, (rows, row size) uint8. data: untrusted,
            uint8, of a size that fits() accepts. Raises CorruptTrace.
        in_place: decode() expects `data` in the memory of `out`.
        in_blocks: rows can be encoded in blocks.
        fits: fits(raw, rows, row_size) is True if rows can take `raw` stored bytes.
        decode_rows: decode_rows(data, rows, begin, out) decodes only the rows from begin on into out. None: not
            possible. An encoding with decode_rows stores the first row of a chunk unencoded; encode() then gets that
            row as `before`.
        piece_bytes: bytes of large rows per call of encode().
    """

    bits: int
    applies: Callable[[int, int], bool]
    encode: Callable[[Array, Array, Array, int, int], Array | bytes | None]
    decode: Callable[[Array, Array, int, int], None]
    in_place: bool = False
    in_blocks: bool = True
    fits: Callable[[int, int, int], bool] = _of_equal_size
    decode_rows: Callable[[Array, int, int, Array], None] | None = None
    piece_bytes: int = _PIECE_BYTES


def encoding_of(bits: int) -> Encoding | None:
    """Return the encoding with these bits, ignoring ZSTD, CONSTANT and BLOCKS; None if it is unknown."""
    return _BY_BITS.get(bits & ~(ZSTD | CONSTANT | BLOCKS))


# -- encode and decode -------------------------------------------------------------------------------------------------


def _plain(rows: Array, before: Array, scratch: Array, item_size: int, together: int) -> Array:
    return rows


def _undo_plain(data: Array, out: Array, item_size: int, together: int) -> None:
    return


def _xor(rows: Array, before: Array, scratch: Array, item_size: int, together: int) -> Array:
    return transforms.xor(rows, before, scratch[: len(rows)], together)


def _undo_xor(data: Array, out: Array, item_size: int, together: int) -> None:
    kernels.undo_xor(out, together)


def _shuffle(rows: Array, before: Array, scratch: Array, item_size: int, together: int) -> Array:
    return kernels.shuffle(rows, item_size, together)


def _undo_shuffle(data: Array, out: Array, item_size: int, together: int) -> None:
    kernels.undo_shuffle(data, out, item_size, together=together)


def _xor_and_shuffle(rows: Array, before: Array, scratch: Array, item_size: int, together: int) -> Array:
    return kernels.shuffle(_xor(rows, before, scratch, item_size, together), item_size, together)


def _undo_xor_and_shuffle(data: Array, out: Array, item_size: int, together: int) -> None:
    kernels.undo_shuffle(data, out, item_size, True, together)  # in one pass


def _changes(rows: Array, before: Array, scratch: Array, item_size: int, together: int) -> bytes:
    return transforms.changes(rows, before, scratch[: len(rows)].view(np.bool_))


def _undo_changes(data: Array, out: Array, item_size: int, together: int) -> None:
    kernels.undo_changes(data, len(out), 0, out)


def _changed_rows(data: Array, rows: int, begin: int, out: Array) -> None:
    kernels.undo_changes(data, rows, begin, out)


def _changes_fit(raw: int, rows: int, row_size: int) -> bool:
    return rows > 0 and row_size >= wire.LARGE_ROW and row_size <= raw <= 8 * rows * row_size


def _dictionary(rows: Array, before: Array, scratch: Array, item_size: int, together: int) -> Array | None:
    out = scratch.reshape(-1)
    size = kernels.dictionary(rows, out, min(transforms.MOST_DISTINCT, len(rows) // 2))
    return out[:size] if size else None


def _undo_dictionary(data: Array, out: Array, item_size: int, together: int) -> None:
    kernels.undo_dictionary(data, out)


def _dictionary_fits(raw: int, rows: int, row_size: int) -> bool:
    most = min(rows, transforms.MOST_DISTINCT)
    return 0 < row_size < wire.LARGE_ROW and rows > 0 and raw <= 4 + most * row_size + 2 * rows


def _always(row_size: int, item_size: int) -> bool:
    return True


def _of_wide_elements(row_size: int, item_size: int) -> bool:
    return item_size > 1


PLAIN = Encoding(0, _always, _plain, _undo_plain, in_place=True)
XOR = Encoding(_XOR, _always, _xor, _undo_xor, in_place=True)
SHUFFLE = Encoding(_SHUFFLE, _of_wide_elements, _shuffle, _undo_shuffle)
XOR_AND_SHUFFLE = Encoding(_XOR | _SHUFFLE, _of_wide_elements, _xor_and_shuffle, _undo_xor_and_shuffle)
CHANGES = Encoding(
    bits=_CHANGES,
    applies=lambda row_size, item_size: row_size >= wire.LARGE_ROW,
    encode=_changes,
    decode=_undo_changes,
    in_blocks=False,
    fits=_changes_fit,
    decode_rows=_changed_rows,
    piece_bytes=4 << 20,  # it touches less memory
)
DICTIONARY = Encoding(
    bits=_DICTIONARY,
    applies=lambda row_size, item_size: 0 < row_size < wire.LARGE_ROW,
    encode=_dictionary,
    decode=_undo_dictionary,
    in_blocks=False,
    fits=_dictionary_fits,
)
ENCODINGS = (DICTIONARY, CHANGES, PLAIN, XOR, SHUFFLE, XOR_AND_SHUFFLE)  # in the order in which the encoder tries them
_BY_BITS = {encoding.bits: encoding for encoding in ENCODINGS}
KNOWN_BITS = functools.reduce(operator.or_, _BY_BITS, ZSTD | CONSTANT | BLOCKS)
