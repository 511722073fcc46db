"""gym-trace stats"""

from __future__ import annotations

import json

import click

import gym_trace
from gym_trace_cli import show, stats_tables


@click.command("stats", short_help="Summarize a trace.")
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option("--by", type=click.Choice(["split", "writer", "outcome"]), help="The same for each of these besides.")
@click.option("--columns", is_flag=True, help="Also rewards, actions and observations: reads all of the trace.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(directory: str, by: str | None, columns: bool, as_json: bool) -> None:
    """Summarize the trace in DIR: episodes, returns, lengths, outcomes, speed, and bytes a column.

    All this comes from the index, at once whatever the size; only --columns reads the recorded steps. Returns and
    lengths are those of complete episodes: terminated or truncated, with at least one step. Where rewards are several
    numbers each, there is a return for every one.
    """
    with show.Progress(quiet=not columns) as progress:

        def on_progress(done: int, total: int) -> None:
            progress.update(f"{show.count(done)} of {show.count(total)} steps", done / total if total else None)

        summary = gym_trace.summarize(directory, by=by, columns=columns, on_progress=on_progress)
    if as_json:
        click.echo(json.dumps(summary, indent=2, allow_nan=False))
    else:
        stats_tables.print_summary(summary)
