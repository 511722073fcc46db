"""gym-trace export and gym-trace import"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import gym_trace
from gym_trace.errors import InvalidOption
from gym_trace_cli import show
from gym_trace_cli.completion import formats
from gym_trace_cli.help import headed, option, printing_option, section
from gym_trace_cli.options import PATH, POSITIVE, EnvArg, json_option, quiet_option, trace_argument
from gym_trace_cli.progress import ProgressLine
from gym_trace_cli.selection import Selection, selection_options

if TYPE_CHECKING:
    from gym_trace.results import ExportReport, ImportReport


def _set_option(example: str) -> Callable[[Any], Any]:
    return option("--set K=V", "Format option, see the format's page (repeatable).", EnvArg(example), name="options")


def _list_option(kind: str) -> Callable[[Any], Any]:
    """Return --list, which prints the formats and exits. kind: "exporters" or "importers"."""

    def print_list() -> None:
        from gym_trace import formats as library

        show.fields(library.listed(getattr(library, kind)()))

    return printing_option("--list", "List the formats.", print_list)


@headed("export")
@trace_argument
@section(
    "Output",
    option("-o, --output OUT", "New directory or file.", PATH, required=True),
    option("--to FORMAT", "Format. Default: by OUT, e.g. .jsonl.", name="form", shell_complete=formats),
    _set_option("kind=arrow"),
    option("--strict", "Fail if FORMAT cannot store everything."),
    _list_option("exporters"),
    quiet_option,
    json_option,
)
@selection_options
def export(
    directory: str,
    form: str | None,
    output: str,
    selection: Selection,
    options: tuple[tuple[str, Any], ...],
    strict: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Write episodes for another package to read.

    Lists what FORMAT cannot store and how to load OUT. Skips episodes that are
    still being recorded.

    \b
    gym-trace export traces/cartpole --to minari -o ~/.minari/datasets/cartpole/mine-v0
    gym-trace export traces/cartpole --to parquet -o tables --where 'return > 100'
    gym-trace export traces/cartpole -o steps.jsonl
    """
    from gym_trace.formats import format_for

    try:
        chosen = format_for(Path(output)) if form is None else form
    except InvalidOption as error:
        raise click.UsageError(str(error)) from error
    view = selection.view_or_error(gym_trace.open_trace(directory))
    with ProgressLine(quiet=quiet) as progress:
        counting = progress.counting("step")
        report = gym_trace.export(view, output, chosen, strict=strict, on_progress=counting, **dict(options))
    if as_json:
        lost = [loss._asdict() for loss in report.lost]
        show.json_line({**vars(report), "path": str(report.path), "lost": lost})
        return
    if quiet:
        return
    click.echo(
        f"{show.count(report.episodes, 'episode')}, {show.count(report.steps, 'step')} "
        f"exported to {show.printable(report.path)} as {report.format}: {_figures(report)}"
    )
    if form is None:
        show.line("note", f"format {report.format}, by the ending of OUT; --to changes it")
    if report.running:
        show.line("note", f"{show.count(report.running, 'running episode')} skipped")
    for loss in report.lost:
        show.line("lost", loss.why)
    click.echo("to load it:")
    for line in report.how_to_load.splitlines():
        click.echo(f"    {show.printable(line)}")


@headed("import")
@click.argument("path", metavar="PATH", type=PATH)
@section(
    "Input",
    option("--from FORMAT", "Format. Default: detected.", name="form", shell_complete=formats),
    option("--map NAME=COLUMN,…", "Map table columns, e.g. obs=state,acts=action.", name="columns", multiple=True),
    _set_option("last_step=step"),
    option("--limit N", "Import the first N episodes.", POSITIVE),
    _list_option("importers"),
)
@section("Output", option("-o, --output DIR", "New directory.", PATH, required=True), quiet_option, json_option)
def import_(
    path: str,
    output: str,
    form: str | None,
    columns: tuple[str, ...],
    options: tuple[tuple[str, Any], ...],
    limit: int | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Convert a recording of another package, a directory or a file, to a trace.

    Arrays keep dtype, shape and bits. Missing values are not invented. PATH is
    never modified, executed or unpickled.

    \b
    gym-trace import ~/.minari/datasets/D4RL/pen/human-v2 -o traces/pen
    gym-trace import steps.parquet -o traces/robot --map obs=state,acts=action,episode=id
    """
    mapped = {"map": ",".join(columns)} if columns else {}
    with ProgressLine(quiet=quiet) as progress:
        counting = progress.counting()
        chosen = {**dict(options), **mapped}
        report = gym_trace.import_trace(path, output, form, limit=limit, on_progress=counting, **chosen)
    if as_json:
        plain = report.to_json()
        show.json_line({"directory": plain.pop("destination"), **plain})
        return
    if quiet:
        return
    for warning in report.warnings:
        show.line("warning", warning)
    videos = f", {show.count(len(report.videos), 'video')}" if report.videos else ""
    counts = f"{show.count(report.episodes, 'episode')}, {show.count(report.steps, 'step')}"
    writers = show.count(len(report.writers), "writer")
    where = f"{show.printable(' and '.join(report.kinds))}, imported to {show.printable(output)}"
    click.echo(f"{where}: {counts} of {writers}{videos}, {_figures(report)}")


def _figures(report: ExportReport | ImportReport) -> str:
    """Return the size, time and rate: 12.3 MB in 1.2 s, 83,000 steps/s."""
    rate = float(f"{report.steps / report.seconds:.2g}")
    return f"{show.size(report.bytes)} in {show.duration(report.seconds)}, {rate:,.0f} steps/s"
