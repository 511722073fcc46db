"""Select rows of a table: evaluate conditions over whole columns; sort, shuffle and limit."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np

from gym_trace.data.selecting.columns import (
    ALWAYS,
    NEVER,
    Array,
    ConditionColumn,
    Table,
    are_equal,
    as_numbers,
    compare_ordered,
    floats,
    for_pairs,
    literal,
    numbers,
    sort_ranks,
    time_of,
    words,
)
from gym_trace.data.selecting.language import (
    Node,
    error_at,
    names_column,
    parse_condition,
    parse_keys,
    random_order,
)
from gym_trace.errors import InvalidOption

_COMPARISONS = {
    "==": operator.eq, "is": operator.eq, "!=": operator.eq, "is not": operator.eq,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_NEGATED = {"!=", "is not", "not in"}
_ORDERED = ("<", "<=", ">", ">=")
_PREDICATES: dict[str, Callable[[Any, Any], bool]] = {  # for columns of words
    sign: partial(compare_ordered, compare=compare) if sign in _ORDERED else are_equal
    for sign, compare in _COMPARISONS.items()
}
_ARITHMETIC = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide, "%": np.remainder}
_KIND_NAMES = {"number": "a number", "time": "a time", "text": "text", "condition": "true or false", "list": "a list"}
_INT64 = np.iinfo(np.int64)


def chosen_rows(
    table: Table,
    where: str | None = None,
    *,
    sort: str | None = None,
    limit: int | None = None,
    complete: Callable[[], Array] | None = None,
) -> Array:
    """Return the selected rows of a table, (n,) int64. Applies where, then sort, then limit.

    Args:
        sort: keys; or "random" or "random:SEED", a shuffle.
        complete: returns a mask of the rows with the return of a complete episode. A sort by return puts the others
            last, unless where names the outcome.

    Raises InvalidOption.
    """
    for name, text, example in (("where", where, "return > 100"), ("sort", sort, "-return")):
        if text is not None and not isinstance(text, str):
            raise InvalidOption(f"{name}={text!r}: not text; pass text such as {example!r}")
    if limit is not None and not (isinstance(limit, (int, np.integer)) and limit >= 0):
        raise InvalidOption(f"limit={limit!r}: invalid; pass a whole number, 0 or more")
    rows = np.arange(len(table)) if where is None else np.flatnonzero(rows_where(where, table))
    if where is not None and names_column(parse_condition(where), "outcome"):
        complete = None
    if sort is not None and (shuffle := random_order(sort)) is not None:
        order = list(range(len(rows)))
        random.Random(shuffle.seed).shuffle(order)
        rows = rows[order]
    elif sort is not None:
        rows = sorted_rows(sort, table, rows, complete)
    return rows if limit is None else rows[:limit]


def rows_where(condition: str, table: Table) -> Array:
    """Return one bool per row: True where the condition holds. Raises InvalidOption, which marks the position."""
    tree = parse_condition(condition)
    holds = _Evaluation(condition, table).condition(tree)
    if holds.ndim == 2 and holds.shape[1] != 1:
        problem = f"{holds.shape[1]} values per row; write (…).any or (…).all"
        raise error_at(condition, tree.begin, tree.end, problem)
    return np.broadcast_to(holds[:, 0] if holds.ndim == 2 else holds, len(table))


def numbers_of(terms: str, table: Table) -> list[Array]:
    """Return the values of terms, separated by commas: float64 of (rows,) each, NaN where a value is unknown.

    Raises InvalidOption, which marks the position.
    """
    evaluation, found = _Evaluation(terms, table), []
    for node, descends in parse_keys(terms):
        column = evaluation.number(node)
        values = np.where(column.known, floats(column), np.nan)
        if values.ndim == 2 and values.shape[1] != 1:
            problem = f"{values.shape[1]} values per row; name one of them"
            raise error_at(terms, node.begin, node.end, problem)
        flat = np.broadcast_to(values[:, 0] if values.ndim == 2 else values, len(table))
        found.append(-flat if descends else flat)
    return found


def sorted_rows(keys: str, table: Table, rows: Array, complete: Callable[[], Array] | None = None) -> Array:
    """Return rows sorted by keys. The sort is stable; unknown values come last in both directions.

    A sort by return puts complete rows first. Raises InvalidOption, which marks the position.
    """
    evaluation, columns = _Evaluation(keys, table), []
    for node, descends in parse_keys(keys):
        column = evaluation.sortable(node)
        rank = np.broadcast_to(sort_ranks(column), len(table))[rows]
        known = np.broadcast_to(column.known, len(table))[rows]
        if descends:  # the complement, because the smallest integer has no negative
            rank = -rank if rank.dtype.kind == "f" else ~rank.astype(np.int64)
        columns.append(~known)
        if complete is not None and names_column(node, "return"):
            columns.append(~complete()[rows])
        columns.append(np.where(known, rank, 0))
    return rows[np.lexsort(columns[::-1])]


class _Evaluation:
    """Evaluates the tree of a condition, or of sort keys, over a table. source: its text, for error messages."""

    def __init__(self, source: str, table: Table):
        self._source, self._table = source, table
        self._columns: dict[tuple[Any, ...], ConditionColumn] = {}

    def _error(self, node: Node, problem: str) -> InvalidOption:
        return error_at(self._source, node.begin, node.end, problem)

    def _text(self, node: Node) -> str:
        return self._source[node.begin : node.end]

    # -- conditions ---------------------------------------------------------------------------------------------------

    def condition(self, node: Node) -> Array:
        """Return an array that is True where the condition holds."""
        if node.kind in ("and", "or"):
            combine = np.logical_and if node.kind == "and" else np.logical_or
            masks = [self.condition(part) for part in node.parts]
            self._demand_one_size(node, masks)
            return np.asarray(reduce(combine, masks))
        if node.kind == "not":
            return ~self.condition(node.parts[0])
        if node.kind == "comparison":
            pairs = zip(node.value, node.parts, node.parts[1:])
            masks = [self._compared(node, sign, left, right) for sign, left, right in pairs]
            self._demand_one_size(node, masks)
            return np.asarray(np.logical_and.reduce(np.broadcast_arrays(*masks))) if masks[1:] else masks[0]
        column = self._value(node)
        if column.kind == "condition":
            return column.data & column.known
        if column.kind == "any":
            return for_pairs(column, words(np.array(0), [True]), are_equal)
        text = self._text(node)
        raise self._error(node, f"{text} is {_kind_name(column)}, not a condition; compare it, such as {text} == …")

    def _demand_one_size(self, node: Node, arrays: Sequence[Array]) -> None:
        """Raise InvalidOption if arrays have different numbers of values per row."""
        sizes = {array.shape[1] for array in arrays if array.ndim == 2} - {1}
        if len(sizes) > 1:
            listed = " and ".join(map(str, sorted(sizes)))
            raise self._error(node, f"rows of {listed} values do not go together; use .any or .all, or an index")

    def _compared(self, node: Node, sign: str, left: Node, right: Node) -> Array:
        negated = sign in _NEGATED
        a, b = self._value(left), self._value(right)
        self._demand_one_size(node, [a.data, b.data])
        if sign in ("is", "is not") and "none" not in (a.kind, b.kind):
            raise self._error(right, f"'{sign}' supports only None; write {'!=' if negated else '=='}")
        if sign in ("in", "not in"):
            mask = self._within(a, left, b, right)
        elif "list" in (a.kind, b.kind):
            raise self._error(right if b.kind == "list" else left, "lists support only 'in'")
        elif "none" in (a.kind, b.kind):
            if sign in _ORDERED:
                raise self._error(right if b.kind == "none" else left, "None has no order; write 'is None'")
            mask = ~a.known & ~b.known
        else:
            mask = self._compared_values(sign, a, left, b, right)
        return ~mask if negated else mask

    def _compared_values(self, sign: str, a: ConditionColumn, left: Node, b: ConditionColumn, right: Node) -> Array:
        if "time" in (a.kind, b.kind):
            a, b = self._as_time(a, left), self._as_time(b, right)
        elif "condition" in (a.kind, b.kind) and sign in _ORDERED:
            raise self._error(left, "true and false have no order; write == or !=")
        elif "any" in (a.kind, b.kind) and "number" not in (a.kind, b.kind):
            return for_pairs(_as_words(a), _as_words(b), _PREDICATES[sign])
        elif "any" in (a.kind, b.kind):
            a, b = as_numbers(a), as_numbers(b)
        elif a.kind != b.kind:
            kinds = f"{self._text(left)} is {_kind_name(a)}, {self._text(right)} is {_kind_name(b)}"
            raise self._error(right, f"{kinds}; they cannot be compared")
        if a.kind == "text":
            return for_pairs(a, b, _PREDICATES[sign])
        with np.errstate(invalid="ignore"):
            return _compare_exactly(_COMPARISONS[sign], a.data, b.data) & a.known & b.known

    def _within(self, a: ConditionColumn, left: Node, b: ConditionColumn, right: Node) -> Array:
        if b.kind in ("text", "any"):
            if a.kind not in ("text", "any"):
                raise self._error(left, f"{self._text(left)} is {_kind_name(a)}; only text can be in text")
            return for_pairs(a, b, lambda x, y: isinstance(x, str) and isinstance(y, str) and x in y)
        if b.kind != "list":
            raise self._error(
                right, f"{self._text(right)} is {_kind_name(b)}; 'in' takes text or a list such as [1, 2]"
            )
        if a.kind in ("list", "none"):
            raise self._error(left, "expected a column before 'in'")
        mask = ~a.known if any(value is None for value in right.value) else NEVER
        listed = [(value, part) for value, part in zip(right.value, right.parts) if value is not None]
        if a.kind == "number":
            ints = [value for value, _ in listed if type(value) is int]
            if a.data.dtype == np.int64 and len(ints) == len(listed):
                fit = [value for value in ints if _INT64.min <= value <= _INT64.max]
                return mask | (np.isin(a.data, np.array(fit, np.int64)) & a.known)
        if a.kind in ("text", "any"):
            for value, part in listed:
                if a.kind == "text" and not isinstance(value, str):
                    raise self._error(part, f"{self._text(left)} is text, {self._text(part)} is not")
            # The type is part of the key, because True == 1 in a set.
            keys = {(isinstance(value, bool), isinstance(value, str), value) for value, _ in listed}
            is_listed = [(isinstance(word, bool), isinstance(word, str), word) in keys for word in a.words]
            return np.asarray(mask | np.array(is_listed, bool)[a.data])
        for value, part in listed:
            mask = mask | self._compared_values("==", a, left, literal(value), part)
        return mask

    def _as_time(self, column: ConditionColumn, node: Node) -> ConditionColumn:
        if column.kind == "time":
            return column
        moment = time_of(node.value) if node.kind == "literal" and isinstance(node.value, str) else None
        if moment is None:
            example = '"2026-11-01" or "2026-11-01 20:15"'
            raise self._error(node, f"not a time; write times as {example}, in UTC")
        return ConditionColumn("time", literal(moment).data, ALWAYS)

    # -- values -------------------------------------------------------------------------------------------------------

    def _value(self, node: Node) -> ConditionColumn:
        if node.kind == "literal":
            return literal(node.value)
        if node.kind == "list":
            return ConditionColumn("list", np.array(0), ALWAYS)
        if node.kind == "column":
            if node.value not in self._columns:
                try:
                    self._columns[node.value] = self._table.column(node.value)
                except InvalidOption as error:
                    raise type(error)(str(self._error(node, str(error)))) from None
            return self._columns[node.value]
        if node.kind in ("sum", "product"):
            first, *others = [self.number(part) for part in node.parts]
            self._demand_one_size(node, [first.data, *(other.data for other in others)])
            return reduce(lambda a, b: _calculated(b[0], a, b[1]), zip(node.value, others), first)
        if node.kind in ("isnan", "isinf"):
            data = self.number(node.parts[0]).data
            test = np.isnan if node.kind == "isnan" else np.isinf
            return ConditionColumn(
                "condition", test(data) if data.dtype.kind == "f" else np.zeros(data.shape, bool), ALWAYS
            )
        if node.kind in ("any", "all"):
            mask = self.condition(node.parts[0])
            reduced = np.any if node.kind == "any" else np.all
            return ConditionColumn("condition", reduced(mask, 1, keepdims=True) if mask.ndim == 2 else mask, ALWAYS)
        if node.kind in ("plus", "minus", "abs"):
            column = self.number(node.parts[0])
            negated = _calculated("-", literal(0), column)
            if node.kind != "abs":
                return negated if node.kind == "minus" else column
            data = column.data if column.data.dtype == negated.data.dtype else floats(column)
            return ConditionColumn("number", np.where(data < 0, negated.data, data), column.known)
        return ConditionColumn("condition", self.condition(node), ALWAYS)

    def number(self, node: Node) -> ConditionColumn:
        """Return a column of numbers."""
        column = self._value(node)
        if column.kind not in ("number", "any"):
            hint = "; use duration for seconds from start to end" if column.kind == "time" else ""
            raise self._error(node, f"{self._text(node)} is {_kind_name(column)}, not a number{hint}")
        return as_numbers(column)

    def sortable(self, node: Node) -> ConditionColumn:
        """Return the column to sort by."""
        column = self._value(node)
        if column.kind in ("none", "list") or node.kind in ("literal",):
            raise self._error(node, f"{self._text(node)} is the are_equal for all; sort by a column")
        return column


def _as_words(column: ConditionColumn) -> ConditionColumn:
    """Convert a condition to a column of kind "any"."""
    if column.kind != "condition":
        return column
    return ConditionColumn("any", column.data.astype(np.int64), column.known, [False, True])


def _kind_name(column: ConditionColumn) -> str:
    return _KIND_NAMES.get(column.kind, "None" if column.kind == "none" else "of mixed types")


def _compare_exactly(compare: Callable[[Any, Any], Any], a: Array, b: Array) -> Array:
    """Return compare(a, b), exact for integers of any size."""
    if a.dtype != object and b.dtype != object:
        return np.asarray(compare(a, b))
    if a.dtype == np.int64 and b.ndim == 0:  # b is outside of int64
        return np.full(a.shape, compare(0, 1 if b.item() > 0 else -1))
    if b.dtype == np.int64 and a.ndim == 0:
        return np.full(b.shape, compare(1 if a.item() > 0 else -1, 0))
    return np.asarray(compare(a.astype(object), b.astype(object))).astype(bool)


def _calculated(sign: str, a: ConditionColumn, b: ConditionColumn) -> ConditionColumn:
    """Apply an arithmetic operator. Integer results stay int64 if they fit; everything else is float64."""
    known = a.known & b.known
    with np.errstate(all="ignore"):
        if sign in ("/", "%"):
            known = known & np.asarray(b.data != 0)
        if sign != "/" and a.data.dtype == b.data.dtype == np.int64 and _fits(sign, a.data, b.data):
            return ConditionColumn("number", np.asarray(_ARITHMETIC[sign](a.data, b.data)), known)
        return numbers(np.asarray(_ARITHMETIC[sign](floats(a), floats(b))), known)


def _fits(sign: str, a: Array, b: Array) -> bool:
    """Return True if bounds of the arrays show that the result fits in 64 bits."""
    if sign == "%" or not a.size or not b.size:
        return True
    a_min, a_max, b_min, b_max = (int(bound) for bound in (a.min(), a.max(), b.min(), b.max()))
    if sign == "*":
        bounds = [a_min * b_min, a_min * b_max, a_max * b_min, a_max * b_max]
    else:
        bounds = [a_min + b_min, a_max + b_max] if sign == "+" else [a_min - b_max, a_max - b_min]
    return min(bounds) >= _INT64.min and max(bounds) <= _INT64.max
