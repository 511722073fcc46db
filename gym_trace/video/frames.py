"""What there is to see of an episode at each of its steps: what was observed, or what its environment renders."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import closing, suppress
from functools import partial
from typing import Any, Protocol

import gymnasium
import numpy as np
import zstandard

from gym_trace.errors import RenderingError, told
from gym_trace.model.layout import Layout, Leaf
from gym_trace.playback.trace import Trace
from gym_trace.replay.resimulate import Lane, Verdict, observation_rows
from gym_trace.showing.pictures import is_picture, picture_of
from gym_trace.video.simulate import DEFAULT_FPS, Making, fps_of, made_env, replays

_KEPT = 64 << 20  # bytes of frames, compressed, that were seen and may be seen again


class Viewer(Protocol):
    """Somebody who goes through an episode. Whatever it raises ends that.

    Attributes:
        step: which is wanted next, as the number of steps taken: 0 is after the reset.
        fps: steps a second, as the environment says.
    """

    step: int
    fps: float

    def see(self, frame: Any) -> None:
        """Looks at the wanted step for as long as it takes; .step is another one afterwards.

        frame: a picture, which is (H, W), (H, W, 1) or (H, W, 3) of uint8; text; or a list of (name, value).
        """

    def told(self, verdict: Verdict) -> None:
        """What came out when the episode was played again, before it is seen."""

    def wait(self) -> None:
        """Called again and again while steps are played that nobody sees, such as those before the wanted one."""


def view_observed(trace: Trace, index: int, viewer: Viewer, smallest: int | None = 1) -> None:
    """Shows what was observed: pictures with sides of so many pixels at least, or all values. Raises CorruptTrace."""
    rows, episode = observation_rows(trace, index), trace[index]
    end = len(episode) - (not episode.has_final_observation and len(episode) > 0)  # of what is known
    viewer.fps = DEFAULT_FPS
    leaf = None if smallest is None else picture_leaf(rows.layout, smallest)
    named = [("/".join(map(str, leaf.path[1:])) or "observation", leaf) for leaf in rows.layout.leaves()]
    while True:
        if leaf is not None:
            viewer.see(picture_of(rows.value(leaf, min(viewer.step, end))))
        else:
            viewer.see([(name, rows.value(leaf, min(viewer.step, end))) for name, leaf in named])


def view_rendered(trace: Trace, index: int, viewer: Viewer, making: Making) -> None:
    """Shows what the environment renders when the episode is played again: text if it can, otherwise pictures.

    Raises:
        EnvironmentUnavailable: the environment cannot be made here, or does not render; says why.
        RenderingError: there is no frame of a step that was wanted.
        CorruptTrace
    """
    seen = _Seen()

    def watch(env: gymnasium.Env[Any, Any], step: int) -> None:
        if step == 0:
            viewer.fps = fps_of(env)
        if step == viewer.step:
            frame = rendered_frame(env)
            if not isinstance(frame, str) and (not isinstance(frame, np.ndarray) or frame.dtype.hasobject):
                raise RenderingError(f"what is rendered is neither text nor a picture, but {type(frame).__name__}")
            seen.keep(step, frame)
        while viewer.step <= step:
            if viewer.step not in seen:
                raise _FromTheStart
            viewer.see(seen.frame(viewer.step))

    while True:
        with suppress(_FromTheStart), closing(replays(trace, [index], making, None, viewer.wait)) as playing:  # type: ignore[type-var]
            for played in playing:
                made = partial(_showing_env, played.lane, making)
                verdict = played.replay.film(played.position, watch, made, viewer.told)
                reason = verdict.reason or str(verdict.difference or "it ends before")
                raise RenderingError(f"this step cannot be played again: {reason}")


def _showing_env(lane: Lane, making: Making) -> gymnasium.Env[Any, Any]:
    """The environment of a lane, with a render mode that a terminal can show."""
    env = made_env(lane, making, None)
    modes = tuple((env.metadata or {}).get("render_modes") or ())
    env.close()
    return made_env(lane, making, "ansi" if "ansi" in modes else "rgb_array")


class _FromTheStart(Exception):
    """A step is wanted that is not kept any more."""


class _Seen:
    """The frames that were seen last."""

    def __init__(self) -> None:
        self._frames: OrderedDict[int, tuple[bytes, Any]] = OrderedDict()
        self._size = 0
        self._compress = zstandard.ZstdCompressor(level=1).compress
        self._decompress = zstandard.ZstdDecompressor().decompress

    def __contains__(self, step: int) -> bool:
        return step in self._frames

    def keep(self, step: int, frame: Any) -> None:
        kept: tuple[bytes, Any]
        if isinstance(frame, str):
            kept = self._compress(frame.encode("utf-8", "surrogatepass")), None
        else:
            kept = self._compress(frame.tobytes()), (frame.dtype, frame.shape)
        self._frames[step] = kept
        self._size += len(kept[0])
        while self._size > _KEPT and len(self._frames) > 1:
            self._size -= len(self._frames.popitem(last=False)[1][0])

    def frame(self, step: int) -> Any:
        raw, kind = self._frames[step]
        data = self._decompress(raw)
        return data.decode("utf-8", "surrogatepass") if kind is None else np.frombuffer(data, kind[0]).reshape(kind[1])


def rendered_frame(env: gymnasium.Env[Any, Any]) -> Any:
    """What an environment renders. Raises RenderingError."""
    name = env if env.spec is None else env.spec.id
    try:
        frame: Any = env.render()
    except Exception as error:  # other people's code, and graphics
        raise RenderingError(f"{name} cannot render: {told(error)}") from error
    if isinstance(frame, list):  # of those since the last one
        frame = frame[-1] if frame else None
    if frame is None:
        raise RenderingError(f"{name} renders nothing in its render mode {env.render_mode!r}")
    return frame


def picture_leaf(layout: Layout, smallest: int = 1) -> Leaf | None:
    """The first part of an observation that is a picture, with sides of so many pixels at least; or None."""
    pictures = (leaf for leaf in layout.leaves() if is_picture(leaf.dtype, leaf.shape))
    return next((leaf for leaf in pictures if sorted(leaf.shape)[-2] >= smallest), None)
