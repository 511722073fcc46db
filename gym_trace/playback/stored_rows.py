"""Positions of whole episodes in the chunks of a writer, and their columns joined together."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gym_trace.data.layout import Path
from gym_trace.data.values import Array, distinct
from gym_trace.format import wire
from gym_trace.format.batch_reader import Chunk
from gym_trace.format.fragments import as_slice
from gym_trace.format.kernels import copy_runs
from gym_trace.playback.assembly import ChunkSlice
from gym_trace.playback.step_runs import FLAGS
from gym_trace.playback.writer_reader import WriterReader


class StoredRows:
    """The rows of several whole episodes of a writer. A first step whose observation is lost is skipped.

    Attributes:
        chunks: numbers of the chunks that hold them, ascending.
        flags: flags of each fragment.
        first: (episodes + 1,) the fragments of episode i are first[i] to first[i + 1].
    """

    def __init__(self, reader: WriterReader, rows: Array):
        """rows: rows of the episodes in reader.parts."""
        parts = reader.parts
        chosen = as_slice(rows)
        fragments = parts.fragments_of(chosen)
        self.first = _offsets(parts.first[1:][chosen] - parts.first[:-1][chosen])
        self.flags = reader.fragments.flags[fragments]
        steps = reader.fragments.steps[fragments].astype(np.int64)
        # Observations, and steps, of each fragment: their number, and where they begin in their chunk.
        self._counts = steps + (self.flags & wire.HAS_INITIAL > 0), steps
        self._begins = np.empty_like(steps), np.empty_like(steps)
        self._chunk_of = np.searchsorted(reader.chunk_bounds, fragments, side="right") - 1
        self.chunks = distinct(self._chunk_of).tolist()
        self._mine = [np.flatnonzero(self._chunk_of == number) for number in self.chunks]  # fragments in each chunk
        for number, mine in zip(self.chunks, self._mine):
            at = fragments[mine] - reader.chunk_bounds[number]
            for begins, known in zip(self._begins, reader.offsets(number)):
                begins[mine] = known[at]
        lost, heads = parts.first_step_lost[chosen], self.first[:-1]
        steps[heads] -= lost
        self._begins[1][heads] += lost

    def offsets(self, path: Path) -> Array:
        """Return where the rows of each episode begin in a column, and the end: (episodes + 1,) int64."""
        offsets: Array = _offsets(self._counts[path[0] != "observations"])[self.first]
        return offsets

    @property
    def lengths(self) -> Array:
        """(episodes,) int64, number of steps of each episode."""
        return np.diff(self.offsets(("rewards",)))

    @property
    def is_alone(self) -> Array:
        """(episodes,) bool: True for an episode that is one fragment, in the last chunk."""
        is_alone: Array = (np.diff(self.first) == 1) & (self._chunk_of[self.first[:-1]] == self.chunks[-1])
        return is_alone

    def in_chunks(self, path: Path) -> tuple[Array, Array]:
        """Return where the rows of the first fragment of each episode begin and end in its chunk."""
        is_step, first = path[0] != "observations", self.first[:-1]
        begins = self._begins[is_step][first]
        return begins, begins + self._counts[is_step][first]

    def column(self, path: Path, chunks: Mapping[int, Chunk]) -> Array | None:
        """Return a column of all episodes; None if a chunk lacks it, or if types differ.

        It may share memory with a chunk.
        """
        if path in FLAGS:
            steps = self._counts[1]
            flagged = (self.flags & FLAGS[path] > 0) & (steps > 0)
            column = np.zeros(int(steps.sum()), np.bool_)
            column[np.cumsum(steps)[flagged] - 1] = True
            return column
        if any(path not in chunks[number] for number in self.chunks):
            return None
        arrays = [chunks[number].array(path) for number in self.chunks]
        if len({(array.dtype, array.shape[1:]) for array in arrays}) > 1:
            return None
        is_step = path[0] != "observations"
        begins, counts = self._begins[is_step], self._counts[is_step]
        targets, total = np.cumsum(counts) - counts, int(counts.sum())
        if len(arrays) == 1 and np.array_equal(begins, begins[:1] + targets):  # consecutive rows
            return arrays[0][int(begins[0]) :][:total]
        out = np.empty((total, *arrays[0].shape[1:]), arrays[0].dtype)
        for array, mine in zip(arrays, self._mine):
            copy_runs(array, out, begins[mine], targets[mine], counts[mine])
        return out

    def slices(self, episode: int, chunks: Mapping[int, Chunk]) -> list[ChunkSlice]:
        """Return the rows of an episode as slices of chunks."""
        own = slice(*self.first[episode : episode + 2].tolist())
        numbers, flags = self._chunk_of[own].tolist(), self.flags[own].tolist()
        observations, steps = (
            map(slice, begins[own].tolist(), (begins[own] + counts[own]).tolist())
            for begins, counts in zip(self._begins, self._counts)
        )
        return [ChunkSlice(chunks[it[0]], *it) for it in zip(numbers, observations, steps, flags)]


def _offsets(counts: Array) -> Array:
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets
