"""Videos of scheduled episodes, made while they are recorded, as OpenAI Gym's Monitor made them."""

from __future__ import annotations

import os
import warnings
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, SupportsFloat

import gymnasium

from gym_trace.errors import InvalidOption, raise_if_of_signal, told
from gym_trace.format.directory import video_name
from gym_trace.format.manifest import append
from gym_trace.storage.local import LocalStorage
from gym_trace.storage.protocol import Storage
from gym_trace.video.schedules import Schedule, schedule_of

_DEFAULT_FPS = 30.0  # of environments that do not say how fast they are


class LiveVideo(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Lies between a recording wrapper and its environment, and films episodes into the trace directory.

    Whatever goes wrong with a video costs that video and a warning, and nothing else.

    Args:
        env: with render_mode="rgb_array".
        video: "cubic", or a function of the episode id.

    Raises:
        InvalidOption: env does not render pictures, or video is no schedule.
        MissingExtra: PyAV is not installed.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], video: Any):
        self._schedule: Schedule = schedule_of(video)
        if env.render_mode != "rgb_array":
            raise InvalidOption(
                f"video films what the environment renders, and its render_mode is {env.render_mode!r}: "
                'make it with render_mode="rgb_array"'
            )
        import gym_trace.video.writers  # here, because it needs an optional package, which is to be missed at once

        self._writer_class: Any = gym_trace.video.writers.Mp4Writer
        super().__init__(env)
        self._next: tuple[Path, str, int] | None = None
        self._film: _Film | None = None
        self._unlisted: list[_Film] = []

    @property
    def spec(self) -> Any:  # type: ignore[override]
        """That of the environment: whoever makes it again makes this through the recording wrapper."""
        return self.env.spec

    def expect(self, directory: Path, writer: str, episode: int) -> None:
        """Says which episode the next reset begins. Those that are not announced are not filmed."""
        self._next = (directory, writer, episode)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Ends the video of the episode before, and begins one if it is time to."""
        self.finish()
        upcoming, self._next = self._next, None
        result = self.env.reset(seed=seed, options=options)
        self._next = upcoming
        self.begin()
        return result

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Steps the environment, and films what it renders."""
        result = self.env.step(action)
        if self._next is not None:  # it was a reset that the environment made itself
            self.begin()
        elif self._film is not None:
            if "final_observation" not in result[4]:  # otherwise what is rendered is of the next episode
                self._take()
            if result[2] or result[3]:
                self.finish()
        return result

    def begin(self) -> None:
        """Begins the video of the episode that was announced, if it is time to."""
        upcoming, self._next = self._next, None
        if upcoming is not None:
            self.finish()
            self._begin(*upcoming)

    def close(self) -> None:
        """Ends the video, then closes the environment."""
        self.finish()
        self.env.close()

    def finish(self) -> None:
        """Ends the video that is being made, if there is one."""
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
        except Exception as error:  # other people's code, and whatever it has for metadata
            raise_if_of_signal(error)
            _warn(episode, error)
            return
        self._film = film = _Film(encoder, LocalStorage(directory), writer, episode)
        film.finalizer = Finalize(self, film.finish, exitpriority=99)  # after the recorder is closed
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
        return {**self.__dict__, "_film": None, "_unlisted": []}  # a copy does not go on with it


class _Film:
    """A video that is being made of an episode."""

    def __init__(self, encoder: Any, storage: Storage, writer: str, episode: int):
        self.encoder = encoder
        self.finalizer: Any = None
        self._storage, self._writer, self._episode = storage, writer, episode
        self._whole = False
        self._pid = os.getpid()

    def is_ours(self) -> bool:
        return self._pid == os.getpid()

    def finish(self) -> bool:
        """Gives the video its name, and has the manifest list it; False if there is no manifest yet."""
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
                return False  # writers that are copies make their files when there is something to write
            self.drop(error)
        except Exception as error:
            raise_if_of_signal(error)
            self.drop(error)
        return True

    def drop(self, error: Exception) -> None:
        """Removes what there is of the video."""
        self._cancel()
        try:
            self.encoder.drop()
            self.encoder.path.unlink(missing_ok=True)  # one that could not be listed
        except Exception:  # it is broken already
            pass
        _warn(self._episode, error)

    def _cancel(self) -> None:
        if self.finalizer is not None:
            self.finalizer.cancel()


def _warn(episode: int, error: Exception) -> None:
    warnings.warn(f"the video of episode {episode} is dropped: {told(error)}", RuntimeWarning, stacklevel=2)
