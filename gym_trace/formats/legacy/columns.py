"""Rows of an old recording as columns of a trace: which spaces they seem to be of, and their values leaf by leaf.

The rows of an episode are an array, or a list of whatever JSON has, with arrays in it: numbers for discrete spaces,
arrays for images, lists and dicts of them for Tuple and Dict spaces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from gym_trace.errors import UnreadableRecording
from gym_trace.format import wire
from gym_trace.formats.foreign import widest
from gym_trace.formats.legacy.arrays import StoredArray
from gym_trace.model.layout import Layout, Leaf, Path, PlainSpace, taken_apart
from gym_trace.model.packing import pack
from gym_trace.model.values import Array
from gym_trace.reading.assembly import densified
from gym_trace.ring.segment import Segment

Content = StoredArray | list[Any]
Columns = dict[Path, Array | list[bytes]]
_MOST_MEMBERS = 64  # of what is taken for a Tuple or Dict space; each of its leaves becomes a column
_DEEPEST = 8
_VALUE_SIZE = 64  # bytes that a value counts, whatever it is


class NewWriter(NamedTuple):
    """A writer of the new trace.

    name: its id, if valid.
    schema: for its schema record (docs/FORMAT.md, section 4).
    segments: its episodes, read on demand.
    """

    name: str
    schema: dict[str, Any]
    segments: Iterator[Segment]


def row_size(content: Content) -> int:
    """Bytes that a row takes at most, about."""
    return content.row_size if isinstance(content, StoredArray) else max(map(_size, content), default=0)


def _size(value: Any) -> int:
    if isinstance(value, StoredArray):
        return value.row_size * len(value) if value.shape else value.dtype.itemsize
    if isinstance(value, (list, dict)):
        return _VALUE_SIZE + sum(map(_size, value.values() if isinstance(value, dict) else value))
    return _VALUE_SIZE + (len(value) if isinstance(value, str) else 0)


# -- spaces -----------------------------------------------------------------------------------------------------------


def space_of(content: Content) -> PlainSpace:
    """The widest space that rows like these can be of, as plain data (docs/FORMAT.md, section 5)."""
    if isinstance(content, StoredArray):
        return _box(content.dtype, content.shape[1:])
    return _space_of_values(content, 0)


def _space_of_values(values: list[Any], depth: int) -> PlainSpace:
    if not values:
        return _values_of("nothing")
    first: Any = values[0]
    if isinstance(first, StoredArray):
        alike = all(isinstance(v, StoredArray) and (v.dtype, v.shape) == (first.dtype, first.shape) for v in values)
        return _box(first.dtype, first.shape) if alike else _values_of("arrays of several kinds")
    if depth < _DEEPEST and all(isinstance(value, dict) and value.keys() == first.keys() for value in values):
        if 0 < len(first) <= _MOST_MEMBERS:
            members = [[key, _space_of_values([value[key] for value in values], depth + 1)] for key in first]
            return {"type": "Dict", "spaces": members}
    elif depth < _DEEPEST and all(isinstance(value, list) and len(value) == len(first) for value in values):
        if 0 < len(first) <= _MOST_MEMBERS:
            return {"type": "Tuple", "spaces": [_space_of_values(list(column), depth + 1) for column in zip(*values)]}
    elif (numbers := densified(values)) is not None:
        return _box(numbers.dtype, ())
    return _values_of("values of several kinds")


def _box(dtype: np.dtype[Any], shape: tuple[int, ...]) -> PlainSpace:
    return widest(dtype, shape) if dtype.kind in "biuf" else _values_of(f"arrays of {dtype.name}, shape {shape}")


def _values_of(what: str) -> PlainSpace:
    return {"type": "custom", "class": "", "repr": what}


# -- values -----------------------------------------------------------------------------------------------------------


def columns_of(layout: Layout, content: Content, begin: int, end: int) -> Columns:
    """Return the rows from begin to end, one column per leaf of the layout."""
    rows = content.rows(begin, end) if isinstance(content, StoredArray) else _resolved(content[begin:end])
    if isinstance(layout, Leaf):
        return {layout.path: _column(layout, rows)}
    leaves = list(layout.leaves())
    split = zip(*(taken_apart(layout, row) for row in rows))
    return {leaf.path: _column(leaf, list(values)) for leaf, values in zip(leaves, split)}


def rewards_of(content: Content, begin: int, end: int) -> Columns:
    """The rewards from begin to end."""
    path = ("rewards",)
    return columns_of(Leaf(path, np.dtype("<f8"), ()), content, begin, end)


def _resolved(value: Any) -> Any:
    """value with the arrays in it read."""
    if isinstance(value, StoredArray):
        return value.whole()
    if isinstance(value, list):
        return [_resolved(item) for item in value]
    if isinstance(value, dict):
        return {key: _resolved(item) for key, item in value.items()}
    return value


def _column(leaf: Leaf, rows: Array | list[Any]) -> Array | list[bytes]:
    """Return typed rows, with their own dtype and shape, if the leaf and the rows allow it; else one value per row."""
    array = rows if isinstance(rows, np.ndarray) else densified(rows)
    if leaf.dtype is not None and array is not None and array.dtype.kind in "biufc" and array.dtype.isnative:
        return np.ascontiguousarray(array)
    values = [pack(row) for row in rows]
    if sum(map(len, values)) > wire.MAX_VALUES:
        raise UnreadableRecording(f"{'/'.join(map(str, leaf.path))}: a row takes more than {wire.MAX_VALUES} bytes")
    return values
