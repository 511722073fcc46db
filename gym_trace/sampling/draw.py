"""Which of n things comes at which place: by arithmetic, so that there is no list and any place can be asked for.

Numbers are made of the seed and the place alone (the finalizer of SplitMix64: Steele, Lea and Flood, 2014). An order
without repetition is a permutation by a Feistel network (Luby and Rackoff, 1988) on the next power of four, walked
until it is in range.
"""

from __future__ import annotations

import numpy as np

from gym_trace.model.values import Array

_GOLDEN, _FIRST, _SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_ROUNDS = 4


def hashed(seed: int, places: Array) -> Array:
    """(n,) uint64: a number each that looks drawn, the same for the same seed and place."""
    with np.errstate(over="ignore"):
        mixed = _mixed(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64) + _GOLDEN) ^ places.astype(np.uint64)
        return _mixed(mixed * _GOLDEN)


def _mixed(numbers: Array) -> Array:
    with np.errstate(over="ignore"):
        numbers = (numbers ^ (numbers >> np.uint64(30))) * _FIRST
        numbers = (numbers ^ (numbers >> np.uint64(27))) * _SECOND
        result: Array = numbers ^ (numbers >> np.uint64(31))
        return result


def uniform(seed: int, places: Array) -> Array:
    """(n,) float64 in [0, 1)."""
    return (hashed(seed, places) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def drawn(seed: int, places: Array, count: int) -> Array:
    """(n,) int64 in [0, count), each drawn by itself."""
    result: Array = (uniform(seed, places) * count).astype(np.int64)
    return np.minimum(result, count - 1)


def permuted(seed: int, places: Array, count: int) -> Array:
    """(n,) int64: where places in [0, count) go in a permutation that the seed gives."""
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    result = places.astype(np.uint64)
    outside = np.ones(len(result), np.bool_)
    while outside.any():
        result[outside] = _feistel(seed, result[outside], np.uint64(half))
        outside = result >= np.uint64(count)
    return result.astype(np.int64)


def _feistel(seed: int, numbers: Array, half: np.uint64) -> Array:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = numbers >> half, numbers & mask
    for number in range(_ROUNDS):
        left, right = right, left ^ (hashed(seed * _ROUNDS + number, right) & mask)
    result: Array = left << half | right
    return result
