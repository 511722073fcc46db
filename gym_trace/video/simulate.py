"""Replay recorded episodes for viewing, or play them in a window."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from gym_trace.envs.make import completed, headless_arguments, make_environment
from gym_trace.errors import EnvironmentUnavailable, InvalidOption
from gym_trace.playback.trace import Trace, as_trace
from gym_trace.replay.compare import Comparison
from gym_trace.replay.resimulate import (
    CLOSE,
    DIFFERS,
    IDENTICAL,
    Lane,
    LaneReplay,
    MakeEnv,
    Verdict,
    inseparable,
    lanes_of,
)

DEFAULT_FPS = 30.0  # for environments without render_fps


class Making(NamedTuple):
    """How to build environments: from the trace, with env_kwargs replaced, or with the user's make_env."""

    trust: bool = False
    env_kwargs: Mapping[str, Any] | None = None
    make_env: MakeEnv | None = None


@dataclass(frozen=True)
class Played:
    """A replay of a lane, the position of an episode in it, and the index of the episode in the trace."""

    replay: LaneReplay
    position: int
    index: int
    lane: Lane


def replays(
    trace: Trace,
    chosen: list[int],
    making: Making,
    render_mode: str | None,
    on_step: Callable[[], None] = lambda: None,
) -> Iterator[Played]:
    """Yield the replay of each episode, lane by lane, because that is fastest. on_step: called after each step."""
    wanted = {int(trace.chosen[index]): index for index in chosen}
    trace = trace.whole  # earlier episodes of a lane may have to be replayed, too
    for lane in lanes_of(trace):
        positions = [(position, wanted[index]) for position, index in enumerate(lane.indices) if index in wanted]
        if not positions:
            continue
        if making.make_env is None and (reason := inseparable(lane.writer)):
            raise EnvironmentUnavailable(reason)
        make = partial(made_env, lane, making, render_mode)
        replay = LaneReplay(trace, lane, make, Comparison(), making.trust, on_step)
        try:
            yield from (Played(replay, position, index, lane) for position, index in positions)
        finally:
            replay.close()


def made_env(lane: Lane, making: Making, render_mode: str | None) -> gymnasium.Env[Any, Any]:
    """Build the environment of a lane. render_mode: required mode; None: as recorded, but headless."""
    description = lane.writer.about.environment
    wanted = {} if render_mode is None else {"render_mode": render_mode}
    if making.make_env is not None:
        made = making.make_env(**(wanted if _takes_render_mode(making.make_env) else {}))
        env = completed(made, description, lane.lane)
        if render_mode is None or getattr(env, "render_mode", None) == render_mode:
            return env
        env.close()
        raise EnvironmentUnavailable(f"make_env: returned {env} without render_mode={render_mode!r}; set it")
    kwargs = {**headless_arguments(description, lane.lane), **(making.env_kwargs or {}), **wanted}
    env = make_environment(description, making.trust, kwargs, lane.lane)
    modes = env.metadata.get("render_modes") or ()
    if render_mode is None or render_mode in modes:
        return env
    if render_mode == "human" and "rgb_array" in modes:  # gymnasium's wrapper shows them
        return env
    env.close()
    known = ", ".join(map(str, modes)) or "none"
    instead = ""
    if render_mode == "ansi" and "rgb_array" in modes:
        instead = "; render a video such as name.mp4"
    elif render_mode == "rgb_array":
        shows = "render text to name.cast" if "ansi" in modes else "use --from observations to show recorded images"
        instead = f"; {shows}"
    raise EnvironmentUnavailable(f"{description.get('id')}: no render mode {render_mode!r}, only {known}{instead}")


def _takes_render_mode(make: MakeEnv) -> bool:
    try:
        parameters = signature(make).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == "render_mode" or p.kind == Parameter.VAR_KEYWORD for p in parameters)


def fps_of(env: gymnasium.Env[Any, Any]) -> float:
    fps = (env.metadata or {}).get("render_fps")
    return float(fps) if isinstance(fps, (int, float, np.number)) and fps > 0 else DEFAULT_FPS


def warn_of(verdict: Verdict, shown: str) -> None:
    """Warn if a replay differs from the recording. shown: what shows the replay."""
    if verdict.verdict in (IDENTICAL, CLOSE):
        return
    if verdict.verdict == DIFFERS:
        problem = f"the replay differs from the recording, {verdict.difference}"
    else:
        problem = f"the replay may differ from the recording: {verdict.reason}"
    warnings.warn(f"episode {verdict.index}: {problem}; {shown} shows the replay", UserWarning, stacklevel=3)


# -- in a window ------------------------------------------------------------------------------------------------------


def play_for_humans(
    trace: Trace | str | os.PathLike[str],
    episodes: Iterable[int],
    *,
    speed: float = 1.0,
    env_kwargs: Mapping[str, Any] | None = None,
    trust: bool = False,
    make_env: MakeEnv | None = None,
) -> Iterator[Verdict]:
    """Play episodes in a window (render_mode="human"), and yield the verdict of each.

    Args:
        trace: a trace, a view of one, or the directory.
        episodes: indices in the trace.
        speed: factor on the speed of the environment (render_fps, or 30 steps per second).
        env_kwargs, trust, make_env: as for render_episodes().

    Raises:
        EnvironmentUnavailable: the environment cannot be built or shown here; the message has the reason.
        InvalidOption, TraceNotFound, CorruptTrace
    """
    if not 0.001 <= speed <= 1000:
        raise InvalidOption(f"speed={speed!r}: out of range; pass 0.001 to 1000")
    trace = as_trace(trace)
    chosen = [range(len(trace))[index] for index in episodes]
    making = Making(trust, env_kwargs, make_env)
    for played in replays(trace, chosen, making, None):
        pace = _Pace(speed)
        make = partial(made_env, played.lane, making, "human")
        verdict = played.replay.film(played.position, pace.watch, partial(pace.made, make))
        warn_of(verdict, "the window")
        yield verdict


class _Pace:
    """Sleeps between steps to keep the speed of the environment."""

    def __init__(self, speed: float):
        self._speed = speed
        self._fps = DEFAULT_FPS
        self._begin = 0.0

    def made(self, make: MakeEnv) -> gymnasium.Env[Any, Any]:
        """Build the environment, keep its speed, and disable its own waiting after each step."""
        env = make()
        self._fps = fps_of(env)
        env.unwrapped.metadata = {**(env.unwrapped.metadata or {}), "render_fps": 1_000_000}
        return env

    def watch(self, env: gymnasium.Env[Any, Any], steps: int) -> None:
        if steps == 0:
            self._begin = time.monotonic()
        due = self._begin + (steps + 1) / (self._fps * self._speed)
        time.sleep(max(0.0, due - time.monotonic()))
