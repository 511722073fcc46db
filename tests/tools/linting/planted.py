"""Sound recordings of arrays, in which tests plant defects."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from gym_trace import TraceRecordingWrapper

STEPS, EPISODES = 60, 6


class Script:
    """The arrays of some episodes: random and sound until a test changes them."""

    def __init__(self, seed: int = 0, episodes: int = EPISODES, steps: int = STEPS):
        random = np.random.default_rng(seed)
        self.observation_space: Any = spaces.Box(-10, 10, (3,), np.float32)
        self.action_space: Any = spaces.Box(-1, 1, (2,), np.float32)
        self.observations: list[Any] = [
            random.uniform(-9, 9, (steps + 1, 3)).astype(np.float32) for _ in range(episodes)
        ]
        self.actions: list[Any] = [random.uniform(-0.9, 0.9, (steps, 2)).astype(np.float32) for _ in range(episodes)]
        self.rewards: list[Any] = [random.uniform(1, 3, steps) for _ in range(episodes)]
        self.infos: list[list[dict[str, Any]]] = [[{"speed": 1.0} for _ in range(steps)] for _ in range(episodes)]
        self.notes: list[Any] = [random.uniform(-1, 0, steps) for _ in range(episodes)]
        self.terminated = [True] * episodes
        self.cut = [False] * episodes
        self.seeds: list[int | None] = list(range(episodes))
        self.options: dict[str, Any] = {"split": "train"}
        self.max_episode_steps: int | None = None
        self.has_generator = True
        self.before_reset: Callable[[int], object] = lambda episode: None

    def images(self) -> None:
        """Observe images that differ in every step."""
        random = np.random.default_rng(3)
        self.observation_space = spaces.Box(0, 255, (40, 40, 3), np.uint8)
        self.observations = [
            random.integers(0, 255, (len(rows), 40, 40, 3), dtype=np.uint8) for rows in self.observations
        ]

    def shorten(self, episode: int, steps: int) -> None:
        self.observations[episode] = self.observations[episode][: steps + 1]
        for columns in (self.actions, self.rewards, self.infos, self.notes):
            columns[episode] = columns[episode][:steps]

    def record(self, directory: Path) -> Path:
        """Record all episodes; returns the directory."""
        env: Any = ArraysEnv(self)
        if self.max_episode_steps is not None:
            env = Old(gymnasium.wrappers.TimeLimit(env, self.max_episode_steps))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about values that do not match their space
            recorder = TraceRecordingWrapper(env, directory, record_infos=True, on_exist="append", **self.options)
            for episode, actions in enumerate(self.actions):
                self.before_reset(episode)
                recorder.reset(seed=self.seeds[episode])
                for step, action in enumerate(actions):
                    if self.notes[episode][step] is not None:
                        recorder.annotate(value=float(self.notes[episode][step]))
                    recorder.step(action)
            if self.cut[-1]:
                recorder.reset()
            recorder.close()
        return directory


class Old(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Says terminated at a time limit, as Gym did before 0.26."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or truncated, False, info


class ArraysEnv(gymnasium.Env[Any, Any]):
    """Plays the arrays of a script."""

    def __init__(self, script: Script):
        self.observation_space, self.action_space = script.observation_space, script.action_space
        self._script, self._episode = script, -1
        self.spec = gymnasium.envs.registration.EnvSpec("Arrays-v0", entry_point="planted:ArraysEnv")

    @property
    def np_random(self) -> Any:
        if not self._script.has_generator:
            raise AttributeError("no generator")
        return super().np_random

    @np_random.setter
    def np_random(self, value: Any) -> None:
        self._np_random = value

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._episode, self._step = self._episode + 1, 0
        script = self._script
        at = min(self._episode, len(script.observations) - 1)
        return script.observations[at][0], {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        script, i, k = self._script, self._episode, self._step
        self._step += 1
        is_last = self._step == len(script.actions[i]) and not script.cut[i]
        over = is_last and script.terminated[i], is_last and not script.terminated[i]
        return script.observations[i][self._step], float(script.rewards[i][k]), *over, script.infos[i][k]
