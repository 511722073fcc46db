"""Running an environment for whole episodes, each with a seed of its own."""

from __future__ import annotations

import os
import secrets
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from gym_trace.errors import InvalidOption
from gym_trace.wrappers import TraceRecordingWrapper

Policy = Callable[[Any], Any]

_LOOK_SECONDS = 0.2  # between reports of progress, and so between looks at whether to end
_DISK_SECONDS = 1.0
_RETURNS = 100


@dataclass
class Progress:
    """How far record_episodes is.

    Attributes:
        seed: the root seed, from which those of the episodes are derived.
        episodes: complete ones.
        steps: all, also those of the episode that is open.
        open_steps: of the episode that is open; in the end, of the one that a limit cut short.
        seconds: since the start.
        bytes: size of the trace's directory, at most a second old; 0 if nothing is recorded.
        mean_return, min_return, max_return: of the last 100 complete episodes; None before the first.
    """

    seed: int
    episodes: int = 0
    steps: int = 0
    open_steps: int = 0
    seconds: float = 0.0
    bytes: int = 0
    mean_return: float | None = None
    min_return: float | None = None
    max_return: float | None = None


def record_episodes(
    env: gymnasium.Env[Any, Any],
    *,
    policy: Policy | None = None,
    episodes: int | None = None,
    steps: int | None = None,
    seconds: float | None = None,
    seed: int | None = None,
    on_progress: Callable[[Progress], Any] | None = None,
) -> Progress:
    """Runs an environment, normally a TraceRecordingWrapper, until the first of the limits is met.

    Episode k is the same in every run with the same seed: the environment and the random policy are seeded anew for
    each one. The environment is not closed.

    Args:
        env: any single Gymnasium environment.
        policy: called as ``policy(observation)``, returns an action; its ``reset(seed)`` is called before each episode
            if it has one. None: random actions.
        episodes: complete episodes to run.
        steps, seconds: end after so many, also in the middle of an episode.
        seed: 0 or more; None takes one from the system's entropy.
        on_progress: called about five times a second with the Progress so far, the same object each time. A truthy
            result ends the run after the step it is at.

    Raises:
        InvalidOption: no limit is given, or one that makes no sense.
    """
    if episodes is None and steps is None and seconds is None:
        raise InvalidOption("record_episodes needs a limit: pass episodes=, steps= or seconds=")
    for name, limit in (("episodes", episodes), ("steps", steps), ("seconds", seconds), ("seed", seed)):
        if limit is not None and not limit >= 0:
            raise InvalidOption(f"{name}={limit!r}: pass 0 or more")
    progress = Progress(new_root_seed() if seed is None else seed)
    rollout = _Rollout(env, policy, progress, on_progress)
    rollout.run(
        sys.maxsize if episodes is None else episodes,
        sys.maxsize if steps is None else steps,
        float("inf") if seconds is None else seconds,
    )
    return progress


def new_root_seed() -> int:
    """A seed from the system's entropy."""
    return secrets.randbits(31)


def episode_seed(root: int, episode: int) -> int:
    """The seed that episode 0, 1, 2 … of a run is reset with."""
    return _seeds(root, episode)[0]


def _seeds(root: int, episode: int) -> tuple[int, int]:
    """Of the environment and of the policy. 31 bits, because some simulators take no more."""
    environment, policy = np.random.SeedSequence(root, spawn_key=(episode,)).generate_state(2) >> 1
    return int(environment), int(policy)


class _Rollout:
    """One run of record_episodes."""

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        policy: Policy | None,
        progress: Progress,
        on_progress: Callable[[Progress], Any] | None,
    ):
        self._env = env
        self._policy = _RandomPolicy(env.action_space) if policy is None else policy
        self._progress = progress
        self._on_progress = on_progress
        self._directory = _trace_directory(env)
        self._returns: deque[float] = deque(maxlen=_RETURNS)
        self._ended = False

    def run(self, episodes: int, steps: int, seconds: float) -> None:
        progress = self._progress
        self._begin = time.monotonic()
        self._deadline = self._begin + seconds
        self._next_look = min(self._begin + _LOOK_SECONDS, self._deadline)
        self._next_disk = 0.0
        while not self._ended and progress.episodes < episodes and progress.steps < steps:
            self._episode(steps)
            if not self._ended and time.monotonic() >= self._next_look:
                self._look()
        self._measure(time.monotonic(), disk=True)

    def _episode(self, steps: int) -> None:
        """An episode, or as much of it as the limits allow. This loop is what bounds the speed of recording."""
        progress, clock, step, policy = self._progress, time.monotonic, self._env.step, self._policy
        observation = self._reset()
        before = taken = progress.steps
        total, done = 0.0, False
        while taken < steps:
            observation, reward, terminated, truncated, _ = step(policy(observation))
            taken += 1
            total += reward  # type: ignore[operator]  # a number, if not by its type
            if terminated or truncated:
                done = True
                break
            if clock() >= self._next_look:
                progress.steps, progress.open_steps = taken, taken - before
                self._look()
                if self._ended:
                    break
        progress.steps, progress.open_steps = taken, 0 if done else taken - before
        if done:
            progress.episodes += 1
            self._returns.append(float(total))

    def _reset(self) -> Any:
        environment_seed, policy_seed = _seeds(self._progress.seed, self._progress.episodes)
        reset_policy = getattr(self._policy, "reset", None)
        if reset_policy is not None:
            reset_policy(policy_seed)
        observation, _ = self._env.reset(seed=environment_seed)
        return observation

    def _look(self) -> None:
        """Reports, and finds out whether to end."""
        now = time.monotonic()
        self._measure(now, disk=now >= self._next_disk)
        if now >= self._deadline or (self._on_progress is not None and self._on_progress(self._progress)):
            self._ended = True
        self._next_look = min(time.monotonic() + _LOOK_SECONDS, self._deadline)

    def _measure(self, now: float, disk: bool) -> None:
        progress, returns = self._progress, self._returns
        progress.seconds = now - self._begin
        if returns:
            progress.mean_return = statistics.fmean(returns)
            progress.min_return, progress.max_return = min(returns), max(returns)
        if disk and self._directory is not None:
            progress.bytes = directory_bytes(self._directory)
            self._next_disk = now + _DISK_SECONDS


class _RandomPolicy:
    """Actions drawn from the action space."""

    def __init__(self, action_space: gymnasium.Space[Any]):
        self.reset = action_space.seed
        self._sample = action_space.sample

    def __call__(self, observation: Any) -> Any:
        return self._sample()


def _trace_directory(env: gymnasium.Env[Any, Any]) -> Path | None:
    """Where the recorder among the wrappers writes to."""
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, TraceRecordingWrapper):
            return env.directory
        env = env.env
    return None


def directory_bytes(directory: Path) -> int:
    """Sizes of the files in a trace's directory, while others may rename them."""
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                total += entry.stat().st_size
            except FileNotFoundError:
                continue  # a batch that has just been sealed: counted under its new name, or a moment later
    return total
