"""gym-trace card"""

from __future__ import annotations

import os
from pathlib import Path

import click

import gym_trace
from gym_trace.errors import TraceExists
from gym_trace_cli import show
from gym_trace_cli.completion import TraceDirectory

_MOST_BYTES = 1 << 24  # of a file that may be a card that was written before


@click.command("card", short_help="Show or write a data set card.")
@click.argument("directory", metavar="DIR", type=TraceDirectory())
@click.option("-o", "--output", metavar="FILE", type=click.Path(), help="Write it there, such as to DIR/README.md.")
def command(directory: str, output: str | None) -> None:
    """Show what the trace in DIR is as a data set card: Markdown with the metadata that Hugging Face reads.

    It says what 'gym-trace record --author --licence --description --tag' and 'gym-trace edit annotate' said of the
    trace, and what can be told of it: environment, spaces, numbers, returns, reference scores, what recorded it.
    Command lines and uncommitted changes, which are in a trace only on demand, are not on its card.
    """
    card = gym_trace.dataset_card(directory)
    if output is None:
        click.echo(card, nl=False)
        return
    from gym_trace.storage.staging import replaced_file

    path = Path(output)
    _refuse_others(path)
    with replaced_file(path) as file:
        file.write(card)
    click.echo(f"written to {show.printable(path)}")


def _refuse_others(path: Path) -> None:
    """Raises TraceExists where there is a file that somebody wrote, and OSError where it is a link or no file."""
    from gym_trace.statistics.card import MARK
    from gym_trace.storage.local import open_regular

    try:
        with open(open_regular(path, os.O_RDONLY), "rb") as file:
            ours = MARK.encode() in file.read(_MOST_BYTES)
    except FileNotFoundError:
        return
    if not ours:
        raise TraceExists(f"{path}: is no card of gym-trace, or one that somebody changed; give another file")
