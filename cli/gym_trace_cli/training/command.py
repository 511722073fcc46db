"""gym-trace train"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
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
from gym_trace_cli.options import (
    EnvArg,
    FactoryName,
    TextOption,
    env_args_option,
    find_here,
    imports_option,
    look_in_current_directory,
    make_option,
)
from gym_trace_cli.record_config import config_option, drop_overruled
from gym_trace_cli.stopping import StopSignals
from gym_trace_cli.training.named import described, environment_of, trust_of
from gym_trace_cli.training.progress import Plotted, dashboard, line_of, print_summary

if TYPE_CHECKING:
    from gym_trace.training import Relearnt, Trained

_COMMAND = "gym-trace train"
_SETTINGS = ("workers", "num_envs", "rollout", "batch", "lag", "inference", "device")  # that are options of their own
_ALWAYS = {"as_json", "quiet", "trust", "config"}
_OF_RESUME = {"resume", "seconds", "until_return", "tensorboard", "checkpoint_seconds", "keep", "milestone_seconds"}
_OF_RESUME |= {"stall_timeout", "max_restarts", "niceness", "cpus"}


class Processors(TextOption):
    """--cpus: "0,1,4", as a list of numbers."""

    name = "numbers"

    def parsed(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if not all(part.strip().isdecimal() for part in value.split(",")):
            self.fail(f"{value!r} is no list of processors; write 0,1,2", param, ctx)
        return [int(part) for part in value.split(",")]


class Exchanging(EnvArg):
    """--pbt: a number of steps, or NAME=VALUE."""

    name = "steps"

    def __init__(self) -> None:
        super().__init__("gap=0.5")

    def parsed(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return ("period", int(value)) if value.isdecimal() else super().parsed(value, param, ctx)


class TrainCommand(click.Command):
    """Says of an option that there is not whether it is a setting."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from gym_trace.training.settings import Settings

        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-").replace("-", "_")
            if name not in Settings.__dataclass_fields__:
                raise
            raise click.UsageError(f"{error.option_name} is a setting: --set {name}=VALUE", ctx) from error


_positive = click.IntRange(min=1)
_seconds = click.FloatRange(min=0, min_open=True)


@click.command("train", cls=TrainCommand, short_help="Train a policy with PPO, and record all that it learns from.")
@click.argument("env_id", required=False, shell_complete=environment_ids)
@click.option("-o", "--output", metavar="DIR", type=click.Path(), help="Where to. Default: runs/ENV_ID.")
@click.option("--steps", type=_positive, metavar="N", help="Learn from N steps.")
@click.option("--seconds", type=_seconds, metavar="S", help="End after S seconds.")
@click.option("--until-return", type=float, metavar="R", help="End when the mean return of 100 episodes is R.")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="With it, and lag 0 or 1, weights are the same "
              "in every run.")  # fmt: skip
@make_option
@env_args_option
@imports_option
@click.option(
    "--wrapper",
    "wrappers",
    type=FactoryName(),
    multiple=True,
    metavar="M:C",
    help="Put MODULE:CALLABLE around each environment; each further one around those before.",
)
@click.option("--max-episode-steps", type=_positive, metavar="N", help="Truncate episodes after N steps.")
@click.option("-j", "--workers", type=click.IntRange(min=0), metavar="N", help="Processes that collect; 0: all in "
              "this one, for a debugger. Default: 2.")  # fmt: skip
@click.option("--num-envs", type=_positive, metavar="N", help="Environments that each steps side by side. Default: 16.")
@click.option("--rollout", type=_positive, metavar="N", help="Steps of each that are handed over at a time. "
              "Default: 32.")  # fmt: skip
@click.option("--batch", type=_positive, metavar="N", help="Steps of an update. Default: a rollout of all of them.")
@click.option(
    "--lag",
    type=click.Choice(["0", "1", "any"]),
    help="How old experience may be: collected with the newest weights, which waits for each update; with those "
    "before, while the update is learnt; or with any that there are. Default: 1.",
)
@click.option("--inference", type=click.Choice(["actor", "server"]), help="Who draws actions: each worker, or one "
              "process for all (for a GPU, or a large network). Default: actor.")  # fmt: skip
@click.option("--device", metavar="D", help="Where is learnt, and a server acts: cpu, cuda, cuda:1. Default: cpu.")
@click.option("--policies", type=_positive, metavar="N", help="Train N policies side by side, each with workers of its "
              "own; the worst go on from the best.")  # fmt: skip
@click.option("--pbt", "exchange", type=Exchanging(), multiple=True, metavar="STEPS", help="They are compared every "
              "STEPS steps (default: 100000); or NAME=VALUE: how, see docs/TRAINING.md.")  # fmt: skip
@click.option("--set", "settings", type=EnvArg("learning_rate=3e-4"), multiple=True, metavar="NAME=VALUE",
              help="Any setting there is: learning_rate, gamma, rnn … docs/TRAINING.md has them all.")  # fmt: skip
@click.option("--from", "begin_with", metavar="RUN", help="Begin with the weights of another run: DIR, which is its "
              "newest checkpoint, DIR@VERSION or DIR@best.")  # fmt: skip
@click.option("--no-learn", is_flag=True, help="Collect and record with the first weights, to see how fast that is.")
@click.option("--resume", metavar="DIR", type=click.Path(), help="Go on with the run in DIR, which was interrupted.")
@click.option("--verify", "verified", metavar="DIR", type=click.Path(), help="Learn all of the run in DIR again from "
              "its trace, and compare.")  # fmt: skip
@click.option("--trust", is_flag=True, help="Trust the run: import and call what only it names. Without this you are "
              "told what that would be.")  # fmt: skip
@click.option("--checkpoint-seconds", type=_seconds, default=60.0, metavar="S", help="Between checkpoints. "
              "Default: 60.")  # fmt: skip
@click.option("--keep", type=_positive, default=3, metavar="N", help="Keep the newest N of them. Default: 3.")
@click.option("--milestones", "milestone_seconds", type=_seconds, metavar="S", help="Seconds between such as are kept "
              "for good.")  # fmt: skip
@click.option("--stall-timeout", type=_seconds, default=120.0, metavar="S", help="Seconds without a sign of life, "
              "after which a worker is killed and started again. Default: 120.")  # fmt: skip
@click.option("--max-restarts", type=click.IntRange(min=0), default=100, metavar="N", help="Of all processes. "
              "Default: 100.")  # fmt: skip
@click.option("--cpus", type=Processors(), metavar="LIST", help="Keep workers to these processors, one each, in turn.")
@click.option("--nice", "niceness", type=click.IntRange(0, 19), default=0, metavar="N", help="Niceness of processes.")
@click.option("--argv", is_flag=True, help="Have the trace say the whole command line, not only what it is made by.")
@click.option("--git-diff", is_flag=True, help="Have the trace say what is changed here and not committed.")
@click.option("--tensorboard", metavar="DIR", type=click.Path(), help="Write scalars for TensorBoard.")
@click.option("--quiet", is_flag=True, help="Print nothing but warnings and errors.")
@click.option("--json", "as_json", is_flag=True, help="In the end print what came of it as one JSON object.")
@config_option
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
    """Train a policy in the Gymnasium environment ENV_ID with PPO, until the first of the limits is met, and
    record all that it learns from. With --make the environment is what that function makes.

    DIR gets a trace/ of all steps, checkpoints/, and a log of which steps each update was made of:
    from these --verify makes the same weights again, and exits with 3 if any are others.

    Ctrl-C, SIGTERM and SIGHUP end it once everything is saved, and --resume DIR goes on, as it does
    after a crash. A second Ctrl-C does not wait.

    What was learnt acts with gym-trace record ENV_ID --policy run:DIR.

    With --config the options are in a TOML file, by the names they have here, and settings in a
    table: steps = 500000, set = {learning_rate = 3e-4, rnn = "gru"}; ENV_ID is called environment.
    """
    env_id, factory = drop_overruled(ctx, env_id=env_id, factory=factory)
    if sum(bool(mode) for mode in (env_id, factory, resume, verified)) != 1:
        raise click.UsageError(
            "name an environment, ENV_ID or --make MODULE:FUNCTION; or --resume DIR; or --verify DIR: one of these"
        )
    _refuse_options(ctx, dict(settings))
    if given["trust"]:
        look_in_current_directory()  # which may have what the run names
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
        raise click.UsageError("say how long: --steps N, --seconds S, or --until-return R")
    named = NamedEnvironment(env_id, factory, dict(env_args), tuple(imports), tuple(wrappers), max_episode_steps)
    directory = Path(output or "runs/" + (env_id or factory or "").replace("/", "-").replace(":", "-"))
    if policies is not None:
        from gym_trace.training import Exchange

        chosen |= {"policies": policies, "exchange": Exchange.of(dict(exchange))}
    elif exchange:
        raise click.UsageError("--pbt says when policies take over from others: say how many, with --policies N")
    _train(named, directory, learn=not no_learn, describe=described(named), **given, **chosen)


def _refuse_options(ctx: click.Context, settings: dict[str, Any]) -> None:
    """Raises UsageError for what is set and is an option, InvalidOption for what is neither that nor a setting."""
    from gym_trace.training.settings import Settings, settings_from

    options = {name: param for param in ctx.command.params for name in (str(param.name), param.opts[-1].lstrip("-"))}
    for name in sorted(settings.keys() - Settings.__dataclass_fields__.keys()):
        if isinstance(option := options.get(name), click.Option):
            value = "" if option.is_flag else " VALUE"
            raise click.UsageError(f"--set {name}: it is an option: {option.opts[-1]}{value}")
        settings_from({name: settings[name]})


def _refuse_others(ctx: click.Context, mode: str, taken: set[str]) -> None:
    """Raises UsageError for options that a mode does not take."""
    for param in ctx.command.params:
        given = ctx.get_parameter_source(str(param.name)) not in (ParameterSource.DEFAULT, None)
        if given and param.name not in taken:
            raise click.UsageError(f"{mode} takes no {param.opts[-1]}: the run has what it was started with")


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
    """Trains, shows how it goes, and exits with what came of it."""
    from gym_trace.training.run import runs_in

    train = gym_trace.train  # before anything else, as it may not be installed
    if options["until_return"] is None and options.get("resume"):
        del options["until_return"]
    told: dict[str, float | None] = {"steps": options.get("steps"), "seconds": seconds}
    limits: dict[str, float] = {name: limit for name, limit in told.items() if limit is not None}
    restarts = 0
    going_on = show.printable(f"gym-trace train --resume {shlex.quote(str(directory))}{trust_of(named)} goes on")
    with StopSignals(notes=False) as stop, show.ProgressLine(quiet=quiet) as line, ExitStack() as stack:
        line.update("starting")  # processes import PyTorch first
        plotted = Plotted(tensorboard, options.get("policies") or len(runs_in(directory)), stack)

        def report(progress: Trained) -> int:
            nonlocal restarts
            stop.notes = True
            died, restarts = progress.restarts > restarts, progress.restarts
            fraction = show.fraction(progress, limits) if limits else None
            text = line_of(progress) + (f"  ({progress.trouble})" if died else "")
            line.update(show.printable(text), fraction, table=partial(dashboard, progress), at_once=died)
            plotted.add(progress)
            return stop.received

        if options.get("steps") is None:
            options.pop("steps", None)
        try:
            done = train(named, directory, seconds=seconds, command=_COMMAND, on_progress=report, **options)
        except TrainingFailed:
            click.echo(f"what was learnt up to the error is saved; {going_on}", err=True)
            raise
        plotted.add(done)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(done), default=str))
    elif not quiet:
        print_summary(done, directory, named)
    if done.stopped == "interrupted":
        click.echo(f"{stop.what_happened}; {going_on}", err=True)
        raise SystemExit(stop.exit_code)


def _verify(directory: str, as_json: bool, quiet: bool, trust: bool) -> int:
    from gym_trace.training import verify_run

    with StopSignals() as stop, show.ProgressLine(quiet=quiet) as line:

        def report(found: Relearnt) -> int:
            done = show.count(found.versions)
            line.update(f"{done} of {show.count(found.of, 'version')} learnt again", found.versions / found.of)
            return stop.received

        found = verify_run(directory, report, trust=trust)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found)))
    for note in found.notes if not quiet else ():
        click.echo(show.printable(f"note: {note}"), err=True)
    if stop.received:
        click.echo(f"{stop.what_happened} after {show.count(found.versions)} of {show.count(found.of, 'version')}, "
                   "which came out the same", err=True)  # fmt: skip
        raise SystemExit(stop.exit_code)
    same = f"{show.count(found.versions, 'version')} and {show.count(found.checkpoints, 'checkpoint')}"
    if found.differs:
        click.echo(show.printable(f"differs: {found.differs}"), err=True)
        click.echo(f"before that {same} came out the same, of {show.count(found.of, 'version')}", err=True)
        return DIFFERS
    if not as_json and not quiet:
        click.echo(f"learnt again: {same}, the same, bit for bit")
    return FINE
