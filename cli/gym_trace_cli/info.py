"""gym-trace info"""

from __future__ import annotations

import json
import sys
import time

import click

import gym_trace
from gym_trace_cli import info_tables, show

SECONDS = 1.0  # between looks at a trace that is followed


@click.command("info", short_help="Tell what a trace holds.")
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option("--follow", is_flag=True, help="Tell what comes, every second, until all who record are done.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; with --follow, a line for each change.")
def command(directory: str, follow: bool, as_json: bool) -> None:
    """Tell what the trace in DIR holds: environment, spaces, seeds, writers, files, health."""
    from gym_trace.statistics.describe import describe  # here, so that --help does not wait for numpy

    trace = gym_trace.open_trace(directory)
    if as_json and not follow:
        click.echo(json.dumps(describe(trace), indent=2, allow_nan=False))
    elif not as_json:
        info_tables.print_info(describe(trace))
    if follow:
        _follow(trace, as_json)


def _follow(trace: gym_trace.Trace, as_json: bool) -> None:
    """Shows a line that changes on a terminal, and a line for each change elsewhere."""
    from gym_trace.statistics.describe import progress_of

    live = not as_json and show.is_terminal(sys.stdout)
    before = None
    with show.Progress(quiet=not live) as progress:
        while True:
            now = progress_of(trace)
            if live:
                progress.update(info_tables.progress_line(now))
            elif now != before:
                click.echo(json.dumps(now) if as_json else info_tables.progress_line(now))
            if not now["recording"]:
                break
            before = now
            time.sleep(SECONDS)
            trace.refresh()
    if live:
        click.echo(info_tables.progress_line(now))
