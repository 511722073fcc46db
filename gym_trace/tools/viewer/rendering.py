"""Render episodes by replaying them in another process; their images are in temporary files."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import IO, Any, NamedTuple

import numpy as np

from gym_trace.data.showing.pictures import is_picture, picture_of, png
from gym_trace.errors import EnvironmentUnavailable, RenderingError, TraceError
from gym_trace.playback.trace import Trace
from gym_trace.recording.processes.fleet import Job, Lost
from gym_trace.recording.processes.local import LocalProcesses
from gym_trace.tools.replay.making import Making, replays
from gym_trace.tools.video.frames import rendered_frame
from gym_trace.tools.video.simulate import fps_of, note_on
from gym_trace.tools.viewer.container import packed
from gym_trace.tools.viewer.episode import MOST_FRAMES, RENDERED, ViewedEpisode

_MOST_BYTES = 1 << 30  # limit of all images in the temporary directory
_MOST_EPISODES = 32  # whose images are stored
_MOST_WAITING = 8  # episodes that wait to be rendered
_NICENESS = 5
_REPORT_SECONDS = 0.2  # between two messages of a process
_POLL_SECONDS = 0.2
_MESSAGE_BYTES = 4 << 20  # with more bytes of images, a message is sent at once
_START_SECONDS = 60.0  # to wait for an environment to be made
_PATIENCE_SECONDS = 1.5  # after which an episode that no page looks at makes way; pages ask three times per second


class Consent(Exception):
    """The environment can only be made if the user trusts the trace. The text describes what it would do."""


class Recipe(NamedTuple):
    """Settings of the replays, and modules to import first."""

    making: Making = Making()
    imports: Sequence[str] = ()


class Rendering:
    """The rendering of an episode, in progress or finished.

    Attributes:
        state: "running", "ready" or "failed".
        done, of: number of steps done, and the total.
        phase: "compared" with the recording, and then "rendered".
        note: note on the replay, for example that it differs from the recording.
        needs_trust: True if it failed because the user must trust the trace first.
        fps: frames per second of the environment.
        shape: height and width of an image.
        is_asked: a user asked for it; otherwise it makes way for others when no page looks at the episode.

    position: row whose picture is rendered first.
    """

    def __init__(self, number: int, trace: Trace, index: int, trust: bool, position: int = 0, is_asked: bool = True):
        self.number, self.trace, self.index, self.trust = number, trace, index, trust
        self.position, self.is_asked, self._seen = position, is_asked, time.monotonic()
        self.state, self.phase, self.done, self.of, self.error, self.note = "running", "compared", 0, 1, "", ""
        self.needs_trust, self.fps, self.shape = False, 0.0, (0, 0)
        self.has_begun = threading.Event()  # set when the environment was made, or could not be made
        self._spans: dict[int, tuple[int, int]] = {}  # begin and size in the file, by row
        self.bytes = 0
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="gym-trace-")  # noqa: SIM115 - closed by discard()

    @property
    def rows(self) -> int:
        """Return the number of rows: while it is in progress, pictures of some are missing. 0: there is no picture."""
        if not self._spans:
            return 0
        return self.of + 1 if self.state == "running" else max(self._spans) + 1

    @property
    def is_left(self) -> bool:
        """Return True if no page looks at it, and no user asked for it."""
        return not self.is_asked and time.monotonic() - self._seen > _PATIENCE_SECONDS

    def plain(self) -> dict[str, Any]:
        """Return its progress as JSON, to a page that looks at it."""
        self._seen = time.monotonic()
        steps = {"phase": self.phase, "done": min(self.done, self.of), "of": self.of}
        about = {**steps, "state": self.state, "note": self.note}
        error = {"error": self.error} if self.error else {}
        return {**about, **error, **({"consent": self.error} if self.needs_trust else {})}

    def column(self) -> dict[str, Any]:
        """Return the description of its images as a column of the episode."""
        about = {"name": RENDERED, "group": RENDERED, "kind": "frames", "dtype": "|u1", "shape": self.shape}
        return {**about, "items": 0, "labels": None, "values": None, "rows": self.rows, "frame_shape": self.shape}

    def add(self, pictures: list[tuple[int, bytes]]) -> None:
        """Store more images, with their rows. Raises OSError."""
        for row, picture in pictures:
            os.pwrite(self._file.fileno(), picture, self.bytes)
            self._spans[row] = self.bytes, len(picture)
            self.bytes += len(picture)

    def frames(self, start: int, count: int) -> bytes:
        """Return images in the form of ViewedEpisode.frames()."""
        rows = range(max(0, start), min(start + min(count, MOST_FRAMES), self.rows))
        spans = [(row, *self._spans[row]) for row in rows if row in self._spans]
        images = [(str(row), os.pread(self._file.fileno(), size, begin)) for row, begin, size in spans]
        return packed({"mime": "image/png", "rows": self.rows}, images)

    def fail(self, error: str) -> None:
        """Store why there are no images, or no further ones."""
        self.state, self.error = "failed", error
        self.has_begun.set()

    def discard(self) -> None:
        """Delete its images."""
        self._file.close()


class Renderings:
    """Renders episodes one after another, and stores the images of the latest ones until it is closed.

    recipe: settings of the replays.
    """

    def __init__(self, recipe: Recipe = Recipe()):  # noqa: B008 - it is immutable
        self._recipe = recipe
        self._renderings: OrderedDict[Any, Rendering] = OrderedDict()  # by trace and key of the episode
        self._waiting: list[Rendering] = []
        self._current: Rendering | None = None
        self._numbers = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_ending = False

    def start(
        self, trace: int, viewed: ViewedEpisode, trust: bool, position: int = 0, is_asked: bool = True
    ) -> Rendering:
        """Return the rendering of an episode; start one if necessary.

        If a user asked for it, waits until its environment has been made, unless other episodes are rendered first.
        position: row whose picture is rendered first. Raises Consent, EnvironmentUnavailable, RenderingError.
        """
        key = trace, viewed.key
        with self._lock:
            rendering = self._renderings.get(key)
            if rendering is None or rendering.state == "failed":
                if len(self._waiting) >= _MOST_WAITING:
                    raise RenderingError(f"{_MOST_WAITING} episodes wait to be rendered; try again later")
                if rendering is not None:
                    rendering.discard()
                self._numbers += 1
                trust = trust or self._recipe.making.trust
                rendering = Rendering(self._numbers, viewed.trace, viewed.index, trust, position, is_asked)
                self._renderings[key] = rendering
                self._renderings.move_to_end(key)
                self._waiting.append(rendering)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, daemon=True)
                    self._thread.start()
        if not is_asked:
            return rendering
        rendering.is_asked = True
        if rendering is self._current or (self._current is None and self._waiting[:1] == [rendering]):
            rendering.has_begun.wait(_START_SECONDS)
        if rendering.needs_trust:
            raise Consent(rendering.error)
        if rendering.state == "failed":
            raise RenderingError(rendering.error)
        return rendering

    def numbered(self, number: int) -> Rendering:
        """Return a rendering by its number. Raises LookupError."""
        with self._lock:
            for rendering in self._renderings.values():
                if rendering.number == number:
                    return rendering
        raise LookupError(f"no rendering {number}; ask for it again")

    def of(self, trace: int, viewed: ViewedEpisode) -> Rendering | None:
        """Return the rendering of an episode; None without images."""
        with self._lock:
            rendering = self._renderings.get((trace, viewed.key))
            return None if rendering is None or not rendering.rows or rendering.state == "failed" else rendering

    def close(self) -> None:
        """Stop rendering, and delete all images."""
        self._is_ending = True
        if self._thread is not None:
            self._thread.join()
        for rendering in self._renderings.values():
            rendering.discard()
        self._renderings.clear()

    def _work(self) -> None:
        processes = LocalProcesses()
        while not self._is_ending:
            with self._lock:
                rendering = self._current = self._waiting.pop(0) if self._waiting else None
            if rendering is None:
                time.sleep(_POLL_SECONDS)
                continue
            try:
                self._render(processes, rendering)
            except (TraceError, OSError) as error:
                rendering.fail(str(error))
            finally:
                processes.kill(rendering.number)
                self._discard_oldest(rendering)

    def _render(self, processes: LocalProcesses, rendering: Rendering) -> None:
        rendering.of = len(rendering.trace[rendering.index])
        arguments = (
            rendering.trace,
            rendering.index,
            self._recipe._replace(making=self._recipe.making._replace(trust=rendering.trust)),
            rendering.position,
        )
        processes.start(rendering.number, Job("rendering", _rendered, arguments, niceness=_NICENESS))
        while rendering.state == "running" and not self._is_ending:
            if rendering.is_left and self._waiting:
                rendering.fail("another episode was opened before this one was rendered")
                return
            for _, message in processes.poll(_POLL_SECONDS):
                if rendering.state != "running":
                    return
                if isinstance(message, Lost):
                    rendering.needs_trust = message.kind is EnvironmentUnavailable and "--trust" in message.reason
                    rendering.fail(message.reason)
                    return
                kind, *values = message
                if kind == "pictures":
                    (rendering.phase, rendering.done, rendering.fps, rendering.shape), pictures = values
                    rendering.add(pictures)
                    self._discard_oldest(rendering)
                elif kind == "done":
                    rendering.note, rendering.state = values[0], "ready"
                rendering.has_begun.set()

    def _discard_oldest(self, current: Rendering) -> None:
        """Discard the oldest renderings, except the current one, while there are too many episodes or bytes."""
        with self._lock:
            for key, rendering in list(self._renderings.items()):
                size = sum(each.bytes for each in self._renderings.values())
                if size <= _MOST_BYTES and len(self._renderings) <= _MOST_EPISODES:
                    return
                if rendering is not current and rendering.state != "running":
                    self._renderings.pop(key).discard()
        if current.bytes > _MOST_BYTES:
            current.fail("its pictures take more than 1 GB; use gym-trace render")


# -- in the process ---------------------------------------------------------------------------------------------------


def _rendered(connection: Any, trace: Trace, index: int, recipe: Recipe, position: int) -> None:
    """Render an episode from a row on, then its rows before, and send the images. This runs in the other process."""
    for module in recipe.imports:
        import_module(module)
    report = _Report(connection)
    for played in replays(trace, [index], recipe.making, "rgb_array", report.step):
        first = min(max(0, position), len(trace[index]))
        verdict = played.replay.film(played.position, report.watch(range(first, len(trace[index]) + 1)))
        if first:
            played.replay.film(played.position, report.watch(range(first)))
        note = f"{note_on(verdict)}; shown: the recorded states" if verdict.from_states else note_on(verdict)
        report.end(note if report.pictures else "", failed=not report.pictures and note)


class _Report:
    """Sends images and progress, a few times per second."""

    def __init__(self, connection: Any):
        self._connection = connection
        self._done, self._sent = 0, 0.0
        self._waiting: list[tuple[int, bytes]] = []
        self._bytes = 0
        self._shape, self._fps = (0, 0), 0.0
        self.pictures = 0

    def step(self) -> None:
        """Count a simulated step."""
        self._done += 1
        if time.monotonic() > self._sent + _REPORT_SECONDS:
            self._send()

    def watch(self, rows: range) -> Callable[[Any, int], None]:
        """Return a function that adds the images of some rows while an episode is filmed."""

        def watched(env: Any, row: int) -> None:
            if row in rows:
                self.picture(row, rendered_frame(env), fps_of(env))

        return watched

    def picture(self, row: int, frame: Any, fps: float) -> None:
        """Add the image of a row. Raises RenderingError."""
        array = np.asarray(frame)
        if not is_picture(array.dtype, array.shape):
            raise RenderingError(f"render() returned {array.dtype} of shape {array.shape}, which is not an image")
        array = picture_of(array)
        self._shape, self._fps = (array.shape[0], array.shape[1]), fps
        self._waiting.append((row, png(array, level=1)))
        self._bytes += len(self._waiting[-1][1])
        self.pictures += 1
        if self.pictures == 1 or self._bytes > _MESSAGE_BYTES:
            self._send()

    def end(self, note: str, failed: str | bool) -> None:
        """Send the remaining images and a note. Raises RenderingError if it failed."""
        if failed:
            raise RenderingError(f"not rendered: {failed}")
        self._send()
        self._connection.send(("done", note))

    def _send(self) -> None:
        # The episode is compared with the recording first. The first image is that of the reset.
        done = ("rendered", self.pictures - 1) if self.pictures else ("compared", self._done)
        progress = *done, self._fps, self._shape
        self._connection.send(("pictures", progress, self._waiting))
        self._waiting, self._bytes, self._sent = [], 0, time.monotonic()
