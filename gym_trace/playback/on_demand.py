"""Chunks of a scan whose columns are read when an episode is asked for them."""

from __future__ import annotations

from collections.abc import Iterator, Set

from gym_trace.format.batch_reader import Chunk
from gym_trace.playback.assembly import ChunkSlice
from gym_trace.playback.writer_reader import WriterReader

STARTS = "starts"
_IN_TABLE = ("terminations", "truncations")  # the table of fragments has them


class Asked(Set[str]):
    """The columns that episodes of the last two chunks were asked for: as a rule, the next ones are asked for them."""

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

    def turn(self) -> None:
        """Go on to the next chunk."""
        if self._latest:
            self._latest, self._before = set(), self._latest


class ChunkOnDemand(Chunk):
    """A chunk that all episodes in it share; of() reads a column, together with the others that were asked for."""

    def __init__(self, writer: WriterReader, number: int, asked: Asked):
        self._writer, self._number, self._asked = writer, number, asked
        self._read: dict[str, Chunk] = {}

    def has(self, name: str) -> bool:
        return name in self._read

    def of(self, name: str) -> Chunk:
        """Return a chunk that has a column. Raises CorruptTrace."""
        self._asked.add(name)
        found = self._read.get(name)
        if found is None:
            missing = frozenset(other for other in self._asked if other not in self._read and other != STARTS)
            found = self._writer.chunk(self._number, frozenset(missing))
            self._read |= dict.fromkeys(missing, found)
        return found


def read(pieces: list[ChunkSlice], name: str, writer: WriterReader) -> list[ChunkSlice]:
    """Return pieces of chunks on demand with a column that was read. Raises CorruptTrace."""
    if name in _IN_TABLE:
        return pieces
    if len(pieces) > 1 and writer.files.storage.ahead:
        missing = {it.chunk_number: None for it in pieces if not _on_demand(it).has(name)}
        if len(missing) > 1:
            writer.expect(missing, frozenset((name,)))
    return [ChunkSlice(_on_demand(it).of(name), *it[1:]) for it in pieces]


def _on_demand(piece: ChunkSlice) -> ChunkOnDemand:
    assert isinstance(piece.chunk, ChunkOnDemand)
    return piece.chunk
