"""Values of a leaf in a table: as numbers, as text, or as JSON text (docs/STEPS.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from gym_trace.formats.foreign import Values
from gym_trace.formats.steps.plain import NUMBERS, json_text, tagged
from gym_trace.model.layout import Branch, Layout, Path
from gym_trace.model.values import Array, dtype_from

TEXT, JSON, NUMBER = "text", "json", "numbers"
_MOST_ELEMENTS = 1 << 28  # of a row
_ELEMENT = "element"  # what Parquet calls those of a list


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
    def size(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape)

    @property
    def is_there(self) -> bool:
        """Return True if the tables have it: arrays without elements are not written."""
        return self.size > 0

    @property
    def stored(self) -> np.dtype[Any]:
        """The dtype that is written: Spark does not read those of 16 bits with a point."""
        return np.dtype(np.float32) if self.dtype == np.float16 else self.dtype.newbyteorder("=")

    @property
    def type(self) -> pa.DataType:
        """Its Arrow type."""
        if self.kind != NUMBER:
            return pa.string()
        of_one = pa.from_numpy_dtype(self.stored)
        if len(self.shape) > 1:
            return pa.fixed_shape_tensor(of_one, self.shape)
        return pa.list_(pa.field(_ELEMENT, of_one, nullable=False), self.size) if self.shape else of_one

    def field(self, name: str) -> pa.Field:
        return pa.field(name, self.type, nullable=self.optional or self.kind == JSON)

    @property
    def has_few_values(self) -> bool:
        """Return True if a dictionary of its values may be worthwhile."""
        return self.kind != NUMBER or self.dtype.kind != "f" or self.path == ("rewards",)

    # -- to the table -------------------------------------------------------------------------------------------------

    def encoded(self, rows: Array) -> pa.Array:
        """A row a value."""
        if self.kind == TEXT:
            return pa.array(rows.tolist(), pa.string())
        if self.kind == JSON:
            return pa.array([None if row is None else json_text(tagged(row)) for row in rows], pa.string())
        if rows.dtype == object:
            return self._encoded_one_by_one(rows)
        return self._encoded_numbers(rows, None)

    def _encoded_one_by_one(self, rows: Array) -> pa.Array:
        missing = np.array([row is None for row in rows], np.bool_)
        whole = np.zeros((len(rows), *self.shape), self.dtype)
        for place in np.flatnonzero(~missing).tolist():
            whole[place] = rows[place]
        return self._encoded_numbers(whole, pa.array(missing) if missing.any() else None)

    def _encoded_numbers(self, rows: Array, missing: pa.Array | None) -> pa.Array:
        flat = np.ascontiguousarray(rows, self.stored).reshape(-1)
        if not self.shape:
            return pa.array(flat, mask=None if missing is None else np.asarray(missing))
        kind = self.type
        storage = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
        lists = pa.FixedSizeListArray.from_arrays(pa.array(flat), type=storage, mask=missing)
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
        storage = array.storage if isinstance(array, pa.ExtensionArray) else array
        if self.shape:
            begin = storage.offset * self.size
            storage = storage.values[begin : begin + len(storage) * self.size]
        elif storage.null_count:
            storage = storage.fill_null(False if storage.type == pa.bool_() else 0)
        flat = storage.to_numpy(zero_copy_only=False)
        rows: Array = flat.astype(self.dtype, copy=True).reshape(len(array), *self.shape)
        return rows

    def empty(self, count: int) -> Array:
        """Rows without an element."""
        return np.empty((count, *self.shape), self.dtype)

    # -- as text ------------------------------------------------------------------------------------------------------

    def told(self) -> list[Any]:
        """As JSON, for the metadata of a file."""
        return [list(self.path), self.kind, self.dtype.str, list(self.shape), self.optional, self.is_python]

    @classmethod
    def read(cls, told: Any) -> Column:
        """Read the result of told(). Raises LookupError, TypeError, ValueError, CorruptTrace."""
        path, kind, dtype, shape, optional, is_python = told
        if kind not in (TEXT, JSON, NUMBER) or not path or not all(type(part) in (str, int) for part in path):
            raise ValueError("a column of no kind")
        if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) > _MOST_ELEMENTS:
            raise ValueError("invalid shape")
        of_one = dtype_from(dtype) if kind == NUMBER else np.dtype(object)
        if kind == NUMBER and of_one.str[1:] not in NUMBERS:
            raise ValueError("numbers of no dtype that tables have")
        return cls(tuple(path), kind, of_one, tuple(shape), bool(optional), bool(is_python))


# -- spaces -----------------------------------------------------------------------------------------------------------


def names_of(branch: Branch) -> list[str]:
    """Return names of the parts of a Dict or Tuple in a table, unique for readers that ignore case."""
    keys = range(len(branch.children)) if branch.keys is None else branch.keys
    names: list[str] = []
    for key in keys:
        name = wanted = str(key) or "_"
        count = 1
        while name.lower() in {taken.lower() for taken in names}:
            count += 1
            name = f"{wanted}_{count}"
        names.append(name)
    return names


def tree_field(name: str, layout: Layout, columns: Mapping[Path, Column], root: Path) -> pa.Field | None:
    """A space as a field: of a Dict or Tuple a struct; None where it has nothing that tables have."""
    if root in columns:
        return columns[root].field(name) if columns[root].is_there else None
    assert isinstance(layout, Branch)  # a leaf has a column
    fields = [
        tree_field(part, child, columns, (*root, key))
        for part, key, child in zip(names_of(layout), _keys(layout), layout.children)
    ]
    there = [field for field in fields if field is not None]
    return pa.field(name, pa.struct(there), nullable=False) if there else None


def tree_array(
    layout: Layout, columns: Mapping[Path, Column], rows: Mapping[Path, Array], root: Path
) -> pa.Array | None:
    """The rows of a space as tree_field() has it."""
    if root in columns:
        return columns[root].encoded(rows[root]) if columns[root].is_there else None
    assert isinstance(layout, Branch)
    arrays, fields = [], []
    for part, key, child in zip(names_of(layout), _keys(layout), layout.children):
        field, array = (
            tree_field(part, child, columns, (*root, key)),
            tree_array(child, columns, rows, (*root, key)),
        )
        if field is not None and array is not None:
            arrays.append(array)
            fields.append(field)
    return pa.StructArray.from_arrays(arrays, fields=fields) if arrays else None


def tree_rows(layout: Layout, columns: Mapping[Path, Column], array: Any, count: int, root: Path) -> Any:
    """The rows that tree_array() was given. array: None where it gave none. Raises UnreadableRecording, LookupError."""
    if root in columns:
        column = columns[root]
        return column.decoded(array) if array is not None else column.empty(count)
    assert isinstance(layout, Branch)
    parts = []
    for part, key, child in zip(names_of(layout), _keys(layout), layout.children):
        is_there = tree_field(part, child, columns, (*root, key)) is not None
        parts.append(tree_rows(child, columns, array.field(part) if is_there else None, count, (*root, key)))
    return tuple(parts) if layout.keys is None else dict(zip(layout.keys, parts))


def _keys(branch: Branch) -> Iterable[str | int]:
    return range(len(branch.children)) if branch.keys is None else branch.keys
