"""Pictures as MP4 files and back. This is the one module of them that needs PyAV."""

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

# H.264 of RGB without loss; a picture that can be decoded by itself every so often, for those who read at random.
_OPTIONS = {"qp": "0", "g": "8", "bf": "0", "preset": "veryfast"}
_CODEC = "libx264rgb"
# Metadata that is not UTF-8 does not matter; PyAV 19 decodes any bytes, and has no such option.
_READING: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
_ERRORS = (av.FFmpegError, OSError, ValueError)  # errors of PyAV for unreadable files
INFO = {"video.codec": "h264", "video.pix_fmt": "gbrp", "video.g": 8, "has_audio": False, "is_depth_map": False}


class VideoWriter:
    """Writer of one MP4 file with the images of consecutive episodes, bit for bit."""

    def __init__(self, path: Path, fps: int, height: int, width: int):
        self.path, self.frames = path, 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._container: Any = av.open(str(path), "w", format="mp4")
        stream: Any = self._container.add_stream(_CODEC, rate=fps, options=_OPTIONS)
        stream.width, stream.height, stream.pix_fmt = width, height, "rgb24"
        self._stream = stream
        self._tick = Fraction(1, fps)

    def write(self, pictures: Array) -> None:
        """(steps, H, W, 3) of uint8."""
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

    def drop(self) -> None:
        """Close an incomplete file."""
        container, self._container = self._container, None
        if container is not None:
            with contextlib.suppress(OSError):
                container.close()


class VideoReader:
    """Reader of the images of one video file, in order of their times."""

    def __init__(self, path: Path, height: int, width: int):
        """Raises UnreadableRecording."""
        self._path, self._size, self._at = path, (height, width), -1.0
        self._picture: Array | None = None
        self._container: Any = None
        try:
            # A play list, or what FFmpeg takes for the address of something, could have other files opened.
            self._container = av.open(str(path.absolute()), format="mp4", **_READING)
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
        for place, wanted in enumerate(times.tolist()):
            while self._at < wanted - tolerance:
                self._advance(wanted)
            if self._at > wanted + tolerance or self._picture is None:
                raise UnreadableRecording(f"{self._path}: incomplete: no image at {wanted:.3f} s")
            pictures[place] = self._picture
        return pictures

    def _advance(self, wanted: float) -> None:
        try:
            found = next(self._frames, None)
            if found is None:
                raise UnreadableRecording(f"{self._path}: incomplete: ends before {wanted:.3f} s")
            self._at, frame = found
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
