"""Episode seeds of a run, which identify its episodes; states of random generators."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import gymnasium
import numpy as np

from gym_trace.data.values import shown
from gym_trace.errors import EnvironmentUnavailable

EPISODES = 1 << 31  # limit of a run: some simulators accept seeds of at most 31 bits
_HALF = 0xFFFF
_CLASS_AND_ID = re.compile(r"<(\w+)<([\w:./-]+)>+$")  # at the end of <TimeLimit<CartPoleEnv<CartPole-v1>>>
_LARGEST_POSITIONS = {"pos": 624, "buffer_pos": 4}  # MT19937 and Philox


def episode_seed(root: int, episode: int) -> int:
    """Return the seed of episode 0, 1, 2 … of a run: a permutation of the 31-bit numbers."""
    return _walk(episode, _keys(root))


def episode_of(root: int, seed: int) -> int:
    """Return the episode with this seed: the inverse of episode_seed()."""
    return _walk(seed, _keys(root)[::-1], swap=True)


def worker_roots(root: int, worker: int, life: int, split: int) -> tuple[int, int]:
    """Return the roots of a training worker's episodes and of its generator of actions."""
    episodes, actions = np.random.SeedSequence(root, spawn_key=(worker, life, split)).generate_state(2).tolist()
    return episodes, actions


def policy_seed(root: int, episode: int) -> int:
    """Return the seed of a policy before an episode."""
    return int(np.random.SeedSequence(root, spawn_key=(episode,)).generate_state(1)[0] >> 1)


@lru_cache(maxsize=16)
def _keys(root: int) -> tuple[int, ...]:
    return tuple(np.random.SeedSequence(root).generate_state(6).tolist())


def _walk(number: int, keys: tuple[int, ...], swap: bool = False) -> int:
    """Apply a 32-bit Feistel network until the result has 31 bits (cycle walking; Black and Rogaway, 2002)."""
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


# -- generators of environments ---------------------------------------------------------------------------------------


def generator_state(env: gymnasium.Env[Any, Any]) -> dict[str, Any] | None:
    """Return the state of the random generator of an unwrapped environment; None if none is found.

    If the environment has not created its generator yet, this access creates it from the system's entropy, as the
    environment would do later.
    """
    try:
        state = env.np_random.bit_generator.state
    except Exception:  # user code may raise anything
        return None
    return state if isinstance(state, dict) else None


def has_own_generator(text: str) -> bool:
    """Return True if the str() of an environment names a registered class with Gymnasium's own np_random.

    Only loaded modules are searched for the class; nothing is imported.
    """
    found = _CLASS_AND_ID.search(text)
    spec = None if found is None else gymnasium.registry.get(found[2])
    entry: Any = None if spec is None else spec.entry_point
    if isinstance(entry, str):
        module, _, name = entry.partition(":")
        entry = getattr(sys.modules.get(module), name, None)
    is_same = found is not None and isinstance(entry, type) and entry.__name__ == found[1]
    return is_same and getattr(entry, "np_random", None) is gymnasium.Env.np_random


def restore_generator(env: gymnasium.Env[Any, Any], state: Mapping[str, Any]) -> None:
    """Restore a state from generator_state(). Raises EnvironmentUnavailable for another kind of generator."""
    kind = state.get("bit_generator") if isinstance(state, Mapping) else None
    try:
        _check_position(state)
        env.np_random.bit_generator.state = state
    except Exception as error:  # NumPy validates little
        reason = f"its random generator cannot be set to a state of {shown(kind)[:100]}: {error}"
        raise EnvironmentUnavailable(reason) from error


def _check_position(state: Mapping[str, Any]) -> None:
    """Raise ValueError for positions outside the buffers of MT19937 and Philox, which NumPy would read."""
    inner = state.get("state")
    if isinstance(inner, Mapping) and not 0 <= inner.get("pos", 0) <= _LARGEST_POSITIONS["pos"]:
        raise ValueError(f"pos is {inner['pos']}")
    if not 0 <= state.get("buffer_pos", 0) <= _LARGEST_POSITIONS["buffer_pos"]:
        raise ValueError(f"buffer_pos is {state['buffer_pos']}")
