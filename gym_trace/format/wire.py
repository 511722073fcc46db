"""Record framing: the only file that packs and checks the fixed binary structures of docs/FORMAT.md."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from gym_trace.errors import CorruptTrace, UnsupportedTrace
from gym_trace.model.vocabulary import FragmentFlag

MAJOR, MINOR = 1, 1
ORIGINS_MINOR = 2  # of batches that need the feature of that name
ORIGINS = 1  # the required feature bit of batches that hold what other writers have recorded
HEADER_SIZE = 64  # file header, record header and footer alike
MAX_METADATA = 256 << 20
MAX_COLUMN = 2 << 30  # bytes of a column once decoded
MAX_VALUES = 64 << 20  # bytes of the values of a msgpack column, which take many times that in memory
MAX_ROWS = 1 << 24  # of a column
MAX_TABLE = 1 << 20  # rows of a fragment table or a table of chunks
MAX_DIMENSIONS = 32  # of the rows of a column
# What decoding may make of the bytes on the disk. Honest data is far from these.
TABLE_ROWS, ROWS_A_BYTE = 1 << 20, 2  # of the tables of a trace: so many rows, and so many more for each byte of it
CHUNK_BYTES = 128 << 20  # of a chunk of more than one step; of one step, what its bytes can become
MOST_GROWTH = 1 << 16  # of compressed bytes
VALUE_SIZE = 64  # bytes that a decoded value takes at least, if it is no more than that
LARGE_ROW = 4096  # bytes from which on the rows of a column are shuffled one by one

FILE_MAGIC = b"\x89GTB\r\n\x1a\n"
SYNC = b"\xf7GTREC\r\n"
FOOTER_MAGIC = b"\x89GTBEND\n"
RING_MAGIC = b"\x89GTRNG\r\n"  # the rest of a ring is read and written by gym_trace.ring

SCHEMA, CHUNK, INDEX = 1, 2, 3
OPTIONAL = 1

_FILE = struct.Struct("<8sHHI16sI24x")
_RECORD = struct.Struct("<8sHHIQQQ16sI")
_FOOTER = struct.Struct("<8sQQ16s20x")
_CRC = struct.Struct("<I")
_POLYNOMIAL = 0xEDB88320  # of CRC-32, its lowest bit first
LENGTH = np.dtype("<u4")  # of the values of a msgpack column

# The fragment table; see docs/FORMAT.md, section 4.
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
OutOfRange = struct.error  # what is raised for numbers that have no room
pack_fragment = struct.Struct("<QQIIIIdqqqqq").pack  # its fields in their order
CHUNK_ENTRY = np.dtype([("offset", "<u8"), ("length", "<u8"), ("fragments", "<u8"), ("observation_rows", "<u8")])

# Plain integers: an operation with members of FragmentFlag takes a microsecond.
STARTS, LEADS, TERMINATED, TRUNCATED, STOPS, ENDS, PLACEHOLDER = (flag.value for flag in FragmentFlag)
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
    index_offset: int
    file_length: int


def aligned(length: int) -> int:
    """The smallest multiple of 8 that is not less than length."""
    return (length + 7) & ~7


def padding(length: int) -> bytes:
    return bytes(-length & 7)


def _sealed(packed: bytes) -> bytes:
    return packed + _CRC.pack(crc32(packed))


def _checks(raw: bytes | memoryview) -> bool:
    return len(raw) == HEADER_SIZE and crc32(raw[:60]) == _CRC.unpack_from(raw, 60)[0]


def joined_crc(first: int, second: int, length: int) -> int:
    """The CRC of some bytes and of length bytes behind them, whose CRCs are known. As zlib's crc32_combine does it."""
    return _shifted(first, length) ^ second


def replaced_crc(crc: int, old: bytes, new: bytes, rest: int) -> int:
    """The CRC of a file that began with old, of which it was crc, once it begins with new; rest: bytes behind that."""
    return crc ^ _shifted(crc32(old) ^ crc32(new), rest)


def _shifted(crc: int, length: int) -> int:
    """What zeros, length of them, make of the register of a CRC, which is linear in it."""
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
    """What 2 ** power zeros make of a register, a table for each of its bytes."""
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
    minor = ORIGINS_MINOR if features & ORIGINS else MINOR
    return _sealed(_FILE.pack(FILE_MAGIC, MAJOR, minor, features, file_id, batch))


def unpack_file_header(raw: bytes) -> FileHeader:
    """Raises CorruptTrace, or UnsupportedTrace for a version or feature that this release does not know."""
    if len(raw) < HEADER_SIZE or not raw.startswith(FILE_MAGIC):
        raise CorruptTrace("not a gym-trace batch")
    if not _checks(raw):
        raise CorruptTrace("the file header does not check")
    _, major, minor, features, file_id, batch = _FILE.unpack_from(raw)
    if major != MAJOR:
        raise UnsupportedTrace(f"format version {major}.{minor}, but this gym-trace reads {MAJOR}.x; upgrade gym-trace")
    if features & ~ORIGINS:
        raise UnsupportedTrace(f"needs features {features:#x} that this gym-trace does not know; upgrade gym-trace")
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
    """The pieces of one record, to be written one after the other at offset. blobs: each in pieces."""
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
    """The record header in raw, or None if raw is not the header of a record of this file at this offset."""
    if not _checks(raw):
        return None
    sync, kind, flags, metadata_length, body_length, where, sequence, file, crc = _RECORD.unpack_from(raw)
    if sync != SYNC or where != offset or file != file_id:
        return None
    return RecordHeader(kind, flags, metadata_length, body_length, where, sequence, crc)


def places_of_headers(block: bytes, offset: int, file_id: bytes) -> list[int]:
    """Where in a block of a file, which begins at offset, there may be record headers: they are still to be checked."""
    words = np.frombuffer(block, "<u8", len(block) // 8)
    if len(words) < HEADER_SIZE // 8:
        return []
    count = len(words) - HEADER_SIZE // 8 + 1
    at = np.flatnonzero(words[:count] == np.frombuffer(SYNC, "<u8")[0])
    if len(at):
        low, high = np.frombuffer(file_id, "<u8")
        at = at[(words[at + 3] == offset + 8 * at.astype(np.uint64)) & (words[at + 5] == low) & (words[at + 6] == high)]
    places: list[int] = (8 * at).tolist()
    return places


def file_id_of(raw: bytes, offset: int) -> bytes | None:
    """The file id in raw, if raw is the header of the schema record of some file at this offset; otherwise None."""
    if not _checks(raw):
        return None
    header = unpack_record_header(raw, offset, raw[40:56])
    return raw[40:56] if header is not None and header.type == SCHEMA else None


def pack_footer(index_offset: int, file_length: int, file_id: bytes) -> bytes:
    return _sealed(_FOOTER.pack(FOOTER_MAGIC, index_offset, file_length, file_id))


def unpack_footer(raw: bytes, file_length: int, file_id: bytes) -> Footer | None:
    """The footer in raw, or None if raw is not the footer of this file at this length."""
    if not _checks(raw):
        return None
    magic, index_offset, length, file = _FOOTER.unpack_from(raw)
    if magic != FOOTER_MAGIC or length != file_length or file != file_id:
        return None
    return Footer(index_offset, length)


def pack_floats(values: Sequence[float]) -> bytes:
    """Python floats as float64, in half of the time that NumPy takes to look at each of them."""
    return struct.pack(f"{len(values)}d", *values)


def join_fragments(tables: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Fragment tables, C-contiguous, one behind the other."""
    # Joined as bytes: NumPy copies structured rows field by field.
    return np.frombuffer(bytearray().join(table.data for table in tables), FRAGMENT)
