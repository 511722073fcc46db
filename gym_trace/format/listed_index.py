"""The index of a sealed batch in the manifest, which saves requests at a URL (docs/FORMAT.md, section 7).

It is used only at URLs, where each read takes a round trip; elsewhere the batches are read, which are the truth.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, NamedTuple

from gym_trace.format import wire
from gym_trace.format.columns import Buffer
from gym_trace.format.kernels import crc32
from gym_trace.storage.protocol import Reader

_MOST_LISTED = 32 << 10  # bytes of an index record in a manifest, which is published again after each batch
_CRC_BYTES = 4


def index_text(name: str, record: Sequence[Buffer]) -> str:
    """Return what a manifest has of an index record: the record, or only its header if it is large, and a checksum.

    name: file of the batch. record: its pieces; the first one is the header.
    """
    raw = b"".join(record if sum(map(len, record)) <= _MOST_LISTED else record[:1])
    return base64.b64encode(raw + _checksum(name, raw)).decode()


def _checksum(name: str, raw: bytes) -> bytes:
    return crc32(name.encode(), crc32(raw)).to_bytes(_CRC_BYTES, "little")


class ListedIndex(NamedTuple):
    """An index record as a manifest lists it. It is untrusted, and may be that of another batch.

    Attributes:
        file_id: id of the file of the batch.
        header: header of the record.
        record: the whole record; empty: it is only in the batch.
        reads_schema: True if the schema is read from the batch, too.
    """

    file_id: bytes
    header: wire.RecordHeader
    record: bytes
    reads_schema: bool = False

    @property
    def size(self) -> int:
        return self.header.end - self.header.offset

    def source(self, file: Reader) -> Reader:
        """Return a reader that has the record at its offset. file: the batch."""
        return _Excerpt(self.record, self.header.offset, file.size) if self.record else file


def listed_index(name: str, size: int, entry: dict[str, Any]) -> ListedIndex | None:
    """Return the index in a manifest line, if it is a valid one for a batch of this name and size."""
    text = entry.get("index")
    if not isinstance(text, str) or entry.get("bytes") != size:
        return None
    try:
        raw = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    raw, checksum = raw[:-_CRC_BYTES], raw[-_CRC_BYTES:]
    found = wire.unpack_index_header(raw[: wire.HEADER_SIZE])
    if found is None or checksum != _checksum(name, raw):
        return None
    listed = ListedIndex(*found, b"" if len(raw) == wire.HEADER_SIZE else raw)
    is_valid = listed.header.end + wire.HEADER_SIZE <= size and len(listed.record) in (0, listed.size)
    return listed if is_valid else None


class _Excerpt(Reader):
    """A range of a file, in memory."""

    def __init__(self, data: bytes, offset: int, size: int):
        self._data, self._offset, self.size = data, offset, size

    def read(self, offset: int, length: int) -> bytes:
        begin = offset - self._offset
        return self._data[begin : begin + length] if begin >= 0 else b""
