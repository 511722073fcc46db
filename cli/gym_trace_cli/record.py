"""gym-trace record"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import gym_trace
from gym_trace.errors import TraceError, TraceExists
from gym_trace_cli import show
from gym_trace_cli.environments import import_modules, make_env
from gym_trace_cli.options import NamedCallable, env_args_option, imports_option, make_option
from gym_trace_cli.record_workers import record_with_workers
from gym_trace_cli.stopping import StopSignals, spared_children

if TYPE_CHECKING:
    from gym_trace.collecting.rollout import RolloutProgress

_COMMAND = "gym-trace record"
_DEFAULT_EPISODES = 10


class PolicyName(NamedCallable):
    """MODULE:CALLABLE; or "random", sb3:PATH, onnx:PATH, which stay as they are."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "random" or str(value).startswith(("sb3:", "onnx:")):
            return value
        return super().convert(value, param, ctx)


@click.command("record", short_help="Record episodes of an environment to a trace.")
@click.argument("env_id", required=False)
@click.option("-o", "--output", metavar="DIR", type=click.Path(), help="Where to. Default: traces/ENV_ID.")
@click.option("--episodes", type=click.IntRange(min=1), metavar="N", help="End after N complete episodes. Default: 10.")
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="End after N steps.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), metavar="S", help="End after S seconds.")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="With it episode k is the same in every run.")
@click.option(
    "--policy",
    type=PolicyName(),
    default="random",
    metavar="P",
    help="What acts: random, MODULE:CALLABLE, sb3:PATH (a checkpoint of Stable-Baselines3) or onnx:PATH. A function is "
    "called with the observation and returns the action, or the action and a dict of what to record beside it; of a "
    "class an object is made, with the observation space and the action space if it takes them, and its act() called, "
    "or it itself. If it has a method reset(seed), that is called before each episode.",
)
@make_option
@env_args_option
@imports_option
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
@click.option("--bytes", type=click.IntRange(min=1), metavar="N", help="End after N bytes on disk; with -j.")
@click.option("--resume", is_flag=True, help="Go on with a run that was interrupted; with -j.")
@click.option("--stall-timeout", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Seconds without a "
              "sign of life, after which a worker is killed and started again; with -j. Default: 120.")  # fmt: skip
@click.option("--max-restarts", type=click.IntRange(min=0), metavar="N", help="Of all workers; with -j. Default: 100.")
@click.option("--nice", "niceness", type=click.IntRange(0, 19), metavar="N", help="Niceness of workers; with -j.")
@click.option("--tensorboard", metavar="DIR", type=click.Path(), help="Write scalars for TensorBoard; with -j.")
@click.option("--argv", is_flag=True, help="Have the trace say the whole command line, not only what it is made by.")
@click.option("--git-diff", is_flag=True, help="Have the trace say what is changed here and not committed.")
@click.option("--infos", is_flag=True, help="Record infos too.")
@click.option(
    "--on-exist",
    type=click.Choice(["error", "append", "replace"]),
    default="error",
    help="If DIR holds a trace: refuse, record beside it, or delete it first.",
)
@click.option("--split", default="train", metavar="NAME", help="What the episodes are for, such as train or eval.")
@click.option("--level", type=click.IntRange(-7, 22), default=1, metavar="N", help="zstd level, -7 to 22. Default: 1.")
@click.option("--quiet", is_flag=True, help="Print nothing but warnings and errors.")
def command(
    env_id: str | None,
    output: str | None,
    episodes: int | None,
    steps: int | None,
    seconds: float | None,
    seed: int | None,
    policy: Any,
    factory: str | None,
    env_args: Sequence[tuple[str, Any]],
    imports: Sequence[str],
    num_envs: int | None,
    vectorization: str | None,
    autoreset: str | None,
    workers: int | None,
    bytes: int | None,
    resume: bool,
    stall_timeout: float | None,
    max_restarts: int | None,
    niceness: int | None,
    tensorboard: str | None,
    argv: bool,
    git_diff: bool,
    infos: bool,
    quiet: bool,
    **recording: Any,
) -> None:
    """Record episodes of the Gymnasium environment ENV_ID, until the first of the limits is met.
    With --make the environment is what that function makes, and there is no ENV_ID.

    Ctrl-C, SIGTERM and SIGHUP end the recording after the step it is at, and keep all of it. A
    second Ctrl-C does not wait for the step.

    With -j several processes record. Episode k is the same whoever records it, and what a process
    that dies has not saved is recorded again by another one. See also --resume.
    """
    from gym_trace.collecting.rollout import new_root_seed
    from gym_trace.recording.provenance import policy_name, provenance_of

    if (env_id is None) == (factory is None):
        raise click.UsageError("name an environment: ENV_ID, or --make MODULE:FUNCTION")
    if episodes is None and steps is None and seconds is None and bytes is None:
        episodes = _DEFAULT_EPISODES
    name = (env_id or factory or "").replace("/", "-").replace(":", "-")
    directory = Path(output or f"traces/{name}")
    limits: dict[str, Any] = {"episodes": episodes, "steps": steps, "seconds": seconds}
    of_workers = {
        "bytes": bytes,
        "resume": resume or None,
        "stall_timeout": stall_timeout,
        "max_restarts": max_restarts,
        "niceness": niceness,
        "tensorboard": tensorboard,
    }
    given = {name: value for name, value in of_workers.items() if value is not None}
    recording["record_infos"] = infos
    if workers is not None:
        if vectorization or autoreset:
            raise click.UsageError("-j excludes --vectorization-mode and --autoreset")
        options = {
            "command": _COMMAND,
            "argv": argv,
            "git_diff": git_diff,
            "workers": workers,
            "num_envs": num_envs,
            "seed": seed,
            **limits,
        }
        options |= {**given, **recording}
        record_with_workers(env_id, factory, directory, env_args, imports, policy, quiet, **options)
        return
    if given:
        raise click.UsageError(f"--{next(iter(given)).replace('_', '-').replace('niceness', 'nice')} needs -j")
    seed = new_root_seed() if seed is None else seed
    if num_envs is None and (vectorization or autoreset):
        raise click.UsageError("--vectorization-mode and --autoreset need --num-envs")
    import_modules(imports)
    with spared_children() if vectorization == "async" else nullcontext():
        env = make_env(env_id, dict(env_args), factory, num_envs, vectorization, autoreset)
    origin = provenance_of(_COMMAND, policy_name(policy), argv, git_diff)
    _record(env, policy, directory, quiet, origin, seed, limits, recording)


def _record(
    env: Any,
    policy: Any,
    directory: Path,
    quiet: bool,
    origin: dict[str, Any],
    seed: int,
    limits: dict[str, Any],
    recording: dict[str, Any],
) -> None:
    """Records in this process, shows how it goes, and exits with what came of it."""
    from gym_trace.collecting.policies import Annotating
    from gym_trace.recording.provenance import recorded_by

    made = _made(policy, env)  # before there is a directory, so that nothing is left where it cannot be made
    with (
        StopSignals() as stop,
        recorded_by(origin),
        closing(_recorder(env, directory, metadata={"seed": seed}, **recording)) as recorder,
        show.ProgressLine(quiet=quiet) as line,
    ):

        def report(progress: RolloutProgress) -> int:
            line.update(_state(progress), _fraction(progress, **limits))
            return stop.received

        try:
            acting = None if made is None else Annotating(made, recorder)
            done = gym_trace.record_episodes(recorder, policy=acting, seed=seed, on_progress=report, **limits)
        except Exception as error:
            if isinstance(error, TraceError):
                raise
            click.echo(f"what was recorded up to the error is in {show.printable(directory)}", err=True)
            if stop.received:  # Ctrl-C reaches the processes of an environment too, which then fails
                raise SystemExit(stop.exit_code) from error
            raise
    if stop.received:
        click.echo(f"{stop.what_happened}; every step up to here is saved", err=True)
    if not quiet:
        _print_summary(done, directory)
    if stop.received:
        raise SystemExit(stop.exit_code)


def _made(policy: Any, env: Any) -> Any:
    """The policy, made for an environment; None for random actions."""
    from gym_trace.collecting.policies import policy_maker

    if policy == "random":
        return None
    if str(policy).startswith("onnx:") and hasattr(env, "single_action_space"):
        raise click.UsageError("onnx: takes single observations; with --num-envs it needs -j, too")
    return policy_maker(policy)(env.observation_space, env.action_space)


def _recorder(env: Any, directory: Path, **options: Any) -> Any:
    from gymnasium.vector import VectorEnv

    vector = isinstance(env, VectorEnv)
    wrapper: Any = gym_trace.TraceRecordingVectorWrapper if vector else gym_trace.TraceRecordingWrapper
    try:
        return wrapper(env, directory, **options)
    except TraceExists as error:
        # The library speaks of its arguments, the command line of its options.
        words = str(error).replace('on_exist="append"', "--on-exist append")
        raise TraceExists(words.replace('on_exist="replace"', "--on-exist replace")) from error


def _fraction(progress: RolloutProgress, episodes: int | None, steps: int | None, seconds: float | None) -> float:
    """How far it is to the limit that is nearest."""
    ways = ((progress.episodes, episodes), (progress.steps, steps), (progress.seconds, seconds))
    return max(min(1.0, gone / limit) for gone, limit in ways if limit is not None)


def _state(progress: RolloutProgress) -> str:
    speed = progress.steps / max(progress.seconds, 1e-9)
    return "  ".join(show.recorded(progress.episodes, progress.steps, speed, progress.bytes, progress.mean_return))


def _print_summary(done: RolloutProgress, directory: Path) -> None:
    from gym_trace.collecting.rollout import directory_bytes

    number = done.open_episodes
    cut_short = ", the last one cut short" if number == 1 else f", the last {number} cut short" if number else ""
    speed = show.count(round(done.steps / max(done.seconds, 1e-9)))
    click.echo(
        f"recorded {show.count(done.episodes + number, 'episode')}{cut_short}: "
        f"{show.count(done.steps, 'step')} in {show.duration(done.seconds)} ({speed} steps/s)"
    )
    if done.mean_return is not None and done.min_return is not None and done.max_return is not None:
        click.echo(show.returns(done.mean_return, done.min_return, done.max_return, lately=done.episodes > 100))
    click.echo(f"{show.printable(directory)}: {show.size(directory_bytes(directory))}, seed {done.seed}\n")
    show.next_commands(directory)
