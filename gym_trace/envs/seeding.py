"""The seeds of the episodes of a run: every one another, and such that the seed tells which episode it is."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

EPISODES = 1 << 31  # that a run can have; some simulators take seeds of no more than 31 bits
_HALF = 0xFFFF


def episode_seed(root: int, episode: int) -> int:
    """The seed that episode 0, 1, 2 … of a run is reset with: a permutation of the numbers of 31 bits."""
    return _walk(episode, _keys(root))


def episode_of(root: int, seed: int) -> int:
    """The episode that has this seed."""
    return _walk(seed, _keys(root)[::-1], swap=True)


def policy_seed(root: int, episode: int) -> int:
    """What a policy is seeded with before the episode."""
    return int(np.random.SeedSequence(root, spawn_key=(episode,)).generate_state(1)[0] >> 1)


@lru_cache(maxsize=16)
def _keys(root: int) -> tuple[int, ...]:
    return tuple(np.random.SeedSequence(root).generate_state(6).tolist())


def _walk(number: int, keys: tuple[int, ...], swap: bool = False) -> int:
    """A Feistel network on 32 bits, gone through until it comes to a number of 31 bits (Black and Rogaway, 2002)."""
    while True:
        left, right = number >> 16, number & _HALF
        if swap:
            left, right = right, left
        for key in keys:
            left, right = right, left ^ _mixed(right, key)
        if swap:
            left, right = right, left
        number = left << 16 | right
        if number < EPISODES:
            return number


def _mixed(half: int, key: int) -> int:
    mixed = (half + key) * 0x9E3779B1 & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 15) * 0x85EBCA6B & 0xFFFFFFFF
    return (mixed ^ mixed >> 13) & _HALF
