"""A batch read record by record, whatever its index says, to tell what of it is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from gym_trace.format import wire
from gym_trace.format.batch import PART, BatchReader, Damage, Index, _read
from gym_trace.values import Array

_BLOCK = 1 << 20


class BatchInspector(BatchReader):
    """A BatchReader that finds chunks by their records only, and compares the index and the padding with them.

    The columns of the chunks are for the caller to read.
    """

    def __init__(self, path: Path):
        self.index: Index | None = None
        super().__init__(path)
        if self.index is not None and not self._agrees(self.index):
            self._damaged(self._index_start, self.size, "the index does not agree with the chunks")

    @property
    def is_sealed(self) -> bool:
        return not self.path.name.endswith(PART)

    @property
    def may_lack_chunks(self) -> bool:
        """Whether chunks may be gone from the end of the file without a trace."""
        return self.is_sealed and self.index is None

    def crc(self) -> int:
        """The checksum of the whole file."""
        crc = 0
        with self._open() as file:
            while block := file.read(_BLOCK):
                crc = crc32(block, crc)
        return crc

    def lost_fragments(self, damage: Damage) -> Array | None:
        """The fragments of the chunks in a damaged range, as the index tells; None if there is no index."""
        if self.index is None:
            return None
        chunks = self.index.chunks
        ends = np.cumsum(chunks["fragments"].astype(np.int64))
        starts, stops = chunks["offset"], chunks["offset"] + chunks["length"]
        hit = (starts < damage.end) & (stops > damage.start) & ~np.isin(starts, self.chunks["offset"])
        return self.index.fragments[np.repeat(hit, np.diff(ends, prepend=0))]

    def _read_index(self, file: Any) -> bool:
        super()._read_index(file)  # names a footer that is damaged
        self.fragments, self.chunks = np.empty(0, wire.FRAGMENT), np.empty(0, wire.CHUNK_ENTRY)
        self.totals, self.sealed = {}, False
        return False

    def _walk_record(
        self, file: Any, header: wire.RecordHeader, fragments: list[Array], chunks: list[tuple[int, int, int, int]]
    ) -> None:
        super()._walk_record(file, header, fragments, chunks)
        if header.type == wire.INDEX:
            self.index, self._index_start = self._index(file, header), header.offset
        if header.type in (wire.SCHEMA, wire.CHUNK, wire.INDEX):
            self._check_padding(file, header)

    def _check_padding(self, file: Any, header: wire.RecordHeader) -> None:
        metadata = self._metadata(file, header)
        used = [(header.offset + wire.HEADER_SIZE, header.metadata_length)]
        if header.type != wire.SCHEMA:
            used += [(at, column.stored) for column, at in self._columns(header, metadata)]
        ends = [at + length for at, length in used]
        for start, end in zip(ends, [at for at, _ in used[1:]] + [header.end]):
            while start < end:
                block = _read(file, start, min(end - start, _BLOCK))
                if any(block):
                    self._damaged(start, start + len(block), "bytes between the columns are not zero")
                start += len(block)

    def _agrees(self, index: Index) -> bool:
        """Whether the index says of the chunks that were found what they say of themselves, and names no others.

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
        return all(
            any(damage.start <= offset < damage.end for damage in self.damage)
            for offset in index.chunks["offset"][~known].tolist()
        )
