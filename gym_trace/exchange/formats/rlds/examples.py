"""TFRecord files of tf.train.Example, without TensorFlow: each example is a map of names to lists.

A list has bytes, float32 or int64. An example is read and written as a whole, so its size is limited.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import google_crc32c
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from gym_trace.data.values import Array
from gym_trace.errors import InvalidOption

LARGEST = 256 << 20  # bytes of an example; malformed ones take up to 16 times as much in memory
_MOST_NAMES = 1 << 14
_LISTS = {"bytes_list": "BytesList", "float_list": "FloatList", "int64_list": "Int64List"}


class MalformedExample(ValueError):
    """Invalid bytes of a tf.train.Example, or another one than was declared."""


def _example_class() -> Any:
    """Return the class of tf.train.Example, from the few lines of example.proto and feature.proto.

    The value of FloatList is declared as bytes: encoded as packed floats are, and without Python's floats, which change
    the bits of some NaNs.
    """
    kind = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tf", syntax="proto3")

    def message(name: str) -> Any:
        return file.message_type.add(name=name)

    def field(owner: Any, name: str, type_name: str, **options: Any) -> None:
        options = {"number": len(owner.field) + 1, "label": kind.LABEL_OPTIONAL, **options}
        owner.field.add(name=name, type=kind.TYPE_MESSAGE, type_name=f".tf.{type_name}", **options)

    message("BytesList").field.add(name="value", number=1, label=kind.LABEL_REPEATED, type=kind.TYPE_BYTES)
    message("FloatList").field.add(name="value", number=1, label=kind.LABEL_OPTIONAL, type=kind.TYPE_BYTES)
    message("Int64List").field.add(name="value", number=1, label=kind.LABEL_REPEATED, type=kind.TYPE_INT64)
    feature = message("Feature")
    feature.oneof_decl.add(name="kind")
    for name, type_name in _LISTS.items():
        field(feature, name, type_name, oneof_index=0)
    features = message("Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=kind.LABEL_OPTIONAL, type=kind.TYPE_STRING)
    field(entry, "value", "Feature")
    field(features, "feature", "Features.FeatureEntry", label=kind.LABEL_REPEATED)
    field(message("Example"), "features", "Features")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tf.Example"))


_Example = _example_class()


class ExampleWriter:
    """The lists of one example; then of the next one."""

    def __init__(self) -> None:
        self._example, self._bytes = _Example(), 0

    def bytes_of(self, name: str, rows: Iterable[bytes]) -> None:
        """Append values of any length. Raises InvalidOption, as all of these, if the example becomes too large."""
        values = self._list(name, "bytes_list").value
        for row in rows:
            self._count(len(row))
            values.append(row)

    def raw(self, name: str, rows: Array) -> None:
        """Append the bytes of each row of a numerical array as a value."""
        self.bytes_of(name, (row.tobytes() for row in rows))

    def floats(self, name: str, rows: Array) -> None:
        """Append float32."""
        self._count(rows.nbytes)
        self._list(name, "float_list").value += np.ascontiguousarray(rows, "<f4").tobytes()

    def integers(self, name: str, rows: Array) -> None:
        """Append integers or booleans."""
        self._count(rows.size)
        self._list(name, "int64_list").value.extend(rows.ravel().astype(np.int64).tolist())

    def finish(self, records: RecordWriter) -> None:
        """Write the example as one record, and begin the next one. Raises OSError, InvalidOption."""
        self._bytes = 0
        data = self._example.SerializeToString(deterministic=True)
        self._count(len(data))
        records.write(data)
        self._example, self._bytes = _Example(), 0

    def _list(self, name: str, kind: str) -> Any:
        return getattr(self._example.features.feature[name], kind)

    def _count(self, size: int) -> None:
        self._bytes += size
        if self._bytes > LARGEST:
            raise InvalidOption(
                f"an episode takes more than {LARGEST:,} bytes, the limit of an example; choose shorter ones: "
                "--where 'steps < …'"
            )


class RecordWriter:
    """A TFRecord file: records, each with its length and the checksums of both.

    Attributes:
        records, bytes: how many there are, and how much they take without their frames.
    """

    def __init__(self, path: Path):
        self._file = path.open("xb")
        self.records = self.bytes = 0

    def write(self, data: bytes) -> None:
        """Append a record. Raises OSError."""
        length = len(data).to_bytes(8, "little")
        self._file.writelines((length, _checksum(length), data, _checksum(data)))
        self.records += 1
        self.bytes += len(data)

    def close(self) -> None:
        self._file.close()


def _checksum(data: bytes) -> bytes:
    """Return the CRC-32C, masked as TFRecord does, which keeps checksums of data with checksums in it strong."""
    checksum: int = google_crc32c.value(data)
    rotated = (checksum >> 15 | checksum << 17) & 0xFFFFFFFF
    return ((rotated + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


class FeatureList(NamedTuple):
    """One list of an example.

    kind: "bytes_list", "float_list" or "int64_list"; "" for an empty list, whose kind is unknown.
    values: bytes of float32, or a sequence of bytes or integers.
    """

    kind: str
    values: Any


def records_in(file: IO[bytes], size: int) -> Iterator[bytes]:
    """Yield the records of a TFRecord file of `size` bytes. Raises MalformedExample."""
    at = 0
    while at < size:
        head = file.read(12)
        length = int.from_bytes(head[:8], "little")
        if len(head) < 12 or head[8:] != _checksum(head[:8]):
            raise MalformedExample(f"no record at byte {at}: the checksum of its length differs")
        end = at + 12 + length + 4
        if end > size:
            raise MalformedExample(f"the record at byte {at} goes up to byte {end}, the file ends at {size}")
        if length > LARGEST:
            raise MalformedExample(f"the record at byte {at} has {length:,} bytes, more than the limit of {LARGEST:,}")
        data = file.read(length)
        if file.read(4) != _checksum(data):
            raise MalformedExample(f"the record at byte {at} is damaged: its checksum differs")
        yield data
        at = end


def lists_in(record: bytes) -> dict[str, FeatureList]:
    """Return the lists of an example by name. Raises MalformedExample."""
    try:
        features = _Example.FromString(record).features.feature
    except DecodeError as error:
        raise MalformedExample(f"not a tf.train.Example ({error!s:.100})") from error
    if len(features) > _MOST_NAMES:
        raise MalformedExample(f"more than {_MOST_NAMES} features")
    lists = {}
    for name, feature in features.items():
        kind = feature.WhichOneof("kind") or ""
        lists[name] = FeatureList(kind, getattr(feature, kind).value if kind else b"")
    return lists


class ListReader:
    """Reads a list from its beginning to its end."""

    def __init__(self, found: FeatureList):
        self._list, self._at = found, 0

    def floats(self, count: int) -> Array:
        """Read the next `count`, (count,) float32. Raises MalformedExample, as all of these."""
        return np.frombuffer(self._next("float_list", count, 4), "<f4")

    def integers(self, count: int) -> Array:
        """Read the next `count`, (count,) int64."""
        return np.array(self._next("int64_list", count), np.int64)

    def values(self, count: int) -> list[bytes]:
        """Read the next `count` values."""
        return list(self._next("bytes_list", count))

    def raw(self, count: int, size: int) -> bytes:
        """Read the next `count` values, of `size` bytes each, joined."""
        values = self.values(count)
        if any(len(value) != size for value in values):
            raise MalformedExample(f"not all values have {size} bytes")
        return b"".join(values)

    def inflated(self, count: int, size: int) -> bytes:
        """Read the next `count` values, each decompressed with zlib to `size` bytes, joined."""
        found = []
        for value in self.values(count):
            try:
                found.append(zlib.decompressobj().decompress(value, size + 1))
            except zlib.error as error:
                raise MalformedExample(f"value unreadable by zlib: {error}") from error
            if len(found[-1]) != size:
                raise MalformedExample(f"value without {size} bytes")
        return b"".join(found)

    def _next(self, kind: str, count: int, size: int = 1) -> Any:
        """Return the next `count` elements, each of which is `size` items of the list."""
        if self._list.kind not in (kind, ""):
            raise MalformedExample(f"{self._list.kind} instead of {kind}")
        begin, self._at = self._at, self._at + count * size
        if self._at > len(self._list.values):
            raise MalformedExample("fewer rows than steps")
        return self._list.values[begin : self._at]


def count_of(found: FeatureList, size: int = 1) -> int:
    """Count the rows of a list; for numbers, rows of `size`."""
    if found.kind == "bytes_list":
        return len(found.values)
    return len(found.values) // ((4 if found.kind == "float_list" else 1) * max(size, 1))
