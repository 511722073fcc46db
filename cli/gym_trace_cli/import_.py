"""gym-trace import"""

from __future__ import annotations

import json
from typing import Any

import click

from gym_trace_cli import show
from gym_trace_cli.completion import formats
from gym_trace_cli.export import list_option
from gym_trace_cli.help import headed, option, section
from gym_trace_cli.options import PATH, EnvArg, json_option, quiet_option
from gym_trace_cli.progress import ProgressLine


@headed("import")
@click.argument("path", metavar="PATH", type=click.Path())
@section(
    "Input",
    option("--from FORMAT", "Format. Default: detected.", name="form", shell_complete=formats),
    option("--map NAME=COLUMN,…", "Map table columns, e.g. obs=state,acts=action.", name="columns", multiple=True),
    option(
        "--set K=V",
        "Format option, see docs/EXPORT.md (repeatable).",
        EnvArg("last_step=step"),
        name="options",
        multiple=True,
    ),
    list_option("importers"),
)
@section(
    "Output",
    option("-o, --output DIR", "New directory.", PATH, required=True),
    quiet_option,
    json_option,
)
def command(
    path: str,
    output: str,
    form: str | None,
    columns: tuple[str, ...],
    options: tuple[tuple[str, Any], ...],
    quiet: bool,
    as_json: bool,
) -> None:
    """Convert a recording of another package, a directory or a file, to a trace.

    Arrays keep dtype, shape and bits. Missing facts are not invented. PATH is
    never modified, executed or unpickled.

    \b
    gym-trace import ~/.minari/datasets/D4RL/pen/human-v2 -o traces/pen
    gym-trace import steps.parquet -o traces/robot --map obs=state,acts=action,episode=id
    """
    import gym_trace

    mapped = {"map": ",".join(columns)} if columns else {}
    with ProgressLine(quiet=quiet) as progress:
        counting = progress.counting()
        report = gym_trace.import_trace(path, output, form, on_progress=counting, **{**dict(options), **mapped})
    if as_json:
        told = report.told()
        click.echo(json.dumps({"directory": told.pop("destination"), **told}))
        return
    if quiet:
        return
    for note in report.notes:
        show.line("note", note)
    videos = f", {show.count(len(report.videos), 'video')}" if report.videos else ""
    counts = f"{show.count(report.episodes, 'episode')}, {show.count(report.steps, 'step')}"
    writers = show.count(len(report.writers), "writer")
    where = f"{show.printable(' and '.join(report.kinds))}, imported to {show.printable(output)}"
    click.echo(f"{where}: {counts} of {writers}{videos}")
