"""The observations of a recorded episode, row by row, in the memory of one chunk."""

from __future__ import annotations

from typing import Any

import numpy as np

from gym_trace.errors import CorruptTrace
from gym_trace.format.batch_reader import Chunk
from gym_trace.model.layout import Leaf
from gym_trace.reading.writer_reader import WriterReader

_ROOTS = frozenset(("observations",))


class ObservationRows:
    """Gives single rows; quick where they are asked for in order, because only the last chunk is kept.

    Args:
        writer: whose episode it is.
        row: of the episode in the writer's table.
    """

    def __init__(self, writer: WriterReader, row: int):
        self.layout = writer.layouts.observations
        self._writer = writer
        self._pieces = writer.pieces(row)
        counts = [piece.observations.stop - piece.observations.start for piece in self._pieces]
        self._bounds = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._number = -1  # of the chunk that is kept
        self._chunk: Chunk | None = None

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def tree(self) -> Any:
        """The structure of the observation space with something in place of each array that gives single rows."""
        return self.layout.join(iter([_Column(self, leaf) for leaf in self.layout.leaves()]))

    def value(self, leaf: Leaf, row: int) -> Any:
        """The part of an observation that leaf is for. Raises CorruptTrace."""
        number = int(np.searchsorted(self._bounds, row, side="right")) - 1
        piece = self._pieces[number]
        if self._chunk is None or self._number != piece.chunk_number:
            self._chunk, self._number = self._writer.chunk(piece.chunk_number, _ROOTS), piece.chunk_number
        if leaf.path not in self._chunk:
            raise CorruptTrace(f"a chunk lacks the column {'/'.join(map(str, leaf.path))}")
        return self._chunk.array(leaf.path)[piece.observations.start + row - int(self._bounds[number])]


class _Column:
    def __init__(self, rows: ObservationRows, leaf: Leaf):
        self._rows, self._leaf = rows, leaf

    def __getitem__(self, row: int) -> Any:
        return self._rows.value(self._leaf, row)
