"""What is said of each step in a video: step, action, reward, return."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gym_trace.model.episode import Episode
from gym_trace.model.values import row_of

_LONGEST = 60  # characters of an action


class Words:
    """What is to be said of each step of an episode."""

    def __init__(self, episode: Episode):
        self._actions, self._rewards = episode.actions, episode.rewards
        self._first_step = episode.first_step
        self._return: Any = 0.0

    def at(self, step: int) -> list[str]:
        """step: how many were taken; to be asked for in order."""
        taken = self._first_step + step
        if step == 0:
            return [f"step {taken}   return {_number(self._return)}", "reset"]
        reward = self._rewards[step - 1]
        try:
            self._return = self._return + reward
        except (TypeError, ValueError):  # no number, and not several
            self._return = math.nan
        action = _short(row_of(self._actions, step - 1))
        return [f"step {taken}   return {_number(self._return)}", f"reward {_number(reward)}   action {action}"]


def _number(value: Any) -> str:
    try:
        return f"{float(value):.4g}"
    except (TypeError, ValueError):
        return _short(value)


def _short(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, np.ndarray):
        text = np.array2string(value, precision=2, suppress_small=True, threshold=20, max_line_width=10**6)
    elif isinstance(value, (float, np.floating)):
        text = f"{value:.4g}"
    else:
        text = str(value)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
