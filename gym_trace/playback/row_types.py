"""Actual dtypes and shapes of the columns of a trace, from its indexes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.layout import Path
from gym_trace.data.values import dtype_from
from gym_trace.errors import CorruptTrace
from gym_trace.format.column_table import ColumnForm
from gym_trace.format.columns import MSGPACK
from gym_trace.playback.episode_index import RecordedEpisodes, index_of, readers_with_episodes
from gym_trace.playback.writer_reader import WriterReader

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
    for reader, numbers in _chunks_of(trace):
        for form, count in _forms_in(reader, numbers, skip):
            if form is None:
                chunks += count
                continue
            path, dtype, shape = form
            if path[0] in ("fragments", "starts", "states"):
                continue
            row_type = None if dtype == MSGPACK else RowType(dtype_from(dtype), shape)
            found[path] = _joined(found[path], row_type) if path in found else row_type
            counts[path] = counts.get(path, 0) + count
    for path in found:
        if path[0] == "annotations" and counts[path] < chunks:  # some rows have no value
            found[path] = None
    for reader in readers_with_episodes(trace) or index_of(trace).readers:
        for leaf in (*reader.layouts.observations.leaves(), *reader.layouts.actions.leaves()):
            found.setdefault(leaf.path, None if leaf.dtype is None else RowType(leaf.dtype, leaf.shape))
    found.setdefault(("rewards",), RowType(np.dtype(np.float64), ()))
    return found


def _chunks_of(trace: RecordedEpisodes) -> Iterator[tuple[WriterReader, list[int]]]:
    """Yield each writer, and the numbers of its chunks that have steps or observations of these episodes."""
    writers, rows_of = index_of(trace)["writer"], index_of(trace).rows
    for number, reader in enumerate(index_of(trace).readers):
        mine = np.zeros(len(reader.parts), np.bool_)
        mine[rows_of[writers == number]] = True
        yield reader, reader.chunks_with(mine)


def _forms_in(reader: WriterReader, numbers: list[int], skip: bool) -> Iterator[tuple[ColumnForm | None, int]]:
    """Yield the forms of the columns with rows in these chunks, and how many of the chunks have each.

    None: those that have steps.
    """
    has_steps = reader.steps_in_chunks > 0
    unlisted: list[int] = []
    for batch, group in groupby(numbers, lambda number: reader.chunk_positions[number][0]):
        if batch.columns is None:
            unlisted += group
        else:
            own = list(group)
            yield None, int(np.count_nonzero(has_steps[own]))
            yield from batch.columns.forms_in([reader.chunk_positions[number][1] for number in own])
    for number in reader.ahead(iter(unlisted), _HEADERS, lambda number: {number: None}):
        try:
            columns = reader.columns_of(number)
        except CorruptTrace:
            if skip:
                continue
            raise
        yield None, int(has_steps[number])
        yield from ((column[:3], 1) for column in columns if column.rows)


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
