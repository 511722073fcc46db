"""gym-trace check"""

from __future__ import annotations

import click

import gym_trace
from gym_trace_cli import show
from gym_trace_cli.exit_codes import DAMAGED


@click.command("check", short_help="Verify every checksum.")
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option("--quiet", is_flag=True, help="No progress, and nothing said of a trace without damage.")
@click.pass_context
def command(ctx: click.Context, /, directory: str, quiet: bool) -> None:
    """Read every byte of the trace in DIR and name what is damaged, by file and byte. Exits with 5 if anything is.

    What a killed recorder leaves behind (a torn end, an unsealed batch) is no damage and only mentioned.
    """
    with show.ProgressLine(quiet=quiet) as progress:
        report = gym_trace.check_trace(directory, on_progress=progress.update_bytes)
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
