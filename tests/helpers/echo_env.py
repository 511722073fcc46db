"""An environment that tells what it was asked for, and a look at whether what was recorded of it is true."""

import contextlib
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from gym_trace import check_trace, open_trace


class EchoEnv(gymnasium.Env[Any, Any]):
    """Observations tell the episode, how many steps it was asked for, and the last action. Asked for 9, it raises."""

    def __init__(self, length: int = 10**9, shape: tuple[int, ...] = (3,)):
        self.observation_space = spaces.Box(-1, 2**31, shape, np.int64)
        self.action_space = spaces.Discrete(10)
        self.length, self.episode, self.asked = length, -1, 0
        self.raises_after: set[int] = set()  # numbers of steps that are taken, but raise

    def _told(self, action: int) -> Any:
        observation = np.zeros(self.observation_space.shape or (), np.int64)
        observation.flat[:3] = self.episode, self.asked, action
        return observation

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.asked = self.episode + 1, 0
        return self._told(-1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.asked += 1
        if action == 9 or self.asked in self.raises_after:
            raise ValueError("no such action")
        told = self._told(int(action))
        return told, float(self.asked), self.asked >= self.length, False, {"asked": self.asked}


def try_steps(env: Any, *actions: int) -> None:
    for action in actions:
        with contextlib.suppress(ValueError):
            env.step(action)


def check_echoes(directory: Path, infos: bool = False) -> list[tuple[int, int, list[int]]]:
    """Asserts that all transitions are true, and returns (episode id, first step, actions) of each part."""
    parts = []
    for part in open_trace(directory):
        told = part.observations.reshape(len(part) + 1, -1)[:, :3]
        assert set(told[:, 0].tolist()) == {part.episode_id}
        assert told[:, 1].tolist() == list(range(part.first_step, part.first_step + len(part) + 1))
        assert told[1:, 2].tolist() == part.actions.tolist()
        assert part.rewards.tolist() == told[1:, 1].tolist()
        assert part.total_reward == sum(part.rewards)
        if infos and len(part):
            assert [info["asked"] for info in part.infos] == told[1:, 1].tolist()
        for step, note in enumerate(part.annotations.get("note", [])):
            assert note is None or note == told[step, 1]
        parts.append((part.episode_id, part.first_step, part.actions.tolist()))
    assert not check_trace(directory).damages
    return parts
