"""Pictures written as MP4, GIF or PNG, one at a time, in memory that does not grow with their number.

This is the one module that needs PyAV.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zstandard

from gym_trace.errors import InvalidOption, MissingExtra, RenderingError
from gym_trace.model.values import Array
from gym_trace.storage.local import open_regular

try:
    import av
    from av.filter import Graph
    from av.video.reformatter import ColorRange, Colorspace, VideoReformatter
except ImportError as missing:
    raise MissingExtra(f"videos need PyAV ({missing}): pip install 'gym-trace[video]'") from missing

PART = ".part"  # appended to the name of what is not whole yet
_BT709 = 1  # the number that H.264 has for these colours
_GIF_TICKS = 100  # a second; the unit of time of GIF
_GIF_FASTEST = 2  # ticks that a frame lasts at least; viewers show shorter ones much longer
_PALETTE = 255  # colours of a GIF, beside the transparent one
_MANY_COLOURS = 1 << 16  # from which on they are counted more coarsely, so that counting them takes bounded memory
_COARSE = 0xFC  # the bits of a colour that count then


class PictureWriter(Protocol):
    """Takes pictures one by one."""

    frames: int

    def write(self, picture: Array) -> None:
        """Adds a picture, (H, W, 3) of uint8, all of the same size. Raises RenderingError, OSError."""

    def close(self) -> None:
        """Writes what is left, and gives the whole its name. Raises RenderingError, OSError."""

    def drop(self) -> None:
        """Removes what was written."""


def as_picture(frame: Any) -> Array:
    """A frame as (H, W, 3) of uint8; it may be (H, W), (H, W, 1) or have an alpha channel. Raises RenderingError."""
    picture = np.asarray(frame)
    if picture.ndim == 2:
        picture = picture[:, :, None]
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] not in (1, 3, 4) or 0 in picture.shape:
        raise RenderingError(f"not a picture: {picture.dtype} of shape {picture.shape}; pictures are uint8 (H, W, 3)")
    picture = np.repeat(picture, 3, axis=2) if picture.shape[2] == 1 else picture[:, :, :3]
    return np.ascontiguousarray(picture)


def check_fps(fps: float) -> Fraction:
    """Frames per second as a fraction that video files can hold. Raises InvalidOption."""
    if not (math.isfinite(fps) and 0.01 <= fps <= 1000):
        raise InvalidOption(f"fps={fps!r}: give frames per second, 0.01 to 1000")
    return Fraction(fps).limit_denominator(1001)


class _OwnFile:
    """A file that only the process that opened it writes to: a child that inherits a half-written video leaves it."""

    def __init__(self, path: Path):
        fd = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)  # what a killed process left is overwritten
        self._file = open(fd, "wb", buffering=0)  # noqa: SIM115
        self._pid = os.getpid()

    def write(self, data: bytes) -> int:
        left = memoryview(data)
        while left and os.getpid() == self._pid:
            left = left[self._file.write(left) or 0 :]
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence) if os.getpid() == self._pid else offset

    def tell(self) -> int:
        return self._file.tell() if os.getpid() == self._pid else 0

    def close(self) -> None:
        self._file.close()


class _Encoder:
    """One stream of video in one file."""

    def __init__(self, path: Path, container: str, codec: str, fps: Fraction, width: int, height: int, **settings: Any):
        self._file = _OwnFile(path)
        try:
            self._container = av.open(self._file, "w", format=container)
            stream: Any = self._container.add_stream(codec, rate=fps, options=settings.pop("options", {}))
            stream.width, stream.height = width, height
            context = stream.codec_context
            context.thread_count = 1  # no threads that a fork would lose
            for name, value in settings.items():
                setattr(context, name, value)
        except BaseException:
            self._file.close()
            raise
        self._stream = stream

    def encode(self, frame: Any) -> None:
        """Adds a frame; None: writes what is left of those before."""
        for packet in self._stream.encode(frame):
            self._container.mux(packet)

    def close(self) -> None:
        try:
            self._container.close()
        finally:
            self.leave()

    def leave(self) -> None:
        """Lets go of the file as it is."""
        self._file.close()


class _Writer(ABC):
    """What all writers do alike: a temporary name, and pictures that have to be of one size."""

    def __init__(self, path: Path, fps: float):
        self.path = path
        self.fps = check_fps(fps)
        self.frames = 0
        self._part = path.with_name(path.name + PART)
        self._shape: tuple[int, ...] | None = None

    def write(self, picture: Array) -> None:
        picture = as_picture(picture)
        if self._shape is None:
            self._shape = picture.shape
            self._open(*picture.shape[:2])
        if picture.shape != self._shape:
            (height, width), (then_height, then_width) = picture.shape[:2], self._shape[:2]
            raise RenderingError(f"the pictures change their size, from {then_width}x{then_height} to {width}x{height}")
        try:
            self._add(picture)
        except av.FFmpegError as error:
            raise _told(self.path, error) from error
        self.frames += 1

    def close(self) -> None:
        try:
            if self._shape is None:
                raise RenderingError(f"{self.path}: there is no picture to write")
            self._finish()
            self._part.replace(self.path)
        except av.FFmpegError as error:
            raise _told(self.path, error) from error

    def drop(self) -> None:
        try:
            self._abandon()
        except (av.FFmpegError, OSError):
            pass  # such as that the disk is full; it is not to be kept
        finally:
            if self._part.is_dir():
                shutil.rmtree(self._part, ignore_errors=True)
            else:
                self._part.unlink(missing_ok=True)

    @abstractmethod
    def _open(self, height: int, width: int) -> None:
        """Begins the file, for pictures of this size."""

    @abstractmethod
    def _add(self, picture: Array) -> None:
        """Adds a picture."""

    @abstractmethod
    def _finish(self) -> None:
        """Completes the file."""

    @abstractmethod
    def _abandon(self) -> None:
        """Lets go of it as it is."""


class Mp4Writer(_Writer):
    """H.264 in MP4, yuv420p. Odd sizes are made even by a further row or column, equal to the last."""

    _encoder: _Encoder | None = None

    def _open(self, height: int, width: int) -> None:
        self._padding = ((0, height % 2), (0, width % 2), (0, 0))
        self._reformatter = VideoReformatter()
        self._encoder = _Encoder(
            self._part,
            "mp4",
            "libx264",
            self.fps,
            width + width % 2,
            height + height % 2,
            pix_fmt="yuv420p",
            options={"preset": "veryfast", "crf": "18"},
            colorspace=_BT709,
            color_primaries=_BT709,
            color_trc=_BT709,
            color_range=int(ColorRange.MPEG),
        )

    def _add(self, picture: Array) -> None:
        if any(map(any, self._padding)):
            picture = np.pad(picture, self._padding, mode="edge")
        frame = self._reformatter.reformat(
            av.VideoFrame.from_ndarray(picture, format="rgb24"),
            format="yuv420p",
            dst_colorspace=Colorspace.ITU709,
            dst_color_range=ColorRange.MPEG,
            threads=1,
        )
        frame.pts, frame.time_base = self.frames, 1 / self.fps
        assert self._encoder is not None
        self._encoder.encode(frame)

    def _finish(self) -> None:
        assert self._encoder is not None
        self._encoder.encode(None)
        self._encoder.close()

    def _abandon(self) -> None:
        if self._encoder is not None:
            self._encoder.close()

    def leave(self) -> None:
        """Lets go of what another process is writing."""
        if self._encoder is not None:
            self._encoder.leave()


class GifWriter(_Writer):
    """GIF with a palette made of all its pictures, which wait in a compressed temporary file until it is known.

    Frames that viewers are too slow for, beyond 50 a second, are left out; the speed stays right.
    """

    _encoder: _Encoder | None = None
    _spool: Any = None

    def _open(self, height: int, width: int) -> None:
        os.close(open_regular(self._part, os.O_WRONLY | os.O_CREAT))  # says early if it cannot be written
        self._spool = tempfile.TemporaryFile(dir=self.path.parent)  # noqa: SIM115
        self._packed: Any = zstandard.ZstdCompressor(level=1).stream_writer(self._spool, closefd=False)
        self._seen = np.zeros(1 << 24, bool)  # by colour
        self._colours = 0
        self._statistics = Graph()
        self._source: Any = _linked(self._statistics, _buffer(self._statistics, width, height), "palettegen")

    def _add(self, picture: Array) -> None:
        self._packed.write(picture.tobytes())
        if self._colours <= _MANY_COLOURS:
            red, green, blue = (picture[:, :, i].astype(np.uint32) for i in range(3))
            self._seen[red << 16 | green << 8 | blue] = True
            self._colours = int(np.count_nonzero(self._seen))
        self._source.push(self._frame(picture, self.frames))
        _pulled(self._statistics)  # there is nothing yet, but asking has the frame taken in

    def _finish(self) -> None:
        assert self._shape is not None
        height, width, _ = self._shape
        self._packed.close()
        self._source.push(None)
        graph = Graph()
        pictures, palette = _buffer(graph, width, height), _buffer(graph, 16, 16, "rgb32")
        dither = "none" if self._colours <= _PALETTE else "bayer:bayer_scale=2"  # the same in each frame: no flicker
        use, sink = graph.add("paletteuse", f"dither={dither}:diff_mode=rectangle"), graph.add("buffersink")
        pictures.link_to(use, 0, 0)
        palette.link_to(use, 0, 1)
        use.link_to(sink)
        graph.configure()
        palette.push(_pulled(self._statistics))
        palette.push(None)
        self._encoder = _Encoder(self._part, "gif", "gif", Fraction(_GIF_TICKS), width, height, pix_fmt="pal8")
        for tick, picture in self._timed():
            pictures.push(self._frame(picture, tick))
            self._encode_all(graph)
        pictures.push(None)
        self._encode_all(graph)
        self._encoder.encode(None)
        self._encoder.close()
        self._spool.close()

    def _timed(self) -> Iterator[tuple[int, Array]]:
        """The pictures that are shown for long enough, with their times in ticks."""
        assert self._shape is not None
        due = 0
        self._spool.seek(0)
        with zstandard.ZstdDecompressor().stream_reader(self._spool, closefd=False) as unpacked:
            for number in range(self.frames):
                data = unpacked.read(math.prod(self._shape))
                tick = round(number * _GIF_TICKS / self.fps)
                if tick >= due:
                    due = tick + _GIF_FASTEST
                    yield tick, np.frombuffer(data, np.uint8).reshape(self._shape)

    def _encode_all(self, graph: Graph) -> None:
        assert self._encoder is not None
        while (frame := _pulled(graph)) is not None:
            self._encoder.encode(frame)

    def _frame(self, picture: Array, tick: int) -> Any:
        if self._colours > _MANY_COLOURS:
            picture = picture & _COARSE
        frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
        frame.pts, frame.time_base = tick, Fraction(1, _GIF_TICKS)
        return frame

    def _abandon(self) -> None:
        if self._spool is not None:
            self._spool.close()
        if self._encoder is not None:
            self._encoder.close()


class PngWriter(_Writer):
    """A directory of PNG files, frame-000000.png and so on, which lose nothing of the pictures."""

    def _open(self, height: int, width: int) -> None:
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise InvalidOption(f"{self.path}: is there already; remove it, or name another directory")
        if self._part.is_symlink():
            raise InvalidOption(f"{self._part}: is a link; remove it, or name another directory")
        self._part.mkdir(parents=True, exist_ok=True)

    def _add(self, picture: Array) -> None:
        context: Any = av.CodecContext.create("png", "w")
        context.height, context.width = picture.shape[:2]
        context.pix_fmt, context.time_base, context.thread_count = "rgb24", 1 / self.fps, 1
        frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
        frame.pts = 0
        packets = [*context.encode(frame), *context.encode(None)]
        fd = open_regular(self._part / f"frame-{self.frames:06d}.png", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with open(fd, "wb") as file:
            file.write(b"".join(map(bytes, packets)))

    def _finish(self) -> None:
        pass

    def _abandon(self) -> None:
        pass


def _pulled(graph: Graph) -> Any:
    """What comes out of a graph, or None if it waits for more."""
    try:
        return graph.pull()
    except (av.BlockingIOError, av.EOFError):
        return None


def _buffer(graph: Graph, width: int, height: int, pixels: str = "rgb24") -> Any:
    form = av.VideoFormat(pixels, width, height)
    return graph.add_buffer(width=width, height=height, format=form, time_base=Fraction(1, _GIF_TICKS))


def _linked(graph: Graph, source: Any, name: str) -> Any:
    """source, linked to a filter and that to the end of the graph."""
    node, sink = graph.add(name), graph.add("buffersink")
    source.link_to(node)
    node.link_to(sink)
    graph.configure()
    return source


def _told(path: Path, error: Any) -> RenderingError:
    return RenderingError(f"{path}: cannot be written: {error.strerror or error}")


WRITERS: dict[str, Any] = {"mp4": Mp4Writer, "gif": GifWriter, "png": PngWriter}
