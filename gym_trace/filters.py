"""Which episodes and steps are kept."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from gym_trace.errors import InvalidOption

EpisodeFilter = Callable[[int], bool]
FrameFilter = Callable[[int], bool]


class RewardClasses:
    """Keeps steps so that rare rewards are kept more often than common ones.

    Each step belongs to the class nearest to its reward, the lower one of two equally near. It is kept with probability
    (steps seen of the rarest class seen so far) / (steps seen of its own class), so that all classes end up equally
    frequent in the trace. Taken from gym_recording's reward classes.

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
        nearest = bisect_left(self._bounds, reward)
        self.counts[nearest] += 1
        rarest = min(count for count in self.counts if count)
        return bool(self._random.random() * self.counts[nearest] < rarest)

    def summary(self) -> dict[str, list[float]]:
        """What goes into the manifest."""
        return {"reward_classes": self.classes, "class_counts": [float(count) for count in self.counts]}
