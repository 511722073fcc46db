"""gym-trace edit with its commands"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import click

import gym_trace
from gym_trace.storage import LocalStorage, is_url
from gym_trace_cli import show
from gym_trace_cli.check import repair
from gym_trace_cli.completion import TraceDirectory
from gym_trace_cli.help import Group, Parsed, bundle, option, section
from gym_trace_cli.options import PATH, FactArg, json_option, named_callable, trace_argument
from gym_trace_cli.progress import ProgressLine
from gym_trace_cli.selection import Selection, selection_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from gym_trace.edit import EditReport


def _fractions(value: str) -> dict[str, float]:
    """Parse --fractions: train=0.8,test=0.2"""
    fractions: dict[str, float] = {}
    for item in value.split(","):
        name, _, share = item.partition("=")
        try:
            fractions[name.strip()] = float(share)
        except ValueError:
            raise click.BadParameter(f"{item!r} is not NAME=SHARE; write train=0.8,test=0.2") from None
    if len(fractions) <= value.count(","):
        raise click.BadParameter(f"{value!r} names a part twice")
    return fractions


def _pair(value: str, form: str, example: str) -> tuple[str, str]:
    """Split LEFT=RIGHT. form, example: for the error."""
    left, equals, right = value.partition("=")
    if not (left and equals and right):
        raise click.BadParameter(f"{value!r} is not of the form {form}, such as {example}")
    return left, right


def _column_names(value: str) -> tuple[str, list[str]]:
    """Parse COLUMN=NAME,NAME…"""
    column, names = _pair(value, "COLUMN=NAME,NAME", "observations=cart_x,cart_v")
    return column, [name.strip() for name in names.split(",")]


def _column_function(value: str) -> tuple[str, Any]:
    """Parse COLUMN=MODULE:FUNCTION; import the function."""
    column, function = _pair(value, "COLUMN=MODULE:FUNCTION", "rewards=mine:clipped")
    return column, named_callable(function)


def _new_name(value: str) -> tuple[str, str]:
    """Parse OLD=NEW."""
    return _pair(value, "OLD=NEW", "value=critic")


class _Result(NamedTuple):
    """Destination of an edit, and how to report it. in_place: None for edits that always make a new trace."""

    output: str | None
    as_json: bool
    in_place: bool | None = None

    @classmethod
    def checked(cls, **options: Any) -> _Result:
        if options["in_place"] == (options["output"] is not None):
            raise click.UsageError("pass either -o NEW or --in-place")
        return cls(**options)

    def call(self, name: str, *arguments: Any, counts_steps: bool = False, **options: Any) -> Any:
        """Call a function of gym_trace.edit with a progress line, and return its result."""
        import gym_trace.edit

        in_place = {} if self.in_place is None else {"in_place": self.in_place}
        with ProgressLine() as progress:
            on_progress = progress.counting("step") if counts_steps else progress.update_bytes
            edit = getattr(gym_trace.edit, name)
            return edit(*arguments, destination=self.output, on_progress=on_progress, **in_place, **options)

    def report(self, name: str, *arguments: Any, counts_steps: bool = False) -> EditReport:
        """Call a function of gym_trace.edit, and print and return its report."""
        report: EditReport = self.call(name, *arguments, counts_steps=counts_steps)
        if self.as_json:
            show.json_line(_plain(report))
        else:
            _print_report(report)
        return report


_new_options = section(
    "Output",
    bundle("result", _Result, option("-o, --output NEW", "New directory.", PATH, required=True), json_option),
)
_new_or_in_place_options = section(
    "Output",
    bundle(
        "result",
        _Result.checked,
        option("-o, --output NEW", "New directory.", PATH),
        option("--in-place", "Replace DIR atomically."),
        json_option,
    ),
)


@click.group("edit", cls=Group)
def command() -> None:
    """Merge, split, filter or repair traces, and change their columns.

    Only --in-place and annotate modify a trace. Seeds, generator states, times,
    outcomes, writers and episode ids are kept, so the result still verifies.
    A killed edit leaves .NEW.….part, which the same edit removes.
    """


@command.command("merge")
@click.argument("directories", metavar="A B...", nargs=-1, required=True, type=TraceDirectory())
@_new_options
def merge(directories: tuple[str, ...], result: _Result) -> None:
    """Merge several traces into one.

    Parts of a split trace become one again. An episode that is in several traces is
    kept once, and must be equal in all. Skips episodes that are still being recorded.

    \b
    gym-trace edit merge traces/monday traces/tuesday -o traces/all
    """
    result.report("merge", directories)


@command.command("filter")
@trace_argument
@_new_or_in_place_options
@selection_options
def filter_(directory: str, result: _Result, selection: Selection) -> None:
    """Keep some episodes, in recorded order.

    Skips episodes that are still being recorded.

    \b
    gym-trace edit filter traces/all -o traces/good --where 'return > 100'
    gym-trace edit filter traces/all -o traces/best --sort -return --limit 10
    """
    result.report("filter", selection.view_or_error(gym_trace.open_trace(directory)))


@command.command("split")
@trace_argument
@section(
    "Parts",
    option(
        "--by NAME", "split, writer, outcome or seed-hash. Default: split.", ["split", "writer", "outcome", "seed-hash"]
    ),
    option("--fractions N=X,...", "By seed-hash, e.g. train=0.8,test=0.2.", _fractions),
    option("--seed S", "Seed of --fractions. Default: 0.", int),
)
@_new_options
def split(
    directory: str, by: str | None, fractions: dict[str, float] | None, seed: int | None, result: _Result
) -> None:
    """Split a trace into several, NEW/PART each.

    With --fractions, the hash of an episode's seed decides: equal seeds go to the
    same part, in every trace. Sizes are approximate.

    \b
    gym-trace edit split traces/all -o traces/parts --fractions train=0.8,test=0.2
    """
    if seed is not None and fractions is None:
        raise click.UsageError("--seed: needs --fractions; pass both")
    if (by == "seed-hash") != (fractions is not None) and by is not None:
        raise click.UsageError("--by seed-hash: needs --fractions; pass both, e.g. --fractions train=0.8,test=0.2")
    reports = result.call("split", directory, by=by, fractions=fractions, seed=seed or 0)
    if result.as_json:
        show.json_line({name: _plain(report) for name, report in reports.items()})
    for report in () if result.as_json else reports.values():
        _print_report(report)


@command.command("compact")
@trace_argument
@_new_or_in_place_options
def compact(directory: str, result: _Result) -> None:
    """Rewrite many small writers and batches into few files.

    \b
    gym-trace edit compact traces/all --in-place
    """
    trace = gym_trace.open_trace(directory)
    before = gym_trace.describe(trace, brief=True)["bytes"]
    report = result.report("compact", trace, counts_steps=True)
    if result.as_json:
        return
    now = ""
    if is_url(directory):  # which has sizes of files, not of the blocks of a disk
        files = LocalStorage(report.destination)
        now = f", now {show.size(sum(map(files.size, files.names())))}, as sizes of files"
    click.echo(f"before: {show.size(before)}{now}")


@command.command("drop")
@trace_argument
@section("Columns", option("--columns C,...", "infos, annotations or annotations.NAME.", required=True))
@_new_or_in_place_options
def drop(directory: str, columns: str, result: _Result) -> None:
    """Remove infos or annotations.

    \b
    gym-trace edit drop traces/all -o traces/small --columns infos,annotations.value
    """
    names = [name.strip() for name in columns.split(",") if name.strip()]
    result.report("drop", directory, names, counts_steps=True)


def _column_command(name: str, metavar: str, parse: Callable[[str], Any], help: str) -> None:
    """Add a command that edits columns."""

    @command.command(name, help=help)
    @trace_argument
    @click.argument("columns", metavar=metavar, nargs=-1, required=True, type=Parsed(parse))
    @_new_or_in_place_options
    def edit(directory: str, columns: tuple[tuple[str, Any], ...], result: _Result) -> None:
        by_name = dict(columns)
        if len(by_name) < len(columns):
            raise click.UsageError("a column is named twice")
        result.report(name, gym_trace.open_trace(directory), by_name)


_FUNCTION_HELP = """\
M:F is MODULE:FUNCTION, called with each Episode; it returns one row per step.
The new trace names the function."""
_column_command(
    "map",
    "COLUMN=M:F...",
    _column_function,
    f"""Compute rewards, infos or annotations by a function.

{_FUNCTION_HELP}

\b
gym-trace edit map traces/all -o traces/clipped rewards=mine:clipped""",
)
_column_command(
    "add",
    "NAME=M:F...",
    _column_function,
    f"""Add annotations that a function computes. 'annotations.' may be omitted.

{_FUNCTION_HELP}

\b
gym-trace edit add traces/all -o traces/more annotations.togo=mine:returns_to_go""",
)
_column_command(
    "rename",
    "OLD=NEW...",
    _new_name,
    """Rename annotations; other columns have fixed names.

'annotations.' may be omitted.

\b
gym-trace edit rename traces/all -o traces/new annotations.value=annotations.critic""",
)


@command.command("annotate")
@trace_argument
@section(
    "Facts",
    option("--fact K=V", "Set a fact, JSON or text (repeatable).", FactArg(), name="facts"),
    option("--names C=N,N", "Name a column's numbers or actions (repeatable).", _column_names),
    option("--unset K", "Remove a fact (repeatable)."),
)
@section("Output", json_option)
def annotate(
    directory: str,
    facts: tuple[tuple[str, Any], ...],
    names: tuple[tuple[str, list[str]], ...],
    unset: tuple[str, ...],
    as_json: bool,
) -> None:
    """Set, remove or show facts of a trace, kept in DIR/facts.json.

    Known facts: author, license, description, tags, homepage, citation,
    reference_scores, names. Any other name is allowed. --names adds to names.

    \b
    gym-trace edit annotate traces/all --fact author='Ada Lovelace' --fact license=MIT
    gym-trace edit annotate traces/all --fact 'tags=["expert", "v2"]'
    gym-trace edit annotate traces/all --fact 'reference_scores={"random": 22.0}'
    gym-trace edit annotate traces/all --names observations=cart_x,cart_v,angle,spin
    """
    import gym_trace.edit

    if names:
        known = gym_trace.open_trace(directory).facts.get("names")
        facts = (*facts, ("names", {**(known if isinstance(known, dict) else {}), **dict(names)}))
    if facts or unset:
        all_facts = gym_trace.edit.annotate(directory, dict(facts), unset=unset)
    else:
        all_facts = gym_trace.open_trace(directory).facts
    if as_json:
        show.json_line(all_facts)
        return
    for key, value in all_facts.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        click.echo(show.printable(f"{key}: {text}"))
    if not all_facts:
        click.echo("no facts; add some with --fact")


command.add_command(repair)


def _print_report(report: EditReport) -> None:
    episodes, steps = show.count(report.episodes, "episode"), show.count(report.steps, "step")
    kept = f"{episodes}, {steps} of {show.count(len(report.writers), 'writer')}, {show.size(report.bytes)}"
    click.echo(show.printable(f"kept in {report.destination}: {kept}"))
    if report.duplicates:
        click.echo(f"note: {show.count(report.duplicates, 'duplicate episode')} kept once")
    if report.running:
        click.echo(f"note: {show.count(report.running, 'running episode')} skipped")


def _plain(report: EditReport) -> dict[str, Any]:
    return {**asdict(report), "destination": str(report.destination)}
