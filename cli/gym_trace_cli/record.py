"""gym-trace record"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import gym_trace
from gym_trace.errors import InvalidOption, TraceError
from gym_trace_cli import show
from gym_trace_cli.completion import environment_ids, policies
from gym_trace_cli.environments import NamedEnvironment, import_modules
from gym_trace_cli.options import (
    EnvArg,
    FactoryName,
    NamedCallable,
    env_args_option,
    imports_option,
    look_in_current_directory,
    make_option,
)
from gym_trace_cli.record_config import config_options, drop_overruled, write_config
from gym_trace_cli.record_workers import in_words_of_options, print_recorded_as_json, record_with_workers
from gym_trace_cli.stopping import StopSignals, spared_children

if TYPE_CHECKING:
    from gym_trace.collecting.rollout import RolloutProgress

_COMMAND = "gym-trace record"
_DEFAULT_EPISODES = 10
_OWN_METADATA = ("seed", "run")


class PolicyName(FactoryName):
    """MODULE:CALLABLE; or "random", sb3:PATH, onnx:PATH, run:DIR, which are names of their own."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if _is_name(value) else super().convert(value, param, ctx)


class ScheduleName(FactoryName):
    """cubic, every:N, or MODULE:FUNCTION of the number of an episode."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from gym_trace.video.schedules import schedule_of

        if value == "cubic" or str(value).startswith("every:"):
            try:
                schedule_of(value)
            except InvalidOption as error:
                self.fail(str(error), param, ctx)
            return value
        return super().convert(value, param, ctx)


@click.command("record", short_help="Record episodes of an environment to a trace.")
@click.argument("env_id", required=False, shell_complete=environment_ids)
@click.option("-o", "--output", metavar="DIR", type=click.Path(), help="Where to. Default: traces/ENV_ID.")
@click.option("--episodes", type=click.IntRange(min=1), metavar="N", help="End after N complete episodes. Default: 10.")
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="End after N steps.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), metavar="S", help="End after S seconds.")
@click.option("--bytes", type=click.IntRange(min=1), metavar="N", help="End soon after N bytes on disk.")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="With it episode k is the same in every run.")
@click.option(
    "--policy",
    type=PolicyName(),
    default="random",
    metavar="P",
    shell_complete=policies,
    help="What acts: random, MODULE:CALLABLE, run:DIR (what gym-trace train has learnt; also run:DIR@VERSION, "
    "run:DIR@best, and behind it ?sample to draw actions rather than take the likeliest), sb3:PATH (a checkpoint of "
    "Stable-Baselines3) or onnx:PATH. A function is called with the observation and returns the action, or the action "
    "and a dict of what to record beside it; of a class an object is made, with the observation space and the action "
    "space if it takes them, and its act() called, or it itself. If it has a method reset(seed), that is called before "
    "each episode.",
)
@make_option
@env_args_option
@imports_option
@click.option(
    "--wrapper",
    "wrappers",
    type=FactoryName(),
    multiple=True,
    metavar="M:C",
    help="Put MODULE:CALLABLE around the environment, below what records; each further one around those before.",
)
@click.option("--max-episode-steps", type=click.IntRange(min=1), metavar="N", help="Truncate episodes after N steps.")
@click.option("--num-envs", type=click.IntRange(min=1), metavar="N", help="Run N of them as a vector environment.")
@click.option(
    "--vectorization-mode",
    "vectorization",
    type=click.Choice(["sync", "async", "vector_entry_point"]),
    help="How, with --num-envs: in this process, in one process each, or as the environment itself provides.",
)
@click.option(
    "--autoreset",
    type=click.Choice(["next-step", "same-step", "disabled"]),
    help="When, with --num-envs, an environment that has ended is reset. Default: next-step.",
)
@click.option("-j", "--workers", type=click.IntRange(min=1), metavar="N", help="Record with N processes.")
@click.option("--resume", is_flag=True, help="Go on with a run that was interrupted; with -j.")
@click.option("--stall-timeout", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Seconds without a "
              "sign of life, after which a worker is killed and started again; with -j. Default: 120.")  # fmt: skip
@click.option("--max-restarts", type=click.IntRange(min=0), metavar="N", help="Of all workers; with -j. Default: 100.")
@click.option("--nice", "niceness", type=click.IntRange(0, 19), metavar="N", help="Niceness of workers; with -j.")
@click.option("--author", metavar="TEXT", help="Have the trace say who made it; see gym-trace card.")
@click.option("--licence", "--license", "license", metavar="ID", help="And under which licence, such as cc-by-4.0.")
@click.option("--description", metavar="TEXT", help="And what it is.")
@click.option("--tag", "tags", multiple=True, metavar="WORD", help="And what others look for it by.")
@click.option("--metadata", type=EnvArg(), multiple=True, metavar="K=V", help="Keep K=V with the trace; V as in "
              "--env-arg.")  # fmt: skip
@click.option("--argv", is_flag=True, help="Have the trace say the whole command line, not only what it is made by.")
@click.option("--git-diff", is_flag=True, help="Have the trace say what is changed here and not committed.")
@click.option("--infos", is_flag=True, help="Record infos too.")
@click.option("--video", type=ScheduleName(), metavar="S", help="Film episodes: cubic (0, 1, 8, 27 to 729, then every "
              "1000th), every:N, or MODULE:FUNCTION of their number.")  # fmt: skip
@click.option("--tensorboard", metavar="DIR", type=click.Path(), help="Write scalars for TensorBoard.")
@click.option(
    "--on-exist",
    type=click.Choice(["error", "append", "replace"]),
    default="error",
    help="If DIR holds a trace: refuse, record beside it, or delete it first.",
)
@click.option("--split", default="train", metavar="NAME", help="What the episodes are for, such as train or eval.")
@click.option("--level", type=click.IntRange(-7, 22), default=1, metavar="N", help="zstd level, -7 to 22. Default: 1.")
@click.option("--quiet", is_flag=True, help="Print nothing but warnings and errors.")
@click.option("--json", "as_json", is_flag=True, help="In the end print what was recorded as one JSON object.")
@config_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    env_id: str | None,
    output: str | None,
    episodes: int | None,
    steps: int | None,
    seconds: float | None,
    bytes: int | None,
    seed: int | None,
    policy: str,
    factory: str | None,
    env_args: Sequence[tuple[str, Any]],
    imports: Sequence[str],
    wrappers: Sequence[str],
    max_episode_steps: int | None,
    num_envs: int | None,
    vectorization: str | None,
    autoreset: str | None,
    workers: int | None,
    resume: bool,
    stall_timeout: float | None,
    max_restarts: int | None,
    niceness: int | None,
    author: str | None,
    license: str | None,
    description: str | None,
    tags: Sequence[str],
    metadata: Sequence[tuple[str, Any]],
    argv: bool,
    git_diff: bool,
    infos: bool,
    video: str | None,
    tensorboard: str | None,
    quiet: bool,
    as_json: bool,
    new_config: str | None,
    **recording: Any,
) -> None:
    """Record episodes of the Gymnasium environment ENV_ID, until the first of the limits is met.
    With --make the environment is what that function makes, and there is no ENV_ID.

    Ctrl-C, SIGTERM and SIGHUP end the recording after the step it is at, and keep all of it. A
    second Ctrl-C does not wait for the step.

    With -j several processes record. Episode k is the same whoever records it, and what a process
    that dies has not saved is recorded again by another one. See also --resume.

    With --config the options are in a TOML file, by the names they have here: episodes = 100,
    policy = "agents:greedy", env-arg = {render_mode = "rgb_array"}, tag = ["cartpole"]; ENV_ID is
    called environment. What the command line says counts instead of what the file says.
    """
    env_id, factory = drop_overruled(ctx, env_id=env_id, factory=factory)
    if (env_id is None) == (factory is None):
        raise click.UsageError("name an environment: ENV_ID, or --make MODULE:FUNCTION")
    limits = {"episodes": episodes, "steps": steps, "seconds": seconds, "bytes": bytes}
    if all(limit is None for limit in limits.values()):
        limits["episodes"] = _DEFAULT_EPISODES
    name = (env_id or factory or "").replace("/", "-").replace(":", "-")
    directory = Path(output or f"traces/{name}")
    given = dict(metadata)
    if taken := sorted(set(_OWN_METADATA) & set(given)):
        raise click.UsageError(f"--metadata {taken[0]}=…: a recording says that itself, call yours another name")
    facts = {"author": author, "license": license, "description": description, "tags": list(tags)}
    facts = {key: value for key, value in facts.items() if value}
    of_workers = {
        "resume": resume or None,
        "stall_timeout": stall_timeout,
        "max_restarts": max_restarts,
        "niceness": niceness,
    }
    of_workers = {name: value for name, value in of_workers.items() if value is not None}
    if workers is None and of_workers:
        raise click.UsageError(f"--{next(iter(of_workers)).replace('_', '-').replace('niceness', 'nice')} needs -j")
    if workers is None and num_envs is not None and str(policy).startswith(("onnx:", "run:")):
        workers = 1  # of those that act in single environments, each lane has one there
    if workers is not None and (vectorization or autoreset):
        raise click.UsageError("-j, and a policy that acts in single environments, exclude --vectorization-mode and "
                               "--autoreset")  # fmt: skip
    if num_envs is None and (vectorization or autoreset):
        raise click.UsageError("--vectorization-mode and --autoreset need --num-envs")
    if video is not None and (workers is not None or num_envs is not None):
        raise click.UsageError("--video films a single environment: leave out -j and --num-envs, or film episodes "
                               "afterwards with gym-trace render")  # fmt: skip
    arguments = dict(env_args)
    if video is not None and factory is None:
        arguments.setdefault("render_mode", "rgb_array")
    named = NamedEnvironment(env_id, factory, arguments, tuple(imports), tuple(wrappers), max_episode_steps)
    seed = _seed(seed, directory, resume)
    if new_config is not None:
        write_config(ctx, new_config, seed)
    acting = policy if _is_name(policy) else NamedCallable().convert(policy, None, None)
    if str(policy).startswith("run:") and "trust" in str(policy).partition("?")[2]:
        look_in_current_directory()  # which may have its model
    recording |= {"record_infos": infos}
    if workers is not None:
        recording |= {"metadata": given} if given else {}
        about = {"command": _COMMAND, "argv": argv, "git_diff": git_diff, "facts": facts}
        options = {"workers": workers, "num_envs": num_envs, "seed": seed, **limits, **of_workers, **about, **recording}
        record_with_workers(named, directory, acting, quiet, as_json, tensorboard, **options)
        return
    recording |= {"metadata": {**given, "seed": seed}}
    if video is not None:
        named_schedule = video == "cubic" or video.startswith("every:")
        recording["video"] = video if named_schedule else NamedCallable().convert(video, None, None)
    import_modules(imports)
    with spared_children() if vectorization == "async" else nullcontext():
        env = named(num_envs, vectorization, autoreset)
    run = {"seed": seed, **limits}
    _record(env, named, acting, directory, quiet, as_json, tensorboard, (argv, git_diff), facts, run, recording)


def _is_name(policy: Any) -> bool:
    return policy == "random" or str(policy).startswith(("sb3:", "onnx:", "run:"))


def _seed(given: int | None, directory: Path, resume: bool) -> int:
    """The seed of the run, also where nobody said one: that of the run that is gone on with, or a new one."""
    from gym_trace.collecting.resuming import settings_of
    from gym_trace.collecting.rollout import new_root_seed

    if given is not None:
        return given
    before = settings_of(directory) if resume else None
    return new_root_seed() if before is None else int(before["seed"])


def _record(
    env: Any,
    named: NamedEnvironment,
    policy: Any,
    directory: Path,
    quiet: bool,
    as_json: bool,
    tensorboard: str | None,
    private: tuple[bool, bool],
    facts: dict[str, Any],
    run: dict[str, Any],
    recording: dict[str, Any],
) -> None:
    """Records in this process, shows how it goes, and exits with what came of it.

    private: whether the trace is to say argv, and the git diff. run: limits and seed, as record_episodes takes them.
    """
    from gym_trace.collecting.policies import Annotating, policy_maker
    from gym_trace.format.facts import add_facts
    from gym_trace.recording.provenance import provenance_of, recorded_by
    from gym_trace.storage.local import LocalStorage

    maker = policy_maker(policy)  # before there is a directory, so that nothing is left where it cannot be made
    made = None if policy == "random" else maker(env.observation_space, env.action_space)
    limits = {name: limit for name, limit in run.items() if name != "seed" and limit is not None}
    with (
        StopSignals() as stop,
        recorded_by(provenance_of(_COMMAND, maker.name, *private, named)),
        ExitStack() as stack,
    ):
        scalars = None
        if tensorboard is not None:
            from gym_trace.processes.tensorboard import Scalars

            scalars = stack.enter_context(Scalars(tensorboard))
        recorder = _recorder(env, directory, **recording)
        stack.callback(recorder.close)
        add_facts(LocalStorage(directory), facts)
        line = stack.enter_context(show.ProgressLine(quiet=quiet))

        def report(progress: RolloutProgress) -> int:
            line.update(_state(progress), show.fraction(progress, limits))
            if scalars is not None:
                _plot(scalars, progress)
            return stop.received

        try:
            acting = None if made is None else Annotating(made, recorder)
            done = gym_trace.record_episodes(recorder, policy=acting, on_progress=report, **run)
        except Exception as error:
            if isinstance(error, TraceError):
                raise
            click.echo(f"what was recorded up to the error is in {show.printable(directory)}", err=True)
            if stop.received:  # Ctrl-C reaches the processes of an environment too, which then fails
                raise SystemExit(stop.exit_code) from error
            raise
        if scalars is not None:
            _plot(scalars, done)
    if stop.received:
        click.echo(f"{stop.what_happened}; every step up to here is saved", err=True)
    if as_json:
        print_recorded_as_json(directory, done.seed)
    elif not quiet:
        _print_summary(done, directory)
    if stop.received:
        raise SystemExit(stop.exit_code)


def _recorder(env: Any, directory: Path, **options: Any) -> Any:
    from gymnasium.vector import VectorEnv

    vector = isinstance(env, VectorEnv)
    wrapper: Any = gym_trace.TraceRecordingVectorWrapper if vector else gym_trace.TraceRecordingWrapper
    with in_words_of_options():
        return wrapper(env, directory, **options)


def _plot(scalars: Any, progress: RolloutProgress) -> None:
    mean, least, most = progress.mean_return, progress.min_return, progress.max_return
    returns = None if mean is None or least is None or most is None else (mean, least, most)
    speed = progress.steps / max(progress.seconds, 1e-9)
    scalars.add(progress.steps, returns, episodes=progress.episodes, steps_per_second=speed, bytes=progress.bytes)


def _state(progress: RolloutProgress) -> str:
    speed = progress.steps / max(progress.seconds, 1e-9)
    return "  ".join(show.recorded(progress.episodes, progress.steps, speed, progress.bytes, progress.mean_return))


def _print_summary(done: RolloutProgress, directory: Path) -> None:
    from gym_trace.storage.local import LocalStorage

    number = done.open_episodes
    cut_short = ", the last one cut short" if number == 1 else f", the last {number} cut short" if number else ""
    speed = show.count(round(done.steps / max(done.seconds, 1e-9)))
    click.echo(
        f"recorded {show.count(done.episodes + number, 'episode')}{cut_short}: "
        f"{show.count(done.steps, 'step')} in {show.duration(done.seconds)} ({speed} steps/s)"
    )
    if done.mean_return is not None and done.min_return is not None and done.max_return is not None:
        click.echo(show.returns(done.mean_return, done.min_return, done.max_return, lately=done.episodes > 100))
    click.echo(f"{show.printable(directory)}: {show.size(LocalStorage(directory).allocated())}, seed {done.seed}\n")
    show.next_commands(directory)
