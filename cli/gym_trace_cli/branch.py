"""gym-trace branch: new episodes that branch off at a recorded step"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

import gym_trace
from gym_trace_cli import show
from gym_trace_cli.environments import RecordedEnvironment, recorded_environment_options
from gym_trace_cli.exit_codes import FINE
from gym_trace_cli.help import headed, opt, options_of, shared
from gym_trace_cli.options import (
    NOT_NEGATIVE,
    PATH,
    POSITIVE,
    comparison_options,
    json_option,
    on_exist_option,
    quiet_option,
    start_option,
    trace_argument,
)
from gym_trace_cli.progress import Report, Watch
from gym_trace_cli.record import errors_name_options, named_policy, policy_option
from gym_trace_cli.selection import episode_index

if TYPE_CHECKING:
    from gym_trace.results import Branched


@dataclass(frozen=True, kw_only=True)
class BranchOptions:
    """Options of gym-trace branch."""

    episode: int = opt(
        "--episode N", "Index of the episode; -1 is the last. Default: 0.", click.INT, default=0, under="Step"
    )
    step: int = opt("--step N", "First step of the policy. Default: 0, after the reset.", click.INT, default=0)
    start: str = shared(start_option)
    policy: str = shared(policy_option, under="Continuations")
    episodes: int = opt("--episodes N", "New episodes. Default: 20.", POSITIVE, default=20)
    seed: int | None = opt("--seed N", "Reseed environment and policy at the step.", NOT_NEGATIVE)
    output: str = opt("-o, --output DIR", "Directory of the new trace.", PATH, required=True, under="Output")
    on_exist: str = shared(on_exist_option)
    no_prefix: bool = opt("--no-prefix", "Do not record the repeated steps (unverifiable).", hidden=True)
    quiet: bool = shared(quiet_option)
    as_json: bool = shared(json_option)
    recorded: RecordedEnvironment = shared(recorded_environment_options)
    comparison: dict[str, Any] = shared(comparison_options)


@headed("branch")
@trace_argument
@options_of(BranchOptions)
def command(directory: str, options: BranchOptions) -> int:
    """Record new episodes that branch off at a recorded step.
    They repeat the recorded episode up to the step; then another policy acts.
    Every repeated step is compared, bit for bit.
    Exit code 3 if the replay differs.

    \b
    gym-trace branch traces/cartpole --episode 7 --step 120 -o traces/if --policy sb3:model.zip
    """
    trace = gym_trace.open_trace(directory)
    episode, step = episode_index(trace, options.episode), options.step
    policy = named_policy(options.policy)

    def report(progress: tuple[int, int]) -> Report:
        done, steps = progress
        return Report([show.count(done, "episode"), show.count(steps, "step")], done / options.episodes)

    watch = Watch(report, quiet=options.quiet)
    arguments = options.recorded.arguments()
    with watch, errors_name_options():
        done = gym_trace.branch(
            trace,
            episode,
            step,
            policy,
            options.output,
            episodes=options.episodes,
            seed=options.seed,
            prefix=not options.no_prefix,
            on_progress=lambda *progress: watch(progress),
            command="gym-trace branch",
            on_exist=options.on_exist,
            start=options.start,
            **arguments,
            **options.comparison,
        )
    if options.as_json:
        show.json_line(_plain(done))
    elif not options.quiet:
        _print(done, episode, step, options.policy)
    if watch.stop.received:
        click.echo(f"{watch.stop.what_happened}; every step up to here is saved", err=True)
        return watch.stop.exit_code
    return FINE


def _print(done: Branched, index: int, step: int, policy: str) -> None:
    click.echo(show.printable(f"from step {step} of episode {index} on"))
    rows = [["recorded", "1", show.return_text(done.recorded_return), "", "", "", show.count(done.recorded_length)]]
    if done.mean is not None and done.min is not None and done.max is not None:
        interval = done.interval()
        confidence = "" if interval is None else " to ".join(map(show.return_text, interval))
        low, high = show.return_text(done.min), show.return_text(done.max)
        mean, length = show.return_text(done.mean), show.number(float(done.lengths.mean()))
        rows.append([policy, show.count(len(done.returns)), mean, confidence, low, high, length])
    show.table(["policy", "episodes", "mean return", "95 % interval", "min", "max", "mean steps"], rows)
    if len(done.returns) > 1:
        click.echo("interval of the mean: percentile bootstrap, 10,000 resamples")
    if done.drew is False:
        click.echo("the environment drew nothing from the seeded generator: it is deterministic from this step on, or "
                   "its randomness is elsewhere")  # fmt: skip
    if not show.unpublished():
        click.echo(f"recorded to {show.printable(done.directory)}")


def _plain(done: Branched) -> dict[str, Any]:
    """Return the result for JSON; None for NaN and infinities."""
    arrays = {"returns": done.returns.tolist(), "lengths": done.lengths.tolist()}
    plain = {**vars(done), **arrays, "directory": str(done.directory), "mean": done.mean, "interval": done.interval()}
    return {name: _finite(value) for name, value in plain.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
