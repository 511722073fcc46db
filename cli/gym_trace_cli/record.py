"""gym-trace record: in this process, or with workers"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import gym_trace
from gym_trace.errors import TraceError, TraceExists
from gym_trace.recording import run_settings, schedule_of
from gym_trace.storage import LocalStorage, is_url, path_of
from gym_trace_cli import show
from gym_trace_cli.completion import environment_ids, policies
from gym_trace_cli.environments import NamedEnvironment, environment_options, import_modules
from gym_trace_cli.exit_codes import ERROR, FINE
from gym_trace_cli.help import headed, opt, option, options_of, section, shared
from gym_trace_cli.options import (
    NOT_NEGATIVE,
    PATH,
    POSITIVE,
    SECONDS,
    EnvArg,
    FactArg,
    callable_name,
    look_in_current_directory,
    named_callable,
    new_seed,
    on_exist_option,
    quiet_option,
)
from gym_trace_cli.progress import Report, Watch, fraction
from gym_trace_cli.record_config import config_option, write_config, write_config_option
from gym_trace_cli.stopping import Ended, StopSignals, spared_children

if TYPE_CHECKING:
    from gym_trace.results import Collected, RolloutProgress

_COMMAND = "gym-trace record"
_DEFAULT_EPISODES = 10
_OWN_METADATA = ("seed", "run")


fact_option = option("--fact K=V", "Fact, e.g. license=MIT (repeatable).", FactArg(), name="facts")
provenance_option = option("--full-provenance", "Also store command line and uncommitted changes.", hidden=True)
metadata_option = option("--metadata K=V", "Extra metadata, JSON or text (repeatable).", EnvArg())


def _is_name(policy: str) -> bool:
    return policy == "random" or policy.startswith(("sb3:", "onnx:", "run:"))


def named_policy(policy: str) -> Any:
    """Return --policy as the library takes it: a name or a callable."""
    if policy.startswith("run:") and "trust" in policy.partition("?")[2]:
        look_in_current_directory()  # which may have its model
    return policy if _is_name(policy) else named_callable(policy)


def _is_named_schedule(video: str) -> bool:
    return video == "cubic" or video.startswith("every:")


def policy_name(value: str) -> str:
    """Check MODULE:CALLABLE; or random, sb3:PATH, onnx:PATH, run:DIR."""
    if value.isidentifier() and not _is_name(value):
        raise click.BadParameter(f"{value!r} is not a policy; use random, MODULE:NAME, sb3:PATH, onnx:PATH or run:DIR")
    return value if _is_name(value) else callable_name(value)


def _schedule_name(value: str) -> str:
    """Check cubic, every:N, or MODULE:FUNCTION of the number of an episode."""
    if not _is_named_schedule(value):
        return callable_name(value)
    schedule_of(value)
    return value


def _shard(value: str) -> tuple[int, int]:
    """Parse --shard: "3/10" is the fourth of ten."""
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", value)
    if match is None or int(match[1]) >= int(match[2]):
        raise click.BadParameter(f"{value!r} is not a shard; write 0/10 to 9/10 for ten of them")
    return int(match[1]), int(match[2])


policy_option = option(
    "--policy P",
    "M:CALLABLE, run:DIR, sb3:PATH, onnx:PATH, or random.",
    policy_name,
    default="random",
    shell_complete=policies,
)


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """Options of gym-trace record."""

    output: str | None = opt("-o, --output DIR", "Trace directory. Default: traces/ENV_ID.", PATH, under="Output")
    on_exist: str = shared(on_exist_option)
    split: str = opt("--split NAME", "Split of the episodes. Default: train.", default="train")
    record_infos: bool = opt("--infos", "Record infos.")
    states: int | None = opt("--states K", "Keep states every K steps, for env_at.", POSITIVE)
    video: str | None = opt("--video S", "Film episodes: cubic, every:N or MODULE:FUNCTION.", _schedule_name)
    tensorboard: str | None = opt("--tensorboard DIR", "Write TensorBoard scalars.", PATH)
    level: int = opt("--level N", "zstd level, -7 to 22. Default: 1.", click.IntRange(-7, 22), default=1, hidden=True)
    quiet: bool = shared(quiet_option)
    as_json: bool = opt("--json", "Print the summary as one JSON object.")
    new_config: str | None = shared(write_config_option)
    episodes: int | None = opt(
        "--episodes N", "Complete episodes. Default: 10 if no limit is given.", POSITIVE, under="Limits"
    )
    steps: int | None = opt("--steps N", "Steps.", POSITIVE)
    seconds: float | None = opt("--seconds S", "Seconds.", SECONDS)
    bytes: int | None = opt("--bytes N", "Bytes on disk, approximately.", POSITIVE)
    named: NamedEnvironment = shared(environment_options, under="Environment and policy")
    policy: str = shared(policy_option)
    seed: int | None = opt("--seed N", "Seed: episode k is the same in every run.", NOT_NEGATIVE)
    num_envs: int | None = opt("--num-envs N", "Lanes of a vector environment.", POSITIVE, under="Lanes and processes")
    vectorization: str | None = opt(
        "--vectorization-mode M",
        "sync, async, vector_entry_point. Default: sync.",
        ["sync", "async", "vector_entry_point"],
        hidden=True,
    )
    workers: int | None = opt("-j, --workers N", "Record with N processes.", POSITIVE)
    ray: str | None = opt("--ray ADDRESS", "Run the workers on Ray: auto, local or an address.", hidden=True)
    shard: tuple[int, int] | None = opt("--shard I/N", "Record only episodes k with k mod N = I.", _shard, hidden=True)
    resume: bool = opt("--resume", "Resume an interrupted run of -j.")
    stall_timeout: float | None = opt(
        "--stall-timeout S", "Restart a worker silent for S seconds. Default: 120.", SECONDS, hidden=True
    )
    facts: Sequence[tuple[str, Any]] = shared(fact_option, under="Metadata")
    metadata: Sequence[tuple[str, Any]] = shared(metadata_option)
    full_provenance: bool = shared(provenance_option)

    def of_workers(self) -> dict[str, Any]:
        """Return the options that need workers, as arguments of collect()."""
        names = ("shard", "resume", "stall_timeout")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None and value is not False}


@headed("record")
@click.argument("env_id", required=False, shell_complete=environment_ids)
@options_of(RecordOptions)
@section("Output", config_option)
@click.pass_context
def command(ctx: click.Context, /, options: RecordOptions) -> int:
    """Record episodes until the first limit; Ctrl-C keeps everything.

    \b
    gym-trace record CartPole-v1 -o traces/cartpole --episodes 100 --seed 0
    """
    named = options.named
    if (named.env_id is None) == (named.factory is None):
        raise click.UsageError("pass an environment: either ENV_ID or --make MODULE:FUNCTION")
    limits = {name: getattr(options, name) for name in ("episodes", "steps", "seconds", "bytes")}
    if all(limit is None for limit in limits.values()):
        limits["episodes"] = _DEFAULT_EPISODES
    directory = path_of(options.output or f"traces/{named.file_name}")
    metadata = dict(options.metadata)
    if reserved := sorted(set(_OWN_METADATA) & set(metadata)):
        raise click.UsageError(f"--metadata {reserved[0]}=…: reserved; choose another name")
    workers = _workers(options)
    if options.video is not None:
        if workers is not None or options.num_envs is not None:
            raise click.UsageError("--video: needs a single environment; omit -j and --num-envs, or film episodes "
                                   "afterwards with gym-trace render")  # fmt: skip
        if named.factory is None:
            named.env_args.setdefault("render_mode", "rgb_array")
    seed = _seed(options.seed, directory, options.resume)
    if options.new_config is not None:
        write_config(ctx, options.new_config, seed)
    policy = named_policy(options.policy)
    plots = [Path(options.tensorboard)] if options.tensorboard else []
    report = partial(_report, {name: limit for name, limit in limits.items() if limit is not None})
    watch = Watch(report, quiet=options.quiet, tensorboard=plots)
    names = ("on_exist", "split", "record_infos", "level")
    recording = {name: getattr(options, name) for name in names} | {"facts": dict(options.facts)}
    recording |= {"argv": options.full_provenance, "git_diff": options.full_provenance}
    recording |= {"metadata": metadata} if metadata else {}
    recording |= {} if options.states is None else {"states": options.states}
    recording |= {"seed": seed, "command": _COMMAND, **limits}
    done: Any
    if workers is not None:
        recording |= {"workers": workers, "num_envs": options.num_envs, "describe": named.described()}
        recording |= {**options.of_workers(), "on_progress": watch}
        with watch, errors_name_options(directory), _backend(options.ray) as backend:
            done = gym_trace.collect(named, policy, directory, backend=backend, **recording)
            watch.finish(done)
    else:
        recording |= {"make_env": named}
        if options.video is not None:
            is_named = _is_named_schedule(options.video)
            recording["video"] = options.video if is_named else named_callable(options.video)
        import_modules(named.imports)
        with spared_children() if options.vectorization == "async" else nullcontext():
            env = named(options.num_envs, options.vectorization)
        done = _record_here(env, policy, directory, watch, recording)
    return _summarize(done, watch.stop, directory, named.replaying(), options.quiet, options.as_json)


def _workers(options: RecordOptions) -> int | None:
    """Return the number of workers, or None to record in this process. Raises UsageError."""
    workers, shard = options.workers, options.shard
    if options.ray is not None and workers is None:
        raise click.UsageError("--ray needs -j, the number of its actors")
    if shard is not None:
        workers = workers or 1
        if options.seed is None:
            raise click.UsageError("--shard needs --seed, the same for all shards")
    if workers is None and (given := options.of_workers()):
        raise click.UsageError(f"--{next(iter(given)).replace('_', '-')} needs -j")
    if workers is None and options.num_envs is not None and options.policy.startswith(("onnx:", "run:")):
        workers = 1  # these policies act in single environments; a worker has one policy per lane
    if workers is not None and options.vectorization:
        raise click.UsageError("-j, and a policy that acts in single environments, exclude --vectorization-mode")
    if options.num_envs is None and options.vectorization:
        raise click.UsageError("--vectorization-mode needs --num-envs")
    return workers


@contextmanager
def _backend(address: str | None) -> Iterator[Any]:
    """Yield the backend of the workers: Ray at this address; None for local processes."""
    if address is None:
        yield None
        return
    from gym_trace.recording import RayActors

    actors = RayActors(address)
    try:
        yield actors
    finally:
        actors.close()


def _seed(seed: int | None, directory: Path, resume: bool) -> int:
    """Return the seed, else that of the resumed run, else a new one."""
    if seed is not None:
        return seed
    before = run_settings(directory) if resume else None
    return new_seed() if before is None else int(before["seed"])


def _record_here(env: Any, policy: Any, directory: Path, watch: Watch, options: dict[str, Any]) -> RolloutProgress:
    """Record in this process."""
    with watch, errors_name_options():
        try:
            done = gym_trace.record(env, policy, directory, on_progress=watch, **options)
        except TraceError:
            raise
        except Exception as error:
            if directory.is_dir():
                click.echo(f"steps before the error are in {show.printable(directory)}", err=True)
            if watch.stop.received:  # Ctrl-C also ended processes of the environment
                raise Ended(watch.stop.received) from error
            raise
        watch.finish(done)
    return done


@contextmanager
def errors_name_options(resumable: Path | None = None) -> Iterator[None]:
    """Let errors name options, not arguments of the library; and --resume if `resumable` has a run."""
    try:
        yield
    except TraceExists as error:
        first = "--on-exist append"
        if resumable is not None and run_settings(resumable) is not None:
            first = f"--resume to continue its run, {first}"
        words = str(error).replace('on_exist="append"', first)
        raise TraceExists(words.replace('on_exist="replace"', "--on-exist replace")) from error


# -- progress ---------------------------------------------------------------------------------------------------------


def _returns(done: Any) -> Any:
    """Return mean, min and max, or None before the first episode."""
    returns = done.returns if hasattr(done, "workers") else (done.mean_return, done.min_return, done.max_return)
    return None if returns is None or None in returns else returns


def _report(limits: dict[str, float], progress: Any) -> Report:
    """Describe a RolloutProgress, or a Collected, which has workers."""
    has_workers = hasattr(progress, "workers")
    returns, speed = _returns(progress), progress.steps / max(progress.seconds, 1e-9)
    if has_workers:
        speed = progress.speeds[0]
    values = {"episodes": progress.episodes, "steps_per_second": speed, "bytes": progress.bytes}
    report = Report(
        [
            show.count(progress.episodes, "episode"),
            show.count(progress.steps, "step"),
            *([] if returns is None else [f"return {show.return_text(returns[0])}"]),
            f"{show.count(round(speed))} steps/s",
            show.size(progress.bytes),
        ],
        fraction(progress, limits),
        scalars=[(progress.steps, returns, values)],
    )
    if has_workers:
        values["restarts"] = report.restarts = progress.restarts
        report.details, report.trouble = partial(_table, progress), progress.trouble
    return report


def _table(progress: Collected) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    lines = [f"steps/s: {show.speeds(progress.speeds)}", f"for {show.duration(progress.seconds)} so far"]
    if progress.returns is not None:
        mean, least, most = map(show.return_text, progress.returns)
        lines.append(f"returns of the last 100 complete episodes: mean {mean}, {least} to {most}")
    if progress.new_episodes != progress.episodes:
        new = f"{show.count(progress.new_episodes, 'episode')}, {show.count(progress.new_steps, 'step')}"
        lines.append(f"since it was resumed: {new}")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("worker", "state", "episodes", "steps", "restarts"):
        table.add_column(name, justify="left" if name == "state" else "right")
    for number, worker in enumerate(progress.workers):
        counts = (worker.episodes, worker.steps, worker.restarts)
        table.add_row(str(number), worker.state, *map(show.count, counts))
    if progress.trouble:
        table.caption = Text(f"last restart: {show.printable(progress.trouble)}", no_wrap=True, overflow="ellipsis")
    return Group(*(Text(line, no_wrap=True) for line in lines), table)


# -- results ----------------------------------------------------------------------------------------------------------


def _summarize(
    done: Any, stop: StopSignals, directory: Path, environment: Sequence[str], quiet: bool, as_json: bool
) -> int:
    """Print the result, and why the run ended early; return the exit code."""
    has_workers = hasattr(done, "workers")
    if as_json and not show.unpublished():
        show.json_line({**gym_trace.list_trace(directory), "seed": done.seed})  # the row of gym-trace ls
    elif not (as_json or quiet) and (done.episodes or not has_workers):
        _print_summary(done, directory, environment, has_workers)
    if has_workers and done.stopped == "failed":
        return _abandoned(done)
    if not (done.stopped == "interrupted" if has_workers else stop.received):
        return FINE
    advice = "resume with the same command and --resume" if has_workers else "every step up to here is saved"
    click.echo(f"{stop.what_happened}; {advice}", err=True)
    return stop.exit_code


def _print_summary(done: Any, directory: Path, environment: Sequence[str], has_workers: bool) -> None:
    episodes, steps = (done.new_episodes, done.new_steps) if has_workers else (done.episodes, done.steps)
    throughput = show.throughput(steps, done.seconds)
    if not has_workers:
        cut = {0: "", 1: ", the last one cut short"}.get(
            done.open_episodes, f", the last {done.open_episodes} cut short"
        )
        click.echo(f"recorded {show.count(episodes + done.open_episodes, 'episode')}{cut}: {throughput}")
    elif not episodes and done.stopped == "done":
        click.echo(f"nothing to do: all {show.count(done.episodes, 'episode')} are recorded")
    else:
        restarts = f", {show.count(done.restarts, 'restart')}" if done.restarts else ""
        workers = f"with {show.count(len(done.workers), 'worker')}{restarts}"
        click.echo(f"recorded {show.count(episodes, 'episode')}: {throughput} {workers}")
    if (returns := _returns(done)) is not None and (episodes or not has_workers):
        click.echo(show.returns(returns, only_last=episodes > 100))
    if show.unpublished():
        return
    size = "" if is_url(directory) else f"{show.size(LocalStorage(directory).allocated())}, "
    click.echo(f"{show.printable(directory)}: {size}seed {done.seed}\n")
    show.next_commands(directory, environment)


def _abandoned(done: Collected) -> int:
    """Print what was abandoned; return the exit code."""
    lines = [f"episode {number} abandoned: {why.strip().splitlines()[-1]}" for number, why in done.failed.items()][:5]
    for number, worker in enumerate(done.workers):
        if worker.state == "given up":
            lines.append(f"worker {number} abandoned: {worker.trouble}")
    for line in lines or ([f"not everything could be recorded: {done.trouble}"] if done.trouble else []):
        click.echo(show.printable(line), err=True)
    return ERROR
