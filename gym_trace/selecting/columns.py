"""Columns of a table as conditions see them: numbers and times as arrays, all else by its distinct values."""

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
_EXACT = 2**53  # up to here every integer is a float64, too
_MOST_COMBINED = 4096  # pairs of distinct values that are compared whether or not they occur
_TIME = re.compile(
    r"(\d{4})(?:-(\d\d)(?:-(\d\d)(?:[T ](\d\d):(\d\d)(?::(\d\d)(?:\.(\d{1,9}))?)?"
    r"\s*(?:(Z)|([+-])(\d\d):?(\d\d))?)?)?)?",
    re.ASCII,
)
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class Column(NamedTuple):
    """A value for each row, or one for all of them.

    kind: "number" (data: float64, int64, or Python integers as objects), "time" (ns since 1970, UTC), "condition"
        (bool), "text" or "any" (data: places in words; of "any" these are numbers, bools and texts), "none", or "list".
    known: where there is a value.
    words: the distinct values of "text" and "any"; what else there is, such as a dict, is in it as OTHER.
    """

    kind: str
    data: Array
    known: Array
    words: Sequence[Any] = ()


class NoSuchKey(InvalidOption):
    """A column may be called so, but here there is none of this name; elsewhere there may be."""


class Table(Protocol):
    """Rows that can be chosen of."""

    def __len__(self) -> int: ...

    def column(self, path: tuple[Any, ...]) -> Column:
        """The column that is called so. Raises InvalidOption, NoSuchKey: there is none."""


OTHER = object()  # a value that is equal to nothing
ALWAYS = np.array(True)
NEVER = np.array(False)


def numbers(data: Array, known: Array = ALWAYS) -> Column:
    """Of int64, float64 (where NaN is no number), or Python integers."""
    if data.dtype.kind == "f":
        known = known & ~np.isnan(data)
    return Column("number", data, known)


def times(data: Array) -> Column:
    """Of datetime64[ns]."""
    return Column("time", data.view(np.int64), ~np.isnat(data))


def words(codes: Array, values: Iterable[Any], kind: str = "any") -> Column:
    """Of values that are given by their places in a list of them; None where there is no value."""
    plain = [_plain(value) for value in values]
    known = np.array([value is not None for value in plain] or [False], bool)
    return Column(kind, codes, known[codes] if len(plain) else np.zeros(codes.shape, bool), plain or [None])


def factorized(values: Iterable[Any]) -> Column:
    """Of any values, one for each row."""
    places: dict[Any, int] = {}
    codes = []
    for value in map(_plain, values):
        codes.append(places.setdefault((type(value), value), len(places)))
    return words(np.array(codes, np.int64), [value for _, value in places])


def literal(value: Any) -> Column:
    """The same value for all rows."""
    if value is None:
        return Column("none", np.array(0), NEVER)
    if isinstance(value, bool):
        return Column("condition", np.array(value), ALWAYS)
    if isinstance(value, str):
        return Column("text", np.array(0), ALWAYS, [value])
    if isinstance(value, float):
        return numbers(np.array(value))
    fits = _INT64.min <= value <= _INT64.max
    return Column("number", np.array(value, np.int64 if fits else object), ALWAYS)


def time_of(text: str) -> int | None:
    """ISO 8601 as ns since 1970, UTC if it does not say otherwise; None if it is none."""
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


def as_numbers(column: Column) -> Column:
    """The numbers in a column of any values."""
    if column.kind == "number":
        return column
    given = [value if _is_number(value) else None for value in column.words]
    known = np.array([value is not None for value in given], bool)[column.data]
    there = [0 if value is None else value for value in given]
    ints = [value for value in there if isinstance(value, int)]
    dtype: Any = np.float64
    if len(ints) == len(there) and _INT64.min <= min(ints) <= max(ints) <= _INT64.max:
        dtype = np.int64
    elif max(map(abs, ints), default=0) > _EXACT:
        dtype = object
    return Column("number", np.array(there, dtype)[column.data], known)


def floats(column: Column) -> Array:
    """The numbers of a column as float64."""
    if column.data.dtype != object:
        return column.data.astype(np.float64)
    return np.array([_float(value) for value in column.data.ravel().tolist()]).reshape(column.data.shape)


def of_pairs(a: Column, b: Column, answer: Callable[[Any, Any], bool]) -> Array:
    """What answer says of the values of two columns, asked once for each pair of them."""
    wide, pairs = len(b.words), a.data * len(b.words) + b.data
    if len(a.words) * wide <= max(_MOST_COMBINED, pairs.size):
        of_all: Array = np.array([answer(x, y) for x in a.words for y in b.words], bool)[pairs]
        return of_all
    found, places = np.unique(pairs, return_inverse=True)
    answers = [answer(a.words[pair // wide], b.words[pair % wide]) for pair in found.tolist()]
    said: Array = np.array(answers, bool)[places].reshape(pairs.shape)
    return said


def same(x: Any, y: Any) -> bool:
    """Whether two values of columns are equal: numbers to numbers, text to text, bools to bools."""
    return _rank(x) == _rank(y) < 3 and x == y


def in_order(x: Any, y: Any, compare: Callable[[Any, Any], bool]) -> bool:
    """compare(x, y) among numbers and among texts; all else has no order."""
    return _rank(x) == _rank(y) < 2 and compare(x, y)


def ranks(column: Column) -> Array:
    """Numbers that sort as the values do: of any values numbers come first, then text, then bools."""
    if column.kind in ("text", "any"):
        ranked = {key: i for i, key in enumerate(sorted(set(map(_sortable, column.words))))}
        return np.array([ranked[_sortable(word)] for word in column.words], np.int64)[column.data]
    if column.data.dtype == object:
        places: Array = np.unique(column.data, return_inverse=True)[1].reshape(column.data.shape)
        return places
    return column.data


def _plain(value: Any) -> Any:
    """A value as words hold it."""
    if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0:
        value = value.item()
    if isinstance(value, float):
        return value if value == value else None
    return value if value is None or isinstance(value, (int, str)) else OTHER


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _rank(value: Any) -> int:
    return 0 if _is_number(value) else 1 if isinstance(value, str) else 2 if isinstance(value, bool) else 3


def _sortable(value: Any) -> tuple[int, Any]:
    rank = _rank(value)
    return (rank, value) if rank < 3 else (rank, 0)


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
