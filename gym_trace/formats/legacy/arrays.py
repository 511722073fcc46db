"""Arrays that gym_recording left in binary files, and what refers to them.

There were two eras. The later one wrote the bare elements, at a multiple of 8 bytes, and says "order" and "size"; the
earlier one wrote whole records of np.save. Neither is ever unpickled.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from gym_trace.errors import UnreadableRecording
from gym_trace.format import wire
from gym_trace.formats.legacy.old_files import OldDirectory, OldFile, malformed, plain_name
from gym_trace.model.values import Array, is_plain_dtype

_NPY = b"\x93NUMPY"
_NPY_HEADER = 1 << 12  # bytes that hold the header of any record of np.save that is an array of plain elements
_DTYPE = re.compile(r"[<>|=]?[A-Za-z]{1,12}\d{0,7}(\[[0-9A-Za-z]{1,12}\])?")
_MAX_DIMENSIONS = 32
_MAX_ROW = wire.MAX_COLUMN // 4


class StoredArray:
    """An array that is read when it is asked for, and in part if it is not asked for whole."""

    __slots__ = ("_directory", "_fortran", "_name", "_offset", "dtype", "shape")

    def __init__(
        self,
        directory: OldDirectory,
        name: str,
        offset: int,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        fortran: bool,
    ):
        self._directory, self._name, self._offset, self._fortran = directory, name, offset, fortran
        self.dtype, self.shape = dtype, shape

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def row_size(self) -> int:
        """Bytes of a row."""
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def size(self) -> int:
        """Bytes of all of it."""
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def end(self) -> int:
        """End of its bytes in the file."""
        return self._offset + self.size

    def whole(self) -> Array:
        """The array."""
        raw = self._directory.file(self._name).read(self._offset, self.size)
        return np.frombuffer(raw, self.dtype).reshape(self.shape, order="F" if self._fortran else "C")

    def rows(self, begin: int, end: int) -> Array:
        """array[begin:end]"""
        if self._fortran:
            return np.ascontiguousarray(self.whole()[begin:end])
        raw = self._directory.file(self._name).read(self._offset + begin * self.row_size, (end - begin) * self.row_size)
        return np.frombuffer(raw, self.dtype).reshape(end - begin, *self.shape[1:])


def stored_array(directory: OldDirectory, reference: dict[str, Any], said_in: Path) -> StoredArray:
    """The array that a JSON object with "__type": "ndarray" stands for. Reads no more of it than its header.

    Raises UnreadableRecording, also where the array is not all there.
    """
    name, offset = plain_name(reference.get("npyfile"), said_in), reference.get("npyoff")
    file = directory.file(name)
    if type(offset) is not int or not 0 <= offset <= file.size:
        raise malformed(said_in, f"an array begins at {offset!r:.40} in {name}, which has {file.size} bytes")
    is_bare = "size" in reference or "order" in reference
    record = None if is_bare else _npy_header(file, offset)
    if record is None:
        found = StoredArray(directory, name, offset, *_as_said(reference, said_in), fortran=False)
    else:
        begin, dtype, shape, fortran = record
        if any(key in reference for key in ("dtype", "shape")) and (dtype, shape) != _as_said(reference, said_in):
            raise malformed(said_in, f"the array at byte {offset} of {name} is not the one that is meant")
        found = StoredArray(directory, name, begin, dtype, shape, fortran)
    if reference.get("size", found.size) != found.size:
        raise malformed(said_in, f"an array of {found.size} bytes that says it has {reference['size']!r:.40}")
    if found.end > file.size:
        raise UnreadableRecording(
            f"{file.path}: has {file.size} bytes, and {said_in.name} names an array that goes up to byte {found.end}: "
            "the file was cut off; import from a good copy"
        )
    if found.shape and found.row_size > _MAX_ROW:
        raise UnreadableRecording(f"{said_in}: one row of an array takes more than {_MAX_ROW} bytes")
    return found


def _as_said(reference: dict[str, Any], said_in: Path) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """dtype and shape of an array as the JSON has them."""
    if reference.get("order", "C") != "C":
        raise malformed(said_in, f"an array of order {reference['order']!r:.40}")
    return _dtype(reference.get("dtype"), said_in), _shape(reference.get("shape"), said_in)


def _dtype(text: Any, said_in: Path) -> np.dtype[Any]:
    try:
        dtype = np.dtype(text) if isinstance(text, str) and _DTYPE.fullmatch(text) else None
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    return _checked(dtype, repr(text), said_in)


def _checked(dtype: np.dtype[Any] | None, text: str, said_in: Path) -> np.dtype[Any]:
    if dtype is not None and dtype.hasobject:
        raise UnreadableRecording(
            f"{said_in}: has an array of Python objects, which is pickled; unpickling runs whatever is in a file, so "
            "it is never done here. Where you trust the file, load it with NumPy yourself and save plain arrays"
        )
    if dtype is None or dtype.itemsize == 0 or not is_plain_dtype(dtype.str):
        raise malformed(said_in, f"an array of dtype {text:.60}")
    return dtype


def _shape(shape: Any, said_in: Path) -> tuple[int, ...]:
    plain = isinstance(shape, (list, tuple)) and len(shape) <= _MAX_DIMENSIONS
    if not plain or not all(type(n) is int and 0 <= n < 1 << 62 for n in shape):
        raise malformed(said_in, f"an array of shape {shape!r:.60}")
    return tuple(shape)


def _npy_header(file: OldFile, offset: int) -> tuple[int, np.dtype[Any], tuple[int, ...], bool] | None:
    """(where the elements begin, dtype, shape, whether in Fortran order) of a record of np.save; None if it is none."""
    head = io.BytesIO(file.read(offset, min(_NPY_HEADER, file.size - offset)))
    if head.read(len(_NPY)) != _NPY:
        return None
    head.seek(0)
    try:
        version = np.lib.format.read_magic(head)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        with warnings.catch_warnings():  # that Python 2 wrote it
            warnings.simplefilter("ignore")
            shape, fortran, dtype = read(head)
    except Exception as error:  # numpy says in many ways that it does not like what it is given
        what = " ".join(str(error).split())
        raise UnreadableRecording(f"{file.path}: no NumPy array at byte {offset} ({what:.100})") from error
    return (
        offset + head.tell(),
        _checked(dtype, str(dtype), file.path),
        _shape(shape, file.path),
        bool(fortran),
    )
