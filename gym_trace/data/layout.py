"""Spaces as plain data, and the layout of their values as columns. Does not import gymnasium, so reading stays light.

A layout is a tree whose leaves are columns. taken_apart() splits a value into one value per leaf; put_together() joins
one array per leaf.
"""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from gym_trace.data.values import ABSENT, Array, Misfit, dtype_from, objects
from gym_trace.errors import CorruptTrace, raise_if_of_signal

Path = tuple[str | int, ...]
PlainSpace = dict[str, Any]
_TYPED = ("Box", "Discrete", "MultiDiscrete", "MultiBinary")
_MAX_DEPTH = 32
_MAX_DIMENSIONS = 32
_MAX_ELEMENTS = 1 << 31  # elements of one value; no recorder stores as many
_NATIVE: Literal["little", "big"] = sys.byteorder
_FOREIGN: Literal["little", "big"] = "big" if sys.byteorder == "little" else "little"


class Leaf:
    """One column. dtype and shape describe one value; dtype is None for a column of MessagePack values."""

    def __init__(self, path: Path, dtype: np.dtype[Any] | None, shape: tuple[int, ...]):
        self.path = path
        self.dtype = dtype
        self.shape = shape
        self.row_size = 0 if dtype is None else dtype.itemsize * math.prod(shape)

    @property
    def label(self) -> str:
        """Name of the column in warnings."""
        return "/".join(map(str, self.path))

    def leaves(self) -> Iterator[Leaf]:
        yield self

    def fits(self, value: Any) -> bool:
        """Return True if value is an array or scalar with the dtype and shape of this column."""
        is_array = type(value) is np.ndarray or isinstance(value, np.generic)
        return is_array and value.dtype == self.dtype and value.shape == self.shape

    def split(self, value: Any) -> list[Any]:
        return [value]

    def join(self, columns: Iterator[Any]) -> Any:
        return next(columns)


def integers_fit(dtype: np.dtype[Any], low: int, high: int) -> bool:
    """Return True if dtype is an integer dtype that holds low to high."""
    return dtype.kind in "iu" and bool(np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max)


def integer_bytes(dtype: np.dtype[Any], value: int) -> bytes | None:
    """Return the bytes of an integer as dtype; None if it does not fit."""
    if dtype.kind not in "iu":
        return None
    try:
        return value.to_bytes(dtype.itemsize, _NATIVE if dtype.isnative else _FOREIGN, signed=dtype.kind == "i")
    except OverflowError:
        return None


class Branch:
    """A Dict or Tuple space."""

    def __init__(self, keys: list[str | int] | None, children: list[Layout]):
        self.keys = keys  # keys of a Dict; None for a Tuple
        self.children = children
        self._is_flat = all(isinstance(child, Leaf) for child in children)

    def parts(self) -> Iterator[tuple[str | int, Layout]]:
        """Yield the key of each part, its index in a Tuple, and its layout."""
        yield from zip(range(len(self.children)) if self.keys is None else self.keys, self.children)

    def leaves(self) -> Iterator[Leaf]:
        for child in self.children:
            yield from child.leaves()

    def split(self, value: Any) -> list[Any]:
        """Return the values of the leaves, in order. Raises LookupError if value has another structure."""
        if self.keys is None:
            if not isinstance(value, (tuple, list)) or len(value) != len(self.children):
                raise LookupError
            parts = list(value)
        else:
            if (type(value) is not dict and not isinstance(value, Mapping)) or len(value) != len(self.keys):
                raise LookupError
            parts = [value[key] for key in self.keys]
        if self._is_flat:
            return parts
        return [leaf for child, part in zip(self.children, parts) for leaf in child.split(part)]

    def join(self, columns: Iterator[Any]) -> Any:
        """Build this structure from an iterator of one item per leaf."""
        joined = [child.join(columns) for child in self.children]
        return tuple(joined) if self.keys is None else dict(zip(self.keys, joined))


Layout = Leaf | Branch


def layout_of(space: PlainSpace, root: Path) -> Layout:
    """Return the layout of a space given as plain data. Raises CorruptTrace if it is malformed."""
    try:
        return _layout(space, root, 0)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CorruptTrace(f"malformed description of a space: {error!r:.100}") from error


def _layout(space: PlainSpace, path: Path, depth: int) -> Layout:
    if depth > _MAX_DEPTH:
        raise CorruptTrace(f"a space is nested deeper than {_MAX_DEPTH} levels")
    kind = space["type"]
    if kind in _TYPED:
        return Leaf(path, dtype_from(space["dtype"]), _shape(space.get("shape", ())))
    if kind == "Dict":
        keys = [key for key, _ in space["spaces"]]
        if not all(type(key) in (str, int) for key in keys):
            raise TypeError("keys that are neither text nor integers")
        return Branch(keys, [_layout(child, (*path, key), depth + 1) for key, (_, child) in zip(keys, space["spaces"])])
    if kind == "Tuple":
        return Branch(None, [_layout(child, (*path, i), depth + 1) for i, child in enumerate(space["spaces"])])
    return Leaf(path, None, ())


def _shape(numbers: Any) -> tuple[int, ...]:
    shape = tuple(int(n) for n in numbers)
    if len(shape) > _MAX_DIMENSIONS or min(shape, default=0) < 0 or math.prod(shape) > _MAX_ELEMENTS:
        raise CorruptTrace("a space has an invalid shape")
    return shape


def taken_apart(layout: Layout, value: Any) -> list[Any]:
    """Split one value into its leaves. A value of another structure becomes a Misfit in the first leaf."""
    if not isinstance(value, Misfit):
        try:
            return layout.split(value)
        except Exception as error:  # user-defined mappings may raise anything
            raise_if_of_signal(error)
            value = Misfit(value)
    leaves = sum(1 for _ in layout.leaves())
    return [value, *[ABSENT] * (leaves - 1)][:leaves]


def put_together(layout: Layout, columns: list[Array]) -> Any:
    """Join one array per leaf into the array, dict or tuple of the space.

    If some rows did not have the structure of the space, return an array of objects, one exact value per row.
    """
    if not columns:
        return layout.join(iter(()))
    first = columns[0]
    if first.dtype == object and any(isinstance(value, Misfit) for value in first):
        rows = [layout.join(iter(row)) for row in zip(*columns)]
        return objects([head.value if isinstance(head, Misfit) else row for head, row in zip(first, rows)])
    return layout.join(iter(columns))


def to_array_map(array: Array) -> dict[str, Any]:
    """Return an array as JSON-compatible data, bit for bit. An array of identical elements is stored as one."""
    array = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"))
    raw, width = array.tobytes(), array.dtype.itemsize
    if array.size and raw == raw[:width] * array.size:
        return {"dtype": array.dtype.str, "shape": [], "data": base64.b64encode(raw[:width]).decode()}
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": base64.b64encode(raw).decode()}


def from_array_map(plain: Mapping[str, Any], shape: tuple[int, ...]) -> Array:
    """Return the array stored by to_array_map(), broadcast to shape. Raises CorruptTrace."""
    try:
        array = np.frombuffer(base64.b64decode(plain["data"]), dtype_from(plain["dtype"])).reshape(plain["shape"])
        return np.broadcast_to(array, shape).copy()
    except (LookupError, TypeError, ValueError, ArithmeticError, MemoryError) as error:
        raise CorruptTrace(f"malformed description of an array: {error!r:.100}") from error


def as_kept(value: Any, leaf: Leaf) -> Any:
    """Convert a plain number to the leaf's dtype if that represents it exactly; return other values unchanged.

    A float fits only float64, a bool only bool.
    """
    if leaf.dtype is None or leaf.shape != ():
        return value
    kind = type(value)
    if kind is int and leaf.dtype.kind in "iu":
        limits = np.iinfo(leaf.dtype)
        return leaf.dtype.type(value) if limits.min <= value <= limits.max else value
    is_same = (kind is float and leaf.dtype == np.float64) or (kind is bool and leaf.dtype == np.bool_)
    return leaf.dtype.type(value) if is_same else value


def leaves_in(space: PlainSpace, path: Path) -> Iterator[tuple[Path, PlainSpace]]:
    """Yield the spaces within Dicts and Tuples, with their paths, in the order of the leaves of a layout."""
    if space["type"] == "Dict":
        for key, child in space["spaces"]:
            yield from leaves_in(child, (*path, key))
    elif space["type"] == "Tuple":
        for i, child in enumerate(space["spaces"]):
            yield from leaves_in(child, (*path, i))
    else:
        yield path, space
