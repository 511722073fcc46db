"""Environments of workers in tests of collect(). The module imports little, because every worker imports it."""

import os
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from gym_trace.envs.seeding import episode_of, episode_seed


class FailingEnv(gymnasium.Env[Any, Any]):
    """Hangs in resets, and raises in steps, the first time that an episode comes to it; folder: for its notes."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, folder: str, hangs: tuple[int, ...] = (), raises: int = 0, always: int = -1):
        self.folder, self.hangs, self.raises, self.always = Path(folder), hangs, raises, always

    def _first_time(self, what: str) -> bool:
        try:
            (self.folder / what).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        assert seed is not None
        self.episode, self.left = episode_of(1, seed), int(self.np_random.integers(3, 30))
        if self.episode in self.hangs and self._first_time(f"hung{self.episode}"):
            time.sleep(1000)
        return self.np_random.random(2), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        trouble = self.raises and self.episode % self.raises == 1 and self._first_time(f"raised{self.episode}")
        if trouble or self.episode == self.always:
            raise RuntimeError(f"episode {self.episode} is out of luck")
        return self.np_random.random(2), float(action), self.left == 0, False, {}


class DyingEnv(gymnasium.Env[Any, Any]):
    """Its process dies in one episode, in any worker."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left, self.dies = 5, seed == episode_seed(1, 7)
        return self.np_random.random(2), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        if self.dies and self.left == 2:
            os._exit(9)
        return self.np_random.random(2), 0.0, self.left == 0, False, {}


def act_on_observation(observation: Any) -> tuple[int, dict[str, Any]]:
    return int(observation[0] * 3) % 3, {"value": float(observation[1])}


class SeededPolicy:
    def __init__(self, observation_space: Any, action_space: Any):
        self.space = action_space

    def reset(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def act(self, observation: Any) -> int:
        return int(self.random.integers(self.space.n))
