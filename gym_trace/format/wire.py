"""Record framing: the only module that packs and checks the fixed binary structures of docs/FORMAT.md."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from gym_trace.data.vocabulary import FragmentFlag
from gym_trace.errors import CorruptTrace, UnsupportedTrace

MAJOR, MINOR = 1, 3
ORIGINS = 1  # feature bit, required: the batch holds episodes of other writers
HEADER_SIZE = 64  # bytes of a file header, a record header or a footer
MAX_METADATA = 256 << 20  # bytes
MAX_COLUMN = 2 << 30  # decoded bytes of a column
MAX_VALUES = 64 << 20  # bytes of the values of a msgpack column; they take many times that in memory
MAX_ROWS = 1 << 24  # rows of a column
MAX_TABLE = 1 << 20  # rows of a table of fragments or chunks
MAX_DIMENSIONS = 32  # dimensions of the rows of a column
# Limits on decoded sizes. Regular data stays far below them.
TABLE_ROWS, ROWS_A_BYTE = 1 << 20, 2  # rows of all tables of a trace: a base, and additional rows per byte on disk
CHUNK_BYTES = 128 << 20  # decoded bytes of a chunk; a chunk of one step may have more: see MOST_GROWTH
MOST_GROWTH = 1 << 16  # decoded bytes per stored byte, in a chunk of one step
VALUE_SIZE = 64  # bytes: estimated memory of a small decoded value
LARGE_ROW = 4096  # bytes; rows of this size or more are shuffled one by one

FILE_MAGIC = b"\x89GTB\r\n\x1a\n"
SYNC = b"\xf7GTREC\r\n"
FOOTER_MAGIC = b"\x89GTBEND\n"
RING_MAGIC = b"\x89GTRNG\r\n"  # gym_trace.format.ring reads and writes the rest of a ring

SCHEMA, CHUNK, INDEX, PARITY = 1, 2, 3, 4
OPTIONAL = 1

_FILE = struct.Struct("<8sHHI16sI24x")
_RECORD = struct.Struct("<8sHHIQQQ16sI")
_FOOTER = struct.Struct("<8sQQ16sQII4x")
_CRC = struct.Struct("<I")
_POLYNOMIAL = 0xEDB88320  # CRC-32, lowest bit first
LENGTH = np.dtype("<u4")  # length of a value in a msgpack column

# A row of the fragment table; see docs/FORMAT.md, section 4.
FRAGMENT = np.dtype(
    [
        ("episode", "<u8"),
        ("first_step", "<u8"),
        ("steps", "<u4"),
        ("lane", "<u4"),
        ("flags", "<u4"),
        ("outcome", "<u4"),
        ("reward_sum", "<f8"),
        ("seed", "<i8"),
        ("start_time", "<i8"),
        ("clock_offset", "<i8"),
        ("duration", "<i8"),
        ("clock_drift", "<i8"),
    ]
)
OutOfRange = struct.error  # raised by pack_fragment for a number out of range
pack_fragment = struct.Struct("<QQIIIIdqqqqq").pack  # takes the fields of FRAGMENT in order
CHUNK_ENTRY = np.dtype([("offset", "<u8"), ("length", "<u8"), ("fragments", "<u8"), ("observation_rows", "<u8")])
COLUMN_ENTRY = np.dtype(
    [
        *(("offset", "<u8"), ("chunk", "<u4"), ("form", "<u2"), ("encoding", "<u2")),
        *(("rows", "<u4"), ("stored", "<u4"), ("raw", "<u4"), ("crc", "<u4")),
    ]
)
BLOCK = np.dtype([("end", "<u4"), ("crc", "<u4")])

# Plain integers, because operations on members of FragmentFlag are slow.
STARTS, HAS_INITIAL, TERMINATED, TRUNCATED, STOPS, ENDS, PLACEHOLDER = (flag.value for flag in FragmentFlag)
NO_SEED, SEED_ELSEWHERE = -1, -2


class RecordHeader(NamedTuple):
    type: int
    flags: int
    metadata_length: int
    body_length: int
    offset: int
    sequence: int
    metadata_crc: int

    @property
    def body_offset(self) -> int:
        return self.offset + HEADER_SIZE + aligned(self.metadata_length)

    @property
    def end(self) -> int:
        return self.body_offset + self.body_length


class FileHeader(NamedTuple):
    file_id: bytes
    batch: int


class Footer(NamedTuple):
    """parity: offset of the parity record, bytes of a block, and number of groups; zeros: no parity."""

    index_offset: int
    file_length: int
    parity: tuple[int, int, int] = (0, 0, 0)


def aligned(length: int) -> int:
    """Return length rounded up to a multiple of 8."""
    return (length + 7) & ~7


def padding(length: int) -> bytes:
    return bytes(-length & 7)


def _sealed(packed: bytes) -> bytes:
    return packed + _CRC.pack(crc32(packed))


def _is_valid(raw: bytes | memoryview) -> bool:
    return len(raw) == HEADER_SIZE and crc32(raw[:60]) == _CRC.unpack_from(raw, 60)[0]


def joined_crc(first: int, second: int, length: int) -> int:
    """Return the CRC of two joined byte strings, given their CRCs and the length of the second.

    The method is that of zlib's crc32_combine.
    """
    return _shifted(first, length) ^ second


def replaced_crc(crc: int, old: bytes, new: bytes, rest: int) -> int:
    """Return the CRC of a file after a part of it is replaced.

    Args:
        crc: CRC of the file before.
        old, new: the part before and after, of equal length.
        rest: number of bytes after the part.
    """
    return crc ^ _shifted(crc32(old) ^ crc32(new), rest)


def _shifted(crc: int, length: int) -> int:
    """Return the CRC register after `length` zero bytes; this is linear in the register."""
    power = 0
    while length:
        if length & 1:
            a, b, c, d = _zeros(power)
            crc = a[crc & 255] ^ b[crc >> 8 & 255] ^ c[crc >> 16 & 255] ^ d[crc >> 24]
        length >>= 1
        power += 1
    return crc


@cache
def _zeros(power: int) -> list[list[int]]:
    """Return tables, one per byte of the register, that apply 2 ** power zero bytes to it."""
    images = []
    for bit in range(32):
        image = 1 << bit
        for _ in range(0 if power else 8):
            image = image >> 1 ^ (_POLYNOMIAL if image & 1 else 0)
        half = 1 << power - 1 if power else 0
        images.append(_shifted(_shifted(image, half), half))
    tables = []
    for byte in range(4):
        table = [0]
        for image in images[8 * byte : 8 * byte + 8]:
            table += [entry ^ image for entry in table]
        tables.append(table)
    return tables


def pack_file_header(file_id: bytes, batch: int, features: int = 0) -> bytes:
    return _sealed(_FILE.pack(FILE_MAGIC, MAJOR, MINOR, features, file_id, batch))


def unpack_file_header(raw: bytes) -> FileHeader:
    """Parse a file header.

    Raises:
        CorruptTrace: raw is not a valid file header.
        UnsupportedTrace: this release does not know the version or a feature.
    """
    if len(raw) < HEADER_SIZE or not raw.startswith(FILE_MAGIC):
        raise CorruptTrace("not a gym-trace batch")
    if not _is_valid(raw):
        raise CorruptTrace("checksum mismatch in the file header")
    _, major, minor, features, file_id, batch = _FILE.unpack_from(raw)
    if major != MAJOR:
        raise UnsupportedTrace(f"format version {major}.{minor}: this gym-trace reads {MAJOR}.x; upgrade gym-trace")
    if features & ~ORIGINS:
        raise UnsupportedTrace(f"unknown required features {features:#x}; upgrade gym-trace")
    return FileHeader(file_id, batch)


def pack_record(
    kind: int,
    metadata: bytes,
    blobs: Sequence[Sequence[bytes | memoryview]],
    offset: int,
    sequence: int,
    file_id: bytes,
    flags: int = 0,
) -> list[bytes | memoryview]:
    """Return the pieces of a record, to be written one after the other at offset. blobs: each a list of pieces."""
    lengths = [sum(map(len, blob)) for blob in blobs]
    body_length = sum(map(aligned, lengths))
    header = RecordHeader(kind, flags, len(metadata), body_length, offset, sequence, crc32(metadata))
    pieces: list[bytes | memoryview] = [pack_record_header(header, file_id), metadata, padding(len(metadata))]
    for blob, length in zip(blobs, lengths):
        pieces += [*blob, padding(length)]
    return pieces


def pack_record_header(header: RecordHeader, file_id: bytes) -> bytes:
    kind, flags, metadata_length, body_length, offset, sequence, crc = header
    return _sealed(_RECORD.pack(SYNC, kind, flags, metadata_length, body_length, offset, sequence, file_id, crc))


def unpack_record_header(raw: bytes | memoryview, offset: int, file_id: bytes) -> RecordHeader | None:
    """Parse a record header; return None if raw is not the header of a record of this file at this offset."""
    if not _is_valid(raw):
        return None
    sync, kind, flags, metadata_length, body_length, where, sequence, file, crc = _RECORD.unpack_from(raw)
    if sync != SYNC or where != offset or file != file_id:
        return None
    return RecordHeader(kind, flags, metadata_length, body_length, where, sequence, crc)


def unpack_index_header(raw: bytes) -> tuple[bytes, RecordHeader] | None:
    """Parse the header of an index record of any file; return the file id and the header, or None if it is not one."""
    if not _is_valid(raw):
        return None
    *_, offset, _, file_id, _ = _RECORD.unpack_from(raw)
    header = unpack_record_header(raw, offset, file_id)
    return (file_id, header) if header is not None and header.type == INDEX else None


def header_positions(block: bytes, offset: int, file_id: bytes) -> list[int]:
    """Return positions of possible record headers in a block, for the caller to check. offset: offset of the block."""
    words = np.frombuffer(block, "<u8", len(block) // 8)
    if len(words) < HEADER_SIZE // 8:
        return []
    count = len(words) - HEADER_SIZE // 8 + 1
    at = np.flatnonzero(words[:count] == np.frombuffer(SYNC, "<u8")[0])
    if len(at):
        low, high = np.frombuffer(file_id, "<u8")
        at = at[(words[at + 3] == offset + 8 * at.astype(np.uint64)) & (words[at + 5] == low) & (words[at + 6] == high)]
    positions: list[int] = (8 * at).tolist()
    return positions


def file_id_of(raw: bytes, offset: int) -> bytes | None:
    """Return the file id in raw if raw is the header of a schema record at this offset; otherwise None."""
    if not _is_valid(raw):
        return None
    header = unpack_record_header(raw, offset, raw[40:56])
    return raw[40:56] if header is not None and header.type == SCHEMA else None


def pack_footer(index_offset: int, file_length: int, file_id: bytes, parity: tuple[int, int, int] = (0, 0, 0)) -> bytes:
    return _sealed(_FOOTER.pack(FOOTER_MAGIC, index_offset, file_length, file_id, *parity))


def unpack_footer(raw: bytes, file_length: int, file_id: bytes) -> Footer | None:
    """Parse a footer; return None if raw is not the footer of this file at this length."""
    if not _is_valid(raw):
        return None
    magic, index_offset, length, file, *parity = _FOOTER.unpack_from(raw)
    if magic != FOOTER_MAGIC or length != file_length or file != file_id:
        return None
    return Footer(index_offset, length, (parity[0], parity[1], parity[2]))


def file_id_of_footer(raw: bytes, file_length: int) -> bytes | None:
    """Return the file id in raw if raw is the footer of a file of this length; otherwise None."""
    return raw[24:40] if unpack_footer(raw, file_length, raw[24:40]) is not None else None


def join_fragments(tables: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Concatenate fragment tables. tables: C-contiguous."""
    # Join bytes, because NumPy copies structured rows field by field.
    return np.frombuffer(bytearray().join(table.data for table in tables), FRAGMENT)
