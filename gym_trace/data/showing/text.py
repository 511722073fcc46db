"""Format numbers, counts, times and tables as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def number(value: float) -> str:
    """Format a number with four digits: 0.01235, 12.35, 12,346."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def count(items: int, noun: str) -> str:
    """Format a count: 1 episode, 2,000 episodes."""
    return f"{items:,} {noun}" + ("" if items == 1 else "s")


def spread(values: Array) -> str:
    """Format mean, min and max of the finite values; "" without any."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return ""
    with np.errstate(over="ignore"):
        return f"{number(finite.mean())} on average, from {number(finite.min())} to {number(finite.max())}"


def tally(codes: Array, names: list[str]) -> str:
    """Format the count of each name, the most frequent first. codes: indices into names."""
    counts = np.bincount(codes, minlength=len(names))
    order = np.argsort(-counts, kind="stable").tolist()
    return ", ".join(f"{names[i]} {counts[i]:,}" for i in order if counts[i])


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format a table as lines, right-aligned."""
    widths = [max(map(len, column)) for column in zip(headings, *rows)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in (headings, *rows)]


def moment(time: Any) -> str:
    """Format a datetime64 to the second: 2026-11-01 20:15:00."""
    return "unknown" if np.isnat(time) else str(np.datetime_as_string(time, "s")).replace("T", " ")


def seed_of(row: Any) -> str:
    """Format the seed in a row of a table of episodes."""
    return {-1: "none", -2: "(see .seed)"}.get(int(row["seed"]), str(row["seed"]))


def period(begins: Array, ends: Array) -> str:
    """Format the range from the first begin to the last end; "" if no time is known."""
    begins, ends = begins[~np.isnat(begins)], ends[~np.isnat(ends)]
    if not len(begins):
        return ""
    first, last = moment(begins.min()), moment(max(ends.max(), begins.max()) if len(ends) else begins.max())
    same_day = first[:11] if first[:10] == last[:10] else ""
    return f"{first} UTC" if first == last else f"{first} to {last.removeprefix(same_day)} UTC"
