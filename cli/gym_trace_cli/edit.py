"""gym-trace edit with its commands"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

import gym_trace
from gym_trace_cli import show
from gym_trace_cli.completion import TraceDirectory
from gym_trace_cli.help import Group, bundle, option, section
from gym_trace_cli.options import PATH, NamedCallable, TextOption, json_option, trace_argument
from gym_trace_cli.progress import ProgressLine
from gym_trace_cli.selection import Selection, selection_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from gym_trace.edit import EditReport


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


class Fact(TextOption):
    """KEY=VALUE; VALUE is JSON if that is valid for KEY, text otherwise."""

    name = "key=value"

    def parsed(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        from gym_trace.edit import fact_from_text

        key, equals, text = value.partition("=")
        if not (key and equals):
            self.fail(f"{value!r} is not of the form KEY=VALUE, such as author='Ada Lovelace'", param, ctx)
        return fact_from_text(key, text)


class ColumnFunction(TextOption):
    """COLUMN=MODULE:FUNCTION; imports the function."""

    name = "column=module:function"

    def parsed(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        column, equals, function = value.partition("=")
        if not (column and equals):
            self.fail(f"{value!r} is not of the form COLUMN=MODULE:FUNCTION, such as rewards=mine:clipped", param, ctx)
        return column, NamedCallable().parsed(function, param, ctx)


class NewName(TextOption):
    """OLD=NEW"""

    name = "old=new"

    def parsed(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        old, equals, new = value.partition("=")
        if not (old and equals and new):
            self.fail(f"{value!r} is not of the form OLD=NEW, such as value=critic", param, ctx)
        return old, new


_quiet_option = option("--quiet", "Hide progress.")
_new_options = section(
    "Output", option("-o, --output NEW", "New directory.", PATH, required=True), _quiet_option, json_option
)


def _destination(output: str | None, in_place: bool) -> dict[str, Any]:
    if in_place == (output is not None):
        raise click.UsageError("pass either -o NEW or --in-place")
    return {"destination": output, "in_place": in_place}


_new_or_in_place_options = section(
    "Output",
    bundle(
        "place",
        _destination,
        option("-o, --output NEW", "New directory.", PATH),
        option("--in-place", "Replace DIR atomically."),
    ),
    _quiet_option,
    json_option,
)


@click.group("edit", cls=Group)
def command() -> None:
    """Merge, split or filter traces, and change their columns.

    Only --in-place and annotate modify a trace. Seeds, generator states, times,
    outcomes, writers and episode ids are kept, so the result still verifies.
    A killed edit leaves .NEW.….part, which the same edit removes.
    """


@command.command("merge")
@click.argument("directories", metavar="A B...", nargs=-1, required=True, type=TraceDirectory())
@_new_options
def merge(directories: tuple[str, ...], output: str, quiet: bool, as_json: bool) -> None:
    """Merge several traces into one.

    Parts of a split trace become one again. Duplicate episodes are kept once, and
    must be equal. Skips episodes that are still being recorded.

    \b
    gym-trace edit merge traces/monday traces/tuesday -o traces/all
    """
    import gym_trace.edit

    with ProgressLine(quiet=quiet) as progress:
        report = gym_trace.edit.merge(directories, output, on_progress=progress.update_bytes)
    _print_report(report, as_json)


@command.command("filter")
@trace_argument
@_new_or_in_place_options
@selection_options
def filter_(directory: str, place: dict[str, Any], selection: Selection, quiet: bool, as_json: bool) -> None:
    """Keep some episodes, in recorded order.

    Skips episodes that are still being recorded.

    \b
    gym-trace edit filter traces/all -o traces/good --where 'return > 100'
    gym-trace edit filter traces/all -o traces/best --sort -return --limit 10
    """
    import gym_trace.edit

    view = selection.some(gym_trace.open_trace(directory))
    with ProgressLine(quiet=quiet) as progress:
        report = gym_trace.edit.filter(view, **place, on_progress=progress.update_bytes)
    _print_report(report, as_json)


@command.command("split")
@trace_argument
@section(
    "Parts",
    option(
        "--by NAME", "split, writer, outcome or seed-hash. Default: split.", ["split", "writer", "outcome", "seed-hash"]
    ),
    option("--fractions N=X,...", "By seed-hash, e.g. train=0.8,test=0.2.", Fractions()),
    option("--seed S", "Seed of --fractions. Default: 0.", int),
)
@_new_options
def split(
    directory: str,
    output: str,
    by: str | None,
    fractions: dict[str, float] | None,
    seed: int | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Split a trace into several, NEW/PART each.

    With --fractions, the hash of an episode's seed decides: equal seeds go to the
    same part, in every trace. Sizes are approximate.

    \b
    gym-trace edit split traces/all -o traces/parts --fractions train=0.8,test=0.2
    """
    import gym_trace.edit

    if seed is not None and fractions is None:
        raise click.UsageError("--seed: needs --fractions; pass both")
    if (by == "seed-hash") != (fractions is not None) and by is not None:
        raise click.UsageError("--by seed-hash: needs --fractions; pass both, e.g. --fractions train=0.8,test=0.2")
    with ProgressLine(quiet=quiet) as progress:
        reports = gym_trace.edit.split(directory, output, by, fractions, seed or 0, on_progress=progress.update_bytes)
    if as_json:
        show.json_line({name: _plain(report) for name, report in reports.items()})
    for report in () if as_json else reports.values():
        _print_report(report, as_json)


@command.command("compact")
@trace_argument
@_new_or_in_place_options
def compact(directory: str, place: dict[str, Any], quiet: bool, as_json: bool) -> None:
    """Rewrite many small writers and batches into few files.

    \b
    gym-trace edit compact traces/all --in-place
    """
    import gym_trace.edit

    trace = gym_trace.open_trace(directory)
    before = trace.bytes_on_disk
    with ProgressLine(quiet=quiet) as progress:
        report = gym_trace.edit.compact(trace, **place, on_progress=progress.counting("step"))
    _print_report(report, as_json)
    if not as_json:
        click.echo(f"before: {show.size(before)}")


@command.command("drop")
@trace_argument
@section("Columns", option("--columns C,...", "infos, annotations or annotations.NAME.", required=True))
@_new_or_in_place_options
def drop(directory: str, columns: str, place: dict[str, Any], quiet: bool, as_json: bool) -> None:
    """Remove infos or annotations.

    \b
    gym-trace edit drop traces/all -o traces/small --columns infos,annotations.value
    """
    import gym_trace.edit

    names = [name.strip() for name in columns.split(",") if name.strip()]
    with ProgressLine(quiet=quiet) as progress:
        report = gym_trace.edit.drop(directory, names, **place, on_progress=progress.counting("step"))
    _print_report(report, as_json)


@command.command("map")
@trace_argument
@click.argument("columns", metavar="COLUMN=M:F...", nargs=-1, required=True, type=ColumnFunction())
@_new_or_in_place_options
@selection_options
def map_(
    directory: str,
    columns: tuple[tuple[str, Any], ...],
    place: dict[str, Any],
    selection: Selection,
    quiet: bool,
    as_json: bool,
) -> None:
    """Compute rewards, infos or annotations by a function.

    M:F is MODULE:FUNCTION, called with each Episode; it returns one row per step.
    The new trace has the selected episodes, and names the function.

    \b
    gym-trace edit map traces/all -o traces/clipped rewards=mine:clipped
    """
    import gym_trace.edit

    _edit_columns(gym_trace.edit.map, directory, columns, place, selection, quiet, as_json)


@command.command("add")
@trace_argument
@click.argument("columns", metavar="NAME=M:F...", nargs=-1, required=True, type=ColumnFunction())
@_new_or_in_place_options
@selection_options
def add(
    directory: str,
    columns: tuple[tuple[str, Any], ...],
    place: dict[str, Any],
    selection: Selection,
    quiet: bool,
    as_json: bool,
) -> None:
    """Add annotations that a function computes.

    M:F is MODULE:FUNCTION, called with each Episode; it returns one row per step.
    The new trace has the selected episodes, and names the function.

    \b
    gym-trace edit add traces/all -o traces/more togo=mine:returns_to_go
    """
    import gym_trace.edit

    _edit_columns(gym_trace.edit.add, directory, columns, place, selection, quiet, as_json)


@command.command("rename")
@trace_argument
@click.argument("names", metavar="OLD=NEW...", nargs=-1, required=True, type=NewName())
@_new_or_in_place_options
@selection_options
def rename(
    directory: str,
    names: tuple[tuple[str, str], ...],
    place: dict[str, Any],
    selection: Selection,
    quiet: bool,
    as_json: bool,
) -> None:
    """Rename annotations; other columns have fixed names.

    The new trace has the selected episodes.

    \b
    gym-trace edit rename traces/all -o traces/new value=critic
    """
    import gym_trace.edit

    _edit_columns(gym_trace.edit.rename, directory, names, place, selection, quiet, as_json)


def _edit_columns(
    edit: Callable[..., EditReport],
    directory: str,
    columns: tuple[tuple[str, Any], ...],
    place: dict[str, Any],
    selection: Selection,
    quiet: bool,
    as_json: bool,
) -> None:
    by_name = dict(columns)
    if len(by_name) < len(columns):
        raise click.UsageError("a column is named twice")
    view = selection.some(gym_trace.open_trace(directory))
    with ProgressLine(quiet=quiet) as progress:
        report = edit(view, by_name, **place, on_progress=progress.update_bytes)
    _print_report(report, as_json)


@command.command("annotate")
@trace_argument
@section(
    "Facts",
    option("--set K=V", "Set a fact, JSON or text (repeatable).", Fact(), name="facts"),
    option("--unset K", "Remove a fact (repeatable)."),
)
@section("Output", json_option)
def annotate(directory: str, facts: tuple[tuple[str, Any], ...], unset: tuple[str, ...], as_json: bool) -> None:
    """Set, remove or show facts of a trace, kept in DIR/facts.json.

    Known facts: author, license, description, tags, homepage, citation,
    reference_scores. Any other name is allowed.

    \b
    gym-trace edit annotate traces/all --set author='Ada Lovelace' --set license=MIT
    gym-trace edit annotate traces/all --set 'tags=["expert", "v2"]'
    gym-trace edit annotate traces/all --set 'reference_scores={"random": 22.0}'
    """
    import gym_trace.edit

    if facts or unset:
        known = gym_trace.edit.annotate(directory, dict(facts), unset=unset)
    else:
        known = gym_trace.open_trace(directory).facts
    if as_json:
        show.json_line(known)
        return
    for key, value in known.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        click.echo(show.printable(f"{key}: {text}"))
    if not known:
        click.echo("no facts; add some with --set")


def _print_report(report: EditReport, as_json: bool) -> None:
    if as_json:
        show.json_line(_plain(report))
        return
    episodes, steps = show.count(report.episodes, "episode"), show.count(report.steps, "step")
    kept = f"{episodes}, {steps} of {show.count(len(report.writers), 'writer')}, {show.size(report.bytes)}"
    click.echo(show.printable(f"kept in {report.destination}: {kept}"))
    if report.duplicates:
        click.echo(f"note: {show.count(report.duplicates, 'duplicate episode')} kept once")
    if report.running:
        click.echo(f"note: {show.count(report.running, 'running episode')} skipped")


def _plain(report: EditReport) -> dict[str, Any]:
    return {**asdict(report), "destination": str(report.destination)}
