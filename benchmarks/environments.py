"""Synthetic environments: pure noise, and very short episodes."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces, vector


class SampledFrames(gymnasium.Env):
    """Random frames of 84 x 84 x 4 bytes, sampled from its space."""

    observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = spaces.Discrete(4)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, ...]:
        return self.observation_space.sample(), 0.0, False, False, {}


class NoiseEnvs(vector.VectorEnv):
    """Lanes of random frames of 84 x 84 x 4 bytes, generated faster than a disk can write."""

    def __init__(self, count: int):
        self.num_envs = count
        self.single_observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)
        self.single_action_space = spaces.Discrete(4)
        self.observation_space = spaces.Box(0, 255, (count, 84, 84, 4), np.uint8)
        self.action_space = spaces.MultiDiscrete([4] * count)
        self.random = np.random.default_rng(0)

    def observation(self) -> np.ndarray:
        return self.random.integers(0, 256, (self.num_envs, 84, 84, 4), np.uint8)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        return self.observation(), {}

    def step(self, actions: Any) -> tuple[Any, ...]:
        no = np.zeros(self.num_envs, np.bool_)
        return self.observation(), np.zeros(self.num_envs), no, no.copy(), {}


class BlinkEnv(gymnasium.Env):
    """Episodes of one and two steps in turn, with almost no computation."""

    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.rows = list(np.random.default_rng(0).random((1009, 4), np.float32))
        self.count = self.length = self.left = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.length = self.left = 2 if self.length == 1 else 1
        self.count += 1
        return self.rows[self.count % 1009], {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        self.count += 1
        return self.rows[self.count % 1009], 1.0, self.left == 0, False, {}
