"""gym-trace export"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from gym_trace_cli import show
from gym_trace_cli.completion import TraceDirectory, formats
from gym_trace_cli.options import EnvArg
from gym_trace_cli.selection import Selection, selection_options


def list_formats(ctx: click.Context, kind: str) -> None:
    """Prints which formats there are. kind: "exporters" or "importers"."""
    from gym_trace.formats import registry as known

    show.facts(known.listed(getattr(known, kind)()))
    ctx.exit()


def _list(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        list_formats(ctx, "exporters")


@click.command("export", short_help="Write episodes in the format of another package.")
@click.argument("directory", metavar="DIR", type=TraceDirectory())
@click.option(
    "--to",
    "form",
    metavar="FORMAT",
    shell_complete=formats,
    help="Such as minari; see --list. Default: by the ending of OUT, such as .jsonl.",
)
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="OUT",
    type=click.Path(),
    help="A new directory, or file.",
)
@selection_options
@click.option(
    "--set",
    "options",
    type=EnvArg("kind=arrow"),
    multiple=True,
    metavar="K=V",
    help="An option of the format, such as kind=arrow of minari; docs/EXPORT.md has them.",
)
@click.option("--strict", is_flag=True, help="Refuse what FORMAT cannot say all of.")
@click.option("--list", is_flag=True, is_eager=True, expose_value=False, callback=_list, help="Show the formats.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
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
    """Write episodes of the trace in DIR to OUT, for another package to read.

    Says what of the trace FORMAT has no place for, and how to load it. OUT is there when it is complete. Episodes that
    are being recorded are left out.

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
    with show.ProgressLine(quiet=quiet) as progress:

        def on_progress(done: int, total: int) -> None:
            progress.update(f"{show.count(done)} of {show.count(total, 'step')}", done / max(1, total))

        report = gym_trace.export(view, output, chosen, strict=strict, on_progress=on_progress, **dict(options))
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
        show.line("note", f"the format is {report.format}, by the ending of OUT; --to chooses another")
    if report.running:
        show.line("note", f"{show.count(report.running, 'episode')} left out, being recorded still")
    for loss in report.lost:
        show.line("lost", loss.why)
    click.echo("to load it:")
    for line in report.how_to_load.splitlines():
        click.echo(f"    {show.printable(line)}")
