"""The tables of an index, of which nothing is trusted: where chunks are, what is in them, how much there may be."""

from __future__ import annotations

from typing import Any, NamedTuple

from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.format.columns import Path, is_path
from gym_trace.model.values import Array

FARTHEST = 1 << 40  # byte that is looked for: systems refuse to go much farther


class SlabLedger:
    """Which slabs of its writer's ring (docs/FORMAT.md, section 8) the chunks of a batch are of.

    Attributes:
        complete: the number of a slab that is in this batch, or in those before, with all that came before it.
        unfinished, chunks: the number of the slab that the last chunks are of, where others are to follow, and how many
            these are; 0 where there are none.
        pending: what the last chunk says of actions that were never answered.
    """

    def __init__(self) -> None:
        self.complete = self.unfinished = self.chunks = 0
        self.pending: Any = None

    @classmethod
    def of_index(cls, metadata: dict[str, Any]) -> SlabLedger:
        """What the metadata of an index says."""
        ledger = cls()
        ledger.take(metadata)
        match metadata.get("slab"):
            case [_, _, int(chunks), *_] if ledger.unfinished:
                ledger.chunks = max(0, chunks)
        return ledger

    def take(self, metadata: dict[str, Any]) -> None:
        """Takes in what the metadata of the next chunk says. Nobody vouches for it."""
        self.pending = metadata.get("pending")
        before, self.unfinished, self.chunks = (self.unfinished, self.chunks), 0, 0
        match metadata.get("slab"):
            case [int(sequence), bool(more), *_]:
                self.complete = max(self.complete, sequence - more)
                if more:
                    self.unfinished, self.chunks = sequence, 1 + (before[1] if before[0] == sequence else 0)


class Index(NamedTuple):
    """What the index of a batch says: see BatchReader."""

    fragments: Array
    chunks: Array
    totals: dict[Path, list[int]]
    slabs: SlabLedger


class TableRoom:
    """How many rows the tables of a trace may still have: they stay in memory, and few bytes can stand for many."""

    def __init__(self) -> None:
        self._rows = wire.TABLE_ROWS

    def grant(self, size: int) -> None:
        """To be told of bytes on the disk."""
        self._rows += size * wire.ROWS_A_BYTE

    def take(self, rows: int) -> None:
        if rows > self._rows:
            raise CorruptTrace(f"{rows} more rows in the tables of the trace, which is not large enough to have them")
        self._rows -= rows


def are_apart(chunks: Array, end: int) -> bool:
    """Whether chunks lie one after the other before end, so that to read all of them is to read no byte twice."""
    offsets, lengths = chunks["offset"], chunks["length"]
    if not len(chunks) or max(offsets.max(), lengths.max()) > FARTHEST:
        return not len(chunks)
    ends = offsets + lengths
    return bool(offsets[0] >= wire.HEADER_SIZE and ends[-1] <= end and (ends[:-1] <= offsets[1:]).all())


def totals_of(raw: Any) -> dict[Path, list[int]]:
    try:
        totals = {tuple(path): [full, stored] for path, full, stored in raw}
    except (TypeError, ValueError) as error:
        raise CorruptTrace("the totals of the index are malformed") from error
    numbers = [number for sizes in totals.values() for number in sizes]
    if not all(map(is_path, totals)) or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        raise CorruptTrace("the totals of the index are malformed")
    return totals
