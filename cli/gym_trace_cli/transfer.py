"""gym-trace push and pull"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

import gym_trace
from gym_trace_cli import show
from gym_trace_cli.completion import TraceDirectory
from gym_trace_cli.exit_codes import DAMAGED, ERROR, FINE
from gym_trace_cli.help import headed, option, section
from gym_trace_cli.options import PATH, POSITIVE, json_option, quiet_option
from gym_trace_cli.progress import ProgressLine

if TYPE_CHECKING:
    from gym_trace.results import TransferReport

_options = section(
    "Copying",
    option("--dry-run", "Only list what would be copied."),
    json_option,
    quiet_option,
)


@headed("push")
@click.argument("directory", metavar="DIR", required=False, type=TraceDirectory())
@click.argument("url", metavar="URL", required=False, type=PATH)
@_options
@section("Uploads", option("-j, --workers N", "Files copied at the same time. Default: 4.", POSITIVE, default=4))
@section("Recordings to URLs", option("--resume", "Publish what killed recordings left on this machine."))
def push(directory: str | None, url: str | None, resume: bool, workers: int, **options: Any) -> int:
    """Copy a trace to an object store. Existing files stay.

    Repeat an interrupted push to resume it. Batches are checked against their
    checksums. hf://datasets/USER/NAME is a dataset, which gets a card.

    \b
    gym-trace push traces/cartpole s3://bucket/traces/cartpole
    gym-trace push --resume
    """
    if resume and directory is None:
        return _resume(workers, options["dry_run"])
    if resume or directory is None or url is None:
        raise click.UsageError("pass DIR and URL, or --resume alone")
    return _run(lambda **copying: gym_trace.push(directory, url, workers=workers, **copying), **options)


@headed("pull")
@click.argument("url", metavar="URL", type=PATH)
@click.argument("directory", metavar="DIR", type=TraceDirectory())
@_options
def pull(url: str, directory: str, **options: Any) -> int:
    """Copy a trace from a URL to a directory. Existing files stay.

    Repeat an interrupted pull to resume it. Batches are checked against their
    checksums. Exit code: 5 if the URL lacks batches that its manifests list.

    \b
    gym-trace pull s3://bucket/traces/cartpole traces/cartpole
    """
    return _run(lambda **copying: gym_trace.pull(url, directory, **copying), **options)


def _resume(workers: int, dry_run: bool) -> int:
    from gym_trace.recording import publish_spools

    code = FINE
    for spool, destination, report, error in publish_spools(workers, dry_run):
        url = show.printable(destination)
        if dry_run:
            click.echo(f"push {show.printable(spool)} {url}")
        elif error is not None:
            click.echo(f"error: {show.printable(str(error))}", err=True)
            code = ERROR
        elif report is None:
            click.echo(f"{url}: is being published by another process")
        else:
            click.echo(f"{url}: {show.count(len(report.pushed), 'file')}, {show.size(report.bytes)} copied")
    return code


def _run(call: Callable[..., TransferReport], dry_run: bool, as_json: bool, quiet: bool) -> int:
    with ProgressLine(quiet=quiet or as_json) as progress:
        report = call(dry_run=dry_run, on_progress=progress.update_bytes)
    code = DAMAGED if report.missing else FINE
    if as_json:
        show.json_line(asdict(report))
        return code
    for note in report.remarks:
        click.echo(show.printable(note), err=True)
    if quiet:
        return code
    if dry_run:
        for direction, names in (("push", report.pushed), ("pull", report.pulled)):
            for name in names:
                click.echo(f"{direction} {show.printable(name)}")
    count = show.count(len(report.pushed) + len(report.pulled), "file")
    copied = "would be copied" if dry_run else "copied"
    click.echo(f"{count}, {show.size(report.bytes)} {copied}; {show.count(report.same)} the same in both places")
    return code
