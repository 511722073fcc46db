"""gym-trace check"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

import gym_trace
from gym_trace_cli import show
from gym_trace_cli.completion import TraceDirectory
from gym_trace_cli.exit_codes import DAMAGED, FINE
from gym_trace_cli.help import headed, option, section
from gym_trace_cli.options import json_option
from gym_trace_cli.progress import ProgressLine

if TYPE_CHECKING:
    from gym_trace.integrity.scan import CheckReport


@headed("check")
@click.argument("directory", metavar="DIR", type=TraceDirectory())
@section("Output", option("--quiet", "Print only damage."), json_option)
@click.pass_context
def command(ctx: click.Context, /, directory: str, quiet: bool, as_json: bool) -> None:
    """Read every byte of a trace and locate damage by file and byte.
    Exit code: 0 intact, 5 damaged.

    Traces of killed writers (torn end, unsealed batch) are not damaged, only noted.

    \b
    gym-trace check traces/cartpole
    """
    with ProgressLine(quiet=quiet) as progress:
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
    """Return the report as plain data."""
    counts = {name: getattr(report, name) for name in ("files", "bytes", "chunks", "episodes", "steps")}
    return counts | {"damages": [damage._asdict() for damage in report.damages], "remarks": report.remarks}
