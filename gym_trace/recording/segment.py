"""What encoders make of recorded rows: segments of fragments and columns. Snapshots of single values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from gym_trace.model.deltas import DeltaRows
from gym_trace.model.layout import Path
from gym_trace.model.values import Array, Packed

_NUMPY_SCALARS = {np.dtype(code).type for code in "?bhilqBHILQefdgFD"}
ATOMS = frozenset({bool, int, float, *_NUMPY_SCALARS})  # immutable, so that no copy is needed

Rows = Array | list[bytes]  # of a column: typed, or one MessagePack value a row
AnyRows = Rows | DeltaRows
Columns = dict[Path, Rows]


class Segment(NamedTuple):
    """A piece of a chunk: a fragment table and the columns of its rows."""

    fragments: Array
    columns: Mapping[Path, AnyRows]
    size: int  # approximate, in bytes


def size_of(rows: AnyRows) -> int:
    """The approximate size of rows in bytes."""
    if isinstance(rows, DeltaRows):
        return len(rows) * rows.row_size
    return rows.nbytes if isinstance(rows, np.ndarray) else sum(map(len, rows))


def snapshot(value: Any, pack_one: Callable[[Any], bytes]) -> Any:
    """An immutable or own copy of any value: numbers as they are, numeric arrays copied, all else as Packed."""
    kind = type(value)
    if kind in ATOMS or kind is Packed:
        return value
    if kind is np.ndarray and value.dtype.kind in "biufc":
        return np.array(value, order="C")
    return Packed(pack_one(value))


def snapshot_size(value: Any) -> int:
    """The approximate size of a snapshot in bytes."""
    return len(value) if type(value) is Packed else getattr(value, "nbytes", 64)
