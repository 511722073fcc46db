"""gym-trace import"""

from __future__ import annotations

import json

import click

from gym_trace_cli import show


@click.command("import", short_help="Write an old recording as a trace.")
@click.argument("path", metavar="PATH", type=click.Path())
@click.option("-o", "--output", required=True, metavar="DIR", type=click.Path(), help="A new directory for the trace.")
@click.option("--quiet", is_flag=True, help="No progress.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(path: str, output: str, quiet: bool, as_json: bool) -> None:
    """Write the recording in PATH, a directory of gym_recording or of OpenAI Gym's Monitor, as a trace to DIR.

    Arrays keep their dtype, shape and bits; of Monitor there are statistics and videos. PATH is never changed, and
    nothing is ever unpickled.
    """
    from gym_trace.interop.legacy.importing import import_recording  # here, so that --help does not wait for numpy

    with show.ProgressLine(quiet=quiet) as progress:

        def on_progress(done: int, total: int) -> None:
            progress.update(f"{show.count(done)} of {show.count(total, 'file')}", done / total)

        report = import_recording(path, output, on_progress=on_progress)
    if as_json:
        known = {name: getattr(report, name) for name in ("kinds", "writers", "episodes", "steps", "videos", "notes")}
        click.echo(json.dumps({"directory": str(report.destination), **known}))
        return
    for note in report.notes:
        click.echo(f"note: {show.printable(note)}")
    videos = f", {show.count(len(report.videos), 'video')}" if report.videos else ""
    counts = f"{show.count(report.episodes, 'episode')}, {show.count(report.steps, 'step')}"
    writers = show.count(len(report.writers), "writer")
    where = f"{' and '.join(report.kinds)}, imported to {show.printable(output)}"
    click.echo(f"{where}: {counts} of {writers}{videos}")
