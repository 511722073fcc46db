"""gym-trace train"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

import gym_trace
from gym_trace.errors import TrainingFailed
from gym_trace_cli import show
from gym_trace_cli.completion import environment_ids
from gym_trace_cli.environments import NamedEnvironment
from gym_trace_cli.exit_codes import DIFFERS, FINE
from gym_trace_cli.help import Headed, option, section
from gym_trace_cli.options import (
    NOT_NEGATIVE,
    PATH,
    POSITIVE,
    SECONDS,
    EnvArg,
    TextOption,
    environment_options,
    find_here,
    look_in_current_directory,
)
from gym_trace_cli.progress import ProgressLine, Watch
from gym_trace_cli.record_config import config_option, drop_overruled
from gym_trace_cli.stopping import StopSignals
from gym_trace_cli.training.named import described, environment_of, trust_of
from gym_trace_cli.training.progress import print_summary, report_of

if TYPE_CHECKING:
    from gym_trace.training import Relearnt

_COMMAND = "gym-trace train"
_AS_IN_RECORD = "As in gym-trace record."
_SETTINGS = ("workers", "num_envs", "rollout", "batch", "lag", "inference", "device")  # with their own options
_ALWAYS = {"as_json", "quiet", "trust", "config"}
_OF_RESUME = {"resume", "seconds", "until_return", "tensorboard", "checkpoint_seconds", "keep", "milestone_seconds"}
_OF_RESUME |= {"stall_timeout", "max_restarts", "niceness", "cpus"}


class Processors(TextOption):
    """--cpus: "0,1,4", as a list of numbers."""

    name = "numbers"

    def parsed(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if not all(part.strip().isdecimal() for part in value.split(",")):
            self.fail(f"{value!r} is not a list of processors; write 0,1,2", param, ctx)
        return [int(part) for part in value.split(",")]


class Exchanging(EnvArg):
    """--pbt: a number of steps, or NAME=VALUE."""

    name = "steps"

    def __init__(self) -> None:
        super().__init__("gap=0.5")

    def parsed(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return ("period", int(value)) if value.isdecimal() else super().parsed(value, param, ctx)


class TrainCommand(Headed):
    """Hint at --set if an unknown option is a setting."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from gym_trace.training.settings import Settings

        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-").replace("-", "_")
            if name not in Settings.__dataclass_fields__:
                raise
            raise click.UsageError(f"{error.option_name}: is a setting; pass --set {name}=VALUE", ctx) from error


@click.command("train", cls=TrainCommand)
@click.argument("env_id", required=False, shell_complete=environment_ids)
@section(
    "Run",
    option("-o, --output DIR", "Run directory. Default: runs/ENV_ID.", PATH),
    option("--resume DIR", "Resume a run.", PATH),
    option("--verify DIR", "Relearn every version; exit 3 if one differs.", PATH, name="verified"),
    option("--trust", "Allow imports and calls that only the run names."),
    option("--from RUN", "Initial weights: DIR, DIR@VERSION or DIR@best.", name="begin_with"),
    option("--seed N", "Reproducible weights with --lag 0 or 1.", NOT_NEGATIVE),
    option("--tensorboard DIR", _AS_IN_RECORD, PATH),
    option("--quiet", _AS_IN_RECORD),
    option("--json", _AS_IN_RECORD, name="as_json"),
    option("--argv", _AS_IN_RECORD),
    option("--git-diff", _AS_IN_RECORD),
    config_option,
)
@section(
    "Limits",
    option("--steps N", "Steps, rounded up to whole updates.", POSITIVE),
    option("--seconds S", "Seconds.", SECONDS),
    option("--until-return R", "Mean return of 100 episodes.", float),
)
@section("Environment", *environment_options)
@section(
    "Collecting",
    option("-j, --workers N", "Processes; 0 runs all in this one. Default: 2.", NOT_NEGATIVE),
    option("--num-envs N", "Environments per worker. Default: 16.", POSITIVE),
    option("--rollout N", "Steps per lane and rollout. Default: 32.", POSITIVE),
    option("--inference WHO", "Who draws actions: actor or server. Default: actor.", click.Choice(["actor", "server"])),
    option("--no-learn", "Only collect, to measure throughput."),
    option("--stall-timeout S", _AS_IN_RECORD, SECONDS, default=120.0),
    option("--max-restarts N", _AS_IN_RECORD, NOT_NEGATIVE, default=100),
    option("--nice N", _AS_IN_RECORD, click.IntRange(0, 19), name="niceness", default=0),
    option("--cpus LIST", "Pin workers to processors, e.g. 0,1,4.", Processors()),
)
@section(
    "Learning",
    option("--batch N", "Steps per update. Default: one rollout of all lanes.", POSITIVE),
    option("--lag LAG", "Policy lag in versions: 0, 1 or any. Default: 1.", click.Choice(["0", "1", "any"])),
    option("--device D", "cpu, cuda or cuda:N. Default: cpu."),
    option(
        "--set NAME=VALUE",
        "Any setting, e.g. gamma=0.9 (repeatable).",
        EnvArg("learning_rate=3e-4"),
        name="settings",
        multiple=True,
    ),
    option("--policies N", "Train a population of N policies.", POSITIVE),
    option(
        "--pbt STEPS",
        "Exchange interval, or NAME=VALUE. Default: 100000.",
        Exchanging(),
        name="exchange",
        multiple=True,
    ),
)
@section(
    "Checkpoints",
    option("--checkpoint-seconds S", "Interval. Default: 60.", SECONDS, default=60.0),
    option("--keep N", "Newest checkpoints to keep. Default: 3.", POSITIVE, default=3),
    option("--milestones S", "Interval of checkpoints that are never deleted.", SECONDS, name="milestone_seconds"),
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    env_id: str | None,
    output: str | None,
    factory: str | None,
    env_args: Sequence[tuple[str, Any]],
    imports: Sequence[str],
    wrappers: Sequence[str],
    max_episode_steps: int | None,
    settings: Sequence[tuple[str, Any]],
    no_learn: bool,
    resume: str | None,
    verified: str | None,
    policies: int | None,
    exchange: Sequence[tuple[str, Any]],
    **given: Any,
) -> None:
    """Train a policy with PPO and record every step it learns from.
    Stops at the first limit. Ctrl-C saves everything; --resume continues.

    \b
    gym-trace train CartPole-v1 -o runs/cartpole --steps 100000 --seed 1
    gym-trace train --verify runs/cartpole
    """
    env_id, factory = drop_overruled(ctx, env_id=env_id, factory=factory)
    if sum(bool(mode) for mode in (env_id, factory, resume, verified)) != 1:
        raise click.UsageError("pass one of ENV_ID, --make MODULE:FUNCTION, --resume DIR and --verify DIR")
    _refuse_options(ctx, dict(settings))
    if given["trust"]:
        look_in_current_directory()  # may have what the run names
    find_here(str(dict(settings).get("model") or "").partition(":")[0])
    if verified is not None:
        _refuse_others(ctx, "--verify", {"verified"} | _ALWAYS)
        ctx.exit(_verify(verified, given["as_json"], given["quiet"], given["trust"]))
    chosen = {**dict(settings), **{name: given.pop(name) for name in _SETTINGS if given.get(name) is not None}}
    given = {name: value for name, value in given.items() if name not in _SETTINGS}
    if resume is not None:
        _refuse_others(ctx, "--resume", _OF_RESUME | _ALWAYS)
        named, about = environment_of(resume, given["trust"])
        _train(named, Path(resume), resume=True, describe=about, **given)
        return
    if all(given[name] is None for name in ("steps", "seconds", "until_return")):
        raise click.UsageError("no limit; pass --steps N, --seconds S or --until-return R")
    named = NamedEnvironment(env_id, factory, dict(env_args), tuple(imports), tuple(wrappers), max_episode_steps)
    directory = Path(output or "runs/" + (env_id or factory or "").replace("/", "-").replace(":", "-"))
    if policies is not None:
        from gym_trace.training import Exchange

        chosen |= {"policies": policies, "exchange": Exchange.of(dict(exchange))}
    elif exchange:
        raise click.UsageError("--pbt: needs a population; pass --policies N")
    _train(named, directory, learn=not no_learn, describe=described(named), **given, **chosen)


def _refuse_options(ctx: click.Context, settings: dict[str, Any]) -> None:
    """Raises UsageError for an option in --set, InvalidOption for an unknown setting."""
    from gym_trace.training.settings import Settings, settings_from

    options = {name: param for param in ctx.command.params for name in (str(param.name), param.opts[-1].lstrip("-"))}
    for name in sorted(settings.keys() - Settings.__dataclass_fields__.keys()):
        if isinstance(option := options.get(name), click.Option):
            value = "" if option.is_flag else " VALUE"
            raise click.UsageError(f"--set {name}: is an option; pass {option.opts[-1]}{value}")
        settings_from({name: settings[name]})


def _refuse_others(ctx: click.Context, mode: str, taken: set[str]) -> None:
    """Raises UsageError for options that a mode does not accept."""
    for param in ctx.command.params:
        given = ctx.get_parameter_source(str(param.name)) not in (ParameterSource.DEFAULT, None)
        if given and param.name not in taken:
            raise click.UsageError(f"{mode}: {param.opts[-1]} cannot change; omit it")


def _train(
    named: NamedEnvironment,
    directory: Path,
    *,
    quiet: bool,
    as_json: bool,
    tensorboard: str | None,
    seconds: float | None,
    **options: Any,
) -> None:
    """Train, show progress and a summary, and exit if interrupted."""
    from gym_trace.training.run import runs_in

    train = gym_trace.train  # first, because PyTorch may be missing
    if options["until_return"] is None and options.get("resume"):
        del options["until_return"]
    told: dict[str, float | None] = {"steps": options.get("steps"), "seconds": seconds}
    limits: dict[str, float] = {name: limit for name, limit in told.items() if limit is not None}
    resume = show.printable(f"gym-trace train --resume {shlex.quote(str(directory))}{trust_of(named)} resumes it")
    policies = options.get("policies") or len(runs_in(directory))
    plots = [Path(tensorboard)] if tensorboard else []
    if policies > 1:
        plots = [path / f"policy-{number}" for path in plots for number in range(policies)]
    with Watch(partial(report_of, limits), quiet=quiet, tensorboard=plots, group="train", saving=False) as watch:
        watch.line.update("starting")  # processes import PyTorch first
        if options.get("steps") is None:
            options.pop("steps", None)
        try:
            done = train(named, directory, seconds=seconds, command=_COMMAND, on_progress=watch, **options)
        except TrainingFailed:
            click.echo(f"everything up to the error is saved; {resume}", err=True)
            raise
        watch.finish(done)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(done), default=str))
    elif not quiet:
        print_summary(done, directory, named)
    if done.stopped == "interrupted":
        click.echo(f"{watch.stop.what_happened}; {resume}", err=True)
        raise SystemExit(watch.stop.exit_code)


def _verify(directory: str, as_json: bool, quiet: bool, trust: bool) -> int:
    from gym_trace.training import verify_run

    with StopSignals() as stop, ProgressLine(quiet=quiet) as line:

        def report(found: Relearnt) -> int:
            line.update_count(found.versions, found.of, "version")
            return stop.received

        found = verify_run(directory, report, trust=trust)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found)))
    for note in found.notes if not quiet else ():
        click.echo(show.printable(f"note: {note}"), err=True)
    if stop.received:
        click.echo(f"{stop.what_happened} after {show.count(found.versions)} of {show.count(found.of, 'version')}, "
                   "all equal", err=True)  # fmt: skip
        raise SystemExit(stop.exit_code)
    same = f"{show.count(found.versions, 'version')} and {show.count(found.checkpoints, 'checkpoint')}"
    if found.differs:
        click.echo(show.printable(f"differs: {found.differs}"), err=True)
        click.echo(f"before that {same} matched, of {show.count(found.of, 'version')}", err=True)
        return DIFFERS
    if not as_json and not quiet:
        click.echo(f"relearned: {same}, identical bit for bit")
    return FINE
