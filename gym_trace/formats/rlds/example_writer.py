"""tf.train.Example, written as its rows come: what is not needed in memory waits in temporary files.

An example is a map of names to lists of bytes, of float32, or of int64. As protobuf it says how long each list is
before the first of its rows, so that rows which come step by step have to wait until all of them are there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import google_crc32c
import numpy as np

from gym_trace.errors import InvalidOption
from gym_trace.formats.rlds.varints import varint, varints
from gym_trace.model.values import Array

_IN_MEMORY = 1 << 20  # bytes of a list that wait in memory
_BLOCK = 1 << 20
_FIRST, _SECOND = b"\x0a", b"\x12"  # fields 1 and 2 of a message, with a length before what they hold
_LISTS = {"bytes": b"\x0a", "float": b"\x12", "int64": b"\x1a"}  # the field of tf.train.Feature


class ExampleWriter:
    """The lists of one example; then of the next one.

    Args:
        directory: for the temporary files, which have no names there.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._lists: dict[str, tuple[str, IO[bytes]]] = {}

    def bytes_of(self, name: str, rows: Iterable[bytes]) -> None:
        """Appends values of any length."""
        waiting = self._list(name, "bytes")
        for row in rows:
            waiting.write(_FIRST + varint(len(row)))
            waiting.write(row)

    def raw(self, name: str, rows: Array) -> None:
        """Appends the bytes of each row of a numerical array as a value."""
        octets = np.frombuffer(rows.tobytes(), np.uint8).reshape(len(rows), rows[:1].nbytes)
        head = np.frombuffer(_FIRST + varint(octets.shape[1]), np.uint8)
        values = np.empty((len(rows), len(head) + octets.shape[1]), np.uint8)
        values[:, : len(head)] = head
        values[:, len(head) :] = octets
        self._list(name, "bytes").write(values)

    def floats(self, name: str, rows: Array) -> None:
        """Appends float32."""
        self._list(name, "float").write(np.ascontiguousarray(rows, "<f4"))

    def integers(self, name: str, rows: Array) -> None:
        """Appends integers or booleans."""
        self._list(name, "int64").write(varints(rows))

    def finish(self, records: RecordWriter, most: int) -> None:
        """Writes the example as one record, and begins with the next. Raises OSError, InvalidOption.

        most: bytes that it may have.
        """
        heads, total = {}, 0
        for name, (kind, waiting) in self._lists.items():
            heads[name] = _head(name, kind, waiting.tell())
            total += len(heads[name]) + waiting.tell()
        if total > most:
            raise InvalidOption(f"an episode takes {total:,} bytes, and TensorFlow reads no more than {most:,} for one")
        features = _FIRST + varint(total)
        records.write(len(features) + total, self._blocks(features, heads))
        self.clear()

    def _blocks(self, features: bytes, heads: dict[str, bytes]) -> Iterator[bytes]:
        yield features
        for name, (_, waiting) in self._lists.items():
            yield heads[name]
            waiting.seek(0)
            while block := waiting.read(_BLOCK):
                yield block

    def clear(self) -> None:
        """Forgets what was appended."""
        for _, waiting in self._lists.values():
            waiting.close()
        self._lists.clear()

    def _list(self, name: str, kind: str) -> Any:
        if name not in self._lists:
            waiting = tempfile.SpooledTemporaryFile(_IN_MEMORY, dir=str(self._directory))  # noqa: SIM115 (closed by clear)
            self._lists[name] = kind, waiting
        return self._lists[name][1]


def _head(name: str, kind: str, size: int) -> bytes:
    """All of an entry of the map that comes before its rows."""
    packed = b"" if kind == "bytes" else _FIRST + varint(size)  # numbers are one field, texts are one field each
    inner = _LISTS[kind] + varint(len(packed) + size) + packed
    value = _SECOND + varint(len(inner) + size) + inner
    key = name.encode()
    entry = _FIRST + varint(len(key)) + key + value
    return _FIRST + varint(len(entry) + size) + entry


class RecordWriter:
    """A TFRecord file: records, each with its length and the checksums of both.

    Attributes:
        records, bytes: how many there are, and how much they take without their frames.
    """

    def __init__(self, path: Path):
        self._file = path.open("xb")
        self.records = self.bytes = 0

    def write(self, size: int, blocks: Iterable[bytes]) -> None:
        """Appends a record of so many bytes. Raises OSError."""
        length = size.to_bytes(8, "little")
        self._file.write(length + masked(google_crc32c.value(length)))
        checksum = 0
        for block in blocks:
            checksum = google_crc32c.extend(checksum, block)
            self._file.write(block)
        self._file.write(masked(checksum))
        self.records += 1
        self.bytes += size

    def close(self) -> None:
        self._file.close()


def masked(checksum: int) -> bytes:
    """A CRC-32C as TFRecord files have it: so that the checksum of data with checksums in it is a good one, too."""
    rotated = (checksum >> 15 | checksum << 17) & 0xFFFFFFFF
    return ((rotated + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")
