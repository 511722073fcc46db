"""gym-trace cat"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO, TextIO

import click

import gym_trace
from gym_trace_cli import show
from gym_trace_cli.completion import TraceDirectory, step_columns
from gym_trace_cli.exit_codes import DAMAGED, FINE
from gym_trace_cli.help import headed, option, section
from gym_trace_cli.options import TextOption
from gym_trace_cli.progress import ProgressLine
from gym_trace_cli.selection import Selection, selection_options
from gym_trace_cli.step_table import print_steps

if TYPE_CHECKING:
    from gym_trace import Trace
    from gym_trace.errors import CorruptTrace
    from gym_trace.formats.steps.windows import Choice
    from gym_trace.model.values import Array

_FORMATS = ("table", "jsonl", "csv", "npz")


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
@click.argument("directory", metavar="DIR", type=TraceDirectory())
@selection_options
@section(
    "Steps",
    option("--steps A:B", "Steps of each episode: 5, 10:20 or -3:.", StepSlice(), default=slice(None)),
    option("--columns NAMES", "Columns, e.g. actions,observations/image.", shell_complete=step_columns),
)
@section(
    "Output",
    option(
        "--format FORMAT",
        "table, jsonl, csv or npz. Default: by FILE, else table.",
        click.Choice(_FORMATS),
        name="form",
    ),
    option("--json", "Same as --format jsonl.", name="as_json"),
    option("-o, --output FILE", "File. Default: standard output.", click.Path(dir_okay=False)),
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    directory: str,
    selection: Selection,
    steps: slice,
    columns: str | None,
    form: str | None,
    as_json: bool,
    output: str | None,
) -> None:
    """Print steps: actions, rewards, outcomes and the observation each led to.
    The observation before the first step comes first.

    jsonl is lossless (docs/STEPS.md), csv has one column per number, npz one array
    per column, a table shortens long values. Damaged parts are skipped, listed at
    the end, and exit with 5; npz has all or nothing.

    \b
    gym-trace cat traces/cartpole --episodes 0 --steps -3:
    gym-trace cat traces/cartpole --where 'return > 30' -o steps.csv
    """
    from gym_trace.formats.steps.csv_rows import csv_lines
    from gym_trace.formats.steps.jsonl import json_lines
    from gym_trace.formats.steps.windows import choose, step_windows

    form = _form(form, as_json, output)
    trace = gym_trace.open_trace(directory)
    places = selection.told(trace).chosen
    choice = choose(trace, None if columns is None else [name.strip() for name in columns.split(",")])
    damage = {str(found.error()): None for found in trace.damage}

    def on_damage(error: CorruptTrace) -> None:
        damage[str(error)] = None

    with _opened(output, form) as out:
        if form == "npz":
            _write_npz(trace, places, choice, out.buffer, steps, quiet=output is None)
        else:
            windows = step_windows(trace, places, choice, steps, on_damage)
            if form == "table":
                print_steps(windows, choice)
            else:
                out.writelines(
                    csv_lines(windows, trace, choice) if form == "csv" else json_lines(windows, choice, on_damage)
                )
    for problem in damage:
        click.echo(f"skipped: {show.printable(problem)}", err=True)
    ctx.exit(DAMAGED if damage else FINE)


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
        click.echo(f"note: {show.printable(output)}: written as {form}, as the options say", err=True)
    return form or "table"


@contextmanager
def _opened(output: str | None, form: str) -> Iterator[TextIO]:
    """Open the standard output, or a file that is renamed into place when complete."""
    if output is None:
        yield sys.stdout
        return
    from gym_trace.storage.staging import replaced_file

    with replaced_file(output) as staged, open(staged, "w", encoding="utf-8", newline="") as file:
        yield file


def _write_npz(trace: Trace, places: Array, choice: Choice, file: BinaryIO, steps: slice, quiet: bool) -> None:
    from gym_trace.formats.steps.npz import write_npz

    with ProgressLine(quiet=quiet) as line:

        def on_progress(column: str, done: int, total: int) -> None:
            line.update(f"{show.printable(column)}: {show.count(done)} of {show.count(total, 'row')}")

        write_npz(trace, places, choice, file, steps, on_progress)
