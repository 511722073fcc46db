"""Rollouts: a number of steps of all lanes, in memory for the learner, or read from a trace."""

from __future__ import annotations

import copy
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace
from gym_trace.playback.trace import Trace
from gym_trace.training.network.forms import ActionForm, SpaceLeaf, leaves_of, picked
from gym_trace.training.proof.trace_checks import lanes_of

WRITER = "S64"
_LAST_EPISODES = 100
STATE = "state"  # annotation: state of a recurrent network, at the first step of each rollout


class Origin(NamedTuple):
    """Position of a rollout in the trace, by writer and first step; and the version of the weights that acted."""

    writer: str
    first_step: int
    version: int


class Shape(NamedTuple):
    """Shape of the rollouts of a run."""

    steps: int
    lanes: int
    leaves: list[SpaceLeaf]
    actions: ActionForm
    state: int  # size of the recurrent state of a lane, or 0

    @classmethod
    def of(cls, observation_space: Any, action_space: Any, steps: int, lanes: int, state: int) -> Shape:
        return cls(steps, lanes, leaves_of(observation_space), ActionForm(action_space), state)

    def fields(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Return shape and dtype of each array of a rollout."""
        steps, lanes = self.steps, self.lanes
        found: dict[str, tuple[tuple[int, ...], Any]] = {
            "actions": ((steps, lanes, self.actions.columns), np.float32),
            "rewards": ((steps, lanes), np.float64),
            "terminations": ((steps, lanes), np.bool_),
            "truncations": ((steps, lanes), np.bool_),
            "logprob": ((steps, lanes), np.float32),
            "state": ((lanes, self.state), np.float32),
        }
        for number, leaf in enumerate(self.leaves):
            found[f"observations.{number}"] = ((steps + 1, lanes, *leaf.shape), leaf.dtype)
            found[f"finals.{number}"] = ((steps, lanes, *leaf.shape), leaf.dtype)
        return found


@dataclass
class Rollout:
    """Arrays with one row per step and one column per lane.

    Attributes:
        observations: of each leaf, (steps + 1, lanes, ...); the last row follows the last step.
        finals: of each leaf, (steps, lanes, ...): last observations of truncated episodes.
        actions: (steps, lanes, columns) of ActionForm. logprob: of each action, float32.
        rewards: float64. terminations, truncations: bool, (steps, lanes).
        state: (lanes, numbers) of a recurrent network before the first step.
    """

    observations: list[Array]
    finals: list[Array]
    actions: Array
    rewards: Array
    terminations: Array
    truncations: Array
    logprob: Array
    state: Array

    @classmethod
    def of(cls, fields: dict[str, Array]) -> Rollout:
        leaves = range(sum(name.startswith("finals.") for name in fields))
        observations, finals = ([fields[f"{part}.{leaf}"] for leaf in leaves] for part in ("observations", "finals"))
        return cls(observations, finals, **{name: array for name, array in fields.items() if "." not in name})

    def not_finite(self) -> tuple[str, int, int] | None:
        """Return kind ("a reward" or "an observation"), step and lane of a value that is not finite; None without."""
        for name, arrays in (("a reward", [self.rewards]), ("an observation", [*self.observations, *self.finals])):
            for array in arrays:
                for step, lane, *_ in np.argwhere(~np.isfinite(array)).tolist():
                    return name, min(step, len(self.rewards) - 1), lane
        return None

    def bootstrapped(self) -> tuple[Array, list[Array]]:
        """Return where episodes are truncated, (steps, lanes), and their last observations as rows."""
        where = self.truncations & ~self.terminations
        return where, [final[where] for final in self.finals]


def joined(rollouts: Sequence[Rollout]) -> Rollout:
    """Return all lanes of all rollouts side by side."""
    if len(rollouts) == 1:
        return rollouts[0]

    def side_by_side(arrays: Iterable[Array]) -> Array:
        return np.concatenate(list(arrays), 1)

    columns = ("actions", "rewards", "terminations", "truncations", "logprob")
    return Rollout(
        [side_by_side(leaf) for leaf in zip(*(rollout.observations for rollout in rollouts))],
        [side_by_side(leaf) for leaf in zip(*(rollout.finals for rollout in rollouts))],
        **{name: side_by_side(getattr(rollout, name) for rollout in rollouts) for name in columns},
        state=np.concatenate([rollout.state for rollout in rollouts]),
    )


class RecordedRollouts:
    """Rollouts of a trace, which is untrusted. Raises CorruptTrace for missing ones."""

    def __init__(self, trace: Trace, shape: Shape):
        self._trace, self._shape = trace, shape
        self._lanes = lanes_of(trace)

    def of_length(self, steps: int) -> RecordedRollouts:
        """Return the rollouts of another number of steps, such as an unfinished one."""
        other = copy.copy(self)
        other._shape = self._shape._replace(steps=steps)
        return other

    def read(self, origin: Origin) -> Rollout:
        """Return the rollout as the learner had it, except last observations that begin a next episode."""
        runs = [(lane, *run) for lane in range(self._shape.lanes) for run in self._runs(origin, lane)]
        rollout = Rollout.of({name: np.zeros(size, dtype) for name, (size, dtype) in self._shape.fields().items()})
        for run in runs:
            self._copy(rollout, *run)
        return rollout

    def annotated(self, origin: Origin, name: str) -> Array:
        """Return an annotation of each step, (steps, lanes)."""
        array = np.zeros((self._shape.steps, self._shape.lanes))
        for lane in range(self._shape.lanes):
            for episode, start, first, count in self._runs(origin, lane):
                column = self._trace[episode][first : first + count].annotations.get(name)
                if column is None or column.dtype == object:
                    raise CorruptTrace(f"{self._trace.directory}: episode {episode} lacks the annotation {name!r}")
                array[start : start + count, lane] = column
        return array

    def returns(self, origin: Origin) -> Array:
        """Return the return of each episode that ends in the rollout, at its last step, and NaN elsewhere."""
        array = np.full((self._shape.steps, self._shape.lanes), np.nan)
        for lane in range(self._shape.lanes):
            for index, start, first, count in self._runs(origin, lane):
                episode = self._trace[index]
                if first + count == len(episode) and (episode.terminations[-1] or episode.truncations[-1]):
                    array[start + count - 1, lane] = np.cumsum(episode.rewards, dtype=np.float64)[-1]
        return array

    def last_version(self, writer: str, begin: int, end: int) -> int:
        """Return the last version that acted in these steps; -1 if they do not record it."""
        found = -1
        for (name, _), (rows, begins) in self._lanes.items():
            for number, first in zip(rows.tolist(), begins.tolist()):
                if name == writer and first < end and first + self._trace.episodes["steps"][number] > begin:
                    column = self._trace[number][max(0, begin - first) : end - first].annotations.get("version")
                    versions = [] if column is None else [version for version in column.tolist() if version is not None]
                    found = max([found, *versions])
        return found

    def episodes_of(self, origin: Origin) -> list[int]:
        """Return the indices of the episodes of a rollout."""
        return sorted({ep for lane in range(self._shape.lanes) for ep, *_ in self._runs(origin, lane)})

    def step_of(self, origin: Origin, step: int, lane: int) -> tuple[int, int]:
        """Return the index of the episode of a step of a rollout, and the number of the step in it."""
        return next(
            (episode, first + step - start)
            for episode, start, first, count in self._runs(origin, lane)
            if start <= step < start + count
        )

    def _runs(self, origin: Origin, lane: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield runs of steps: episode, first step in the rollout, first in the recorded part of the episode, count."""
        begin, end = origin.first_step, origin.first_step + self._shape.steps
        rows, begins = self._lanes.get((origin.writer, lane), (np.empty(0, int), np.empty(0, int)))
        steps = self._trace.episodes["steps"]
        found = 0
        for index in range(max(0, int(np.searchsorted(begins, begin, "right")) - 1), len(rows)):
            episode, first = int(rows[index]), int(begins[index])
            low, high = max(begin, first), min(end, first + int(steps[episode]))
            if first >= end:
                break
            if high > low:
                found += high - low
                yield episode, low - begin, low - first, high - low
        if found != self._shape.steps:
            raise CorruptTrace(
                f"{self._trace.directory}: the trace has {found} of steps {begin} to {end} of lane {lane} of writer "
                f"{origin.writer}, used for learning"
            )

    def _copy(self, rollout: Rollout, lane: int, index: int, start: int, first: int, count: int) -> None:
        episode = self._trace[index][first : first + count]
        steps = slice(start, start + count)
        for leaf, column in zip(self._shape.leaves, rollout.observations):
            rows = picked(episode.observations, leaf.path)
            column[start : start + count + 1, lane] = rows
        rollout.actions[steps, lane] = self._shape.actions.to_rows(episode.actions)
        rollout.rewards[steps, lane] = episode.rewards
        rollout.terminations[steps, lane] = episode.terminations
        rollout.truncations[steps, lane] = episode.truncations
        annotations = episode.annotations
        rollout.logprob[steps, lane] = annotations["logprob"]
        if start == 0 and self._shape.state:
            rollout.state[lane] = annotations[STATE][0]
        if episode.truncations[-1] and not episode.terminations[-1]:
            for final, column in zip(rollout.finals, rollout.observations):
                final[start + count - 1, lane] = column[start + count, lane]


class MeanReturn:
    """Mean return of the last 100 episodes that ended in rollouts that were learned from."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_LAST_EPISODES)

    def add(self, returns: Iterable[Array]) -> float | None:
        """Add the rollouts of an update, see RecordedRollouts.returns(); return the mean, None before 100 episodes."""
        for rollout in returns:
            self._last.extend(rollout[~np.isnan(rollout)].tolist())
        return statistics.fmean(self._last) if len(self._last) == _LAST_EPISODES else None

    def restore(self, rollouts: Sequence[Sequence[Origin]], recorded: RecordedRollouts) -> None:
        """Continue after these rollouts of all updates so far."""
        found: deque[Array] = deque()
        episodes = 0
        for origin in (origin for update in reversed(rollouts) for origin in reversed(update)):
            if episodes >= _LAST_EPISODES:
                break
            found.appendleft(recorded.returns(origin))
            episodes += int((~np.isnan(found[0])).sum())
        self.add(found)
