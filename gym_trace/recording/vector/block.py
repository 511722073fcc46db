"""Rows of all lanes at consecutive steps: where they are kept, and how they are put in the order that is stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gym_trace.format.buffers import Buffers
from gym_trace.model.packing import pack
from gym_trace.model.values import Array
from gym_trace.recording.segment import Rows

_NARROW = 16  # bytes
_TIMES_AT_ONCE = 16  # such that what is read and written stays in the processor's nearest cache
_WORDS = {2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}  # by their bytes


class StepRooms:
    """Memory for the rows of the steps of a block, ordered by lane, then by time, as they are to be stored.

    Narrow rows are ordered by time first: to put each of them into a cache line of its own, step by step, takes longer
    than to order them later, many at a time.

    Args:
        count: of lanes.
        times: how many steps a block can have.
    """

    def __init__(self, count: int, times: int):
        self.times = times
        self._count = count
        self._buffers = Buffers()
        self._rooms: dict[object, Array] = {}

    def clear(self) -> None:
        """For another block: takes memory that nobody uses any more."""
        self._rooms = {}

    def room(self, key: object, dtype: np.dtype[Any], shape: tuple[int, ...], time: int) -> Array:
        """An array of shape (lanes, *shape) for the rows of a column at a time, the same as before if asked again."""
        rooms = self._rooms.get(key)
        if rooms is None:
            size = self._count * self.times * dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            flat = self._buffers.take(size).view(dtype)
            if size <= _NARROW * self._count * self.times:
                rooms = flat.reshape(self.times, self._count, *shape).swapaxes(0, 1)
            else:
                rooms = flat.reshape(self._count, self.times, *shape)
            self._rooms[key] = rooms
        return rooms[:, time]


def by_lane(batches: Sequence[Rows], chosen: Array | None, room: Callable[[int], Array]) -> Rows:
    """Rows of batches, each one a lane, by lane, then by time.

    Args:
        chosen: places in that order; None for all.
        room: gives byte arrays of a size.
    """
    flat: Rows
    stacked = _by_lane_already(batches)
    if stacked is None and _alike(batches):
        stacked = np.ascontiguousarray(np.stack(batches, axis=1))  # which are in Fortran order if all batches are
    if stacked is not None:
        flat = _in_order(stacked, room).reshape(len(stacked) * stacked.shape[1], *stacked.shape[2:])
    else:
        flat = [row for lane in zip(*map(_packed, batches)) for row in lane]
    if chosen is None or isinstance(flat, list):
        return flat if chosen is None else taken(flat, chosen)
    size = flat.nbytes // max(1, len(flat)) * len(chosen)
    out = room(size).view(flat.dtype).reshape(len(chosen), *flat.shape[1:])
    return flat.take(chosen, axis=0, out=out, mode="clip")  # which puts them into out without a copy in between


def _by_lane_already(batches: Sequence[Rows]) -> Array | None:
    """Batches that lie one after the other in one room, as one array of shape (lanes, times, ...); None if not."""
    first, last = batches[0], batches[-1]
    if not isinstance(first, np.ndarray) or not isinstance(last, np.ndarray) or not isinstance(first.base, np.ndarray):
        return None
    base, dtype = first.base, first.dtype
    row = int(np.prod(first.shape[1:], dtype=np.int64)) * dtype.itemsize
    if not row or not all(isinstance(rows, np.ndarray) and rows.base is base for rows in batches):
        return None
    begin = first.ctypes.data - base.ctypes.data
    apart = first.nbytes if first.flags.c_contiguous else row
    if last.ctypes.data - first.ctypes.data != (len(batches) - 1) * apart or last.dtype != dtype:
        return None
    strides = (first.strides[0], apart, *first.strides[1:])
    return np.ndarray((len(first), len(batches), *first.shape[1:]), dtype, base.data, begin, strides)


def _in_order(stacked: Array, room: Callable[[int], Array]) -> Array:
    """An array of shape (lanes, times, ...) as it lies in memory in that order."""
    if stacked.flags.c_contiguous:
        return stacked
    ordered = room(stacked.nbytes).view(stacked.dtype).reshape(stacked.shape)
    words, into = _as_words(stacked), _as_words(ordered)
    for begin in range(0, stacked.shape[1], _TIMES_AT_ONCE):
        into[:, begin : begin + _TIMES_AT_ONCE] = words[:, begin : begin + _TIMES_AT_ONCE]
    return ordered


def _as_words(stacked: Array) -> Array:
    """The same bytes with one number a row, where there are numbers so wide: these are copied far more quickly."""
    word = _WORDS.get(stacked.itemsize * int(np.prod(stacked.shape[2:], dtype=np.int64)))
    if word is None or stacked.ndim != 3:
        return stacked
    return stacked.view(word)[..., 0]


def taken(rows: Rows, places: Array) -> Rows:
    """Rows at places."""
    return rows[places] if isinstance(rows, np.ndarray) else [rows[place] for place in places.tolist()]


def by_time(flags: list[Array]) -> Array:
    """One flag a lane from each step, as an array of shape (times, lanes)."""
    stacked = _by_lane_already(flags)
    return np.array(flags) if stacked is None else stacked.T


def inserted(column: Rows, at: Array, rows: Rows) -> Rows:
    """column with rows put in, one before each place."""
    if isinstance(column, np.ndarray) and isinstance(rows, np.ndarray) and _alike([column, rows]):
        return np.insert(column, at, rows, axis=0)
    kept, more = _packed(column), _packed(rows)
    for place, row in zip(reversed(at.tolist()), reversed(more)):
        kept.insert(place, row)
    return kept


def _alike(batches: Sequence[Rows]) -> bool:
    first = batches[0]
    return isinstance(first, np.ndarray) and all(
        isinstance(batch, np.ndarray) and batch.dtype == first.dtype and batch.shape[1:] == first.shape[1:]
        for batch in batches
    )


def _packed(batch: Rows) -> list[bytes]:
    return [pack(row) for row in batch] if isinstance(batch, np.ndarray) else list(batch)
