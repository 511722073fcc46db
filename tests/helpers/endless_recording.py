"""A recording for tests to kill: a run that depends only on its own steps, and reports its progress.

python victim.py cartpole|frames DIRECTORY PROGRESS FLUSH_SECONDS
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from scripted_env import Result, ToyEnv

from gym_trace import TraceRecordingWrapper

MAX_STEPS = 1 << 20  # capacity of the progress file


class FramesEnv(ToyEnv):
    """Noise of (64, 64, 3) bytes, in a buffer that is used again for each frame; 50 steps an episode."""

    observation_space = spaces.Box(0, 255, (64, 64, 3), np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self, seconds_per_step: float):
        self._seconds = seconds_per_step
        self._buffer = np.zeros((64, 64, 3), np.uint8)

    def result(self, action: Any) -> Result:
        if action is None:
            self._noise = self.np_random.integers(0, 256, self._buffer.shape, np.uint8)
            self._buffer[:] = self._noise
        else:
            time.sleep(self._seconds)
            np.add(self._noise, np.uint8(self.t * (action + 1)), out=self._buffer)
        return Result(self._buffer, float(self.t), self.t == 50)


def make(kind: str, seconds_a_step: float = 0.0) -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1") if kind == "cartpole" else FramesEnv(seconds_a_step)


def play(env: gymnasium.Env[Any, Any]) -> Iterator[tuple[Any, ...]]:
    """Steps without end. Yields (reset observation,) at each reset and (action, *what step returned) at each step."""
    chance = np.random.default_rng(1)
    episode = 0
    while True:
        yield (env.reset(seed=episode)[0],)
        episode += 1
        over = False
        while not over:
            action = int(chance.integers(2))
            told = env.step(action)
            over = told[2] or told[3]
            yield action, *told


def main(kind: str, directory: str, progress: str, flush_seconds: str) -> None:
    times = np.memmap(progress, np.int64, "r+", shape=(MAX_STEPS + 1,))  # how many steps, then when each was done
    env = TraceRecordingWrapper(make(kind, 2e-4), directory, uid="w", flush_seconds=float(flush_seconds))
    for step in play(env):
        if len(step) == 1:
            continue
        steps = int(times[0]) + 1
        times[steps] = time.monotonic_ns()
        times[0] = steps


def new_progress(path: Path) -> Any:
    return np.memmap(path, np.int64, "w+", shape=(MAX_STEPS + 1,))


if __name__ == "__main__":
    main(*sys.argv[1:])
