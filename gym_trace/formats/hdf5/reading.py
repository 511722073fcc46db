"""HDF5 files that anybody may have written: no other file is opened, and no more is read than is there."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np

from gym_trace.errors import UnreadableRecording
from gym_trace.printable import printable

MAGIC = b"\x89HDF\r\n\x1a\n"
# What h5py raises for malformed contents.
_ERRORS = (KeyError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
_MOST_RATIO = 4096  # of what an array has to what of it is in the file: deflate reaches a thousand
_MOST_ROW = 1 << 28  # bytes
_DEEPEST = 8
_SLACK = 1 << 20
_MOST_TEXT, _TEXT_ROW, _FEWEST_TEXTS = 64 << 20, 64 << 10, 8
_BLOCK = 8 << 20  # bytes that are read ahead


class Reading:
    """An open HDF5 file. Raises UnreadableRecording if it is not one, or malformed.

    root: what it has.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        try:
            self._file = h5py.File(self.path, "r")
            self.root = Node(self, self._file["/"], "")
        except _ERRORS as error:
            raise UnreadableRecording(f"{self.path}: not a readable HDF5 file ({error!s:.100})") from error

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def fault(self, name: str, problem: str) -> UnreadableRecording:
        """An error about something in the file."""
        return UnreadableRecording(f"{self.path}: {printable(name) or '/'}: {problem}")

    @contextlib.contextmanager
    def located(self, name: str) -> Iterator[None]:
        """Turn what h5py raises for something malformed into an error about it."""
        try:
            yield
        except UnicodeDecodeError as error:
            raise self.fault(name, "text is not UTF-8") from error
        except _ERRORS as error:
            if isinstance(error, UnreadableRecording):
                raise
            raise self.fault(name, f"cannot be read ({error!s:.100})") from error


class Node:
    """A group."""

    def __init__(self, reading: Reading, group: h5py.Group, name: str):
        self.name = name
        self._reading, self._group = reading, group

    def __contains__(self, key: str) -> bool:
        return key in self.names()

    def names(self) -> list[str]:
        with self._reading.located(self.name):
            return list(self._group)

    def fault(self, problem: str) -> UnreadableRecording:
        """An error about the group."""
        return self._reading.fault(self.name, problem)

    def attribute(self, name: str) -> Any:
        """Return None if it is missing or unreadable."""
        try:
            return self._group.attrs.get(name)
        except _ERRORS:
            return None

    def attributes(self) -> dict[str, Any]:
        """Return the readable ones."""
        with self._reading.located(self.name):
            return {name: self.attribute(name) for name in self._group.attrs}

    def see(self, groups: set[int]) -> None:
        """Adds it to those that were seen. Two names may stand for one group: raises UnreadableRecording for those."""
        address = int(h5py.h5o.get_info(self._group.id).addr)
        if address in groups:
            raise self.fault("duplicate name")
        groups.add(address)

    def node(self, key: str) -> Node:
        found = self._at(key)
        if not isinstance(found, h5py.Group):
            raise self._reading.fault(f"{self.name}/{key}", "not a group")
        return Node(self._reading, found, f"{self.name}/{key}")

    def rows(self, key: str) -> Rows:
        """Return an array of the group."""
        found = self._at(key)
        if not isinstance(found, h5py.Dataset):
            raise self._reading.fault(f"{self.name}/{key}", "not an array")
        return Rows(self._reading, found, f"{self.name}/{key}")

    def is_node(self, key: str) -> bool:
        return isinstance(self._at(key), h5py.Group)

    def _at(self, key: str) -> Any:
        name = f"{self.name}/{key}"
        with self._reading.located(name):
            link = self._group.get(key, getlink=True)
            if link is None:
                raise self._reading.fault(name, "is missing")
            if not isinstance(link, h5py.HardLink):
                raise self._reading.fault(name, "is a link; links are not followed")
            return self._group[key]


def arrays_in(
    node: Node, path: tuple[str, ...] = (), groups: set[int] | None = None
) -> Iterator[tuple[tuple[str, ...], Rows]]:
    """Return all arrays in a group and its subgroups, by path. A duplicate group is malformed.

    groups: addresses of the groups seen so far.
    """
    groups = set() if groups is None else groups
    if len(path) > _DEEPEST:
        raise node.fault("is nested too deep")
    node.see(groups)
    for name in node.names():
        if node.is_node(name):
            yield from arrays_in(node.node(name), (*path, name), groups)
        else:
            yield (*path, name), node.rows(name)


class Rows:
    """An array with random access to rows.

    Attributes:
        name: in the file. shape: of all of it, () of a single value. is_text: whether it is of text.
        dtype: of a row; of objects for text, and for values that are bytes of any number.
    """

    def __init__(self, reading: Reading, found: h5py.Dataset, name: str):
        self.name = name
        self._reading, self._found = reading, found
        with reading.located(name):
            self.shape: tuple[int, ...] = tuple(found.shape or ())
            self.dtype: np.dtype[Any] = found.dtype
            string = h5py.check_string_dtype(self.dtype)
            is_elsewhere = bool(found.external) or found.is_virtual
            stored = found.id.get_storage_size()
        self.is_text = string is not None
        self.is_bytes = self.dtype == object and h5py.check_vlen_dtype(self.dtype) == np.uint8
        if is_elsewhere:
            raise self.fault("external link, not followed")
        if self.dtype.kind not in "biuf" and not self.is_text and not self.is_bytes:
            raise self.fault(f"unsupported dtype {printable(str(self.dtype))[:60]}; numbers or text required")
        size = max(1, self.dtype.itemsize * math.prod(self.shape[1:])) * (self.shape[0] if self.shape else 1)
        if self.row_size > _MOST_ROW or size > _SLACK + stored * _MOST_RATIO or found.shape is None:
            raise self.fault(f"shape {self.shape}, but only {stored} bytes stored")

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0

    @property
    def row_size(self) -> int:
        """Bytes of a row; of text, which many rows can refer to, what some rows of it are taken to have."""
        size = _TEXT_ROW if self.dtype == object else self.dtype.itemsize
        return max(1, size * math.prod(self.shape[1:]))

    def fault(self, problem: str) -> UnreadableRecording:
        """An error about the array."""
        return self._reading.fault(self.name, problem)

    def read(self, begin: int = 0, end: int | None = None) -> Any:
        """Return rows in native byte order; text as a list of str. A single value is returned whole."""
        with self._reading.located(self.name):
            if self.is_text and self.shape:
                return self._texts(begin, len(self) if end is None else end)
            found = self._found[begin:end] if self.shape else self._found[()]
            if self.is_text:
                return self._decoded(found)
            array = np.asarray(found)
            return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))

    def _texts(self, begin: int, end: int) -> list[str]:
        """Some at a time: many rows may refer to one text, which is kept once."""
        most = max(_FEWEST_TEXTS, _MOST_TEXT // max(1, os.path.getsize(self._reading.path)))
        known: dict[str, str] = {}
        found = []
        for first in range(begin, min(end, len(self)), most):
            block = np.ravel(self._found[first : min(end, first + most)]).tolist()
            found += [known.setdefault(text, text) for text in map(self._decoded, block)]
        return found

    @staticmethod
    def _decoded(text: Any) -> str:
        return text.decode() if isinstance(text, bytes) else str(text)

    def text(self) -> str:
        """Return the array as text. Raises UnreadableRecording if it is not text."""
        found = self.read() if self.is_text and not self.shape else None
        if not isinstance(found, str) or len(found) > _MOST_TEXT:
            raise self.fault("not a single text")
        return found


def pieces(steps: int, row_size: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of the steps to read at a time; one empty piece for no steps."""
    most = max(1, min(4096, (4 << 20) // max(1, row_size)))
    for begin in range(0, max(1, steps), most):
        yield begin, min(steps, begin + most)


class Ahead:
    """Rows that are read in their order, many at a time."""

    def __init__(self, rows: Rows):
        self.rows = rows
        self._begin = 0
        self._block: Any = None
        self._most = max(1, min(1 << 16, _BLOCK // rows.row_size))

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, begin: int, end: int) -> Any:
        """As Rows.read()."""
        if self._block is None or begin < self._begin or end > self._begin + len(self._block):
            self._begin = begin
            self._block = self.rows.read(begin, max(end, min(len(self.rows), begin + self._most)))
        return self._block[begin - self._begin : end - self._begin]
