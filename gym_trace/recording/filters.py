"""Which episodes and steps are kept."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from gym_trace.errors import InvalidOption
from gym_trace.model.returns import number_of

EpisodeFilter = Callable[[int], bool]
FrameFilter = Callable[[int], bool]


class Filters:
    """What recording wrappers ask before they keep an episode or a step. Arguments as theirs."""

    def __init__(
        self,
        episode_filter: EpisodeFilter | None,
        frame_filter: FrameFilter | None,
        reward_classes: Sequence[float] | None,
    ):
        if reward_classes is not None and frame_filter is not None:
            raise InvalidOption(
                "reward_classes and frame_filter exclude each other: both choose the steps that are kept"
            )
        self._episode_filter, self._frame_filter = episode_filter, frame_filter
        self._classes = None if reward_classes is None else RewardClasses(reward_classes)
        self._given = None if reward_classes is None else [float(value) for value in reward_classes]
        self.steps = frame_filter is not None or reward_classes is not None  # whether single steps are left out
        self.any = self.steps or episode_filter is not None

    def keeps_episode(self, episode: int) -> bool:
        """Whether the episode that begins is recorded."""
        return self._episode_filter is None or bool(self._episode_filter(episode))

    def keeps_step(self, index: int, reward: Any) -> bool:
        """Whether a step is recorded. index: its number in its episode. Rewards that are no numbers are kept."""
        if self._frame_filter is not None:
            return bool(self._frame_filter(index))
        return self._classes is None or self._classes.keeps(number_of(reward))

    def described(self) -> dict[str, Any]:
        """What the schema record is to say."""
        return {
            "episode_filter": self._episode_filter is not None,
            "frame_filter": self._frame_filter is not None,
            "reward_classes": self._given,
        }

    def summary(self) -> dict[str, Any]:
        """What the manifest is to say at the end."""
        return {} if self._classes is None else self._classes.summary()


class RewardClasses:
    """Keeps steps so that rare rewards are kept more often than common ones.

    Each step belongs to the class nearest to its reward, the lower one of two equally near. It is kept with probability
    (steps seen of the rarest class seen so far) / (steps seen of its own class), so that all classes end up equally
    frequent in the trace. A reward that is no number, or NaN, belongs to no class: its step is kept. Taken from
    gym_recording's reward classes.

    Args:
        classes: the reward values that stand for a class each, at least one.
        seed: of the generator that decides; the environment's own is never touched.
    """

    def __init__(self, classes: Sequence[float], seed: int = 0):
        values = sorted({float(value) for value in classes})
        if not values or not np.isfinite(values).all():
            raise InvalidOption(f"reward_classes={list(classes)!r}: give one or more finite numbers")
        self.classes = values
        self.counts = [0] * len(values)
        self._bounds = [low / 2 + high / 2 for low, high in pairwise(values)]  # between neighbouring classes
        self._random = np.random.default_rng(seed)

    def keeps(self, reward: float) -> bool:
        """Counts a step with this reward, and says whether it is kept."""
        if reward != reward:
            return True
        nearest = bisect_left(self._bounds, reward)
        self.counts[nearest] += 1
        rarest = min(count for count in self.counts if count)
        return bool(self._random.random() * self.counts[nearest] < rarest)

    def summary(self) -> dict[str, list[float]]:
        """What goes into the manifest."""
        return {"reward_classes": self.classes, "class_counts": [float(count) for count in self.counts]}
