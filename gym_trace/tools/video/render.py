"""Render recorded episodes as videos: from a replay, or from recorded images."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium

from gym_trace.data.showing.pictures import as_picture, picture_of
from gym_trace.errors import InvalidOption, RenderingError, warn
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.trace import Trace, as_trace
from gym_trace.storage.local import refuse_url
from gym_trace.tools.replay.making import Making, Played, replays
from gym_trace.tools.replay.observations import ObservationRows
from gym_trace.tools.replay.resimulate import Verdict
from gym_trace.tools.video.asciicast import CastWriter
from gym_trace.tools.video.frames import StepCaptions, picture_leaf, rendered_frame
from gym_trace.tools.video.simulate import DEFAULT_FPS, fps_of, warn_of

FORMATS = ("mp4", "gif", "png", "cast")
_NUMBER = "{}"  # stands for the episode number in a path


@dataclass(frozen=True)
class Rendered:
    """A finished video. verdict: verdict on the replay that it shows; None if it shows recorded observations.

    Examples:
        >>> videos = list(gym_trace.render("traces/cartpole", "videos/{}.mp4"))  # doctest: +SKIP
        >>> videos[0].path, videos[0].frames  # doctest: +SKIP
    """

    index: int
    path: Path
    frames: int
    verdict: Verdict | None


class Destination:
    """Output path and format of videos; see render().

    Raises:
        InvalidOption: an unknown suffix, unless it belongs to a directory; or an unknown format.
    """

    def __init__(self, out: str | os.PathLike[str], form: str | None = None):
        refuse_url(out)
        self._out = Path(out)
        suffix = self._out.suffix.lower().removeprefix(".")
        self._is_file = suffix in FORMATS
        is_unknown = suffix.isalnum() and not suffix.isdecimal() and not self._is_file
        if is_unknown and form is None and not str(out).endswith("/") and not self._out.is_dir():
            known = ", ".join(f".{name}" for name in FORMATS)
            raise InvalidOption(f"{out}: unknown suffix .{suffix}; use {known}, or end a directory name with /")
        if form is not None and form not in FORMATS:
            raise InvalidOption(f"{form!r}: unknown format; pass one of {', '.join(FORMATS)}")
        if form is not None and self._is_file and form != suffix:
            raise InvalidOption(f"{out}: ends in .{suffix}, but the format is {form}; change one of them")
        self.form = form or (suffix if self._is_file else "mp4")

    def paths(self, indices: list[int]) -> dict[int, Path]:
        """Return the path for each of these episodes. Raises InvalidOption if they would share one file."""
        if not self._is_file:
            out = self._out / f"episode-{_NUMBER}.{self.form}"
        elif len(indices) < 2 or _NUMBER in self._out.name:
            out = self._out
        else:
            pattern = self._out.with_name(f"{self._out.stem}-{_NUMBER}{self._out.suffix}")
            raise InvalidOption(
                f"{self._out}: one file for {len(indices)} episodes; "
                f"choose one episode, or pass a directory or a pattern such as {pattern}"
            )
        out = out.with_suffix("") if self.form == "png" else out
        return {index: out.with_name(out.name.replace(_NUMBER, f"{index:06d}")) for index in indices}


def render(
    trace: Trace | str | os.PathLike[str],
    path: str | os.PathLike[str],
    episodes: Iterable[int] | None = None,
    *,
    form: str | None = None,
    source: str = "simulation",
    overlay: bool = False,
    fps: float | None = None,
    on_frame: Callable[[], None] = lambda: None,
    **making: Any,
) -> Iterator[Rendered]:
    """Render a video of each episode, and yield each when it is finished. Memory does not grow with episode length.

    If a replay differs from the recording, its video is rendered anyway, with a warning. From states, the frame of a
    step without one shows the environment stepped from the last state; if that differs from the recording, a warning
    says so.

    Args:
        trace: a trace, a view, or a directory.
        path: a directory, in which episode 12 becomes episode-000012.mp4; or a file: name.mp4, name.gif or name.cast
            for one episode, name-{}.mp4 for several, where {} is the episode number. name.png: a directory of frames.
        episodes: indices in the trace; None: all.
        form: "mp4", "gif", "png" or "cast"; None: by the suffix of path, or mp4.
        source: "simulation" replays episodes; "observations" shows recorded images and needs no simulator.
        overlay: show step, action, reward and return below each frame.
        fps: frames per second; None: the environment's rate, or 30.
        on_frame: called after each frame.
        making: env_kwargs, trust, make_env, atol, rtol, tolerances, ignore and start of env_at(). Episodes whose replay
            differs from the recording are rendered from their recorded states, if they have any; start="replay" renders
            the replay.

    Raises:
        EnvironmentUnavailable: the environment cannot be built here or does not render; the message has the reason.
        MissingExtra: PyAV or Pillow is not installed.
        RenderingError, InvalidOption, TraceNotFound, CorruptTrace

    Examples:
        >>> videos = gym_trace.render("traces/cartpole", "best.gif", episodes=[8])  # doctest: +SKIP
        >>> [video.frames for video in videos]  # doctest: +SKIP
    """
    trace = as_trace(trace)
    destination = Destination(path, form)
    everything = range(len(trace))
    chosen = list(everything if episodes is None else dict.fromkeys(everything[index] for index in episodes))
    paths = destination.paths(chosen)
    if destination.form != "cast":
        import gym_trace.recording.video_writers  # lazy: needs an optional package; raises here if it is missing
    if overlay and destination.form != "cast":
        import gym_trace.tools.video.overlay  # noqa: F401 - as above
    film = partial(_Film, trace, destination.form, overlay, fps, on_frame)
    if source == "observations":
        return (_observed(trace, index, film(index, path)) for index, path in paths.items())
    if source != "simulation":
        raise InvalidOption(f'source={source!r}: unknown; pass "simulation" or "observations"')
    mode = "ansi" if destination.form == "cast" else "rgb_array"
    return (
        rendered
        for played in replays(trace, chosen, Making(**making), mode)
        if (rendered := _simulated(played, film(played.index, paths[played.index]))) is not None
    )


# -- videos -----------------------------------------------------------------------------------------------------------


def _simulated(played: Played, film: _Film) -> Rendered | None:
    """Render a replay of the episode; return None if the replay cannot start."""

    def watch(env: gymnasium.Env[Any, Any], step: int) -> None:
        film.show(rendered_frame(env), step, fps_of(env))

    with film:
        verdict = played.replay.film(played.position, watch)
        if film.writer is None:
            reason = verdict.reason or str(verdict.difference)
            warn(f"episode {film.index}: not rendered: {reason}")
            return None
    warn_of(verdict, str(film.path))
    return Rendered(film.index, film.path, film.frames, verdict)


def _observed(trace: Trace, index: int, film: _Film) -> Rendered:
    """Render the recorded images of the episode."""
    if film.form == "cast":
        raise InvalidOption("observations: images cannot be rendered as an asciicast; use mp4, gif or png")
    rows = ObservationRows(trace, index)
    leaf = picture_leaf(rows.layout)
    if leaf is None:
        raise RenderingError(
            "observations: no images; an image is uint8 of shape (H, W), (H, W, 1), (H, W, 3) or (stack, H, W)"
        )
    with film:
        count = len(rows) if trace[index].has_final_observation else len(rows) - 1
        for step in range(count):
            film.show(picture_of(rows.value(leaf, step)), step, DEFAULT_FPS)
    return Rendered(index, film.path, film.frames, None)


class _Film:
    """A video in progress; removes its files on failure."""

    def __init__(
        self, trace: Trace, form: str, overlay: bool, fps: float | None, on_frame: Callable[[], None], index: int,
        path: Path,
    ):  # fmt: skip
        self._trace, self._fps, self._on_frame = trace, fps, on_frame
        self.form, self.index, self.path = form, index, path
        self.writer: Any = None
        self.frames = 0
        self._captions = StepCaptions(trace[index]) if overlay else None
        self._overlay: Any = None

    def _open(self, fps: float) -> Any:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rate = self._fps or fps
        if self.form != "cast":
            from gym_trace.recording.video_writers import WRITERS

            return WRITERS[self.form](self.path, rate)
        name = index_of(self._trace).locate(self.index)[0].about.environment.get("id")
        return CastWriter(self.path, rate, f"{name or 'episode'} {self.index}")

    def show(self, frame: Any, step: int, fps: float) -> None:
        if self._captions is not None and self.form != "cast":
            from gym_trace.tools.video.overlay import Caption

            self._overlay = self._overlay or Caption()
            frame = self._overlay.under(as_picture(frame), self._captions.at(step))
        elif self._captions is not None:
            frame = "\n".join([str(frame).rstrip("\n"), "", *self._captions.at(step)])
        if self.writer is None:
            self.writer = self._open(fps)
        with _with_path(self.path):
            self.writer.write(frame)
        self.frames += 1
        self._on_frame()

    def __enter__(self) -> _Film:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self.writer is None:
            return
        with ExitStack() as stack:
            stack.callback(self.writer.drop)
            if kind is None:
                with _with_path(self.path):
                    self.writer.close()
                stack.pop_all()


@contextmanager
def _with_path(path: Path) -> Iterator[None]:
    """Turn an OSError without a path into a RenderingError with this one."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise RenderingError(f"{path}: cannot be written: {error.strerror or error}") from error
