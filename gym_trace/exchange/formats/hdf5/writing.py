"""HDF5 files with a hundred thousand small arrays in them, through the low-level functions of h5py.

File and groups are of HDF5 1.8, which every reader knows, and in which a small group takes few bytes.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import h5py
import numpy as np
from h5py import h5a, h5d, h5g, h5p, h5s, h5t

from gym_trace.data.values import Array
from gym_trace.exchange.formats.infos import InfoColumn
from gym_trace.storage.interrupts import held_back

TEXT = h5py.string_dtype()
_COMPACT = 16 << 10  # bytes of an array that lies in its header, which must not exceed 64 KiB
_CHUNK = 1 << 19  # bytes
_PICTURE = 1024  # elements of a row of bytes from which on it is worth compressing
_CACHE = 8 << 20

Group: TypeAlias = Any  # h5py.h5g.GroupID
Dataset: TypeAlias = Any  # h5py.h5d.DatasetID


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str]) -> Iterator[tuple[h5py.File, Callable[[], None]]]:
    """Open a file, whose .id is the root group for the functions below, with a function to call between windows.

    That raises OSError if the file cannot be written, as leaving the block does, and KeyboardInterrupt. Elsewhere this
    would leave the library with a file that it closes after Python has ended, and crashes.
    """
    with held_back() as check_signals, open(path, "w+b", buffering=0) as raw:
        below = _Below(raw)

        def check() -> None:
            below.check()
            check_signals()

        try:
            with h5py.File(below, "w", libver=("v108", "v108"), rdcc_nbytes=_CACHE) as file:
                yield file, check
                below.check()
        finally:
            below.check()


class _Below:
    """File object for h5py. After a failed write it ignores further writes; check() raises the error.

    The library continues to write, also from destructors, and its own errors do not name the cause.
    """

    def __init__(self, raw: io.FileIO):
        self._raw = raw
        self._error: OSError | None = None
        self.seek, self.tell, self.read, self.readinto = raw.seek, raw.tell, raw.read, raw.readinto

    def check(self) -> None:
        """Raises OSError if something could not be written."""
        if self._error is not None:
            raise self._error

    def write(self, data: Any) -> int:
        rest = memoryview(data)
        try:
            while self._error is None and len(rest):
                rest = rest[self._raw.write(rest) :]
        except OSError as error:
            self._error = error
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        try:
            return self._raw.truncate(size) if self._error is None else 0
        except OSError as error:
            self._error = error
            return 0

    def flush(self) -> None:
        """Nothing waits to be written."""


def new_group(parent: Group, name: str) -> Group:
    """name: a path with slashes, whose parent must exist."""
    return h5g.create(parent, name.encode())


class Arrays:
    """Creates datasets of one name, dtype and row shape, whose HDF5 types are looked up once.

    dtype: None for text. shape: of a row.
    """

    def __init__(self, name: str, dtype: np.dtype[Any] | None, shape: tuple[int, ...] = ()):
        self.name = name
        self._encoded, self._shape = name.encode(), shape
        self._dtype = TEXT if dtype is None else dtype.newbyteorder("<")
        self._type, self._memory = h5t.py_create(self._dtype, logical=True), h5t.py_create(self._dtype)
        self._size = self._dtype.itemsize * math.prod(shape)
        self._is_picture = self._dtype.itemsize == 1 and self._size >= _PICTURE
        self._contiguous, self._compact = _how(self._dtype), _how(self._dtype, h5d.COMPACT)

    def new(self, group: Group, rows: int) -> Dataset:
        """Create a dataset of `rows` rows for write()."""
        if self._is_picture and rows:
            how = _how(self._dtype)
            how.set_chunk((min(rows, max(1, _CHUNK // self._size)), *self._shape))
            how.set_deflate(1)
        else:
            how = self._compact if 0 < rows * self._size <= _COMPACT else self._contiguous
        return h5d.create(group, self._encoded, self._type, h5s.create_simple((rows, *self._shape)), how)

    def write(self, dataset: Dataset, begin: int, rows: Any) -> None:
        array = np.ascontiguousarray(rows, self._dtype)
        if not len(array):
            return
        if len(array) == dataset.shape[0]:
            dataset.write(h5s.ALL, h5s.ALL, array, self._memory)
            return
        place = dataset.get_space()
        place.select_hyperslab((begin, *(0 for _ in self._shape)), array.shape)
        dataset.write(h5s.create_simple(array.shape), place, array, self._memory)


def info_arrays(columns: Sequence[InfoColumn]) -> tuple[list[Arrays], list[str]]:
    """Return the arrays of the columns of infos, and the names of the groups that they lie in, outer ones first."""
    made = [Arrays("/".join(("infos", *one.path)), one.dtype, one.shape) for one in columns]
    groups = {"/".join(("infos", *one.path[:end])) for one in columns for end in range(len(one.path))}
    return made, sorted(groups)


class BlobArray:
    """A growing array of byte strings."""

    def __init__(self, file: h5py.File, name: str):
        kind = h5py.vlen_dtype(np.uint8)
        self._found = file.create_dataset(name, (0,), kind, maxshape=(None,), chunks=(1024,))
        self._waiting: list[Array] = []

    def add(self, data: bytes) -> None:
        """Append bytes."""
        self._waiting.append(np.frombuffer(data, np.uint8))
        if len(self._waiting) >= 1024:
            self.write()

    def write(self) -> None:
        count = len(self._found)
        self._found.resize((count + len(self._waiting),))
        for i, data in enumerate(self._waiting):
            self._found[count + i] = data
        self._waiting.clear()


def _how(dtype: Any, layout: int = h5d.CONTIGUOUS) -> Any:
    """Return the creation properties of an array."""
    how = h5p.create(h5p.DATASET_CREATE)
    how.set_layout(layout)
    if dtype is not TEXT and layout != h5d.COMPACT:  # all of it will be written
        how.set_fill_time(h5d.FILL_TIME_NEVER)
    return how


_SCALAR = h5s.create(h5s.SCALAR)
_TEXT = h5t.py_create(TEXT, logical=True)


def attribute(group: Group, name: str, value: int | str | Array) -> None:
    """Set a new attribute. Integers up to 64 bits."""
    if isinstance(value, str):
        array, kind = np.array(value, TEXT), _TEXT
    elif isinstance(value, int) and value < 1 << 63:
        array, kind = np.array(value, np.int64), h5t.NATIVE_INT64
    else:
        array = np.array(value, np.uint64) if isinstance(value, int) else value
        kind = h5t.py_create(array.dtype, logical=True)
    h5a.create(group, name.encode(), kind, h5s.create_simple(array.shape) if array.shape else _SCALAR).write(array)


def text(group: Group, name: str, value: str) -> None:
    data = h5d.create(group, name.encode(), _TEXT, _SCALAR)
    data.write(h5s.ALL, h5s.ALL, np.array(value, TEXT), h5t.py_create(TEXT))
