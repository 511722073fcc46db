"""Values that Gymnasium environments hand out: their copies, dtypes and reprs, and placeholders for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gym_trace.errors import CorruptTrace, raise_if_of_signal
from gym_trace.model.tensors import RawArray, is_masked

Array = npt.NDArray[Any]

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_DTYPE = re.compile(r"[<>|][biufc]\d{1,3}|[<>|][SU]\d{1,7}|[<>][mM]8(\[[0-9a-zA-Z]{1,12}\])?")


class Misfit(NamedTuple):
    """An observation or action that does not have the structure of its space."""

    value: Any


class Unstored(NamedTuple):
    """Stands for a value that could not be stored: its class and its repr."""

    class_name: str
    text: str


class EnumMember(NamedTuple):
    """Stands for a member of an Enum: its class, its name (of combined flags there may be none), and its value."""

    class_name: str
    name: str | None
    value: Any


class _Absent:
    """The type of ABSENT, the placeholder of a row for which no value was given."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


def is_plain_dtype(text: object) -> bool:
    """Whether text names a dtype that is allowed in a trace; no objects, no structures, no nesting."""
    return isinstance(text, str) and _DTYPE.fullmatch(text) is not None


def dtype_from(text: object) -> np.dtype[Any]:
    """The dtype named in a file. Raises CorruptTrace."""
    if not is_plain_dtype(text):
        raise CorruptTrace(f"not a dtype: {text!r:.60}")
    try:
        return np.dtype(str(text))
    except TypeError as error:
        raise CorruptTrace(f"not a dtype: {text!r}") from error


class Packed(bytes):
    """A value that is MessagePack already, and so shares no memory with the caller's."""


def copied(value: Any) -> Any:
    """A deep copy of a value that came out of a trace, or of arrays."""
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
        return kind(map(copied, value))  # map() adds no Python frame: values may be nested some 500 deep
    if isinstance(value, Mapping):
        return dict(zip(value, map(copied, value.values())))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*map(copied, value))
    return value


def unstored(value: Any) -> Unstored:
    """The placeholder of a value that cannot be stored."""
    return Unstored(class_name(value), shown(value))


def shown(value: Any) -> str:
    """The repr of a value, of 1,000 characters at most; says so if it raises."""
    try:
        return without_addresses(repr(value))[:1000]
    except Exception as error:  # anything: other people's code runs here
        raise_if_of_signal(error)
        return f"repr raised {type(error).__name__}"


def without_addresses(text: str) -> str:
    """A repr without memory addresses, which differ from run to run."""
    return _ADDRESS.sub("", text)


def class_name(value: Any) -> str:
    """The full name of a value's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def objects(items: list[Any]) -> Array:
    """A one-dimensional array of dtype object that holds items as they are."""
    array = np.empty(len(items), object)
    array[:] = items if not any(hasattr(item, "__len__") for item in items) else _one_by_one(items)
    return array


def _one_by_one(items: list[Any]) -> Array:
    array = np.empty(len(items), object)
    for i, item in enumerate(items):
        array[i] = item
    return array


def row_of(batch: Any, index: int) -> Any:
    """One value of a batch of arrays, or dicts and tuples of them; its arrays are the caller's own."""
    if isinstance(batch, dict):
        return {key: row_of(value, index) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(row_of(value, index) for value in batch)
    row = batch[index]
    return row.copy() if isinstance(row, np.ndarray) else row
