"""Conditions evaluated over columns agree with a plain evaluation row by row."""

import operator
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_trace.data.selecting.columns import Array, ConditionColumn, factorized, numbers, words
from gym_trace.data.selecting.conditions import chosen_rows

INF = float("inf")
VALUES: dict[str, list[Any]] = {
    "count": [0, 1, 2, 3, -4, 5],
    "score": [1.5, None, -2.0, INF, 0.0, 3.25],
    "name": ["x", "y", "xy", "x", "", "z"],
    "mixed": [1, "x", True, None, 2.5, False],
}
FLOATS = np.array([np.nan if value is None else value for value in VALUES["score"]])
COLUMNS = {
    "count": numbers(np.array(VALUES["count"])),
    "score": numbers(FLOATS),
    "name": words(np.arange(6), VALUES["name"], "text"),
    "mixed": factorized(VALUES["mixed"]),
}
ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "%": operator.mod}
ORDER = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}

Meaning = tuple[str, list[Any]]  # condition text, and its value in each row; None: unknown


class Rows:
    """A table of six rows."""

    def __len__(self) -> int:
        return 6

    def column(self, path: tuple[Any, ...]) -> ConditionColumn:
        return COLUMNS[path[0]]


def constant(value: Any, text: str | None = None) -> Meaning:
    return repr(value) if text is None else text, [value] * 6


def number_or_none(value: Any) -> Any:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value else None


def calculated(sign: str, a: Meaning, b: Meaning) -> Meaning:
    def result(x: Any, y: Any) -> Any:
        if x is None or y is None or (sign in "/%" and y == 0):
            return None
        if sign == "%" and abs(x) == INF:
            return None
        return number_or_none(ARITHMETIC[sign](x, y))

    return f"({a[0]} {sign} {b[0]})", list(map(result, a[1], b[1]))


def equal(x: Any, y: Any) -> bool:
    alike = isinstance(x, str) == isinstance(y, str) and isinstance(x, bool) == isinstance(y, bool)
    return x is not None and y is not None and alike and bool(x == y)


def compared(sign: str, a: Meaning, b: Meaning) -> Meaning:
    def result(x: Any, y: Any) -> bool:
        if sign in ORDER:
            alike = isinstance(x, str) == isinstance(y, str) and not isinstance(x, bool) and not isinstance(y, bool)
            return x is not None and y is not None and alike and bool(ORDER[sign](x, y))
        return equal(x, y) == (sign == "==")

    return f"({a[0]} {sign} {b[0]})", list(map(result, a[1], b[1]))


def listed(sign: str, a: Meaning, among: list[Any]) -> Meaning:
    there = [any(equal(x, y) for y in among) or (x is None and None in among) for x in a[1]]
    return f"({a[0]} {sign} {among!r})", [(is_there == (sign == "in")) for is_there in there]


def connected(word: str, a: Meaning, b: Meaning) -> Meaning:
    both = operator.and_ if word == "and" else operator.or_
    return f"({a[0]} {word} {b[0]})", list(map(both, a[1], b[1]))


MIXED: Meaning = ("mixed", VALUES["mixed"])
MIXED_AS_NUMBER: Meaning = ("mixed", list(map(number_or_none, VALUES["mixed"])))
LITERALS = st.one_of(st.integers(-9, 9), st.sampled_from([0.5, 2.0, 1.5])).map(constant)
NUMBERS = st.recursive(
    st.one_of(LITERALS, st.sampled_from([(name, VALUES[name]) for name in ("count", "score")])),
    lambda part: st.one_of(
        st.builds(calculated, st.sampled_from([*ARITHMETIC]), part, st.one_of(part, st.just(MIXED_AS_NUMBER))),
        part.map(lambda a: (f"-{a[0]}", [None if x is None else -x for x in a[1]])),
        part.map(lambda a: (f"abs({a[0]})", [None if x is None else abs(x) for x in a[1]])),
    ),
    max_leaves=6,
)
TEXTS = st.one_of(st.just(("name", VALUES["name"])), st.sampled_from(["x", "y", ""]).map(constant))
WITHIN = st.sampled_from(["in", "not in"])
SIGNS = st.sampled_from([*ORDER, "==", "!="])
ANY = st.one_of(st.sampled_from([1, "x", 2.5]).map(constant), st.just(MIXED), st.just(("name", VALUES["name"])))
SIMPLE = st.one_of(
    st.builds(compared, SIGNS, NUMBERS, NUMBERS),
    st.builds(compared, SIGNS, TEXTS, TEXTS),
    st.builds(compared, SIGNS, st.just(MIXED), ANY),
    st.builds(compared, SIGNS, st.just(MIXED), NUMBERS),
    st.builds(listed, WITHIN, NUMBERS, st.lists(st.sampled_from([0, 1, 2.5, -2, None]))),
    st.builds(listed, WITHIN, st.just(MIXED), st.lists(st.sampled_from([1, "x", True, None]))),
    NUMBERS.map(lambda a: (f"({a[0]} is None)", [x is None for x in a[1]])),
    st.just(("mixed", [x is True for x in VALUES["mixed"]])),
)
CONDITIONS = st.recursive(
    SIMPLE,
    lambda part: st.one_of(
        st.builds(connected, st.sampled_from(["and", "or"]), part, part),
        part.map(lambda a: (f"(not {a[0]})", [not x for x in a[1]])),
    ),
    max_leaves=4,
)


def true_rows(where: str) -> Array:
    return chosen_rows(Rows(), where)


@settings(max_examples=5 * settings().max_examples)
@given(CONDITIONS)
def test_a_condition_agrees_with_row_by_row_evaluation(meaning: Meaning) -> None:
    where, expected = meaning
    assert true_rows(where).tolist() == [row for row, is_true in enumerate(expected) if is_true], where


@settings(max_examples=3 * settings().max_examples)
@given(NUMBERS.filter(lambda meaning: meaning[0][-1].isalpha() or "(" in meaning[0]), st.booleans())
def test_sorting_agrees_with_row_by_row_evaluation(meaning: Meaning, descends: bool) -> None:
    text, values = meaning
    known = [row for row in range(6) if values[row] is not None]
    ordered = sorted(known, key=lambda row: -values[row] if descends else values[row])
    expected = [*ordered, *(row for row in range(6) if row not in known)]
    assert chosen_rows(Rows(), sort=f"{'-' * descends}({text})").tolist() == expected
