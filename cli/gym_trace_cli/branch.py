"""gym-trace branch: new episodes from a recorded step on"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

import gym_trace
from gym_trace_cli import show
from gym_trace_cli.environments import RecordedEnvironment, recorded_environment_options
from gym_trace_cli.exit_codes import FINE
from gym_trace_cli.help import headed, option, section
from gym_trace_cli.options import (
    NOT_NEGATIVE,
    PATH,
    POSITIVE,
    comparison_options,
    json_option,
    on_exist_option,
    quiet_option,
    trace_argument,
)
from gym_trace_cli.progress import Report, Watch
from gym_trace_cli.record import errors_name_options, named_policy, policy_option

if TYPE_CHECKING:
    from gym_trace.results import Branched


@headed("branch")
@trace_argument
@section(
    "Step",
    option("--episode N", "Index of the episode; -1 is the last. Default: 0.", click.INT, default=0),
    option("--step N", "First step of the policy. Default: 0, after the reset.", click.INT, default=0),
)
@section(
    "Continuations",
    policy_option,
    option("--episodes N", "New episodes. Default: 20.", POSITIVE, default=20),
    option("--seed N", "Reseed environment and policy at the step.", NOT_NEGATIVE),
)
@section(
    "Output",
    option("-o, --output DIR", "Directory of the new trace.", PATH, required=True),
    on_exist_option,
    option("--no-prefix", "Leave out the repeated steps (unverifiable)."),
    quiet_option,
    json_option,
)
@recorded_environment_options
@comparison_options
def command(
    directory: str,
    episode: int,
    step: int,
    policy: str,
    episodes: int,
    seed: int | None,
    output: str,
    on_exist: str,
    no_prefix: bool,
    quiet: bool,
    as_json: bool,
    recorded: RecordedEnvironment,
    comparison: dict[str, Any],
) -> int:
    """Record new episodes that begin as a recorded one did.
    From a step on, another policy acts. What if?
    Every repeated step is compared, bit for bit.
    Exit code 3 if the replay differs.

    \b
    gym-trace branch traces/cartpole --episode 7 --step 120 -o traces/if --policy sb3:model.zip
    """
    trace = gym_trace.open_trace(directory)
    if not -len(trace) <= episode < len(trace):
        known = show.count(len(trace), "episode")
        raise click.BadParameter(f"{episode}: the trace has {known}", param_hint="'--episode'")
    acting = named_policy(policy)

    def report(progress: tuple[int, int]) -> Report:
        done, steps = progress
        return Report([show.count(done, "episode"), show.count(steps, "step")], done / episodes)

    watch = Watch(report, quiet=quiet)
    arguments = recorded.arguments()
    with watch, errors_name_options():
        done = gym_trace.branch(
            trace,
            episode,
            step,
            acting,
            output,
            episodes=episodes,
            seed=seed,
            prefix=not no_prefix,
            on_progress=lambda *progress: watch(progress),
            command="gym-trace branch",
            on_exist=on_exist,
            **arguments,
            **comparison,
        )
    if as_json:
        show.json_line(_plain(done))
    elif not quiet:
        _print(done, range(len(trace))[episode], step, policy)
    if watch.stop.received:
        click.echo(f"{watch.stop.what_happened}; every step up to here is saved", err=True)
        return watch.stop.exit_code
    return FINE


def _print(done: Branched, index: int, step: int, policy: str) -> None:
    click.echo(show.printable(f"from step {step} of episode {index} on"))
    rows = [["recorded", "1", show.returned(done.recorded_return), "", "", "", show.count(done.recorded_length)]]
    if done.mean is not None and done.min is not None and done.max is not None:
        interval = done.interval()
        sure = "" if interval is None else " to ".join(map(show.returned, interval))
        low, high = show.returned(done.min), show.returned(done.max)
        mean, length = show.returned(done.mean), show.number(float(done.lengths.mean()))
        rows.append([policy, show.count(len(done.returns)), mean, sure, low, high, length])
    show.table(["policy", "episodes", "mean return", "95 % interval", "min", "max", "mean steps"], rows)
    if len(done.returns) > 1:
        click.echo("interval of the mean: percentile bootstrap, 10,000 resamples")
    if done.drew is False:
        click.echo("the environment drew nothing from the seeded generator: it is deterministic from this step on, or "
                   "its randomness is elsewhere")  # fmt: skip
    click.echo(f"recorded to {show.printable(done.directory)}")


def _plain(done: Branched) -> dict[str, Any]:
    """Return the result for JSON; None for NaN and infinities."""
    arrays = {"returns": done.returns.tolist(), "lengths": done.lengths.tolist()}
    plain = {**vars(done), **arrays, "directory": str(done.directory), "mean": done.mean, "interval": done.interval()}
    return {name: _finite(value) for name, value in plain.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
