"""The language of --where and --sort, on tables of any columns."""

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_trace.data.selecting.columns import Array, ConditionColumn, factorized, numbers, time_of, times, words
from gym_trace.data.selecting.conditions import chosen_rows
from gym_trace.errors import InvalidOption

NAN = float("nan")
LARGE = 2**100


STARTS = np.array(["2026-11-01", "2026-11-02T12:30", "NaT", "2026-01-01", "1969-12-31", "2027-01-01"], "M8[ns]")
COLUMNS = {
    ("index",): numbers(np.arange(6)),
    ("return",): numbers(np.array([10.0, -5.0, NAN, 200.0, np.inf, 10.0])),
    ("seed",): numbers(np.array([0, 1, -1, 2**63 - 1, LARGE, 5], object), np.array([1, 1, 0, 1, 1, 1], bool)),
    ("lane",): numbers(np.array([0, 1, 0, 1, 2, 2**62])),
    ("outcome",): words(np.array([0, 0, 1, 1, 2, 0]), ["lost", "cut", "running"], "text"),
    ("start",): times(STARTS),
    ("metadata", "any"): factorized([1, 2.5, "two", True, None, {"a": 1}]),
    ("split",): words(np.array([0, 1, 2, 0, 1, 2]), ["train", "eval", "train"], "text"),
    ("metadata", "a key", 0): factorized(["x", "y", "x", "z", None, "x"]),
}


class Rows:
    """A table of six rows."""

    def __len__(self) -> int:
        return 6

    def column(self, path: tuple[Any, ...]) -> ConditionColumn:
        if path not in COLUMNS:
            raise InvalidOption(f"no column {path[0]!r}")
        return COLUMNS[path]


def rows(where: str | None = None, **options: Any) -> list[int]:
    found: Array = chosen_rows(Rows(), where, **options)
    assert found.dtype == np.int64
    return found.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("return > 9", [0, 3, 4, 5]),
        ("return == 10 or return < 0", [0, 1, 5]),
        ("not return < 100", [2, 3, 4]),
        ("return != 10", [1, 2, 3, 4]),
        ("return is None", [2]),
        ("return is not None and return == return", [0, 1, 3, 4, 5]),
        ("-10 < return <= 10 != 3", [0, 1, 5]),
        ("return in [10, -5, None]", [0, 1, 2, 5]),
        ("return not in (10, -5)", [2, 3, 4]),
        ("return == 1e999", [4]),
        ("True", [0, 1, 2, 3, 4, 5]),
        ("false or lane == 4_611_686_018_427_387_904", [5]),
        ("lane * 4 > 0 and lane > 9", [5]),  # beyond 64 bits
        ("lane - 1 < 0", [0, 2]),
        ("abs(return) == 5", [1]),
        ("abs(-return * 2) / 4 == 5", [0, 5]),
        ("index % 2 == 1", [1, 3, 5]),
        ("-index % 4 == 3", [1, 5]),
        ("index % lane is None", [0, 2]),
        ("1 / index > 0.3", [1, 2, 3]),
        ("return / 0 == return / 0", []),
        (f"seed == {LARGE}", [4]),
        (f"seed > {2**63 - 1}", [4]),
        ("seed in [9223372036854775807, 5, None]", [2, 3, 5]),
        (f"lane < {LARGE} and not {LARGE} <= lane and lane > -{2**99}", [0, 1, 2, 3, 4, 5]),
        ("seed != 5", [0, 1, 2, 3, 4]),
        ("seed + 1 == 6", [5]),
        ('outcome == "lost"', [0, 1, 5]),
        ("outcome != 'lost' and outcome < 'd'", [2, 3]),
        ('outcome in ["lost", "running"]', [0, 1, 4, 5]),
        ('"un" in outcome', [4]),
        ('start >= "2026-11"', [0, 1, 5]),
        ('start == "2026-11-02 13:30+01:00" or start < "1970"', [1, 4]),
        ('start in ["2026-11-01T00:00:00.000Z"]', [0]),
        ('start < "9999-12-31" and start > "0001-01-01"', [0, 1, 3, 4, 5]),
        ("metadata.any < 3", [0, 1]),
        ("metadata.any == 'two'", [2]),
        ("metadata.any", [3]),
        ("metadata.any in [true, 'two']", [2, 3]),
        ("metadata.any in [1]", [0]),
        ("not metadata.any and metadata.any is not None", [0, 1, 2, 5]),
        ("metadata.any != 1", [1, 2, 3, 4, 5]),
        ("metadata.any * 2 == 5", [1]),
        ("metadata.any > lane", [0, 1]),
        ("metadata['a key'][0] == 'x'", [0, 2, 5]),
        ("(index > 1) == (index < 4)", [2, 3]),
    ],
)
def test_a_condition_selects_its_rows(where: str, expected: list[int]) -> None:
    assert rows(where) == expected


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("return", [1, 0, 5, 3, 4, 2]),
        ("-return", [4, 3, 0, 5, 1, 2]),
        ("outcome, -return", [3, 2, 0, 5, 1, 4]),
        ("split, -index", [4, 1, 5, 3, 2, 0]),
        ("-seed", [4, 3, 5, 1, 0, 2]),
        ("start", [4, 3, 0, 1, 5, 2]),
        ("-start", [5, 1, 0, 3, 4, 2]),
        ("metadata.any", [0, 1, 2, 3, 5, 4]),
        ("index % 3, -index", [3, 0, 4, 1, 5, 2]),
        ("(index > 3), -index", [3, 2, 1, 0, 5, 4]),
    ],
)
def test_rows_are_sorted_with_unknown_values_last(sort: str, expected: list[int]) -> None:
    assert rows(sort=sort) == expected


def test_a_shuffle_is_repeated_by_its_seed_and_limit_applies_last() -> None:
    shuffled = rows("index > 0", sort="random:4")
    assert sorted(shuffled) == [1, 2, 3, 4, 5]
    assert rows("index > 0", sort=" random : 4", limit=3) == shuffled[:3]
    assert len({tuple(rows(sort=f"random:{seed}")) for seed in range(9)}) > 1
    assert rows(limit=0) == []
    for wrong in ("random:", "random:x", "random:-1", "random, index"):
        with pytest.raises(InvalidOption):
            rows(sort=wrong)


@pytest.mark.parametrize(
    ("where", "place", "problem"),
    [
        ("retrun > 3", "retrun", "no column 'retrun'"),
        ("return >", "", "expected a column, number or text, not 'the end'"),
        ("return = 3", "=", "write =="),
        ("return > 3 && index", "&&", "'and'"),
        ("index ** 2 > 1", "**", r"\+ - \* / %"),
        ("steps.__class__ == 1", "steps.__class__", "no column"),
        ("abs(index", "", "missing '\\)'"),
        ("eval(index)", "eval", "unknown function"),
        ("index", "index", "not a condition"),
        ("outcome > 3", "3", "text, 3 is a number"),
        ("index + 'a' > 3", "'a'", "is text, not a number"),
        ("start > 5", "5", "not a time"),
        ("start - 5 > 5", "start", "is a time"),
        ("start > '2026-13-01'", "'2026-13-01'", "in UTC"),
        ("index < None", "None", "None has no order"),
        ("index is 3", "3", "only None"),
        ("index == [1]", "[1]", "only 'in'"),
        ("index in 3", "3", "a list"),
        ("index in ['a']", "'a'", "cannot be compared"),
        ("index in [index]", "index", "not allowed in lists"),
        ("outcome in ['lost', 3]", "3", "is not"),
        ("(1 < 2) < 3", "1 < 2", "no order"),
        ("index not 3", "3", "expected 'in'"),
        ("1index > 3", "1i", "followed by a name"),
        ("index > 'abc", "'", "closing quote"),
        ("index > 1 # hi", "#", "unexpected character"),
        ("index > 1 2", "2", "expected 'and', 'or' or a comparison, not '2'"),
        ("lambda: 3", ":", "unexpected character"),
        ("metadata[1.5] == 1", "1.5", "whole number"),
        ("index > " + "9" * 1001, "9" * 64, "digits"),
        ("(" * 51 + "1", "(", "more than 50"),
        ("not " * 51 + "true", "not", "more than 50"),
        ("and > 1", "and", "expected a column, number or text, not 'and'"),
    ],
)
def test_an_invalid_condition_raises_and_marks_its_position(where: str, place: str, problem: str) -> None:
    with pytest.raises(InvalidOption, match=problem) as caught:
        rows(where)
    _, shown, pointer = str(caught.value).split("\n")
    begin, end = pointer.index("^"), len(pointer)
    assert shown[begin:end] == place


def test_an_invalid_sort_key_raises_and_marks_its_position() -> None:
    for sort in ("", "nix", "None", "3", "return,", "return > 3", "[1]"):
        with pytest.raises(InvalidOption, match=r"\^"):
            rows(sort=sort)


def test_an_invalid_limit_raises() -> None:
    with pytest.raises(InvalidOption):
        rows(limit=-1)


def test_a_condition_beyond_the_length_limit_raises() -> None:
    with pytest.raises(InvalidOption, match="characters"):
        rows(" " * 100_001)
    assert rows("index + 0" + " + 0" * 10_000 + " == 3") == [3]
    assert rows(" or ".join(f"index == {i}" for i in range(5000))) == [0, 1, 2, 3, 4, 5]
    assert rows(f"index in {list(range(1, 9000))}") == [1, 2, 3, 4, 5]


def test_mixed_values_are_compared_within_their_type() -> None:
    values: list[Any] = [1, 1.0, True, "1", None, NAN, np.float32(1), np.array(1), np.arange(3)]
    values += [[1], {"a": 1}, b"1", 1j, 10**40, 0.5]

    class Mixed(Rows):
        def __len__(self) -> int:
            return len(values)

        def column(self, path: tuple[Any, ...]) -> ConditionColumn:
            return factorized(values)

    def chosen(where: str) -> list[int]:
        return chosen_rows(Mixed(), where).tolist()  # type: ignore[no-any-return]

    assert chosen("x == 1") == [0, 1, 6, 7]
    assert chosen("x") == chosen("x == True") == [2]
    assert chosen("x == '1'") == [3]
    assert chosen("x is None") == [4, 5]
    assert chosen(f"x == {10**40}") == chosen("x > 9e39") == chosen("x * 2 > 5") == [13]
    assert chosen("x < 1") == [14]
    assert chosen("x in [0.5, '1', True, None]") == [2, 3, 4, 5, 14]
    assert chosen("x == x") == [0, 1, 2, 3, 6, 7, 13, 14]
    order = chosen_rows(Mixed(), sort="x").tolist()
    assert order == [14, 0, 1, 6, 7, 13, 3, 2, 8, 9, 10, 11, 12, 4, 5]


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("1970", 0),
        ("1970-01-02", 86_400 * 10**9),
        ("1970-01-01T00:00:01.000000001", 10**9 + 1),
        ("1969-12-31 23:59Z", -60 * 10**9),
        ("1970-01-01 01:00+0100", 0),
        ("1970-02-30", None),
        ("yesterday", None),
        ("١٩٧٠", None),
    ],
)
def test_times_are_iso_8601_in_utc(text: str, moment: int | None) -> None:
    assert time_of(text) == moment


ATOMS = st.one_of(
    st.sampled_from(["index", "return", "seed", "lane", "outcome", "start", "metadata.any", "metadata['a key'][0]"]),
    st.sampled_from(
        ["1", "0", "2.5", "1e400", "'lost'", "'2026-11-01'", "True", "None", "[1, None]", "['lost']", "[]"]
    ),
    st.integers().map(str),
    st.floats().map(str),
    st.text(max_size=5),
    st.sampled_from(
        ["__import__('os')", "().__class__", "f'{index}'", "lambda: 1", "index.__class__", "open", "*", "**"]
    ),
)
SIGNS = ("==", "!=", "<", "<=", ">", ">=", "in", "not in", "is", "and", "or", "+", "-", "*", "/", "%", ",", ".", "**")


def grown(part: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(part, st.sampled_from(SIGNS), part).map(" ".join),
        part.map("({})".format),
        part.map("not {}".format),
        part.map("-{}".format),
        part.map("abs({})".format),
        st.tuples(st.sampled_from(["(", "not ", "-", "[", "abs("]), st.integers(1, 3000), part).map(
            lambda drawn: drawn[0] * drawn[1] + drawn[2]
        ),
    )


@settings(max_examples=5 * settings().max_examples)
@given(st.recursive(ATOMS, grown, max_leaves=12))
def test_any_expression_gives_rows_or_invalid_option(text: str) -> None:
    for options in ({"where": text}, {"sort": text}):
        with contextlib.suppress(InvalidOption):
            assert set(chosen_rows(Rows(), **options).tolist()) <= set(range(6))


@settings(max_examples=3 * settings().max_examples)
@given(st.text())
def test_any_characters_give_rows_or_invalid_option(text: str) -> None:
    with contextlib.suppress(InvalidOption):
        chosen_rows(Rows(), text)
