"""Actual dtypes and shapes of the columns of a trace, from its indexes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.layout import Path
from gym_trace.data.values import dtype_from
from gym_trace.errors import CorruptTrace
from gym_trace.format.columns import MSGPACK, ColumnDescriptor
from gym_trace.playback.episode_index import RecordedEpisodes, index_of

_HEADERS: frozenset[str | Path] = frozenset(("",))  # no column has this name, so only headers of chunks are fetched


class RowType(NamedTuple):
    """Dtype and shape of the rows of a column.

    mixed: True if some rows have another dtype, which converts to this one exactly.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    mixed: bool = False

    @property
    def row_size(self) -> int:
        """Bytes of a row."""
        return self.dtype.itemsize * math.prod(self.shape)


def row_types(trace: RecordedEpisodes, skip: bool = False) -> dict[Path, RowType | None]:
    """Return the type of the rows of each column; None: values of any type, or types that cannot be joined exactly.

    Paths: ("observations", …) and ("actions", …), one per leaf, ("rewards",), ("infos",), ("annotations", name).
    Columns without rows have the type of their space. skip: skip damaged chunks; otherwise raises CorruptTrace.
    """
    found: dict[Path, RowType | None] = {}
    counts: dict[Path, int] = {}
    chunks = 0
    for column in _columns(trace, skip):
        if column is None:
            chunks += 1
            continue
        counts[column.path] = counts.get(column.path, 0) + 1
        row_type = None if column.dtype == MSGPACK else RowType(dtype_from(column.dtype), column.shape)
        found[column.path] = row_type if counts[column.path] == 1 else _joined(found[column.path], row_type)
    for path in found:
        if path[0] == "annotations" and counts[path] < chunks:  # some rows have no value
            found[path] = None
    for reader in index_of(trace).readers:
        for leaf in (*reader.layouts.observations.leaves(), *reader.layouts.actions.leaves()):
            found.setdefault(leaf.path, None if leaf.dtype is None else RowType(leaf.dtype, leaf.shape))
    found.setdefault(("rewards",), RowType(np.dtype(np.float64), ()))
    return found


def _columns(trace: RecordedEpisodes, skip: bool) -> Iterator[ColumnDescriptor | None]:
    """Yield the columns with rows in each chunk of these episodes; before them None, if the chunk has steps."""
    writers, rows_of = index_of(trace)["writer"], index_of(trace).rows
    for number, reader in enumerate(index_of(trace).readers):
        mine = np.zeros(len(reader.parts), np.bool_)
        mine[rows_of[writers == number]] = True
        for block in reader.ahead(reader.blocks(mine), _HEADERS, lambda block: (block.number,)):
            try:
                columns = reader.columns_of(block.number)
            except CorruptTrace:
                if skip:
                    continue
                raise
            if block.table["steps"].any():
                yield None
            for column in columns:
                if column.rows and column.path[0] not in ("fragments", "starts", "states"):
                    yield column


def _joined(one: RowType | None, other: RowType | None) -> RowType | None:
    """Return a type that represents the rows of both exactly; None if impossible."""
    if one is None or other is None or one.shape != other.shape:
        return None
    if one.dtype == other.dtype:
        return one
    dtype = np.result_type(one.dtype, other.dtype)
    exact = all(np.can_cast(row_type.dtype, dtype, "safe") for row_type in (one, other))
    wide = dtype.kind == "f" and {one.dtype.kind, other.dtype.kind} & set("iu")
    if not exact or (wide and max(one.dtype.itemsize, other.dtype.itemsize) > 4):
        return None
    return RowType(dtype, one.shape, mixed=True)
