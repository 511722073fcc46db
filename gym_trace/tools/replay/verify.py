"""Verify that recorded episodes can be replayed, in this process or in several."""

from __future__ import annotations

import importlib
import multiprocessing
import signal
import sys
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

from gym_trace.data.packing import pack_lenient
from gym_trace.envs.identity import installed_versions, packages_of
from gym_trace.errors import CorruptTrace, EnvironmentUnavailable, InvalidOption
from gym_trace.playback.episode_index import index_of, whole_of
from gym_trace.playback.trace import Trace, TraceLike, as_trace
from gym_trace.recording.processes.safe_start import forget_safe_path, started_safely
from gym_trace.tools.replay.compare import Comparison
from gym_trace.tools.replay.lanes import Lane, inseparable, lanes_of
from gym_trace.tools.replay.making import Making, made_env
from gym_trace.tools.replay.resimulate import (
    DAMAGED,
    NO_SEED,
    UNVERIFIABLE,
    LaneReplay,
    MakeEnv,
    Verdict,
    verdict_on,
)

_MOST_ENVIRONMENTS = 32  # open at the same time, one per lane
_EPISODES_PER_TASK = 50  # a task of a worker has more where an episode cannot be started by itself


def verify_trace(
    trace: TraceLike,
    *,
    make_env: MakeEnv | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    episodes: Collection[int] | None = None,
    atol: float = 0.0,
    rtol: float = 0.0,
    tolerances: Mapping[str, float] | None = None,
    ignore: Collection[str] = (),
    workers: int = 1,
    trust: bool = False,
    imports: Sequence[str] = (),
    on_damage: str = "raise",
    through_the_crash: bool = False,
    one_step: bool = False,
) -> Iterator[Verdict]:
    """Replay recorded episodes in their environment and compare all results.

    Yields a verdict per episode, in the order of the trace: ``zip(trace, verify_trace(trace))``. Lanes take turns, each
    in an environment of its own. At most 32 lanes do so; any other lane is played whole when its first episode is next.

    A running episode is played as far as it has been recorded. If writers recorded different environments, each
    episode is played in the environment of its writer; if that cannot be made, the episode is "unverifiable". The
    seconds that RecordEpisodeStatistics puts into infos are not compared.

    Args:
        trace: a trace, a view, or a directory.
        make_env: makes the environment; None: the recorded one. It is wrapped in those of Gymnasium's wrappers that
            only the recorded one had. With several workers it must be picklable, such as a function of a module.
        env_kwargs: override the recorded arguments of the environment.
        episodes: indices of the episodes to play; None: all.
        atol, rtol: numbers are close if abs(recorded - seen) <= atol + rtol * abs(recorded); both 0: bit for bit.
        tolerances: atol of single columns, by name: {"rewards": 1e-6, "observations/position": 1e-9}.
        ignore: columns that are not compared: "observations", "rewards", "terminations", "truncations" or "infos".
        workers: number of processes.
        trust: allow imports and calls that only the trace names; see Trace.make_env().
        imports: modules to import first, such as modules that register environments.
        on_damage: "raise" CorruptTrace at damage, or "skip" damaged episodes: their verdict is "damaged".
        through_the_crash: if a matching episode has a pending_action, also execute this action, in a copy of the
            process; Verdict.crash describes the result.
        one_step: set the environment to each recorded state (see TraceRecordingWrapper, states=), and compare the step
            from there, so that errors do not add up. Verdict.divergences are these errors, Verdict.from_states the
            number of compared steps. An episode without states is "unverifiable".

    Raises:
        EnvironmentUnavailable: the environment cannot be made here; says why.
        InvalidOption, TraceNotFound, CorruptTrace

    Examples:
        >>> {verdict.verdict for verdict in gym_trace.verify_trace("traces/cartpole")}
        {'identical'}
    """
    comparison = Comparison(atol, rtol, ignore, tolerances)
    if workers < 1:
        raise InvalidOption(f"workers={workers}: pass 1 or more")
    if on_damage not in ("raise", "skip"):
        raise InvalidOption(f'on_damage={on_damage!r}: pass "raise" or "skip"')
    _import_all(imports)
    trace = as_trace(trace)
    requested = set(range(len(trace))) if episodes is None else set(episodes)
    if not requested <= set(range(len(trace))):
        raise InvalidOption(f"episodes: the trace has {len(trace)} episodes, 0 to {len(trace) - 1}")
    view, trace = trace, whole_of(trace)  # earlier episodes may have to be played, too
    view_indices = sorted(requested)
    order: list[int] = index_of(view).whole_indices[view_indices].tolist()
    for reader in index_of(view).readers if on_damage == "raise" and len(order) == len(view) else ():
        if reader.damage and not len(reader.parts):  # it has lost all episodes; _verdicts() looks at the others
            raise reader.damage[0].error()
    wanted = set(order)
    lanes = lanes_of(trace)
    positions_in = ([i for i, index in enumerate(lane.indices) if index in wanted] for lane in lanes)
    tasks = [(number, positions) for number, positions in enumerate(positions_in) if positions]
    environments = {pack_lenient(lanes[number].writer.about.environment)[0] for number, _ in tasks}
    work = partial(
        _verdicts,
        comparison=comparison,
        make_env=make_env,
        trust=trust,
        env_kwargs=env_kwargs or {},
        skips_unavailable=len(environments) > 1,
        skips_damaged=on_damage == "skip",
        through_the_crash=through_the_crash,
        one_step=one_step,
    )
    arguments = trace, lanes, tasks, work, order
    verdicts = _in_this_process(*arguments) if workers == 1 else _in_workers(*arguments, workers, imports)
    if view is trace:
        return verdicts
    return (replace(verdict, index=index) for verdict, index in zip(verdicts, view_indices))


def differing_versions(trace: TraceLike) -> dict[str, tuple[str, str | None]]:
    """Return packages whose installed version differs from the recorded one: name to recorded and installed version.

    Examples:
        >>> gym_trace.replay.differing_versions("traces/cartpole")  # recorded with what is installed
        {}
    """
    recorded: dict[str, dict[str, None]] = {}  # sets that keep their order
    for writer in (writer for writer in index_of(as_trace(trace)).readers if len(writer.parts)):
        for name, version in writer.about.versions.items():
            recorded.setdefault(str(name), {})[str(version)] = None
    installed = installed_versions(recorded)
    return {name: (" and ".join(old), installed[name]) for name, old in recorded.items() if [installed[name]] != [*old]}


def played_in_registered(trace: TraceLike) -> list[str]:
    """Return ids whose entry point was a class or function, which traces do not store: the registered one is used.

    Examples:
        >>> gym_trace.replay.played_in_registered("traces/cartpole")
        []
    """
    recipes = [writer.about.environment.get("made") for writer in index_of(as_trace(trace)).readers]
    with_id = [recipe for recipe in recipes if isinstance(recipe, dict) and isinstance(recipe.get("id"), str)]
    return list(dict.fromkeys(recipe["id"] for recipe in with_id if recipe.get("entry_point") is None))


def _in_this_process(
    trace: Trace, lanes: list[Lane], tasks: list[tuple[int, list[int]]], work: Any, order: list[int]
) -> Iterator[Verdict]:
    """Yield verdicts in this order. A lane is played once, from its first to its last episode."""
    task_of = {lanes[task[0]].indices[position]: task for task in tasks for position in task[1]}
    open_lanes: dict[int, Generator[Verdict, None, None]] = {}

    def play_next(index: int) -> Iterable[Verdict]:
        number, positions = task_of[index]
        if number not in open_lanes:
            verdicts: Generator[Verdict, None, None] = work(trace, lanes[number], positions)
            if lanes[number].renders or len(open_lanes) >= _MOST_ENVIRONMENTS:
                return verdicts
            open_lanes[number] = verdicts
        verdict = next(open_lanes[number])
        if verdict.index == lanes[number].indices[positions[-1]]:
            open_lanes.pop(number).close()
        return [verdict]

    try:
        yield from _ordered(order, play_next)
    finally:
        for verdicts in open_lanes.values():
            verdicts.close()


def _ordered(order: list[int], play_next: Callable[[int], Iterable[Verdict]]) -> Iterator[Verdict]:
    """Yield the verdicts on these episodes in their order.

    play_next: returns verdicts on some episodes; called with the next episode until it returns the verdict on that.
    """
    verdicts: dict[int, Verdict] = {}
    remaining = Counter(order)  # a view can have an episode several times
    for index in order:
        while index not in verdicts:
            verdicts.update((verdict.index, verdict) for verdict in play_next(index))
        remaining[index] -= 1
        yield verdicts[index] if remaining[index] else verdicts.pop(index)


def _in_workers(
    trace: Trace,
    lanes: list[Lane],
    tasks: list[tuple[int, list[int]]],
    work: Any,
    order: list[int],
    workers: int,
    imports: Sequence[str],
) -> Iterator[Verdict]:
    parts = [(number, part) for number, positions in tasks for part in _split(trace, lanes[number], positions)]
    rank = {index: i for i, index in reversed(list(enumerate(order)))}
    parts.sort(key=lambda part: min(rank[lanes[part[0]].indices[position]] for position in part[1]))
    packages = {name for lane in lanes for name in packages_of(lane.writer.about.environment)}
    modules = [*imports, *(name for name in packages if name in sys.modules)]
    context = multiprocessing.get_context("spawn")
    with started_safely():  # the event starts the process that tracks shared resources
        stop = context.Event()
    pool = ProcessPoolExecutor(
        min(workers, max(1, len(parts))), context, initializer=_open_in_worker, initargs=(trace, modules, stop)
    )
    with pool:
        try:
            with started_safely():
                results = pool.map(partial(_work, work), *zip(*parts)) if parts else iter(())
            yield from _ordered(order, lambda index: next(results))
        except BrokenProcessPool as error:
            raise EnvironmentUnavailable(
                "a worker process died, most likely in the environment (workers=1 shows where), "
                'or because the script lacks if __name__ == "__main__":'
            ) from error
        finally:
            stop.set()  # no further results are needed
            pool.shutdown(wait=False, cancel_futures=True)


def _split(trace: Trace, lane: Lane, positions: list[int]) -> Iterator[list[int]]:
    """Split the positions for workers. Each part begins with an episode that can be started by itself."""
    part: list[int] = []
    for position in positions:
        if len(part) >= _EPISODES_PER_TASK and (
            trace.episodes["seed"][lane.indices[position]] != NO_SEED or not lane.follows[position]
        ):
            yield part
            part = []
        part.append(position)
    if part:
        yield part


def _verdicts(
    trace: Trace,
    lane: Lane,
    positions: Sequence[int],
    *,
    comparison: Comparison,
    make_env: MakeEnv | None,
    trust: bool,
    env_kwargs: Mapping[str, Any],
    skips_unavailable: bool,
    skips_damaged: bool,
    through_the_crash: bool,
    one_step: bool,
) -> Generator[Verdict, None, None]:
    """Yield verdicts on the episodes at some positions of a lane.

    skips_unavailable: if the environment cannot be made, its episodes are unverifiable; False: that is an error.
    """
    if not skips_damaged and positions and lane.writer.damage:
        raise lane.writer.damage[0].error()
    reason = "" if make_env else inseparable(lane.writer)
    make = partial(made_env, lane, Making(trust, env_kwargs, make_env), None)
    replay = LaneReplay(trace, lane, make, comparison, trust)
    try:
        for position in positions:
            episode = trace[lane.indices[position]]
            try:
                play = replay.one_step if one_step else replay.play
                verdict = verdict_on(episode, UNVERIFIABLE, reason=reason) if reason else play(position)
                verdict = _with_edits(verdict, lane)
                if through_the_crash and verdict.matches:
                    verdict = replace(verdict, crash=replay.go_through_the_crash(position))
            except EnvironmentUnavailable as error:
                if not skips_unavailable:
                    raise
                reason = str(error)
                verdict = verdict_on(episode, UNVERIFIABLE, reason=reason)
            except CorruptTrace as error:
                if not skips_damaged:
                    raise
                verdict = verdict_on(episode, DAMAGED, reason=error.problem)
            yield verdict
    finally:
        replay.close()


def _with_edits(verdict: Verdict, lane: Lane) -> Verdict:
    """Return the verdict, with a note if an edit has changed the column that differs first."""
    column = "" if verdict.difference is None else verdict.difference.column.partition("/")[0]
    edits = lane.writer.about.edits_of(column) if column else []
    if not edits:
        return verdict
    note = f"not as recorded: {column} edited ({', '.join(edits)})"
    return replace(verdict, reason=f"{verdict.reason}; {note}" if verdict.reason else note)


# -- in workers -------------------------------------------------------------------------------------------------------

_worker: dict[str, Any] = {}


def _import_all(names: Iterable[str]) -> None:
    for name in names:
        importlib.import_module(name)


def _open_in_worker(trace: Trace, modules: Sequence[str], stop: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C and stops us
    forget_safe_path()
    _import_all(modules)
    _worker.update(trace=trace, lanes=lanes_of(trace), stop=stop)


def _work(work: Any, number: int, positions: list[int]) -> list[Verdict]:
    verdicts = work(_worker["trace"], _worker["lanes"][number], positions)
    return list(takewhile(lambda verdict: not _worker["stop"].is_set(), verdicts))
