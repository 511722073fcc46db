"""Replay recorded episodes for viewing, or play them in a window."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from gym_trace.errors import InvalidOption, warn
from gym_trace.playback.trace import Trace, as_trace
from gym_trace.tools.replay.making import Making, made_env, replays
from gym_trace.tools.replay.resimulate import DIFFERS, MakeEnv, Verdict, problem_of

DEFAULT_FPS = 30.0  # for environments without render_fps


def fps_of(env: gymnasium.Env[Any, Any]) -> float:
    fps = (env.metadata or {}).get("render_fps")
    return float(fps) if isinstance(fps, (int, float, np.number)) and fps > 0 else DEFAULT_FPS


def note_on(verdict: Verdict) -> str:
    """Return how the frames of a replay differ from what was recorded; "" if they do not."""
    if not verdict.from_states:
        return "" if verdict.matches else problem_of(verdict)
    between = f"steps without a recorded state differ, {verdict.difference}" if verdict.verdict == DIFFERS else ""
    return "; ".join(filter(None, (verdict.reason, between)))


def warn_of(verdict: Verdict, where: str) -> None:
    """Warn if a replay differs from the recording. where: the video or window that shows it."""
    if note := note_on(verdict):
        shown = "recorded states" if verdict.from_states else "replay"
        warn(f"episode {verdict.index}: {note}; {where} shows the {shown}")


# -- in a window ------------------------------------------------------------------------------------------------------


def play_for_humans(
    trace: Trace | str | os.PathLike[str],
    episodes: Iterable[int],
    *,
    speed: float = 1.0,
    **making: Any,
) -> Iterator[Verdict]:
    """Play episodes in a window (render_mode="human"), and yield the verdict of each.

    Args:
        trace: a trace, a view, or a directory.
        episodes: indices in the trace.
        speed: factor on the speed of the environment (render_fps, or 30 steps per second).
        making: as for render().

    Raises:
        EnvironmentUnavailable: the environment cannot be built or shown here; the message has the reason.
        InvalidOption, TraceNotFound, CorruptTrace

    Examples:
        >>> for verdict in gym_trace.replay.play_for_humans("traces/cartpole", [8], speed=2):  # doctest: +SKIP
        ...     print(verdict.verdict)
    """
    if not 0.001 <= speed <= 1000:
        raise InvalidOption(f"speed={speed!r}: out of range; pass 0.001 to 1000")
    trace = as_trace(trace)
    chosen = [range(len(trace))[index] for index in episodes]
    settings = Making(**making)
    for played in replays(trace, chosen, settings, None):
        pace = _Pace(speed)
        make = partial(made_env, played.lane, settings, "human")
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
        base = env.unwrapped
        base.metadata = {**(getattr(base, "metadata", None) or {}), "render_fps": 1_000_000}
        return env

    def watch(self, env: gymnasium.Env[Any, Any], steps: int) -> None:
        if steps == 0:
            self._begin = time.monotonic()
        due = self._begin + (steps + 1) / (self._fps * self._speed)
        time.sleep(max(0.0, due - time.monotonic()))
