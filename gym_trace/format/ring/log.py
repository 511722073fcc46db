"""The log of a slab: consecutive entries, each complete once its mark, the number at its end, is written."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np

from gym_trace.data.values import Array
from gym_trace.format import kernels

ENTRY = struct.Struct("<IIHHIqqqqQ")  # docs/FORMAT.md, section 8
_MARK_AT = ENTRY.size - 8
_SIZE, _put_entry, _put_mark = ENTRY.size, ENTRY.pack_into, struct.Struct("<Q").pack_into  # faster than attributes
_LENGTH_AND_MARK = struct.Struct("<4xI40xQ")
_NAMES = ("row", "length", "kind", "flags", "column", "a", "b", "c", "d", "mark")
HEADER = np.dtype(list(zip(_NAMES, ("<u4", "<u4", "<u2", "<u2", "<u4", "<i8", "<i8", "<i8", "<i8", "<u8"))))
Result = TypeVar("Result")
_LEAST_VECTORIZED = 64  # fewer entries are read faster one by one

# Kinds of entries of the slabs of a single environment.
START, INITIAL, FLAG, STOP, END, VALUE, CHANGES, WHOLE, REWARD_TYPE, CONTINUE = range(1, 11)
START_HAS_INITIAL = 1  # flag of START: the next row is the initial observation of the episode
RUNNING, ENDED = 1, 2  # flags of CONTINUE
# Kinds of entries of the slabs of lanes.
ACTIONS, STEP, RESET, INTERRUPTED, END_ALL, STATE = range(20, 26)


class LogEntry(NamedTuple):
    """An entry of a log. The meaning of a to d depends on kind."""

    at: int  # offset in the slab
    kind: int
    row: int  # number of rows, or of steps of all lanes, before the entry
    flags: int
    column: int
    a: int
    b: int
    c: int
    d: int
    payload: bytes | memoryview


class LogFull(Exception):
    """The slab has no space for an entry."""


def in_use(method: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a method of a slab in Python: slab.is_in_use is True while it runs, for signal handlers to check."""

    @functools.wraps(method)
    def wrapped(self: Any, *arguments: Any) -> Result:
        self.is_in_use = True
        try:
            return method(self, *arguments)
        finally:
            self.is_in_use = False

    return wrapped


def size_of(payload: int) -> int:
    """Return the size in bytes of an entry with a payload of `payload` bytes."""
    return ENTRY.size + (payload + 7 & ~7)


def put(
    memory: memoryview,
    at: int,
    mark: int,
    row: int,
    kind: int,
    payload: bytes,
    flags: int,
    column: int,
    a: int,
    b: int,
    c: int,
    d: int,
) -> int:
    """Write an entry at an offset, its mark last; return the offset of the next one. Both entries must fit."""
    length = len(payload)
    following = at + size_of(length)
    if length:
        memory[at + _SIZE : at + _SIZE + length] = payload
    clear(memory, following)
    _put_entry(memory, at, row, length, kind, flags, column, a, b, c, d, mark)
    return following


def clear(memory: memoryview, at: int) -> None:
    """End a log at an offset."""
    _put_mark(memory, at + _MARK_AT, 0)


def entry_offsets(memory: bytes | memoryview, begin: int, end: int, sequence: int) -> Array:
    """Return the offsets (entries,) int64 of the complete entries of a log, in order."""
    if kernels.COMPILED:
        return np.frombuffer(kernels.entry_offsets(memory, begin, end, sequence), np.int64)
    return np.array(_entry_offsets(memory, begin, end, sequence), np.int64)


def _entry_offsets(memory: bytes | memoryview, begin: int, end: int, sequence: int) -> list[int]:
    at, mark, size, unpack, found = begin, sequence << 32, ENTRY.size, _LENGTH_AND_MARK.unpack_from, list[int]()
    ahead = 1
    while at + size <= end:
        length, stored_mark = unpack(memory, at)
        mark += 1
        following = at + size + (length + 7 & ~7)
        if stored_mark != mark or following > end:
            break
        found.append(at)
        at = following
        if length:
            ahead = 1
            continue
        ahead *= 2
        if ahead < _LEAST_VECTORIZED:
            continue
        table = np.frombuffer(memory, HEADER, min(ahead, (end - at) // size), at)  # entries, if none has a payload
        marks = np.uint64(mark + 1) + np.arange(len(table), dtype=np.uint64)
        plain = (table["mark"] == marks) & (table["length"] == 0)
        count = len(plain) if plain.all() else int(plain.argmin())
        found += range(at, at + count * size, size)
        at, mark = at + count * size, mark + count
    return found


def entry_at(memory: memoryview, at: int) -> LogEntry:
    row, length, kind, flags, column, a, b, c, d, _ = ENTRY.unpack_from(memory, at)
    return LogEntry(at, kind, row, flags, column, a, b, c, d, memory[at + ENTRY.size : at + ENTRY.size + length])


def entries(memory: bytes | memoryview, begin: int, end: int, sequence: int) -> Iterator[LogEntry]:
    """Yield the complete entries of a log, in order."""
    view = memoryview(memory)
    return (entry_at(view, at) for at in entry_offsets(view, begin, end, sequence).tolist())


def headers(memory: memoryview, at: Array) -> Array:
    """Return the entries at these offsets, without payloads, as an array of dtype HEADER."""
    first = int(at[0]) % 8 if len(at) else 0
    words = np.frombuffer(memory, np.uint64, (len(memory) - first) // 8, first)
    chosen = at[:, None] // 8 + np.arange(ENTRY.size // 8)
    table: Array = words[chosen].view(HEADER)[:, 0]
    return table
