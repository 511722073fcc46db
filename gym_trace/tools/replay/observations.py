"""Observations of an episode, row by row, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gym_trace.data.layout import Leaf, Path
from gym_trace.data.values import Array
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.scan import EPISODE, Scan, StepRuns
from gym_trace.playback.trace import Trace


class ObservationRows:
    """Observations of an episode, one more than its steps. Reading them in order is fast.

    Attributes:
        layout: layout of the observation space.
    """

    def __init__(self, trace: Trace, index: int):
        reader, row = index_of(trace).locate(index)
        self.layout = reader.layouts.observations
        self._content, self._index = index_of(trace), index
        self._steps = int(reader.parts.column("steps", slice(row, row + 1))[0])
        self._runs: Iterator[StepRuns] = iter(())
        self._first = self._count = 0  # first decoded row, and number of decoded rows
        self._columns: dict[Path, Array] = {}

    def __len__(self) -> int:
        return self._steps + 1

    def tree(self) -> Any:
        """Return the structure of the observation space, with objects that return single rows instead of arrays."""
        return self.layout.join(iter([_LeafRows(self, leaf) for leaf in self.layout.leaves()]))

    def value(self, leaf: Leaf, row: int) -> Any:
        """Return the value of a leaf in a row, or the whole row if it does not fit the space. Raises CorruptTrace."""
        if not 0 <= row - self._first < self._count:
            self._read(row)
        index = row - self._first
        if leaf.path in self._columns:
            return self._columns[leaf.path][index]
        whole = self._columns[leaf.path[:1]][index]
        try:
            return self.layout.split(whole)[[known.path for known in self.layout.leaves()].index(leaf.path)]
        except LookupError:
            return whole

    def _read(self, row: int) -> None:
        """Decode the rows from this one on."""
        if not 0 <= row <= self._steps:
            raise IndexError(f"no observation {row}; the episode has {len(self)}")
        if row != self._first + self._count or not self._count:
            steps = slice(max(0, min(row, self._steps - 1)), None)
            scan = Scan(self._content, ["observations"], np.array([self._index]), order=EPISODE, steps=steps)
            self._runs = iter(scan)
        runs = next(self._runs)
        self._first, self._count, self._columns = int(runs.starts_at[0]), runs.size + 1, runs.columns


class _LeafRows:
    def __init__(self, rows: ObservationRows, leaf: Leaf):
        self._rows, self._leaf = rows, leaf

    def __getitem__(self, row: int) -> Any:
        return self._rows.value(self._leaf, row)
