"""Segments, the decoded rows of a slab as fragments and columns; snapshots of single values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.deltas import DeltaRows
from gym_trace.data.layout import Path
from gym_trace.data.packing import pack
from gym_trace.data.values import Array, Packed, unstored
from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.format.wire import ENDS, STARTS

_NUMPY_SCALARS = {np.dtype(code).type for code in "?bhilqBHILQefdgFD"}
ATOMS = frozenset({bool, int, float, *_NUMPY_SCALARS})  # immutable: no copy needed

ColumnRows = Array | list[bytes]  # rows of a column: typed, or one MessagePack value per row
AnyRows = ColumnRows | DeltaRows
Columns = dict[Path, ColumnRows]
_STARTS = ("starts",)


class Segment(NamedTuple):
    """Decoded rows: a fragment table and its columns. Chunks are joined from segments."""

    fragments: Array
    columns: Mapping[Path, AnyRows]
    size: int  # approximate, in bytes


def size_of(rows: AnyRows) -> int:
    """Return the approximate size of rows in bytes."""
    if isinstance(rows, DeltaRows):
        return len(rows) * rows.row_size
    return rows.nbytes if isinstance(rows, np.ndarray) else sum(map(len, rows))


def snapshot(value: Any, pack_one: Callable[[Any], bytes]) -> Any:
    """Return a value that later changes cannot reach: a number, a copy of a numeric array, or Packed for any other."""
    kind = type(value)
    if kind in ATOMS or kind is Packed:
        return value
    if kind is np.ndarray and value.dtype.kind in "biufc":
        return np.array(value, order="C")
    return Packed(pack_one(value))


def typed_or_values(path: Path, values: list[Any], complaints: dict[str, str]) -> ColumnRows:
    """Return a typed array if all values share dtype and shape, otherwise one MessagePack value per row.

    complaints: receives a warning, by column, for a value that is too large.
    """
    kinds = set(map(type, values))
    if len(kinds) == 1:
        kind = kinds.pop()
        if kind is np.ndarray or issubclass(kind, np.generic):
            dtype, shape = values[0].dtype, values[0].shape
            plain = dtype.kind in "biufc" and dtype.str[0] in "<|"
            if plain and all(value.dtype == dtype and value.shape == shape for value in values):
                return np.array(values, dtype)
        elif kind is float:
            return np.array(values, np.float64)
    packed = [value if type(value) is Packed else pack(value) for value in values]
    for i, value in enumerate(packed):
        if len(value) + wire.LENGTH.itemsize > wire.MAX_VALUES:
            complaint = f"a value of {len(value)} bytes is too large for a column; its repr is kept"
            complaints["/".join(map(str, path)) + ", as it is stored"] = complaint
            packed[i] = pack(unstored(values[i]))
    return packed


class Start(NamedTuple):
    """Start of an episode."""

    episode: int
    seed: int  # as the fragment table has it
    utc: int
    monotonic: int


def packed_fragment(
    start: Start, first_step: int, steps: int, flags: int, outcome: int, utc: int, monotonic: int
) -> bytes:
    """Return a row of the fragment table. utc, monotonic: end of the episode; ignored without the flag ENDS."""
    episode, seed, start_utc, start_monotonic = start
    offset = start_utc - start_monotonic
    duration = drift = 0
    if flags & ENDS:
        duration = monotonic - start_monotonic
        drift = utc - monotonic - offset
    else:
        outcome = 0
    if not flags & STARTS:
        seed = start_utc = offset = 0
    try:
        return wire.pack_fragment(
            episode, first_step, steps, 0, flags, outcome, 0.0, seed, start_utc, offset, duration, drift
        )
    except wire.OutOfRange as error:
        raise CorruptTrace("ring log value out of range") from error
