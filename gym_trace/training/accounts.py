"""Account of the steps of a run: each was learned from once, or is named with the reason that it was not."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

from gym_trace.errors import InvalidOption, ReplayDiverged, TraceNotFound
from gym_trace.playback.trace import Trace, open_trace
from gym_trace.proof.recorded import files_of
from gym_trace.training.rollouts import Origin, RecordedRollouts, Shape
from gym_trace.training.run import END, Log, Run
from gym_trace.training.settings import Settings

_SHORT = 2.0  # seconds
_STAGGER = "random steps of stagger"
_UNTAKEN = "the worker or the learner ended before it was learned from"


class Left(NamedTuple):
    """Steps of all lanes of a writer that no rollout of the log has, and why."""

    writer: str
    begin: int
    end: int
    reason: str


def left_over(log: Log, counts: dict[str, int], settings: Settings) -> list[Left]:
    """Return the steps of the trace in no rollout of the log. counts: see RecordedRollouts.counts().

    Raises ReplayDiverged for steps in two rollouts.
    """
    taken: dict[str, list[tuple[int, str]]] = {}
    for origin, what in rollouts_of(log):
        taken.setdefault(origin.writer, []).append((origin.first_step, what))
    found = []
    for writer, count in sorted(counts.items()):
        at, before = 0, ""
        for first, what in [*sorted(taken.get(writer, [])), (max(count, 0), "")]:
            if first < at and what:
                raise ReplayDiverged(f"steps {first} to {at} of writer {writer} are in {before} and in {what}")
            if first > at:
                is_random = settings.stagger and at == 0 and what
                found.append(Left(writer, at, first, _STAGGER if is_random else _UNTAKEN))
            at, before = first + settings.rollout, what
    return found


def rollouts_of(log: Log) -> list[tuple[Origin, str]]:
    """Return all rollouts that the log names, and where it does."""
    learnt = [(origin, f"version {update.version}") for update in log.updates for origin in update.rollouts]
    return learnt + [(dropped.origin, "the discarded rollouts") for dropped in log.dropped]


def recorded_rollouts(trace: Trace, settings: Settings, state: int = 0) -> RecordedRollouts:
    """Return the rollouts of a trace. state: size of the state of a recurrent network."""
    shape = Shape.of(trace.observation_space, trace.action_space, settings.rollout, settings.num_envs, state)
    return RecordedRollouts(trace, shape)


def end(run: Run, stopped: str) -> None:
    """Log the end of a run: why it stopped, what was not learned from, and the files of the trace.

    Raises RecordingError, CorruptTrace.
    """
    log, settings = run.log, run.settings
    try:
        trace = open_trace(run.trace)
    except TraceNotFound:  # stopped before there was a worker
        return
    left: list[Left] = []
    if len(trace) and run.about.get("learn", True):
        left = left_over(log, recorded_rollouts(trace, settings).counts(), settings)
    content: dict[str, Any] = {"stopped": stopped, "left": list(map(list, left)), "files": files_of(run.trace)}
    with suppress(InvalidOption), run.open_log(_SHORT) as writer:  # a previous learner has it: this run changed nothing
        writer.append(END, content)
