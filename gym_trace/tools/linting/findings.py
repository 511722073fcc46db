"""Findings of lint: problem, count, first position, and the command that shows it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gym_trace.data.layout import Path
from gym_trace.data.packing import pack_lenient
from gym_trace.data.values import Array
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.scan import StepRuns
from gym_trace.playback.trace import Trace

ERROR, WARNING, NOTE = SEVERITIES = ("error", "warning", "note")
_CONTEXT_STEPS = 2  # shown before and after the first position
_MOST_DIMENSIONS = 4  # listed in the name of a column


class Kind(NamedTuple):
    """A kind of findings.

    Attributes:
        code: stable code, such as "T101".
        severity: "error", "warning", or "note" for data that is normal in many environments.
        what: description in one line.

    Examples:
        >>> gym_trace.linting.Kind("MY1", "warning", "action repeated 100 times")
        Kind(code='MY1', severity='warning', what='action repeated 100 times')
    """

    code: str
    severity: str
    what: str


@dataclass(frozen=True)
class Finding:
    """A problem in recorded data.

    Attributes:
        code, severity, what: see Kind.
        message: the problem, in one line.
        count: how often it occurs, in units ("step", "episode" …).
        episode: index in the whole trace of the first episode with the problem; None: the whole trace.
        step: first step with the problem in this episode; -1: the observation before the first step; None: the whole
            episode.
        column: column with the problem, such as "observations/position[2]", or None.
        command: command line that shows the problem.

    Examples:
        >>> [finding.code for finding in gym_trace.lint_trace("traces/cartpole", select=["T101"])]
        []
    """

    code: str
    severity: str
    what: str
    message: str
    count: int
    unit: str
    episode: int | None
    step: int | None
    column: str | None
    command: str


@dataclass(frozen=True)
class Sighting:
    """A finding of a rule, without its command. See Finding.

    Attributes:
        episode: index in the checked trace or view.
        shown_by: command that shows it, and its options without DIR; empty: cat for a step, ls for an episode.

    Examples:
        >>> kind = gym_trace.linting.Kind("MY1", "warning", "action repeated 100 times")
        >>> gym_trace.linting.Sighting(kind, "action 1 repeated 120 times", 120, "step", episode=3, step=17).unit
        'step'
    """

    kind: Kind
    message: str
    count: int
    unit: str = "step"
    episode: int | None = None
    step: int | None = None
    column: str | None = None
    shown_by: tuple[str, ...] = ()


def finding_of(seen: Sighting, trace: Trace) -> Finding:
    """Add the command that shows a sighting in this trace, and the index of its episode in the whole trace."""
    episode = None if seen.episode is None else int(index_of(trace).whole_indices[seen.episode])
    command, *options = seen.shown_by or _shown_by(seen, trace)
    line = shlex.join(["gym-trace", command, str(trace.directory), *options])
    return Finding(*seen.kind, seen.message, seen.count, seen.unit, episode, seen.step, seen.column, line)


def _shown_by(seen: Sighting, trace: Trace) -> tuple[str, ...]:
    if seen.episode is None:
        return ("stats", "--columns")
    episode = str(index_of(trace).whole_indices[seen.episode])
    if seen.step is None:
        return ("ls", "--episodes", episode)
    row = seen.step - int(index_of(trace)["first_step"][seen.episode])
    steps = f"{max(0, row - _CONTEXT_STEPS)}:{max(0, row) + _CONTEXT_STEPS + 1}"
    return ("cat", "--episodes", episode, "--steps", steps)


def environments_of(trace: Trace) -> Array:
    """Return (writers,) int64: equal numbers for writers whose environments have the same description."""
    described = [pack_lenient(reader.about_or_empty.environment)[0] for reader in index_of(trace).readers]
    return np.array([described.index(one) for one in described], np.int64)


def last_steps(block: StepRuns) -> Array:
    """Return (steps,) bool: True for the last recorded step of an episode."""
    is_last = np.zeros(block.size, np.bool_)
    has_end = (block.terminated | block.truncated | block.closes) & (block.lengths > 0)
    is_last[block.step_offsets[1:][has_end] - 1] = True
    return is_last


def column_name(path: Path, dimensions: Array | None = None, shape: tuple[int, ...] = ()) -> str:
    """Return the name of a column: observations/position, or with some dimensions observations[1, 3]."""
    name = "/".join(map(str, path))
    if dimensions is None or not shape or not len(dimensions):
        return name
    indices = [np.unravel_index(int(i), shape) for i in dimensions[:_MOST_DIMENSIONS]]
    shown = ["×".join(str(int(i)) for i in index) for index in indices]
    return f"{name}[{', '.join(shown)}{', …' if len(dimensions) > _MOST_DIMENSIONS else ''}]"
