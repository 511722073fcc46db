"""How gym-trace train tells how far it is, and what came of it."""

from __future__ import annotations

import math
import shlex
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gym_trace_cli import show
from gym_trace_cli.environments import NamedEnvironment
from gym_trace_cli.training.named import trust_of

if TYPE_CHECKING:
    from gym_trace.training import Trained

_LOSSES = {"policy_loss": "policy", "value_loss": "value", "entropy": "entropy", "kl": "KL", "clipped": "clipped"}
_SCALAR_SECONDS = 5.0
_WORKERS, _LEARNER = ("waiting", "acting", "stepping"), ("gathering", "learning")


def line_of(progress: Trained) -> str:
    """What matters least comes last, where a narrow terminal has no room."""
    if not progress.steps and set(progress.workers) <= {"starting"}:
        return "starting"
    told = [show.count(progress.steps, "step")]
    told += [] if progress.returns is None else [f"return {show.returned(progress.returns[0])}"]
    told += [f"{show.count(round(progress.speeds[0]))} steps/s", f"version {show.count(progress.version)}"]
    return "  ".join([*told, show.count(progress.restarts, "restart")] if progress.restarts else told)


def dashboard(progress: Trained) -> Any:
    """What rich draws below that line."""
    from rich.console import Group
    from rich.text import Text

    facts = _facts(progress)
    lines = [Text(no_wrap=True, overflow="ellipsis") for _ in facts]
    for line, (name, value) in zip(lines, facts):
        line.append(f"{name:<11}", "dim").append(show.printable(value))
    return Group(*lines)


def _facts(progress: Trained) -> list[tuple[str, str]]:
    ten, minute, five = (show.count(round(speed)) for speed in progress.speeds)
    facts = [("steps/s", f"{ten} over 10 s, {minute} over 1 min, {five} over 5 min")]
    for name, spread in (("returns", progress.returns), ("lengths", progress.lengths)):
        if spread is not None:
            mean, least, most = map(show.returned, spread)
            facts.append((name, f"{mean} on average, {least} to {most}"))
    youngest, age, oldest = progress.lags
    dropped = f", {show.count(progress.dropped, 'rollout')} dropped" if progress.dropped else ""
    facts.append(("lag", f"{age:.2f} versions on average, {youngest:g} to {oldest:g}{dropped}"))
    for name, parts in (("workers", _WORKERS), ("learner", _LEARNER)):
        shares = [f"{progress.shares[part]:.0%} {part}" for part in parts if part in progress.shares]
        states = [f"{number} {state}" for state, number in Counter(progress.workers).items()]
        said = ", ".join(shares) + (f" ({', '.join(states)})" if states and parts is _WORKERS else "")
        facts.append((name, said.strip() or "starting"))
    losses = [
        f"{word} {show.number(progress.losses[name])}" for name, word in _LOSSES.items() if name in progress.losses
    ]
    facts.append(("losses", ", ".join(losses) or "-"))
    for number, other in enumerate(progress.others, 1):
        mean = "none yet" if other.returns is None else f"{show.returned(other.returns[0])} on average"
        speed = show.count(round(other.speeds[0]))
        facts.append((f"policy {number}", f"return {mean}, {speed} steps/s, version {show.count(other.version)}"))
    facts.append(("time", f"{show.duration(progress.seconds)} so far"))
    if progress.trouble:
        facts.append(("restarted", progress.trouble))
    return facts


class Plotted:
    """Scalars for TensorBoard: a run of theirs for each policy, if there are several."""

    def __init__(self, directory: str | None, policies: int, stack: ExitStack):
        """directory: None: there are to be none. Raises InvalidOption."""
        self._scalars: list[Any] = []
        self._next = 0.0
        if directory is not None:
            from gym_trace.processes.tensorboard import Scalars

            places = [Path(directory, f"policy-{number}") for number in range(policies)]
            places = places if policies > 1 else [Path(directory)]
            self._scalars = [stack.enter_context(Scalars(place, "train")) for place in places]

    def add(self, progress: Trained) -> None:
        """Every few seconds, and in the end."""
        if time.monotonic() < self._next and not progress.stopped:
            return
        self._next = time.monotonic() + _SCALAR_SECONDS
        for scalars, policy in zip(self._scalars, [progress, *progress.others]):
            _plot(scalars, policy)


def _plot(scalars: Any, progress: Trained) -> None:
    """Writes what there is as scalars."""
    if not progress.version and not progress.steps:
        return
    values = {name: value for name, value in progress.losses.items() if name != "seconds"}
    values |= {f"lag/{name}": lag for name, lag in zip(("min", "mean", "max"), progress.lags)}
    values |= {f"time/{name}": share for name, share in progress.shares.items()}
    for name, length in zip(("mean", "min", "max"), progress.lengths or ()):
        if isinstance(length, float):
            values[f"length/{name}"] = length
    more = {"steps_per_second": progress.speeds[0], "version": progress.version, "restarts": progress.restarts}
    scalars.add(progress.steps, progress.returns, **values, **more, episodes=progress.episodes)


def print_summary(done: Trained, directory: Path, named: NamedEnvironment) -> None:
    from gym_trace.collecting.rollout import directory_bytes

    policies = [done, *done.others]
    best = max(policies, key=lambda policy: _mean(policy))
    run = directory / best.directory.name if done.others else directory
    where, learnt, trace = (show.printable(shlex.quote(str(path))) for path in (directory, run, run / "trace"))
    version = f"version {show.count(done.version)}"
    version += f", of {show.count(done.steps, 'step')}" if done.new_steps != done.steps else ""
    if not done.new_steps and done.stopped == "done":
        click.echo(f"nothing to do: the run is done, at {version}")
    elif not done.steps:
        click.echo("nothing is learnt yet")
        return
    else:
        restarts = f", {show.count(done.restarts, 'restart')}" if done.restarts else ""
        click.echo(
            f"learnt from {show.count(done.new_steps, 'step')} in {show.duration(done.seconds)} "
            f"({show.count(round(done.new_steps / max(done.seconds, 1e-9)))} steps/s) with "
            f"{show.count(len(done.workers), 'worker')}{restarts}: {version}"
        )
        if done.returns is not None:
            click.echo(show.returns(*done.returns, lately=done.episodes > 100))
    for number, policy in enumerate(policies if done.others else ()):
        returned = "none yet" if policy.returns is None else show.returned(policy.returns[0])
        click.echo(f"policy {number}: return {returned}, version {show.count(policy.version)}")
    parts = [policy.directory / part for policy in policies for part in ("trace", "checkpoints")]
    size = sum(directory_bytes(part) for part in parts)
    click.echo(f"{show.printable(directory)}: {show.size(size)}, seed {done.seed}\n")
    env = show.printable(named.command_line())
    click.echo(f"next:\n  gym-trace record {env} --policy run:{learnt}\n  gym-trace stats {trace}")
    if done.stopped == "seconds":
        click.echo(f"  gym-trace train --resume {where}{trust_of(named)} --seconds {done.seconds:.0f}")
    else:
        click.echo(f"  gym-trace train --verify {where}")


def _mean(policy: Trained) -> float:
    returns = policy.returns
    return returns[0] if returns is not None and isinstance(returns[0], float) else -math.inf
