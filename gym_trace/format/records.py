"""Read a record of a batch: header, metadata, columns; find the next one (docs/FORMAT.md, section 2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from gym_trace.data.packing import MAX_CONTAINERS, unpack
from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.format.columns import (
    MSGPACK,
    Buffer,
    ColumnDescriptor,
    Path,
    decode,
    packed_values,
    parse_column,
    unpacked,
)
from gym_trace.format.kernels import crc32
from gym_trace.storage.memory import MemoryReader
from gym_trace.storage.protocol import Reader

SCAN_BLOCK = 1 << 20
_LARGE = 1 << 20  # bytes; columns of this size or more are read without a copy


def header_at(file: Reader, offset: int, file_id: bytes) -> wire.RecordHeader | None:
    return wire.unpack_record_header(file.read(offset, wire.HEADER_SIZE), offset, file_id)


def metadata_of(file: Reader, header: wire.RecordHeader) -> dict[str, Any]:
    """Return the metadata of a record. Raises CorruptTrace, also if the record exceeds the file."""
    if header.metadata_length > wire.MAX_METADATA or header.end > file.size:
        raise CorruptTrace("record larger than its file")
    raw = file.read(header.offset + wire.HEADER_SIZE, header.metadata_length)
    if len(raw) != header.metadata_length or crc32(raw) != header.metadata_crc:
        raise CorruptTrace("checksum mismatch in the metadata of a record")
    metadata = unpack(raw)
    if not isinstance(metadata, dict):
        raise CorruptTrace("the metadata of a record is not a map")
    return metadata


def columns_of(header: wire.RecordHeader, metadata: dict[str, Any]) -> Iterator[tuple[ColumnDescriptor, int]]:
    """Yield the columns of a record with the offsets of their blobs. Raises CorruptTrace."""
    descriptors = metadata.get("columns")
    if not isinstance(descriptors, list):
        raise CorruptTrace("a record has no columns")
    offset, size, rows = header.body_offset, 0, 0
    grown = wire.MOST_GROWTH * (header.end - header.offset)
    seen: set[Path] = set()
    for column in map(parse_column, descriptors):
        size += column.full_size + column.rows * wire.VALUE_SIZE * (column.dtype == MSGPACK)
        rows = max(rows, column.rows)
        if header.type == wire.CHUNK and size > (wire.CHUNK_BYTES if rows > 1 else max(wire.CHUNK_BYTES, grown)):
            raise CorruptTrace(f"the columns of a record declare {size} bytes, more than the limit")
        if offset + column.stored > header.end:
            raise CorruptTrace("column larger than its record")
        if column.path in seen:
            raise CorruptTrace("duplicate column in a record")
        seen.add(column.path)
        yield column, offset
        offset += wire.aligned(column.stored)


def gaps_of(header: wire.RecordHeader, columns: Iterable[tuple[ColumnDescriptor, int]]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of padding in a record: after its metadata and after each column."""
    used = [(header.offset + wire.HEADER_SIZE, header.metadata_length), *((at, c.stored) for c, at in columns)]
    for (at, length), end in zip(used, [*(at for at, _ in used[1:]), header.end]):
        if at + length < end:
            yield at + length, end


def next_record(file: Reader, offset: int, file_id: bytes) -> tuple[int | None, wire.RecordHeader | None]:
    """Find the next record.

    Returns:
        The offset of the first complete record at or after offset, and None. Without one: None, and the last valid
        header, if any.
    """
    last = None
    offset = wire.aligned(offset)
    while offset < file.size:
        block = file.read(offset, SCAN_BLOCK + wire.HEADER_SIZE)
        for at in wire.header_positions(block, offset, file_id):
            header = wire.unpack_record_header(block[at : at + wire.HEADER_SIZE], offset + at, file_id)
            if header is not None and header.end <= file.size:
                return offset + at, None
            last = header or last
        offset += SCAN_BLOCK
    return None, last


def extent_of(column: ColumnDescriptor, blocks: range | None) -> tuple[int, int, int, int]:
    """Return begin and end of blocks in the stored bytes of a column, and the CRCs of the bytes before these.

    blocks: numbers of consecutive blocks; None: the whole column. Raises CorruptTrace.
    """
    if blocks is None or column.blocks is None:
        return 0, column.stored, 0, column.crc
    (begin, crc), (end, after) = map(column.blocks.before, (blocks.start, blocks.stop))
    if not begin < end <= column.stored:
        raise CorruptTrace(f"malformed blocks of column {column.name}")
    return begin, end, crc, after


def checked(file: Reader, offset: int, column: ColumnDescriptor, blocks: range | None = None) -> Buffer:
    """Read the stored bytes of a column, or of some blocks of it, and verify them. Raises CorruptTrace.

    A large column gets a writable buffer, to save a copy. offset: of the column in the file. blocks: see extent_of().
    """
    begin, end, crc, after = extent_of(column, blocks)
    offset, size = offset + begin, end - begin
    blob: Buffer
    if size < _LARGE:
        blob = file.read(offset, size)
    else:
        blob = np.empty(min(size, max(0, file.size - offset)), np.uint8).data
        blob = blob[: file.read_into(offset, blob)]
    if len(blob) != size or crc32(blob, crc) != after:
        raise CorruptTrace(f"checksum mismatch in column {column.name}")
    return blob


def verify(column: ColumnDescriptor, blob: Buffer) -> None:
    """Decode all rows of a column; those in blocks block by block, as they may be read. Raises CorruptTrace."""
    if column.dtype == MSGPACK and column.full_size <= MAX_CONTAINERS:
        unpacked(list(dict.fromkeys(packed_values(column, blob))))
        return
    blocks = range(0 if column.blocks is None else column.blocks.total)
    parts = {run: checked(MemoryReader(blob), 0, column, run) for run in (range(n, n + 1) for n in blocks)}
    decode(column, parts or blob)
