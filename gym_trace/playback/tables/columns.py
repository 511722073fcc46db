"""Columns of Arrow tables. Their types follow the recorded values, not the declared spaces.

A leaf is numbers, text, or JSON text (docs/reference/steps.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from gym_trace.data.json_values import NUMBERS, json_text, tagged
from gym_trace.data.layout import Branch, Layout, Path
from gym_trace.data.values import Array, dtype_from, is_utf8
from gym_trace.errors import CorruptTrace
from gym_trace.playback.episode_index import RecordedEpisodes, index_of
from gym_trace.playback.row_types import row_types
from gym_trace.playback.scan import EPISODE, Scan

TEXT, JSON, NUMBER = "text", "json", "numbers"
_MOST_ELEMENTS = 1 << 28  # elements of a row
_ELEMENT = "element"  # Parquet's name for the elements of a list


def list_of(kind: pa.DataType, size: int = -1) -> pa.DataType:
    """Return the type of lists of this size; -1: any size. Before pyarrow 26, a Parquet file with missing lists of a
    fixed size is unreadable."""
    return pa.list_(pa.field(_ELEMENT, kind, nullable=False), size)


class ArrowColumn(NamedTuple):
    """A leaf of a space, or another column of a trace, in a table.

    Attributes:
        path: path of the leaf; path of the whole space if some rows do not have its structure.
        kind: "numbers", "text" or "json".
        dtype, shape: dtype and shape of a row of numbers.
        optional: True if some rows have no value.
        is_python: True if some rows have no value, and the others are Python numbers.
    """

    path: Path
    kind: str
    dtype: np.dtype[Any] = np.dtype(object)
    shape: tuple[int, ...] = ()
    optional: bool = False
    is_python: bool = False

    @property
    def is_stored(self) -> bool:
        """Return True if tables have this column: arrays without elements are not stored."""
        return 0 not in self.shape

    @property
    def stored(self) -> np.dtype[Any]:
        """Return the stored dtype: Spark cannot read float16."""
        return np.dtype(np.float32) if self.dtype == np.float16 else self.dtype.newbyteorder("=")

    @property
    def type(self) -> pa.DataType:
        """Return the Arrow type."""
        if self.kind != NUMBER:
            return pa.string()
        of_one = pa.from_numpy_dtype(self.stored)
        if not self.shape:
            return of_one
        if self.optional:
            return list_of(of_one)
        return pa.fixed_shape_tensor(of_one, self.shape) if len(self.shape) > 1 else list_of(of_one, self.size)

    @property
    def size(self) -> int:
        """Number of elements in a row."""
        return math.prod(self.shape)

    @property
    def list_bytes(self) -> int:
        """Bytes of a row of lists of variable size, otherwise 0."""
        return self.size * self.stored.itemsize if self.shape and self.optional and self.kind == NUMBER else 0

    def field(self, name: str) -> pa.Field:
        return pa.field(name, self.type, nullable=self.optional or self.kind == JSON)

    @property
    def has_few_values(self) -> bool:
        """Return True if dictionary encoding may pay off."""
        return self.kind != NUMBER or self.dtype.kind != "f" or self.path == ("rewards",)

    # -- to the table -------------------------------------------------------------------------------------------------

    def encoded(self, rows: Array) -> pa.Array:
        """Encode rows, one value per row."""
        if self.kind == TEXT:
            return pa.array(rows.tolist(), pa.string())
        if self.kind == JSON:
            return pa.array([None if row is None else json_text(tagged(row)) for row in rows], pa.string())
        missing = None
        if rows.dtype != object and (rows.shape[1:] != self.shape or not np.can_cast(rows.dtype, self.dtype)):
            raise CorruptTrace(
                f"column {'/'.join(map(str, self.path))} has other rows than the index of its batch says"
            )
        if rows.dtype == object:
            missing = np.array([row is None for row in rows], np.bool_)
            given, rows = rows, np.zeros((len(rows), *self.shape), self.dtype)
            for i in np.flatnonzero(~missing).tolist():
                rows[i] = given[i]
        flat = np.ascontiguousarray(rows, self.stored).reshape(-1)
        if not self.shape:
            return pa.array(flat, mask=missing)
        kind = self.type
        if self.optional:
            there = np.ones(len(rows), np.bool_) if missing is None else ~missing
            ends = np.cumsum(np.append(0, there * self.size), dtype=np.int32)
            given = pa.array(flat.reshape(-1, self.size)[there].reshape(-1))
            return pa.ListArray.from_arrays(pa.array(ends), given, type=kind, mask=pa.array(~there))
        storage = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
        lists = pa.FixedSizeListArray.from_arrays(pa.array(flat), type=storage)
        return lists if storage is kind else pa.ExtensionArray.from_storage(kind, lists)

    # -- as text ------------------------------------------------------------------------------------------------------

    def to_json(self) -> list[Any]:
        """Return a JSON value, for the metadata of a file."""
        return [list(self.path), self.kind, self.dtype.str, list(self.shape), self.optional, self.is_python]

    @classmethod
    def from_json(cls, value: Any) -> ArrowColumn:
        """Read the result of to_json(). Raises LookupError, TypeError, ValueError, CorruptTrace."""
        path, kind, dtype, shape, optional, is_python = value
        if kind not in (TEXT, JSON, NUMBER) or not path or not all(type(part) in (str, int) for part in path):
            raise ValueError("invalid kind of column")
        if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) > _MOST_ELEMENTS:
            raise ValueError("invalid shape")
        of_one = dtype_from(dtype) if kind == NUMBER else np.dtype(object)
        if kind == NUMBER and of_one.str[1:] not in NUMBERS:
            raise ValueError("unsupported dtype")
        return cls(tuple(path), kind, of_one, tuple(shape), bool(optional), bool(is_python))


# -- spaces -----------------------------------------------------------------------------------------------------------


def parts_of(branch: Branch) -> Iterator[tuple[str, str | int, Layout]]:
    """Yield the name, the key and the layout of each part; names are unique, even if case is ignored."""
    taken: set[str] = set()
    for key, child in branch.parts():
        name = wanted = str(key) or "_"
        count = 1
        while name.lower() in taken:
            count += 1
            name = f"{wanted}_{count}"
        taken.add(name.lower())
        yield name, key, child


def table_column(
    name: str, layout: Layout, columns: Mapping[Path, ArrowColumn], root: Path, rows: Mapping[Path, Array] | None = None
) -> tuple[pa.Field, pa.Array | None] | None:
    """Return a space as a field, and its rows if they are given; None if a table cannot store it.

    A Dict or Tuple is a struct. Raises LookupError for a leaf without a column.
    """
    if root in columns:
        column = columns[root]
        array = None if rows is None or not column.is_stored else column.encoded(rows[root])
        return (column.field(name), array) if column.is_stored else None
    if not isinstance(layout, Branch):
        raise LookupError(f"{root} has no column")
    parts = [table_column(part, child, columns, (*root, key), rows) for part, key, child in parts_of(layout)]
    there = [part for part in parts if part is not None]
    if not there:
        return None
    fields = [field for field, _ in there]
    field = pa.field(name, pa.struct(fields), nullable=False)
    return field, None if rows is None else pa.StructArray.from_arrays([array for _, array in there], fields=fields)


# -- which there are --------------------------------------------------------------------------------------------------

_Kind = type | tuple[np.dtype[Any], tuple[int, ...]] | str
_ODD_TEXT = "text that is not UTF-8"
_NO_DIMENSION = "arrays without a dimension, which would be read as numbers"
_OF_PYTHON: dict[_Kind, np.dtype[Any]] = {
    float: np.dtype(np.float64),
    int: np.dtype(np.int64),
    bool: np.dtype(np.bool_),
}


def columns_of(trace: RecordedEpisodes) -> dict[Path, ArrowColumn]:
    """Return a column for each leaf, or for a whole space if values have another structure. Raises CorruptTrace."""
    columns: dict[Path, ArrowColumn] = {}
    unclear: list[Path] = []
    for path, form in row_types(trace).items():
        if path == ("infos",):
            columns[path] = ArrowColumn(path, JSON)
        elif form is None:
            unclear.append(path)
        else:
            is_number = form.dtype.str[1:] in NUMBERS
            columns[path] = ArrowColumn(path, NUMBER, form.dtype, form.shape) if is_number else ArrowColumn(path, JSON)
    if unclear:
        kinds = _kinds_in(trace, unclear)
        for path in unclear:
            columns[path] = _of_kinds(path, kinds[path])
        for root in {path[0] for path in unclear}:
            if (root,) in kinds and (root,) not in unclear:  # values without the structure of their space
                columns = {path: column for path, column in columns.items() if path[0] != root}
                columns[(root,)] = ArrowColumn((root,), JSON)
    return columns


def _kinds_in(trace: RecordedEpisodes, paths: list[Path]) -> dict[Path, set[_Kind]]:
    """Return the kinds of rows of some columns; type(None) if some are missing. Reads all of them."""
    found: dict[Path, set[_Kind]] = {path: set() for path in paths}
    for block in Scan(index_of(trace), paths, order=EPISODE):
        for path, rows in block.columns.items():
            if path in found or path == path[:1]:
                found.setdefault(path, set()).update(_kinds_of(rows))
        for path in paths:
            if path[0] == "annotations" and path not in block.columns and block.size:
                found[path].add(type(None))
    return found


def _kinds_of(rows: Array) -> Iterable[_Kind]:
    if rows.dtype != object:
        return [(rows.dtype, rows.shape[1:])] if len(rows) else []
    values = rows.tolist()
    kinds: set[_Kind] = set(map(type, values))
    if str in kinds and not is_utf8("".join(value for value in values if type(value) is str)):
        kinds.add(_ODD_TEXT)
    if int in kinds and any(type(value) is int and not -(1 << 63) <= value < 1 << 63 for value in values):
        kinds.add("integers of more than 64 bits")
    arrays = {kind for kind in kinds if isinstance(kind, type) and issubclass(kind, (np.ndarray, np.generic))}
    if arrays <= {np.ma.MaskedArray} and arrays:
        return kinds
    for value in values:
        if type(value) in arrays:
            is_number = isinstance(value, np.generic) or value.ndim > 0
            kinds.add((value.dtype, value.shape) if is_number else _NO_DIMENSION)
    scalars = {kind for kind in arrays if issubclass(kind, np.generic)}
    return kinds - scalars - {np.ndarray} | ({np.generic} if scalars else set())


def _of_kinds(path: Path, kinds: set[_Kind]) -> ArrowColumn:
    optional = type(None) in kinds
    kinds = kinds - {type(None)}
    if optional and path[0] != "annotations":
        return ArrowColumn(path, JSON)
    if kinds == {str}:
        return ArrowColumn(path, TEXT, optional=optional)
    of_python = {kind for kind in kinds if kind in _OF_PYTHON}
    arrays = [kind for kind in kinds if isinstance(kind, tuple)]
    if of_python and optional and len(of_python) == 1:  # columns with missing rows are not arrays
        dtype = _OF_PYTHON[of_python.pop()]
        if len(kinds) == 1 or (len(kinds) == 2 and arrays == [(dtype, ())]):
            return ArrowColumn(path, NUMBER, dtype, (), optional, is_python=True)
    elif len(kinds - {np.generic}) == 1 and arrays and arrays[0][0].str[1:] in NUMBERS:
        return ArrowColumn(path, NUMBER, *arrays[0], optional=optional)
    return ArrowColumn(path, JSON)
