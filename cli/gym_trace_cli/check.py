"""gym-trace check"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

import gym_trace
from gym_trace_cli import show
from gym_trace_cli.completion import TraceDirectory
from gym_trace_cli.exit_codes import DAMAGED, FINE

if TYPE_CHECKING:
    from gym_trace.integrity.scan import CheckReport


@click.command("check", short_help="Verify every checksum.")
@click.argument("directory", metavar="DIR", type=TraceDirectory())
@click.option("--quiet", is_flag=True, help="No progress, and nothing said of a trace without damage.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(ctx: click.Context, /, directory: str, quiet: bool, as_json: bool) -> None:
    """Read every byte of the trace in DIR and name what is damaged, by file and byte. Exits with 5 if anything is.

    What a killed recorder leaves behind (a torn end, an unsealed batch) is no damage and only mentioned.
    """
    with show.ProgressLine(quiet=quiet) as progress:
        report = gym_trace.check_trace(directory, on_progress=progress.update_bytes)
    if as_json:
        click.echo(json.dumps({"directory": directory, **report_as_json(report)}))
        ctx.exit(DAMAGED if report.damages else FINE)
    for damage in report.damages:
        click.echo(show.damage(*damage))
    if not quiet:
        for remark in report.remarks:
            click.echo(f"note: {show.printable(remark)}")
        click.echo(
            f"{show.count(report.files, 'file')}, {show.size(report.bytes)}: {show.count(report.chunks, 'chunk')}, "
            f"{show.count(report.episodes, 'episode')}, {show.count(report.steps, 'step')} can be read"
        )
    if report.damages:
        again = f"'gym-trace repair {show.printable(directory)} -o NEW'"
        click.echo(f"{show.count(len(report.damages), 'damaged place')}; {again} saves the rest")
        ctx.exit(DAMAGED)
    if not quiet:
        click.echo("no damage")


def report_as_json(report: CheckReport) -> dict[str, Any]:
    """What was found: damages as path, start, end and problem each."""
    counts = {name: getattr(report, name) for name in ("files", "bytes", "chunks", "episodes", "steps")}
    return counts | {"damages": [damage._asdict() for damage in report.damages], "remarks": report.remarks}
