"""Reorder rows of all lanes at consecutive steps for storage: by lane, then by time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gym_trace.model.packing import pack
from gym_trace.model.values import Array
from gym_trace.ring.segment import Rows

_LEAST_TIMES_AT_ONCE, _ROWS_AT_ONCE = 32, 1 << 15  # block sizes that fit the processor's caches
_WORDS = {2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}  # by size in bytes


def column_by_lane(column: Array, chosen: Array | None) -> Rows:
    """Return rows of an array, (lanes, times, ...), by lane, then by time. chosen: indices in that order; None: all."""
    flat = _in_order(column).reshape(column.shape[0] * column.shape[1], *column.shape[2:])
    return flat if chosen is None else taken(flat, chosen)


def by_lane(batches: Sequence[Rows], chosen: Array | None) -> Rows:
    """Return rows of batches by lane, then by time. batches: one per time, with one row per lane."""
    flat: Rows
    if _alike(batches):
        stacked = np.ascontiguousarray(np.stack(batches, axis=1))  # np.stack keeps the Fortran order of batches
        flat = stacked.reshape(len(stacked) * stacked.shape[1], *stacked.shape[2:])
    else:
        flat = [row for lane in zip(*map(_packed, batches)) for row in lane]
    return flat if chosen is None else taken(flat, chosen)


def _in_order(stacked: Array) -> Array:
    """Return an array, (lanes, times, ...), in C order."""
    if stacked.flags.c_contiguous:
        return stacked
    ordered = np.empty(stacked.shape, stacked.dtype)
    words, into = _as_words(stacked), _as_words(ordered)
    at_once = max(_LEAST_TIMES_AT_ONCE, _ROWS_AT_ONCE // max(1, len(stacked)))
    for begin in range(0, stacked.shape[1], at_once):
        into[:, begin : begin + at_once] = words[:, begin : begin + at_once]
    return ordered


def _as_words(stacked: Array) -> Array:
    """View each row as one number, if a type of that size exists: such rows are copied much faster."""
    word = _WORDS.get(stacked.itemsize * math.prod(stacked.shape[2:]))
    if word is None or stacked.ndim != 3:
        return stacked
    return stacked.view(word)[..., 0]


def taken(rows: Rows, places: Array) -> Rows:
    """Return rows at the given indices."""
    return rows.take(places, axis=0) if isinstance(rows, np.ndarray) else [rows[place] for place in places.tolist()]


def inserted(column: Rows, at: Array, rows: Rows) -> Rows:
    """Return column with rows inserted, one before each index in `at`."""
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
