"""gym-trace import"""

from __future__ import annotations

import json
from typing import Any

import click

from gym_trace_cli import show
from gym_trace_cli.completion import formats
from gym_trace_cli.export import list_formats
from gym_trace_cli.help import headed, section
from gym_trace_cli.options import EnvArg, json_option, quiet_option


def _list(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        list_formats(ctx, "importers")


@headed("import")
@click.argument("path", metavar="PATH", type=click.Path())
@section(
    "Input",
    click.option("--from", "form", metavar="FORMAT", shell_complete=formats, help="Format. Default: detected."),
    click.option(
        "--map",
        "columns",
        multiple=True,
        metavar="NAME=COLUMN,…",
        help="Map table columns, e.g. obs=state,acts=action.",
    ),
    click.option(
        "--set",
        "options",
        type=EnvArg("last_step=step"),
        multiple=True,
        metavar="K=V",
        help="Format option, see docs/EXPORT.md (repeatable).",
    ),
    click.option("--list", is_flag=True, is_eager=True, expose_value=False, callback=_list, help="List the formats."),
)
@section(
    "Output",
    click.option("-o", "--output", required=True, metavar="DIR", type=click.Path(), help="New directory."),
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

    with show.ProgressLine(quiet=quiet) as progress:

        def on_progress(done: int, total: int) -> None:
            if total:
                progress.update(f"{show.count(done)} of {show.count(total)}", done / total)
            else:
                progress.update(f"{show.count(done)} done")

        mapped = {"map": ",".join(columns)} if columns else {}
        report = gym_trace.import_trace(path, output, form, on_progress=on_progress, **{**dict(options), **mapped})
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
