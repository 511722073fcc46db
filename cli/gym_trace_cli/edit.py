"""gym-trace edit: the group, and merge, split and filter; edit_whole.py has the others"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from gym_trace_cli import show
from gym_trace_cli.completion import TraceDirectory
from gym_trace_cli.options import TextOption
from gym_trace_cli.selection import Selection, selection_options

if TYPE_CHECKING:
    from gym_trace.edit import EditReport


@click.group("edit", short_help="Make new traces of recorded ones: merge, split, filter, drop, compact.")
def command() -> None:
    """Make new traces of recorded ones. What is given is never changed, but with --in-place, and by annotate.

    Seeds, generator states, times, outcomes, writers and the ids of episodes stay as they were recorded, so that a
    replay of the new trace verifies. The new one is there when it is complete; what a killed edit leaves is called
    .NEW.….part, and can be removed.
    """


output_option = click.option(
    "-o", "--output", required=True, metavar="NEW", type=click.Path(), help="A new directory for the result."
)
output_or_option = click.option(
    "-o", "--output", metavar="NEW", type=click.Path(), help="A new directory for the result."
)
in_place_option = click.option(
    "--in-place",
    is_flag=True,
    help="Put the result in the place of DIR, at once: killed at any moment, the old trace or the new one is there.",
)
quiet_option = click.option("--quiet", is_flag=True, help="No progress.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def check_where(output: str | None, in_place: bool) -> None:
    """Raises UsageError unless it is one of both."""
    if in_place == (output is not None):
        raise click.UsageError("say where the result goes: -o NEW, or --in-place, and not both")


@command.command("merge", short_help="Several traces as one.")
@click.argument("directories", metavar="A B...", nargs=-1, required=True, type=TraceDirectory())
@output_option
@quiet_option
@json_option
def merge(directories: tuple[str, ...], output: str, quiet: bool, as_json: bool) -> None:
    """Write the episodes of the traces A, B … to NEW.

    A writer that several of them have, as the parts of a trace that was split, is one writer again; an episode that
    several of them have is kept once, and is an error if it is not the same. Of a trace that is being recorded the
    episodes that are over are taken.
    """
    import gym_trace.edit

    with show.ProgressLine(quiet=quiet) as progress:
        report = gym_trace.edit.merge(directories, output, on_progress=progress.update_bytes)
    tell(report, as_json)


@command.command("filter", short_help="Some of the episodes.")
@click.argument("directory", metavar="DIR", type=TraceDirectory())
@output_or_option
@in_place_option
@selection_options
@quiet_option
@json_option
def filter_(
    directory: str, output: str | None, in_place: bool, selection: Selection, quiet: bool, as_json: bool
) -> None:
    """Write some of the episodes of the trace in DIR to NEW, in the order in which they were recorded.

    Episodes that are being recorded are left out. With --in-place the others are gone for good.

    \b
    gym-trace edit filter traces/all -o traces/good --where 'return > 100 and outcome == "truncated"'
    gym-trace edit filter traces/all -o traces/best --sort -return --limit 10
    """
    import gym_trace
    import gym_trace.edit

    check_where(output, in_place)
    view = selection.some(gym_trace.open_trace(directory))
    with show.ProgressLine(quiet=quiet) as progress:
        report = gym_trace.edit.filter(view, output, in_place=in_place, on_progress=progress.update_bytes)
    tell(report, as_json)


class Fractions(TextOption):
    """--fractions: train=0.8,test=0.2"""

    name = "fractions"

    def parsed(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, float]:
        fractions: dict[str, float] = {}
        for item in value.split(","):
            name, _, share = item.partition("=")
            try:
                fractions[name.strip()] = float(share)
            except ValueError:
                self.fail(f"{item!r} is not NAME=SHARE; write train=0.8,test=0.2", param, ctx)
        if len(fractions) <= value.count(","):
            self.fail(f"{value!r} names a part twice", param, ctx)
        return fractions


@command.command("split", short_help="One trace as several.")
@click.argument("directory", metavar="DIR", type=TraceDirectory())
@output_option
@click.option(
    "--by",
    type=click.Choice(["split", "writer", "outcome", "seed-hash"]),
    help="What decides the part of an episode. Default: seed-hash with --fractions, otherwise split (train, eval …).",
)
@click.option("--fractions", type=Fractions(), metavar="N=X,...", help="Of seed-hash, such as train=0.8,test=0.2.")
@click.option("--seed", type=int, metavar="S", help="Of seed-hash: another number, other parts. Default: 0.")
@quiet_option
@json_option
def split(
    directory: str,
    output: str,
    by: str | None,
    fractions: dict[str, float] | None,
    seed: int | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Write the episodes of the trace in DIR to several new traces, NEW/PART each.

    With --fractions an episode goes where a hash of its seed says: those of one seed into the same part, whatever else
    is recorded, now or later. Sizes are therefore not exact. 'edit merge NEW/*' makes one trace of the parts again.
    """
    import gym_trace.edit

    if seed is not None and fractions is None:
        raise click.UsageError("--seed is that of --fractions; pass both")
    if (by == "seed-hash") != (fractions is not None) and by is not None:
        raise click.UsageError("--fractions and --by seed-hash go together, such as --fractions train=0.8,test=0.2")
    with show.ProgressLine(quiet=quiet) as progress:
        reports = gym_trace.edit.split(directory, output, by, fractions, seed or 0, on_progress=progress.update_bytes)
    if as_json:
        click.echo(json.dumps({name: _as_json(report) for name, report in reports.items()}))
    for report in () if as_json else reports.values():
        tell(report, as_json)


def tell(report: EditReport, as_json: bool) -> None:
    """Says what was written."""
    if as_json:
        click.echo(json.dumps(_as_json(report)))
    else:
        episodes, steps = show.count(report.episodes, "episode"), show.count(report.steps, "step")
        kept = f"{episodes}, {steps} of {show.count(len(report.writers), 'writer')}, {show.size(report.bytes)}"
        click.echo(show.printable(f"kept in {report.destination}: {kept}"))
        if report.duplicates:
            click.echo(f"note: {show.count(report.duplicates, 'episode')} in more than one of them, kept once")
        if report.running:
            click.echo(f"note: {show.count(report.running, 'episode')} left out, being recorded still")


def _as_json(report: EditReport) -> dict[str, Any]:
    return {**asdict(report), "destination": str(report.destination)}
