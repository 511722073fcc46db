"""Which of n things comes at which place: by arithmetic, so that there is no list and any place can be asked for.

Numbers are made of the seed and the place alone (the finalizer of SplitMix64: Steele, Lea and Flood, 2014). An order
without repetition is a permutation by a Feistel network (Luby and Rackoff, 1988) on the next power of two, walked until
it is in range. What is drawn by weight is found in a tree of sums, whose leaves are updated and searched many at a
time.
"""

from __future__ import annotations

import numpy as np

from gym_trace.data.values import Array
from gym_trace.errors import InvalidOption

GOLDEN, _FIRST, _SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_FEW = 512
_ROUNDS = 4  # an even number, after which the parts are as wide as they were
_ONE = np.uint64(1)
_BEGINS = 4  # in the table of a search, for each stretch; and how many stretches are looked at one after the other


def hashed(seed: int, places: Array) -> Array:
    """(n,) uint64: a number each that looks drawn, the same for the same seed and place."""
    return mixed((mixed(_key(seed)) ^ places.astype(np.uint64)) * GOLDEN)


def _key(seed: int) -> Array:
    """An array of one, which goes over its largest number without a warning."""
    return np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64) + GOLDEN


def mixed(numbers: Array) -> Array:
    """Return numbers whose neighbours are far apart, evenly over 64 bits."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _FIRST
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _SECOND
    result: Array = numbers ^ (numbers >> np.uint64(31))
    return result


def uniform(seed: int, places: Array) -> Array:
    """(n,) float64 in [0, 1)."""
    return (hashed(seed, places) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def drawn(seed: int, places: Array, count: int) -> Array:
    """(n,) int64 in [0, count), each sampled independently."""
    result: Array = (uniform(seed, places) * count).astype(np.int64)
    return np.minimum(result, count - 1)


def permuted(seed: int, places: Array, count: int) -> Array:
    """(n,) int64: where places in [0, count) go in a permutation that the seed gives."""
    if count <= _FEW:  # on few bits rounds mix badly
        order: Array = np.argsort(hashed(seed, np.arange(count)), kind="stable")
        return order[places]
    bits = (count - 1).bit_length()
    keys = [mixed(_key(seed * _ROUNDS + number)) for number in range(_ROUNDS)]
    result = _feistel(keys, places.astype(np.uint64), bits)
    outside = np.flatnonzero(result >= np.uint64(count))
    while len(outside):
        again = _feistel(keys, result[outside], bits)
        result[outside] = again
        outside = outside[again >= np.uint64(count)]
    return result.astype(np.int64)


def _feistel(keys: list[Array], numbers: Array, bits: int) -> Array:
    """Permute the numbers of this number of bits; its two halves differ by one bit if that is odd."""
    low, high = np.uint64((bits + 1) // 2), np.uint64(bits // 2)
    left, right = numbers >> low, numbers & ((_ONE << low) - _ONE)
    for key in keys:
        left, right = right, left ^ (mixed(right ^ key) & ((_ONE << high) - _ONE))
        low, high = high, low
    result: Array = left << low | right
    return result


class Stretch:
    """Finds in which of many stretches, one behind the other, numbers lie, by a table of where to begin to look (the
    indexed search of Chen and Asau, 1974): a search by halves in many costs several times as much.
    """

    def __init__(self, ends: Array):
        """ends: (n,) int64, where each ends."""
        self._ends = ends
        self._first: Array | None = None  # of each 1 << shift numbers the stretch of the lowest, made when it is needed
        self._shift = 0

    def find(self, numbers: Array) -> Array:
        """(m,) int64: ``ends.searchsorted(numbers, side="right")``. numbers: each from 0 to below the last end."""
        ends = self._ends
        if self._first is None:
            total = int(ends[-1]) if len(ends) else 0
            self._shift = (total // (_BEGINS * len(ends) + 1)).bit_length()
            self._first = ends.searchsorted(np.arange(0, total + 1, 1 << self._shift), side="right")
        found: Array = self._first.take(numbers >> self._shift)
        behind = np.flatnonzero(ends.take(found) <= numbers)
        for _ in range(_BEGINS):
            found[behind] += 1
            behind = behind[ends.take(found.take(behind)) <= numbers.take(behind)]
        if len(behind):
            found[behind] = ends.searchsorted(numbers[behind], side="right")
        return found


class SumTree:
    """Non-negative weights of items, and their sums by twos, fours …

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
            raise InvalidOption("weights: pass finite numbers, 0 or more")
        self._levels[-1][items] = weights
        for upper, lower in zip(self._levels[-2::-1], self._levels[:0:-1]):
            items = np.unique(items >> 1)
            upper[items] = lower[2 * items] + lower[2 * items + 1]

    def find(self, fractions: Array) -> Array:
        """(n,) int64: the items at these parts, in [0, 1), of the total. Raises InvalidOption if all weights are 0."""
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
