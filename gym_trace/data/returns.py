"""Rewards as numbers, and returns of episodes during recording. A reward may be several numbers."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np

from gym_trace.data.tensors import plain_array
from gym_trace.data.values import Array

# The sum of the rewards, or one sum per objective.
Return = float | tuple[float, ...]
_LAST_EPISODES = 100


def number_of(value: Any) -> float:
    """Return a reward as a float; NaN if it is not a real number that NumPy understands."""
    if type(value) in (bool, int, float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    value = plain_array(value)
    is_number = type(value) is np.ndarray or isinstance(value, np.generic)
    return float(value) if is_number and value.shape == () and value.dtype.kind in "biuf" else math.nan


def numbers_of(rewards: Array | list[Any]) -> Array:
    """Return rewards, one per row, as numbers to sum; NaN for each that is not a number."""
    if isinstance(rewards, np.ndarray) and rewards.dtype != object:
        is_number = rewards.ndim == 1 and rewards.dtype.kind in "biuf"
        return rewards if is_number else np.full(len(rewards), np.nan)
    return np.array([number_of(reward) for reward in rewards], np.float64)


def as_return(total: Any) -> Return:
    """Return a sum of rewards of any type as a Return; NaN if it is not a number."""
    try:
        array = np.asarray(total)
        if array.dtype.kind == "c":
            return math.nan
        array = array.astype(np.float64)
    except Exception:  # user values, such as a tensor on another device, may raise anything
        return math.nan
    return float(array) if array.ndim == 0 else tuple(array.ravel().tolist())


class LastReturns:
    """Returns of the last 100 complete episodes."""

    def __init__(self) -> None:
        self._returns: deque[Return] = deque(maxlen=_LAST_EPISODES)

    def add(self, value: Return) -> None:
        self._returns.append(value)

    def summary(self) -> tuple[Return, Return, Return] | None:
        """Return mean, min and max, per objective; None if there are no episodes yet."""
        if not self._returns:
            return None
        last = self._returns[-1]
        if not isinstance(last, tuple):
            return _spread([value for value in self._returns if not isinstance(value, tuple)])
        same_length = [value for value in self._returns if isinstance(value, tuple) and len(value) == len(last)]
        mean, least, largest = zip(*map(_spread, zip(*same_length))) if last else ((), (), ())
        return mean, least, largest


def _spread(values: Any) -> tuple[float, float, float]:
    return math.fsum(values) / len(values), min(values), max(values)


class LaneReturns:
    """The returns of the open episodes of a vector environment."""

    def __init__(self, lanes: int):
        self._totals: Array = np.zeros(lanes)

    def add(self, rewards: Any, lanes: Array) -> None:
        """Add the rewards of some lanes. rewards: one row per lane. lanes: boolean mask."""
        try:
            rows = np.asarray(rewards)
            if rows.ndim > self._totals.ndim and not self._totals.any():
                self._totals = np.zeros(rows.shape)
            self._totals[lanes] += rows[lanes]
        except Exception:  # user values may raise anything
            self._totals[lanes] = math.nan

    def take(self, lanes: Array) -> list[Return]:
        """Return the returns of these lanes and reset them to 0."""
        returns = [as_return(total) for total in self._totals[lanes]]
        self._totals[lanes] = 0.0
        return returns
