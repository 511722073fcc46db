"""Rows of a table by a condition, a sample, an order and a limit."""

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
    """The rows of a table that are meant, (n,) int64: first where, then sample, then sort, then limit.

    Args:
        sample: as many rows, drawn at random, each at most once; in their order in the table. seed: of the draw.
        best, worst: the rows with the highest, or lowest, returns, in this order, in place of sort and limit.
        complete: tells which rows have the return of a whole episode. best and worst are of these alone, and others
            come after them in an order of returns, unless where speaks of the outcome.

    Raises InvalidOption.
    """
    for name, text, such in (("where", where, "return > 100"), ("sort", sort, "-return")):
        if text is not None and not isinstance(text, str):
            raise InvalidOption(f"{name}={text!r}: pass text, such as {such!r}")
    for name, given in (("limit", limit), ("sample", sample), ("best", best), ("worst", worst)):
        if given is not None and not (isinstance(given, (int, np.integer)) and given >= 0):
            raise InvalidOption(f"{name}={given!r}: pass a whole number, 0 or more")
    if seed is not None and sample is None:
        raise InvalidOption("seed is that of the sample; pass sample, too")
    number = best if worst is None else worst
    if number is not None and sum(given is not None for given in (best, worst, sort, limit)) > 1:
        raise InvalidOption("best and worst are an order and a limit: pass one of them, without sort and limit")
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
