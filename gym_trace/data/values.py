"""Values returned by environments: their copies, dtypes and reprs, and their placeholders."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gym_trace.data.tensors import RawArray, is_masked
from gym_trace.errors import CorruptTrace, raise_if_of_signal

Array = npt.NDArray[Any]

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_DTYPE = re.compile(r"[<>|][biufc]\d{1,3}|[<>|][SU]\d{1,7}|[<>][mM]8(\[[0-9a-zA-Z]{1,12}\])?")


class Misfit(NamedTuple):
    """An observation or action that does not have the structure of its space."""

    value: Any


class Unstored(NamedTuple):
    """Placeholder of a value that could not be stored: its class and its repr."""

    class_name: str
    text: str


class EnumMember(NamedTuple):
    """Placeholder of an Enum member: its class, name and value. Combined flags may have no name."""

    class_name: str
    name: str | None
    value: Any


class _Absent:
    """The type of ABSENT, the placeholder of a row without a value."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


def is_plain_dtype(text: object) -> bool:
    """Return True if text names a dtype allowed in a trace: no objects, structures or nesting."""
    return isinstance(text, str) and _DTYPE.fullmatch(text) is not None


def dtype_from(text: object) -> np.dtype[Any]:
    """Return the dtype named in a file. Raises CorruptTrace."""
    if not is_plain_dtype(text):
        raise CorruptTrace(f"not a dtype: {text!r:.60}")
    try:
        return np.dtype(str(text))
    except TypeError as error:
        raise CorruptTrace(f"not a dtype: {text!r}") from error


class Packed(bytes):
    """A value packed as MessagePack; it shares no memory with the caller's value."""


def copied(value: Any) -> Any:
    """Return a deep copy of a value from a trace, or of arrays."""
    kind = type(value)
    if is_masked(value):
        return value.copy()
    if kind is RawArray:
        return RawArray(value.dtype, value.data.copy())
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return objects(list(map(copied, value.ravel()))).reshape(value.shape)
        return np.array(value, order="C", copy=True, subok=False)
    if kind in (list, tuple):
        return kind(map(copied, value))  # map() adds no Python frame: values may be nested 500 deep
    if isinstance(value, Mapping):
        return dict(zip(value, map(copied, value.values())))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*map(copied, value))
    return value


def unstored(value: Any) -> Unstored:
    """Return the placeholder of a value that cannot be stored."""
    return Unstored(class_name(value), shown(value))


def shown(value: Any) -> str:
    """Return the repr of a value, at most 1,000 characters; never raises."""
    try:
        return without_addresses(repr(value))[:1000]
    except Exception as error:  # user code may raise anything
        raise_if_of_signal(error)
        return f"repr raised {type(error).__name__}"


def without_addresses(text: str) -> str:
    """Remove memory addresses from a repr: they differ from run to run."""
    return _ADDRESS.sub("", text)


def class_name(value: Any) -> str:
    """Return the full name of a value's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def placeholder(dtype: np.dtype[Any] | None, shape: tuple[int, ...] = ()) -> Any:
    """Return one row that stands for an unknown one: NaN or 0, (1, *shape); for text (dtype None) [""]."""
    return [""] if dtype is None else np.full((1, *shape), np.nan if dtype.kind in "fc" else 0, dtype)


def objects(items: list[Any]) -> Array:
    """Return a one-dimensional array of dtype object that holds items unchanged."""
    array = np.empty(len(items), object)
    has_sequences = any(type(item) is not str and hasattr(item, "__len__") for item in items)
    array[:] = _one_by_one(items) if has_sequences else items
    return array


def _one_by_one(items: list[Any]) -> Array:
    array = np.empty(len(items), object)
    for i, item in enumerate(items):
        array[i] = item
    return array


def densified(items: list[Any]) -> Array | None:
    """Return items as one array if all have the same dtype and shape, else None."""
    kinds = set(map(type, items))
    if not kinds:
        return None
    if kinds <= {float, np.float64}:  # stored alike
        return np.array(items, np.float64)
    if all(kind is np.ndarray or issubclass(kind, np.generic) for kind in kinds):
        dtype, shape = items[0].dtype, items[0].shape
        if dtype.kind not in "biufc" or not all(item.dtype == dtype and item.shape == shape for item in items):
            return None
        array = np.empty((len(items), *shape), dtype)
        for i, item in enumerate(items):
            array[i] = item
        return array
    if kinds == {bool}:
        return np.array(items, bool)
    if kinds == {int} and all(-(1 << 63) <= item < 1 << 63 for item in items):
        return np.array(items, np.int64)
    return None


def row_of(batch: Any, index: int) -> Any:
    """Return one value of a batch of arrays, or of dicts and tuples of them; its arrays are copies."""
    if isinstance(batch, dict):
        return {key: row_of(value, index) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(row_of(value, index) for value in batch)
    row = batch[index]
    return row.copy() if isinstance(row, np.ndarray) else row


def distinct(numbers: Array) -> Array:
    """Return the distinct numbers, sorted. For many, np.unique() of NumPy 2.3 and newer takes 70 times as long."""
    ordered: Array = np.sort(numbers, axis=None)
    found: Array = ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]
    return found


def is_utf8(text: str) -> bool:
    """Return False for text with a lone surrogate, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
