"""gym-trace replay --verify"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

import gym_trace
from gym_trace_cli import show
from gym_trace_cli.environments import import_modules, make_env

if TYPE_CHECKING:
    from gym_trace.comparison import Difference
    from gym_trace.replay import Verdict

DIFFERS = 3  # exit code


def verify(
    directory: str,
    chosen: list[int],
    as_json: bool,
    env_id: str | None,
    env_args: Sequence[tuple[str, Any]],
    imports: Sequence[str],
    **options: Any,
) -> int:
    """Plays the chosen episodes again, says what came out, and returns the exit code."""
    from gym_trace.verification import differing_versions

    import_modules(imports)
    trace = gym_trace.open_trace(directory)
    if env_id is not None:
        options["make_env"] = partial(make_env, env_id, dict(env_args))
    else:
        options["env_kwargs"] = dict(env_args)
    versions = differing_versions(trace)
    counts: Counter[str] = Counter()
    with show.Progress() as line:
        for verdict in gym_trace.verify_trace(directory, episodes=chosen, imports=imports, **options):
            counts[verdict.verdict] += 1
            if as_json:
                click.echo(json.dumps(_plain(verdict)))
            elif verdict.verdict in ("differs", "unverifiable"):
                click.echo(_told(verdict, several=len(trace.writers) > 1))
            done = sum(counts.values())
            line.update(f"{show.count(done)} of {show.count(len(chosen), 'episode')}", done / len(chosen))
    for name, (recorded, installed) in versions.items():
        note = f"note: recorded with {name} {recorded}, here is {installed or 'none'}"
        click.echo(show.printable(note), err=True)
    words = [f"{show.count(number)} {_SAID[name]}" for name, number in sorted(counts.items())]
    click.echo(f"{show.count(sum(counts.values()), 'episode')} replayed: {', '.join(words) or 'none'}", err=as_json)
    return DIFFERS if counts["differs"] else 1 if set(counts) == {"unverifiable"} else 0


_SAID = {
    "identical": "identical, bit for bit",
    "close": "within the tolerance",
    "differs": "different",
    "unverifiable": "that cannot be verified",
}


def _told(verdict: Verdict, several: bool) -> str:
    of = f" of {verdict.writer}" if several else ""
    if verdict.verdict == "unverifiable":
        return show.printable(f"episode {verdict.index}{of} cannot be verified: {verdict.reason}")
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
        return repr(value)
    return value
