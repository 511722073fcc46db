"""Account of the steps of a run: each was learned from once, or is named with the reason that it was not."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

from gym_trace.errors import InvalidOption, ReplayDiverged, TraceNotFound
from gym_trace.playback.trace import Trace, open_trace
from gym_trace.proof.chain import END
from gym_trace.proof.recorded import files_of, lanes_of
from gym_trace.training.rollouts import Origin
from gym_trace.training.run import Log, Run
from gym_trace.training.settings import Settings

_SHORT = 2.0  # seconds
STAGGER = "random steps of stagger"
UNTAKEN = "the worker or the learner ended before it was learned from"


class Left(NamedTuple):
    """Steps of all lanes of a writer that no rollout of the log has, and why."""

    writer: str
    begin: int
    end: int
    reason: str


def left_over(log: Log, trace: Trace, settings: Settings) -> list[Left]:
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
            if first > at:
                is_stagger = settings.stagger and not at and first == settings.rollout
                found.append(Left(writer, at, first, STAGGER if is_stagger else UNTAKEN))
            at, before = first + settings.rollout, what
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
    left: list[Left] = []
    if len(trace) and run.about.get("learn", True):
        left = left_over(log, trace, run.settings)
    content: dict[str, Any] = {"stopped": stopped, "left": list(map(list, left)), "files": files_of(run.trace)}
    content["until_return"] = until_return
    with suppress(InvalidOption), run.open_log(_SHORT) as writer:  # a previous learner has it: this run changed nothing
        writer.append(END, content)
