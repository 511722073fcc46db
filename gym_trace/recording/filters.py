"""Filters: choose the episodes and steps to record."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from gym_trace.data.returns import number_of
from gym_trace.errors import InvalidOption

EpisodeFilter = Callable[[int], bool]
FrameFilter = Callable[[int], bool]


class Filters:
    """The filters of a recording wrapper; the arguments are those of the wrapper."""

    def __init__(
        self,
        episode_filter: EpisodeFilter | None,
        frame_filter: FrameFilter | None,
        reward_classes: Sequence[float] | None,
    ):
        if reward_classes is not None and frame_filter is not None:
            raise InvalidOption(
                "reward_classes: cannot be combined with frame_filter, which also chooses steps; pass one of them"
            )
        self._episode_filter, self._frame_filter = episode_filter, frame_filter
        self._classes = None if reward_classes is None else RewardClasses(reward_classes)
        self._class_rewards = None if reward_classes is None else [float(value) for value in reward_classes]
        self.by_step = frame_filter is not None or reward_classes is not None  # True if single steps may be skipped
        self.is_active = self.by_step or episode_filter is not None

    def keeps_episode(self, episode: int) -> bool:
        """Return True if the episode that begins is recorded."""
        return self._episode_filter is None or bool(self._episode_filter(episode))

    def keeps_step(self, index: int, reward: Any) -> bool:
        """Return True if a step passes the filters. index: of the step in its episode."""
        if self._frame_filter is not None:
            return bool(self._frame_filter(index))
        return self._classes is None or self._classes.keeps(number_of(reward))

    def described(self) -> dict[str, Any]:
        """Return the description for the schema record."""
        return {
            "episode_filter": self._episode_filter is not None,
            "frame_filter": self._frame_filter is not None,
            "reward_classes": self._class_rewards,
        }

    def summary(self) -> dict[str, Any]:
        """Return the summary for the end of the manifest."""
        return {} if self._classes is None else self._classes.summary()


class RewardClasses:
    """Keeps steps with rare rewards more often than steps with common ones.

    A step belongs to the class nearest to its reward; a tie goes to the lower class. It is kept with probability
    (steps seen of the rarest class so far) / (steps seen of its own class), which balances the classes in the trace.
    A step whose reward is NaN or not a number belongs to no class and is kept. Source: gym_recording.

    Args:
        classes: one reward value per class, at least one.
        seed: seed of a private generator; the environment's generator is never used.

    Examples:
        >>> classes = gym_trace.recording.RewardClasses([0.0, 1.0], seed=0)
        >>> kept = [reward for reward in [0.0] * 9 + [1.0] + [0.0] * 90 if classes.keeps(reward)]
        >>> kept.count(1.0), kept.count(0.0) < 99
        (1, True)
    """

    def __init__(self, classes: Sequence[float], seed: int = 0):
        values = sorted({float(value) for value in classes})
        if not values or not np.isfinite(values).all():
            raise InvalidOption(f"reward_classes={list(classes)!r}: pass one or more finite numbers")
        self.classes = values
        self.counts = [0] * len(values)
        self._bounds = [low / 2 + high / 2 for low, high in pairwise(values)]  # midpoints between neighbouring classes
        self._random = np.random.default_rng(seed)

    def keeps(self, reward: float) -> bool:
        """Count a step with this reward; return True if it is kept.

        Examples:
            >>> gym_trace.recording.RewardClasses([0.0, 1.0]).keeps(1.0)
            True
        """
        if reward != reward:
            return True
        nearest = bisect_left(self._bounds, reward)
        self.counts[nearest] += 1
        rarest = min(count for count in self.counts if count)
        return bool(self._random.random() * self.counts[nearest] < rarest)

    def summary(self) -> dict[str, list[float]]:
        """Return the classes and their counts for the manifest.

        Examples:
            >>> classes = gym_trace.recording.RewardClasses([0.0, 1.0])
            >>> _ = [classes.keeps(reward) for reward in (0.0, 1.0, 1.0)]
            >>> classes.summary()
            {'reward_classes': [0.0, 1.0], 'class_counts': [1.0, 2.0]}
        """
        return {"reward_classes": self.classes, "class_counts": [float(count) for count in self.counts]}
