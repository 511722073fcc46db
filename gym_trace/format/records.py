"""Read a record of a batch: header, metadata, columns; find the next one (docs/FORMAT.md, section 2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from gym_trace.data.packing import unpack
from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.format.columns import MSGPACK, Buffer, ColumnDescriptor, Path, parse_column
from gym_trace.format.kernels import crc32
from gym_trace.storage.protocol import Reader, Span

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


def checked(file: Reader, offset: int, column: ColumnDescriptor) -> Buffer:
    """Read the stored bytes of a column and verify them. A large column gets a writable buffer, to save a copy."""
    blob: Buffer
    if column.stored < _LARGE:
        blob = file.read(offset, column.stored)
    else:
        blob = np.empty(min(column.stored, max(0, file.size - offset)), np.uint8).data
        blob = blob[: file.read_into(offset, blob)]
    if len(blob) != column.stored or crc32(blob) != column.crc:
        raise CorruptTrace(f"checksum mismatch in column {column.name}")
    return blob


def checked_blocks(file: Reader, offset: int, column: ColumnDescriptor, blocks: range) -> Buffer:
    """Read the stored bytes of consecutive blocks of a column and verify them. offset: of the column in the file.

    Raises CorruptTrace.
    """
    begin, end, crc, after = _span_of(column, blocks)
    blob = file.read(offset + begin, end - begin)
    if len(blob) != end - begin or crc32(blob, crc) != after:
        raise CorruptTrace(f"checksum mismatch in column {column.name}")
    return blob


def span_of(name: str, offset: int, column: ColumnDescriptor, blocks: range) -> Span:
    """Return the span of consecutive blocks in a file. Raises CorruptTrace."""
    begin, end, *_ = _span_of(column, blocks)
    return Span(name, offset + begin, end - begin)


def _span_of(column: ColumnDescriptor, blocks: range) -> tuple[int, int, int, int]:
    """Return begin and end of blocks in the stored bytes, and the CRCs up to these. Raises CorruptTrace."""
    assert column.blocks is not None
    begin, crc = column.blocks.before(blocks.start)
    end, after = column.blocks.before(blocks.stop)
    if not begin < end <= column.stored:
        raise CorruptTrace(f"malformed blocks of column {column.name}")
    return begin, end, crc, after
