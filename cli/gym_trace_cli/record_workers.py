"""gym-trace record -j: recording with several processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import gym_trace
from gym_trace.errors import TraceExists
from gym_trace_cli import show
from gym_trace_cli.environments import NamedEnvironment
from gym_trace_cli.exit_codes import ERROR
from gym_trace_cli.stopping import StopSignals

if TYPE_CHECKING:
    from gym_trace.collecting.supervisor import Collected


def record_with_workers(
    named: NamedEnvironment,
    directory: Path,
    policy: Any,
    quiet: bool,
    as_json: bool,
    tensorboard: str | None,
    **options: Any,
) -> None:
    """Records with workers, shows how it goes, and exits with what came of it."""
    limits = {name: options[name] for name in ("episodes", "steps", "seconds", "bytes") if options[name] is not None}
    restarts = 0
    with StopSignals() as stop, show.ProgressLine(quiet=quiet) as line, ExitStack() as stack:
        scalars = None
        if tensorboard is not None:
            from gym_trace.processes.tensorboard import Scalars

            scalars = stack.enter_context(Scalars(tensorboard))

        def report(progress: Collected) -> int:
            nonlocal restarts
            died, restarts = progress.restarts > restarts, progress.restarts
            why = f"  ({progress.trouble})" if died else ""
            text = show.printable("  ".join(_facts(progress)) + why)
            line.update(text, show.fraction(progress, limits), table=partial(_table, progress), at_once=died)
            if scalars is not None:
                scalars.add(
                    progress.steps,
                    progress.returns,
                    episodes=progress.episodes,
                    steps_per_second=progress.speeds[0],
                    bytes=progress.bytes,
                    restarts=progress.restarts,
                )
            return stop.received

        described = named.described()
        with in_words_of_options(directory):
            done = gym_trace.collect(named, policy, directory, describe=described, on_progress=report, **options)
    if as_json:
        print_recorded_as_json(directory, done.seed)
    elif not quiet and done.episodes:
        _print_summary(done, directory)
    if done.stopped == "interrupted":
        click.echo(f"{stop.what_happened}; go on with the same command and --resume", err=True)
        raise SystemExit(stop.exit_code)
    if done.stopped == "failed":
        for episode, why in list(done.failed.items())[:5]:
            click.echo(show.printable(f"episode {episode} was given up: {why.strip().splitlines()[-1]}"), err=True)
        for number, worker in enumerate(done.workers):
            if worker.state == "given up":
                click.echo(show.printable(f"worker {number} was given up: {worker.trouble}"), err=True)
        if done.trouble and not done.failed and all(worker.state != "given up" for worker in done.workers):
            click.echo(show.printable(f"not everything could be recorded: {done.trouble}"), err=True)
        raise SystemExit(ERROR)


@contextmanager
def in_words_of_options(interrupted: Path | None = None) -> Iterator[None]:
    """The library speaks of its arguments, the command line of its options; of --resume where a run can go on there."""
    try:
        yield
    except TraceExists as error:
        from gym_trace.collecting.resuming import settings_of

        first = "--on-exist append"
        if interrupted is not None and settings_of(interrupted) is not None:
            first = f"--resume to go on with the run that is in it, {first}"
        words = str(error).replace('on_exist="append"', first)
        raise TraceExists(words.replace('on_exist="replace"', "--on-exist replace")) from error


def print_recorded_as_json(directory: Path, seed: int) -> None:
    """What gym-trace ls says of the trace, and the seed of the run."""
    from gym_trace.statistics.listing import list_trace

    click.echo(json.dumps({**list_trace(directory), "seed": seed}))


def _facts(progress: Collected) -> list[str]:
    mean = None if progress.returns is None else progress.returns[0]
    done = show.recorded(progress.episodes, progress.steps, progress.speeds[0], progress.bytes, mean)
    return [*done, show.count(progress.restarts, "restart")] if progress.restarts else done


def _table(progress: Collected) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    ten, minute, five = (show.count(round(speed)) for speed in progress.speeds)
    lines = [
        Text(f"steps/s: {ten} over 10 s, {minute} over 1 min, {five} over 5 min", no_wrap=True),
        Text(f"for {show.duration(progress.seconds)} so far", no_wrap=True),
    ]
    if progress.returns is not None:
        mean, least, most = map(show.returned, progress.returns)
        lines.append(
            Text(f"returns of the last 100 complete episodes: {mean} on average, {least} to {most}", no_wrap=True)
        )
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


def _print_summary(done: Collected, directory: Path) -> None:
    from gym_trace.storage.local import LocalStorage

    if not done.new_episodes and done.stopped == "done":
        click.echo(f"nothing to do: all {show.count(done.episodes, 'episode')} are recorded")
    else:
        speed = show.count(round(done.new_steps / max(done.seconds, 1e-9)))
        restarts = f", {show.count(done.restarts, 'restart')}" if done.restarts else ""
        click.echo(
            f"recorded {show.count(done.new_episodes, 'episode')}: {show.count(done.new_steps, 'step')} in "
            f"{show.duration(done.seconds)} ({speed} steps/s) with {show.count(len(done.workers), 'worker')}{restarts}"
        )
        if done.returns is not None:
            click.echo(show.returns(*done.returns, lately=done.new_episodes > 100))
    click.echo(f"{show.printable(directory)}: {show.size(LocalStorage(directory).allocated())}, seed {done.seed}\n")
    show.next_commands(directory)
