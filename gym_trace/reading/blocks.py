"""Walk over the fragments of a writer, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from gym_trace.model.values import Array
from gym_trace.reading.episode_table import Parts, step_offsets
from gym_trace.reading.writer_reader import WriterReader


class Block(NamedTuple):
    """The fragments of one chunk, n of them, and where their rows lie in its columns.

    Attributes:
        number: number of the chunk.
        begin: number of the first fragment, among all of the writer.
        rows: (n,) the row of the episode of each fragment in Parts.table, -1 if it is not wanted or has no episode.
        table: (n,) the fragments, as docs/FORMAT.md describes them.
    """

    number: int
    begin: int
    rows: Array
    table: Array

    @property
    def offsets(self) -> tuple[Array, Array]:
        """(n + 1,) where the observations, and the steps, of each fragment begin; last comes the number of rows."""
        return step_offsets(self.table)


def blocks(writer: WriterReader, parts: Parts, wanted: Array | None = None, first: int = 0) -> Iterator[Block]:
    """Yield the chunks that hold wanted episodes, in their order. Decodes nothing.

    Args:
        parts: the episodes of the writer.
        wanted: a mask over the rows of parts.table. None: all.
        first: number of the chunk to start with.
    """
    chosen = np.zeros(len(parts.table) + 1, np.bool_)  # one more for -1, which is never wanted
    chosen[:-1] = True if wanted is None else wanted
    rows = np.where(chosen[parts.of_fragment], parts.of_fragment, -1)
    has_rows = np.append(0, np.cumsum(rows >= 0))[writer.chunk_bounds]
    for number in (first + np.flatnonzero(np.diff(has_rows[first:]))).tolist():
        begin, end = writer.chunk_bounds[number : number + 2].tolist()
        yield Block(number, begin, rows[begin:end], writer.fragments[begin:end])
