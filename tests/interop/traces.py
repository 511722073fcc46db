"""Traces of real environments, with seeded and unseeded resets, and episodes that are broken off."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from gym_trace import TraceRecordingWrapper, record_episodes

EXAMPLES = Path(__file__).parents[2] / "examples"


class Real(NamedTuple):
    """steps: how many are recorded. package: that has it. infos: whether infos are recorded."""

    name: str
    steps: int
    package: str | None = None
    options: dict[str, Any] = {}  # noqa: RUF012
    wrapper: Callable[[Any], Any] | None = None
    infos: bool = False


class Nested(gymnasium.ObservationWrapper[Any, Any, Any]):
    """CartPole with observations that are a dict of a dict and a tuple, with a picture and float64."""

    def __init__(self, env: Any):
        super().__init__(env)
        number = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.observation_space = spaces.Dict(
            {
                "cart": spaces.Dict({"position": number, "velocity": number}),
                "pole": spaces.Tuple((number, spaces.Box(-np.inf, np.inf, (), np.float64))),
                "side": spaces.Discrete(2),
                "camera": spaces.Box(0, 255, (12, 16, 3), np.uint8),
            }
        )

    def observation(self, observation: Any) -> Any:
        column = int(np.clip(observation[0] * 3 + 8, 0, 15))
        camera = np.zeros((12, 16, 3), np.uint8)
        camera[:, column] = [200, 100, 255 * abs(observation[2]) / 0.42]
        return {
            "cart": {"position": observation[:1], "velocity": observation[1:2]},
            "pole": (observation[2:3], np.float64(observation[3]) / 3),
            "side": np.int64(observation[0] > 0),
            "camera": camera,
        }


REAL = {
    "CartPole": Real("CartPole-v1", 220, infos=True),
    "Pendulum": Real("Pendulum-v1", 230, options={"max_episode_steps": 50}),
    "continuing": Real("Pendulum-v1", 120, options={"max_episode_steps": -1}),
    "HalfCheetah": Real("HalfCheetah-v5", 220, "mujoco", {"max_episode_steps": 60}, infos=True),
    "Taxi": Real("Taxi-v4", 450, infos=True),
    "Blackjack": Real("Blackjack-v1", 60),
    "MiniGrid": Real("MiniGrid-DoorKey-5x5-v0", 250, "minigrid", {"max_steps": 60}),
    "Pong": Real("ALE/Pong-v5", 160, "ale_py", {"max_episode_steps": 60}),
    "nested": Real("CartPole-v1", 150, wrapper=Nested),
}


def record_real(name: str, directory: Path) -> Path:
    """Records REAL[name] into the directory; skips the test where its package is not there."""
    real = REAL[name]
    if real.package is not None:
        gymnasium.register_envs(pytest.importorskip(real.package))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = gymnasium.make(real.name, **real.options)
        env = real.wrapper(env) if real.wrapper is not None else env
        recorder = TraceRecordingWrapper(env, directory, record_infos=real.infos)
        _run(recorder, real.steps)
    return directory


def _run(env: Any, steps: int) -> None:
    """Random actions. The first two episodes are seeded; one in the middle is broken off, and so is the last one."""
    env.action_space.seed(7)
    over, episodes = True, 0
    for step in range(steps):
        if over or step == steps // 2:
            env.reset(seed=episodes + 10 if episodes < 2 else None)
            episodes += 1
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        over = terminated or truncated
    env.close()


def recorded(name: str, episodes: int, directory: Path) -> Path:
    """Records whole episodes of an environment with random actions."""
    with TraceRecordingWrapper(gymnasium.make(name), directory) as env:
        record_episodes(env, episodes=episodes, seed=0)
    return directory


def run_example(name: str, *arguments: object, options: tuple[str, ...] = ("-W", "ignore")) -> str:
    """Return what examples/NAME.py prints in a process of its own. options: of Python."""
    command = [sys.executable, *options, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
