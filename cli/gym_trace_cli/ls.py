"""gym-trace ls; also the episodes that gym-trace replay lists without a terminal"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
import numpy as np

import gym_trace
from gym_trace.errors import TraceNotFound
from gym_trace.printable import key_text
from gym_trace.storage import is_url, redacted
from gym_trace_cli import show
from gym_trace_cli.completion import TraceDirectory
from gym_trace_cli.exit_codes import ERROR, FINE
from gym_trace_cli.help import headed, option, section
from gym_trace_cli.options import distinct
from gym_trace_cli.progress import ProgressLine
from gym_trace_cli.selection import Selection, selection_options

_HEADINGS = ("trace", "environment", "episodes", "steps", "return", "bytes", "state", "start_time (UTC)")
# Columns, and how to format them.
_SHOWN: dict[str, Callable[[Any], str]] = {
    "index": str,
    "episode_id": str,
    "writer": str,
    "split": show.printable,
    "lane": str,
    "first_step": show.count,
    "steps": show.count,
    "return": lambda value: show.return_text(tuple(value) if isinstance(value, list) else value),
    "outcome": str,
    "seed": lambda seed: "-" if seed is None else key_text(seed),
    "start_time": lambda time: "-" if time is None else time[:19].replace("T", " "),
}
_RENAMED = {"start_time": "start_time (UTC)"}
_LISTED_BELOW = 5  # traces below another one
_MOST_SEED_BITS = 8192  # larger seeds are printed as text


@headed("ls")
@click.argument("directories", metavar="[DIR]...", nargs=-1, type=TraceDirectory())
@selection_options
@section("Output", option("--json", "Print JSON lines, one per trace or episode.", name="as_json"))
def command(directories: Sequence[str], selection: Selection, as_json: bool) -> int:
    """List the episodes of a trace, or the traces below a directory.

    Searches up to three levels below. DIR defaults to the current directory.
    States: recording, closed, killed, failed, damaged, unreadable (exit code 1).

    \b
    gym-trace ls traces/cartpole --where 'return > 30' --sort -return
    """
    directories = directories or (".",)
    if len(directories) == 1 and any(gym_trace.find_traces(directories[0], deepest=0)):
        trace = gym_trace.open_trace(directories[0])
        view = selection.view_or_note(trace)
        if as_json:
            print_as_json(view)
        else:
            print_episodes(view, trace)
        show.warn_of_damage(redacted(directories[0]), trace)
        if not is_url(directories[0]) and (below := list(gym_trace.find_traces(directories[0]))[1:]):
            names = ", ".join(os.path.relpath(path, directories[0]) for path in below[:_LISTED_BELOW])
            more = ", …" * (len(below) > _LISTED_BELOW)
            note = f"note: {show.count(len(below), 'more trace')} below this one: {show.printable(names)}{more}"
            click.echo(note, err=True)
        return FINE
    all_traces = list[str]()
    for directory in directories:
        traces = list(gym_trace.find_traces(directory))
        all_traces += traces
        if not traces:
            raise TraceNotFound(f"{redacted(directory)}: no trace here, or up to three levels below")
    states = set()
    rows = _listed(distinct(all_traces), selection)
    if as_json:
        for row in rows:
            show.json_line(row)
            states.add(row["state"])
    else:
        states = _print_traces(list(rows), directories[0] if len(directories) == 1 else "")
    return ERROR if "unreadable" in states else FINE


def hint(directory: str) -> str:
    """Return a hint if there are traces below a directory without one."""
    if is_url(directory) or next(gym_trace.find_traces(directory, deepest=2), None) is None:
        return ""
    return f"; {show.command('ls', directory)} lists the traces below it"


def _listed(directories: Sequence[str], selection: Selection) -> Iterator[dict[str, Any]]:
    with ProgressLine(quiet=not show.is_terminal(sys.stderr)) as progress:
        for number, directory in enumerate(directories):
            progress.update_count(number, len(directories), "trace")
            yield gym_trace.list_trace(directory, selection.view_of_one)


def _print_traces(rows: Sequence[dict[str, Any]], parent: str) -> set[str]:
    """Print a table with paths relative to parent; return the states."""
    show.table(_HEADINGS, (_cells(row, parent) for row in rows), fitted=True)
    for row in rows:
        if row["problem"]:
            where = show.printable(row["directory"])
            click.echo(f"{where} is {row['state']}: {show.printable(row['problem'])}", err=True)
    return {row["state"] for row in rows}


def _cells(row: dict[str, Any], parent: str) -> tuple[str, ...]:
    has_objectives = isinstance(row["return"], list)
    return (
        os.path.relpath(row["directory"], parent) if parent and "://" not in parent else row["directory"],
        ", ".join(name or "without an id" for name in row["environments"]),
        *("-" if row[name] is None else show.count(row[name]) for name in ("episodes", "steps")),
        show.return_text(tuple(row["return"]) if has_objectives else row["return"]),
        "-" if row["bytes"] is None else show.size(row["bytes"]),
        row["state"],
        "-" if row["start_time"] is None else _moment(row["start_time"]),
    )


def _moment(started: str) -> str:
    """Format a time: 11-22 13:07, or the date if in another year."""
    day, clock = started[:10], started[11:16]
    return f"{day[5:]} {clock}" if day[:4] == time.strftime("%Y", time.gmtime()) else day


def print_episodes(view: gym_trace.Trace, whole: gym_trace.Trace) -> None:
    """Print a table of the episodes of a view, without columns that have one value in the whole trace."""
    table = whole.episodes
    _, firsts = np.unique(table["writer"], return_index=True)
    varies = {
        "writer": len(whole.writers) > 1,
        "split": len({whole[index].split for index in firsts.tolist()}) > 1,
        "lane": table["lane"].any(),
        "first_step": table["first_step"].any(),
    }
    names = [name for name in _SHOWN if varies.get(name, True)]
    rows = ([_SHOWN[name](row[name]) for name in names] for row in gym_trace.list_episodes(view))
    show.table([_RENAMED.get(name, name) for name in names], rows, fitted=True)


def print_as_json(view: gym_trace.Trace) -> None:
    """Print one JSON line per episode: null for unknown values, times in UTC, duration in seconds."""
    for row in gym_trace.list_episodes(view):
        if row["seed"] is not None and row["seed"].bit_length() > _MOST_SEED_BITS:  # Python cannot print it as a number
            row["seed"] = key_text(row["seed"])
        show.json_line(row)
