"""gym-trace sql"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import click

import gym_trace
from gym_trace_cli import show
from gym_trace_cli.completion import TraceDirectory
from gym_trace_cli.exit_codes import FINE
from gym_trace_cli.help import headed, option, section
from gym_trace_cli.options import distinct


@headed("sql")
@click.argument("directories", metavar="DIR...", nargs=-1, required=True, type=TraceDirectory())
@click.argument("query")
@section(
    "Output",
    option("--json", "Print JSON lines, one per row.", name="as_json"),
    option("-o, --output FILE", "File: .parquet or .csv. Default: standard output.", click.Path(dir_okay=False)),
)
def command(directories: Sequence[str], query: str, as_json: bool, output: str | None) -> int:
    """Query traces with DuckDB: the tables are steps and episodes.
    Only columns that the query names are decoded.

    DESCRIBE steps lists the columns, which are those of --steps-where and a
    Parquet export; with several DIRs, both tables have a column trace.
    Lists count from 1: observation[3] is observation[2] elsewhere.

    \b
    gym-trace sql DIR "SELECT avg(return) FROM episodes WHERE outcome = 'terminated'"
    gym-trace sql DIR "SELECT observation, action FROM steps" -o steps.parquet
    """
    if os.path.isdir(query):
        raise click.UsageError(f"the last argument, {query}, is a directory; pass DIR, then QUERY")
    if as_json and output is not None:
        raise click.UsageError("--json: excludes --output, which writes .parquet or .csv")
    traces = [gym_trace.open_trace(directory) for directory in distinct(directories)]
    if output is not None:
        written = gym_trace.write_query(query, traces, output)
        click.echo(f"{show.count(written, 'row')} written to {show.printable(output)}")
        return FINE
    headings, rows = gym_trace.query(query, traces)
    if as_json:
        for row in rows:
            show.json_line(dict(zip(headings, row)), default=str)
    elif headings:
        show.table(headings, ([_text(value) for value in row] for row in rows), fitted=True)
    return FINE


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return json.dumps(value, default=str) if isinstance(value, (list, dict)) else str(value)
