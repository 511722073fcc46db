"""Read one column of an episode chunk by chunk, without the other columns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from gym_trace.data.layout import Path
from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace
from gym_trace.playback.assembly import assemble_leaf
from gym_trace.playback.opened import ChunkCache
from gym_trace.playback.writer_reader import WriterReader

_IN_TABLE = ("terminations", "truncations")  # in the table of fragments: no chunk is read


class LeafRows:
    """One column of an episode, read through a cache of chunks.

    Observations have N + 1 rows, all others N. Steps recorded later do not appear.

    Args:
        writer, row: writer and row of the episode, from EpisodeIndex.locate().
        path: path of the column: ("observations", "image"), ("rewards",), ("terminations",), ("annotations", "value").
    """

    def __init__(self, writer: WriterReader, row: int, path: Path, cache: ChunkCache):
        self._writer, self._row, self._path, self._cache = writer, row, path, cache
        self.steps = int(writer.parts.column("steps", slice(row, row + 1))[0])

    def __len__(self) -> int:
        return self.steps + (self._path[0] == "observations")

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, int, Array | CorruptTrace]]:
        """Yield (first row, number of rows, rows) for rows start to stop, chunk by chunk.

        For an unreadable part, the rows are its error.
        """
        stop = min(stop, len(self))
        if start >= stop:
            return
        observed = self._path[0] == "observations"
        at = start
        found = self._writer.pieces(self._row, range(start, stop - observed))
        rows = self._writer.rows_of(found)
        if self._path[0] not in _IN_TABLE:
            self._cache.expect(self._writer, rows, self._path)
        for number, group in groupby(found, lambda piece: piece.chunk_number):
            pieces = list(group)
            spans = [piece.observations if observed else piece.steps for piece in pieces]
            count = sum(span.stop - span.start for span in spans)
            if not count:
                continue
            try:
                if self._path[0] not in _IN_TABLE:
                    chunk = self._cache.chunk(self._writer, number, self._path, rows[number])
                    pieces = [piece._replace(chunk=chunk) for piece in pieces]
                yield at, count, assemble_leaf(self._path, pieces, self._writer.layouts)
            except CorruptTrace as error:
                yield at, count, error
            at += count
