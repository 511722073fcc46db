"""Account for the steps of a run: each was learned from once, or has a reason why not."""

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

_LOCK_SECONDS = 2.0
_MAX_STARTS = 100  # learners may have died before they logged anything
_WRITER = re.compile(r"a(\d{1,6})-(\d{1,6})-(\d{1,6})-[0-9a-f]{8}")  # worker, split, life
STAGGER = "random steps of stagger"
UNUSED = "the worker or the learner ended before it was learned from"


class UnlearnedSteps(NamedTuple):
    """Steps of all lanes of a writer that are in no rollout of the log, and why."""

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
    rollouts: dict[str, list[tuple[int, str]]] = {writer: [] for writer in counts}
    for (writer, first, _), use in rollouts_of(log):
        if counts.get(writer, 0) < (stop := first + settings.rollout):
            raise ReplayDiverged(f"{trace.directory}: lacks steps {first} to {stop} of writer {writer}, of {use}")
        rollouts[writer].append((first, use))
    found = []
    for writer, uses in sorted(rollouts.items()):
        done, previous = 0, ""
        for first, use in [*sorted(uses), (counts[writer], "")]:
            if first < done and use:
                raise ReplayDiverged(f"steps {first} to {done} of writer {writer} are in {previous} and in {use}")
            stagger = settings.rollout if settings.stagger and not done else 0
            if use and first < stagger:
                raise ReplayDiverged(
                    f"the first steps of writer {writer} are in {use}, and with stagger they are random"
                )
            for begin, end, reason in ((done, min(first, stagger), STAGGER), (max(done, stagger), first, UNUSED)):
                if end > begin:
                    found.append(UnlearnedSteps(writer, begin, end, reason))
            done, previous = first + settings.rollout, use
    return found


def count_seeded(log: Log, trace: Trace, settings: Settings, seed: int) -> int:
    """Return the number of episodes whose seeds, and their worker's, follow from the seed of the run."""
    table, found = trace.episodes, 0
    for writer in trace.writers:
        lanes = [(lane, *arrays) for (name, lane), arrays in lanes_of(trace).items() if name == writer]
        if not lanes or (match := _WRITER.fullmatch(writer)) is None:
            continue
        rows = np.concatenate([rows for _, rows, _ in lanes])
        begins = np.concatenate([begins for _, _, begins in lanes])
        seeds = table["seed"][rows[np.lexsort((table["lane"][rows], begins))]].tolist()
        numbers = [*range(len(lanes)), *range(len(lanes) + settings.stagger, len(seeds) + settings.stagger)]
        worker, split, life = map(int, match.groups())
        for start in range(len(log.starts) + _MAX_STARTS):
            root, actions = worker_roots(seed + (start << 32), worker, life, split)
            if episode_seed(root, 0) == seeds[0]:
                follow = seeds == [episode_seed(root, number) for number in numbers]
                found += len(seeds) if follow and log.seeds.get(writer, actions) == actions else 0
                break
    return found


def rollouts_of(log: Log) -> list[tuple[Origin, str]]:
    """Return all rollouts in the log, and the entries that contain them."""
    learnt = [(origin, f"version {update.version}") for update in log.updates for origin in update.rollouts]
    return learnt + [(origin, "the discarded rollouts") for origin, *_ in log.dropped]


def log_end(run: Run, stopped: str, until_return: float | None = None) -> None:
    """Log the end of a run: why it stopped, the steps not learned from, and the files of the trace.

    Raises RecordingError, CorruptTrace.
    """
    log = run.log
    try:
        trace = open_trace(run.trace)
    except TraceNotFound:  # stopped before a worker started
        return
    left: list[UnlearnedSteps] = []
    if len(trace) and run.about.get("learn", True):
        left = unlearned_steps(log, trace, run.settings)
    content: dict[str, Any] = {"stopped": stopped, "left": list(map(list, left)), "files": files_of(run.trace)}
    content["until_return"] = until_return
    with suppress(InvalidOption), run.open_log(_LOCK_SECONDS) as writer:  # a previous learner has it: nothing to log
        writer.append(END, content)
