"""Captions of the steps in a video: step, action, reward, return."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gym_trace.model.episode import Episode
from gym_trace.model.values import Array, row_of

_LONGEST = 60  # characters of a value


class Words:
    """Captions of the steps of an episode.

    Attributes:
        rewards: (N,), or (N, objectives).
    """

    def __init__(self, episode: Episode):
        self._actions, self.rewards = episode.actions, episode.rewards
        self._first_step = episode.first_step
        self._returns = _returns(self.rewards)

    def at(self, step: int) -> list[str]:
        """Return the lines after `step` steps."""
        taken = self._first_step + step
        first = f"step {taken}   return {_number(self._returns[step])}"
        if step == 0:
            return [first, "reset"]
        action = _short(row_of(self._actions, step - 1))
        return [first, f"reward {_number(self.rewards[step - 1])}   action {action}"]


def _returns(rewards: Array) -> Array | list[Any]:
    """Return the return after 0, 1, 2 … steps; NaN after the first reward that cannot be added."""
    if rewards.dtype.kind in "biuf" and rewards.ndim == 1:
        return np.concatenate([[0.0], np.cumsum(rewards, dtype=np.result_type(rewards.dtype, np.float64))])
    returns: list[Any] = [0.0]
    for reward in rewards:
        try:
            returns.append(returns[-1] + reward)
        except (TypeError, ValueError):
            returns.append(math.nan)
    return returns


def _number(value: Any) -> str:
    try:
        return f"{float(value):.4g}"
    except (TypeError, ValueError):
        return _short(value)


def _short(value: Any) -> str:
    """Return a value as short text on one line."""
    if isinstance(value, np.ndarray):
        text = np.array2string(value, precision=2, suppress_small=True, threshold=20, max_line_width=10**6)
    elif isinstance(value, (float, np.floating)):
        text = f"{value:.4g}"
    else:
        text = str(value)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
