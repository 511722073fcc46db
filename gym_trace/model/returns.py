"""What rewards are summed up as; returns while episodes are recorded. Rewards may be several numbers each."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

import numpy as np

from gym_trace.model.tensors import plain_array
from gym_trace.model.values import Array

# The sum of rewards that are numbers, or of each objective of rewards that are several.
Return = float | tuple[float, ...]
_LATELY = 100


def number_of(value: Any) -> float:
    """A reward as what is summed up, NaN if it is no number: no real one, or one that only its own package knows."""
    if type(value) in (bool, int, float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    value = plain_array(value)
    is_number = type(value) is np.ndarray or isinstance(value, np.generic)
    return float(value) if is_number and value.shape == () and value.dtype.kind in "biuf" else math.nan


def numbers_of(rewards: Array | list[Any]) -> Array:
    """Rewards, one a row, as what is summed up to a return."""
    if isinstance(rewards, np.ndarray) and rewards.dtype != object:
        is_number = rewards.ndim == 1 and rewards.dtype.kind in "biuf"
        return rewards if is_number else np.full(len(rewards), np.nan)
    return np.array([number_of(reward) for reward in rewards], np.float64)


def as_return(total: Any) -> Return:
    """A sum of rewards, whatever the environment has for them; NaN where they are no numbers."""
    try:
        array = np.asarray(total)
        if array.dtype.kind == "c":
            return math.nan
        array = array.astype(np.float64)
    except Exception:  # values of any type, such as tensors on another device
        return math.nan
    return float(array) if array.ndim == 0 else tuple(array.ravel().tolist())


class LastReturns:
    """Those of the last 100 complete episodes."""

    def __init__(self) -> None:
        self._returns: deque[Return] = deque(maxlen=_LATELY)

    def add(self, value: Return) -> None:
        self._returns.append(value)

    def summary(self) -> tuple[Return, Return, Return] | None:
        """Mean, least and largest, of each objective by itself; None before there are any."""
        if not self._returns:
            return None
        last = self._returns[-1]
        if not isinstance(last, tuple):
            known = [value for value in self._returns if not isinstance(value, tuple)]
            return _spread(known)
        alike = [value for value in self._returns if isinstance(value, tuple) and len(value) == len(last)]
        mean, least, largest = zip(*map(_spread, zip(*alike))) if last else ((), (), ())
        return mean, least, largest


def _spread(values: Any) -> tuple[float, float, float]:
    return statistics.fmean(values), min(values), max(values)


class LaneReturns:
    """The returns of the open episodes of a vector environment."""

    def __init__(self, lanes: int):
        self._totals: Array = np.zeros(lanes)

    def add(self, rewards: Any, lanes: Array) -> None:
        """Adds the rewards of these lanes, a boolean array. rewards: a row a lane."""
        try:
            rows = np.asarray(rewards)
            if rows.ndim > self._totals.ndim and not self._totals.any():
                self._totals = np.zeros(rows.shape)
            self._totals[lanes] += rows[lanes]
        except Exception:  # values of any type
            self._totals[lanes] = math.nan

    def take(self, lanes: Array) -> list[Return]:
        """The returns of these lanes, which begin anew."""
        taken = [as_return(total) for total in self._totals[lanes]]
        self._totals[lanes] = 0.0
        return taken
