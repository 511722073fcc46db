"""Draws by weight: a tree of sums, of which a million leaves are updated and searched by array operations."""

from __future__ import annotations

import numpy as np

from gym_trace.errors import InvalidOption
from gym_trace.model.values import Array


class SumTree:
    """Non-negative weights of so many items, and their sums by twos, fours …

    Attributes:
        items: how many.
    """

    def __init__(self, weights: Array):
        """weights: (items,). Raises InvalidOption."""
        self.items = len(weights)
        depth = max(0, self.items - 1).bit_length()
        self._levels = [np.zeros(1 << level) for level in range(depth + 1)]  # from the root down
        self.update(np.arange(self.items), weights)

    @property
    def total(self) -> float:
        return float(self._levels[0][0])

    @property
    def weights(self) -> Array:
        """(items,) float64, a copy."""
        return self._levels[-1][: self.items].copy()

    def of(self, items: Array) -> Array:
        """(n,) float64."""
        found: Array = self._levels[-1][items]
        return found

    def update(self, items: Array, weights: Array) -> None:
        """Gives these items other weights; of one that is named twice the last counts. Raises InvalidOption."""
        items, weights = np.asarray(items, np.int64), np.asarray(weights, np.float64)
        if items.shape != weights.shape or items.ndim != 1:
            raise InvalidOption(
                f"{items.shape} items and {weights.shape} weights: pass as many of both, in one dimension"
            )
        if len(items) and not (items.min() >= 0 and items.max() < self.items):
            raise InvalidOption(f"items are from 0 to {self.items - 1}")
        if not np.isfinite(weights).all() or (weights < 0).any():
            raise InvalidOption("weights are finite, and not negative")
        self._levels[-1][items] = weights
        for upper, lower in zip(self._levels[-2::-1], self._levels[:0:-1]):
            items = np.unique(items >> 1)
            upper[items] = lower[2 * items] + lower[2 * items + 1]

    def find(self, fractions: Array) -> Array:
        """(n,) int64: the items at these parts, in [0, 1), of the total. Raises InvalidOption if all weights are 0."""
        if not self.total > 0:
            raise InvalidOption("all weights are 0: there is nothing to be drawn")
        left = fractions * self.total
        at = np.zeros(len(left), np.int64)
        for lower in self._levels[1:]:
            at *= 2
            first, second = lower[at], lower[at + 1]
            goes_right = (left >= first) & (second > 0)
            left = np.where(goes_right, left - first, left)
            at += goes_right
        return at
