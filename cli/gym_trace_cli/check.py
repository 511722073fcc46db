"""gym-trace check and gym-trace edit repair"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

import gym_trace
from gym_trace.storage import is_url
from gym_trace_cli import show
from gym_trace_cli.exit_codes import DAMAGED, ERROR, FINE
from gym_trace_cli.help import headed, option, section
from gym_trace_cli.options import PATH, json_option, trace_argument
from gym_trace_cli.progress import ProgressLine

if TYPE_CHECKING:
    from gym_trace.results import CheckReport, LostSteps, RepairReport

_LISTED = 20  # runs of lost steps that are printed one by one


@headed("check")
@trace_argument
@section("Output", option("--quiet", "Print only damage."), json_option)
def check(directory: str, quiet: bool, as_json: bool) -> int:
    """Read every byte of a trace and locate damage by file and byte.
    Exit code: 0 intact, 5 damaged.

    Torn ends and unsealed batches of killed writers are notes, not damage.
    Damage that parity restores is listed separately; it loses no step.

    \b
    gym-trace check traces/cartpole
    """
    with ProgressLine(quiet=quiet) as progress:
        report = gym_trace.check_trace(directory, on_progress=progress.update_bytes)
    is_damaged = bool(report.damages or report.healed)
    if as_json:
        show.json_line({"directory": directory, **_check_json(report)})
        return DAMAGED if is_damaged else FINE
    for damage in (*report.damages, *report.healed):
        click.echo(show.damage(*damage))
    if not quiet:
        for note in report.remarks:
            click.echo(f"note: {show.printable(note)}")
        # A trace of rings alone has no files to count.
        read = f"{show.count(report.files, 'file')}, {show.size(report.bytes)}: " if report.files else ""
        click.echo(
            f"{read}{show.count(report.chunks, 'chunk')}, {show.count(report.episodes, 'episode')}, "
            f"{show.count(report.steps, 'step')} can be read"
        )
    if report.damages:
        command = show.command("edit", "repair", directory, "-o", "NEW")
        click.echo(f"{show.count(len(report.damages), 'damaged place')}; {command} saves the rest")
    if report.healed:
        fix = f"{show.command('edit', 'repair', directory, '--in-place')} writes them back"
        if is_url(directory):
            fix = f"{show.command('pull', directory, 'NEW')} writes them into the copy"
        click.echo(f"{show.count(len(report.healed), 'damaged place')} restored from parity; {fix}")
    if is_damaged:
        return DAMAGED
    if not quiet:
        click.echo("no damage")
    return FINE


@headed("repair")
@trace_argument
@section(
    "Output",
    option("-o, --output NEW", "New directory.", PATH),
    option("--in-place", "Restore the original bytes of DIR from parity."),
    option("--salvage", "With -o: keep the intact columns of damaged chunks."),
    json_option,
)
def repair(directory: str, output: str | None, in_place: bool, salvage: bool, as_json: bool) -> int:
    """Write a clean copy of everything readable to NEW and list what is lost,
    or restore damaged bytes in place. Exit code: 1 if no episode is readable
    (nothing is written then), 5 if --in-place leaves damage.

    Without --salvage a damaged chunk is lost: up to 1 MiB of values, 24 MiB of
    images. With it, lost columns are NaN (floats) or absent; the fact "salvaged"
    of NEW names them. Only --in-place modifies DIR: it puts the recorded bytes
    back into damaged batches, as far as their parity allows.

    \b
    gym-trace edit repair traces/cartpole -o traces/repaired
    """
    if in_place == (output is not None):
        raise click.UsageError("pass either -o NEW or --in-place")
    if output is None:
        if salvage:
            raise click.UsageError("--salvage: needs -o NEW")
        return _heal(directory, as_json)
    with ProgressLine() as progress:
        report = gym_trace.repair_trace(directory, output, on_progress=progress.update_bytes, salvage=salvage)
    if as_json:
        show.json_line(_repair_json(report))
        return FINE if report.writers else ERROR
    for note in report.found.remarks:
        click.echo(f"note: {show.printable(note)}")
    _print_losses(report)
    if not report.writers:
        click.echo(f"no readable episode; {show.printable(output)} not written")
        return ERROR
    writers = show.count(len(report.writers), "writer")
    kept = f"{show.count(report.found.episodes, 'episode')}, {show.count(report.steps, 'step')} of {writers}"
    click.echo(f"kept in {show.printable(output)}: {kept}")
    return FINE


def _heal(directory: str, as_json: bool) -> int:
    with ProgressLine() as progress:
        report = gym_trace.heal_trace(directory, on_progress=progress.update_bytes)
    code = DAMAGED if report.hopeless else FINE
    if as_json:
        show.json_line({
            "directory": directory, "files": report.files, "bytes": report.bytes,
            "healed": [damage._asdict() for damage in report.healed],
            "hopeless": [damage._asdict() for damage in report.hopeless],
            "unprotected": report.unprotected,
        })  # fmt: skip
        return code
    for damage in (*report.healed, *report.hopeless):
        click.echo(show.damage(*damage))
    if report.unprotected:
        click.echo(f"note: {show.count(len(report.unprotected), 'file')} without parity, written by an older release")
    if report.hopeless:
        command = show.command("edit", "repair", directory, "-o", "NEW")
        click.echo(f"{show.count(len(report.hopeless), 'damaged place')} beyond parity; {command} saves the rest")
    restored = show.count(len(report.healed), "damaged place") if report.healed else "nothing"
    click.echo(f"{show.count(report.files, 'file')}, {show.size(report.bytes)}: {restored} restored")
    return code


def _check_json(report: CheckReport) -> dict[str, Any]:
    """Return the report as plain data."""
    counts = {name: getattr(report, name) for name in ("files", "bytes", "chunks", "episodes", "steps")}
    damages = {name: [damage._asdict() for damage in getattr(report, name)] for name in ("damages", "healed")}
    return counts | damages | {"remarks": report.remarks}


def _repair_json(report: RepairReport) -> dict[str, Any]:
    def plain(runs: list[LostSteps]) -> list[dict[str, Any]]:
        return [run._asdict() for run in runs]

    return {
        "directory": str(report.destination),
        "writers": report.writers,
        "episodes": report.found.episodes,
        "steps": report.steps,
        "losses": [
            {"damage": loss.damage._asdict(), "exact": loss.exact, "steps": plain(loss.steps)} for loss in report.losses
        ],
        "salvaged": [
            {"damage": chunk.damage._asdict(), "columns": chunk.columns, "steps": plain(chunk.steps)}
            for chunk in report.salvaged
        ],
        "orphans": plain(report.orphans),
        "found": _check_json(report.found),
    }


def _print_losses(report: RepairReport) -> None:
    with_losses = [loss.damage for loss in report.losses] + [chunk.damage for chunk in report.salvaged]
    for damage in report.found.damages:
        if damage not in with_losses:
            click.echo(f"{show.damage(*damage)} (no step is lost by it)")
    for loss in report.losses:
        click.echo(show.damage(*loss.damage))
        _print_steps(loss.steps)
        if not loss.exact:
            click.echo(f"  lost: {'more ' if loss.steps else ''}unidentified steps")
    for chunk in report.salvaged:
        click.echo(show.damage(*chunk.damage))
        click.echo(show.printable(f"  kept without {', '.join(chunk.columns)}"))
        _print_steps(chunk.steps, "without them")
    if report.orphans:
        click.echo("skipped steps, as the observation before them is lost:")
        _print_steps(report.orphans)
    if not (report.losses or report.salvaged):
        click.echo("nothing is lost")


def _print_steps(runs: list[LostSteps], label: str = "lost") -> None:
    for run in runs[:_LISTED]:
        last = run.first_step + run.steps - 1
        steps = f"step {last}" if run.steps == 1 else f"steps {run.first_step} to {last}"
        click.echo(f"  {label}: episode {run.episode_id} of {run.writer}, {steps}")
    if len(runs) > _LISTED:
        rest = runs[_LISTED:]
        steps = show.count(sum(run.steps for run in rest), "step")
        click.echo(f"  {label}: {steps} more of {show.count(len({run[:2] for run in rest}), 'episode')}")
