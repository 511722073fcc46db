"""gym-trace compare; also the comparison of gym-trace diff"""

from __future__ import annotations

import glob
import math
import os
import re
import shutil
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

import gym_trace
from gym_trace.errors import TraceNotFound
from gym_trace.storage import is_url, redacted
from gym_trace_cli import show
from gym_trace_cli.completion import TraceDirectory
from gym_trace_cli.help import headed, option, section
from gym_trace_cli.options import distinct, json_option
from gym_trace_cli.reports import plot_file
from gym_trace_cli.selection import Selection, selection_options

if TYPE_CHECKING:
    from gym_trace.results import Estimate, RunComparison, RunGroup

_NAMED = re.compile(r"([^=/]+)=(.+)", re.DOTALL)
_BESIDE = 3  # names in a table
_HEIGHT, _WIDEST = 12, 100  # characters of the chart
_AXES = {"steps": "environment steps", "episodes": "episodes", "time": "time"}


@headed("compare")
@click.argument("given", metavar="[NAME=]DIR...", nargs=-1, required=True, type=TraceDirectory())
@selection_options
@section(
    "Comparison",
    option("--x AXIS", "Curves over steps (default), episodes or time.", list(_AXES), default="steps"),
    option("--threshold R", "Find the steps until the mean return reaches R.", float),
)
@section("Output", option("--plot FILE", "Also draw the curves: .svg or .png.", plot_file), json_option)
def command(
    given: Sequence[str], selection: Selection, x: str, threshold: float | None, plot: Path | None, as_json: bool
) -> None:
    """Compare runs: returns with 95 % intervals, lengths, speed, and learning curves.

    Each DIR is a setting. Traces below DIR, or those that match a quoted pattern, are
    its seeds; so are all DIRs with the same NAME. 'diff' compares bit for bit.

    \b
    gym-trace compare ppo='runs/ppo-*' dqn='runs/dqn-*' --threshold 195
    gym-trace compare runs/before runs/after --episodes -100:
    """
    named = named_traces(given)
    traces = {name: [selection.view(gym_trace.open_trace(one)) for one in found] for name, found in named.items()}
    compared = gym_trace.compare(traces, x=x, threshold=threshold)
    if plot is not None:
        gym_trace.plot_runs(compared, plot)
    if as_json:
        show.json_line(compared.to_json(), allow_nan=False)
        return
    print_comparison(compared)
    if plot is not None:
        click.echo(f"\nplot: {show.printable(plot)}")


def named_traces(given: Sequence[str]) -> dict[str, list[str]]:
    """Return the directories of the traces of each name, for words [NAME=]DIR. Raises TraceNotFound."""
    named: dict[str, list[str]] = {}
    for word in given:
        name, directory = _split(word)
        named[name] = distinct([*named.get(name, ()), *_traces_at(directory)])
    return named


def _split(word: str) -> tuple[str, str]:
    """Return the name and the directory of [NAME=]DIR; the name of a directory without one is the directory."""
    match = None if os.path.exists(word) else _NAMED.fullmatch(word)
    return (match[1], match[2]) if match else (word, word)


def _traces_at(directory: str) -> Iterator[str]:
    """Yield the trace in a directory, or those below it, for each directory that matches. Raises TraceNotFound."""
    matching = [directory] if is_url(directory) or os.path.exists(directory) else sorted(glob.glob(directory))
    for path in matching or [directory]:
        is_run = Path(path, "run.json").is_file() and Path(path, "trace").is_dir()  # gym-trace train writes both
        root = os.path.join(path, "trace") if is_run else path
        found = list(gym_trace.find_traces(root, deepest=0)) or list(gym_trace.find_traces(root))
        if not found and path == directory:
            raise TraceNotFound(f"{redacted(directory)}: no trace here, or up to three levels below")
        yield from found


def print_comparison(compared: RunComparison) -> None:
    """Print tables of statistics, a chart on a terminal, and notes on what they mean."""
    for first in range(0, len(compared.groups), _BESIDE):
        groups = compared.groups[first : first + _BESIDE]
        rows = [dict(_rows(group, compared)) for group in groups]
        if first:
            click.echo()
        show.table(
            ["", *(group.name for group in groups)],
            ([label, *(row[label] for row in rows)] for label in rows[0] if any(row[label] for row in rows)),
            fitted=True,
        )
    if show.can_chart():
        _print_chart(compared)
    ids = dict.fromkeys(one for group in compared.groups for one in group.environments)
    if len(ids) > 1:
        names = ", ".join(one or "one without an id" for one in ids)
        click.echo(f"note: returns of different environments: {show.printable(names)}", err=True)


def _rows(group: RunGroup, compared: RunComparison) -> Iterator[tuple[str, str]]:
    several = len(group.returns) > 1
    yield "runs", show.count(len(group.returns))
    yield "episodes", show.count(int(group.episodes.sum()))
    yield "steps", show.count(int(group.steps.sum()))
    yield "mean return", _estimate(group.mean)
    yield "median return", _estimate(group.median)
    yield "IQM of returns", _estimate(group.iqm)
    over = len(group.returns) if several else int(group.complete.sum())
    yield "intervals over", show.count(over, "run" if several else "complete episode")
    yield "mean length", _mean(group.lengths.tolist())
    yield "outcomes", ", ".join(f"{name} {show.count(number)}" for name, number in group.outcomes.items())
    if compared.threshold is not None:
        label = f"steps to {show.number(compared.threshold)}, mean of {compared.window}"
        yield label, _reached(group.steps_to_threshold.tolist())
    seconds = _known(group.seconds.tolist())
    yield "time of a run", show.duration(sum(seconds) / len(seconds) if seconds else None)
    yield "steps/s", _mean(group.steps_per_second.tolist())


def _known(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _mean(values: Sequence[float]) -> str:
    known = _known(values)
    return show.number(sum(known) / len(known) if known else None)


def _estimate(estimate: Estimate) -> str:
    value, low, high = (show.number(None if math.isnan(value) else value) for value in estimate)
    return f"{value} [{low}, {high}]" if low != "-" else value


def _reached(steps: Sequence[float]) -> str:
    """Return the median over all runs, of which some may not reach the threshold."""
    reached, middle = sum(map(math.isfinite, steps)), statistics.median(steps)
    median = "-" if math.isinf(middle) else show.number(middle)
    return median if len(steps) == 1 else f"{median} ({reached} of {len(steps)} runs)"


def _print_chart(compared: RunComparison) -> None:
    curves = [[None if math.isnan(value) else value for value in group.curve.tolist()] for group in compared.groups]
    present = [value for curve in curves for value in curve if value is not None]
    if not present or not math.isfinite(max(present) - min(present)):
        return
    labels = [show.number(max(present)), *[""] * (_HEIGHT - 2), show.number(min(present))]
    indent = max(map(len, labels))
    width = min(_WIDEST, max(20, shutil.get_terminal_size().columns - indent - 2))
    show.title(f"return over {_AXES[compared.x]} (means of {show.count(compared.window, 'complete episode')})")
    for label, line in zip(labels, show.chart(curves, width, _HEIGHT)):
        click.echo(f"{label.rjust(indent)} ▕{line}")
    end = float(compared.grid[-1])
    last = show.duration(end) if compared.x == "time" else show.number(end)
    click.echo(f"{'0'.rjust(indent + 3)}{last.rjust(width - 1)}")
    for number, group in enumerate(compared.groups):
        colour = show.COLOURS[number % len(show.COLOURS)]
        click.echo(f"{' ' * (indent + 2)}{click.style('━━', fg=colour)} {show.printable(group.name)}")
