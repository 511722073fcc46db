"""Episodes from the index, one line each: gym-trace ls, and gym-trace replay without a terminal."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from gym_trace.printable import key_text
from gym_trace_cli import show

if TYPE_CHECKING:
    from gym_trace import Trace
    from gym_trace.model.values import Array

_BLOCK = 1000  # episodes formatted together
# Columns, and how to format them.
_SHOWN: dict[str, Callable[[Any], str]] = {
    "index": str,
    "episode_id": str,
    "writer": str,
    "split": show.printable,
    "lane": str,
    "first_step": show.count,
    "steps": show.count,
    "return": lambda value: show.returned(tuple(value) if isinstance(value, list) else value),
    "outcome": str,
    "seed": lambda seed: "-" if seed is None else key_text(seed),
    "start_time": lambda time: "-" if time is None else time[:19].replace("T", " "),
}
_HEADINGS = {"episode_id": "id", "first_step": "from step", "start_time": "started (UTC)"}
_STORED = ("index", "episode_id", "writer", "lane", "first_step", "steps", "return", "outcome", "seed", "duration")
_NO_SEED = -1  # in the table of episodes
_MOST_BITS = 8192  # of a seed printed as a number


def print_episodes(trace: Trace, chosen: Sequence[int] | Array) -> None:
    """Print a table of these episodes, without columns that are equal in the whole trace."""
    table = trace.episodes
    several = {
        "writer": len(trace.writers) > 1,
        "split": len({writer.split for writer in trace.readers}) > 1,
        "lane": table["lane"].any(),
        "first_step": table["first_step"].any(),
    }
    names = [name for name in _SHOWN if several.get(name, True)]
    rows = ([_SHOWN[name](row[name]) for name in names] for row in _rows(trace, chosen))
    show.table([_HEADINGS.get(name, name) for name in names], rows, fitted=True)


def print_as_json(trace: Trace, chosen: Sequence[int] | Array) -> None:
    """Print one JSON line per episode: null for unknown values, times in UTC, duration in seconds."""
    for row in _rows(trace, chosen):
        if row["seed"] is not None and row["seed"].bit_length() > _MOST_BITS:  # Python cannot print it as a number
            row["seed"] = key_text(row["seed"])
        click.echo(json.dumps(row))


def _rows(trace: Trace, chosen: Sequence[int] | Array) -> Iterator[dict[str, Any]]:
    """Yield index rows as plain data."""
    for begin in range(0, len(chosen), _BLOCK):
        places = chosen[begin : begin + _BLOCK]
        table = trace.episodes[places]
        columns = {name: table[name].tolist() for name in _STORED}
        for name in ("start_time", "end_time"):
            columns[name] = np.datetime_as_string(table[name], "us").tolist()
        columns["return"] = _returns(trace, places, columns["return"])
        for values in zip(*columns.values()):
            yield _plain(trace, dict(zip(columns, values)))


def _returns(trace: Trace, places: Sequence[int] | Array, known: list[float]) -> list[Any]:
    """Return returns for JSON: None if unknown or infinite, a list for several objectives."""
    if not any(map(math.isnan, known)):
        return [value if math.isfinite(value) else None for value in known]
    from gym_trace.reading.episode_columns import objective_returns

    view = trace[places]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about damage, reported elsewhere
        objectives = objective_returns(view.episodes, view.scan)
    several = [None] * len(known) if objectives is None else objectives.tolist()
    return [
        value if math.isfinite(value) else row if row is not None and all(map(math.isfinite, row)) else None
        for value, row in zip(known, several)
    ]


def _plain(trace: Trace, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row for JSON: None for unknown values."""
    writer = trace.readers[row["writer"]]
    row["writer"], row["split"] = writer.writer, writer.split
    if row["seed"] < 0:  # missing, or too large for the table
        row["seed"] = None if row["seed"] == _NO_SEED else trace[row["index"]].seed
    row["duration"] = None if row["end_time"] == "NaT" else row["duration"] / 1e9
    for name in ("start_time", "end_time"):
        row[name] = None if row[name] == "NaT" else row[name] + "Z"
    return row
