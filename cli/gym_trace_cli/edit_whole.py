"""gym-trace edit with all its commands; in this file compact, drop and annotate, which take a trace as a whole"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

from gym_trace_cli import show
from gym_trace_cli.completion import TraceDirectory
from gym_trace_cli.edit import (
    check_where,
    command,
    in_place_option,
    json_option,
    output_or_option,
    quiet_option,
    tell,
)
from gym_trace_cli.options import TextOption


def _steps_on(progress: show.ProgressLine) -> Callable[[int, int], None]:
    return lambda done, total: progress.update(f"{done:,} of {total:,} steps", done / max(1, total))


@command.command("compact", short_help="Many small writers and batches in few files.")
@click.argument("directory", metavar="DIR", type=TraceDirectory())
@output_or_option
@in_place_option
@quiet_option
@json_option
def compact(directory: str, output: str | None, in_place: bool, quiet: bool, as_json: bool) -> None:
    """Write the trace in DIR anew, in few files and well-filled chunks.

    Every episode keeps its writer, what that says of itself, its id and its place. What lies beside the trace stays
    there with --in-place.
    """
    import gym_trace
    import gym_trace.edit

    check_where(output, in_place)
    trace = gym_trace.open_trace(directory)
    before = trace.bytes_on_disk
    with show.ProgressLine(quiet=quiet) as progress:
        report = gym_trace.edit.compact(trace, output, in_place=in_place, on_progress=_steps_on(progress))
    tell(report, as_json)
    if not as_json:
        click.echo(f"it took {show.size(before)} before")


@command.command("drop", short_help="Leave out infos or annotations.")
@click.argument("directory", metavar="DIR", type=TraceDirectory())
@click.option(
    "--columns",
    required=True,
    metavar="C,...",
    help="infos, annotations, or annotations.NAME. A trace is made of the others, which stay.",
)
@output_or_option
@in_place_option
@quiet_option
@json_option
def drop(directory: str, columns: str, output: str | None, in_place: bool, quiet: bool, as_json: bool) -> None:
    """Write the trace in DIR without some of its columns.

    \b
    gym-trace edit drop traces/all -o traces/small --columns infos,annotations.value
    """
    import gym_trace.edit

    check_where(output, in_place)
    names = [name.strip() for name in columns.split(",") if name.strip()]
    with show.ProgressLine(quiet=quiet) as progress:
        report = gym_trace.edit.drop(directory, names, output, in_place=in_place, on_progress=_steps_on(progress))
    tell(report, as_json)


class Fact(TextOption):
    """KEY=VALUE, the value as JSON if it is JSON and fits the key, and as text if not."""

    name = "key=value"

    def parsed(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        from gym_trace.format.facts import KNOWN, SPELT

        key, equals, text = value.partition("=")
        if not (key and equals):
            self.fail(f"{value!r} is not of the form KEY=VALUE, such as author='Ada Lovelace'", param, ctx)
        key = SPELT.get(key, key)
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return key, text
        fits = KNOWN[key][1] if key in KNOWN else lambda _: True
        return key, text if not fits(found) and fits(text) else found


@command.command("annotate", short_help="Say who made the trace, its licence, tags and the like.")
@click.argument("directory", metavar="DIR", type=TraceDirectory())
@click.option(
    "--set",
    "facts",
    type=Fact(),
    multiple=True,
    metavar="K=V",
    help="author, license, description, tags, homepage, citation, reference_scores, or any other; V is JSON, or text.",
)
@click.option("--unset", multiple=True, metavar="K", help="Say this no more.")
@json_option
def annotate(directory: str, facts: tuple[tuple[str, Any], ...], unset: tuple[str, ...], as_json: bool) -> None:
    """Have the trace in DIR say something of itself, in facts.json beside its files; and show what it says.

    \b
    gym-trace edit annotate traces/all --set author='Ada Lovelace' --set license=MIT --set 'tags=["expert", "v2"]'
    gym-trace edit annotate traces/all --set 'reference_scores={"random": 22.0, "expert": 500.0}'
    """
    import gym_trace
    import gym_trace.edit

    if facts or unset:
        said = gym_trace.edit.annotate(directory, dict(facts), unset=unset)
    else:
        said = gym_trace.open_trace(directory).facts
    if as_json:
        click.echo(json.dumps(said))
        return
    for key, value in said.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        click.echo(show.printable(f"{key}: {text}"))
    if not said:
        click.echo("it says nothing of itself; see --help for what it could")
