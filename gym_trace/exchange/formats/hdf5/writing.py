"""Write HDF5 files of many small arrays, through the low-level functions of h5py, which are faster.

Files and groups are those of HDF5 1.8: every reader knows them, and a small group takes few bytes.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import h5py
import numpy as np
from h5py import h5a, h5d, h5g, h5p, h5s, h5t

from gym_trace.data.values import Array
from gym_trace.exchange.formats.columns import Column
from gym_trace.exchange.formats.steps.windows import Window
from gym_trace.playback.row_types import RowType
from gym_trace.playback.step_runs import StepRuns
from gym_trace.storage.interrupts import held_back

TEXT = h5py.string_dtype()
_MOST_COMPACT = 16 << 10  # bytes of an array in its object header, which must not exceed 64 KiB
_CHUNK = 1 << 19  # bytes
_LEAST_COMPRESSED = 1024  # bytes of a row; smaller rows are not worth compressing
_CACHE = 8 << 20  # bytes

Group: TypeAlias = Any  # h5py.h5g.GroupID
Dataset: TypeAlias = Any  # h5py.h5d.DatasetID


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str]) -> Iterator[tuple[h5py.File, Callable[[], None]]]:
    """Open a new file; yield it, and check(), to be called between windows. file.id is the root group.

    check() raises OSError if a write has failed, and KeyboardInterrupt; leaving the block raises OSError, too. An
    exception raised elsewhere would leave HDF5 with an open file, which it closes after Python has ended, and crashes.
    """
    with held_back() as check_signals, open(path, "w+b", buffering=0) as raw:
        file_object = _FileObject(raw)

        def check() -> None:
            file_object.check()
            check_signals()

        try:
            with h5py.File(file_object, "w", libver=("v108", "v108"), rdcc_nbytes=_CACHE) as file:
                yield file, check
                file_object.check()
        finally:
            file_object.check()


class _FileObject:
    """File object for h5py. After a failed write it ignores further writes; check() raises the error.

    HDF5 continues to write, also from destructors, and its own errors do not name the cause.
    """

    def __init__(self, raw: io.FileIO):
        self._raw = raw
        self._error: OSError | None = None
        self.seek, self.tell, self.read, self.readinto = raw.seek, raw.tell, raw.read, raw.readinto

    def check(self) -> None:
        """Raise OSError if a write has failed."""
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
        """Do nothing: writes are unbuffered."""


def new_group(parent: Group, name: str) -> Group:
    """Create a group. name: a path with slashes, whose parent must exist."""
    return h5g.create(parent, name.encode())


class Arrays:
    """Creates datasets of one name and RowType, and looks up their HDF5 types only once. form: None for text."""

    def __init__(self, name: str, form: RowType | None):
        self._name, self._shape = name.encode(), () if form is None else form.shape
        self._dtype = TEXT if form is None else form.dtype.newbyteorder("<")
        self._type, self._memory = h5t.py_create(self._dtype, logical=True), h5t.py_create(self._dtype)
        self._size = self._dtype.itemsize * math.prod(self._shape)
        self._is_compressed = self._dtype.itemsize == 1 and self._size >= _LEAST_COMPRESSED
        self._contiguous, self._compact = _properties(self._dtype), _properties(self._dtype, h5d.COMPACT)

    def new(self, group: Group, rows: int) -> Dataset:
        """Create a dataset of `rows` rows for write()."""
        if self._is_compressed and rows:
            properties = _properties(self._dtype)
            properties.set_chunk((min(rows, max(1, _CHUNK // self._size)), *self._shape))
            properties.set_deflate(1)
        else:
            properties = self._compact if 0 < rows * self._size <= _MOST_COMPACT else self._contiguous
        return h5d.create(group, self._name, self._type, h5s.create_simple((rows, *self._shape)), properties)

    def write(self, dataset: Dataset, begin: int, rows: Any) -> None:
        """Write rows into a dataset of new(). begin: index of the first."""
        array = np.ascontiguousarray(rows, self._dtype)
        if not len(array):
            return
        if len(array) == dataset.shape[0]:
            dataset.write(h5s.ALL, h5s.ALL, array, self._memory)
            return
        space = dataset.get_space()
        space.select_hyperslab((begin, *(0 for _ in self._shape)), array.shape)
        dataset.write(h5s.create_simple(array.shape), space, array, self._memory)


class Datasets:
    """The datasets of the columns of a map, in one group after the other."""

    def __init__(self, columns: Sequence[Column], groups: Iterable[str] = ()):
        """groups: further ones to create, without datasets."""
        self._columns = columns
        self._arrays = [Arrays("/".join(column.name), column.form) for column in columns]
        outer = {"/".join(column.name[:end]) for column in columns for end in range(1, len(column.name))}
        self._groups = sorted(outer.union(groups))  # outer ones first

    def create(self, group: Group, steps: int) -> None:
        """Create the datasets of this number of steps in a group."""
        for name in self._groups:
            new_group(group, name)
        self._datasets = [
            arrays.new(group, steps + column.has_reset) for column, arrays in zip(self._columns, self._arrays)
        ]

    def write(self, block: Window | StepRuns, begin: int) -> None:
        """Write the rows of a block. begin: index of its first step in the group."""
        for column, arrays, dataset in zip(self._columns, self._arrays, self._datasets):
            arrays.write(dataset, begin + column.offset(block), column.rows(block))


class BlobArray:
    """A growing array of byte strings. Call write() at the end."""

    def __init__(self, file: h5py.File, name: str):
        dtype = h5py.vlen_dtype(np.uint8)
        self._dataset = file.create_dataset(name, (0,), dtype, maxshape=(None,), chunks=(1024,))
        self._pending: list[Array] = []

    def add(self, items: Iterable[bytes]) -> None:
        """Append byte strings."""
        self._pending += (np.frombuffer(data, np.uint8) for data in items)
        if len(self._pending) >= 1024:
            self.write()

    def write(self) -> None:
        count = len(self._dataset)
        self._dataset.resize((count + len(self._pending),))
        for i, data in enumerate(self._pending):
            self._dataset[count + i] = data
        self._pending.clear()


def _properties(dtype: Any, layout: int = h5d.CONTIGUOUS) -> Any:
    """Return the creation properties of a dataset."""
    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_layout(layout)
    if dtype is not TEXT and layout != h5d.COMPACT:  # every element will be written
        properties.set_fill_time(h5d.FILL_TIME_NEVER)
    return properties


_SCALAR = h5s.create(h5s.SCALAR)
_TEXT = h5t.py_create(TEXT, logical=True)


def attribute(group: Group, name: str, value: int | str | Array) -> None:
    """Create an attribute. value: integers have up to 64 bits."""
    if isinstance(value, str):
        array, kind = np.array(value, TEXT), _TEXT
    elif isinstance(value, int) and value < 1 << 63:
        array, kind = np.array(value, np.int64), h5t.NATIVE_INT64
    else:
        array = np.array(value, np.uint64) if isinstance(value, int) else value
        kind = h5t.py_create(array.dtype, logical=True)
    h5a.create(group, name.encode(), kind, h5s.create_simple(array.shape) if array.shape else _SCALAR).write(array)


def text(group: Group, name: str, value: str) -> None:
    """Create a dataset of one text."""
    dataset = h5d.create(group, name.encode(), _TEXT, _SCALAR)
    dataset.write(h5s.ALL, h5s.ALL, np.array(value, TEXT), h5t.py_create(TEXT))
