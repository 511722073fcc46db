"""Salvage the intact columns of a damaged chunk, if the user prefers some columns to none."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gym_trace.errors import CorruptTrace
from gym_trace.format.batch_reader import BatchReader, Chunk
from gym_trace.format.columns import MSGPACK, Column, ColumnEncoder, Path, Piece, Workspace, decode
from gym_trace.model.packing import pack
from gym_trace.model.values import ABSENT, dtype_from

STARTS_COLUMN: Path = ("starts",)
_FRAGMENTS: Path = ("fragments",)
_LEFT_OUT = ("annotations", "starts")  # a chunk without these says nothing of what they are about
_LEVEL = 3  # of zstd


class Salvaged(NamedTuple):
    """A damaged chunk without what is lost of it.

    chunk: with NaN in the rows of lost columns of floats, and ABSENT in those of others. lost: these columns.
    """

    chunk: Chunk
    lost: list[Path]


def salvaged(batch: BatchReader, number: int) -> Salvaged:
    """Return the readable columns of a chunk. Raises CorruptTrace if none of them is a column of steps."""
    described = batch.read_chunk(number, lambda path: False).described
    found: dict[Path, tuple[Column, Piece]] = {}
    lost: list[Path] = []
    workspace = Workspace(_LEVEL)
    for column in described:
        try:
            chunk = batch.read_chunk(number, lambda path, wanted=column.path: path == wanted)  # type: ignore[misc]
            decode(*chunk.encoded(column.path))
            found[column.path] = chunk.encoded(column.path)
        except CorruptTrace:
            lost.append(column.path)
            if column.path[0] not in _LEFT_OUT:
                found[column.path] = _nothing_known(column, workspace)
    if _FRAGMENTS in lost or not found.keys() - {_FRAGMENTS, STARTS_COLUMN} - set(lost):
        raise CorruptTrace("no column of a chunk can be read")
    return Salvaged(Chunk(found, [column for column, _ in found.values()], lambda error: error), lost)


def _nothing_known(column: Column, workspace: Workspace) -> tuple[Column, Piece]:
    """A column of as many rows that says nothing."""
    encoder = ColumnEncoder(column.path, workspace)
    if column.dtype != MSGPACK and (dtype := dtype_from(column.dtype)).kind in "fc":
        return encoder.encode(np.full((column.rows, *column.shape), np.nan, dtype))
    return encoder.encode_values([pack(ABSENT)] * column.rows)
