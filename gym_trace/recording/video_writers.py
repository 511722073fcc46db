"""Write frames as MP4, GIF or PNG, one at a time, in bounded memory.

Only this module needs PyAV.
"""

from __future__ import annotations

import math
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zstandard

from gym_trace.data.showing.pictures import as_picture
from gym_trace.data.values import Array
from gym_trace.errors import InvalidOption, MissingExtra, RenderingError
from gym_trace.storage.local import open_new
from gym_trace.storage.staging import WorkDirectory, work_beside

try:
    import av
    from av.filter import Graph
    from av.video.reformatter import ColorRange, Colorspace, VideoReformatter
except ImportError as missing:
    raise MissingExtra(f"videos need PyAV ({missing}): pip install 'gym-trace[video]'") from missing

PART = ".part"  # suffix of an unfinished file
_BT709 = 1  # code of these colours in H.264
_GIF_TICKS = 100  # per second; the time unit of GIF
_GIF_FASTEST = 2  # ticks, minimum duration of a frame; viewers show shorter frames much longer
_PALETTE = 255  # colours of a GIF, without the transparent one
_MANY_COLOURS = 1 << 16  # with more colours, low bits are dropped, so that counting takes bounded memory
_COARSE = 0xFC  # mask of the bits kept then


class PictureWriter(Protocol):
    """Interface of a writer of frames."""

    frames: int

    def write(self, picture: Array) -> None:
        """Add an image, (H, W, 3) of uint8; all must have the same size. Raises RenderingError, OSError."""

    def close(self) -> None:
        """Finish the file and rename it to its final name. Raises RenderingError, OSError."""

    def drop(self) -> None:
        """Remove the unfinished file."""


def check_fps(fps: float) -> Fraction:
    """Return frames per second as a fraction that video files can hold. Raises InvalidOption."""
    if not (math.isfinite(fps) and 0.01 <= fps <= 1000):
        raise InvalidOption(f"fps={fps!r}: out of range; pass 0.01 to 1000 frames per second")
    return Fraction(fps).limit_denominator(1001)


class _OwnFile:
    """A file that only its opening process writes to, so that a forked child cannot damage an unfinished video."""

    def __init__(self, path: Path):
        self._file = open(open_new(path), "wb", buffering=0)  # noqa: SIM115
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
        """Add a frame; None flushes the encoder."""
        for packet in self._stream.encode(frame):
            self._container.mux(packet)

    def close(self) -> None:
        try:
            self._container.close()
        finally:
            self.leave()

    def leave(self) -> None:
        """Close the file without finishing it."""
        self._file.close()


class _Writer(ABC):
    """Base class of the writers: temporary name, images of one size, at most one encoder."""

    _encoder: Any = None

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
            raise RenderingError(f"image size changed from {then_width}x{then_height} to {width}x{height}")
        try:
            self._add(picture)
        except av.FFmpegError as error:
            raise _told(self.path, error) from error
        self.frames += 1

    def close(self) -> None:
        try:
            if self._shape is None:
                raise RenderingError(f"{self.path}: no frames to write")
            self._finish()
            self._part.replace(self.path)
        except av.FFmpegError as error:
            raise _told(self.path, error) from error

    def drop(self) -> None:
        try:
            self._abandon()
        except (av.FFmpegError, OSError):
            pass  # a full disk, say; the file is removed anyway
        finally:
            self._part.unlink(missing_ok=True)

    @abstractmethod
    def _open(self, height: int, width: int) -> None:
        """Open the file for images of this size."""

    @abstractmethod
    def _add(self, picture: Array) -> None:
        """Add an image."""

    def _finish(self) -> None:
        if self._encoder is not None:
            self._encoder.encode(None)
            self._encoder.close()

    def _abandon(self) -> None:
        if self._encoder is not None:
            self._encoder.close()


class Mp4Writer(_Writer):
    """Writes H.264 in MP4, yuv420p. Odd sizes are padded by repeating the last row or column."""

    def _open(self, height: int, width: int) -> None:
        self._padding = ((0, height % 2), (0, width % 2), (0, 0))
        self._reformatter = VideoReformatter()
        colours = dict.fromkeys(("colorspace", "color_primaries", "color_trc"), _BT709)
        self._encoder = _Encoder(
            self._part, "mp4", "libx264", self.fps, width + width % 2, height + height % 2, pix_fmt="yuv420p",
            options={"preset": "veryfast", "crf": "18"}, color_range=int(ColorRange.MPEG), **colours,
        )  # fmt: skip

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
        self._encoder.encode(frame)

    def leave(self) -> None:
        """Close the file without finishing it: another process is writing it."""
        if self._encoder is not None:
            self._encoder.leave()


class GifWriter(_Writer):
    """Writes a GIF with one palette for all frames. Frames wait in a compressed temporary file for the palette.

    Frames beyond 50 per second are skipped, because viewers cannot show them; the speed stays right.
    """

    _spool: Any = None

    def _open(self, height: int, width: int) -> None:
        os.close(open_new(self._part))  # fail early if it cannot be written
        self._spool = tempfile.TemporaryFile(dir=self.path.parent)  # noqa: SIM115
        self._packed: Any = zstandard.ZstdCompressor(level=1).stream_writer(self._spool, closefd=False)
        self._seen = np.zeros(1 << 24, bool)  # by colour
        self._colours = 0
        self._statistics = Graph()
        self._source: Any = _buffer(self._statistics, width, height)
        palette, sink = self._statistics.add("palettegen"), self._statistics.add("buffersink")
        self._source.link_to(palette)
        palette.link_to(sink)
        self._statistics.configure()

    def _add(self, picture: Array) -> None:
        self._packed.write(picture.tobytes())
        if self._colours <= _MANY_COLOURS:
            red, green, blue = (picture[:, :, i].astype(np.uint32) for i in range(3))
            self._seen[red << 16 | green << 8 | blue] = True
            self._colours = int(np.count_nonzero(self._seen))
        self._source.push(self._frame(picture, self.frames))
        _pulled(self._statistics)  # returns nothing, but makes the graph process the frame

    def _finish(self) -> None:
        assert self._shape is not None
        height, width, _ = self._shape
        self._packed.close()
        self._source.push(None)
        graph = Graph()
        pictures, palette = _buffer(graph, width, height), _buffer(graph, 16, 16, "rgb32")
        # An ordered dither is the same in each frame, so it does not flicker.
        dither = "none" if self._colours <= _PALETTE else "bayer:bayer_scale=2"
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
        super()._finish()
        self._spool.close()

    def _timed(self) -> Iterator[tuple[int, Array]]:
        """Yield the frames to show with their times in ticks; frames that are too short are skipped."""
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
        super()._abandon()


class PngWriter(_Writer):
    """Writes a directory of lossless PNG files, frame-000000.png and so on."""

    _work: WorkDirectory | None = None

    def _open(self, height: int, width: int) -> None:
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise InvalidOption(f"{self.path}: already exists; remove it or choose another directory")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._work = work_beside(self.path)  # without the frames of a process that was killed
        self._part = self._work.path / self.path.name
        self._part.mkdir()

    def _add(self, picture: Array) -> None:
        context: Any = av.CodecContext.create("png", "w")
        context.height, context.width = picture.shape[:2]
        context.pix_fmt, context.time_base, context.thread_count = "rgb24", 1 / self.fps, 1
        frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
        frame.pts = 0
        packets = [*context.encode(frame), *context.encode(None)]
        with open(open_new(self._part / f"frame-{self.frames:06d}.png"), "wb") as file:
            file.write(b"".join(map(bytes, packets)))

    def close(self) -> None:
        super().close()
        self._remove()

    def drop(self) -> None:
        self._remove()

    def _remove(self) -> None:
        if self._work is not None:
            self._work.remove()


def _pulled(graph: Graph) -> Any:
    """Return the next frame of a graph, or None if it needs more input."""
    try:
        return graph.pull()
    except (av.BlockingIOError, av.EOFError):
        return None


def _buffer(graph: Graph, width: int, height: int, pixels: str = "rgb24") -> Any:
    form = av.VideoFormat(pixels, width, height)
    return graph.add_buffer(width=width, height=height, format=form, time_base=Fraction(1, _GIF_TICKS))


def _told(path: Path, error: Any) -> RenderingError:
    return RenderingError(f"{path}: cannot be written: {error.strerror or error}")


WRITERS: dict[str, Any] = {"mp4": Mp4Writer, "gif": GifWriter, "png": PngWriter}
