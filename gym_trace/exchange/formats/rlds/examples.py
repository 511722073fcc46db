"""TFRecord files of tf.train.Example, without TensorFlow and protobuf, in memory that does not grow with an example.

An example is a map of names to lists of bytes, of float32, or of int64. protobuf stores the length of each list before
its rows, so the writer keeps rows that come step by step in temporary files until all of them are there. The reader
reads rows from the file as they are asked for. A protobuf library would hold the whole example, up to 2 GiB, in memory.
"""

from __future__ import annotations

import io
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import google_crc32c
import numpy as np

from gym_trace.data.values import Array
from gym_trace.errors import InvalidOption

_MOST_OCTETS = 10  # of an integer of 64 bits


class MalformedExample(ValueError):
    """Invalid bytes of a tf.train.Example, or another one than was declared."""


def varint(number: int) -> bytes:
    """Encode a non-negative integer as a protobuf varint."""
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*parts, number))


def varints(numbers: Array) -> bytes:
    """Integers of any dtype, those below 0 as if they were 64 bits without a sign."""
    values = numbers.ravel().astype(np.int64, copy=False).view(np.uint64)
    if not len(values) or int(values.max()) < 0x80:
        return values.astype(np.uint8).tobytes()
    groups = values[:, None] >> np.arange(0, 7 * _MOST_OCTETS, 7, dtype=np.uint64)
    used = np.maximum((groups != 0).sum(axis=1, keepdims=True), 1)
    places = np.arange(_MOST_OCTETS)
    octets = (groups & np.uint64(0x7F)).astype(np.uint8)
    octets[places < used - 1] |= 0x80
    packed: Array = octets[places < used]
    return packed.tobytes()


def numbers_in(data: bytes) -> Array:
    """Decode integers, (N,) int64, from bytes that end with the last one. Raises MalformedExample."""
    octets = np.frombuffer(data, np.uint8)
    is_last = octets < 0x80
    if is_last.all():
        return octets.astype(np.int64)
    ends = np.flatnonzero(is_last) + 1
    if not len(ends) or ends[-1] != len(octets):
        raise MalformedExample("truncated integer")
    begins = np.append(0, ends[:-1])
    lengths = ends - begins
    if int(lengths.max()) > _MOST_OCTETS:
        raise MalformedExample("integer of more than 64 bits")
    places = np.arange(len(octets)) - np.repeat(begins, lengths)
    parts = (octets & 0x7F).astype(np.uint64) << (places * 7).astype(np.uint64)
    return np.add.reduceat(parts, begins).view(np.int64)


_SPOOLED = 1 << 20  # bytes of a list that wait in memory
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
            raise InvalidOption(f"an episode takes {total:,} bytes; TensorFlow's limit is {most:,}")
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
            waiting = tempfile.SpooledTemporaryFile(_SPOOLED, dir=str(self._directory))  # noqa: SIM115 (closed by clear)
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
        """Append a record of `size` bytes. Raises OSError."""
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
    """Mask a CRC-32C as TFRecord does, which keeps checksums of data with checksums in it strong."""
    rotated = (checksum >> 15 | checksum << 17) & 0xFFFFFFFF
    return ((rotated + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


_READ_AT_ONCE = 8 << 20  # bytes of a record
_MOST_NAMES = 1 << 14
_LONGEST_NAME = 1 << 12
_KINDS = {1: "bytes", 2: "float", 3: "int64"}
_TEXT = 0x0A  # the tag of a value in a list of bytes


class Rows(NamedTuple):
    """A list of an example, by its position in a file.

    kind: "bytes", "float" or "int64"; "" for an empty list, whose kind is unknown.
    """

    file: IO[bytes]
    kind: str
    begin: int
    end: int


def records_in(file: IO[bytes], size: int) -> Iterator[tuple[IO[bytes], int, int]]:
    """Yield the records of a TFRecord file of `size` bytes: a file, and where in it the record begins and ends.

    Raises MalformedExample.
    """
    at = 0
    while at < size:
        file.seek(at)
        head = file.read(12)
        length = int.from_bytes(head[:8], "little")
        if len(head) < 12 or head[8:] != masked(google_crc32c.value(head[:8])):
            raise MalformedExample(f"no record at byte {at}: the checksum of its length differs")
        begin, end = at + 12, at + 12 + length
        if end + 4 > size:
            raise MalformedExample(f"the record at byte {at} goes up to byte {end + 4}, the file ends at {size}")
        if length <= _READ_AT_ONCE:
            data = file.read(length)
            checksum = google_crc32c.value(data)
        else:
            checksum = 0
            for start in range(begin, end, _BLOCK):
                checksum = google_crc32c.extend(checksum, file.read(min(_BLOCK, end - start)))
        if file.read(4) != masked(checksum):
            raise MalformedExample(f"the record at byte {at} is damaged: its checksum differs")
        yield (io.BytesIO(data), 0, length) if length <= _READ_AT_ONCE else (file, begin, end)
        at = end + 4


def lists_in(file: IO[bytes], begin: int, end: int) -> dict[str, Rows]:
    """The lists of an example by name. Raises MalformedExample."""
    lists: dict[str, Rows] = {}
    for _, first, last in _messages(file, begin, end, {1}):
        for _, start, stop in _messages(file, first, last, {1}):
            name, rows = _entry(file, start, stop)
            lists[name] = rows
            if len(lists) > _MOST_NAMES:
                raise MalformedExample(f"more than {_MOST_NAMES} features")
    return lists


def _entry(file: IO[bytes], begin: int, end: int) -> tuple[str, Rows]:
    name, rows = "", Rows(file, "", end, end)
    for number, first, last in _messages(file, begin, end, {1, 2}):
        if number == 1:
            if last - first > _LONGEST_NAME:
                raise MalformedExample("the name of a feature is too long")
            file.seek(first)
            name = file.read(last - first).decode(errors="replace")
        else:
            for kind, start, stop in _messages(file, first, last, set(_KINDS)):
                rows = _packed(Rows(file, _KINDS[kind], start, stop))
    return name, rows


def _packed(rows: Rows) -> Rows:
    """Return the bytes of packed numbers; values of any length stay as they are."""
    if rows.kind == "bytes" or rows.begin == rows.end:
        return rows
    parts = list(_messages(rows.file, rows.begin, rows.end, {1}))
    if len(parts) != 1 or parts[0][2] != rows.end:
        raise MalformedExample("numbers in several pieces")
    return rows._replace(begin=parts[0][1])


def _messages(file: IO[bytes], begin: int, end: int, wanted: set[int]) -> Iterator[tuple[int, int, int]]:
    """The fields of a message that have a length before them: their number, where they begin and where they end."""
    at = begin
    while at < end:
        tag, at = _varint_at(file, at, end)
        number, form = tag >> 3, tag & 7
        if form == 2:
            length, at = _varint_at(file, at, end)
        elif form == 0:
            _, at = _varint_at(file, at, end)
            length = 0
        elif form in (1, 5):
            length = 8 if form == 1 else 4
        else:
            raise MalformedExample(f"unknown form {form} of a field")
        if length > end - at:
            raise MalformedExample("field longer than its message")
        if number in wanted:
            if form != 2:
                raise MalformedExample("numbers are not packed")
            yield number, at, at + length
        at += length


def _varint_at(file: IO[bytes], at: int, end: int) -> tuple[int, int]:
    """An integer, and where it ends."""
    file.seek(at)
    data = file.read(min(_MOST_OCTETS, end - at))
    number = 0
    for place, octet in enumerate(data):
        number |= (octet & 0x7F) << 7 * place
        if octet < 0x80:
            return number, at + place + 1
    raise MalformedExample("truncated integer")


class RowReader:
    """Reads a list from its beginning to its end."""

    def __init__(self, rows: Rows):
        self._rows = rows
        self._at = rows.begin

    @property
    def is_over(self) -> bool:
        """Return True if all of it was read."""
        return self._at == self._rows.end

    def floats(self, count: int) -> Array:
        """Read the next `count`, (count,) float32. Raises MalformedExample, as all of these."""
        return np.frombuffer(self._read(4 * count, "float"), "<f4")

    def integers(self, count: int) -> Array:
        """Read the next `count`, (count,) int64."""
        found: list[Array] = []
        while count:
            block = self._read(min(max(count, 16), self._left, _BLOCK), "int64")
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) < 0x80)[:count] + 1
            if not len(ends):
                raise MalformedExample("truncated integer" if block else "fewer integers than steps")
            self._at -= len(block) - int(ends[-1])
            found.append(numbers_in(block[: ends[-1]]))
            count -= len(ends)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def raw(self, count: int, size: int) -> Array:
        """Read the next `count` values, of `size` bytes each: (count, size) uint8."""
        head = np.frombuffer(bytes([_TEXT]) + varint(size), np.uint8)
        values: Array = np.frombuffer(self._read(count * (len(head) + size), "bytes"), np.uint8)
        values = values.reshape(count, len(head) + size)
        if not (values[:, : len(head)] == head).all():
            raise MalformedExample(f"not all values have {size} bytes")
        return values[:, len(head) :]

    def values(self, count: int, longest: int) -> Iterator[bytes]:
        """Yield the next `count` values, each of at most `longest` bytes."""
        for _ in range(count):
            if self._rows.kind not in ("bytes", ""):
                raise MalformedExample("numbers, not bytes")
            tag, at = _varint_at(self._rows.file, self._at, self._rows.end)
            length, at = _varint_at(self._rows.file, at, self._rows.end)
            if tag != _TEXT or length > min(longest, self._rows.end - at):
                raise MalformedExample(f"a value of {length} bytes exceeds {longest}")
            self._at = at
            yield self._read(length, "bytes")

    def inflated(self, count: int, size: int) -> Iterator[bytes]:
        """Yield the next `count` values, decompressed with zlib to `size` bytes each."""
        for value in self.values(count, size + (size >> 3) + 1024):
            inflate = zlib.decompressobj()
            try:
                data = inflate.decompress(value, size + 1)
            except zlib.error as error:
                raise MalformedExample(f"value unreadable by zlib: {error}") from error
            if len(data) != size:
                raise MalformedExample(f"value without {size} bytes")
            yield data

    @property
    def _left(self) -> int:
        return self._rows.end - self._at

    def _read(self, size: int, kind: str) -> bytes:
        if self._rows.kind not in (kind, ""):
            raise MalformedExample(f"a list of {self._rows.kind} instead of {kind}")
        if size > self._left:
            raise MalformedExample("fewer rows than steps")
        self._rows.file.seek(self._at)
        data = self._rows.file.read(size)
        if len(data) < size:
            raise MalformedExample("the file shrank")
        self._at += size
        return data


def count_of(rows: Rows, size: int = 1) -> int:
    """Count the rows of a list; for numbers, rows of `size`. Raises MalformedExample."""
    if rows.kind == "float":
        return (rows.end - rows.begin) // (4 * max(size, 1))
    if rows.kind == "bytes":
        return sum(1 for _ in _messages(rows.file, rows.begin, rows.end, {1}))
    numbers = 0
    for start in range(rows.begin, rows.end, _BLOCK):
        rows.file.seek(start)
        block = rows.file.read(min(_BLOCK, rows.end - start))
        numbers += int(np.count_nonzero(np.frombuffer(block, np.uint8) < 0x80))
    return numbers // max(size, 1)
