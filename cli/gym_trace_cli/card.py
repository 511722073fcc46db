"""gym-trace card"""

from __future__ import annotations

import os
from pathlib import Path

import click

import gym_trace
from gym_trace.errors import TraceExists
from gym_trace_cli import show
from gym_trace_cli.help import headed, option, section
from gym_trace_cli.options import PATH, trace_argument

_MOST_BYTES = 1 << 24  # read from a file to recognise a card


@headed("card")
@trace_argument
@section("Output", option("-o, --output FILE", "File, e.g. DIR/README.md.", PATH))
def command(directory: str, output: str | None) -> None:
    """Show or write a dataset card: Markdown with Hugging Face metadata.

    It combines 'gym-trace record --author --licence --description --tag' and
    'gym-trace edit annotate' with environment, spaces, returns and provenance.
    It omits stored command lines and uncommitted changes.

    \b
    gym-trace card traces/cartpole -o traces/cartpole/README.md
    """
    card = gym_trace.dataset_card(directory)
    if output is None:
        click.echo(card, nl=False)
        return
    from gym_trace.storage.staging import replaced_file

    path = Path(output)
    _refuse_others(path)
    with replaced_file(path) as staged:
        staged.write_text(card, encoding="utf-8", newline="\n")
    click.echo(f"written to {show.printable(path)}")


def _refuse_others(path: Path) -> None:
    """Raises TraceExists for a file that is not an unchanged card, OSError for a link or a directory."""
    from gym_trace.statistics.card import MARK
    from gym_trace.storage.local import open_regular

    try:
        with open(open_regular(path, os.O_RDONLY), "rb") as file:
            ours = MARK.encode() in file.read(_MOST_BYTES)
    except FileNotFoundError:
        return
    if not ours:
        raise TraceExists(f"{path}: not an unchanged card; choose another file")
