"""gym_trace.branch: record new episodes that branch from a step of a recorded one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from gym_trace.data.episode import Episode
from gym_trace.data.returns import Return, as_return
from gym_trace.data.values import Array, row_of
from gym_trace.envs.autoreset import without_autoreset
from gym_trace.envs.seeding import episode_seed, generator_state, policy_seed
from gym_trace.errors import EnvironmentUnavailable, InvalidOption, ReplayDiverged, TraceError, warn
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.trace import Trace, TraceLike, as_trace
from gym_trace.recording.collecting.policies import Annotating, policy_maker
from gym_trace.recording.collecting.rollout import LOOK_SECONDS, Rollout, new_root_seed, reset_policy
from gym_trace.recording.provenance import provenance_of, recorded_by
from gym_trace.recording.publishing.spool import destination_of
from gym_trace.recording.single.wrapper import TraceRecordingWrapper
from gym_trace.storage.opening import path_of
from gym_trace.tools.playing.continued import Continued
from gym_trace.tools.replay.env_at import differs_later
from gym_trace.tools.replay.making import Making, Played, made_env, replays
from gym_trace.tools.replay.resimulate import AUTO, DIFFERS, STATES, MakeEnv, Verdict, states_in

_BOOTSTRAP_RESAMPLES = 10_000
Repeat = Callable[[Any], Any]  # repeats the recorded steps in a recorder; returns the observation after them
_SAMPLED_AT_ONCE = 100_000  # episodes


@dataclass(frozen=True, eq=False)
class Branched:
    """New episodes from a recorded step on. Returns and lengths count from that step.

    Attributes:
        directory: directory or URL of the new trace.
        seed: root seed of the policy, and, if reseeded, of the environment.
        reseeded: True if the environment's generator was seeded at the step.
        drew: True if the environment used that generator afterwards; None if not reseeded.
        returns: (episodes,) float64, or (episodes, objectives) if rewards are vectors.
        lengths: (episodes,) int64, steps.
        recorded_return, recorded_length: return and length of the recorded episode.
        recorded_outcome: how the recorded episode ended, such as "terminated".

    Examples:
        >>> branched = gym_trace.branch("traces/cartpole", 8, 40, "random", "traces/branch", episodes=4, seed=0)
        >>> branched.min <= branched.mean <= branched.max
        True
    """

    directory: Path
    seed: int
    reseeded: bool
    drew: bool | None
    returns: Array = field(repr=False)
    lengths: Array = field(repr=False)
    recorded_return: Return
    recorded_length: int
    recorded_outcome: str

    @property
    def mean(self) -> Return | None:
        """Mean return; a tuple if rewards are vectors. None without episodes."""
        return as_return(self.returns.mean(axis=0)) if len(self.returns) else None

    @property
    def min(self) -> Return | None:
        """Smallest return, of each objective; None without episodes."""
        return as_return(self.returns.min(axis=0)) if len(self.returns) else None

    @property
    def max(self) -> Return | None:
        """Largest return, of each objective; None without episodes."""
        return as_return(self.returns.max(axis=0)) if len(self.returns) else None

    def interval(self, level: float = 0.95) -> tuple[Return, Return] | None:
        """Return a confidence interval of the mean return; None for fewer than two episodes.

        It is the percentile bootstrap of the mean (Efron, 1979) with 10,000 resamples; the same for the same seed.

        Examples:
            >>> branched = gym_trace.branch("traces/cartpole", 8, 40, "random", "traces/interval", episodes=4, seed=0)
            >>> low, high = branched.interval(0.9)
            >>> low <= branched.mean <= high
            True
        """
        count = len(self.returns)
        if count < 2:
            return None
        random = np.random.default_rng(self.seed)
        at_once = max(1, _SAMPLED_AT_ONCE // count)
        sizes = [(min(at_once, _BOOTSTRAP_RESAMPLES - done), count) for done in range(0, _BOOTSTRAP_RESAMPLES, at_once)]
        means = np.concatenate([self.returns[random.integers(count, size=size)].mean(axis=1) for size in sizes])
        low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=0)
        return as_return(low), as_return(high)


def branch(
    trace: TraceLike,
    episode: int,
    step: int,
    policy: str | Callable[..., Any] | None = None,
    directory: str | os.PathLike[str] | None = None,
    *,
    episodes: int = 20,
    seed: int | None = None,
    prefix: bool = True,
    make_env: MakeEnv | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    trust: bool = False,
    atol: float = 0.0,
    rtol: float = 0.0,
    tolerances: Mapping[str, float] | None = None,
    ignore: Collection[str] = (),
    start: str = AUTO,
    on_progress: Callable[[int, int], Any] | None = None,
    command: str = "gym_trace.branch",
    **recording: Any,
) -> Branched:
    """Record new episodes that repeat the first steps of a recorded one, and continue with another policy.

    Each new episode is reset and stepped as recorded, and compared, by default bit for bit; then the policy takes over.
    All of it is recorded, so verify_trace() verifies the new episodes from their reset. Episode.prefix is the number of
    repeated steps. The new trace stores the writer, episode and step that it branched from.

    With a seed, the environment's random generator is seeded at the step, for each episode differently: the mean return
    is then a Monte Carlo estimate of the value of the step. Replays repeat this seeding. Without a seed, the generator
    continues from its recorded state, and episodes differ only if the policy does.

    The policy is reset at the step, and does not see the steps before.

    If the repeated steps differ, as in simulators that are not deterministic, and the trace has states (see
    TraceRecordingWrapper, states=), the new episodes take these steps from the recording, and go on from an environment
    that env_at() sets to its state at the step. A warning says so. Such episodes cannot be verified from their reset.

    Args:
        trace: a trace, a view of one, or the directory.
        episode: index in the trace; negative ones count from its end. It must be replayable by itself.
        step: the first step of the policy; 0 is after the reset.
        policy: see gym_trace.record(). None: random actions.
        directory: directory of the new trace; None: a new temporary directory.
        episodes: number of episodes; each is played to its end.
        seed: root seed, 0 or more: continuation k is the same in every run. None: the policy gets one from the system's
            entropy, the environment is not reseeded.
        prefix: False: do not record the repeated steps. The new episodes then begin at the step; they cannot be
            verified.
        make_env, env_kwargs, trust: as for verify_trace().
        atol, rtol, tolerances, ignore: settings of the comparison, as for verify_trace().
        start: "auto"; "replay": never from states; "states": always.
        on_progress: called about five times a second as ``on_progress(episodes, steps)``; a truthy result ends the run.
        command: name of the caller, stored under provenance.
        recording: other arguments of TraceRecordingWrapper, except filters. record_infos: as in the recorded trace.

    Raises:
        ReplayDiverged: a repeated step differs; names the first difference. A later one is a warning.
        EnvironmentUnavailable: the environment cannot be made here, replayed or reseeded; says why.
        InvalidOption: an option is invalid, or the episode has no such step or ends before it.
        IndexError: no such episode.
        TraceNotFound, TraceExists, CorruptTrace

    Examples:
        >>> branched = gym_trace.branch("traces/cartpole", 8, 40, "random", "traces/branched", episodes=5, seed=0)
        >>> len(branched.returns), branched.recorded_return
        (5, 18.0)
        >>> gym_trace.open_trace("traces/branched")[0].prefix
        40
    """
    trace = as_trace(trace)
    index = range(len(trace))[episode]
    recorded = trace[index]
    _check(recorded, step, episodes, seed, recording)
    settings: dict[str, Any] = {"trust": trust, "env_kwargs": env_kwargs, "make_env": make_env, "start": start}
    settings |= {"atol": atol, "rtol": rtol, "tolerances": tolerances, "ignore": ignore}
    making = Making(**settings)
    make_policy = policy_maker(policy)
    root = new_root_seed() if seed is None else seed
    with closing(replays(trace, [index], making, None)) as playing:
        env, repeat = _start(next(playing), trace, recorded, step, settings, recording)
        try:
            actor = make_policy(env.observation_space, env.action_space)
            if seed is not None and generator_state(env.unwrapped) is None:
                raise EnvironmentUnavailable(f"seed={seed}: the environment has no np_random to seed; omit seed")
            options = {
                "record_infos": index_of(trace).locate(index)[0].about.recorder.get("record_infos", False),
                **recording,
            }
            if not prefix:
                options["frame_filter"] = lambda number: number >= step
            with recorded_by(_provenance(command, make_policy.name, trace, recorded, step, seed)):
                recorder = TraceRecordingWrapper(env, directory, **options)
        except BaseException:
            env.close()
            raise
        with recorder:
            branches = _Branches(root, repeat, seed is not None, episodes, on_progress)
            branches.record(recorder, Annotating(actor, recorder))
    rest = recorded[step:]
    returns = np.array(branches.returns, np.float64)
    lengths = np.array(branches.lengths, np.int64)
    recorded_facts = as_return(rest.total_reward), len(rest), recorded.outcome
    written_to = path_of(destination_of(recorder.directory) or str(recorder.directory))
    return Branched(written_to, root, seed is not None, branches.drew, returns, lengths, *recorded_facts)


class _Branches(Rollout):
    """Episodes that begin with the first steps of a recorded one."""

    def __init__(
        self,
        seed: int,
        repeat: Repeat,
        reseeds: bool,
        episodes: int,
        on_progress: Callable[[int, int], Any] | None,
    ):
        super().__init__(seed)
        self._repeat, self._reseeds, self._episodes = repeat, reseeds, episodes
        self._on_progress = on_progress
        self._seeded: Any = None  # state of the generator right after seeding
        self.drew: bool | None = False if reseeds else None
        self.returns: list[Return] = []
        self.lengths: list[int] = []

    def record(self, recorder: TraceRecordingWrapper, policy: Any) -> None:
        for number in range(self._episodes):
            self.play(recorder, policy, number)
            if self._reseeds:
                self.drew = self.drew or generator_state(recorder.unwrapped) != self._seeded
            if self.over:
                break

    def start(self, env: Any, policy: Any, episode: int) -> Any:
        """Repeat the recorded steps; return the observation after them."""
        observation = self._repeat(env)
        if self._reseeds:
            env.reseed(episode_seed(self.seed, episode))
            self._seeded = generator_state(env.unwrapped)
        reset_policy(policy, policy_seed(self.seed, episode))
        return observation

    def look(self) -> None:
        if self._on_progress is not None and self._on_progress(len(self.returns), self.steps):
            self.over = True
        self.next_look = time.monotonic() + LOOK_SECONDS

    def ended(self, episode: int, steps: int, total: Return) -> None:
        self.returns.append(total)
        self.lengths.append(steps)


def _start(
    played: Played, trace: Trace, recorded: Episode, step: int, settings: Mapping[str, Any], recording: Collection[str]
) -> tuple[gymnasium.Env[Any, Any], Repeat]:
    """Return the environment to record, and what repeats the recorded steps in it. recording: names of its options."""
    making = Making(**settings)
    if making.start != STATES:
        try:
            return _replayed(played, recorded, step, making)
        except (ReplayDiverged, EnvironmentUnavailable) as error:
            if making.start != AUTO or making.env_kwargs or not states_in(recorded):
                raise
            problem = error
    try:
        if "states" in recording:
            raise InvalidOption("states: not supported by a branch from recorded states; omit it")
        env = Continued(trace, recorded.index, step, None, **{**settings, "start": STATES})
    except TraceError as error:
        if making.start == STATES:
            raise
        raise type(problem)(f"{problem}; its states cannot be used: {error}") from error
    if making.start != STATES:
        warn(f"{problem}; the new episodes go on from its recorded state")

    def repeat(recorder: Any) -> Any:
        env.begin(recorder, lambda: None)
        return row_of(env.episode.observations, step)

    return env, repeat


def _replayed(played: Played, recorded: Episode, step: int, making: Making) -> tuple[gymnasium.Env[Any, Any], Repeat]:
    """Return an environment in which a replay matches before a step, and what replays these steps in it."""
    replay, position = played.replay, played.position
    env = without_autoreset(made_env(played.lane, making, None))
    try:
        generator = replay.generator_before(position)
        verdict, _ = replay.play_in(env, position, len(recorded), generator)
        if not verdict.matches:
            if verdict.reach >= step:
                _raise_unless_same(replay.play_in(env, position, step, generator)[0])
            else:
                _raise_unless_same(verdict)
            warn(differs_later(verdict, recorded.index, step))
    except BaseException:
        env.close()
        raise

    def repeat(recorder: Any) -> Any:
        set_generator = TraceRecordingWrapper.set_generator
        verdict, observation = replay.play_in(recorder, position, step, generator, set_generator)
        _raise_unless_same(verdict)
        return observation

    return env, repeat


def _check(recorded: Episode, step: int, episodes: int, seed: int | None, recording: Mapping[str, Any]) -> None:
    """Raise InvalidOption if an option is invalid."""
    if unsupported := sorted({"episode_filter", "frame_filter", "reward_classes"} & set(recording)):
        raise InvalidOption(f"{unsupported[0]}: not supported by branch; omit it")
    for name, value, least in (("episodes", episodes, 1), ("seed", seed, 0)):
        if value is not None and value < least:
            raise InvalidOption(f"{name}={value!r}: pass {least} or more")
    steps = len(recorded)
    if not 0 <= step <= steps:
        raise InvalidOption(f"step={step}: episode {recorded.index} has {steps} steps; pass 0 to {steps}")
    if step and (recorded.terminations[:step].any() or recorded.truncations[:step].any()):
        raise InvalidOption(f"step={step}: episode {recorded.index} has ended there; pass 0 to {steps - 1}")


def _raise_unless_same(verdict: Verdict) -> None:
    if verdict.verdict == DIFFERS:
        raise ReplayDiverged(
            f"episode {verdict.index}: differs when it is replayed by itself, {verdict.difference}; "
            "'gym-trace verify' shows more"
        )
    if not verdict.matches:
        raise EnvironmentUnavailable(f"episode {verdict.index}: cannot be replayed by itself: {verdict.reason}")


def _provenance(
    command: str, policy: str, trace: Trace, recorded: Episode, step: int, seed: int | None
) -> dict[str, Any]:
    origin = {"writer": recorded.writer, "episode_id": recorded.episode_id, "step": step}
    described = index_of(trace).locate(recorded.index)[0].about.environment
    making: dict[str, Any] = {name: described[name] for name in ("imports", "factory") if name in described}
    return {**provenance_of(command, policy), **making, "branch": origin if seed is None else {**origin, "seed": seed}}
