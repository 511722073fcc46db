"""Running an environment for whole episodes, each with a seed of its own."""

from __future__ import annotations

import math
import os
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from gym_trace.envs.identity import autoreset_mode
from gym_trace.envs.seeding import episode_seed, policy_seed
from gym_trace.errors import InvalidOption
from gym_trace.model.returns import LaneReturns, LastReturns, Return, as_return
from gym_trace.recording.vector.events import DISABLED, NEXT_STEP

Policy = Callable[[Any], Any]

_LOOK_SECONDS = 0.2  # between reports of progress, and so between looks at whether to end
_DISK_SECONDS = 1.0


@dataclass
class Progress:
    """How far record_episodes is.

    Attributes:
        seed: the root seed, from which those of the episodes are derived.
        episodes: complete ones: terminated or truncated.
        steps: all, also those of the episode that is open.
        open_steps: of the episodes that are open; in the end, of those that a limit cut short.
        open_episodes: how many those are.
        seconds: since the start.
        bytes: size of the trace's directory, at most a second old; 0 if nothing is recorded.
        mean_return, min_return, max_return: of the last 100 complete episodes; None before the first. Of rewards
            that are several numbers (objectives) tuples, with one for each.
    """

    seed: int
    episodes: int = 0
    steps: int = 0
    open_steps: int = 0
    open_episodes: int = 0
    seconds: float = 0.0
    bytes: int = 0
    mean_return: Return | None = None
    min_return: Return | None = None
    max_return: Return | None = None


def record_episodes(
    env: gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any],
    *,
    policy: Policy | None = None,
    episodes: int | None = None,
    steps: int | None = None,
    seconds: float | None = None,
    seed: int | None = None,
    on_progress: Callable[[Progress], Any] | None = None,
) -> Progress:
    """Runs an environment, normally a recording wrapper, until the first of the limits is met.

    Episode k of a single environment is the same in every run with the same seed: the environment and the random policy
    are seeded anew for each one. Of a vector environment the lanes are seeded once, and limits are looked at after each
    step of all lanes. The environment is not closed.

    Args:
        env: any single or vector Gymnasium environment.
        policy: called as ``policy(observation)``, returns an action, of a vector environment a batch of them; its
            ``reset(seed)`` is called before each episode, or once, if it has one. None: random actions.
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
    kind = _VectorRollout if isinstance(env, VectorEnv) else _Rollout
    rollout = kind(env, policy, progress, on_progress)
    rollout.run(
        sys.maxsize if episodes is None else episodes,
        sys.maxsize if steps is None else steps,
        float("inf") if seconds is None else seconds,
    )
    return progress


def new_root_seed() -> int:
    """A seed from the system's entropy."""
    return secrets.randbits(31)


class _Rollout:
    """One run of record_episodes."""

    def __init__(
        self,
        env: Any,
        policy: Policy | None,
        progress: Progress,
        on_progress: Callable[[Progress], Any] | None,
    ):
        self._env = env
        self._policy = _RandomPolicy(env.action_space) if policy is None else policy
        self._progress = progress
        self._on_progress = on_progress
        self._directory = _trace_directory(env)
        self._returns = LastReturns()
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
        total: Any = 0.0
        done = False
        while taken < steps:
            observation, reward, terminated, truncated, _ = step(policy(observation))
            taken += 1
            try:
                total += reward
            except Exception:  # no number, and not several
                total = math.nan
            if terminated or truncated:
                done = True
                break
            if clock() >= self._next_look:
                progress.steps, progress.open_steps = taken, taken - before
                self._look()
                if self._ended:
                    break
        progress.steps, progress.open_steps = taken, 0 if done else taken - before
        progress.open_episodes = int(progress.open_steps > 0)
        if done:
            progress.episodes += 1
            self._returns.add(as_return(total))

    def _reset(self) -> Any:
        root, episode = self._progress.seed, self._progress.episodes
        reset_policy = getattr(self._policy, "reset", None)
        if reset_policy is not None:
            reset_policy(policy_seed(root, episode))
        observation, _ = self._env.reset(seed=episode_seed(root, episode))
        return observation

    def _look(self) -> None:
        """Reports, and finds out whether to end."""
        now = time.monotonic()
        self._measure(now, disk=now >= self._next_disk)
        if now >= self._deadline or (self._on_progress is not None and self._on_progress(self._progress)):
            self._ended = True
        self._next_look = min(time.monotonic() + _LOOK_SECONDS, self._deadline)

    def _measure(self, now: float, disk: bool) -> None:
        progress, returns = self._progress, self._returns.summary()
        progress.seconds = now - self._begin
        if returns is not None:
            progress.mean_return, progress.min_return, progress.max_return = returns
        if disk and self._directory is not None:
            progress.bytes = directory_bytes(self._directory)
            self._next_disk = now + _DISK_SECONDS


class _VectorRollout(_Rollout):
    """The same of a vector environment."""

    def run(self, episodes: int, steps: int, seconds: float) -> None:
        self._most_episodes = episodes
        super().run(episodes, steps, seconds)

    def _episode(self, steps: int) -> None:
        """All episodes, until a limit is met."""
        env, policy, progress = self._env, self._policy, self._progress
        mode = autoreset_mode(env)
        observations = self._reset()
        pending = np.zeros(env.num_envs, np.bool_)  # lanes that are reset instead of stepped
        totals, lengths = LaneReturns(env.num_envs), np.zeros(env.num_envs, np.int64)
        while not self._ended and progress.steps < steps and progress.episodes < self._most_episodes:
            observations, rewards, terminations, truncations, _ = env.step(policy(observations))
            totals.add(rewards, ~pending)
            lengths += ~pending
            over = (terminations | truncations) & ~pending
            progress.steps += int(np.count_nonzero(~pending))
            if over.any():
                progress.episodes += int(np.count_nonzero(over))
                for total in totals.take(over):
                    self._returns.add(total)
                lengths[over] = 0
                if mode == DISABLED:
                    observations, _ = env.reset(options={"reset_mask": over})
            pending = over & (mode == NEXT_STEP)
            if time.monotonic() >= self._next_look:
                self._look()
        progress.open_steps = int(lengths.sum())
        progress.open_episodes = int(np.count_nonzero(~pending))
        self._ended = True

    def _reset(self) -> Any:
        reset_policy = getattr(self._policy, "reset", None)
        if reset_policy is not None:
            reset_policy(policy_seed(self._progress.seed, 0))
        root, count = self._progress.seed, self._env.num_envs
        if isinstance(self._env.unwrapped, (SyncVectorEnv, AsyncVectorEnv)):
            return self._env.reset(seed=[episode_seed(root, lane) for lane in range(count)])[0]
        return self._env.reset(seed=episode_seed(root, 0))[0]  # others may take no more than one


class _RandomPolicy:
    """Actions drawn from the action space."""

    def __init__(self, action_space: gymnasium.Space[Any]):
        self.reset = action_space.seed
        self._sample = action_space.sample

    def __call__(self, observation: Any) -> Any:
        return self._sample()


def _trace_directory(env: Any) -> Path | None:
    """Where the recorder among the wrappers writes to."""
    while env is not env.unwrapped:
        directory = vars(env).get("directory")
        if isinstance(directory, Path) and type(env).__module__.startswith("gym_trace."):
            return directory
        env = env.env
    return None


def directory_bytes(directory: Path) -> int:
    """Sizes of the files in a trace's directory, while others may rename them."""
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                total += entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                continue  # a batch that has just been sealed: counted under its new name, or a moment later
    return total
