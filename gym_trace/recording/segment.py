"""What rows hold of values, and what encoders make of rows: fragments and columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from gym_trace.model.deltas import FrameRows
from gym_trace.model.layout import Path
from gym_trace.model.values import Array, Packed

_NUMPY_SCALARS = {np.dtype(code).type for code in "?bhilqBHILQefdgFD"}
ATOMS = frozenset({bool, int, float, *_NUMPY_SCALARS})  # immutable: they can be kept as they are

Rows = Array | FrameRows | list[bytes]  # of a column: typed, or one MessagePack value a row
Columns = dict[Path, Array | list[bytes]]


class Segment(NamedTuple):
    """A piece of a chunk: a fragment table and the columns of its rows."""

    fragments: Array
    columns: Mapping[Path, Rows]
    size: int  # in bytes, about


def size_of(rows: Rows) -> int:
    """Bytes that rows take, about."""
    if isinstance(rows, FrameRows):
        return len(rows) * rows.row_size
    return rows.nbytes if isinstance(rows, np.ndarray) else sum(map(len, rows))


def held(value: Any, pack_one: Callable[[Any], bytes]) -> Any:
    """What rows hold of a value of any kind: immutable numbers, arrays of numbers of their own, all else Packed."""
    kind = type(value)
    if kind in ATOMS or kind is Packed:
        return value
    if kind is np.ndarray and value.dtype.kind in "biufc":
        return np.array(value, order="C")
    return Packed(pack_one(value))


def size_held(value: Any) -> int:
    """Bytes that it takes, about."""
    return len(value) if type(value) is Packed else getattr(value, "nbytes", 64)
