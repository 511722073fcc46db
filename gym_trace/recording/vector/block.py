"""Rows of all lanes at consecutive steps: where they are kept, and how they are put in the order that is stored."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from gym_trace.format.columns import Path
from gym_trace.model.packing import pack
from gym_trace.model.values import Array
from gym_trace.recording.segment import Rows

_NARROW = 16  # bytes
_KEPT = 4  # blocks whose memory is kept: the one being filled, two that wait, and the one being written
_TIMES_AT_ONCE = 16  # such that what is read and written stays in the processor's nearest cache
_WORDS = {2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}  # by their bytes


class StepMemory:
    """Memory for the rows of the steps of a block, taken again once nobody holds arrays in it.

    Of large observations the first touch of fresh memory takes a quarter of what recording them takes of the loop.
    References are counted to find memory that is idle, so where they are not counted exactly all of it is fresh.

    Args:
        count: of lanes.
        times: how many steps a block can have.
    """

    def __init__(self, count: int, times: int):
        self.times = times
        self._count = count
        self._kept: dict[Path, list[Array]] = {}

    def column(self, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """An array of shape (lanes, times, *shape), of any content, for the rows of a column.

        It lies in memory as it is to be stored, by lane, then by time; narrow rows by time first: to put each of them
        into a cache line of its own, step by step, takes longer than to order them later, many at a time.
        """
        size = self._count * self.times * dtype.itemsize * math.prod(shape)
        flat = self._idle(self._kept.setdefault(path, []), size).view(dtype)
        if size <= _NARROW * self._count * self.times:
            return flat.reshape(self.times, self._count, *shape).swapaxes(0, 1)
        return flat.reshape(self._count, self.times, *shape)

    def _idle(self, kept: list[Array], size: int) -> Array:
        for i in range(len(kept) if _COUNTS else 0):
            if kept[i].size == size and sys.getrefcount(kept[i]) == _IDLE:
                return kept[i]
        kept.append(np.empty(size, np.uint8))
        del kept[:-_KEPT]
        return kept[-1]


def by_lane(batches: Sequence[Rows], chosen: Array | None, column: Array | None = None) -> Rows:
    """Rows of batches, each one a lane, by lane, then by time.

    Args:
        chosen: places in that order; None for all.
        column: of shape (lanes, batches, ...); where all batches are views of its memory, they are its rows.
    """
    flat: Rows
    if column is not None and all(isinstance(rows, np.ndarray) and rows.base is column.base for rows in batches):
        flat = _in_order(column).reshape(column.shape[0] * column.shape[1], *column.shape[2:])
    elif _alike(batches):
        stacked = np.ascontiguousarray(np.stack(batches, axis=1))  # which are in Fortran order if all batches are
        flat = stacked.reshape(len(stacked) * stacked.shape[1], *stacked.shape[2:])
    else:
        flat = [row for lane in zip(*map(_packed, batches)) for row in lane]
    return flat if chosen is None else taken(flat, chosen)


def _in_order(stacked: Array) -> Array:
    """An array of shape (lanes, times, ...) as it lies in memory in that order."""
    if stacked.flags.c_contiguous:
        return stacked
    ordered = np.empty(stacked.shape, stacked.dtype)
    words, into = _as_words(stacked), _as_words(ordered)
    for begin in range(0, stacked.shape[1], _TIMES_AT_ONCE):
        into[:, begin : begin + _TIMES_AT_ONCE] = words[:, begin : begin + _TIMES_AT_ONCE]
    return ordered


def _as_words(stacked: Array) -> Array:
    """The same bytes with one number a row, where there are numbers so wide: these are copied far more quickly."""
    word = _WORDS.get(stacked.itemsize * math.prod(stacked.shape[2:]))
    if word is None or stacked.ndim != 3:
        return stacked
    return stacked.view(word)[..., 0]


def taken(rows: Rows, places: Array) -> Rows:
    """Rows at places."""
    return rows.take(places, axis=0) if isinstance(rows, np.ndarray) else [rows[place] for place in places.tolist()]


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


_probe = [np.empty(1, np.uint8)]
_IDLE = sys.getrefcount(_probe[0])
_COUNTS = sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)()
