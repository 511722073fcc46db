"""Pictures of episodes that are simulated again: in a process of its own, kept in a temporary file."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
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
from gym_trace.tools.video.simulate import fps_of
from gym_trace.tools.viewer.container import packed
from gym_trace.tools.viewer.episode import MOST_FRAMES, RENDERED, ViewedEpisode

_MOST_BYTES = 1 << 30  # size of all images in the temporary directory
_MOST_KEPT = 32  # episodes
_MOST_WAITING = 8  # episodes that wait to be rendered
_NICENESS = 5
_REPORT = 0.2  # seconds between two messages of a process
_POLL = 0.2  # seconds
_MOST_MESSAGE = 4 << 20  # bytes
_START = 60.0  # seconds until an environment must have been made


class Consent(Exception):
    """The environment can only be made if the user trusts the trace. The text describes what it would do."""


class Recipe(NamedTuple):
    """Settings of the replays, and modules to import first."""

    making: Making = Making()
    imports: Sequence[str] = ()


class Rendering:
    """An episode that is rendered, or was.

    Attributes:
        state: "running", "ready" or "failed".
        done, of: steps so far, and all.
        phase: "compared" with the recording, and then "rendered".
        note: what is known of the replay, such as that it differs from the recording.
        needs_trust: whether the error is that the user has to trust the trace.
        fps: frames per second of the environment.
        shape: height and width of a picture.
    """

    def __init__(self, number: int, trace: Trace, index: int, trust: bool):
        self.number, self.trace, self.index, self.trust = number, trace, index, trust
        self.state, self.phase, self.done, self.of, self.error, self.note = "running", "compared", 0, 1, "", ""
        self.needs_trust, self.fps, self.shape = False, 0.0, (0, 0)
        self.begun = threading.Event()  # it was made, or failed
        self.ends: list[int] = [0]  # in the file, of each picture
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="gym-trace-")  # noqa: SIM115 - closed by drop()

    @property
    def rows(self) -> int:
        """Return the number of pictures."""
        return len(self.ends) - 1

    def plain(self) -> dict[str, Any]:
        """Return its progress as JSON."""
        steps = {"phase": self.phase, "done": min(self.done, self.of), "of": self.of}
        about = {**steps, "state": self.state, "note": self.note}
        error = {"error": self.error} if self.error else {}
        return {**about, **error, **({"consent": self.error} if self.needs_trust else {})}

    def column(self) -> dict[str, Any]:
        """Return what stands for it among the columns of its episode."""
        about = {"name": RENDERED, "group": RENDERED, "kind": "frames", "dtype": "|u1", "shape": self.shape}
        return {**about, "items": 0, "labels": None, "rows": self.rows, "frame_shape": self.shape}

    def add(self, pictures: list[bytes]) -> None:
        """Keep more pictures. Raises OSError."""
        for picture in pictures:
            os.pwrite(self._file.fileno(), picture, self.ends[-1])
            self.ends.append(self.ends[-1] + len(picture))

    def frames(self, start: int, count: int) -> bytes:
        """Return pictures in the form of ViewedEpisode.frames()."""
        rows = range(max(0, start), min(start + min(count, MOST_FRAMES), self.rows))
        places = [(row, self.ends[row], self.ends[row + 1]) for row in rows]
        found = [(str(row), os.pread(self._file.fileno(), end - begin, begin)) for row, begin, end in places]
        return packed({"mime": "image/png", "rows": self.rows}, found)

    def fail(self, error: str) -> None:
        """Note why there is no picture, or no further one."""
        self.state, self.error = "failed", error
        self.begun.set()

    def drop(self) -> None:
        """Give its pictures up."""
        self._file.close()


class Renderings:
    """Renders episodes one after the other, and keeps the pictures of the last ones. Close it at the end.

    recipe: how environments are made.
    """

    def __init__(self, recipe: Recipe = Recipe()):  # noqa: B008 - it is immutable
        self._recipe = recipe
        self._kept: OrderedDict[Any, Rendering] = OrderedDict()
        self._waiting: list[Rendering] = []
        self._current: Rendering | None = None
        self._numbers = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_ending = False

    def start(self, trace: int, viewed: ViewedEpisode, trust: bool) -> Rendering:
        """Render an episode, unless it was. Return once its environment has been made, or if others come first.

        Raises Consent, EnvironmentUnavailable, RenderingError.
        """
        key = trace, viewed.key
        with self._lock:
            known = self._kept.get(key)
            if known is None or known.state == "failed":
                if len(self._waiting) >= _MOST_WAITING:
                    raise RenderingError(f"{_MOST_WAITING} episodes wait to be rendered; try again later")
                if known is not None:
                    known.drop()
                self._numbers += 1
                known = Rendering(self._numbers, viewed.trace, viewed.index, trust or self._recipe.making.trust)
                self._kept[key] = known
                self._kept.move_to_end(key)
                self._waiting.append(known)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, daemon=True)
                    self._thread.start()
        if known is self._current or (self._current is None and self._waiting[:1] == [known]):
            known.begun.wait(_START)
        if known.needs_trust:
            raise Consent(known.error)
        if known.state == "failed":
            raise RenderingError(known.error)
        return known

    def numbered(self, number: int) -> Rendering:
        """Return a rendering by its number. Raises LookupError."""
        with self._lock:
            for known in self._kept.values():
                if known.number == number:
                    return known
        raise LookupError(f"no rendering {number}; ask for it again")

    def of(self, trace: int, viewed: ViewedEpisode) -> Rendering | None:
        """Return the rendering of an episode; None without pictures."""
        with self._lock:
            known = self._kept.get((trace, viewed.key))
            return None if known is None or not known.rows else known

    def close(self) -> None:
        """Stop rendering, and remove the pictures."""
        self._is_ending = True
        if self._thread is not None:
            self._thread.join()
        for known in self._kept.values():
            known.drop()
        self._kept.clear()

    def _work(self) -> None:
        processes = LocalProcesses()
        while not self._is_ending:
            with self._lock:
                rendering = self._current = self._waiting.pop(0) if self._waiting else None
            if rendering is None:
                time.sleep(_POLL)
                continue
            try:
                self._render(processes, rendering)
            except (TraceError, OSError) as error:
                rendering.fail(str(error))
            finally:
                processes.kill(rendering.number)
                self._make_room(rendering)

    def _render(self, processes: LocalProcesses, rendering: Rendering) -> None:
        rendering.of = len(rendering.trace[rendering.index])
        arguments = (
            rendering.trace,
            rendering.index,
            self._recipe._replace(making=self._recipe.making._replace(trust=rendering.trust)),
        )
        processes.start(rendering.number, Job("rendering", _rendered, arguments, niceness=_NICENESS))
        while rendering.state == "running" and not self._is_ending:
            for _, message in processes.poll(_POLL):
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
                    self._make_room(rendering)
                elif kind == "done":
                    rendering.note, rendering.state = values[0], "ready"
                rendering.begun.set()

    def _make_room(self, kept: Rendering) -> None:
        with self._lock:
            for key, known in list(self._kept.items()):
                if sum(one.ends[-1] for one in self._kept.values()) <= _MOST_BYTES and len(self._kept) <= _MOST_KEPT:
                    return
                if known is not kept and known.state != "running":
                    self._kept.pop(key).drop()
        if kept.ends[-1] > _MOST_BYTES:
            kept.fail("its pictures take more than 1 GB; use gym-trace render")


# -- in the process ---------------------------------------------------------------------------------------------------


def _rendered(connection: Any, trace: Trace, index: int, recipe: Recipe) -> None:
    """Body of the process: render an episode, and send its pictures."""
    for module in recipe.imports:
        import_module(module)
    report = _Report(connection)
    for played in replays(trace, [index], recipe.making, "rgb_array", report.step):

        def watch(env: Any, step: int) -> None:
            report.picture(rendered_frame(env), fps_of(env))

        verdict = played.replay.film(played.position, watch)
        note = "" if verdict.matches else verdict.reason or f"differs {verdict.difference}"
        report.end(note if report.pictures else "", failed=not report.pictures and note)


class _Report:
    """Sends what was rendered, a few times a second."""

    def __init__(self, connection: Any):
        self._connection = connection
        self._done, self._sent = 0, 0.0
        self._waiting: list[bytes] = []
        self._bytes = 0
        self._shape, self._fps = (0, 0), 0.0
        self.pictures = 0

    def step(self) -> None:
        """Count a simulated step."""
        self._done += 1
        if time.monotonic() > self._sent + _REPORT:
            self._send()

    def picture(self, frame: Any, fps: float) -> None:
        """Take in a picture. Raises RenderingError."""
        array = np.asarray(frame)
        if not is_picture(array.dtype, array.shape):
            raise RenderingError(f"render() returned {array.dtype} of shape {array.shape}, which is not an image")
        array = picture_of(array)
        self._shape, self._fps = (array.shape[0], array.shape[1]), fps
        self._waiting.append(png(array, level=1))
        self._bytes += len(self._waiting[-1])
        self.pictures += 1
        if self._bytes > _MOST_MESSAGE:
            self._send()

    def end(self, note: str, failed: str | bool) -> None:
        """Send the rest. Raises RenderingError without any picture."""
        if failed:
            raise RenderingError(f"not rendered: {failed}")
        self._send()
        self._connection.send(("done", note))

    def _send(self) -> None:
        # The episode is compared with the recording first. The first picture is that of the reset.
        done = ("rendered", self.pictures - 1) if self.pictures else ("compared", self._done)
        progress = *done, self._fps, self._shape
        self._connection.send(("pictures", progress, self._waiting))
        self._waiting, self._bytes, self._sent = [], 0, time.monotonic()
