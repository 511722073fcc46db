"""Read and write TFRecord files of tf.train.Example, without TensorFlow. An example is a map of names to lists.

A list has values of bytes, float32 or int64. An example is read and written as a whole, so its size is limited.
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
    """Invalid bytes of a tf.train.Example, or an example that contradicts features.json."""


def _example_class() -> Any:
    """Return the class of tf.train.Example, defined as in example.proto and feature.proto.

    But the value of FloatList is declared as bytes. They are encoded like packed floats, and not converted to Python's
    floats, which would change the bits of some NaNs.
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
    """Collects the lists of an example; finish() writes it and starts the next one."""

    def __init__(self) -> None:
        self._example, self._bytes = _Example(), 0

    def bytes_of(self, name: str, rows: Iterable[bytes]) -> None:
        """Append values of bytes. Raises InvalidOption, as all methods, if the example becomes too large."""
        values = self._list(name, "bytes_list").value
        for row in rows:
            self._count(len(row))
            values.append(row)

    def raw(self, name: str, rows: Array) -> None:
        """Append one value per row of a numeric array: its bytes."""
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
        """Write the example as one record, and start the next one. Raises OSError, InvalidOption."""
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
    """Writes a TFRecord file. Each record has a length and checksums.

    Attributes:
        records, bytes: number of records, and their bytes without lengths and checksums.
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
    """Return the CRC-32C, masked as in TFRecord: a CRC of data that contains its own CRC would be weak."""
    checksum: int = google_crc32c.value(data)
    rotated = (checksum >> 15 | checksum << 17) & 0xFFFFFFFF
    return ((rotated + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


class FeatureList(NamedTuple):
    """One list of an example.

    kind: "bytes_list", "float_list" or "int64_list"; "" for an empty list, whose kind is unknown.
    values: a sequence of bytes or integers; for float32, their bytes.
    """

    kind: str
    values: Any


def records_in(file: IO[bytes], size: int) -> Iterator[bytes]:
    """Yield the records of a TFRecord file of `size` bytes. Raises MalformedExample."""
    begin = 0
    while begin < size:
        header = file.read(12)
        length = int.from_bytes(header[:8], "little")
        if len(header) < 12 or header[8:] != _checksum(header[:8]):
            raise MalformedExample(f"no record at byte {begin}: the checksum of its length differs")
        end = begin + 12 + length + 4
        if end > size:
            raise MalformedExample(f"the record at byte {begin} goes up to byte {end}, the file ends at {size}")
        if length > LARGEST:
            raise MalformedExample(
                f"the record at byte {begin} has {length:,} bytes, more than the limit of {LARGEST:,}"
            )
        data = file.read(length)
        if file.read(4) != _checksum(data):
            raise MalformedExample(f"the record at byte {begin} is damaged: its checksum differs")
        yield data
        begin = end


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
    """Reads a list in order."""

    def __init__(self, values: FeatureList):
        self._list, self._position = values, 0

    def floats(self, count: int) -> Array:
        """Read the next values, (count,) float32. Raises MalformedExample, as all methods."""
        return np.frombuffer(self._next("float_list", count, 4), "<f4")

    def integers(self, count: int) -> Array:
        """Read the next values, (count,) int64."""
        return np.array(self._next("int64_list", count), np.int64)

    def values(self, count: int) -> list[bytes]:
        """Read the next values of bytes."""
        return list(self._next("bytes_list", count))

    def raw(self, count: int, size: int) -> bytes:
        """Read and join the next values, of `size` bytes each."""
        values = self.values(count)
        if any(len(value) != size for value in values):
            raise MalformedExample(f"not all values have {size} bytes")
        return b"".join(values)

    def inflated(self, count: int, size: int) -> bytes:
        """Read the next values, decompress each with zlib to `size` bytes, and join them."""
        inflated = []
        for value in self.values(count):
            try:
                inflated.append(zlib.decompressobj().decompress(value, size + 1))
            except zlib.error as error:
                raise MalformedExample(f"value unreadable by zlib: {error}") from error
            if len(inflated[-1]) != size:
                raise MalformedExample(f"value without {size} bytes")
        return b"".join(inflated)

    def _next(self, kind: str, count: int, size: int = 1) -> Any:
        """Return the next `count` values, each of `size` items of the list."""
        if self._list.kind not in (kind, ""):
            raise MalformedExample(f"{self._list.kind} instead of {kind}")
        begin, self._position = self._position, self._position + count * size
        if self._position > len(self._list.values):
            raise MalformedExample("fewer rows than steps")
        return self._list.values[begin : self._position]


def count_of(values: FeatureList, size: int = 1) -> int:
    """Count the rows of a list. size: numbers per row."""
    if values.kind == "bytes_list":
        return len(values.values)
    return len(values.values) // ((4 if values.kind == "float_list" else 1) * max(size, 1))
