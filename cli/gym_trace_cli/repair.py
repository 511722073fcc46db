"""gym-trace repair"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

import gym_trace
from gym_trace_cli import show
from gym_trace_cli.check import report_as_json
from gym_trace_cli.completion import TraceDirectory
from gym_trace_cli.exit_codes import ERROR, FINE
from gym_trace_cli.help import headed, option, section
from gym_trace_cli.options import PATH, json_option, quiet_option
from gym_trace_cli.progress import ProgressLine

if TYPE_CHECKING:
    from gym_trace.integrity.repair import LostSteps, RepairReport

_LISTED = 20  # runs of lost steps that are named one by one


@headed("repair")
@click.argument("directory", metavar="DIR", type=TraceDirectory())
@section(
    "Output",
    option("-o, --output NEW", "New directory.", PATH, required=True),
    option("--salvage", "Keep the intact columns of damaged chunks."),
    quiet_option,
    json_option,
)
@click.pass_context
def command(ctx: click.Context, /, directory: str, output: str, salvage: bool, quiet: bool, as_json: bool) -> None:
    """Write a clean copy of everything readable to NEW and list what is lost.
    Exit code: 1 if no episode is readable; nothing is written then.

    Without --salvage a damaged chunk is lost: up to 1 MiB of values, 24 MiB of
    images. With it, lost columns are NaN (floats) or absent; the fact "salvaged"
    of NEW names them. DIR is never modified.

    \b
    gym-trace repair traces/cartpole -o traces/repaired
    """
    with ProgressLine(quiet=quiet) as progress:
        report = gym_trace.repair_trace(directory, output, on_progress=progress.update_bytes, salvage=salvage)
    if as_json:
        click.echo(json.dumps(_as_json(report)))
        ctx.exit(FINE if report.writers else ERROR)
    for remark in report.found.remarks:
        click.echo(f"note: {show.printable(remark)}")
    _print_losses(report)
    if not report.writers:
        click.echo(f"no readable episode; {show.printable(output)} not written")
        ctx.exit(ERROR)
    writers = show.count(len(report.writers), "writer")
    kept = f"{show.count(report.found.episodes, 'episode')}, {show.count(report.steps, 'step')} of {writers}"
    click.echo(f"kept in {show.printable(output)}: {kept}")


def _as_json(report: RepairReport) -> dict[str, Any]:
    losses = [
        {"damage": loss.damage._asdict(), "exact": loss.exact, "steps": [steps._asdict() for steps in loss.steps]}
        for loss in report.losses
    ]
    return {
        "directory": str(report.destination),
        "writers": report.writers,
        "episodes": report.found.episodes,
        "steps": report.steps,
        "losses": losses,
        "salvaged": [
            {"damage": one.damage._asdict(), "columns": one.columns, "steps": [steps._asdict() for steps in one.steps]}
            for one in report.salvaged
        ],
        "orphans": [steps._asdict() for steps in report.orphans],
        "found": report_as_json(report.found),
    }


def _print_losses(report: RepairReport) -> None:
    costly = [loss.damage for loss in report.losses] + [kept.damage for kept in report.salvaged]
    for damage in report.found.damages:
        if damage not in costly:
            click.echo(f"{show.damage(*damage)} (no step is lost by it)")
    for loss in report.losses:
        click.echo(show.damage(*loss.damage))
        _print_steps(loss.steps)
        if not loss.exact:
            click.echo(f"  lost: {'more ' if loss.steps else ''}unidentified steps")
    for kept in report.salvaged:
        click.echo(show.damage(*kept.damage))
        click.echo(show.printable(f"  kept without {', '.join(kept.columns)}"))
        _print_steps(kept.steps, "without them")
    if report.orphans:
        click.echo("skipped, because the observation before them is lost:")
        _print_steps(report.orphans)
    if not (report.losses or report.salvaged):
        click.echo("nothing is lost")


def _print_steps(runs: list[LostSteps], what: str = "lost") -> None:
    for run in runs[:_LISTED]:
        steps = (
            f"step {run.first_step}"
            if run.steps == 1
            else f"steps {run.first_step} to {run.first_step + run.steps - 1}"
        )
        click.echo(f"  {what}: episode {run.episode_id} of {run.writer}, {steps}")
    if len(runs) > _LISTED:
        rest = runs[_LISTED:]
        steps = show.count(sum(run.steps for run in rest), "step")
        click.echo(f"  {what}: {steps} more of {show.count(len({run[:2] for run in rest}), 'episode')}")
