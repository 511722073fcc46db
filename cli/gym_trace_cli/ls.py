"""gym-trace ls"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import click

import gym_trace
from gym_trace.errors import TraceNotFound
from gym_trace_cli import show
from gym_trace_cli.completion import TraceDirectory
from gym_trace_cli.episode_lines import print_as_json, print_episodes
from gym_trace_cli.exit_codes import ERROR, FINE
from gym_trace_cli.help import headed, option, section
from gym_trace_cli.progress import ProgressLine
from gym_trace_cli.selection import Selection, selection_options

_HEADINGS = ("trace", "environment", "episodes", "steps", "return", "size", "state", "started UTC")


@headed("ls")
@click.argument("directories", metavar="[DIR]...", nargs=-1, type=TraceDirectory())
@selection_options
@section("Output", option("--json", "Print JSON lines, one per trace or episode.", name="as_json"))
@click.pass_context
def command(ctx: click.Context, /, directories: Sequence[str], selection: Selection, as_json: bool) -> None:
    """List the episodes of a trace, or the traces below a directory.

    Searches up to three levels below. DIR defaults to the current directory.
    States: recording, closed, killed, failed, damaged, unreadable (exit code 1).

    \b
    gym-trace ls traces/cartpole --where 'return > 30' --sort -return
    """
    from gym_trace.statistics.describe import find_traces, is_trace

    directories = directories or (".",)
    if len(directories) == 1 and is_trace(directories[0]):
        trace = gym_trace.open_trace(directories[0])
        (print_as_json if as_json else print_episodes)(trace, selection.told(trace).chosen)
        return
    found: dict[str, None] = {}
    for directory in directories:
        traces = dict.fromkeys(find_traces(directory))
        found |= traces
        if not traces:
            raise TraceNotFound(f"{directory}: no traces here, nor in the directories up to three levels below")
    states = set()
    rows = _listed(list(found), selection)
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
            states.add(row["state"])
    else:
        states = _print_traces(list(rows), directories[0] if len(directories) == 1 else "")
    ctx.exit(ERROR if "unreadable" in states else FINE)


def hint(directory: str) -> str:
    """Return a hint if there are traces below a directory without one."""
    from gym_trace.statistics.describe import find_traces

    if next(find_traces(directory, deepest=2), None) is None:
        return ""
    return f"; 'gym-trace ls {show.printable(directory)}' lists the traces below it"


def _listed(directories: Sequence[str], selection: Selection) -> Iterator[dict[str, Any]]:
    from gym_trace.statistics.describe import list_trace

    with ProgressLine(quiet=not show.is_terminal(sys.stderr)) as progress:
        for number, directory in enumerate(directories):
            progress.update_count(number, len(directories), "trace")
            yield list_trace(directory, selection.of_one_of_several)


def _print_traces(rows: Sequence[dict[str, Any]], parent: str) -> set[str]:
    """Print a table with paths relative to parent; return the states."""
    show.table(_HEADINGS, (_cells(row, parent) for row in rows), fitted=True)
    for row in rows:
        if row["problem"]:
            where = show.printable(row["directory"])
            click.echo(f"{where} is {row['state']}: {show.printable(row['problem'])}", err=True)
    return {row["state"] for row in rows}


def _cells(row: dict[str, Any], parent: str) -> tuple[str, ...]:
    several = isinstance(row["return"], list)
    return (
        os.path.relpath(row["directory"], parent) if parent else row["directory"],
        ", ".join(name or "without an id" for name in row["environments"]),
        *("-" if row[name] is None else show.count(row[name]) for name in ("episodes", "steps")),
        show.returned(tuple(row["return"]) if several else row["return"]),
        "-" if row["bytes"] is None else show.size(row["bytes"]),
        row["state"],
        "-" if row["start_time"] is None else _moment(row["start_time"]),
    )


def _moment(started: str) -> str:
    """Format a time: 11-22 13:07, or the date if in another year."""
    day, clock = started[:10], started[11:16]
    return f"{day[5:]} {clock}" if day[:4] == time.strftime("%Y", time.gmtime()) else day
