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
from gym_trace_cli.help import headed, section
from gym_trace_cli.options import (
    EnvArg,
    FactoryName,
    NamedCallable,
    environment_options,
    look_in_current_directory,
    provenance_options,
    quiet_option,
)
from gym_trace_cli.record_config import config_options, drop_overruled, write_config
from gym_trace_cli.record_workers import in_words_of_options, print_recorded_as_json, record_with_workers
from gym_trace_cli.stopping import StopSignals, spared_children

if TYPE_CHECKING:
    from gym_trace.collecting.rollout import RolloutProgress

_COMMAND = "gym-trace record"
_DEFAULT_EPISODES = 10
_OWN_METADATA = ("seed", "run")
_FACTS = "For search and the card (tag: repeatable)."
_positive = click.IntRange(min=1)
_seconds = click.FloatRange(min=0, min_open=True)


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


@headed("record")
@click.argument("env_id", required=False, shell_complete=environment_ids)
@section(
    "Output",
    click.option("-o", "--output", metavar="DIR", type=click.Path(), help="Trace directory. Default: traces/ENV_ID."),
    click.option(
        "--on-exist",
        type=click.Choice(["error", "append", "replace"]),
        default="error",
        metavar="MODE",
        help="Old trace: error, append, replace. Default: error.",
    ),
    click.option("--split", default="train", metavar="NAME", help="Split of the episodes. Default: train."),
    click.option("--infos", is_flag=True, help="Record infos."),
    click.option("--video", type=ScheduleName(), metavar="S", help="Film episodes: cubic, every:N or MODULE:FUNCTION."),
    click.option("--tensorboard", metavar="DIR", type=click.Path(), help="Write TensorBoard scalars."),
    click.option(
        "--level", type=click.IntRange(-7, 22), default=1, metavar="N", help="zstd level, -7 to 22. Default: 1."
    ),
    quiet_option,
    click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object."),
    *config_options,
)
@section(
    "Limits",
    click.option(
        "--episodes", type=_positive, metavar="N", help="Complete episodes. Default: 10 if no limit is given."
    ),
    click.option("--steps", type=_positive, metavar="N", help="Steps."),
    click.option("--seconds", type=_seconds, metavar="S", help="Seconds."),
    click.option("--bytes", type=_positive, metavar="N", help="Bytes on disk, approximately."),
)
@section(
    "Environment and policy",
    *environment_options,
    click.option(
        "--policy",
        type=PolicyName(),
        default="random",
        metavar="P",
        shell_complete=policies,
        help="M:CALLABLE, run:DIR, sb3:PATH, onnx:PATH, or random.",
    ),
    click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Make episode k the same in every run."),
)
@section(
    "Several environments or processes",
    click.option("--num-envs", type=_positive, metavar="N", help="Record a vector environment with N lanes."),
    click.option(
        "--vectorization-mode",
        "vectorization",
        type=click.Choice(["sync", "async", "vector_entry_point"]),
        metavar="M",
        help="sync, async, vector_entry_point. Default: sync.",
    ),
    click.option(
        "--autoreset",
        type=click.Choice(["next-step", "same-step", "disabled"]),
        metavar="MODE",
        help="next-step, same-step, disabled. Default: next-step.",
    ),
    click.option("-j", "--workers", type=_positive, metavar="N", help="Record with N processes."),
    click.option("--resume", is_flag=True, help="Resume an interrupted run of -j."),
    click.option(
        "--stall-timeout", type=_seconds, metavar="S", help="Restart a worker silent for S seconds. Default: 120."
    ),
    click.option(
        "--max-restarts", type=click.IntRange(min=0), metavar="N", help="Restarts allowed, all workers. Default: 100."
    ),
    click.option("--nice", "niceness", type=click.IntRange(0, 19), metavar="N", help="Niceness of workers, 0 to 19."),
)
@section(
    "Metadata",
    click.option("--author", metavar="TEXT", help=_FACTS),
    click.option("--licence", "--license", "license", metavar="ID", help=_FACTS),
    click.option("--description", metavar="TEXT", help=_FACTS),
    click.option("--tag", "tags", multiple=True, metavar="WORD", help=_FACTS),
    click.option(
        "--metadata", type=EnvArg(), multiple=True, metavar="K=V", help="Extra metadata, JSON or text (repeatable)."
    ),
    *provenance_options,
)
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
    """Record episodes of a Gymnasium environment until the first limit.
    Ctrl-C stops after the current step and keeps everything.

    \b
    gym-trace record CartPole-v1 -o traces/cartpole --episodes 100 --seed 0
    gym-trace record CartPole-v1 -o traces/night --episodes 2000 -j 2
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
    from gym_trace.collecting.rollout import new_root_seed
    from gym_trace.collecting.run_log import settings_of

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
            from gym_trace.collecting.tensorboard import Scalars

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
