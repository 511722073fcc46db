"""Hindsight experience replay (Andrychowicz et al., 2017): goals that were reached put in the place of those that were
wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gym_trace.errors import InvalidOption
from gym_trace.model.layout import Branch, Layout
from gym_trace.model.values import Array
from gym_trace.sampling.draw import uniform
from gym_trace.sampling.rows import Rows

ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
_STRATEGIES = ("future", "final", "random")
_CHOICE, _GOAL = 0x1D, 0x2E  # what chance is for


@dataclass(frozen=True)
class Hindsight:
    """Which goals transitions get, of environments whose observations are dicts with achieved_goal and desired_goal.

    Attributes:
        strategy: where the goal is taken from: an observation that comes later in the episode ("future"), its last one
            ("final"), or any observation ("random").
        reward_fn: ``reward_fn(achieved_goal, desired_goal, infos)`` with arrays of n rows, achieved_goal that of what
            the step led to; returns (n,) rewards. infos: None, or (n,) dicts where they are among the columns. Such as
            ``env.unwrapped.compute_reward`` of Gymnasium-Robotics.
        ratio: of the transitions that get another goal; the others stay as they were recorded.
    """

    strategy: str
    reward_fn: Callable[[Any, Any, Any], Any]
    ratio: float = 0.8

    def __post_init__(self) -> None:
        if self.strategy not in _STRATEGIES:
            raise InvalidOption(f"strategy={self.strategy!r}: pass one of {', '.join(_STRATEGIES)}")
        if not 0 <= self.ratio <= 1:
            raise InvalidOption(f"ratio={self.ratio!r}: pass a number from 0 to 1")

    def check(self, layout: Layout) -> None:
        """Raises InvalidOption unless there are goals."""
        if not isinstance(layout, Branch) or layout.keys is None or not {ACHIEVED, DESIRED} <= set(layout.keys):
            raise InvalidOption(f"goals: observations of this trace are not dicts with {ACHIEVED} and {DESIRED}")

    def relabel(self, batch: dict[str, Any], rows: Rows, piece: Array, step: Array, seed: int, places: Array) -> None:
        """Gives some of the transitions of a batch other goals, and the rewards for these.

        piece, step: where each is, counted from the first step that is here.
        """
        chosen = np.flatnonzero(uniform(seed ^ _CHOICE, places) < self.ratio)
        chance = uniform(seed ^ _GOAL, places)[chosen]
        piece, step = piece[chosen], step[chosen]
        array = rows.columns["observations", ACHIEVED]
        last = rows.lengths[piece]
        if self.strategy == "random":
            at = np.minimum((chance * len(array)).astype(np.int64), len(array) - 1)
        elif self.strategy == "final":
            at = rows.seen[piece] + last
        else:
            at = rows.seen[piece] + step + 1 + np.minimum((chance * (last - step)).astype(np.int64), last - step - 1)
        goals = array[at]
        for name in ("observations", "next_observations"):
            batch[name][DESIRED][chosen] = goals
        infos = batch["infos"][chosen] if "infos" in batch else None
        rewards = np.array(batch["rewards"])
        rewards[chosen] = self.reward_fn(batch["next_observations"][ACHIEVED][chosen], goals, infos)
        batch["rewards"] = rewards
