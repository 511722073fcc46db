"""Chunks of a scan whose columns are read on first use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from gym_trace.format.batch_reader import Chunk, RowRanges
from gym_trace.playback.writer_reader import WriterReader

STARTS = "starts"


class Asked(Set[str]):
    """The columns that were used in the last two chunks, which are probably used in the next ones."""

    def __init__(self) -> None:
        self._latest: set[str] = set()
        self._before: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._latest or name in self._before

    def __iter__(self) -> Iterator[str]:
        return iter(self._latest | self._before)

    def __len__(self) -> int:
        return len(self._latest | self._before)

    def add(self, name: str) -> None:
        self._latest.add(name)

    def next_chunk(self) -> None:
        """Go on to the next chunk."""
        if self._latest:
            self._latest, self._before = set(), self._latest


class ChunkOnDemand(Chunk):
    """A chunk shared by all episodes in it. with_column() reads a column, and the others that were used before."""

    def __init__(self, writer: WriterReader, number: int, asked: Asked, needed: RowRanges | None = None):
        """needed: the rows that are read; None: all."""
        self._writer, self._number, self._asked, self.needed = writer, number, asked, needed
        self._read: dict[str, Chunk] = {}

    def has(self, name: str) -> bool:
        return name in self._read

    def with_column(self, name: str) -> Chunk:
        """Return a chunk that has this column. Raises CorruptTrace."""
        self._asked.add(name)
        found = self._read.get(name)
        if found is None:
            missing = frozenset(other for other in self._asked if other not in self._read and other != STARTS)
            found = self._writer.chunk(self._number, frozenset(missing), self.needed)
            self._read |= dict.fromkeys(missing, found)
        return found


def with_column(name: str, chunks: Mapping[int, Chunk], writer: WriterReader) -> dict[int, Chunk]:
    """Return chunks on demand, by number, as chunks that have this column. Raises CorruptTrace."""
    on_demand = {number: chunk for number, chunk in chunks.items() if isinstance(chunk, ChunkOnDemand)}
    if len(on_demand) > 1 and writer.files.storage.ahead:
        missing = {number: chunk.needed for number, chunk in on_demand.items() if not chunk.has(name)}
        if len(missing) > 1:
            writer.expect(missing, frozenset((name,)))
    return {number: chunk.with_column(name) for number, chunk in on_demand.items()}
