"""Play and record episodes: one loop for single environments, one for vector environments."""

from __future__ import annotations

import math
import os
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from gym_trace.data.returns import LaneReturns, LastReturns, Return, as_return
from gym_trace.data.values import Array
from gym_trace.envs.autoreset import vector_mode
from gym_trace.envs.recipe import wrappers_around
from gym_trace.envs.seeding import episode_seed, policy_seed
from gym_trace.errors import InvalidOption, MissingExtra
from gym_trace.format.batch_reader import PART
from gym_trace.format.directory import RING
from gym_trace.format.facts import add_facts
from gym_trace.format.ring.lanes.autoreset import after_step
from gym_trace.recording.collecting.policies import Annotating, RandomPolicy, policy_maker
from gym_trace.recording.options import RecordingKeywords, demand_gymnasium, takes_recording_options
from gym_trace.recording.provenance import provenance_of, recorded_by
from gym_trace.recording.single.wrapper import TraceRecordingWrapper
from gym_trace.recording.video_schedules import Schedule
from gym_trace.storage.local import LocalStorage
from gym_trace.storage.remote.address import local_path

if TYPE_CHECKING:
    from typing_extensions import Unpack


LOOK_SECONDS = 0.2  # between calls of Rollout.look()
_DISK_SECONDS = 1.0  # between measurements of the trace's size

Begin = Callable[[Any, Any, Array, Any], tuple[list[int | None], Any]]


class Rollout(ABC):
    """Play episodes, and count their steps and returns. Subclasses choose the episodes, and count those that end.

    A policy is called as policy(observation) and returns an action. Its reset(seed), if any, is called before each
    episode.

    Attributes:
        seed: root seed; environment and policy seeds of each episode are derived from it.
        over: any thread may set it, to end after the current step.
        steps: number of steps so far; in the middle of an episode, as of the last look().
        open_steps, open_episodes: of episodes that have not ended.
        next_look: time of the next look(), in seconds of time.monotonic().
    """

    def __init__(self, seed: int, most_steps: int = sys.maxsize):
        self.seed, self.most_steps = seed, most_steps
        self.over = False
        self.steps = self.open_steps = self.open_episodes = 0
        self.next_look = 0.0

    @abstractmethod
    def look(self) -> None:
        """Report between two steps when next_look has passed, and set the next one."""

    @abstractmethod
    def ended(self, episode: int, steps: int, total: Return) -> None:
        """Count an episode that was terminated or truncated."""

    def start(self, env: Any, policy: Any, episode: int) -> Any:
        """Reset the policy and the environment for an episode; return the first observation."""
        reset_policy(policy, policy_seed(self.seed, episode))
        return env.reset(seed=episode_seed(self.seed, episode))[0]

    def play(self, env: Any, policy: Any, episode: int) -> None:
        """Play an episode until its end, a limit, or `over`. This loop bounds the throughput of recording."""
        clock, step, most = time.monotonic, env.step, self.most_steps
        observation = self.start(env, policy, episode)
        at_start = steps = self.steps
        total: Any = 0.0
        try:
            while steps < most and not self.over:
                observation, reward, terminated, truncated, _ = step(policy(observation))
                steps += 1
                try:
                    total += reward
                except Exception:  # not a number, nor an array of numbers
                    total = math.nan
                if terminated or truncated:
                    self.ended(episode, steps - at_start, as_return(total))
                    at_start = steps
                    break
                if clock() >= self.next_look:
                    self.steps, self.open_steps = steps, steps - at_start
                    self.look()
        finally:
            self.steps, self.open_steps = steps, steps - at_start
        self.open_episodes = int(self.open_steps > 0)
        if not self.over and clock() >= self.next_look:
            self.look()

    def play_lanes(self, envs: Any, policy: Any, begin: Begin) -> None:
        """Play episodes in all lanes of a vector environment until the run ends.

        begin: resets lanes. Called with the environment, the policy, the lanes (a boolean mask) and the last
            observations of all lanes (None before the first reset); returns the episode of each lane (None: not
            counted) and the observations of all lanes.
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
        self.open_steps, self.open_episodes = int(lengths.sum()), int(np.count_nonzero(wanted & ~pending))


# -- recording in this process ----------------------------------------------------------------------------------------


@dataclass
class RolloutProgress:
    """Progress of record_episodes.

    Attributes:
        seed: root seed; seeds of episodes are derived from it.
        episodes: number of complete episodes: terminated or truncated.
        steps: number of steps, including open episodes.
        open_steps, open_episodes: of open episodes; at the end, of those that a limit cut short.
        seconds: since the start.
        bytes: size of the trace's files, at most a second old, without steps in a ring; 0 if only lanes are recorded.
        mean_return, min_return, max_return: of the last 100 complete episodes; None before the first. Tuples with one
            value per objective if rewards are vectors.

    Examples:
        >>> with gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), "traces/progress") as env:
        ...     progress = gym_trace.record_episodes(env, episodes=3, seed=0)
        >>> progress.episodes, progress.mean_return
        (3, 11.333333333333334)
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
    """Run a recording wrapper until the first of the limits is met.

    Episode k of a single environment is the same in every run with the same seed: environment and random policy are
    seeded for each episode. Lanes of a vector environment are seeded once, and limits are checked after each step of
    all lanes. Lanes that are not recorded do not count. The environment is not closed.

    Args:
        env: a TraceRecordingWrapper or TraceRecordingVectorWrapper, also inside other wrappers; or a vector environment
            of such lanes in this process.
        policy: called as ``policy(observation)``, returns an action; for a vector environment, a batch of them. Its
            ``reset(seed)``, if any, is called before each episode, or once. None: random actions.
        episodes: number of complete episodes.
        steps, seconds: limits that also end the run in the middle of an episode.
        bytes: end soon after the recorder has written this many bytes.
        seed: 0 or more; None takes one from the system's entropy.
        on_progress: called about five times a second with the progress, always the same object. A truthy result ends
            the run after the current step.

    Raises:
        InvalidOption: no limit, or an invalid one; env is not recorded

    Examples:
        >>> with gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), "traces/new") as env:
        ...     progress = gym_trace.record_episodes(env, episodes=3, seed=0)
        >>> progress.episodes, progress.steps
        (3, 34)
    """
    limits = {"episodes": episodes, "steps": steps, "seconds": seconds, "bytes": bytes}
    if all(limit is None for limit in limits.values()):
        raise InvalidOption("record_episodes needs a limit: pass episodes=, steps=, seconds= or bytes=")
    for name, limit in {**limits, "seed": seed}.items():
        if limit is not None and not limit >= 0:
            raise InvalidOption(f"{name}={limit!r}: pass 0 or more")
    is_vector = isinstance(env, VectorEnv)
    if not is_vector:
        demand_gymnasium(env, gymnasium.Env, "an environment")
    recorder = _recorder_of(env)
    if recorder is None and not (is_vector and any(map(_recorder_of, getattr(env.unwrapped, "envs", ())))):
        kind = "TraceRecordingVectorWrapper" if is_vector else "TraceRecordingWrapper"
        raise InvalidOption(f"env: is not recorded; wrap it: {kind}(env, directory)")
    if bytes is not None and recorder is None:
        raise InvalidOption(f"bytes={bytes!r}: only the lanes are recorded; pass another limit")
    if bytes is not None and local_path(recorder._options.directory or "") is None:
        raise InvalidOption(f"bytes={bytes!r}: not supported for URLs; pass another limit")
    progress = RolloutProgress(new_root_seed() if seed is None else seed)
    most = {name: sys.maxsize if limit is None else limit for name, limit in limits.items()}
    policy = RandomPolicy(None, env.action_space) if policy is None else policy
    return _Recording(env, progress, most, on_progress).run(policy)


def reset_policy(policy: Any, seed: int) -> None:
    """Call policy.reset(seed), if the policy has this method."""
    reset = getattr(policy, "reset", None)
    if reset is not None:
        reset(seed)


def new_root_seed() -> int:
    """Return a seed from the system's entropy."""
    return secrets.randbits(31)


class _Recording(Rollout):
    def __init__(
        self,
        env: Any,
        progress: RolloutProgress,
        most: dict[str, Any],
        on_progress: Callable[[RolloutProgress], Any] | None,
    ):
        super().__init__(progress.seed, most["steps"])
        self.over = most["episodes"] == 0
        self._env, self._progress, self._most, self._on_progress = env, progress, most, on_progress
        self._directory, self._next_disk = getattr(_recorder_of(env), "directory", None), 0.0
        self._returns = LastReturns()
        self._started = time.monotonic()
        self._deadline = self._started + most["seconds"]
        self.next_look = min(self._started + LOOK_SECONDS, self._deadline)

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
        self.over = self.over or self._progress.episodes >= self._most["episodes"]

    def _begin_lanes(self, envs: Any, policy: Any, lanes: Array, observations: Any) -> tuple[list[int | None], Any]:
        recorded = set(getattr(_recorder_of(envs), "lanes", range(len(lanes))))
        numbers = [lane if lane in recorded else None for lane in range(len(lanes))]
        if observations is not None:
            return numbers, envs.reset(options={"reset_mask": lanes})[0]
        reset_policy(policy, policy_seed(self.seed, 0))
        if isinstance(envs.unwrapped, (SyncVectorEnv, AsyncVectorEnv)):
            return numbers, envs.reset(seed=[episode_seed(self.seed, lane) for lane in range(len(lanes))])[0]
        return numbers, envs.reset(seed=episode_seed(self.seed, 0))[0]  # other kinds may accept a single seed only

    def look(self) -> None:
        """Report progress, and end at a limit."""
        now = time.monotonic()
        self._measure(now, disk=now >= self._next_disk)
        if self._on_progress is not None and self._on_progress(self._progress):
            self.over = True
        self.over = self.over or now >= self._deadline or self._progress.bytes >= self._most["bytes"]
        self.next_look = min(time.monotonic() + LOOK_SECONDS, self._deadline)

    def _measure(self, now: float, disk: bool) -> None:
        progress, returns = self._progress, self._returns.summary()
        progress.steps, progress.open_steps, progress.open_episodes = self.steps, self.open_steps, self.open_episodes
        progress.seconds = now - self._started
        if returns is not None:
            progress.mean_return, progress.min_return, progress.max_return = returns
        if disk and self._directory is not None:
            progress.bytes = directory_bytes(self._directory)
            self._next_disk = now + _DISK_SECONDS


def _recorder_of(env: Any) -> Any:
    """Return the recorder among the wrappers, or None."""
    for wrapper in wrappers_around(env):
        if isinstance(vars(wrapper).get("directory"), Path) and type(wrapper).__module__.startswith("gym_trace."):
            return wrapper
    return None


def directory_bytes(directory: Path) -> int:
    """Return the bytes of a trace without its rings, which are temporary. Writers may rename files at the same time."""
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith((RING, RING + PART)):
                continue
            try:
                total += entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                continue  # just sealed: counted under its new name, or next time
    return total


@takes_recording_options
def record(
    env: gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any],
    policy: str | Callable[..., Any] | None = None,
    directory: str | os.PathLike[str] | None = None,
    *,
    episodes: int | None = None,
    steps: int | None = None,
    seconds: float | None = None,
    bytes: int | None = None,
    seed: int | None = None,
    states: int | None = None,
    lanes: int | slice | Sequence[int] | Sequence[bool] | Array | None = None,
    video: Schedule | str | bool | None = None,
    facts: Mapping[str, Any] | None = None,
    on_progress: Callable[[RolloutProgress], Any] | None = None,
    make_env: Any = None,
    command: str = "gym_trace.record",
    argv: bool = False,
    git_diff: bool = False,
    **options: Unpack[RecordingKeywords],
) -> RolloutProgress:
    """Record episodes of an environment in this process, and close it.

    Wraps env in a recorder and calls record_episodes(). gym_trace.collect uses several processes.

    Args:
        env: a Gymnasium environment, or a vector environment.
        policy: None or "random", "sb3:PATH", "onnx:PATH", "run:DIR", a function of the observation, or a class.
        directory … keep_if: see RecordingOptions.
        episodes, steps, seconds, bytes, seed: see record_episodes(). metadata also gets "seed".
        states, video: see TraceRecordingWrapper. lanes: see TraceRecordingVectorWrapper.
        facts: metadata of the trace (see Trace.facts), added to existing facts.
        on_progress: see record_episodes().
        make_env: function that made env, stored so that verify_trace() can call it.
        command: name of the caller, stored under provenance with the name of the policy.
        argv: store the full command line. git_diff: store the uncommitted changes of the current git repository.
            Both may contain secrets.

    Raises:
        InvalidOption, TraceExists

    Examples:
        >>> done = gym_trace.record(gymnasium.make("CartPole-v1"), "random", "traces/random", episodes=3, seed=0)
        >>> done.episodes, done.steps
        (3, 34)
    """
    if not isinstance(env, VectorEnv):
        demand_gymnasium(env, gymnasium.Env, "an environment")
    recorder: Any = env
    with ExitStack() as stack:
        stack.callback(lambda: recorder.close())
        maker = policy_maker(policy)  # first, because a failure must leave no directory
        actor = None if policy in (None, "random") else maker(env.observation_space, env.action_space)
        seed = new_root_seed() if seed is None else seed
        options["metadata"] = {**metadata_by_name(options.get("metadata")), "seed": seed}
        own_options = {"states": states, "lanes": lanes, "video": video}
        passed = {name: value for name, value in own_options.items() if value is not None}
        with recorded_by(provenance_of(command, maker.name, argv, git_diff, make_env)):
            recorder = _wrapper_of(env)(env, directory, **passed, **options)
        if facts:
            add_facts(LocalStorage(recorder.directory), dict(facts))
        acting = None if actor is None else Annotating(actor, recorder)
        return record_episodes(
            recorder,
            policy=acting,
            episodes=episodes,
            steps=steps,
            seconds=seconds,
            bytes=bytes,
            seed=seed,
            on_progress=on_progress,
        )


def _wrapper_of(env: Any) -> Any:
    if not isinstance(env, VectorEnv):
        return TraceRecordingWrapper
    if not hasattr(gymnasium.vector, "AutoresetMode"):
        raise MissingExtra("recording a vector environment needs gymnasium 1.1 or newer: pip install -U gymnasium")
    from gym_trace.recording.vector.wrapper import TraceRecordingVectorWrapper

    return TraceRecordingVectorWrapper


def metadata_by_name(metadata: Any) -> dict[str, Any]:
    """Return the user's metadata as a dict without "seed" and "run"; other values under "given"."""
    if metadata is None:
        return {}
    is_plain = isinstance(metadata, dict) and not {"seed", "run"} & set(metadata)
    return metadata if is_plain else {"given": metadata}
