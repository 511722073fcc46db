"""Read untrusted HDF5 files in bounded memory, without following links to other files."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Iterator
from itertools import islice
from typing import Any

import h5py
import numpy as np

from gym_trace.data.trees import leaves_of, mapped
from gym_trace.data.values import Array
from gym_trace.errors import UnreadableRecording
from gym_trace.exchange.formats.rows import step_ranges
from gym_trace.printable import printable

MAGIC = b"\x89HDF\r\n\x1a\n"
# Errors of h5py for malformed contents.
_ERRORS = (KeyError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
# Limits of an array: bytes of any array, and bytes per stored byte (deflate reaches a thousand).
_FREE_BYTES, _BYTES_PER_BYTE = 1 << 20, 4096
_MOST_ROW = 1 << 28  # bytes
MOST_ARRAYS = 1000
_DEEPEST = 8
_MOST_TEXT, _TEXT_ROW = 64 << 20, 64 << 10  # bytes per text, and estimate per row of text
_LEAST_TEXTS_AT_ONCE = 8
_CACHE = 1 << 20  # bytes of decompressed chunks that HDF5 caches per array
_MOST_BAND = 1 << 29  # bytes of a band: one row of chunks, which are decompressed together
_LEAST_CACHE_SLOTS = 521  # the default of HDF5
_MOST_TEXT_READS = 8  # per stored byte: many rows may refer to one text
_FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32", 32000: "lzf"}


class H5File:
    """An open HDF5 file. root: its root group. Raises UnreadableRecording for another or a malformed file."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        try:
            self._file = h5py.File(self.path, "r", rdcc_nbytes=_CACHE)
            size = os.path.getsize(self.path)
            self.texts_at_once = max(_LEAST_TEXTS_AT_ONCE, _MOST_TEXT // max(1, size))
            self._array_bytes_left = 2 * (_FREE_BYTES + size * _BYTES_PER_BYTE)  # twice: some are opened again
            self._cache_left = 2 * _MOST_BAND  # twice: the arrays of the previous episode may still be open
            self._text_left = _MOST_TEXT + _MOST_TEXT_READS * size
            self.root = H5Group(self, self._file["/"], "")
        except _ERRORS as error:
            raise UnreadableRecording(f"{self.path}: not a readable HDF5 file ({error!s:.100})") from error

    def __enter__(self) -> H5File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def fault(self, name: str, problem: str) -> UnreadableRecording:
        """Return an error about something in the file."""
        return UnreadableRecording(f"{self.path}: {printable(name) or '/'}: {problem}")

    def count_array(self, name: str, size: int) -> None:
        """Count the bytes of an array that is opened. Raises UnreadableRecording for too many: one has many names."""
        self._array_bytes_left -= size
        if self._array_bytes_left < 0:
            raise self.fault(name, "the arrays have more bytes than a file of this size can hold")

    def reserve(self, rows: H5Rows, band: int) -> None:
        """Reserve memory for decompressed chunks while an array is open. Raises UnreadableRecording."""
        if band > self._cache_left:
            raise rows.fault("its chunks are too large to be read together with others; write it with smaller ones")
        self._release(-band)
        weakref.finalize(rows, self._release, band)

    def _release(self, size: int) -> None:
        self._cache_left += size

    def count_text(self, name: str, size: int) -> None:
        """Count text that was read. Raises UnreadableRecording for more than a file of this size can hold."""
        self._text_left -= size
        if self._text_left < 0:
            raise self.fault(name, "one text is named too many times")

    @contextlib.contextmanager
    def located(self, name: str) -> Iterator[None]:
        """Name the array in errors of h5py. Raises UnreadableRecording."""
        try:
            yield
        except UnicodeDecodeError as error:
            raise self.fault(name, "text is not UTF-8") from error
        except _ERRORS as error:
            if isinstance(error, UnreadableRecording):
                raise
            raise self.fault(name, f"cannot be read ({error!s:.100})") from error


class H5Group:
    """A group."""

    def __init__(self, file: H5File, group: h5py.Group, name: str):
        self.name = name
        self._file, self._group = file, group

    def __contains__(self, key: str) -> bool:
        return key in self.names()

    def names(self) -> list[str]:
        with self._file.located(self.name):
            return list(self._group)

    def fault(self, problem: str) -> UnreadableRecording:
        """Return an error about the group."""
        return self._file.fault(self.name, problem)

    def attributes(self, *wanted: str) -> dict[str, Any]:
        """Return attributes NAME and NAME/… of the wanted names, or all: numbers, texts, or arrays of them."""
        with self._file.located(self.name):
            names = [name for name in self._group.attrs if not wanted or {name, name.partition("/")[0]} & {*wanted}]
        return {name: self._attribute(name) for name in names}

    def _attribute(self, name: str) -> Any:
        """Return the value of an attribute. Checks its type and size first."""
        label = f"{self.name}@{name}"
        with self._file.located(label):
            header = self._group.attrs.get_id(name)
            is_text, count = h5py.check_string_dtype(header.dtype) is not None, math.prod(header.shape)
            if header.dtype.kind not in "biufc" and not is_text:
                raise self._file.fault(label, f"unsupported dtype {printable(str(header.dtype))[:60]}")
            if count * header.dtype.itemsize > _MOST_TEXT:
                raise self._file.fault(label, f"{count} numbers are too many for an attribute")
            if is_text and (count > self._file.texts_at_once or len(header.shape) > 1):
                raise self._file.fault(label, f"{count} texts are too many for an attribute")
            value = self._group.attrs[name]
        texts = value.tolist() if isinstance(value, np.ndarray) and is_text else [value] if is_text else []
        self._file.count_text(label, sum(map(len, texts)))
        return value

    def add_to(self, seen: set[int]) -> None:
        """Add the address of this group to the seen ones. Raises UnreadableRecording for a group with two names."""
        with self._file.located(self.name):
            address = int(h5py.h5o.get_info(self._group.id).addr)
        if address in seen:
            raise self.fault("duplicate name")
        seen.add(address)

    def group(self, key: str) -> H5Group:
        name = f"{self.name}/{key}"
        if not self.is_group(key):
            raise self._file.fault(name, "not a group")
        with self._file.located(name):
            return H5Group(self._file, self._group[key], name)

    def rows(self, key: str) -> H5Rows:
        """Return an array of the group."""
        name = f"{self.name}/{key}"
        if self._class_of(key) is not h5py.Dataset:
            raise self._file.fault(name, "not an array")
        return H5Rows(self._file, self._group, key, name)

    def is_group(self, key: str) -> bool:
        return self._class_of(key) is h5py.Group

    def _class_of(self, key: str) -> Any:
        """Return the class of a member, which is not opened. Raises UnreadableRecording for a link."""
        name = f"{self.name}/{key}"
        with self._file.located(name):
            link = self._group.get(key, getclass=True, getlink=True)
            if link is None:
                raise self._file.fault(name, "is missing")
            if link is not h5py.HardLink:
                raise self._file.fault(name, "is a link; links are not followed")
            return self._group.get(key, getclass=True)


def arrays_in(
    group: H5Group, path: tuple[str, ...] = (), seen: set[int] | None = None
) -> Iterator[tuple[tuple[str, ...], H5Rows]]:
    """Yield all arrays in a group and its subgroups, with their paths. Raises UnreadableRecording for a cycle.

    seen: addresses of groups.
    """
    seen = set() if seen is None else seen
    if len(path) > _DEEPEST:
        raise group.fault("is nested too deep")
    group.add_to(seen)
    for name in group.names():
        if group.is_group(name):
            yield from arrays_in(group.group(name), (*path, name), seen)
        else:
            yield (*path, name), group.rows(name)


def columns_in(group: H5Group) -> dict[tuple[str, ...], H5Rows]:
    """Return all arrays in a group and its subgroups by path. Raises UnreadableRecording for more than MOST_ARRAYS."""
    arrays = dict(islice(arrays_in(group), MOST_ARRAYS + 1))
    if len(arrays) > MOST_ARRAYS:
        raise group.fault(f"has more than {MOST_ARRAYS} arrays")
    return arrays


class H5Rows:
    """An array with random access to rows.

    Attributes:
        name: in the file. shape: of the array; () for a single value. dtype: object for text and for byte strings.
        is_text, is_bytes: True for an array of texts, or of byte strings.
    """

    def __init__(self, file: H5File, group: h5py.Group, key: str, name: str):
        self.name, self._file = name, file
        with file.located(name):
            self._dataset = dataset = group[key]
            self.shape: tuple[int, ...] = tuple(dataset.shape or ())
            self.dtype: np.dtype[Any] = dataset.dtype
            string = h5py.check_string_dtype(self.dtype)
            is_elsewhere = bool(dataset.external) or dataset.is_virtual
            stored = dataset.id.get_storage_size()
        self.is_text = string is not None
        self.is_bytes = self.dtype == object and h5py.check_vlen_dtype(self.dtype) == np.uint8
        if is_elsewhere:
            raise self.fault("external link, not followed")
        if self.dtype.kind not in "biuf" and not self.is_text and not self.is_bytes:
            raise self.fault(f"unsupported dtype {printable(str(self.dtype))[:60]}; numbers or text required")
        size = max(1, self.dtype.itemsize * math.prod(self.shape[1:])) * (self.shape[0] if self.shape else 1)
        if self.row_size > _MOST_ROW or size > _FREE_BYTES + stored * _BYTES_PER_BYTE or dataset.shape is None:
            raise self.fault(f"shape {self.shape}, but only {stored} bytes stored")
        file.count_array(name, size)
        band, tiles = self._band(stored)
        if band > _CACHE:
            file.reserve(self, band)
            del dataset, self._dataset  # HDF5 takes the cache of a dataset from the first handle that is open
            with file.located(name):
                access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
                access.set_chunk_cache(max(_LEAST_CACHE_SLOTS, 2 * tiles + 1), band, 1.0)
                self._dataset = h5py.Dataset(h5py.h5d.open(group.id, key.encode(), access))

    def _band(self, stored: int) -> tuple[int, int]:
        """Return the decompressed bytes of one row of chunks, and the number of these chunks; (0, 0) if uncompressed.

        Reading a row decompresses all of them. Raises UnreadableRecording for unsupported filters.
        """
        with self._file.located(self.name):
            layout = self._dataset.id.get_create_plist()
            filters = [layout.get_filter(number)[0] for number in range(layout.get_nfilters())]
        if unknown := [number for number in filters if number not in _FILTERS]:
            raise self.fault(f"filter {unknown[0]} is not supported; use {', '.join(_FILTERS.values())}")
        if not filters:
            return 0, 0
        rows, *inner = chunks = self._dataset.chunks
        tiles = math.prod(-(-size // chunk) for size, chunk in zip(self.shape[1:], inner))
        band = rows * math.prod(inner) * max(1, tiles) * (16 if self.dtype == object else self.dtype.itemsize)
        most = _CACHE if self.dtype == object else min(_MOST_BAND, _FREE_BYTES + stored * _BYTES_PER_BYTE)
        if band > most:
            raise self.fault(f"chunks of shape {chunks} are too large to be decompressed; write it with smaller ones")
        return band, tiles

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0

    @property
    def row_size(self) -> int:
        """Return the bytes of a row; an estimate for texts and byte strings."""
        size = _TEXT_ROW if self.dtype == object else self.dtype.itemsize
        return max(1, size * math.prod(self.shape[1:]))

    def fault(self, problem: str) -> UnreadableRecording:
        """Return an error about the array."""
        return self._file.fault(self.name, problem)

    def read(self, begin: int = 0, end: int | None = None) -> Any:
        """Return rows in native byte order; text as a list of str. A single value is returned whole."""
        end = min(len(self), len(self) if end is None else end)
        with self._file.located(self.name):
            if self.dtype == object:
                return self._objects(begin, end) if self.shape else self._counted(self._dataset[()])
            values = self._dataset[begin:end] if self.shape else self._dataset[()]
            if self.is_text:
                return list(map(self._decoded, np.ravel(values).tolist())) if self.shape else self._decoded(values)
            array = np.asarray(values)
            return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))

    def _objects(self, begin: int, end: int) -> list[Any] | Array:
        """Return texts or byte strings, read some at a time: many rows may refer to one text, which is held once."""
        distinct: dict[Any, Any] = {}
        values: list[Any] = []
        for first in range(begin, end, self._file.texts_at_once):
            block = np.ravel(self._dataset[first : min(end, first + self._file.texts_at_once)]).tolist()
            for value in map(self._counted, block):
                values.append(distinct.setdefault(value, value) if self.is_text else value)
        if self.is_text:
            return values
        rows = np.empty(len(values), object)
        rows[:] = values
        return rows

    def _counted(self, value: Any) -> Any:
        self._file.count_text(self.name, len(value))
        return self._decoded(value) if self.is_text else value

    @staticmethod
    def _decoded(text: Any) -> str:
        return text.decode() if isinstance(text, bytes) else str(text)

    def __iter__(self) -> Iterator[Any]:
        """Yield the rows, read some at a time."""
        for begin, end in step_ranges(len(self), self.row_size):
            yield from self.read(begin, end)

    def text(self) -> str:
        """Return the array as text. Raises UnreadableRecording if it is not text."""
        text = self.read() if self.is_text and not self.shape else None
        if not isinstance(text, str) or len(text) > _MOST_TEXT:
            raise self.fault("not a single text")
        return text


def row_blocks(tree: Any, rows: int) -> Iterator[tuple[int, int, Any]]:
    """Yield (begin, end, rows in between) of H5Rows in dicts and tuples, some rows at a time."""
    for begin, end in step_ranges(rows, sum(array.row_size for array in leaves_of(tree))):
        yield begin, end, mapped(lambda array: array.read(begin, end), tree)  # noqa: B023 - called at once
