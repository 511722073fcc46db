"""A batch read record by record, whatever its index says, to tell what of it is damaged."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from gym_trace.format import wire
from gym_trace.format.batch_reader import PART, BatchReader, Damage, Index, SlabLedger, TableRoom
from gym_trace.model.values import Array
from gym_trace.storage.protocol import Reader, ReadStorage

_BLOCK = 1 << 20


class BatchInspector(BatchReader):
    """A BatchReader that finds chunks by their records only, and compares the index and the padding with them.

    The columns of the chunks are for the caller to read.
    """

    def __init__(self, storage: ReadStorage, name: str):
        self.index: Index | None = None
        self.has_end_name = not name.endswith(PART)  # sealed, as far as its name tells
        self._data_start = wire.HEADER_SIZE
        self._data_end: int | None = None  # where the index begins, once that is known
        self._padding: set[Damage] = set()
        super().__init__(storage, name)
        if self.index is not None and not self._agrees(self.index):
            self._damaged(self._data_end or 0, self.size, "the index does not agree with the chunks")

    def is_harmless(self, damage: Damage) -> bool:
        """Return True if no chunk can have been in a damaged range."""
        before, behind = damage.end <= self._data_start, self._data_end is not None and damage.start >= self._data_end
        return before or behind or damage in self._padding

    def lost_fragments(self, damage: Damage) -> Array | None:
        """The fragments of the chunks in a damaged range, as the index tells; None if there is no index."""
        if self.index is None:
            return None
        chunks, bounds, is_lost = self._in_the_index
        starts, stops = chunks["offset"], chunks["offset"] + chunks["length"]
        first, last = np.searchsorted(stops, damage.start, side="right"), np.searchsorted(starts, damage.end)
        hit = np.arange(first, max(first, last))[is_lost[first:last]]
        tables = [self.index.fragments[bounds[i] : bounds[i + 1]] for i in hit.tolist()]
        return np.concatenate([self.index.fragments[:0], *tables])

    @cached_property
    def _in_the_index(self) -> tuple[Array, Array, Array]:
        """The chunks of the index, where their fragments begin in it, and which of them were not found."""
        assert self.index is not None
        chunks = self.index.chunks
        bounds = np.concatenate([[0], np.cumsum(chunks["fragments"].astype(np.int64))])
        return chunks, bounds, ~np.isin(chunks["offset"], self.chunks["offset"])

    def _read_index(self, file: Reader) -> bool:
        super()._read_index(file)  # names a footer that is damaged
        self._count_afresh()  # records and index say the same rows
        footer = self._footer(file)
        self._data_end = None if footer is None else footer.index_offset
        self.fragments, self.chunks = np.empty(0, wire.FRAGMENT), np.empty(0, wire.CHUNK_ENTRY)
        self.totals, self.sealed, self.slabs = {}, False, SlabLedger()
        return False

    def _walk_record(
        self, file: Reader, header: wire.RecordHeader, fragments: list[Array], chunks: list[tuple[int, int, int, int]]
    ) -> None:
        if header.sequence == 1:
            self._data_start = header.offset
        if header.type == wire.INDEX:
            self._data_end = header.offset
        super()._walk_record(file, header, fragments, chunks)
        if header.type == wire.INDEX:
            self._count_afresh()
            self.index = self._index(file, header)
        if header.type in (wire.SCHEMA, wire.CHUNK, wire.INDEX):
            self._check_padding(file, header)

    def _count_afresh(self) -> None:
        self._room = TableRoom()
        self._room.grant(self.size)

    def _check_padding(self, file: Reader, header: wire.RecordHeader) -> None:
        metadata = self._metadata(file, header)
        used = [(header.offset + wire.HEADER_SIZE, header.metadata_length)]
        if header.type != wire.SCHEMA:
            used += [(at, column.stored) for column, at in self._columns(header, metadata)]
        ends = [at + length for at, length in used]
        for start, end in zip(ends, [at for at, _ in used[1:]] + [header.end]):
            while start < end:
                block = file.read(start, min(end - start, _BLOCK))
                if any(block):
                    self._damaged(start, start + len(block), "bytes between the columns are not zero")
                    self._padding.add(self.damage[-1])
                start += len(block)

    def _agrees(self, index: Index) -> bool:
        """Return True if the index describes the chunks that were found correctly, and lists no others.

        Chunks that are damaged were not found; where the index says they are there must be damage.
        """
        known = np.isin(index.chunks["offset"], self.chunks["offset"])
        if not np.array_equal(index.chunks[known], self.chunks):
            return False
        per_chunk = index.chunks["fragments"].astype(np.int64)
        if index.fragments[np.repeat(known, per_chunk)].tobytes() != self.fragments.tobytes():
            return False
        if known.all():
            return index.totals == self.totals
        damages = sorted(self.damage, key=lambda damage: damage.start)
        starts = np.array([damage.start for damage in damages], np.int64)
        reach = np.maximum.accumulate(np.array([0, *(damage.end for damage in damages)], np.int64))
        unknown = index.chunks["offset"][~known].astype(np.int64)
        return bool((unknown < reach[np.searchsorted(starts, unknown, side="right")]).all())
