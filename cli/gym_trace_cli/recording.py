"""The runs of gym-trace record: in this process, or with workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

import gym_trace
from gym_trace.errors import TraceError, TraceExists
from gym_trace_cli import show
from gym_trace_cli.environments import NamedEnvironment
from gym_trace_cli.exit_codes import ERROR
from gym_trace_cli.progress import Report, Watch, fraction, recorded

if TYPE_CHECKING:
    from gym_trace.collecting.rollout import RolloutProgress
    from gym_trace.collecting.supervisor import Collected
    from gym_trace.model.returns import Return

COMMAND = "gym-trace record"
_LIMITS = ("episodes", "steps", "seconds", "bytes")


def record_here(
    env: Any,
    named: NamedEnvironment,
    policy: Any,
    directory: Path,
    quiet: bool,
    as_json: bool,
    tensorboard: str | None,
    facts: dict[str, Any],
    private: dict[str, bool],
    run: dict[str, Any],
    recording: dict[str, Any],
) -> None:
    """Record in this process, show progress and a summary, and exit if a signal came.

    private: whether to store argv and diff. run: limits and seed of record_episodes.
    """
    from gym_trace.collecting.policies import Annotating, policy_maker
    from gym_trace.format.facts import add_facts
    from gym_trace.recording.provenance import provenance_of, recorded_by
    from gym_trace.storage.local import LocalStorage

    maker = policy_maker(policy)  # first, because a failure must leave no directory
    made = None if policy == "random" else maker(env.observation_space, env.action_space)
    describe = partial(_rollout_report, _given_limits(run))
    with (
        Watch(describe, quiet=quiet, tensorboard=[Path(tensorboard)] if tensorboard else []) as watch,
        recorded_by(provenance_of(COMMAND, maker.name, make_env=named, **private)),
        _recorder(env, directory, recording) as recorder,
    ):
        add_facts(LocalStorage(directory), facts)
        try:
            acting = None if made is None else Annotating(made, recorder)
            done = gym_trace.record_episodes(recorder, policy=acting, on_progress=watch, **run)
        except TraceError:
            raise
        except Exception as error:
            click.echo(f"steps before the error are in {show.printable(directory)}", err=True)
            if watch.stop.received:  # Ctrl-C also reaches the processes of an environment, which then fails
                raise SystemExit(watch.stop.exit_code) from error
            raise
        watch.finish(done)
    stop = watch.stop
    if stop.received:
        click.echo(f"{stop.what_happened}; every step up to here is saved", err=True)
    if as_json:
        _print_json(directory, done.seed)
    elif not quiet:
        number = done.open_episodes
        cut = ", the last one cut short" if number == 1 else f", the last {number} cut short" if number else ""
        click.echo(f"recorded {show.count(done.episodes + number, 'episode')}{cut}: {_steps(done.steps, done.seconds)}")
        _print_summary(directory, done.seed, _returns(done), done.episodes)
    if stop.received:
        raise SystemExit(stop.exit_code)


def record_with_workers(
    named: NamedEnvironment,
    directory: Path,
    policy: Any,
    quiet: bool,
    as_json: bool,
    tensorboard: str | None,
    **options: Any,
) -> None:
    """Record with workers, show progress and a summary, and exit if the run was stopped or failed."""
    describe = partial(_workers_report, _given_limits(options))
    with (
        Watch(describe, quiet=quiet, tensorboard=[Path(tensorboard)] if tensorboard else []) as watch,
        _errors_name_options(directory),
    ):
        done = gym_trace.collect(named, policy, directory, describe=named.described(), on_progress=watch, **options)
        watch.finish(done)
    if as_json:
        _print_json(directory, done.seed)
    elif not quiet and done.episodes:
        if not done.new_episodes and done.stopped == "done":
            click.echo(f"nothing to do: all {show.count(done.episodes, 'episode')} are recorded")
        else:
            restarts = f", {show.count(done.restarts, 'restart')}" if done.restarts else ""
            click.echo(
                f"recorded {show.count(done.new_episodes, 'episode')}: {_steps(done.new_steps, done.seconds)} "
                f"with {show.count(len(done.workers), 'worker')}{restarts}"
            )
        _print_summary(directory, done.seed, done.returns if done.new_episodes else None, done.new_episodes)
    if done.stopped == "interrupted":
        click.echo(f"{watch.stop.what_happened}; resume with the same command and --resume", err=True)
        raise SystemExit(watch.stop.exit_code)
    if done.stopped == "failed":
        _fail(done)


def _fail(done: Collected) -> NoReturn:
    """Report what was abandoned, and exit."""
    problems = [
        f"episode {number} abandoned: {why.strip().splitlines()[-1]}" for number, why in list(done.failed.items())[:5]
    ]
    workers = [
        f"worker {number} abandoned: {worker.trouble}"
        for number, worker in enumerate(done.workers)
        if worker.state == "given up"
    ]
    if done.trouble and not problems and not workers:
        problems = [f"not everything could be recorded: {done.trouble}"]
    for line in problems + workers:
        click.echo(show.printable(line), err=True)
    raise SystemExit(ERROR)


@contextmanager
def _recorder(env: Any, directory: Path, options: dict[str, Any]) -> Iterator[Any]:
    """Wrap the environment in a recorder, and close it."""
    from gymnasium.vector import VectorEnv

    vector = isinstance(env, VectorEnv)
    wrapper: Any = gym_trace.TraceRecordingVectorWrapper if vector else gym_trace.TraceRecordingWrapper
    with _errors_name_options():
        recorder = wrapper(env, directory, **options)
    try:
        yield recorder
    finally:
        recorder.close()


@contextmanager
def _errors_name_options(resumable: Path | None = None) -> Iterator[None]:
    """Name options instead of the library's arguments; --resume if there is a run to resume."""
    try:
        yield
    except TraceExists as error:
        from gym_trace.collecting.resuming import settings_of

        first = "--on-exist append"
        if resumable is not None and settings_of(resumable) is not None:
            first = f"--resume to go on with the run that is in it, {first}"
        words = str(error).replace('on_exist="append"', first)
        raise TraceExists(words.replace('on_exist="replace"', "--on-exist replace")) from error


# -- progress ---------------------------------------------------------------------------------------------------------


def _given_limits(run: dict[str, Any]) -> dict[str, float]:
    return {name: run[name] for name in _LIMITS if run[name] is not None}


def _rollout_report(limits: dict[str, float], progress: RolloutProgress) -> Report:
    speed, returns = progress.steps / max(progress.seconds, 1e-9), _returns(progress)
    values = {"episodes": progress.episodes, "steps_per_second": speed, "bytes": progress.bytes}
    facts = recorded(progress.episodes, progress.steps, speed, progress.bytes, progress.mean_return)
    return Report(facts, fraction(progress, limits), scalars=[(progress.steps, returns, values)])


def _workers_report(limits: dict[str, float], progress: Collected) -> Report:
    mean = None if progress.returns is None else progress.returns[0]
    speed = progress.speeds[0]
    values = {
        "episodes": progress.episodes,
        "steps_per_second": speed,
        "bytes": progress.bytes,
        "restarts": progress.restarts,
    }
    return Report(
        recorded(progress.episodes, progress.steps, speed, progress.bytes, mean),
        fraction(progress, limits),
        partial(_table, progress),
        progress.restarts,
        progress.trouble,
        [(progress.steps, progress.returns, values)],
    )


def _returns(progress: RolloutProgress) -> Any:
    """Return mean, min and max, or None before the first episode."""
    found = (progress.mean_return, progress.min_return, progress.max_return)
    return None if None in found else found


def _table(progress: Collected) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    lines = [
        Text(f"steps/s: {show.speeds(progress.speeds)}", no_wrap=True),
        Text(f"for {show.duration(progress.seconds)} so far", no_wrap=True),
    ]
    if progress.returns is not None:
        mean, least, most = map(show.returned, progress.returns)
        lines.append(Text(f"returns of the last 100 complete episodes: mean {mean}, {least} to {most}", no_wrap=True))
    if progress.new_episodes != progress.episodes:
        new = f"{show.count(progress.new_episodes, 'episode')}, {show.count(progress.new_steps, 'step')}"
        lines.append(Text(f"since it was resumed: {new}"))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("worker", "state", "episodes", "steps", "restarts"):
        table.add_column(name, justify="left" if name == "state" else "right")
    for number, worker in enumerate(progress.workers):
        counts = (worker.episodes, worker.steps, worker.restarts)
        table.add_row(str(number), worker.state, *map(show.count, counts))
    if progress.trouble:
        table.caption = Text(f"last restart: {show.printable(progress.trouble)}", no_wrap=True, overflow="ellipsis")
    return Group(*lines, table)


# -- results ----------------------------------------------------------------------------------------------------------


def _steps(steps: int, seconds: float) -> str:
    speed = show.count(round(steps / max(seconds, 1e-9)))
    return f"{show.count(steps, 'step')} in {show.duration(seconds)} ({speed} steps/s)"


def _print_summary(directory: Path, seed: int, returns: tuple[Return, Return, Return] | None, episodes: int) -> None:
    from gym_trace.storage.local import LocalStorage

    if returns is not None:
        click.echo(show.returns(*returns, lately=episodes > 100))
    click.echo(f"{show.printable(directory)}: {show.size(LocalStorage(directory).allocated())}, seed {seed}\n")
    show.next_commands(directory)


def _print_json(directory: Path, seed: int) -> None:
    """Print the row of gym-trace ls, and the seed of the run."""
    from gym_trace.statistics.describe import list_trace

    click.echo(json.dumps({**list_trace(directory), "seed": seed}))
