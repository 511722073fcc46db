"""Tables of column statistics, one row per column of numbers, with a sparkline on a terminal."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from typing import Any

import click

from gym_trace_cli import show
from gym_trace_cli.show import number

Table = tuple[list[str], list[list[str]]]
MOST_ROWS = 20  # per leaf; --json has all of them
OVER_TIME = "over time"  # heading of sparklines
_COUNTED = ("count", "nan", "inf")
_NARROWEST, _WIDEST = 8, 40  # characters of a sparkline


def index(indices: Sequence[int]) -> str:
    return f"[{', '.join(map(str, indices))}]" if indices else ""


def rows_of(label: str, leaf: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return a label and the statistics of each dimension of a leaf, or of all of them together."""
    if "all" in leaf:
        return [(f"{label} (all of {' x '.join(map(str, leaf['shape']))})", leaf["all"])]
    return [(f"{label}{index(stats['index'])}", stats) for stats in leaf["dimensions"][:MOST_ROWS]]


def omissions(label: str, leaf: dict[str, Any], misfits: str = "rows do not fit the space") -> list[str]:
    """Return a line about the dimensions that the table omits, and one about rows that were not counted."""
    lines = []
    if (more := len(leaf.get("dimensions", ())) - MOST_ROWS) > 0:
        lines.append(f"{label}: {show.count(more)} more dimensions, see --json")
    if leaf["misfits"]:
        lines.append(f"{label}: {show.count(leaf['misfits'])} of {show.count(leaf['rows'])} {misfits}")
    return lines


def varied_row(label: str, leaf: dict[str, Any]) -> list[str]:
    """Return the row of a leaf that is not numbers: label, number of distinct values, examples."""
    exact = "" if leaf["distinct_is_exact"] else ">= "
    return [label, exact + show.count(leaf["distinct"]), ", ".join(leaf["examples"])]


def print_tables(tables: Iterable[Table], fitted: bool = False) -> None:
    for i, (headings, rows) in enumerate(tables):
        click.echo("\n" * (i > 0), nl=False)
        show.table(headings, rows, fitted=fitted)


def moments_table(measured: list[tuple[str, dict[str, Any]]], names: Sequence[str], heading: str = "") -> Table:
    """Return a table of the named statistics, of nan and inf if they occur, and on a terminal of sparklines."""
    missing = [name for name in ("nan", "inf") if name not in names and any(stats[name] for _, stats in measured)]
    names = [*names, *missing]
    headings = [heading, *names]
    rows = [
        [label, *(show.count(stats[name]) if name in _COUNTED else number(stats[name]) for name in names)]
        for label, stats in measured
    ]
    if not show.can_chart() or not any(stats["curve"] for _, stats in measured):
        return headings, rows
    widths = [max(map(len, column)) for column in zip(headings, *rows)]
    remaining = shutil.get_terminal_size().columns - sum(widths) - 2 * len(widths)
    width = min(max(remaining, _NARROWEST), _WIDEST)
    return [*headings, OVER_TIME], [
        [*row, show.curve(stats["curve"], width)] for row, (_, stats) in zip(rows, measured)
    ]
