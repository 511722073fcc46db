"""Writing one batch file: append records, then seal it with an index and a footer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from gym_trace.data.origins import ORIGINS
from gym_trace.data.packing import pack
from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace, UnstorableValue
from gym_trace.format import kernels, wire
from gym_trace.format.batch_reader import PART, BatchReader, StoredChunk, add_totals, observation_rows, size_and_crc
from gym_trace.format.column_table import ColumnTable
from gym_trace.format.columns import Buffer, ColumnDescriptor, ColumnEncoder, Path, Workspace
from gym_trace.format.encoding_threads import EncodingThreads
from gym_trace.format.kernels import crc32
from gym_trace.format.listed_index import index_text
from gym_trace.format.parity import (
    HealedReader,
    ParityPart,
    Shape,
    joined_parity,
    parity_of,
    parity_part,
    parity_record,
    record_for,
    shape_for,
    stored_parity,
)
from gym_trace.format.transforms import as_bytes
from gym_trace.storage.protocol import Storage
from gym_trace.storage.staging import staged_file

_LARGE_PIECE = 64 << 10  # bytes; smaller pieces are joined before a write
_NO_CRCS: Mapping[int, int] = {}


def copy_batch(batch: BatchReader, crc: int | None, target: Storage, name: str, number: int) -> tuple[int, str]:
    """Copy a sealed batch without decoding it, under another batch number.

    Args:
        crc: CRC of the file; None: compute it.

    Returns:
        The CRC of the copy, and its index for the manifest.

    Raises:
        UnstorableValue: the new number would change the length of the batch. Nothing was written.
        CorruptTrace, OSError
    """
    is_renumbered = batch.schema is not None and (batch.header.batch, batch.schema.get("batch")) != (number, number)
    if is_renumbered:
        batch.heal()  # the new parity must cover restored bytes
    with batch.open() as file:
        file_id = batch.header.file_id
        header = wire.unpack_record_header(file.read(wire.HEADER_SIZE, wire.HEADER_SIZE), wire.HEADER_SIZE, file_id)
        if header is None or batch.schema is None:
            raise CorruptTrace("checksum mismatch in the schema record", batch.path, wire.HEADER_SIZE)
        old = new = file.read(0, header.end)
        if is_renumbered:
            schema = pack({**batch.schema, "batch": number})
            record = wire.pack_record(wire.SCHEMA, schema, [], wire.HEADER_SIZE, header.sequence, file_id, header.flags)
            new = b"".join([wire.pack_file_header(file_id, number, features_of(batch.schema)), *record])
        if len(new) != len(old):
            raise UnstorableValue(f"{batch.path}: number {number} would change the length of the batch")
        stored = stored_parity(file, file_id) if is_renumbered else None
        end, tail = batch.size, b""
        if stored is None:
            crc = size_and_crc(file)[1] if crc is None else crc
            crc = wire.replaced_crc(crc, old, new, batch.size - len(new))
        else:
            content, end = HealedReader(file, {0: new}), stored.shape.covered
            parity = record_for(content, stored, parity_of(content, stored.shape))
            if parity is None or end < len(new):
                raise UnstorableValue(f"{batch.path}: its parity does not fit; copy its chunks one by one")
            tail = parity + stored.footer
            crc = crc32(tail, size_and_crc(content, end)[1])
        with staged_file(target, name) as copy:
            copy.write(new)
            copy.copy(file, len(new), end - len(new))
            copy.write(tail)
        return crc, batch.index_text(name, file)


def features_of(schema: dict[str, Any]) -> int:
    """Return the feature bits that this schema requires of a reader."""
    return wire.ORIGINS if ORIGINS in schema else 0


class BatchWriter:
    """Writes one batch. After every call, the file is readable to its end.

    Raises OSError from the file system; earlier records stay readable.
    """

    def __init__(
        self, storage: Storage, name: str, number: int, schema: dict[str, Any], begun: BatchReader | None = None
    ):
        """begun: unsealed batch of a dead writer, to continue; it ends with a complete record."""
        self.name = name  # name of the sealed batch; the open file has the suffix .part
        self._storage = storage
        self._sequence = 0
        self._fragments: list[Array] = []  # the tables of fragments of all chunks, shuffled
        self._chunks: list[tuple[int, int, int, int]] = []
        self._totals: dict[Path, list[int]] = {}
        self._columns = ColumnTable()
        # The slab of the last chunk, True if more of it follows, and the number of its latest chunks.
        self._slab: tuple[int, bool, int] | None = None
        self._pending: Sequence[Any] = ()  # pending actions of the last chunk
        self.size = 0
        self.crc = 0
        self.index = ""  # the index for the manifest, once the batch is sealed
        self.fragments = 0
        if begun is not None:
            self._resume(begun)
            return
        self._file_id = os.urandom(16)
        self._file = storage.create(name + PART)
        try:
            self._append([wire.pack_file_header(self._file_id, number, features_of(schema))])
            self._record(wire.SCHEMA, pack(schema), [])
        except OSError:
            self.detach()
            raise

    def _resume(self, begun: BatchReader) -> None:
        file = self._storage.reopen(begun.name)
        assert file is not None  # None only for a held lock
        self._file_id, self._file = begun.header.file_id, file
        self._fragments, self._chunks = [_shuffled(begun.fragments[:])], list(map(tuple, begun.chunks.tolist()))
        self._totals = {path: list(sizes) for path, sizes in begun.totals.items()}
        self._slab = (begun.slabs.complete, False, 1) if begun.slabs.complete else None
        self._pending = begun.slabs.pending or ()
        self.fragments = len(begun.fragments)
        with self._storage.open(begun.name) as reader:
            self.size, self.crc = size_and_crc(reader)
            self._sequence = 1
            for number in range(len(self._chunks)):
                chunk = begun.stored_chunk(reader, number)
                self._sequence = 1 + chunk.header.sequence
                self._columns.add(number, chunk.header.body_offset, chunk.columns)

    def has_space(self, fragments: int) -> bool:
        """Return True if the index has space for one more chunk with this number of fragments."""
        return self.fragments + fragments <= wire.MAX_TABLE and len(self._chunks) < wire.MAX_TABLE

    def write_chunk(
        self,
        fragments: Array,
        columns: list[tuple[ColumnDescriptor, Sequence[Buffer]]],
        slab: tuple[int, bool] | None,
        pending: Sequence[Any] = (),
    ) -> None:
        """Append a chunk; see BatchFiles.write.

        Args:
            columns: the fragment table, then the data; each with its bytes in pieces.
        """
        offset, described = self.size, [column for column, _ in columns]
        metadata = _metadata(described, slab, pending)
        short = -(-len(fragments) // wire.ROWS_A_BYTE) - sum(column.stored for column in described)
        blobs = [pieces for _, pieces in columns]
        if short > 0:  # pad: a reader rejects chunks with too many fragments for their bytes
            blobs.append([bytes(short)])
        self._record(wire.CHUNK, metadata, blobs, {id(p[0]): column.crc for column, p in columns if len(p) == 1})
        self._pending = pending
        if slab is not None:
            known = self._slab
            self._slab = (*slab, 1 + (known[2] if known is not None and known[0] == slab[0] else 0))
        self._indexed(offset, len(metadata), fragments, described)

    def copy_chunk(self, fragments: Array, chunk: StoredChunk) -> None:
        """Append a chunk of another batch as stored, without reading its columns."""
        offset, header = self.size, chunk.header
        packed = wire.pack_record_header(header._replace(offset=offset, sequence=self._sequence), self._file_id)
        start, length = header.offset + wire.HEADER_SIZE, header.end - header.offset - wire.HEADER_SIZE
        try:
            self._file.write(packed)
            self._file.copy(chunk.file, start, length)
        except OSError:
            self._file.truncate(offset)
            raise
        crc, rest = crc32(packed, self.crc), length
        pieces = [(header.metadata_crc, header.metadata_length)]
        for piece_crc, stored in [*pieces, *((column.crc, column.stored) for column in chunk.columns)]:
            crc = crc32(wire.padding(stored), wire.joined_crc(crc, piece_crc, stored))
            rest -= wire.aligned(stored)
        self.crc = crc32(bytes(rest), crc)
        self.size += wire.HEADER_SIZE + length
        self._sequence += 1
        self._pending = chunk.pending or ()
        self._indexed(offset, header.metadata_length, fragments, chunk.columns)

    def _indexed(self, offset: int, metadata: int, fragments: Array, columns: Sequence[ColumnDescriptor]) -> None:
        """Add the appended chunk to the index. metadata: length of its metadata."""
        self._columns.add(len(self._chunks), offset + wire.HEADER_SIZE + wire.aligned(metadata), columns)
        self._fragments.append(_shuffled(fragments))
        self._chunks.append((offset, self.size - offset, len(fragments), observation_rows(fragments)))
        self.fragments += len(fragments)
        add_totals(self._totals, columns)

    def seal(self, threads: EncodingThreads) -> None:
        """Write index and footer, sync the file, and rename it to its final name."""
        tables, more = self._columns.for_index()
        tables = {("chunks",): np.array(self._chunks, wire.CHUNK_ENTRY), **tables}
        columns = [ColumnEncoder(path, threads.workspace).encode(table) for path, table in tables.items()]
        fragments = ColumnEncoder(("fragments",), threads.workspace)
        joined = np.concatenate([_shuffled(np.empty(0, wire.FRAGMENT)), *self._fragments], axis=1)
        columns.insert(0, fragments.encode_shuffled(joined, wire.FRAGMENT))
        totals = [[list(path), *sizes] for path, sizes in self._totals.items()]
        metadata = _metadata([column for column, _ in columns], self._slab, self._pending, totals=totals, **more)
        index_offset = self.size
        self.index = index_text(self.name, self._record(wire.INDEX, metadata, [[blob] for _, blob in columns]))
        shape = shape_for(self.size)
        parts = threads.map([partial(self._parity_part, shape, groups) for groups in shape.divided(threads.count + 1)])
        parity = joined_parity(parts, shape)
        self._append([parity_record(shape, parity, index_offset, self._sequence, self._file_id)])
        self._append([wire.pack_footer(index_offset, self.size + wire.HEADER_SIZE, self._file_id, shape)])
        self._file.sync()
        self._file.close()
        self._storage.rename(self.name + PART, self.name)
        self._storage.sync()

    def _parity_part(self, shape: Shape, groups: range, workspace: Workspace) -> ParityPart:
        with self._storage.open(self.name + PART) as file:  # its own: readers are not thread-safe
            return parity_part(file, shape, groups)

    def sync(self) -> None:
        """Sync to disk: on return, all written data survives a power loss."""
        self._file.sync()

    def detach(self) -> None:
        """Close the file without sealing it."""
        self._file.close()

    def _record(
        self, kind: int, metadata: bytes, blobs: Sequence[Sequence[Buffer]], crcs: Mapping[int, int] = _NO_CRCS
    ) -> list[Buffer]:
        """Append a record; return its pieces. crcs: known CRCs of pieces, by the id of the piece."""
        if len(metadata) > wire.MAX_METADATA:
            raise UnstorableValue(f"column descriptors take {len(metadata)} bytes; the limit is {wire.MAX_METADATA}")
        pieces = wire.pack_record(kind, metadata, blobs, self.size, self._sequence, self._file_id)
        self._append(pieces, crcs)
        self._sequence += 1
        return pieces

    def _append(self, pieces: Sequence[Buffer], crcs: Mapping[int, int] = _NO_CRCS) -> None:
        start, size, crc = self.size, self.size, self.crc
        try:
            for group in _gathered(pieces):
                known = crcs.get(id(group))
                crc = crc32(group, crc) if known is None else wire.joined_crc(crc, known, len(group))
                size += len(group)
                self._file.write(group)
        except OSError:
            self._file.truncate(start)  # remove the torn record, so that later records can follow
            raise
        self.size, self.crc = size, crc


def _shuffled(fragments: Array) -> Array:
    """Return the bytes of a fragment table by their position in the row, (row size, rows)."""
    return kernels.shuffle(as_bytes(fragments), wire.FRAGMENT.itemsize).reshape(wire.FRAGMENT.itemsize, -1)


def _metadata(
    columns: Sequence[ColumnDescriptor], slab: Sequence[int] | None, pending: Sequence[Any], **more: Any
) -> bytes:
    """Return the metadata of a chunk or an index."""
    described = {"columns": [column.descriptor() for column in columns], **more}
    described |= {} if slab is None else {"slab": list(slab)}
    described |= {"pending": list(pending)} if pending else {}
    return pack(described)


def _gathered(pieces: Sequence[Buffer]) -> Iterator[Buffer]:
    """Yield the same bytes in fewer pieces: small ones are joined, large ones are not copied."""
    small: list[Buffer] = []
    for piece in pieces:
        if len(piece) < _LARGE_PIECE:
            small.append(piece)
            continue
        if small:
            yield b"".join(small)
            small = []
        yield piece
    if small:
        yield b"".join(small)
