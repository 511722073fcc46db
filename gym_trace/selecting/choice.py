"""Select rows of a table: filter, sample, sort, limit."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from gym_trace.errors import InvalidOption
from gym_trace.selecting.columns import Array, NoSuchKey, Table
from gym_trace.selecting.conditions import rows_where, sorted_rows
from gym_trace.selecting.language import names, parse_condition


def chosen_rows(
    table: Table,
    where: str | None = None,
    *,
    sort: str | None = None,
    limit: int | None = None,
    sample: int | None = None,
    seed: int | None = None,
    best: int | None = None,
    worst: int | None = None,
    complete: Callable[[], Array] | None = None,
) -> Array:
    """Return the selected rows of a table, (n,) int64. Applies where, then sample, then sort, then limit.

    Args:
        sample: number of rows to sample without replacement; they keep their order in the table.
        seed: seed of the sample.
        best, worst: the number of rows with the highest or lowest returns, in this order; replaces sort and limit.
        complete: returns a mask of rows whose return is that of a whole episode. best and worst choose among these, and
            an order of returns puts the others last, unless where names the outcome.

    Raises InvalidOption.
    """
    for name, text, example in (("where", where, "return > 100"), ("sort", sort, "-return")):
        if text is not None and not isinstance(text, str):
            raise InvalidOption(f"{name}={text!r}: not text; pass text such as {example!r}")
    for name, given in (("limit", limit), ("sample", sample), ("best", best), ("worst", worst)):
        if given is not None and not (isinstance(given, (int, np.integer)) and given >= 0):
            raise InvalidOption(f"{name}={given!r}: invalid; pass a whole number, 0 or more")
    if seed is not None and sample is None:
        raise InvalidOption("seed: needs sample; pass sample=N")
    number = best if worst is None else worst
    if number is not None and sum(given is not None for given in (best, worst, sort, limit)) > 1:
        raise InvalidOption("best, worst: include an order and a limit; pass one of them, without sort and limit")
    rows = np.arange(len(table)) if where is None else np.flatnonzero(rows_where(where, table))
    if sample is not None and sample < len(rows):
        rows = rows[sorted(random.Random(seed).sample(range(len(rows)), sample))]
    if where is not None and names(parse_condition(where), "outcome"):
        complete = None
    if number is not None:
        rows = rows[_with_a_return(table)[rows]]
        if complete is not None:
            rows = rows[complete()[rows]]
        return sorted_rows("-return" if worst is None else "return", table, rows)[:number]
    if sort is not None:
        rows = sorted_rows(sort, table, rows, complete)
    return rows if limit is None else rows[:limit]


def _with_a_return(table: Table) -> Array:
    try:
        return rows_where("return is not None", table)
    except NoSuchKey as error:
        raise InvalidOption(
            "best and worst: the rewards are several numbers each, so that no return is the highest; sort by one of "
            "them, such as -return[0], with a limit"
        ) from error
