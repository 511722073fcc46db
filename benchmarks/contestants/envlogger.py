"""EnvLogger with its riegeli backend, around a dm_env.Environment that wraps a Gymnasium environment."""

from __future__ import annotations

import os
from typing import Any

import dm_env
import envlogger
import gymnasium
import numpy as np
import workloads
from dm_env import specs
from envlogger import reader as envlogger_reader
from gymnasium import spaces

from contestants import Contestant, size_of


class AsDmEnv(dm_env.Environment):
    """Adapter from Gymnasium to dm_env. The unrecorded loop uses it, too."""

    def __init__(self, env: gymnasium.Env):
        self.gymnasium_env = env
        self.seed: int | None = 0

    def reset(self) -> dm_env.TimeStep:
        observation, _ = self.gymnasium_env.reset(seed=self.seed)
        self.seed = None
        return dm_env.restart(observation)

    def step(self, action: Any) -> dm_env.TimeStep:
        observation, reward, terminated, truncated, _ = self.gymnasium_env.step(action)
        if terminated:
            return dm_env.termination(reward=reward, observation=observation)
        if truncated:
            return dm_env.truncation(reward=reward, observation=observation)
        return dm_env.transition(reward=reward, observation=observation)

    def observation_spec(self) -> Any:
        return _spec(self.gymnasium_env.observation_space)

    def action_spec(self) -> Any:
        return _spec(self.gymnasium_env.action_space)

    def close(self) -> None:
        self.gymnasium_env.close()


def _spec(space: gymnasium.Space) -> Any:
    if isinstance(space, spaces.Dict):
        return {name: _spec(part) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return specs.DiscreteArray(int(space.n))
    if isinstance(space, spaces.Box):
        return specs.Array(space.shape, space.dtype)
    return specs.StringArray(())


class Entry(Contestant):
    packages = ("envlogger", "dm-env", "protobuf", "numpy", "gymnasium")
    note = "1.2 is the latest on PyPI; needs NumPy 1; runs a dm_env loop, with and without recording"

    def make(self, workload: workloads.Workload) -> AsDmEnv:
        return AsDmEnv(workload.make())

    def wrap(self, env: AsDmEnv, directory: str) -> envlogger.EnvLogger:
        return envlogger.EnvLogger(env, data_directory=directory)

    def actions(self, workload: workloads.Workload, env: AsDmEnv, steps: int) -> list[Any]:
        return workload.actions(env.gymnasium_env, steps)

    def start(self, env: Any) -> None:
        env.reset()

    def run(self, workload: workloads.Workload, env: Any, actions: Any) -> None:
        for action in actions:
            if env.step(action).last():
                env.reset()

    def open(self, directory: str) -> envlogger_reader.Reader:
        return envlogger_reader.Reader(data_directory=directory)

    def lengths(self, reader: envlogger_reader.Reader) -> np.ndarray:
        return np.array([len(episode) - 1 for episode in reader.episodes])

    def scan(self, reader: envlogger_reader.Reader) -> tuple[int, int]:
        steps = size = 0
        for episode in reader.episodes:
            observations, _, rewards = _stacked(list(episode))
            steps += len(rewards)
            size += size_of(observations)
        return steps, size

    def episode(self, reader: envlogger_reader.Reader, index: int) -> tuple[Any, Any, Any]:
        return _stacked(list(reader.episodes[index]))

    def window(self, reader: envlogger_reader.Reader, index: int, start: int, stop: int) -> Any:
        episode = reader.episodes[index]
        return _stacked([episode[i] for i in range(start, stop + 1)])

    def readable(self, directory: str) -> int:
        if not os.listdir(directory):
            return 0
        return int(sum(self.lengths(self.open(directory))))


def _stacked(steps: list[Any]) -> tuple[Any, Any, Any]:
    """Return arrays like other readers: each action led to the observation of its step; the first step has none."""
    seen = [step.timestep.observation for step in steps]
    observations = {key: np.stack([row[key] for row in seen]) for key in seen[0]} if isinstance(seen[0], dict) else None
    actions = np.array([step.action for step in steps[1:]])
    rewards = np.array([step.timestep.reward for step in steps[1:]])
    return np.stack(seen) if observations is None else observations, actions, rewards
