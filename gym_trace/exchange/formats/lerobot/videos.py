"""Write and read images as MP4 files. Only this module of the package needs PyAV."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from gym_trace.data.values import Array
from gym_trace.errors import UnreadableRecording

_OPTIONS = {"qp": "0", "g": "8", "bf": "0", "preset": "veryfast"}  # lossless; every 8th is a key frame
_CODEC = "libx264rgb"  # H.264 of RGB
# Metadata that is not UTF-8 does not matter. PyAV 19 decodes any bytes, and lacks this option.
_OPEN_OPTIONS: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
_ERRORS = (av.FFmpegError, OSError, ValueError)  # errors of PyAV for unreadable files
INFO = {"video.codec": "h264", "video.pix_fmt": "gbrp", "video.g": 8, "has_audio": False, "is_depth_map": False}


class VideoWriter:
    """Writes one MP4 file with the images of consecutive episodes, bit for bit."""

    def __init__(self, path: Path, fps: int, height: int, width: int):
        self.path, self.frames = path, 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._container: Any = av.open(str(path), "w", format="mp4")
        stream: Any = self._container.add_stream(_CODEC, rate=fps, options=_OPTIONS)
        stream.width, stream.height, stream.pix_fmt = width, height, "rgb24"
        self._stream = stream
        self._tick = Fraction(1, fps)

    def write(self, pictures: Array) -> None:
        """Write images of (count, H, W, 3) uint8."""
        for picture in pictures:
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = self.frames, self._tick
            self._container.mux(self._stream.encode(frame))
            self.frames += 1

    def close(self) -> None:
        if self._container is not None:
            self._container.mux(self._stream.encode())
            self._container.close()
            self._container = None

    def detach(self) -> None:
        """Close an incomplete file as it is."""
        container, self._container = self._container, None
        if container is not None:
            with contextlib.suppress(OSError):
                container.close()


class VideoReader:
    """Reads the images of one video file, in order of their times."""

    def __init__(self, path: Path, height: int, width: int):
        """Raises UnreadableRecording."""
        self._path, self._size, self._time = path, (height, width), -1.0
        self._picture: Array | None = None  # the last decoded one, at self._time
        self._container: Any = None
        try:
            # FFmpeg follows playlists to other files, and takes some names for URLs: only MP4, and an absolute path.
            self._container = av.open(str(path.absolute()), format="mp4", **_OPEN_OPTIONS)
            self._frames = self._decoded(self._container.streams.video[0])
        except (*_ERRORS, IndexError) as error:
            self.close()
            raise self._unreadable(error) from error

    def _decoded(self, stream: Any) -> Iterator[tuple[float, Any]]:
        for frame in self._container.decode(stream):
            if frame.pts is not None:
                yield float(frame.pts * stream.time_base), frame

    def take(self, times: Array, tolerance: float) -> Array:
        """Return the images (len(times), H, W, 3) at ascending times in seconds. Raises UnreadableRecording."""
        pictures = np.empty((len(times), *self._size, 3), np.uint8)
        for i, time in enumerate(times.tolist()):
            while self._time < time - tolerance:
                self._advance(time)
            if self._time > time + tolerance or self._picture is None:
                raise UnreadableRecording(f"{self._path}: incomplete: no image at {time:.3f} s")
            pictures[i] = self._picture
        return pictures

    def _advance(self, time: float) -> None:
        """Decode the next image. time: the wanted one, for the error."""
        try:
            timed_frame = next(self._frames, None)
            if timed_frame is None:
                raise UnreadableRecording(f"{self._path}: incomplete: ends before {time:.3f} s")
            self._time, frame = timed_frame
            if (frame.height, frame.width) != self._size:
                raise UnreadableRecording(
                    f"{self._path}: images of {frame.height} x {frame.width}, but meta/info.json declares "
                    f"{self._size[0]} x {self._size[1]}"
                )
            self._picture = frame.to_ndarray(format="rgb24")
        except _ERRORS as error:
            if isinstance(error, UnreadableRecording):
                raise
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> UnreadableRecording:
        return UnreadableRecording(f"{self._path}: cannot be read as a video: {error}")

    def close(self) -> None:
        if self._container is not None:
            self._container.close()
