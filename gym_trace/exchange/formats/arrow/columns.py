"""The columns of a trace in tables: what its values really are decides which, not what the spaces say.

A leaf is numbers, text, or JSON text (docs/reference/steps.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gym_trace.data.json_values import NUMBERS, json_text, tagged
from gym_trace.data.layout import Branch, Layout, Path
from gym_trace.data.values import Array, dtype_from, is_utf8
from gym_trace.data.vocabulary import COLUMNS
from gym_trace.exchange.formats.foreign import Values
from gym_trace.exchange.formats.source import Source
from gym_trace.exchange.formats.steps.windows import Choice, name_of, step_blocks

TEXT, JSON, NUMBER = "text", "json", "numbers"
_MOST_ELEMENTS = 1 << 28  # of a row
_ELEMENT = "element"  # what Parquet calls those of a list


def list_of(kind: pa.DataType, size: int = -1) -> pa.DataType:
    """Return the type of lists of this size; -1: any, because pyarrow before 26 reads no Parquet file where some rows
    have no list of a fixed size."""
    return pa.list_(pa.field(_ELEMENT, kind, nullable=False), size)


class Column(NamedTuple):
    """A leaf as it is in a table.

    Attributes:
        path: of the leaf; that of a whole space, where some rows have not its structure.
        kind: "numbers", "text" or "json".
        dtype, shape: of a row of numbers.
        optional: whether there are rows without a value.
        is_python: whether, among rows without a value, the others are numbers of Python.
    """

    path: Path
    kind: str
    dtype: np.dtype[Any] = np.dtype(object)
    shape: tuple[int, ...] = ()
    optional: bool = False
    is_python: bool = False

    @property
    def is_there(self) -> bool:
        """Return True if the tables have it: arrays without elements are not written."""
        return 0 not in self.shape

    @property
    def stored(self) -> np.dtype[Any]:
        """Return the stored dtype: Spark cannot read float16."""
        return np.dtype(np.float32) if self.dtype == np.float16 else self.dtype.newbyteorder("=")

    @property
    def type(self) -> pa.DataType:
        """Its Arrow type."""
        if self.kind != NUMBER:
            return pa.string()
        of_one = pa.from_numpy_dtype(self.stored)
        if not self.shape:
            return of_one
        if self.optional:
            return list_of(of_one)
        return pa.fixed_shape_tensor(of_one, self.shape) if len(self.shape) > 1 else list_of(of_one, self._size)

    @property
    def _size(self) -> int:
        return math.prod(self.shape)

    @property
    def list_bytes(self) -> int:
        """Bytes of a row whose type does not say how many it takes; 0 if it does."""
        return self._size * self.stored.itemsize if self.shape and self.optional and self.kind == NUMBER else 0

    def field(self, name: str) -> pa.Field:
        return pa.field(name, self.type, nullable=self.optional or self.kind == JSON)

    @property
    def has_few_values(self) -> bool:
        """Return True if a dictionary of its values may be worthwhile."""
        return self.kind != NUMBER or self.dtype.kind != "f" or self.path == ("rewards",)

    # -- to the table -------------------------------------------------------------------------------------------------

    def encoded(self, rows: Array) -> pa.Array:
        """Encode rows, one value per row."""
        if self.kind == TEXT:
            return pa.array(rows.tolist(), pa.string())
        if self.kind == JSON:
            return pa.array([None if row is None else json_text(tagged(row)) for row in rows], pa.string())
        missing = None
        if rows.dtype == object:
            missing = np.array([row is None for row in rows], np.bool_)
            given, rows = rows, np.zeros((len(rows), *self.shape), self.dtype)
            for place in np.flatnonzero(~missing).tolist():
                rows[place] = given[place]
        flat = np.ascontiguousarray(rows, self.stored).reshape(-1)
        if not self.shape:
            return pa.array(flat, mask=missing)
        kind = self.type
        if self.optional:
            there = np.ones(len(rows), np.bool_) if missing is None else ~missing
            ends = np.cumsum(np.append(0, there * self._size), dtype=np.int32)
            given = pa.array(flat.reshape(-1, self._size)[there].reshape(-1))
            return pa.ListArray.from_arrays(pa.array(ends), given, type=kind, mask=pa.array(~there))
        storage = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
        lists = pa.FixedSizeListArray.from_arrays(pa.array(flat), type=storage)
        return lists if storage is kind else pa.ExtensionArray.from_storage(kind, lists)

    # -- and back -----------------------------------------------------------------------------------------------------

    def decoded(self, array: pa.Array) -> Any:
        """The rows: an array, or a list of values of any kind. Raises UnreadableRecording."""
        if self.kind == NUMBER:
            rows = self._numbers(array)
            if not array.null_count:
                return rows
            given = rows.tolist() if self.is_python else list(rows)
            return [value if there else None for value, there in zip(given, array.is_valid().to_pylist())]
        if not isinstance(array, pa.DictionaryArray):
            array = array.dictionary_encode()
        indices = array.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        used, places = np.unique(indices, return_inverse=True)
        texts = array.dictionary.take(pa.array(used[used >= 0])).to_pylist()
        values = [*[None] * bool(len(used) and used[0] < 0), *(texts if self.kind == TEXT else map(Values().of, texts))]
        return [values[place] for place in places.tolist()]

    def _numbers(self, array: pa.Array) -> Array:
        rows: Array
        storage = array.storage if isinstance(array, pa.ExtensionArray) else array
        if pa.types.is_list(storage.type):
            if pc.any(pc.not_equal(pc.list_value_length(storage), self._size)).as_py():
                raise ValueError(f"a list has not {self._size} elements")
            rows = np.zeros((len(array), *self.shape), self.dtype)
            rows[storage.is_valid()] = storage.flatten().to_numpy(zero_copy_only=False).reshape(-1, *self.shape)
            return rows
        if self.shape:
            size = self._size
            storage = storage.values[storage.offset * size : (storage.offset + len(storage)) * size]
        elif storage.null_count:
            storage = storage.fill_null(False if storage.type == pa.bool_() else 0)
        flat = storage.to_numpy(zero_copy_only=False)
        rows = flat.astype(self.dtype, copy=True).reshape(len(array), *self.shape)
        return rows

    # -- as text ------------------------------------------------------------------------------------------------------

    def told(self) -> list[Any]:
        """Return the column as JSON, for the metadata of a file."""
        return [list(self.path), self.kind, self.dtype.str, list(self.shape), self.optional, self.is_python]

    @classmethod
    def read(cls, told: Any) -> Column:
        """Read the result of told(). Raises LookupError, TypeError, ValueError, CorruptTrace."""
        path, kind, dtype, shape, optional, is_python = told
        if kind not in (TEXT, JSON, NUMBER) or not path or not all(type(part) in (str, int) for part in path):
            raise ValueError("invalid kind of column")
        if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) > _MOST_ELEMENTS:
            raise ValueError("invalid shape")
        of_one = dtype_from(dtype) if kind == NUMBER else np.dtype(object)
        if kind == NUMBER and of_one.str[1:] not in NUMBERS:
            raise ValueError("unsupported dtype")
        return cls(tuple(path), kind, of_one, tuple(shape), bool(optional), bool(is_python))


# -- spaces -----------------------------------------------------------------------------------------------------------


def _parts_of(branch: Branch) -> Iterator[tuple[str, str | int, Layout]]:
    """Yield the name, the key and the layout of each part; the names are unique for readers that ignore case."""
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
    name: str, layout: Layout, columns: Mapping[Path, Column], root: Path, rows: Mapping[Path, Array] | None = None
) -> tuple[pa.Field, pa.Array | None] | None:
    """Return a space as a field, and its rows where they are given; None if it has nothing to store in a table.

    A Dict or Tuple is a struct. Raises LookupError for a leaf without a column.
    """
    if root in columns:
        column = columns[root]
        array = None if rows is None or not column.is_there else column.encoded(rows[root])
        return (column.field(name), array) if column.is_there else None
    if not isinstance(layout, Branch):
        raise LookupError(f"{root} has no column")
    parts = [table_column(part, child, columns, (*root, key), rows) for part, key, child in _parts_of(layout)]
    there = [part for part in parts if part is not None]
    if not there:
        return None
    fields = [field for field, _ in there]
    field = pa.field(name, pa.struct(fields), nullable=False)
    return field, None if rows is None else pa.StructArray.from_arrays([array for _, array in there], fields=fields)


def tree_rows(layout: Layout, columns: Mapping[Path, Column], array: Any, count: int, root: Path) -> Any:
    """Return the rows that table_column() encoded. array: None if it returned None.

    Raises UnreadableRecording, LookupError.
    """
    if root in columns:
        column = columns[root]
        return np.empty((count, *column.shape), column.dtype) if array is None else column.decoded(array)
    if not isinstance(layout, Branch):
        raise LookupError(f"{root} has no column")
    rows = []
    for name, key, child in _parts_of(layout):
        is_there = table_column(name, child, columns, (*root, key)) is not None
        rows.append(tree_rows(child, columns, array.field(name) if is_there else None, count, (*root, key)))
    return tuple(rows) if layout.keys is None else dict(zip(layout.keys, rows))


# -- which there are --------------------------------------------------------------------------------------------------

_Kind = type | tuple[np.dtype[Any], tuple[int, ...]] | str
_ODD_TEXT = "text that is not UTF-8"
_NO_DIMENSION = "arrays without a dimension, which would come back as numbers"
_OF_PYTHON: dict[_Kind, np.dtype[Any]] = {
    float: np.dtype(np.float64),
    int: np.dtype(np.int64),
    bool: np.dtype(np.bool_),
}


def columns_of(source: Source) -> dict[Path, Column]:
    """The column of each leaf; of a space with values of another structure one for all of it. Raises CorruptTrace."""
    columns: dict[Path, Column] = {}
    unclear: list[Path] = []
    for path, form in source.forms.items():
        if path == ("infos",):
            columns[path] = Column(path, JSON)
        elif form is None:
            unclear.append(path)
        else:
            is_number = form.dtype.str[1:] in NUMBERS
            columns[path] = Column(path, NUMBER, form.dtype, form.shape) if is_number else Column(path, JSON)
    if unclear:
        kinds = _kinds_in(source, unclear)
        for path in unclear:
            columns[path] = _of_kinds(path, kinds[path])
        for root in {path[0] for path in unclear}:
            if (root,) in kinds and (root,) not in unclear:  # values without the structure of their space
                columns = {path: column for path, column in columns.items() if path[0] != root}
                columns[(root,)] = Column((root,), JSON)
    return columns


def _kinds_in(source: Source, paths: list[Path]) -> dict[Path, set[_Kind]]:
    """Return the kinds of rows of some leaves; type(None) if some are missing. Reads all of them."""
    roots = tuple(root for root in COLUMNS if any(path[0] == root for path in paths))
    choice = Choice(roots, frozenset(map(name_of, paths)))
    found: dict[Path, set[_Kind]] = {path: set() for path in paths}
    for block in step_blocks(source.trace, choice):
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


def _of_kinds(path: Path, kinds: set[_Kind]) -> Column:
    optional = type(None) in kinds
    kinds = kinds - {type(None)}
    if optional and path[0] != "annotations":
        return Column(path, JSON)
    if kinds == {str}:
        return Column(path, TEXT, optional=optional)
    of_python = {kind for kind in kinds if kind in _OF_PYTHON}
    arrays = [kind for kind in kinds if isinstance(kind, tuple)]
    if of_python and optional and len(of_python) == 1:  # rows of which some are missing are not arrays
        dtype = _OF_PYTHON[of_python.pop()]
        if len(kinds) == 1 or (len(kinds) == 2 and arrays == [(dtype, ())]):
            return Column(path, NUMBER, dtype, (), optional, is_python=True)
    elif len(kinds - {np.generic}) == 1 and arrays and arrays[0][0].str[1:] in NUMBERS:
        return Column(path, NUMBER, *arrays[0], optional=optional)
    return Column(path, JSON)
