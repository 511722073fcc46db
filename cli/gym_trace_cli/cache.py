"""gym-trace cache"""

from __future__ import annotations

import os

import click

from gym_trace.errors import InvalidOption
from gym_trace_cli import show
from gym_trace_cli.exit_codes import FINE
from gym_trace_cli.help import Group


@click.group(cls=Group)
def command() -> None:
    """Clear the disk cache of traces at URLs."""


@command.command("clear")
@click.argument("directory", metavar="[DIR]", required=False, type=click.Path())
def clear(directory: str | None) -> int:
    """Remove what was read of URLs from DIR, and nothing else in it.

    DIR defaults to that of --cache or $GYM_TRACE_URL_CACHE.

    \b
    gym-trace cache clear ~/.cache/traces
    """
    from gym_trace.storage import clear_cache

    place = directory or os.environ.get("GYM_TRACE_URL_CACHE")
    if not place:
        raise InvalidOption("cache clear: no directory; pass the one given as --cache")
    click.echo(f"{show.printable(place)}: {show.size(clear_cache(place))} removed")
    return FINE
