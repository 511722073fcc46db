"""Output of a proof."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from gym_trace_cli import show
from gym_trace_cli.exit_codes import DIFFERS, FINE
from gym_trace_cli.stopping import StopSignals

if TYPE_CHECKING:
    from gym_trace.proof.result import Proof

_OF_NO_INTEREST = {"doing", "done", "out_of"}


def print_proof(proof: Proof, stop: StopSignals, as_json: bool, quiet: bool, noun: str = "version") -> int:
    """Print what was proved line by line, and return the exit code."""
    if as_json:
        found = dataclasses.asdict(proof)
        show.json_line({name: value for name, value in found.items() if name not in _OF_NO_INTEREST})
    for note in proof.notes if not quiet else ():
        click.echo(show.printable(f"note: {note}"), err=True)
    if stop.received:
        done = f"{show.count(proof.versions)} of {show.count(proof.of, noun)}"
        click.echo(f"{stop.what_happened} after {done}, all equal", err=True)
        return stop.exit_code
    if not as_json and not quiet:
        for word, lines in (("proved", proof.proved), ("not proved", proof.unproved if not proof.differs else [])):
            for line in lines:
                click.echo(show.printable(f"{word}: {line}"))
    if proof.differs:
        same = show.count(proof.versions, noun)
        same += f" and {show.count(proof.checkpoints, 'checkpoint')}" if proof.checkpoints else ""
        click.echo(show.printable(f"differs: {proof.differs}"), err=True)
        click.echo(f"before that {same} matched, of {show.count(proof.of, noun)}", err=True)
        return DIFFERS
    return FINE
