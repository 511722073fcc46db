"""Rollouts: so many steps of so many lanes, as they are handed to the learner, and as a trace gives them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from gym_trace.errors import CorruptTrace
from gym_trace.model.values import Array
from gym_trace.playback.trace import Trace
from gym_trace.training.network.forms import ActionForm, Leaf, leaves_of, picked

WRITER = "S64"
STATE = "state"  # the annotation that has the state of a recurrent network, of the first step of each rollout


class Origin(NamedTuple):
    """Where a rollout is in the trace: from which step of its writer on, and which weights acted."""

    writer: str
    first_step: int
    version: int


class Shape(NamedTuple):
    """What rollouts of a run are like."""

    steps: int
    lanes: int
    leaves: list[Leaf]
    actions: ActionForm
    state: int  # numbers that a recurrent network has; 0: it is none

    @classmethod
    def of(cls, observation_space: Any, action_space: Any, steps: int, lanes: int, state: int) -> Shape:
        return cls(steps, lanes, leaves_of(observation_space), ActionForm(action_space), state)

    def fields(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """The shape and dtype of each array of a rollout."""
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
    """Arrays with a row a step and a column a lane.

    Attributes:
        observations: of each leaf, (steps + 1, lanes, ...): the last row is what follows the last step.
        finals: of each leaf, (steps, lanes, ...): where an episode was truncated, its last observation.
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

    @classmethod
    def empty(cls, shape: Shape) -> Rollout:
        return cls.of({name: np.zeros(size, dtype) for name, (size, dtype) in shape.fields().items()})

    def bootstrapped(self) -> tuple[Array, list[Array]]:
        """Where the value of the last observation counts, (steps, lanes), and those observations, a row each."""
        where = self.truncations & ~self.terminations
        return where, [final[where] for final in self.finals]


def joined(rollouts: Sequence[Rollout]) -> Rollout:
    """Side by side: all lanes of all rollouts."""
    if len(rollouts) == 1:
        return rollouts[0]

    columns = ("actions", "rewards", "terminations", "truncations", "logprob")
    leaves = range(len(rollouts[0].observations))
    return Rollout(
        [np.concatenate([rollout.observations[leaf] for rollout in rollouts], 1) for leaf in leaves],
        [np.concatenate([rollout.finals[leaf] for rollout in rollouts], 1) for leaf in leaves],
        **{name: np.concatenate([getattr(rollout, name) for rollout in rollouts], 1) for name in columns},
        state=np.concatenate([rollout.state for rollout in rollouts]),
    )


class RecordedRollouts:
    """The rollouts of a trace, which anybody may have written.

    Raises CorruptTrace where one is not there.
    """

    def __init__(self, trace: Trace, shape: Shape):
        self._trace, self._shape = trace, shape

    @cached_property
    def _lanes(self) -> dict[tuple[str, int], tuple[Array, Array]]:
        """Of each writer and lane: its episodes in order, and at which step of the writer each of them begins."""
        table = self._trace.episodes
        found = {}
        writers = self._trace.writers
        names = [(writers[writer], lane) for writer, lane in zip(table["writer"].tolist(), table["lane"].tolist())]
        by_lane: dict[tuple[str, int], list[int]] = {}
        for index, name in enumerate(names):
            by_lane.setdefault(name, []).append(index)
        for name, indexes in by_lane.items():
            rows = np.array(indexes)
            rows = rows[np.lexsort((table["first_step"][rows], table["episode_id"][rows]))]
            ends = np.cumsum(table["steps"][rows].astype(np.int64))
            found[name] = rows, ends - table["steps"][rows]
        return found

    def read(self, origin: Origin) -> Rollout:
        """As the learner was given it, but for the observation behind the last step, where an episode ended there."""
        pieces = [(lane, *piece) for lane in range(self._shape.lanes) for piece in self._pieces(origin, lane)]
        rollout = Rollout.empty(self._shape)
        for piece in pieces:
            self._copy(rollout, *piece)
        return rollout

    def episodes_of(self, origin: Origin) -> list[int]:
        """The numbers in the trace of the episodes that a rollout has steps of."""
        return sorted({ep for lane in range(self._shape.lanes) for ep, *_ in self._pieces(origin, lane)})

    def _pieces(self, origin: Origin, lane: int) -> Iterator[tuple[int, int, int, int]]:
        """The episode, the step of the rollout, the step of the episode's part, and how many, one after the other."""
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
                f"{self._trace.directory}: of steps {begin} to {end} of lane {lane} of writer {origin.writer}, which "
                f"were learnt from, {found} are there"
            )

    def _copy(self, rollout: Rollout, lane: int, number: int, at: int, first: int, count: int) -> None:
        episode = self._trace[number][first : first + count]
        steps = slice(at, at + count)
        for leaf, column in zip(self._shape.leaves, rollout.observations):
            rows = picked(episode.observations, leaf.path)
            column[at : at + count + 1, lane] = rows
        rollout.actions[steps, lane] = self._shape.actions.to_rows(episode.actions)
        rollout.rewards[steps, lane] = episode.rewards
        rollout.terminations[steps, lane] = episode.terminations
        rollout.truncations[steps, lane] = episode.truncations
        notes = episode.annotations
        rollout.logprob[steps, lane] = notes["logprob"]
        if at == 0 and self._shape.state:
            rollout.state[lane] = notes[STATE][0]
        if episode.truncations[-1] and not episode.terminations[-1]:
            for final, column in zip(rollout.finals, rollout.observations):
                final[at + count - 1, lane] = column[at + count, lane]
