"""Columns of a table for conditions: numbers and times as arrays, other values as codes of distinct values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from gym_trace.errors import InvalidOption

Array = npt.NDArray[Any]
_INT64 = np.iinfo(np.int64)
_EXACT = 2**53  # float64 holds every integer up to here
_MOST_PAIRS = 4096  # with more pairs of distinct values, only those that occur are compared
_TIME = re.compile(
    r"(\d{4})(?:-(\d\d)(?:-(\d\d)(?:[T ](\d\d):(\d\d)(?::(\d\d)(?:\.(\d{1,9}))?)?"
    r"\s*(?:(Z)|([+-])(\d\d):?(\d\d))?)?)?)?",
    re.ASCII,
)
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class ConditionColumn(NamedTuple):
    """A column of a table: one value per row, or one value for all rows.

    Attributes:
        kind: "number" (data: float64, int64, or Python integers as objects), "time" (ns since 1970, UTC), "condition"
            (bool), "text" or "any" (data: indices into words), "none", or "list".
        known: True where a row has a value.
        words: the distinct values of "text" and "any". Values of "any" are numbers, bools, texts, or OTHER.
    """

    kind: str
    data: Array
    known: Array
    words: Sequence[Any] = ()


class NoSuchKey(InvalidOption):
    """The name is valid, but this table does not have the column; other tables may.

    Examples:
        >>> gym_trace.open_trace("traces/cartpole").select("metadata.author == 'Ada'")
        Traceback (most recent call last):
            ...
        gym_trace.data.selecting.columns.NoSuchKey: no 'author' in the metadata here; choose from none
          metadata.author == 'Ada'
          ^^^^^^^^^^^^^^^
    """


class Table(Protocol):
    """Interface of a table whose rows can be selected."""

    def __len__(self) -> int: ...

    def column(self, path: tuple[Any, ...]) -> ConditionColumn:
        """Return a column by its path. Raises InvalidOption, or NoSuchKey if this table does not have it."""


OTHER = object()  # stands for other values, such as dicts: it equals nothing
ALWAYS = np.array(True)
NEVER = np.array(False)


def numbers(data: Array, known: Array = ALWAYS) -> ConditionColumn:
    """Return a column of int64, float64 (NaN is unknown), or Python integers."""
    if data.dtype.kind == "f":
        known = known & ~np.isnan(data)
    return ConditionColumn("number", data, known)


def times(data: Array) -> ConditionColumn:
    """Return a column of datetime64[ns]."""
    return ConditionColumn("time", data.view(np.int64), ~np.isnat(data))


def words(codes: Array, values: Iterable[Any], kind: str = "any") -> ConditionColumn:
    """Return a column of coded values. codes: indices into `values`, where None is unknown."""
    plain = [_plain(value) for value in values]
    known = np.array([value is not None for value in plain] or [False], bool)
    return ConditionColumn(kind, codes, known[codes] if len(plain) else np.zeros(codes.shape, bool), plain or [None])


def factorized(values: Iterable[Any]) -> ConditionColumn:
    """Return a column of any values, one per row."""
    code_of: dict[Any, int] = {}  # the type is part of the key, because True == 1
    codes = [code_of.setdefault((type(value), value), len(code_of)) for value in map(_plain, values)]
    return words(np.array(codes, np.int64), [value for _, value in code_of])


def literal(value: Any) -> ConditionColumn:
    """Return a column with the same value in all rows."""
    if value is None:
        return ConditionColumn("none", np.array(0), NEVER)
    if isinstance(value, bool):
        return ConditionColumn("condition", np.array(value), ALWAYS)
    if isinstance(value, str):
        return ConditionColumn("text", np.array(0), ALWAYS, [value])
    if isinstance(value, float):
        return numbers(np.array(value))
    fits = _INT64.min <= value <= _INT64.max
    return ConditionColumn("number", np.array(value, np.int64 if fits else object), ALWAYS)


def time_of(text: str) -> int | None:
    """Parse ISO 8601 as ns since 1970, UTC by default; None if it is invalid."""
    found = _TIME.fullmatch(text.strip())
    if found is None:
        return None
    year, month, day, hour, minute, second = (int(part) if part else 0 for part in found.groups()[:6])
    try:
        moment = datetime(year, month or 1, day or 1, hour, minute, second, tzinfo=timezone.utc)
    except ValueError:
        return None
    shift = timedelta(hours=int(found[10] or 0), minutes=int(found[11] or 0)) * (-1 if found[9] == "-" else 1)
    whole = (moment - _EPOCH - shift) // timedelta(seconds=1)
    return whole * 10**9 + int((found[7] or "").ljust(9, "0"))


def as_numbers(column: ConditionColumn) -> ConditionColumn:
    """Return the numbers in a column; other values become unknown."""
    if column.kind == "number":
        return column
    known = np.array([_is_number(value) for value in column.words], bool)[column.data]
    filled = [value if _is_number(value) else 0 for value in column.words]
    ints = [value for value in filled if isinstance(value, int)]
    dtype: Any = np.float64
    if len(ints) == len(filled) and _INT64.min <= min(ints) <= max(ints) <= _INT64.max:
        dtype = np.int64
    elif max(map(abs, ints), default=0) > _EXACT:
        dtype = object
    return ConditionColumn("number", np.array(filled, dtype)[column.data], known)


def floats(column: ConditionColumn) -> Array:
    """Return the numbers of a column as float64."""
    if column.data.dtype != object:
        return column.data.astype(np.float64)
    return np.array([_float(value) for value in column.data.ravel().tolist()]).reshape(column.data.shape)


def for_pairs(a: ConditionColumn, b: ConditionColumn, predicate: Callable[[Any, Any], bool]) -> Array:
    """Return the predicate of each row's pair of values, with one call per distinct pair."""
    width, pairs = len(b.words), a.data * len(b.words) + b.data
    if len(a.words) * width <= max(_MOST_PAIRS, pairs.size):
        of_all: Array = np.array([predicate(x, y) for x in a.words for y in b.words], bool)[pairs]
        return of_all
    distinct, indices = np.unique(pairs, return_inverse=True)
    holds = [predicate(a.words[pair // width], b.words[pair % width]) for pair in distinct.tolist()]
    result: Array = np.array(holds, bool)[indices].reshape(pairs.shape)
    return result


def are_equal(x: Any, y: Any) -> bool:
    """Return True if two values are equal and of one type: both numbers, text or bools."""
    return _type_rank(x) == _type_rank(y) < 3 and x == y


def compare_ordered(x: Any, y: Any, compare: Callable[[Any, Any], bool]) -> bool:
    """Return compare(x, y) for two numbers or two texts; False for other types, which have no order."""
    return _type_rank(x) == _type_rank(y) < 2 and compare(x, y)


def sort_ranks(column: ConditionColumn) -> Array:
    """Return numbers in the sort order of the values: numbers first, then text, then bools."""
    if column.kind in ("text", "any"):
        ranks = {key: rank for rank, key in enumerate(sorted(set(map(_sortable, column.words))))}
        return np.array([ranks[_sortable(word)] for word in column.words], np.int64)[column.data]
    if column.data.dtype == object:
        inverse: Array = np.unique(column.data, return_inverse=True)[1].reshape(column.data.shape)
        return inverse
    return column.data


def _plain(value: Any) -> Any:
    """Normalize a value for ConditionColumn.words."""
    if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0:
        value = value.item()
    if isinstance(value, float):
        return value if value == value else None
    return value if value is None or isinstance(value, (int, str)) else OTHER


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _type_rank(value: Any) -> int:
    return 0 if _is_number(value) else 1 if isinstance(value, str) else 2 if isinstance(value, bool) else 3


def _sortable(value: Any) -> tuple[int, Any]:
    rank = _type_rank(value)
    return (rank, value) if rank < 3 else (rank, 0)


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
