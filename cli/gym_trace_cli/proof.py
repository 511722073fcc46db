"""gym-trace proof with its commands"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from gym_trace.errors import InvalidOption
from gym_trace_cli import show
from gym_trace_cli.exit_codes import DIFFERS, FINE, UNPROVED
from gym_trace_cli.help import Group, option, section
from gym_trace_cli.options import PATH, json_option, named_callable
from gym_trace_cli.progress import ProgressLine
from gym_trace_cli.stopping import StopSignals

if TYPE_CHECKING:
    from gym_trace.proof import Proof

_PROGRESS_FIELDS = {"doing", "done", "out_of"}


@click.group("proof", cls=Group)
def command() -> None:
    """Prove what a PyTorch trainer learned, and from which steps."""


@command.command("verify")
@click.argument("directory", type=PATH)
@section(
    "Proof",
    option("--make M:F", "MODULE:FUNCTION that returns the pair (parts, learn).", named_callable, required=True),
    option("--anchor FILE", "Compare the head of the log with the anchor in FILE (git-note: in git)."),
    option("--device NAME", "Device for tensors that were on a GPU (default: the same).", hidden=True),
    option("--no-replay", "Do not replay the episodes."),
    option("--trust", "Allow imports and calls that only the trace names."),
)
@section("Output", option("--quiet", "Only the exit code and errors."), json_option)
def verify_(
    directory: str,
    make: Callable[[], Any],
    anchor: str | None,
    device: str | None,
    no_replay: bool,
    trust: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Relearn every update of a log and compare.
    Exit code: 3 on a difference, 5 if something was not compared.

    \b
    gym-trace proof verify runs/ppo.proof --make my_script:parts_and_learn
    """
    from gym_trace.proof import verify

    pair = make()
    try:
        parts, learn = pair
    except (TypeError, ValueError):
        raise InvalidOption(f"--make: returned a {type(pair).__name__}; return parts, learn") from None
    with StopSignals() as stop, ProgressLine(quiet=quiet) as line:

        def report(proof: Proof) -> int:
            line.update_count(proof.done, proof.out_of, proof.doing)
            return stop.received

        proof = verify(
            directory,
            parts,
            learn,
            on_progress=report,
            replays=not no_replay,
            trust=trust,
            anchor=anchor,
            device=device,
        )
    return print_proof(proof, stop, as_json, quiet, "update")


@command.command("anchor")
@click.argument("directory", type=PATH)
@click.argument("where")
def anchor_(directory: str, where: str) -> int:
    """Append the head of a log to a file, or to the notes of the current commit (git-note).

    \b
    gym-trace proof anchor runs/ppo.proof anchors.txt
    """
    from gym_trace.proof import write_anchor

    click.echo(show.printable(write_anchor(directory, where)))
    return 0


def print_proof(proof: Proof, stop: StopSignals, as_json: bool, quiet: bool, noun: str = "version") -> int:
    """Print the result of a proof, and return the exit code."""
    if as_json:
        fields = dataclasses.asdict(proof)
        show.json_line({name: value for name, value in fields.items() if name not in _PROGRESS_FIELDS})
    for note in proof.notes if not quiet else ():
        click.echo(show.printable(f"note: {note}"), err=True)
    if stop.received:
        done = f"{show.count(proof.versions)} of {show.count(proof.of, noun)}"
        click.echo(f"{stop.what_happened} after {done}, all equal", err=True)
        return stop.exit_code
    if not as_json and not quiet:
        results = {"proved": proof.proved, "not proved": proof.unproved, "cannot be proved": proof.limits}
        for word, lines in results.items() if not proof.differs else [("proved", proof.proved)]:
            for line in lines:
                click.echo(show.printable(f"{word}: {line}"))
    if proof.differs:
        checkpoints = f" and {show.count(proof.checkpoints, 'checkpoint')}" if proof.checkpoints else ""
        matched = f"{show.count(proof.versions)} of {show.count(proof.of, noun)}{checkpoints}"
        click.echo(show.printable(f"differs: {proof.differs}"), err=True)
        click.echo(f"{matched} matched before the difference", err=True)
        return DIFFERS
    return UNPROVED if proof.unproved else FINE
