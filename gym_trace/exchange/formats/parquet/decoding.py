"""Rows of a trace from the columns of Arrow tables, the inverse of gym_trace.playback.tables.columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gym_trace.data.layout import Branch, Layout, Path
from gym_trace.data.values import Array
from gym_trace.exchange.formats.foreign import Values
from gym_trace.playback.tables.columns import NUMBER, TEXT, ArrowColumn, parts_of, table_column


def decoded(column: ArrowColumn, array: pa.Array) -> Any:
    """Return the rows of a column: an array, or a list of values of any type.

    Raises UnreadableRecording, ValueError.
    """
    if column.kind == NUMBER:
        rows = _numbers(column, array)
        if not array.null_count:
            return rows
        given = rows.tolist() if column.is_python else list(rows)
        return [value if there else None for value, there in zip(given, array.is_valid().to_pylist())]
    if not isinstance(array, pa.DictionaryArray):
        array = array.dictionary_encode()
    indices = array.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    used, places = np.unique(indices, return_inverse=True)
    texts = array.dictionary.take(pa.array(used[used >= 0])).to_pylist()
    values = [*[None] * bool(len(used) and used[0] < 0), *(texts if column.kind == TEXT else map(Values().of, texts))]
    return [values[place] for place in places.tolist()]


def _numbers(column: ArrowColumn, array: pa.Array) -> Array:
    rows: Array
    storage = array.storage if isinstance(array, pa.ExtensionArray) else array
    if pa.types.is_list(storage.type):
        if pc.any(pc.not_equal(pc.list_value_length(storage), column.size)).as_py():
            raise ValueError(f"a list has not {column.size} elements")
        rows = np.zeros((len(array), *column.shape), column.dtype)
        rows[storage.is_valid()] = storage.flatten().to_numpy(zero_copy_only=False).reshape(-1, *column.shape)
        return rows
    if column.shape:
        size = column.size
        storage = storage.values[storage.offset * size : (storage.offset + len(storage)) * size]
    elif storage.null_count:
        storage = storage.fill_null(False if storage.type == pa.bool_() else 0)
    flat = storage.to_numpy(zero_copy_only=False)
    rows = flat.astype(column.dtype, copy=True).reshape(len(array), *column.shape)
    return rows


def tree_rows(layout: Layout, columns: Mapping[Path, ArrowColumn], array: Any, count: int, root: Path) -> Any:
    """Return the rows that table_column() encoded. array: None if it returned None.

    Raises UnreadableRecording, LookupError.
    """
    if root in columns:
        column = columns[root]
        return np.empty((count, *column.shape), column.dtype) if array is None else decoded(column, array)
    if not isinstance(layout, Branch):
        raise LookupError(f"{root} has no column")
    rows = []
    for name, key, child in parts_of(layout):
        is_there = table_column(name, child, columns, (*root, key)) is not None
        rows.append(tree_rows(child, columns, array.field(name) if is_there else None, count, (*root, key)))
    return tuple(rows) if layout.keys is None else dict(zip(layout.keys, rows))
