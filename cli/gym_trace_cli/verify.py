"""gym-trace replay --verify"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

import gym_trace
from gym_trace.errors import CorruptTrace
from gym_trace.printable import shown
from gym_trace_cli import show
from gym_trace_cli.environments import making_arguments
from gym_trace_cli.exit_codes import DAMAGED, DIFFERS, FINE, UNVERIFIABLE

if TYPE_CHECKING:
    from gym_trace import Trace
    from gym_trace.replay.compare import Difference
    from gym_trace.replay.resimulate import Verdict

# Exit codes. Of several the first counts: what is known to be wrong comes before what is not known.
_CODES = {"differs": DIFFERS, "damaged": DAMAGED, "unverifiable": UNVERIFIABLE}


def verify(
    trace: Trace,
    chosen: list[int],
    as_json: bool,
    skip_damaged: bool,
    env_id: str | None,
    factory: str | None,
    env_args: Sequence[tuple[str, Any]],
    imports: Sequence[str],
    **options: Any,
) -> int:
    """Plays the chosen episodes again, says what came out, and returns the exit code."""
    from gym_trace.replay.verify import differing_versions, played_in_registered

    options |= making_arguments(env_id, factory, env_args, imports)
    options["on_damage"] = "skip" if skip_damaged else "raise"
    counts: Counter[str] = Counter()
    damaged = False
    try:
        with show.ProgressLine() as line:
            for verdict in gym_trace.verify_trace(trace, episodes=chosen, imports=imports, **options):
                counts[verdict.verdict] += 1
                if as_json:
                    click.echo(json.dumps(_plain(verdict)))
                elif verdict.verdict in _CODES:
                    click.echo(_told(verdict, several=len(trace.writers) > 1))
                elif verdict.crash:
                    action = show.printable(shown(trace[verdict.index].pending_action))
                    click.echo(f"episode {verdict.index}: the action that was being executed at its end, {action}:")
                    click.echo(f"  {show.printable(verdict.crash)}")
                done = sum(counts.values())
                line.update(f"{show.count(done)} of {show.count(len(chosen), 'episode')}", done / len(chosen))
    except CorruptTrace as error:
        click.echo(f"error: {show.printable(error)}; --skip-damaged verifies the others", err=True)
        damaged = True
    for name, (recorded, installed) in differing_versions(trace).items():
        click.echo(show.printable(f"note: recorded with {name} {recorded}, here is {installed or 'none'}"), err=True)
    for name in played_in_registered(trace) if "env_kwargs" in options else ():
        click.echo(show.printable(f"note: played in the {name} that is registered here"), err=True)
    for damage in trace.damage if skip_damaged else ():
        damaged = True
        where = f"{damage.path}, bytes {damage.start} to {damage.end}"
        click.echo(show.printable(f"skipped: {where}: {damage.problem}"), err=True)
    words = [f"{show.count(number)} {_SAID[name]}" for name, number in sorted(counts.items())]
    click.echo(f"{show.count(sum(counts.values()), 'episode')} replayed: {', '.join(words) or 'none'}", err=as_json)
    return next((code for verdict, code in _CODES.items() if counts[verdict] or (damaged and code == DAMAGED)), FINE)


_SAID = {
    "identical": "identical, bit for bit",
    "close": "within the tolerance",
    "differs": "different",
    "unverifiable": "that cannot be verified",
    "damaged": "damaged",
}


def _told(verdict: Verdict, several: bool) -> str:
    of = f" of {verdict.writer}" if several else ""
    if verdict.verdict == "unverifiable":
        return show.printable(f"episode {verdict.index}{of} cannot be verified: {verdict.reason}")
    if verdict.verdict == "damaged":
        return show.printable(f"episode {verdict.index}{of} is damaged: {verdict.reason}")
    reason = f" ({verdict.reason})" if verdict.reason else ""
    return show.printable(f"episode {verdict.index}{of} differs {verdict.difference}{reason}")


def _plain(verdict: Verdict) -> dict[str, Any]:
    """As JSON can have it."""
    plain = {name: getattr(verdict, name) for name in verdict.__dataclass_fields__}
    if verdict.difference is not None:
        plain["difference"] = difference_as_json(verdict.difference)
    return plain


def difference_as_json(difference: Difference) -> dict[str, Any]:
    """A difference as plain data; values that JSON has not are told in words."""
    values = {name: _jsonable(getattr(difference, name)) for name in ("recorded", "seen", "largest")}
    return difference._asdict() | values


def _jsonable(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") and getattr(value, "size", 0) == 1 else value
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return shown(value, 1000)
    return value
