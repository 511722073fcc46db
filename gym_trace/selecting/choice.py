"""Select rows of a table: filter, sample, sort, limit."""

from __future__ import annotations

import random

import numpy as np

from gym_trace.errors import InvalidOption
from gym_trace.selecting.columns import Array, Table
from gym_trace.selecting.conditions import rows_where, sorted_rows


def chosen_rows(
    table: Table,
    where: str | None = None,
    *,
    sort: str | None = None,
    limit: int | None = None,
    sample: int | None = None,
    seed: int | None = None,
) -> Array:
    """Return the selected rows of a table, (n,) int64. Applies where, then sample, then sort, then limit.

    Args:
        sample: number of rows to sample without replacement; they keep their order in the table.
        seed: seed of the sample.

    Raises InvalidOption.
    """
    for name, text, example in (("where", where, "return > 100"), ("sort", sort, "-return")):
        if text is not None and not isinstance(text, str):
            raise InvalidOption(f"{name}={text!r}: not text; pass text such as {example!r}")
    for name, given in (("limit", limit), ("sample", sample)):
        if given is not None and not (isinstance(given, (int, np.integer)) and given >= 0):
            raise InvalidOption(f"{name}={given!r}: invalid; pass a whole number, 0 or more")
    if seed is not None and sample is None:
        raise InvalidOption("seed: needs sample; pass sample=N")
    rows = np.arange(len(table)) if where is None else np.flatnonzero(rows_where(where, table))
    if sample is not None and sample < len(rows):
        rows = rows[sorted(random.Random(seed).sample(range(len(rows)), sample))]
    if sort is not None:
        rows = sorted_rows(sort, table, rows)
    return rows if limit is None else rows[:limit]
