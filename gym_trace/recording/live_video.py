"""Film scheduled episodes while recording, as OpenAI Gym's Monitor did."""

from __future__ import annotations

import os
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, SupportsFloat

import gymnasium

from gym_trace.errors import InvalidOption, raise_if_of_signal, warn
from gym_trace.format.directory import video_name
from gym_trace.format.manifest import append
from gym_trace.printable import error_text
from gym_trace.recording.video_schedules import Schedule, schedule_of
from gym_trace.storage.local import LocalStorage
from gym_trace.storage.protocol import Storage

_DEFAULT_FPS = 30.0  # for environments without render_fps


class LiveVideo(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Film episodes into the trace directory; wraps the environment inside the recording wrapper.

    A failed video is dropped with a warning; the recording continues.

    Args:
        env: an environment with render_mode="rgb_array".
        video: "cubic", or a function of the episode id.

    Raises:
        InvalidOption: env does not render images, or video is not a schedule.
        MissingExtra: PyAV is not installed.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], video: Any):
        self._schedule: Schedule = schedule_of(video)
        if env.render_mode != "rgb_array":
            raise InvalidOption(
                f'video: render_mode is {env.render_mode!r}; make the environment with render_mode="rgb_array"'
            )
        import gym_trace.recording.video_writers  # local: needs an optional package; raises here if missing

        self._writer_class: Any = gym_trace.recording.video_writers.Mp4Writer
        super().__init__(env)
        self._next: tuple[Path, str, int] | None = None
        self._film: _Film | None = None
        self._unlisted: list[_Film] = []

    @property
    def spec(self) -> Any:  # type: ignore[override]
        """The spec of the environment: the recording wrapper's spec rebuilds this wrapper."""
        return self.env.spec

    def expect(self, directory: Path, writer: str, episode: int) -> None:
        """Announce the episode that the next reset begins. Unannounced episodes are not filmed."""
        self._next = (directory, writer, episode)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Finish the video of the previous episode; start one if the schedule says so."""
        self.finish()
        upcoming, self._next = self._next, None
        result = self.env.reset(seed=seed, options=options)
        self._next = upcoming
        self.begin()
        return result

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step the environment and film the rendered frame."""
        result = self.env.step(action)
        if self._next is not None:  # the environment has reset itself
            self.begin()
        elif self._film is not None:
            if "final_observation" not in result[4]:  # otherwise the frame belongs to the next episode
                self._take()
            if result[2] or result[3]:
                self.finish()
        return result

    def begin(self) -> None:
        """Start a video of the announced episode if the schedule says so."""
        upcoming, self._next = self._next, None
        if upcoming is not None:
            self.finish()
            self._begin(*upcoming)

    def close(self) -> None:
        """Finish the video, then close the environment."""
        self.finish()
        self.env.close()

    def finish(self) -> None:
        """Finish the current video, if any."""
        film, self._film = self._film, None
        if film is not None:
            self._unlisted.append(film)
        if self._unlisted:
            self._unlisted = [film for film in self._unlisted if not film.finish()]

    def _begin(self, directory: Path, writer: str, episode: int) -> None:
        try:
            if not self._schedule(episode):
                return
            fps = (self.env.metadata or {}).get("render_fps") or _DEFAULT_FPS
            encoder = self._writer_class(directory / video_name(writer, episode), float(fps))
        except Exception as error:  # user code and user metadata may raise anything
            raise_if_of_signal(error)
            _warn(episode, error)
            return
        self._film = film = _Film(encoder, LocalStorage(directory), writer, episode)
        film.finalizer = Finalize(self, film.finish, exitpriority=99)  # the recorder is closed first
        self._take()

    def _take(self) -> None:
        film = self._film
        if film is None or not film.is_ours():
            self.finish()
            return
        try:
            film.encoder.write(self.env.render())
        except Exception as error:  # the renderer's, or the encoder's
            raise_if_of_signal(error)
            self._film = None
            film.drop(error)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_film": None, "_unlisted": []}  # a copy does not continue the video


class _Film:
    """The unfinished video of an episode."""

    def __init__(self, encoder: Any, storage: Storage, writer: str, episode: int):
        self.encoder = encoder
        self.finalizer: Any = None
        self._storage, self._writer, self._episode = storage, writer, episode
        self._whole = False
        self._pid = os.getpid()

    def is_ours(self) -> bool:
        return self._pid == os.getpid()

    def finish(self) -> bool:
        """Finish the file and add it to the manifest; return False if there is no manifest yet."""
        if not self.is_ours():  # a forked child leaves the video to its parent
            self.encoder.leave()
            return True
        self._cancel()
        try:
            if not self._whole:
                self.encoder.close()
                self._whole = True
            name = self.encoder.path.name
            entry = {"file": name, "bytes": self._storage.size(name), "episode": self._episode}
            append(self._storage, self._writer, {"type": "video", **entry, "frames": self.encoder.frames})
        except FileNotFoundError as error:
            if self._whole and self.encoder.path.exists():
                return False  # copied writers create their files with the first step
            self.drop(error)
        except Exception as error:
            raise_if_of_signal(error)
            self.drop(error)
        return True

    def drop(self, error: Exception) -> None:
        """Delete the unfinished video."""
        self._cancel()
        try:
            self.encoder.drop()
            self.encoder.path.unlink(missing_ok=True)  # finished, but not in the manifest
        except Exception:  # it is broken already
            pass
        _warn(self._episode, error)

    def _cancel(self) -> None:
        if self.finalizer is not None:
            self.finalizer.cancel()


def _warn(episode: int, error: Exception) -> None:
    warn(f"video of episode {episode}: dropped: {error_text(error)}", RuntimeWarning)
