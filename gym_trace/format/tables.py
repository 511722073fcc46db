"""Tables of an index: positions and contents of chunks, and limits. Input is untrusted."""

from __future__ import annotations

from typing import Any, NamedTuple

from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.format.columns import Path, is_path
from gym_trace.model.values import Array

FARTHEST = 1 << 40  # largest offset: operating systems reject much larger ones


class SlabLedger:
    """The slabs of the writer's ring (docs/FORMAT.md, section 8) that the chunks of a batch come from.

    Attributes:
        complete: number of the latest slab that is in the batches so far, with all slabs before it.
        unfinished: number of the slab that the last chunks come from, if more chunks of it follow; otherwise 0.
        chunks: number of these last chunks.
        pending: pending actions in the last chunk: steps that were never answered.
    """

    def __init__(self) -> None:
        self.complete = self.unfinished = self.chunks = 0
        self.pending: Any = None

    @classmethod
    def of_index(cls, metadata: dict[str, Any]) -> SlabLedger:
        """Return the ledger stored in the metadata of an index."""
        ledger = cls()
        ledger.take(metadata)
        match metadata.get("slab"):
            case [_, _, int(chunks), *_] if ledger.unfinished:
                ledger.chunks = max(0, chunks)
        return ledger

    def take(self, metadata: dict[str, Any]) -> None:
        """Update from the metadata of the next chunk, which is untrusted."""
        self.pending = metadata.get("pending")
        before, self.unfinished, self.chunks = (self.unfinished, self.chunks), 0, 0
        match metadata.get("slab"):
            case [int(sequence), bool(more), *_]:
                self.complete = max(self.complete, sequence - more)
                if more:
                    self.unfinished, self.chunks = sequence, 1 + (before[1] if before[0] == sequence else 0)


class Index(NamedTuple):
    """Contents of the index of a batch; see BatchReader."""

    fragments: Array
    chunks: Array
    totals: dict[Path, list[int]]
    slabs: SlabLedger


class TableRoom:
    """Limits the table rows of a trace: tables stay in memory, and few stored bytes can become many rows."""

    def __init__(self) -> None:
        self._rows = wire.TABLE_ROWS

    def grant(self, size: int) -> None:
        """Allow more rows, for `size` bytes on disk."""
        self._rows += size * wire.ROWS_A_BYTE

    def take(self, rows: int) -> None:
        if rows > self._rows:
            raise CorruptTrace(f"table of {rows} rows exceeds the limit for a trace of this size")
        self._rows -= rows


def are_apart(chunks: Array, end: int) -> bool:
    """Return True if chunks are in order, do not overlap, and end before `end`: no byte is read twice."""
    offsets, lengths = chunks["offset"], chunks["length"]
    if not len(chunks) or max(offsets.max(), lengths.max()) > FARTHEST:
        return not len(chunks)
    ends = offsets + lengths
    return bool(offsets[0] >= wire.HEADER_SIZE and ends[-1] <= end and (ends[:-1] <= offsets[1:]).all())


def totals_of(raw: Any) -> dict[Path, list[int]]:
    try:
        totals = {tuple(path): [full, stored] for path, full, stored in raw}
    except (TypeError, ValueError) as error:
        raise CorruptTrace("malformed totals in the index") from error
    numbers = [number for sizes in totals.values() for number in sizes]
    if not all(map(is_path, totals)) or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        raise CorruptTrace("malformed totals in the index")
    return totals
