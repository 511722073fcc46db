"""Recorded episodes simulated again to be looked at."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from gym_trace.comparison import Comparison
from gym_trace.environment import make_environment
from gym_trace.errors import EnvironmentUnavailable
from gym_trace.playback import Trace
from gym_trace.replay import (
    CLOSE,
    DIFFERS,
    IDENTICAL,
    LaneReplay,
    MakeEnv,
    Verdict,
    inseparable,
    lanes_of,
    recorded_environment,
)  # fmt: skip

DEFAULT_FPS = 30.0  # of environments that do not say how fast they are


def replays(trace: Trace, chosen: list[int], settings: Mapping[str, Any]) -> Iterator[tuple[LaneReplay, int, int]]:
    """What plays each episode, its position there, and its index; lane by lane, which is quickest."""
    wanted = {int(trace.chosen[index]): index for index in chosen}
    trace = trace.whole  # what was before an episode may have to be played, too
    for lane in lanes_of(trace):
        positions = [(position, wanted[index]) for position, index in enumerate(lane.indices) if index in wanted]
        if not positions:
            continue
        if reason := inseparable(lane.writer):
            raise EnvironmentUnavailable(reason)
        make: MakeEnv = partial(made_env, recorded_environment(lane.writer), settings)
        replay = LaneReplay(trace, lane, make, Comparison())
        try:
            yield from ((replay, position, index) for position, index in positions)
        finally:
            replay.close()


def made_env(description: Mapping[str, Any], settings: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    """The recorded environment. settings: arguments of make_environment(), with a render_mode that it has to have."""
    wanted = settings["render_mode"]
    if wanted is None and description.get("render_mode") is None:  # not all know the argument
        return make_environment(description, **{name: settings[name] for name in settings if name != "render_mode"})
    env = make_environment(description, **settings)
    if wanted is None:
        return env
    modes = env.metadata.get("render_modes") or ()
    if wanted in modes or (wanted == "human" and "rgb_array" in modes):  # gymnasium shows its pictures then
        return env
    env.close()
    known = ", ".join(map(str, modes)) or "none"
    instead = ""
    if wanted == "ansi" and "rgb_array" in modes:
        instead = "; render it to a video, such as name.mp4"
    elif wanted == "rgb_array" and "ansi" in modes:
        instead = "; render it as text, to name.cast"
    elif wanted == "rgb_array":
        instead = "; pictures that were observed can be shown without it: --from observations"
    raise EnvironmentUnavailable(f"{description.get('id')} has no render mode {wanted!r}, it has {known}{instead}")


def fps_of(env: gymnasium.Env[Any, Any]) -> float:
    fps = (env.metadata or {}).get("render_fps")
    return float(fps) if isinstance(fps, (int, float, np.number)) and fps > 0 else DEFAULT_FPS


def warn_of(verdict: Verdict, shown: str) -> None:
    """Says so where a replay is not what was recorded."""
    if verdict.verdict in (IDENTICAL, CLOSE):
        return
    if verdict.verdict == DIFFERS:
        told = f"does not come out as recorded, {verdict.difference}"
    else:
        told = f"may not come out as recorded: {verdict.reason}"
    warnings.warn(f"episode {verdict.index} {told}; {shown} is the replay", UserWarning, stacklevel=3)
