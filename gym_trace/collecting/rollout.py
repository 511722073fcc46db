"""Running environments for whole episodes: the one loop of single environments, and that of vector environments."""

from __future__ import annotations

import math
import os
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from gym_trace.collecting.policies import RandomPolicy
from gym_trace.envs.autoreset import vector_mode
from gym_trace.envs.seeding import episode_seed, policy_seed
from gym_trace.errors import InvalidOption
from gym_trace.format.batch_reader import PART
from gym_trace.format.directory import RING
from gym_trace.model.returns import LaneReturns, LastReturns, Return, as_return
from gym_trace.model.values import Array
from gym_trace.ring.lanes.autoreset import after_step

LOOK_SECONDS = 0.2  # between calls of Rollout.look()
_DISK_SECONDS = 1.0

Begin = Callable[[Any, Any, Array, Any], tuple[list[int | None], Any]]


class Rollout(ABC):
    """Plays episodes and counts their steps and returns. Subclasses say which episodes, and are told of those that end.

    A policy here is called as policy(observation) and returns an action. Its reset(seed), if it has one, is called
    before each episode.

    Attributes:
        seed: the root seed, from which those of environment and policy are derived for each episode.
        over: set it, in any thread, and it ends after the step that it is at.
        steps: of all episodes so far; in the middle of an episode as they were at the last look().
        open_steps, open_episodes: those of the episodes that have not ended, as far as they were played.
        next_look: when look() is to be called, in seconds of time.monotonic().
    """

    def __init__(self, seed: int, most_steps: int = sys.maxsize):
        self.seed, self.most_steps = seed, most_steps
        self.over = False
        self.steps = self.open_steps = self.open_episodes = 0
        self.next_look = 0.0

    @abstractmethod
    def look(self) -> None:
        """Called between two steps when next_look is over, which this sets anew."""

    @abstractmethod
    def ended(self, episode: int, steps: int, total: Return) -> None:
        """Called when an episode was terminated or truncated."""

    def play(self, env: Any, policy: Any, episode: int) -> None:
        """An episode, or as much of it as there is time for. This loop is what bounds the speed of recording."""
        clock, step, most = time.monotonic, env.step, self.most_steps
        reset_policy = getattr(policy, "reset", None)
        if reset_policy is not None:
            reset_policy(policy_seed(self.seed, episode))
        observation, _ = env.reset(seed=episode_seed(self.seed, episode))
        before = taken = self.steps
        total: Any = 0.0
        try:
            while taken < most and not self.over:
                observation, reward, terminated, truncated, _ = step(policy(observation))
                taken += 1
                try:
                    total += reward
                except Exception:  # no number, and not several
                    total = math.nan
                if terminated or truncated:
                    self.ended(episode, taken - before, as_return(total))
                    before = taken
                    break
                if clock() >= self.next_look:
                    self.steps, self.open_steps = taken, taken - before
                    self.look()
        finally:
            self.steps, self.open_steps = taken, taken - before
        self.open_episodes = int(self.open_steps > 0)
        if not self.over and clock() >= self.next_look:
            self.look()

    def play_lanes(self, envs: Any, policy: Any, begin: Begin) -> None:
        """Episodes in all lanes of a vector environment, until it is over.

        begin: resets lanes. It is called with the environment, the policy, the lanes (boolean, one a lane) and the last
            observations of all lanes (None before the first reset), and returns the episode in each lane (None in those
            that do not count) and the observations of all lanes.
        """
        count, mode = envs.num_envs, vector_mode(envs)
        every, pending = np.ones(count, np.bool_), np.zeros(count, np.bool_)
        totals, lengths = LaneReturns(count), np.zeros(count, np.int64)
        to_reset, observations = every, None
        while True:
            if to_reset.any():
                episodes, observations = begin(envs, policy, to_reset, observations)
                wanted = np.array([episode is not None for episode in episodes])
                lengths[to_reset] = 0
            if self.over or self.steps >= self.most_steps:
                break
            observations, rewards, terminations, truncations, _ = envs.step(policy(observations))
            ended = terminations | truncations
            _, resets, open_, pending = after_step(mode, every, pending, ended)
            counted, to_reset = wanted & ~resets, ~(open_ | pending)
            totals.add(rewards, counted)
            lengths += counted
            self.steps += int(np.count_nonzero(counted))
            if (over := ended & ~resets).any():
                for lane, total in zip(np.flatnonzero(over).tolist(), totals.take(over)):
                    if (episode := episodes[lane]) is not None:
                        self.ended(episode, int(lengths[lane]), total)
                lengths[over] = 0
            if time.monotonic() >= self.next_look:
                self.open_steps = int(lengths.sum())
                self.look()
        self.open_steps, self.open_episodes = int(lengths.sum()), int(np.count_nonzero(~pending))


# -- recording in this process ----------------------------------------------------------------------------------------


@dataclass
class RolloutProgress:
    """How far record_episodes is.

    Attributes:
        seed: the root seed, from which those of the episodes are derived.
        episodes: complete ones: terminated or truncated.
        steps: all, also those of the episode that is open.
        open_steps: of the episodes that are open; in the end, of those that a limit cut short.
        open_episodes: how many those are.
        seconds: since the start.
        bytes: size of the trace's files, at most a second old; 0 if nothing is recorded. Steps that are in a ring and
            in no batch yet do not count.
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
    policy: Callable[[Any], Any] | None = None,
    episodes: int | None = None,
    steps: int | None = None,
    seconds: float | None = None,
    bytes: int | None = None,
    seed: int | None = None,
    on_progress: Callable[[RolloutProgress], Any] | None = None,
) -> RolloutProgress:
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
        bytes: end soon after env, or what it wraps, has written so many.
        seed: 0 or more; None takes one from the system's entropy.
        on_progress: called about five times a second with the progress so far, always the same object. A truthy result
            ends the run after the step it is at.

    Raises:
        InvalidOption: no limit is given, or one that makes no sense.
    """
    limits = {"episodes": episodes, "steps": steps, "seconds": seconds, "bytes": bytes}
    if all(limit is None for limit in limits.values()):
        raise InvalidOption("record_episodes needs a limit: pass episodes=, steps=, seconds= or bytes=")
    for name, limit in {**limits, "seed": seed}.items():
        if limit is not None and not limit >= 0:
            raise InvalidOption(f"{name}={limit!r}: pass 0 or more")
    if bytes is not None and _trace_directory(env) is None:
        raise InvalidOption(f"bytes={bytes!r}: nothing records this environment; wrap it in TraceRecordingWrapper")
    recording = _Recording(
        env,
        RolloutProgress(new_root_seed() if seed is None else seed),
        sys.maxsize if episodes is None else episodes,
        sys.maxsize if steps is None else steps,
        math.inf if seconds is None else seconds,
        sys.maxsize if bytes is None else bytes,
        on_progress,
    )
    return recording.run(RandomPolicy(None, env.action_space) if policy is None else policy)


def new_root_seed() -> int:
    """A seed from the system's entropy."""
    return secrets.randbits(31)


class _Recording(Rollout):
    """One run of record_episodes."""

    def __init__(
        self,
        env: Any,
        progress: RolloutProgress,
        most_episodes: int,
        most_steps: int,
        seconds: float,
        most_bytes: int,
        on_progress: Callable[[RolloutProgress], Any] | None,
    ):
        super().__init__(progress.seed, most_steps)
        self.over = most_episodes == 0
        self._env, self._progress, self._on_progress = env, progress, on_progress
        self._most_episodes, self._most_bytes = most_episodes, most_bytes
        self._directory = _trace_directory(env)
        self._returns = LastReturns()
        self._begin = time.monotonic()
        self._deadline = self._begin + seconds
        self._next_disk = 0.0
        self.next_look = min(self._begin + LOOK_SECONDS, self._deadline)

    def run(self, policy: Any) -> RolloutProgress:
        is_vector = isinstance(self._env, VectorEnv)
        while not self.over and self.steps < self.most_steps:
            if is_vector:
                self.play_lanes(self._env, policy, self._begin_lanes)
            else:
                self.play(self._env, policy, self._progress.episodes)
        self._measure(time.monotonic(), disk=True)
        return self._progress

    def ended(self, episode: int, steps: int, total: Return) -> None:
        self._progress.episodes += 1
        self._returns.add(total)
        self.over = self.over or self._progress.episodes >= self._most_episodes

    def _begin_lanes(self, envs: Any, policy: Any, lanes: Array, observations: Any) -> tuple[list[int | None], Any]:
        numbers: list[int | None] = list(range(len(lanes)))
        if observations is not None:
            return numbers, envs.reset(options={"reset_mask": lanes})[0]
        reset_policy = getattr(policy, "reset", None)
        if reset_policy is not None:
            reset_policy(policy_seed(self.seed, 0))
        if isinstance(envs.unwrapped, (SyncVectorEnv, AsyncVectorEnv)):
            return numbers, envs.reset(seed=[episode_seed(self.seed, lane) for lane in range(len(lanes))])[0]
        return numbers, envs.reset(seed=episode_seed(self.seed, 0))[0]  # others may take no more than one

    def look(self) -> None:
        """Reports, and finds out whether to end."""
        now = time.monotonic()
        self._measure(now, disk=now >= self._next_disk)
        if self._on_progress is not None and self._on_progress(self._progress):
            self.over = True
        self.over = self.over or now >= self._deadline or self._progress.bytes >= self._most_bytes
        self.next_look = min(time.monotonic() + LOOK_SECONDS, self._deadline)

    def _measure(self, now: float, disk: bool) -> None:
        progress, returns = self._progress, self._returns.summary()
        progress.steps, progress.open_steps, progress.open_episodes = self.steps, self.open_steps, self.open_episodes
        progress.seconds = now - self._begin
        if returns is not None:
            progress.mean_return, progress.min_return, progress.max_return = returns
        if disk and self._directory is not None:
            progress.bytes = directory_bytes(self._directory)
            self._next_disk = now + _DISK_SECONDS


def _trace_directory(env: Any) -> Path | None:
    """Where the recorder among the wrappers writes to."""
    while env is not env.unwrapped:
        directory = vars(env).get("directory")
        if isinstance(directory, Path) and type(env).__module__.startswith("gym_trace."):
            return directory
        env = env.env
    return None


def directory_bytes(directory: Path) -> int:
    """Sizes of the files in a trace's directory but for rings, which do not stay, while others may rename them."""
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith((RING, RING + PART)):
                continue
            try:
                total += entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                continue  # a batch that has just been sealed: counted under its new name, or a moment later
    return total
