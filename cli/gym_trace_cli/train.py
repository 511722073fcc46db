"""gym-trace train"""

from __future__ import annotations

import dataclasses
import difflib
import math
import shlex
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

import gym_trace
from gym_trace.errors import InvalidOption, TrainingFailed
from gym_trace_cli import show
from gym_trace_cli.completion import environment_ids
from gym_trace_cli.environments import NamedEnvironment, environment_options
from gym_trace_cli.exit_codes import FINE
from gym_trace_cli.help import Headed, opt, options_of, section, shared
from gym_trace_cli.options import (
    NOT_NEGATIVE,
    PATH,
    POSITIVE,
    SECONDS,
    EnvArg,
    find_here,
    look_in_current_directory,
)
from gym_trace_cli.progress import ProgressLine, Report, Watch, fraction
from gym_trace_cli.proof import print_proof
from gym_trace_cli.record import provenance_option
from gym_trace_cli.record_config import config_option
from gym_trace_cli.stopping import StopSignals

if TYPE_CHECKING:
    from gym_trace.proof import Proof
    from gym_trace.training import Trained

_COMMAND = "gym-trace train"
_AS_IN_RECORD = "As in gym-trace record."
_SETTINGS = ("workers", "num_envs", "device")  # settings that have an option
_LIMITS = ("steps", "seconds", "until_return")
_TRAIN_ARGUMENTS = (
    *("trust", "begin_with", "seed", "stall_timeout"),
    *("checkpoint_seconds", "keep", "milestone_seconds"),
)
_COMMON_OPTIONS = {"as_json", "quiet", "trust", "config"}
_RESUME_OPTIONS = {"resume", "steps", "seconds", "until_return", "tensorboard", "checkpoint_seconds", "keep"}
_RESUME_OPTIONS |= {"milestone_seconds", "anchor", "stall_timeout"}
_ENVIRONMENT_OPTIONS = {"factory", "env_args", "imports", "wrappers", "max_episode_steps"}
_LOSSES = {"policy_loss": "policy", "value_loss": "value", "entropy": "entropy", "kl": "KL", "clipped": "clipped"}
_WORKERS, _LEARNER = ("waiting", "acting", "stepping"), ("gathering", "learning")  # their phases


class _ExchangeArg(EnvArg):
    """Value of --pbt: a number of steps, or NAME=VALUE."""

    def pair(self, value: str) -> tuple[str, Any]:
        return ("period", int(value)) if value.isdecimal() else super().pair(value)


class TrainCommand(Headed):
    """Hint at --set if an unknown option is a setting."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from gym_trace.training import Settings

        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-").replace("-", "_")
            if name not in Settings.__dataclass_fields__:
                raise
            raise click.UsageError(f"{error.option_name}: is a setting; pass --set {name}=VALUE", ctx) from error


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of gym-trace train."""

    output: str | None = opt("-o, --output DIR", "Run directory. Default: runs/ENV_ID.", PATH, under="Run")
    resume: str | None = opt("--resume DIR", "Resume a run, or extend it with --steps.", PATH)
    verified: str | None = opt("--verify DIR", "Prove a run; exit 3 if something differs.", PATH)
    no_replay: bool = opt("--no-replay", "With --verify: do not replay the episodes.", hidden=True)
    anchor: str | None = opt("--anchor FILE", "File or git-note: append the log's head, or compare.", hidden=True)
    trust: bool = opt("--trust", "Allow imports and calls that only the run names.")
    begin_with: str | None = opt("--weights RUN", "Initial weights: DIR, DIR@VERSION or DIR@best.")
    seed: int | None = opt("--seed N", "Seed; the same weights, except with --set lag=any.", NOT_NEGATIVE)
    tensorboard: str | None = opt("--tensorboard DIR", _AS_IN_RECORD, PATH)
    quiet: bool = opt("--quiet", _AS_IN_RECORD)
    as_json: bool = opt("--json", _AS_IN_RECORD)
    full_provenance: bool = shared(provenance_option)
    steps: int | None = opt("--steps N", "Steps, rounded up to whole updates.", POSITIVE, under="Limits")
    seconds: float | None = opt("--seconds S", "Seconds.", SECONDS)
    until_return: float | None = opt("--until-return R", "Mean return of 100 episodes.", float)
    named: NamedEnvironment = shared(environment_options, under="Environment")
    workers: int | None = opt(
        "-j, --workers N", "Processes; 0 runs all in this one. Default: 2.", NOT_NEGATIVE, under="Collecting"
    )
    num_envs: int | None = opt("--num-envs N", "Environments per worker. Default: 8.", POSITIVE)
    stall_timeout: float = opt(
        "--stall-timeout S", "Restart a worker silent for S seconds. Default: 120.", SECONDS, default=120.0, hidden=True
    )
    device: str | None = opt("--device D", "cpu, cuda or cuda:N. Default: cpu.", under="Learning")
    settings: Sequence[tuple[str, Any]] = opt(
        "--set NAME=VALUE", "Setting, e.g. gamma=0.9, lag=0, rollout=64 (repeatable).", EnvArg("learning_rate=3e-4")
    )
    policies: int | None = opt("--policies N", "Train a population of N policies.", POSITIVE)
    exchange: Sequence[tuple[str, Any]] = opt(
        "--pbt STEPS",
        "Exchange interval, or NAME=VALUE. Default: 100000.",
        _ExchangeArg("gap=0.5"),
        multiple=True,
        hidden=True,
    )
    checkpoint_seconds: float = opt(
        "--checkpoint-seconds S", "Interval of checkpoints. Default: 60.", SECONDS, default=60.0, hidden=True
    )
    keep: int = opt("--keep N", "Newest checkpoints to keep. Default: 3.", POSITIVE, default=3, hidden=True)
    milestone_seconds: float | None = opt(
        "--milestones S", "Interval of checkpoints that are never deleted.", SECONDS, hidden=True
    )


@click.command("train", cls=TrainCommand)
@click.argument("env_id", required=False, shell_complete=environment_ids)
@options_of(TrainOptions)
@section("Run", config_option)
@click.pass_context
def command(ctx: click.Context, /, options: TrainOptions) -> int:
    """Train a policy with PPO and record every step. Ctrl-C saves everything.

    \b
    gym-trace train CartPole-v1 -o runs/cartpole --steps 100000 --seed 1
    gym-trace train --verify runs/cartpole
    """
    named = options.named
    if (
        sum(
            bool(mode)
            for mode in (named.env_id, named.factory and not options.verified, options.resume, options.verified)
        )
        != 1
    ):
        raise click.UsageError("pass one of ENV_ID, --make MODULE:FUNCTION, --resume DIR and --verify DIR")
    _refuse_options(ctx, dict(options.settings))
    if options.trust:
        look_in_current_directory()  # for modules that the run names
    find_here(str(dict(options.settings).get("model") or "").partition(":")[0])
    if options.verified is not None:
        _refuse_others(ctx, "--verify", {"verified", "no_replay", "anchor"} | _ENVIRONMENT_OPTIONS | _COMMON_OPTIONS)
        return _verify(named if named.factory else None, options)
    if options.no_replay:
        raise click.UsageError("--no-replay: needs --verify DIR")
    given = {name: getattr(options, name) for name in (*_LIMITS, *_TRAIN_ARGUMENTS)}
    given |= {"argv": options.full_provenance, "git_diff": options.full_provenance}
    if options.resume is not None:
        _refuse_others(ctx, "--resume", _RESUME_OPTIONS | _COMMON_OPTIONS)
        named, about = environment_of(options.resume, options.trust)
        return _train(named, Path(options.resume), options, resume=True, describe=about, **given)
    if all(given[name] is None for name in _LIMITS):
        raise click.UsageError("no limit; pass --steps N, --seconds S or --until-return R")
    own = {name: value for name in _SETTINGS if (value := getattr(options, name)) is not None}
    chosen = {**dict(options.settings), **own}
    if options.policies is not None:
        from gym_trace.training import Exchange

        chosen |= {"policies": options.policies, "exchange": Exchange.of(dict(options.exchange))}
    elif options.exchange:
        raise click.UsageError("--pbt: needs a population; pass --policies N")
    about = named.described() | ({"imports": list(named.imports)} if named.imports else {})
    directory = Path(options.output or f"runs/{named.file_name}")
    return _train(named, directory, options, describe=about, **given, **chosen)


def _refuse_options(ctx: click.Context, settings: dict[str, Any]) -> None:
    """Raise UsageError for an option in --set, InvalidOption for an unknown setting."""
    from gym_trace.training import Settings, settings_from

    options = {name: param for param in ctx.command.params for name in (str(param.name), param.opts[-1].lstrip("-"))}
    for name in sorted(settings):
        near = difflib.get_close_matches(name, [*Settings.__dataclass_fields__, *options], n=1)
        if near and isinstance(option := options.get(near[0]), click.Option):
            what = "is an option; pass" if near == [name] else "no setting; did you mean"
            raise click.UsageError(f"--set {name}: {what} {option.opts[-1]}{'' if option.is_flag else ' VALUE'}")
        if name not in Settings.__dataclass_fields__:
            settings_from({name: settings[name]})


def _refuse_others(ctx: click.Context, mode: str, allowed: set[str]) -> None:
    """Raise UsageError for options that a mode does not accept."""
    for param in ctx.command.params:
        given = ctx.get_parameter_source(str(param.name)) not in (ParameterSource.DEFAULT, None)
        if given and param.name not in allowed:
            raise click.UsageError(f"{mode}: {param.opts[-1]} cannot change; omit it")


def _train(
    named: NamedEnvironment, directory: Path, options: TrainOptions, *, seconds: float | None, **arguments: Any
) -> int:
    """Train, show progress and a summary, and return the exit code."""
    from gym_trace.proof import write_anchor
    from gym_trace.training import runs_in

    train = gym_trace.train  # first: PyTorch may be missing
    if arguments["until_return"] is None and arguments.get("resume"):
        del arguments["until_return"]
    if arguments.get("steps") is None:
        arguments.pop("steps", None)
    limits = {name: limit for name, limit in (("steps", arguments.get("steps")), ("seconds", seconds)) if limit}
    resume = show.printable(f"gym-trace train --resume {shlex.quote(str(directory))}{trust_of(named)} resumes it")
    policies = arguments.get("policies") or len(runs_in(directory))
    plots = [Path(options.tensorboard)] if options.tensorboard else []
    if policies > 1:
        plots = [path / f"policy-{number}" for path in plots for number in range(policies)]
    with Watch(partial(_report, limits), quiet=options.quiet, tensorboard=plots, group="train", saving=False) as watch:
        watch.line.update("starting")  # processes import PyTorch first
        try:
            done = train(named, directory, seconds=seconds, command=_COMMAND, on_progress=watch, **arguments)
        except TrainingFailed:
            click.echo(f"everything up to the error is saved; {resume}", err=True)
            raise
        watch.finish(done)
    if options.anchor is not None:
        for trained in runs_in(directory):
            write_anchor(trained.path, options.anchor)
    if options.as_json:
        show.json_line(dataclasses.asdict(done), default=str)
    elif not options.quiet:
        _print_summary(done, directory, named)
    if done.stopped == "interrupted":
        click.echo(f"{watch.stop.what_happened}; {resume}", err=True)
        return watch.stop.exit_code
    return FINE


def _verify(make_env: NamedEnvironment | None, options: TrainOptions) -> int:
    from gym_trace.training import runs_in, verify_run

    directory = str(options.verified)
    if make_env is None and runs_in(directory)[0].about.get("environment") is not None:
        with suppress(InvalidOption):  # untrusted: prove what needs no environment
            make_env, _ = environment_of(directory, options.trust)
    with StopSignals() as stop, ProgressLine(quiet=options.quiet) as line:

        def report(proof: Proof) -> int:
            line.update_count(proof.done, proof.out_of, proof.doing)
            return stop.received

        replays = not options.no_replay
        proof = verify_run(
            directory, report, trust=options.trust, replays=replays, make_env=make_env, anchor=options.anchor
        )
    return print_proof(proof, stop, options.as_json, options.quiet)


def environment_of(directory: str, trust: bool) -> tuple[NamedEnvironment, dict[str, Any]]:
    """Return the environment of a run, and its entry in run.json. Raises the errors of described_environment()."""
    from gym_trace.training import described_environment

    described = described_environment(directory, trust)
    imports, wrappers = tuple(described.get("imports", ())), tuple(described.get("wrappers", ()))
    steps = described.get("max_episode_steps")
    return NamedEnvironment(
        described.get("id"), described.get("make"), described.get("kwargs", {}), imports, wrappers, steps
    ), described


def trust_of(named: NamedEnvironment) -> str:
    """Return " --trust" if resuming a run in this environment needs that, else ""."""
    from gym_trace.training import needs_trust

    return " --trust" if needs_trust({**named.described(), "imports": named.imports}) else ""


# -- progress and summary ----------------------------------------------------------------------------------------------


def _report(limits: dict[str, float], progress: Trained) -> Report:
    """Describe progress for the line, the dashboard below it, and TensorBoard."""
    scalars = [_scalars(policy) for policy in (progress, *progress.others)]
    return Report(
        _line(progress),
        fraction(progress, limits) if limits else None,
        partial(_dashboard, progress),
        progress.restarts,
        progress.trouble,
        scalars if all(policy.version or policy.steps for policy in (progress, *progress.others)) else [],
    )


def _line(progress: Trained) -> list[str]:
    if not progress.steps and set(progress.workers) <= {"starting"}:
        return ["starting"]
    returns = [] if progress.returns is None else [f"return {show.return_text(progress.returns[0])}"]
    speed = f"{show.count(round(progress.speeds[0]))} steps/s"
    return [show.count(progress.steps, "step"), *returns, speed, f"version {show.count(progress.version)}"]


def _dashboard(progress: Trained) -> Any:
    """Return what rich draws below the line."""
    from rich.console import Group
    from rich.text import Text

    fields = _fields(progress)
    lines = [Text(no_wrap=True, overflow="ellipsis") for _ in fields]
    for line, (name, value) in zip(lines, fields):
        line.append(f"{name:<11}", "dim").append(show.printable(value))
    return Group(*lines)


def _fields(progress: Trained) -> list[tuple[str, str]]:
    fields = [("steps/s", show.speeds(progress.speeds))]
    for name, spread in (("returns", progress.returns), ("lengths", progress.lengths)):
        if spread is not None:
            mean, least, most = map(show.return_text, spread)
            fields.append((name, f"mean {mean}, {least} to {most}"))
    least_lag, mean_lag, largest_lag = progress.lags
    dropped = f", {show.count(progress.dropped, 'rollout')} dropped" if progress.dropped else ""
    fields.append(("lag", f"mean {mean_lag:.2f} versions, {least_lag:g} to {largest_lag:g}{dropped}"))
    for name, parts in (("workers", _WORKERS), ("learner", _LEARNER)):
        shares = [f"{progress.shares[part]:.0%} {part}" for part in parts if part in progress.shares]
        states = [f"{number} {state}" for state, number in Counter(progress.workers).items()]
        text = ", ".join(shares) + (f" ({', '.join(states)})" if states and parts is _WORKERS else "")
        fields.append((name, text.strip() or "starting"))
    losses = [
        f"{word} {show.number(progress.losses[name])}" for name, word in _LOSSES.items() if name in progress.losses
    ]
    fields.append(("losses", ", ".join(losses) or "-"))
    for number, other in enumerate(progress.others, 1):
        mean = "none yet" if other.returns is None else f"{show.return_text(other.returns[0])}"
        speed = show.count(round(other.speeds[0]))
        fields.append((f"policy {number}", f"return {mean}, {speed} steps/s, version {show.count(other.version)}"))
    fields.append(("time", f"{show.duration(progress.seconds)} so far"))
    if progress.trouble:
        fields.append(("restarted", progress.trouble))
    return fields


def _scalars(progress: Trained) -> tuple[int, Any, dict[str, float]]:
    values = {name: value for name, value in progress.losses.items() if name != "seconds"}
    values |= {f"lag/{name}": lag for name, lag in zip(("min", "mean", "max"), progress.lags)}
    values |= {f"time/{name}": share for name, share in progress.shares.items()}
    for name, length in zip(("mean", "min", "max"), progress.lengths or ()):
        if isinstance(length, float):
            values[f"length/{name}"] = length
    more = {"steps_per_second": progress.speeds[0], "version": progress.version, "restarts": progress.restarts}
    return progress.steps, progress.returns, {**values, **more, "episodes": progress.episodes}


def _print_summary(done: Trained, directory: Path, named: NamedEnvironment) -> None:
    policies = [done, *done.others]
    best = max(policies, key=_mean)
    run = directory / best.directory.name if done.others else directory
    all_runs, best_run, trace = (show.printable(shlex.quote(str(path))) for path in (directory, run, run / "trace"))
    version = f"version {show.count(done.version)}"
    version += f", of {show.count(done.steps, 'step')}" if done.new_steps != done.steps else ""
    if not done.new_steps and done.stopped == "done":
        click.echo(f"nothing to do: the run is done, at {version}; --steps N extends it")
    elif not done.steps:
        click.echo("nothing learned yet")
        return
    else:
        restarts = f", {show.count(done.restarts, 'restart')}" if done.restarts else ""
        workers = f"{show.count(len(done.workers), 'worker')}{restarts}"
        click.echo(f"learned from {show.throughput(done.new_steps, done.seconds)} with {workers}: {version}")
        if done.returns is not None:
            click.echo(show.returns(done.returns, only_last=done.episodes > 100))
    for number, policy in enumerate(policies if done.others else ()):
        mean = "none yet" if policy.returns is None else show.return_text(policy.returns[0])
        click.echo(f"policy {number}: return {mean}, version {show.count(policy.version)}")
    click.echo(f"{show.printable(directory)}: {show.size(done.bytes_on_disk)}, seed {done.seed}\n")
    env = show.printable(named.command_line())
    click.echo(f"next:\n  gym-trace record {env} --policy run:{best_run}\n  gym-trace stats {trace}")
    if done.stopped == "seconds":
        click.echo(f"  gym-trace train --resume {all_runs}{trust_of(named)} --seconds {done.seconds:.0f}")
    else:
        click.echo(f"  gym-trace train --verify {all_runs}")


def _mean(policy: Trained) -> float:
    mean = None if policy.returns is None else policy.returns[0]
    return mean if isinstance(mean, float) else -math.inf
