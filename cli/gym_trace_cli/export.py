"""gym-trace export"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gym_trace_cli import show
from gym_trace_cli.completion import TraceDirectory, formats
from gym_trace_cli.help import headed, option, section
from gym_trace_cli.options import PATH, EnvArg, json_option, quiet_option
from gym_trace_cli.progress import ProgressLine
from gym_trace_cli.selection import Selection, selection_options


def list_option(kind: str) -> Callable[[Any], Any]:
    """--list, which prints the formats and exits. kind: "exporters" or "importers"."""

    def print_list(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
        if asked and not ctx.resilient_parsing:
            from gym_trace.formats import registry as known

            show.facts(known.listed(getattr(known, kind)()))
            ctx.exit()

    return option("--list", "List the formats.", is_eager=True, expose_value=False, callback=print_list)


@headed("export")
@click.argument("directory", metavar="DIR", type=TraceDirectory())
@section(
    "Output",
    option("-o, --output OUT", "New directory or file.", PATH, required=True),
    option("--to FORMAT", "Format. Default: by OUT, e.g. .jsonl.", name="form", shell_complete=formats),
    option(
        "--set K=V",
        "Format option, see docs/EXPORT.md (repeatable).",
        EnvArg("kind=arrow"),
        name="options",
        multiple=True,
    ),
    option("--strict", "Fail if FORMAT cannot store everything."),
    list_option("exporters"),
    quiet_option,
    json_option,
)
@selection_options
def command(
    directory: str,
    form: str | None,
    output: str,
    selection: Selection,
    options: tuple[tuple[str, Any], ...],
    strict: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Write episodes for another package to read.

    Lists what FORMAT cannot store and how to load OUT. Skips episodes that are
    still being recorded.

    \b
    gym-trace export traces/cartpole --to minari -o ~/.minari/datasets/cartpole/mine-v0
    gym-trace export traces/cartpole --to parquet -o tables --where 'return > 100'
    gym-trace export traces/cartpole -o steps.jsonl
    """
    import gym_trace
    from gym_trace.errors import InvalidOption
    from gym_trace.formats.registry import format_for

    try:
        chosen = format_for(Path(output)) if form is None else form
    except InvalidOption as error:
        raise click.UsageError(str(error)) from error
    view = selection.some(gym_trace.open_trace(directory))
    with ProgressLine(quiet=quiet) as progress:
        counting = progress.counting("step")
        report = gym_trace.export(view, output, chosen, strict=strict, on_progress=counting, **dict(options))
    if as_json:
        lost = [loss._asdict() for loss in report.lost]
        click.echo(json.dumps({**vars(report), "path": str(report.path), "lost": lost}))
        return
    if quiet:
        return
    click.echo(
        f"{show.count(report.episodes, 'episode')}, {show.count(report.steps, 'step')} "
        f"exported to {show.printable(report.path)} as {report.format}"
    )
    if form is None:
        show.line("note", f"format {report.format}, by the ending of OUT; --to changes it")
    if report.running:
        show.line("note", f"{show.count(report.running, 'running episode')} skipped")
    for loss in report.lost:
        show.line("lost", loss.why)
    click.echo("to load it:")
    for line in report.how_to_load.splitlines():
        click.echo(f"    {show.printable(line)}")
