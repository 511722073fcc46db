"""Account of the steps of a run: each was learned from once, or is named with the reason that it was not."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from gym_trace.envs.seeding import episode_seed, worker_roots
from gym_trace.errors import InvalidOption, ReplayDiverged, TraceNotFound
from gym_trace.playback.trace import Trace, open_trace
from gym_trace.training.proof.chain import END
from gym_trace.training.proof.trace_checks import files_of, lanes_of
from gym_trace.training.rollouts import Origin
from gym_trace.training.run import Log, Run
from gym_trace.training.settings import Settings

_SHORT = 2.0  # seconds
_MOST_STARTS = 100  # restarts of a learner that died before it wrote an entry
_WRITER = re.compile(r"a(\d{1,6})-(\d{1,6})-(\d{1,6})-[0-9a-f]{8}")  # worker, split, life
STAGGER = "random steps of stagger"
UNTAKEN = "the worker or the learner ended before it was learned from"


class UnlearnedSteps(NamedTuple):
    """Steps of all lanes of a writer that no rollout of the log has, and why."""

    writer: str
    begin: int
    end: int
    reason: str


def unlearned_steps(log: Log, trace: Trace, settings: Settings) -> list[UnlearnedSteps]:
    """Return the steps of the trace in no rollout of the log.

    Raises ReplayDiverged for steps in two rollouts, and for rollouts whose steps the trace lacks.
    """
    counts: dict[str, int] = {}
    for (writer, _), (episodes, begins) in lanes_of(trace).items():
        steps = int(begins[-1]) + int(trace.episodes["steps"][episodes[-1]])
        counts[writer] = max(counts.get(writer, 0), steps)
    taken: dict[str, list[tuple[int, str]]] = {writer: [] for writer in counts}
    for (writer, first, _), what in rollouts_of(log):
        if counts.get(writer, 0) < (stop := first + settings.rollout):
            raise ReplayDiverged(f"{trace.directory}: lacks steps {first} to {stop} of writer {writer}, of {what}")
        taken[writer].append((first, what))
    found = []
    for writer, rollouts in sorted(taken.items()):
        at, before = 0, ""
        for first, what in [*sorted(rollouts), (counts[writer], "")]:
            if first < at and what:
                raise ReplayDiverged(f"steps {first} to {at} of writer {writer} are in {before} and in {what}")
            random = settings.rollout if settings.stagger and not at else 0
            if what and first < random:
                raise ReplayDiverged(
                    f"the first steps of writer {writer} are in {what}, and with stagger they are random"
                )
            for begin, end, reason in ((at, min(first, random), STAGGER), (max(at, random), first, UNTAKEN)):
                if end > begin:
                    found.append(UnlearnedSteps(writer, begin, end, reason))
            at, before = first + settings.rollout, what
    return found


def seeded(log: Log, trace: Trace, settings: Settings, seed: int) -> int:
    """Return the number of episodes whose seeds, and that of their worker's generator, follow from that of the run."""
    table, found = trace.episodes, 0
    for writer in trace.writers:
        lanes = [(lane, *of) for (name, lane), of in lanes_of(trace).items() if name == writer]
        if not lanes or (named := _WRITER.fullmatch(writer)) is None:
            continue
        rows = np.concatenate([rows for _, rows, _ in lanes])
        begins = np.concatenate([begins for _, _, begins in lanes])
        mine = table["seed"][rows[np.lexsort((table["lane"][rows], begins))]].tolist()
        numbers = [*range(len(lanes)), *range(len(lanes) + settings.stagger, len(mine) + settings.stagger)]
        worker, split, life = map(int, named.groups())
        for cell in range(len(log.starts) + _MOST_STARTS):
            root, actions = worker_roots(seed + (cell << 32), worker, life, split)
            if episode_seed(root, 0) == mine[0]:
                is_same = mine == [episode_seed(root, number) for number in numbers]
                found += len(mine) if is_same and log.seeds.get(writer, actions) == actions else 0
                break
    return found


def rollouts_of(log: Log) -> list[tuple[Origin, str]]:
    """Return all rollouts that the log names, and where it does."""
    learnt = [(origin, f"version {update.version}") for update in log.updates for origin in update.rollouts]
    return learnt + [(origin, "the discarded rollouts") for origin, *_ in log.dropped]


def end(run: Run, stopped: str, until_return: float | None = None) -> None:
    """Log the end of a run: why it stopped, what was not learned from, and the files of the trace.

    Raises RecordingError, CorruptTrace.
    """
    log = run.log
    try:
        trace = open_trace(run.trace)
    except TraceNotFound:  # stopped before there was a worker
        return
    left: list[UnlearnedSteps] = []
    if len(trace) and run.about.get("learn", True):
        left = unlearned_steps(log, trace, run.settings)
    content: dict[str, Any] = {"stopped": stopped, "left": list(map(list, left)), "files": files_of(run.trace)}
    content["until_return"] = until_return
    with suppress(InvalidOption), run.open_log(_SHORT) as writer:  # a previous learner has it: this run changed nothing
        writer.append(END, content)
