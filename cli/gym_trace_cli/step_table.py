"""Steps as an aligned table: gym-trace cat."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from gym_trace.printable import integer
from gym_trace_cli import show

if TYPE_CHECKING:
    from gym_trace.formats.steps.windows import Choice, Window

_ORDER = ("actions", "rewards", "terminations", "truncations", "observations", "annotations", "infos")
_FLAGS = {"terminations": "terminated", "truncations": "truncated"}  # shown in one column
_MOST_NUMBERS = 8  # of an array shown one by one
_LONGEST = 60  # characters of other values


def print_steps(windows: Iterable[Window], choice: Choice) -> None:
    """Print these steps; a new table begins where the columns change, as between writers."""
    number = 0
    for number, (names, parts) in enumerate(groupby((_columns(window, choice) for window in windows), key=tuple), 1):
        if number > 1:
            click.echo()
        rows = (row for columns in parts for row in zip(*columns.values()))
        show.table([show.printable(name) for name in names], rows, fitted=True)
    if not number:
        show.table(["episode", "step"], [])


def _columns(window: Window, choice: Choice) -> dict[str, list[str]]:
    """Return the text of each column, with a row for the first observation if it is shown."""
    from gym_trace.formats.steps.windows import name_of

    has_before = window.opens and "observations" in choice.roots
    first, index = window.first_step, str(window.episode.index)
    columns = {
        "episode": [index] * (window.steps + has_before),
        "step": ["-"] * has_before + [str(first + i) for i in range(window.steps)],
    }
    for path in sorted(window.columns, key=lambda path: _ORDER.index(str(path[0]))):
        rows = window.columns[path]
        if path[0] == "observations":
            columns[name_of(path)] = list(map(_text, rows if has_before else rows[1:]))
            if window.has_placeholder and window.steps:
                columns[name_of(path)][-1] = "not known"
            continue
        texts = [""] * has_before
        if path[0] in _FLAGS:
            known = columns.get("end", [""] * (window.steps + has_before))[has_before:]
            word = _FLAGS[str(path[0])]
            texts += [" and ".join(filter(None, (before, word * flag))) for before, flag in zip(known, rows.tolist())]
            columns["end"] = texts
        else:
            columns[name_of(path)] = texts + list(map(_text, rows))
    return columns


def _text(value: Any) -> str:
    """Shorten a value: numbers to four digits, large arrays to shape, dtype and range."""
    if value is None:
        return ""
    if isinstance(value, str):
        return show.cut(value, _LONGEST)
    if isinstance(value, (bool, int, float)) or getattr(value, "shape", None) == ():
        return _number(value.item() if hasattr(value, "item") else value)
    kind = getattr(getattr(value, "dtype", None), "kind", None)
    if kind is None or kind not in "biuf":
        from gym_trace.statistics.describe import plain

        return show.cut(json.dumps(plain(value), ensure_ascii=False), _LONGEST)
    if value.size <= _MOST_NUMBERS:
        return _numbers(value.tolist())
    shape = "×".join(map(str, value.shape))
    return f"{shape} {value.dtype}, {_number(value.min().item())} to {_number(value.max().item())}"


def _numbers(values: Any) -> str:
    return f"[{', '.join(map(_numbers, values))}]" if isinstance(values, list) else _number(values)


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return integer(value)
    return show.number(value) if isinstance(value, float) else str(value)
