"""gym-trace cat"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any, TextIO

import click

import gym_trace
from gym_trace.printable import integer
from gym_trace_cli import show
from gym_trace_cli.column_tables import moments_table, notes_of, print_tables, rows_of, varied_row
from gym_trace_cli.completion import step_columns
from gym_trace_cli.exit_codes import DAMAGED, FINE
from gym_trace_cli.help import headed, option, section
from gym_trace_cli.options import TextOption, trace_argument
from gym_trace_cli.progress import ProgressLine
from gym_trace_cli.selection import Selection, selection_options

if TYPE_CHECKING:
    from gym_trace.data.values import Array
    from gym_trace.errors import CorruptTrace
    from gym_trace.exchange.formats.steps.windows import Window
    from gym_trace.playback.column_selection import ColumnSelection
    from gym_trace.playback.trace import Trace

_FORMATS = ["table", "jsonl", "csv", "npz"]
_ORDER = ("actions", "rewards", "terminations", "truncations", "observations", "annotations", "infos")
_FLAGS = {"terminations": "terminated", "truncations": "truncated"}  # shown in one column
_MOST_NUMBERS = 8  # of an array shown one by one
_LONGEST = 60  # characters of other values


class StepSlice(TextOption):
    """--steps: "5", "10:20", "-3:", as a slice."""

    name = "slice"

    def parsed(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> slice:
        try:
            if ":" not in value:
                step = int(value)
                return slice(step, step + 1 or None)
            start, stop = (int(part) if part.strip() else None for part in value.split(":"))
        except ValueError:
            self.fail(f"{value!r} is not a choice of steps; write 5, 10:20, :100 or -3: (the last three)", param, ctx)
        return slice(start, stop)


@headed("cat")
@trace_argument
@selection_options
@section(
    "Steps",
    option("--steps A:B", "Steps of each episode: 5, 10:20 or -3:.", StepSlice(), default=slice(None)),
    option("--steps-where CONDITION", "Only steps where this holds: 'reward < -5'.", default=None),
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
    the end, and exit with 5; npz has all or nothing.

    \b
    gym-trace cat traces/cartpole --episodes 0 --steps -3:
    gym-trace cat traces/cartpole --where 'return > 30' -o steps.csv
    gym-trace cat traces/cartpole --steps-where 'isnan(next_observation).any' --context 3
    """
    from gym_trace.exchange.formats.steps.csv_rows import csv_lines
    from gym_trace.exchange.formats.steps.jsonl import json_lines
    from gym_trace.playback.column_selection import select_columns

    form = _form(form, as_json, output)
    if summary and form not in ("table", "jsonl"):
        raise click.UsageError(f"--summary: excludes --format {form}; pass --json or no format")
    if steps_where is None and context:
        raise click.UsageError("--context: needs --steps-where")
    if steps_where is not None and (form == "npz" or steps != slice(None)):
        raise click.UsageError(f"--steps-where: excludes {'--format npz' if form == 'npz' else '--steps'}")
    trace = gym_trace.open_trace(directory)
    places = selection.told(trace).chosen
    chosen = select_columns(trace, None if columns is None else [name.strip() for name in columns.split(",")])
    damage = {str(found.error()): None for found in trace.damage}

    def on_error(error: CorruptTrace) -> None:
        damage[str(error)] = None

    with _opened(output) as out:
        if form == "npz":
            from gym_trace.exchange.formats.steps.npz import write_npz

            with ProgressLine(quiet=output is None) as line:

                def on_progress(column: str, done: int, total: int) -> None:
                    line.update(f"{show.printable(column)}: {show.count(done)} of {show.count(total, 'row')}")

                write_npz(trace, places, chosen, out.buffer, steps, on_progress)
        else:
            windows = _windows(trace, places, chosen, steps, steps_where, context, on_error)
            if summary:
                _print_summary(windows, form == "jsonl", out)
            elif form == "table":
                _print_table(windows, chosen)
            else:
                out.writelines(
                    csv_lines(windows, trace, chosen) if form == "csv" else json_lines(windows, chosen, on_error)
                )
    for problem in damage:
        click.echo(f"skipped: {show.printable(problem)}", err=True)
    return DAMAGED if damage else FINE


def _windows(
    trace: Trace,
    places: Array,
    chosen: ColumnSelection,
    steps: slice,
    where: str | None,
    context: int,
    on_error: Callable[[CorruptTrace], None],
) -> Iterator[Window]:
    """Yield the chosen steps; with a condition, those where it holds, with their neighbours."""
    from gym_trace.exchange.formats.steps.windows import step_windows

    wanted = places
    which: slice | list[slice] = steps
    if where is not None:
        hits = trace[places].find_steps(where, on_damage="skip")
        if not len(hits):
            click.echo("note: no step matches", err=True)
        first, runs = trace.episodes["first_step"][places], list(_runs(hits, context))
        # A window that begins with step 0 shows the observation before it, too.
        which = [slice(max(0, begin - int(first[place])), end - int(first[place])) for place, begin, end in runs]
        wanted = places[[place for place, *_ in runs]] if runs else places[:0]
    yield from step_windows(trace, chosen, wanted, which, lambda damage: on_error(damage.error()))


def _runs(hits: Array, context: int) -> Iterator[tuple[int, int, int]]:
    """Yield (episode, first step, step after the last) of the steps around hits, neighbours joined."""
    run: tuple[int, int, int] | None = None
    for episode, step in hits.tolist():
        begin, end = step - context, step + context + 1
        if run is not None and run[0] == episode and begin <= run[2]:
            run = episode, run[1], end
            continue
        if run is not None:
            yield run
        run = episode, begin, end
    if run is not None:
        yield run


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
        yield sys.stdout
        return
    from gym_trace.storage.staging import replaced_file

    with replaced_file(output) as staged, open(staged, "w", encoding="utf-8", newline="") as file:
        yield file


def _print_table(windows: Iterator[Window], chosen: ColumnSelection) -> None:
    """Print these steps; a new table begins where the columns change, as between writers."""
    number = 0
    for number, (names, parts) in enumerate(groupby((_columns(window, chosen) for window in windows), key=tuple), 1):
        if number > 1:
            click.echo()
        rows = (row for columns in parts for row in zip(*columns.values()))
        show.table([show.printable(name) for name in names], rows, fitted=True, keys=2)
    if not number:
        show.table(["episode", "step"], [])


def _print_summary(windows: Iterator[Window], as_json: bool, out: TextIO) -> None:
    """Print one line per column of numbers, and one per column of other values."""
    from gym_trace.playback.column_selection import name_of
    from gym_trace.tools.statistics.columns import StepValues

    values = StepValues()
    with ProgressLine() as line:
        done = 0
        for window in windows:
            for path, rows in window.columns.items():
                if path[0] == "observations":  # the row before these steps is that after the last ones
                    rows = rows[not window.opens : len(rows) - (window.has_placeholder and window.steps > 0)]
                values.add(path, rows)
            done += window.steps
            line.update(show.count(done, "step"))
    measured, varied, notes = [], [], []
    for leaf in sorted(values.result(), key=lambda leaf: _ORDER.index(str(leaf["path"][0]))):
        name, _ = name_of(leaf.pop("path")), leaf.pop("space")
        if as_json:
            out.write(json.dumps({"column": name, **leaf}, allow_nan=False) + "\n")
            continue
        label = show.printable(name)
        if "distinct" in leaf:
            varied.append(varied_row(label, leaf))
        else:
            measured += rows_of(label, leaf)
        notes += notes_of(label, leaf, "rows are not numbers of this shape")
    if not as_json:
        tables = [moments_table(measured, ("min", "mean", "max", "nan"), "column")]
        print_tables(tables + ([(["column", "distinct", "examples"], varied)] if varied else []), fitted=True)
        for note in notes:
            click.echo(note)


def _columns(window: Window, chosen: ColumnSelection) -> dict[str, list[str]]:
    """Return the text of each column, with a row for the first observation if it is shown."""
    from gym_trace.playback.column_selection import name_of

    has_before = window.opens and "observations" in chosen.roots
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
        from gym_trace.tools.statistics.describe import plain

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
