"""Measure how the results of a replay depart from the recording: where each leaf begins to, how far, how fast."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.tensors import plain_array
from gym_trace.data.values import Array
from gym_trace.tools.replay.compare import EpisodeComparison, are_equal, element

_LEAST_STEPS = 5  # number from which a growth is computed
_LEAST_GROWTH = 10.0  # factor over these steps, and at most from their end to the largest error


class Divergence(NamedTuple):
    """The differences of one leaf in an episode that was played to its end, beyond the first one.

    Attributes:
        column: e.g. "observations/position" or "rewards".
        step: first step that differs; None at the reset.
        at: index of the first element that differs there, () for a scalar.
        steps: number of steps that differ, with the reset.
        largest: largest difference between elements; infinite if one is NaN; None unless both values are numbers.
        largest_step, largest_at: step and index of the largest difference; without one, `step` and `at`.
        growth: factor by which the largest difference of a step grows per step, from the first one until it reaches a
            tenth of the largest: the exponential of the slope of its logarithm, a finite-time Lyapunov exponent. None
            for fewer than five steps, less than tenfold growth, or growth that a power of time describes better.

    Examples:
        >>> verdict = next(gym_trace.verify_trace("traces/cartpole"))
        >>> verdict.divergences  # the replay is the same
        ()
    """

    column: str
    step: int | None
    at: tuple[int, ...]
    steps: int
    largest: float | None
    largest_step: int | None
    largest_at: tuple[int, ...]
    growth: float | None

    @property
    def largest_place(self) -> str:
        """Element and step of the largest difference: observations[2] at step 97."""
        step = "the reset" if self.largest_step is None else f"step {self.largest_step}"
        return f"{element(self.column, self.largest_at)} at {step}"

    def __str__(self) -> str:
        first = "the reset" if self.step is None else f"step {self.step}"
        count = f"{self.steps} step{'s' * (self.steps != 1)}"
        text = f"{element(self.column, self.at)} differs at {count}, from {first} on"
        if self.largest is not None:
            text += f", by up to {self.largest:.3g}"
            if (self.largest_step, self.largest_at) != (self.step, self.at):
                text += f" ({self.largest_place})"
        return text if self.growth is None else f"{text}; the difference grows {self.growth:.3g} times a step"


class _LeafMeter:
    """Measures one leaf. The reset is step -1."""

    def __init__(self, column: str):
        self._column = column
        self._steps, self._errors = array("q"), array("d")  # of the steps that differ
        self._first_at: tuple[int, ...] = ()
        self._largest = -1, (), -1.0  # step, index, difference
        self._are_numbers = True

    def add(self, step: int, recorded: Any, seen: Any) -> None:
        seen = plain_array(seen)
        distance = _distances(recorded, seen)
        if distance is None and are_equal(recorded, seen):
            return
        if distance is None:
            self._are_numbers, at, error, largest_at = False, (), np.inf, ()
        else:
            error = float(distance.max(initial=0.0))
            if not error:
                return
            at, largest_at = (tuple(np.argwhere(mask)[0].tolist()) for mask in (distance > 0, distance == error))
        if not self._steps:
            self._first_at = at
        if error > self._largest[2]:
            self._largest = step, largest_at, error
        self._steps.append(step)
        self._errors.append(error)

    def result(self) -> Divergence | None:
        """Return what was measured; None if nothing differs."""
        if not self._steps:
            return None
        step, at, largest = self._largest
        growth = _growth(np.array(self._steps), np.array(self._errors)) if self._are_numbers else None
        first, worst = (None if number < 0 else number for number in (self._steps[0], step))
        if not self._are_numbers:
            return Divergence(self._column, first, self._first_at, len(self._steps), None, first, self._first_at, None)
        return Divergence(self._column, first, self._first_at, len(self._steps), largest, worst, at, growth)


class DivergenceMeter:
    """Measures the observations and rewards of a replay, leaf by leaf. Its methods are those of EpisodeComparison.

    Args:
        recorded: gives the recorded values; its tolerances play no part.
        until_end: False to also measure steps after the replay itself has ended.
    """

    def __init__(self, recorded: EpisodeComparison, until_end: bool = True):
        self._recorded, self._until_end = recorded, until_end
        self._meters: dict[str, _LeafMeter] = {}
        self._has_ended = False

    def reset(self, observation: Any, info: dict[str, Any]) -> None:
        self._add(-1, self._recorded.observation_pairs(0, observation))

    def step(
        self, step: int, observation: Any, reward: Any, terminated: Any, truncated: Any, info: dict[str, Any]
    ) -> None:
        if not self._has_ended:
            self._add(step, self._recorded.observation_pairs(step + 1, observation))
            self._add(step, self._recorded.reward_pair(step, reward))
            self._has_ended = self._until_end and (bool(terminated) or bool(truncated))

    def _add(self, step: int, pairs: Iterable[tuple[str, Any, Any]]) -> None:
        for column, recorded, seen in pairs:
            if column not in self._meters:
                self._meters[column] = _LeafMeter(column)
            self._meters[column].add(step, recorded, seen)

    def divergences(self) -> tuple[Divergence, ...]:
        """Return the divergence of each leaf that differs, the earliest first."""
        found = [result for meter in self._meters.values() if (result := meter.result()) is not None]
        return tuple(sorted(found, key=lambda one: -1 if one.step is None else one.step))


def divergence_of(column: str, recorded: Iterable[Any], replayed: Iterable[Any], first: int = 0) -> Divergence | None:
    """Return the divergence of one leaf from its rows; None if they are equal.

    Args:
        column: name of the leaf, for the result.
        recorded, replayed: rows, as far as both go. Equal NaNs, and zeros of both signs, do not differ.
        first: step of the first row; -1 for observations, whose first row is that of the reset.
    """
    meter = _LeafMeter(column)
    for step, (one, other) in enumerate(zip(recorded, replayed), first):
        meter.add(step, one, other)
    return meter.result()


def _distances(recorded: Any, seen: Any) -> Array | None:
    """Return the distances of the elements, infinite where one is NaN; None unless both are numbers of one shape."""
    if not all(isinstance(value, (np.ndarray, np.generic, int, float)) for value in (recorded, seen)):
        return None
    a, b = np.asarray(recorded), np.asarray(seen)
    if a.shape != b.shape or a.dtype.kind not in "biuf" or b.dtype.kind not in "biuf":
        return None
    with np.errstate(all="ignore"):
        distance = np.abs(a.astype(np.float64) - b.astype(np.float64))
    distance = np.where(distance == distance, distance, np.inf)
    return np.asarray(np.where((a == b) | ((a != a) & (b != b)), 0.0, distance))


def _growth(steps: Array, errors: Array) -> float | None:
    """Return the growth of an error per step; see Divergence."""
    known = np.isfinite(errors)
    steps, errors = steps[known], errors[known]
    if not len(errors):
        return None
    end = int(np.argmax(errors >= errors.max() / _LEAST_GROWTH)) + 1
    steps, errors = steps[:end], errors[:end]
    if end < _LEAST_STEPS or errors[-1] < _LEAST_GROWTH * errors[0]:
        return None
    logarithms, times = np.log(errors), (steps - steps[0]).astype(np.float64)
    exponential, power = (np.corrcoef(kind, logarithms)[0, 1] for kind in (times, np.log1p(times)))
    return float(np.exp(np.polyfit(times, logarithms, 1)[0])) if exponential > power else None
