"""Select the inner loops of the format: compiled (c_kernels/), or their slower twins in Python."""

from __future__ import annotations

import os
import zlib
from typing import Any

import numpy as np

from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace
from gym_trace.format import transforms, wire

__all__ = [
    "COMPILED",
    "copy_runs",
    "crc32",
    "dictionary",
    "entry_offsets",
    "hash_blocks",
    "shuffle",
    "slices",
    "undo_changes",
    "undo_dictionary",
    "undo_shuffle",
    "undo_xor",
]

ABI = 7  # ABI of the compiled module that matches this version

COMPILED = False

crc32 = zlib.crc32
dictionary = transforms.dictionary
shuffle = transforms.shuffle
undo_changes = transforms.undo_changes
undo_dictionary = transforms.undo_dictionary
undo_shuffle = transforms.undo_shuffle
undo_xor = transforms.undo_xor


entry_offsets: Any = None  # compiled only; its twin is gym_trace.format.ring.log.entry_offsets()
hash_blocks: Any = None  # compiled only; its twin is BLAKE2b of hashlib, in gym_trace.format.parity


def slices(memory: memoryview, begins: Array, ends: Array) -> list[bytes]:
    """Return memory[begin:end] for each of begins and ends, (n,) int64."""
    return [bytes(memory[begin:end]) for begin, end in zip(begins.tolist(), ends.tolist())]


def copy_runs(source: Array, out: Array, begins: Array, targets: Array, counts: Array) -> None:
    """Copy rows begins[i] to begins[i] + counts[i] of source to row targets[i] of out, for each i.

    begins, targets, counts: (n,) int64. Rows of out have the dtype and shape of those of source.
    """
    out[ranges(targets, counts)] = source[ranges(begins, counts)]


def ranges(begins: Array, counts: Array) -> Array:
    """Return the numbers begins[i] to begins[i] + counts[i], for each i."""
    firsts = np.cumsum(counts) - counts
    found: Array = np.repeat(begins - firsts, counts) + np.arange(int(counts.sum()))
    return found


def _select(kernels: Any) -> None:
    """Use the compiled functions. Arrays are C-contiguous uint8, (rows, row size)."""
    global COMPILED, copy_runs, crc32, dictionary, entry_offsets, hash_blocks, shuffle, slices
    global undo_changes, undo_dictionary, undo_shuffle, undo_xor

    in_python = copy_runs

    def compiled_copy_runs(source: Array, out: Array, begins: Array, targets: Array, counts: Array) -> None:
        if out.size and source.dtype != object:
            kernels.copy_runs(source, out, begins, targets, counts, out.nbytes // len(out))
        else:
            in_python(source, out, begins, targets, counts)

    def compiled_shuffle(flat: Array, item_size: int, together: int = 0) -> Array:
        planes = np.empty(flat.size, np.uint8)
        if flat.size:
            kernels.shuffle(flat, planes, flat.shape[1], item_size, 1 if flat.shape[1] >= wire.LARGE_ROW else together)
        return planes

    def compiled_undo_shuffle(
        planes: Array, out: Array, item_size: int, with_xor: bool = False, together: int = 0
    ) -> None:
        if out.size:
            in_rows = out.shape[1] >= wire.LARGE_ROW
            kernels.undo_shuffle(planes, out, out.shape[1], item_size, in_rows, together, with_xor)

    def compiled_undo_xor(flat: Array, together: int = 0) -> None:
        if flat.size:
            kernels.undo_xor(flat, flat.shape[1], together)

    def compiled_undo_changes(data: Array, rows: int, begin: int, out: Array) -> None:
        try:
            kernels.undo_changes(data, rows, begin, out, out.shape[1])
        except ValueError as error:
            raise CorruptTrace(str(error)) from error

    def compiled_dictionary(flat: Array, out: Array, most: int) -> int:
        size: int = kernels.dictionary(flat, out, flat.shape[1], most)
        return size

    def compiled_undo_dictionary(data: Array, out: Array) -> None:
        try:
            kernels.undo_dictionary(data, out, out.shape[1])
        except ValueError as error:
            raise CorruptTrace(str(error)) from error

    entry_offsets, hash_blocks, slices = kernels.entry_offsets, kernels.hash_blocks, kernels.slices
    COMPILED, copy_runs, crc32, shuffle = True, compiled_copy_runs, kernels.crc32, compiled_shuffle
    undo_changes, undo_shuffle, undo_xor = compiled_undo_changes, compiled_undo_shuffle, compiled_undo_xor
    dictionary, undo_dictionary = compiled_dictionary, compiled_undo_dictionary


def _is_right(kernels: Any) -> bool:
    """Return True if the module belongs to this version, and this processor computes checksums correctly."""
    data = bytes(range(256)) * 3 + b"tail"
    return bool(kernels.ABI == ABI and kernels.crc32(data, 7) == zlib.crc32(data, 7))


if os.environ.get("GYM_TRACE_PURE", "0") in ("", "0"):
    try:
        from gym_trace.format import _kernels
    except ImportError:  # not compiled, or for another interpreter
        pass
    else:
        if _is_right(_kernels):
            _select(_kernels)
