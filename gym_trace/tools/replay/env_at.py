"""Rebuild the environment of a recorded episode, and replay it up to a recorded step."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np

from gym_trace.errors import EnvironmentUnavailable, InvalidOption, ReplayDiverged, warn
from gym_trace.playback.trace import TraceLike, as_trace
from gym_trace.tools.replay.making import Making, replays
from gym_trace.tools.replay.resimulate import AUTO, DIFFERS, STATES, LaneReplay, MakeEnv, Verdict, problem_of, states_in

_log = logging.getLogger("gym_trace")


def env_at(
    trace: TraceLike,
    episode: int,
    step: int,
    *,
    render_mode: str | None = None,
    make_env: MakeEnv | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    trust: bool = False,
    atol: float = 0.0,
    rtol: float = 0.0,
    tolerances: Mapping[str, float] | None = None,
    ignore: Collection[str] = (),
    start: str = AUTO,
) -> gymnasium.Env[Any, Any]:
    """Return the recorded environment in its state just before a recorded step.

    The environment is rebuilt, reset and stepped as recorded. All observations, rewards, flags and infos on the way
    are compared, by default bit for bit. First the whole episode is replayed, because a wrong state may show only after
    the step. If the episode does not match alone, the earlier episodes of its lane are replayed first, as
    verify_trace() does. A difference after the step gives a warning: the state may already be wrong at the step.
    `env.replay_verdict` is the Verdict on the whole episode, and `env.replay_start` the step before which the replay
    started: 0 after a reset.

    If the trace has states (see TraceRecordingWrapper, states=), the replay starts from a state before the step, and
    `env.replay_verdict` is only about the steps from there to the step; the logger "gym_trace" reports this at level
    INFO. At least one step is compared after states of Gymnasium's MuJoCo and of ALE, and ten after others. The episode
    is replayed from its reset if a state cannot be restored, such as the state of a wrapper; for states of get_state()
    without trust; and with env_kwargs.

    If that replay differs before the step, as simulators that are not deterministic do, the environment is set to the
    last state up to the step, with a warning. At a step with a state of its own it is then exact, as far as the state
    is whole; wrappers with a state of their own are as after the reset. Steps from an earlier state are compared.

    The result is an ordinary environment without autoreset, which the caller steps and closes. For a vector environment
    it is the single environment of the episode's lane.

    Args:
        trace: a trace, a view, or a directory.
        episode: index in the trace; negative ones count from its end.
        step: 0 is after the reset; len(trace[episode]) is after the last step.
        render_mode: render mode of the environment; None: as recorded, but headless.
        make_env, env_kwargs, trust: as for verify_trace(). make_env is called with render_mode= if it accepts that.
        atol, rtol, tolerances, ignore: as for verify_trace().
        start: "auto"; "replay": only from the reset; "states": set to the last recorded state, without a replay.

    Raises:
        ReplayDiverged: a result before the step differs; names the first difference.
        EnvironmentUnavailable: the environment cannot be made here, or the episode cannot be replayed; says why.
        InvalidOption: the step is out of range.
        IndexError: the episode is out of range.
        TraceNotFound, CorruptTrace

    Examples:
        >>> env = gym_trace.env_at("traces/cartpole", episode=7, step=5)
        >>> observation, reward, terminated, truncated, info = env.step(0)
        >>> float(reward)
        1.0
    """
    making = Making(trust, env_kwargs, make_env, atol, rtol, tolerances, ignore, start=start)
    trace = as_trace(trace)
    if not -len(trace) <= episode < len(trace):
        raise IndexError(f"episode {episode}: the trace has {len(trace)} episodes")
    index = range(len(trace))[episode]
    steps = len(trace[index])
    if isinstance(step, bool) or not isinstance(step, (int, np.integer)):
        raise InvalidOption(f"step={step!r}: pass a whole number, 0 to {steps}")
    if not 0 <= step <= steps:
        raise InvalidOption(f"step={step}: episode {index} has {steps} steps; pass 0 to {steps}")
    with closing(replays(trace, [index], making, render_mode)) as playing:
        played = next(playing)
        replay, position = played.replay, played.position
        if start == STATES:
            return _in_state(replay, position, index, step)
        may_use_states = start == AUTO and not env_kwargs  # with other arguments, it may differ before the state
        if may_use_states and (restored := replay.env_from_state(position, step)) is not None:
            verdict, env, begin = restored
            _log.info("episode %d: started from the state before step %d", index, begin)
            return _with_verdict(env, replace(verdict, index=index), begin)
        verdict, replayed = replay.env_before(position, step)
        if replayed is not None:
            if not verdict.matches:
                warn(differs_later(verdict, index, step))
            return _with_verdict(replayed, replace(verdict, index=index), 0)
        hint = ""
        if may_use_states and states_in(trace[index]):
            try:
                env = _in_state(replay, position, index, step)
            except EnvironmentUnavailable as error:
                hint = f"; its states cannot be used: {error}"
            else:
                warn(f"episode {index}: {problem_of(verdict)}; it is set to the recorded state before step "
                     f"{env.replay_start}")  # type: ignore[attr-defined]  # fmt: skip
                return env
    if verdict.verdict == DIFFERS:
        raise ReplayDiverged(f"episode {index}: {problem_of(verdict)}{hint}")
    raise EnvironmentUnavailable(f"episode {index}: cannot be replayed: {verdict.reason}{hint}")


def _in_state(replay: LaneReplay, position: int, index: int, step: int) -> gymnasium.Env[Any, Any]:
    """Return the environment of an episode, set to its last state before a step, and played from there."""
    try:
        verdict, env, begin = replay.env_in_state(position, step)
    except EnvironmentUnavailable as error:
        raise EnvironmentUnavailable(f"episode {index}: {error}") from error
    if verdict.verdict == DIFFERS:
        env.close()
        after, exact = "without a state before it", "steps with a state of their own are exact"
        if verdict.from_states:
            after, exact = f"after the recorded state before step {begin}", f"{exact}, such as step {begin}"
        raise ReplayDiverged(f"episode {index}: {problem_of(verdict)}, {after}; {exact}")
    return _with_verdict(env, replace(verdict, index=index), begin)


def differs_later(verdict: Verdict, index: int, step: int) -> str:
    """Return the warning for an environment whose episode matches before a step, but not as a whole."""
    problem = problem_of(verdict) if verdict.difference else f"cannot be verified as a whole: {verdict.reason}"
    return f"episode {index}: it matches before step {step}, but {problem}"


def _with_verdict(env: gymnasium.Env[Any, Any], verdict: Verdict, begin: int) -> gymnasium.Env[Any, Any]:
    env.replay_verdict, env.replay_start = verdict, begin  # type: ignore[attr-defined]
    return env
