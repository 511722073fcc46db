"""Frames and captions of an episode, step by step: recorded observations, or renderings of the replay."""

from __future__ import annotations

import math
from collections import OrderedDict
from contextlib import closing, suppress
from functools import partial
from typing import Any, Protocol

import gymnasium
import numpy as np
import zstandard

from gym_trace.data.episode import Episode
from gym_trace.data.layout import Layout, Leaf
from gym_trace.data.showing.pictures import is_picture, picture_of
from gym_trace.data.values import Array, row_of
from gym_trace.envs.opengl import opengl_hint
from gym_trace.errors import RenderingError
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.trace import Trace
from gym_trace.printable import error_text
from gym_trace.tools.replay.lanes import Lane
from gym_trace.tools.replay.making import Making, made_env, replays
from gym_trace.tools.replay.observations import ObservationRows
from gym_trace.tools.replay.resimulate import Verdict
from gym_trace.tools.video.simulate import DEFAULT_FPS, fps_of

_MOST_CHARACTERS = 60  # limit of a value in a caption
_MOST_BYTES = 64 << 20  # limit of the compressed frames that are stored for seeking back


class Viewer(Protocol):
    """Interface of a viewer of an episode. Any exception it raises ends the viewing.

    Attributes:
        step: number of the step to show; 0 is after the reset.
        fps: steps per second of the environment.

    Examples:
        >>> class Last:
        ...     step, fps = 0, 30.0
        ...
        ...     def see(self, frame):
        ...         self.frame = frame
        ...         self.step += 1
        ...
        ...     def show_verdict(self, verdict):
        ...         self.verdict = verdict.verdict
        ...
        ...     def wait(self):
        ...         pass
    """

    step: int
    fps: float

    def see(self, frame: Any) -> None:
        """Show the frame of the current step, then set .step to the next step to show.

        Args:
            frame: an image of uint8, (H, W), (H, W, 1) or (H, W, 3); text; or a list of (name, value).
        """

    def show_verdict(self, verdict: Verdict) -> None:
        """Called with the result of the replay before its frames are shown."""

    def wait(self) -> None:
        """Called periodically while steps are replayed without being shown, such as steps before the one to show."""


def view_observed(trace: Trace, index: int, viewer: Viewer, smallest: int | None = 1) -> None:
    """Show recorded observations. Raises CorruptTrace.

    Args:
        smallest: show images with sides of at least this many pixels, if there are any; None: show all values.

    Examples:
        >>> trace = gym_trace.open_trace("traces/pong")  # doctest: +SKIP
        >>> gym_trace.replay.view_observed(trace, 0, viewer)  # doctest: +SKIP
    """
    rows, episode = ObservationRows(trace, index), trace[index]
    last = len(episode) - (not episode.has_final_observation and len(episode) > 0)  # last known row
    viewer.fps = DEFAULT_FPS
    leaf = None if smallest is None else picture_leaf(rows.layout, smallest)
    named = [("/".join(map(str, leaf.path[1:])) or "observation", leaf) for leaf in rows.layout.leaves()]
    while True:
        if leaf is not None:
            viewer.see(picture_of(rows.value(leaf, min(viewer.step, last))))
        else:
            viewer.see([(name, rows.value(leaf, min(viewer.step, last))) for name, leaf in named])


def view_rendered(trace: Trace, index: int, viewer: Viewer, making: Making) -> None:
    """Replay the episode and show renderings of its environment: text if supported, otherwise images.

    Raises:
        EnvironmentUnavailable: the environment cannot be built here or does not render; the message has the reason.
        RenderingError: a step to show has no frame.
        CorruptTrace

    Examples:
        >>> trace = gym_trace.open_trace("traces/cartpole")
        >>> gym_trace.replay.view_rendered(trace, 0, viewer, gym_trace.replay.Making())  # doctest: +SKIP
    """
    frames = _LatestFrames()

    def watch(env: gymnasium.Env[Any, Any], step: int) -> None:
        if step == 0:
            viewer.fps = fps_of(env)
        if step == viewer.step:
            frame = rendered_frame(env)
            if not isinstance(frame, str) and (not isinstance(frame, np.ndarray) or frame.dtype.hasobject):
                raise RenderingError(f"render() returned {type(frame).__name__}; expected text or an image")
            frames.add(step, frame)
        while viewer.step <= step:
            if viewer.step not in frames:
                raise _Restart
            viewer.see(frames.frame(viewer.step))

    while True:
        with suppress(_Restart), closing(replays(trace, [index], making, None, viewer.wait)) as playing:
            for played in playing:
                make = partial(_env_for_terminals, played.lane, making)
                verdict = played.replay.film(played.position, watch, make, viewer.show_verdict)
                reason = verdict.reason or str(verdict.difference or "the replay ends before it")
                raise RenderingError(f"this step cannot be replayed: {reason}")


def _env_for_terminals(lane: Lane, making: Making) -> gymnasium.Env[Any, Any]:
    """Build the environment of a lane with a render mode for a terminal."""
    env = made_env(lane, making, None)
    modes = tuple((env.metadata or {}).get("render_modes") or ())
    env.close()
    return made_env(lane, making, "ansi" if "ansi" in modes else "rgb_array")


class _Restart(Exception):
    """The frame of the step to show is no longer stored: replay from the start."""


class _LatestFrames:
    """Compressed frames of the latest steps."""

    def __init__(self) -> None:
        self._frames: OrderedDict[int, tuple[bytes, Any]] = OrderedDict()
        self._size = 0
        self._compress = zstandard.ZstdCompressor(level=1).compress
        self._decompress = zstandard.ZstdDecompressor().decompress

    def __contains__(self, step: int) -> bool:
        return step in self._frames

    def add(self, step: int, frame: Any) -> None:
        if isinstance(frame, str):
            compressed, row_type = self._compress(frame.encode("utf-8", "surrogatepass")), None
        else:
            compressed, row_type = self._compress(frame.tobytes()), (frame.dtype, frame.shape)
        self._frames[step] = compressed, row_type
        self._size += len(compressed)
        while self._size > _MOST_BYTES and len(self._frames) > 1:
            self._size -= len(self._frames.popitem(last=False)[1][0])

    def frame(self, step: int) -> Any:
        compressed, row_type = self._frames[step]
        data = self._decompress(compressed)
        if row_type is None:
            return data.decode("utf-8", "surrogatepass")
        dtype, shape = row_type
        return np.frombuffer(data, dtype).reshape(shape)


def rendered_frame(env: gymnasium.Env[Any, Any]) -> Any:
    """Return the frame that an environment renders. Raises RenderingError."""
    name = env if env.spec is None else env.spec.id
    try:
        frame: Any = env.render()
    except Exception as error:  # any error of foreign code
        raise RenderingError(f"{name}: render() failed: {error_text(error)}{opengl_hint(error)}") from error
    if isinstance(frame, list):  # frames since the last call
        frame = frame[-1] if frame else None
    if frame is None:
        raise RenderingError(f"{name}: render() returned nothing in render mode {env.render_mode!r}")
    return frame


def picture_leaf(layout: Layout, smallest: int = 1) -> Leaf | None:
    """Return the first leaf that holds images with sides of at least `smallest` pixels, or None."""
    pictures = (leaf for leaf in layout.leaves() if is_picture(leaf.dtype, leaf.shape))
    return next((leaf for leaf in pictures if sorted(leaf.shape)[-2] >= smallest), None)


def observes_pictures(trace: Trace, index: int, smallest: int = 1) -> bool:
    """Return True if an episode's observations have images with sides of at least `smallest` pixels.

    Examples:
        >>> gym_trace.replay.observes_pictures(gym_trace.open_trace("traces/cartpole"), 0)
        False
    """
    return picture_leaf(index_of(trace).locate(index)[0].layouts.observations, smallest) is not None


# -- captions ---------------------------------------------------------------------------------------------------------


class StepCaptions:
    """Captions of the steps of an episode.

    Attributes:
        rewards: (N,), or (N, objectives).

    Examples:
        >>> captions = gym_trace.replay.StepCaptions(gym_trace.open_trace("traces/cartpole")[0])
        >>> captions.at(3)
        ['step 3   return 3', 'reward 1   action 0']
    """

    def __init__(self, episode: Episode):
        self._actions, self.rewards = episode.actions, episode.rewards
        self._first_step = episode.first_step
        self._returns = _returns(self.rewards)

    def at(self, step: int) -> list[str]:
        """Return the lines after `step` steps.

        Examples:
            >>> gym_trace.replay.StepCaptions(gym_trace.open_trace("traces/cartpole")[0]).at(1)
            ['step 1   return 1', 'reward 1   action 1']
        """
        line = f"step {self._first_step + step}   return {_number(self._returns[step])}"
        if step == 0:
            return [line, "reset"]
        action = _short(row_of(self._actions, step - 1))
        return [line, f"reward {_number(self.rewards[step - 1])}   action {action}"]


def _returns(rewards: Array) -> Array | list[Any]:
    """Return the return after 0, 1, 2 … steps; NaN after the first reward that cannot be added."""
    if rewards.dtype.kind in "biuf" and rewards.ndim == 1:
        return np.concatenate([[0.0], np.cumsum(rewards, dtype=np.result_type(rewards.dtype, np.float64))])
    returns: list[Any] = [0.0]
    for reward in rewards:
        try:
            returns.append(returns[-1] + reward)
        except (TypeError, ValueError):
            returns.append(math.nan)
    return returns


def _number(value: Any) -> str:
    try:
        return f"{float(value):.4g}"
    except (TypeError, ValueError):
        return _short(value)


def _short(value: Any) -> str:
    """Return a value as short text on one line."""
    if isinstance(value, np.ndarray):
        text = np.array2string(value, precision=2, suppress_small=True, threshold=20, max_line_width=10**6)
    elif isinstance(value, (float, np.floating)):
        text = f"{value:.4g}"
    else:
        text = str(value)
    text = " ".join(text.split())
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."
