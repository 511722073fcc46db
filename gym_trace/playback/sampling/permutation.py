"""Pseudo-random numbers and permutations with access to any position, computed without a list.

Numbers depend on the seed and the position only (the finalizer of SplitMix64: Steele, Lea and Flood, 2014). An order
without repetition is a permutation by a Feistel network (Luby and Rackoff, 1988) on the next power of two, applied
until the result is in range. Weighted sampling searches a tree of sums, whose leaves are updated and searched many at
a time.
"""

from __future__ import annotations

import numpy as np

from gym_trace.data.values import Array, distinct
from gym_trace.errors import InvalidOption

GOLDEN, _FIRST, _SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_FEW = 512  # up to this size, permutations are sorted hashes
_ROUNDS = 4  # even, so that both halves have their original width at the end
_ONE = np.uint64(1)
_LINEAR = 4  # table entries per stretch, and the number of stretches that are searched linearly


def hashed(seed: int, positions: Array) -> Array:
    """Return (n,) uint64, a pseudo-random number for each position; the same for the same seed and position."""
    return mixed((mixed(_key(seed)) ^ positions.astype(np.uint64)) * GOLDEN)


def _key(seed: int) -> Array:
    """Return an array with one element: unlike scalars, arrays overflow without a warning."""
    return np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64) + GOLDEN


def mixed(numbers: Array) -> Array:
    """Return hashes of numbers, spread evenly over 64 bits."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _FIRST
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _SECOND
    result: Array = numbers ^ (numbers >> np.uint64(31))
    return result


def uniform(seed: int, positions: Array) -> Array:
    """Return (n,) float64 in [0, 1)."""
    return (hashed(seed, positions) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def drawn(seed: int, positions: Array, count: int) -> Array:
    """Return (n,) int64 in [0, count), each sampled independently."""
    result: Array = (uniform(seed, positions) * count).astype(np.int64)
    return np.minimum(result, count - 1)


def permuted(seed: int, positions: Array, count: int) -> Array:
    """Return (n,) int64, the elements of a permutation of [0, count) at these positions."""
    if count <= _FEW:  # rounds on few bits mix badly
        order: Array = np.argsort(hashed(seed, np.arange(count)), kind="stable")
        return order[positions]
    bits = (count - 1).bit_length()
    keys = [mixed(_key(seed * _ROUNDS + number)) for number in range(_ROUNDS)]
    result = _feistel(keys, positions.astype(np.uint64), bits)
    outside = np.flatnonzero(result >= np.uint64(count))
    while len(outside):
        again = _feistel(keys, result[outside], bits)
        result[outside] = again
        outside = outside[again >= np.uint64(count)]
    return result.astype(np.int64)


def _feistel(keys: list[Array], numbers: Array, bits: int) -> Array:
    """Permute numbers of this number of bits. If it is odd, one half has a bit more."""
    low, high = np.uint64((bits + 1) // 2), np.uint64(bits // 2)
    left, right = numbers >> low, numbers & ((_ONE << low) - _ONE)
    for key in keys:
        left, right = right, left ^ (mixed(right ^ key) & ((_ONE << high) - _ONE))
        low, high = high, low
    result: Array = left << low | right
    return result


class Stretch:
    """Finds the stretch that a number is in, among many contiguous ones. A table gives the stretch to begin with (the
    indexed search of Chen and Asau, 1974), which is several times as fast as binary search.
    """

    def __init__(self, ends: Array):
        """ends: (n,) int64, the end of each stretch."""
        self._ends = ends
        self._first: Array | None = None  # the stretch of every (1 << shift)th number, computed on first use
        self._shift = 0

    def find(self, numbers: Array) -> Array:
        """Return ``ends.searchsorted(numbers, side="right")``, (m,) int64. numbers: from 0 to below the last end."""
        ends = self._ends
        if self._first is None:
            total = int(ends[-1]) if len(ends) else 0
            self._shift = (total // (_LINEAR * len(ends) + 1)).bit_length()
            self._first = ends.searchsorted(np.arange(0, total + 1, 1 << self._shift), side="right")
        found: Array = self._first.take(numbers >> self._shift)
        behind = np.flatnonzero(ends.take(found) <= numbers)
        for _ in range(_LINEAR):
            found[behind] += 1
            behind = behind[ends.take(found.take(behind)) <= numbers.take(behind)]
        if len(behind):
            found[behind] = ends.searchsorted(numbers[behind], side="right")
        return found


class SumTree:
    """Non-negative weights of items, and their sums by twos, fours …

    Attributes:
         items: number of items.
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
        """A copy of the weights, (items,) float64."""
        return self._levels[-1][: self.items].copy()

    def of(self, items: Array) -> Array:
        """Return the weights of these items, (n,) float64."""
        found: Array = self._levels[-1][items]
        return found

    def update(self, items: Array, weights: Array) -> None:
        """Set the weights of these items; if one occurs twice, the last weight counts. Raises InvalidOption."""
        items, weights = np.asarray(items, np.int64), np.asarray(weights, np.float64)
        if items.shape != weights.shape or items.ndim != 1:
            raise InvalidOption(
                f"{items.shape} items and {weights.shape} weights: pass as many of both, in one dimension"
            )
        if len(items) and not (items.min() >= 0 and items.max() < self.items):
            raise InvalidOption(f"items are from 0 to {self.items - 1}")
        if not np.isfinite(weights).all() or (weights < 0).any():
            raise InvalidOption("weights: pass finite numbers, 0 or more")
        self._levels[-1][items] = weights
        for upper, lower in zip(self._levels[-2::-1], self._levels[:0:-1]):
            items = distinct(items >> 1)
            upper[items] = lower[2 * items] + lower[2 * items + 1]

    def find(self, fractions: Array) -> Array:
        """Return the items at these fractions, in [0, 1), of the total. Raises InvalidOption if all weights are 0."""
        if not self.total > 0:
            raise InvalidOption("weights: all are 0, nothing to sample")
        left = fractions * self.total
        at = np.zeros(len(left), np.int64)
        for lower in self._levels[1:]:
            at *= 2
            first, second = lower[at], lower[at + 1]
            goes_right = (left >= first) & (second > 0)
            left = np.where(goes_right, left - first, left)
            at += goes_right
        return at
