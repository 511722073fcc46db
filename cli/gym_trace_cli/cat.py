"""gym-trace cat"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, TextIO

import click

import gym_trace
from gym_trace.errors import CorruptTrace
from gym_trace.printable import integer
from gym_trace_cli import show
from gym_trace_cli.column_tables import moments_table, omissions, print_tables, rows_of, varied_row
from gym_trace_cli.completion import step_columns
from gym_trace_cli.exit_codes import DAMAGED, FINE
from gym_trace_cli.help import headed, option, section
from gym_trace_cli.options import trace_argument
from gym_trace_cli.progress import ProgressLine
from gym_trace_cli.selection import Selection, selection_options

_FORMATS = ["table", "jsonl", "csv", "npz"]
_ORDER = ("actions", "rewards", "terminations", "truncations", "observations", "annotations", "infos")
_FLAGS = {"terminations": "terminated", "truncations": "truncated"}  # shown in one column
_MOST_NUMBERS = 8  # larger arrays are shown as shape, dtype and range
_LONGEST = 60  # characters of other values


def _step_slice(value: str) -> slice:
    """Parse --steps: "5", "10:20", "-3:", as a slice."""
    try:
        if ":" not in value:
            step = int(value)
            return slice(step, step + 1 or None)
        return slice(*(int(part) if part.strip() else None for part in value.split(":", 1)))
    except ValueError:
        problem = f"{value!r} is not a choice of steps; write 5, 10:20, :100 or -3: (the last three)"
        raise click.BadParameter(problem) from None


@headed("cat")
@trace_argument
@selection_options
@section(
    "Steps",
    option("--steps A:B", "Steps of each episode: 5, 10:20 or -3:.", _step_slice, default=slice(None)),
    option("--steps-where CONDITION", "Only matching steps: 'reward < -5'.", default=None),
    option("--context N", "With --steps-where: N steps before and after, too.", click.IntRange(0), default=0),
    option("--columns NAMES", "Columns, e.g. actions,observations/image.", shell_complete=step_columns),
    option("--summary", "One line per column: min, mean, max, NaN and a sparkline."),
)
@section(
    "Output",
    option("--format FORMAT", "table, jsonl, csv or npz. Default: by FILE, else table.", _FORMATS, name="form"),
    option("--json", "Same as --format jsonl.", name="as_json"),
    option("-o, --output FILE", "File. Default: standard output.", click.Path(dir_okay=False)),
)
def command(
    directory: str,
    selection: Selection,
    steps: slice,
    steps_where: str | None,
    context: int,
    columns: str | None,
    summary: bool,
    form: str | None,
    as_json: bool,
    output: str | None,
) -> int:
    """Print steps: actions, rewards, outcomes and the observation each led to.
    The observation before the first step comes first.

    jsonl is lossless (docs/reference/steps.md), csv has one column per number, npz one array
    per column, a table shortens long values. Damaged parts are skipped, listed at
    the end, and exit with 5; npz is written whole or not at all.

    \b
    gym-trace cat traces/cartpole --episodes 0 --steps -3:
    gym-trace cat traces/cartpole --where 'return > 30' -o steps.csv
    gym-trace cat traces/cartpole --steps-where 'isnan(next_observation).any' --context 3
    """
    form = _form(form, as_json, output)
    if summary and form not in ("table", "jsonl"):
        raise click.UsageError(f"--summary: excludes --format {form}; pass --json or no format")
    if steps_where is None and context:
        raise click.UsageError("--context: needs --steps-where")
    if steps_where is not None and (form == "npz" or steps != slice(None)):
        raise click.UsageError(f"--steps-where: excludes {'--format npz' if form == 'npz' else '--steps'}")
    trace = gym_trace.open_trace(directory)
    damage = {str(found.error()): None for found in trace.damage}

    def on_damage(error: CorruptTrace) -> None:
        damage[str(error)] = None

    table = gym_trace.StepTable(
        selection.view_or_note(trace),
        None if columns is None else [name.strip() for name in columns.split(",")],
        steps=steps,
        where=steps_where,
        context=context,
        on_damage=on_damage,
    )
    if steps_where is not None and not len(table):
        click.echo("note: no step matches", err=True)
    with _opened(output) as out:
        if form == "npz":
            with ProgressLine(quiet=output is None) as line:

                def on_progress(column: str, done: int, total: int) -> None:
                    line.update(f"{show.printable(column)}: {show.count(done)} of {show.count(total, 'row')}")

                table.write_npz(out.buffer, on_progress)
        elif summary:
            _print_summary(table, form == "jsonl", out)
        elif form == "table":
            _print_table(table)
        else:
            out.writelines(table.csv_lines() if form == "csv" else table.json_lines())
    for problem in damage:
        click.echo(f"skipped: {show.printable(problem)}", err=True)
    return DAMAGED if damage else FINE


def _form(form: str | None, as_json: bool, output: str | None) -> str:
    """Return the format. Raises click.UsageError."""
    ending = None if output is None else os.path.splitext(output)[1].removeprefix(".")
    if as_json and form not in (None, "jsonl"):
        raise click.UsageError(f"--json is --format jsonl; it excludes --format {form}")
    form = "jsonl" if as_json else form or (ending if ending in _FORMATS else None)
    if form is None and output is not None:
        raise click.UsageError(f"{show.printable(output)}: unknown ending; pass --format {', '.join(_FORMATS[1:])}")
    if form == "table" and output is not None:
        raise click.UsageError("--format table: not for files; pass --format jsonl, csv or npz")
    if form == "npz" and output is None and sys.stdout.isatty():
        raise click.UsageError("--format npz: binary output; pass -o steps.npz")
    if ending in _FORMATS and ending != form:
        click.echo(f"note: {show.printable(output)}: written as {form}, because of the options", err=True)
    return form or "table"


@contextmanager
def _opened(output: str | None) -> Iterator[Any]:
    """Open the standard output, or a file that is renamed into place when complete."""
    if output is None:
        yield show.stdout()
        return
    from gym_trace.storage import replaced_file

    with replaced_file(output) as staged, open(staged, "w", encoding="utf-8", newline="") as file:
        yield file


def _print_table(table: gym_trace.StepTable) -> None:
    """Print the steps; where the columns change, as between writers, a new table begins."""
    number = 0
    for number, (names, parts) in enumerate(
        groupby((_columns(window, table.roots) for window in table.windows()), key=tuple), 1
    ):
        if number > 1:
            click.echo()
        rows = (row for columns in parts for row in zip(*columns.values()))
        show.table([show.printable(name) for name in names], rows, fitted=True, keys=2)
    if not number:
        show.table(["episode", "step"], [])


def _print_summary(table: gym_trace.StepTable, as_json: bool, out: TextIO) -> None:
    """Print one line per column of numbers, and one per column of other values."""
    with ProgressLine() as line:
        leaves = table.statistics(lambda done: line.update(show.count(done, "step")))
    measured, varied, omitted = [], [], []
    for leaf in sorted(leaves, key=lambda leaf: _ORDER.index(leaf["column"].partition("/")[0])):
        if as_json:
            out.write(json.dumps(leaf, allow_nan=False) + "\n")
            continue
        label = show.printable(leaf["column"])
        if "distinct" in leaf:
            varied.append(varied_row(label, leaf))
        else:
            measured += rows_of(label, leaf)
        omitted += omissions(label, leaf, "rows are not numbers of this shape")
    if not as_json:
        tables = [moments_table(measured, ("min", "mean", "max", "nan"), "column")]
        print_tables(tables + ([(["column", "distinct", "examples"], varied)] if varied else []), fitted=True)
        for omission in omitted:
            click.echo(omission)


def _columns(window: Any, roots: Sequence[str]) -> dict[str, list[str]]:
    """Return the text of each column, with a first row for the initial observation if it is shown."""
    has_initial = window.opens and "observations" in roots
    first, index = window.first_step, str(window.episode.index)
    columns = {
        "episode": [index] * (window.steps + has_initial),
        "step": ["-"] * has_initial + [str(first + i) for i in range(window.steps)],
    }
    for path in sorted(window.columns, key=lambda path: _ORDER.index(str(path[0]))):
        rows, name = window.columns[path], "/".join(map(str, path))
        if path[0] == "observations":
            columns[name] = list(map(_text, rows if has_initial else rows[1:]))
            if window.has_placeholder and window.steps:
                columns[name][-1] = "not known"
            continue
        texts = [""] * has_initial
        if path[0] in _FLAGS:
            ends = columns.get("end", [""] * (window.steps + has_initial))[has_initial:]
            word = _FLAGS[str(path[0])]
            texts += [" and ".join(filter(None, (end, word * flag))) for end, flag in zip(ends, rows.tolist())]
            columns["end"] = texts
        else:
            columns[name] = texts + list(map(_text, rows))
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
        return show.cut(gym_trace.StepTable.text_of(value), _LONGEST)
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
