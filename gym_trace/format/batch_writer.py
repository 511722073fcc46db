"""Writing one batch file: records are appended, and sealed with an index and a footer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any
from zlib import crc32

import numpy as np

from gym_trace.errors import UnstorableValue
from gym_trace.format import wire
from gym_trace.format.batch_reader import PART
from gym_trace.format.column_encoder import ColumnEncoder, Workspace
from gym_trace.format.columns import Column, Path, Piece
from gym_trace.model.packing import pack
from gym_trace.model.values import Array
from gym_trace.storage.protocol import Storage

_WORTH_A_CALL = 64 << 10  # bytes


class BatchWriter:
    """Writes one batch. Every call leaves a file that can be read up to its end.

    Raises OSError as the file system does; what was written before stays readable.
    """

    def __init__(self, storage: Storage, name: str, number: int, schema: dict[str, Any]):
        self.name = name  # of the sealed batch; until then .part is appended
        self._storage = storage
        self._file_id = os.urandom(16)
        self._file = storage.create(name + PART)
        self._sequence = 0
        self._fragments: list[Array] = []
        self._chunks: list[tuple[int, int, int, int]] = []
        self._totals: dict[Path, list[int]] = {}
        self._slab: tuple[int, bool, int] | None = None  # of the last chunk, and how many of the last ones are of it
        self._pending: Sequence[Any] = ()  # of the last chunk
        self.size = 0
        self.crc = 0
        self.fragments = 0
        try:
            self._append([wire.pack_file_header(self._file_id, number)])
            self._record(wire.SCHEMA, pack(schema), [])
        except OSError:
            self.abandon()
            raise

    def has_room(self, fragments: int) -> bool:
        """Whether the index can have the fragments of one more chunk."""
        return self.fragments + fragments <= wire.MAX_TABLE and len(self._chunks) < wire.MAX_TABLE

    def write_chunk(
        self,
        fragments: Array,
        observation_rows: int,
        columns: list[tuple[Column, Sequence[Piece]]],
        slab: tuple[int, bool] | None,
        pending: Sequence[Any] = (),
    ) -> None:
        """columns: the fragment table's first, then the data's, the bytes of each in pieces. More: see TraceWriter."""
        offset = self.size
        described: dict[str, Any] = {"columns": [column.descriptor() for column, _ in columns]}
        if slab is not None:
            described["slab"] = list(slab)
        if pending:
            described["pending"] = list(pending)
        metadata = pack(described)
        short = -(-len(fragments) // wire.ROWS_A_BYTE) - sum(column.stored for column, _ in columns)
        blobs = [pieces for _, pieces in columns]
        if short > 0:  # a reader could take these for few bytes that stand for many
            blobs.append([bytes(short)])
        self._record(wire.CHUNK, metadata, blobs)
        self._fragments.append(fragments)
        self._chunks.append((offset, self.size - offset, len(fragments), observation_rows))
        self.fragments += len(fragments)
        self._pending = pending
        if slab is not None:
            known = self._slab
            self._slab = (*slab, 1 + (known[2] if known is not None and known[0] == slab[0] else 0))
        for column, _ in columns:
            total = self._totals.setdefault(column.path, [0, 0])
            total[0] += column.full_size
            total[1] += column.stored

    def seal(self, workspace: Workspace) -> None:
        """Writes index and footer, makes all of it durable, and gives the file its final name."""
        tables = {
            ("fragments",): wire.join_fragments(self._fragments),
            ("chunks",): np.array(self._chunks, wire.CHUNK_ENTRY),
        }
        columns = [ColumnEncoder(path, workspace).encode(table) for path, table in tables.items()]
        totals = [[list(path), *sizes] for path, sizes in self._totals.items()]
        described: dict[str, Any] = {"columns": [column.descriptor() for column, _ in columns], "totals": totals}
        if self._slab is not None:
            described["slab"] = list(self._slab)
        if self._pending:
            described["pending"] = list(self._pending)
        metadata = pack(described)
        index_offset = self.size
        self._record(wire.INDEX, metadata, [[blob] for _, blob in columns])
        self._append([wire.pack_footer(index_offset, self.size + wire.HEADER_SIZE, self._file_id)])
        self._file.sync()
        self._file.close()
        self._storage.rename(self.name + PART, self.name)
        self._storage.sync()

    def sync(self) -> None:
        """Returns when all that was written would survive a loss of power."""
        self._file.sync()

    def abandon(self) -> None:
        """Closes the file as it is."""
        self._file.close()

    def _record(self, kind: int, metadata: bytes, blobs: Sequence[Sequence[Piece]]) -> None:
        if len(metadata) > wire.MAX_METADATA:
            raise UnstorableValue(f"what describes columns takes {len(metadata)} bytes; at most {wire.MAX_METADATA}")
        self._append(wire.pack_record(kind, metadata, blobs, self.size, self._sequence, self._file_id))
        self._sequence += 1

    def _append(self, pieces: Sequence[Piece]) -> None:
        start, size, crc = self.size, self.size, self.crc
        try:
            for group in _gathered(pieces):
                crc = crc32(group, crc)
                size += len(group)
                self._file.write(group)
        except OSError:
            self._file.truncate(start)  # what is torn, so that a later record can follow
            raise
        self.size, self.crc = size, crc


def _gathered(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The same bytes in pieces that are worth a call each: small ones are joined, large ones are not copied."""
    small: list[Piece] = []
    for piece in pieces:
        if len(piece) < _WORTH_A_CALL:
            small.append(piece)
            continue
        if small:
            yield b"".join(small)
            small = []
        yield piece
    if small:
        yield b"".join(small)
