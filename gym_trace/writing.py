"""The thread that joins segments to chunks and writes them, and how it is stopped, paused and waited for."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from gym_trace.encoder import Segment, joined
from gym_trace.format.writer import TraceWriter
from gym_trace.values import Array


class SegmentWriter:
    """Writes segments in their order, in a thread of its own that starts with the first of them.

    Args:
        open_writer: makes the files when there is something to write.
        take_rest: called when all that was recorded has to be written; puts what has not been put yet.
        notice: called, from any thread, when the caller's thread should look at .failure.
        chunk_bytes: how much makes a chunk.
        flush_seconds: after which all that was recorded has to be written, in seconds.
    """

    def __init__(
        self,
        name: str,
        open_writer: Callable[[], TraceWriter],
        take_rest: Callable[[], None],
        notice: Callable[[], None],
        chunk_bytes: int,
        flush_seconds: float,
    ):
        self.writer: TraceWriter | None = None
        self.failure: Exception | None = None
        self.spare: list[list[Array]] = []  # buffers to be used again
        self._name = name
        self._open_writer, self._take_rest, self._notice = open_writer, take_rest, notice
        self._chunk_bytes = chunk_bytes
        self._interval = max(0.005, flush_seconds / 2)
        self._segments: deque[Segment] = deque()
        self._waiting = 0  # bytes in _segments and in the chunk being written
        self._lock = threading.Lock()  # a plain lock is let go of even where Ctrl-C falls, a condition may not be
        self._room = threading.Condition(self._lock)
        self._wake = threading.Event()
        self._draining = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = self._closing = self._finished = False

    # -- called by the recorder ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread, unless it runs or the interpreter is shutting down."""
        if self._thread is None and not self._stop:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # shutting down: what is left is written by close()
                return
            self._thread = thread

    def wait_for_room(self) -> None:
        """Waits while a slow disk has too much to write: memory stays bounded, the run slows down."""
        with self._lock:
            while self._waiting > self._chunk_bytes and self.failure is None and self._thread_lives():
                self._wake.set()
                self._room.wait(1.0)
        if self._waiting > self._chunk_bytes and not self._thread_lives():
            self._drain(everything=False)

    def put(self, segment: Segment) -> None:
        """Takes a segment, to be written in its turn."""
        with self._lock:
            if self.failure is None:
                self._segments.append(segment)
                self._waiting += segment.size
        if self._waiting >= self._chunk_bytes:
            self._wake.set()

    def flush(self) -> None:
        """Returns when all that was recorded is written, or .failure says why not."""
        self._drain(everything=True)

    def pause(self) -> bool:
        """Writes everything and ends the thread, so that a fork finds no lock held; returns whether there was one."""
        thread, self._stop = self._thread, True
        self._wake.set()
        if thread is not None:
            thread.join()
        self._thread = None
        self._stop = self._closing
        self._drain(everything=True)
        return thread is not None

    def close(self, summary: Callable[[], dict[str, Any]]) -> None:
        """Writes everything and seals it. summary: what the manifest is to say at the end."""
        self._summary = summary
        self._closing = self._stop = True
        self._wake.set()
        thread = self._thread
        if thread is threading.current_thread():
            return  # collected as garbage in our own thread, which finishes on its way out
        if thread is not None:
            thread.join()
        self._finish()

    def abandon(self) -> None:
        """Lets go of the files as they are; in a forked child, whose parent goes on with them."""
        if self.writer is not None:
            self.writer.abandon()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        due = time.monotonic() + self._interval
        while not self._stop:
            self._wake.wait(max(0.0, due - time.monotonic()))
            self._wake.clear()
            flush = time.monotonic() >= due
            self._drain(flush)
            if flush:
                due = time.monotonic() + self._interval
        if self._closing:
            self._finish()

    def _thread_lives(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _drain(self, everything: bool) -> None:
        """Writes whole chunks while there are any, and with everything=True also what does not fill one."""
        with self._draining:
            if self.failure is not None:
                self.abandon()  # by the one that holds the lock: nobody is writing
            if self.failure is not None or self._finished:
                return
            try:
                if everything:
                    self._take_rest()
                rest = len(self._segments) if everything else 0  # not what comes meanwhile, or it may never end
                while self._segments and (rest > 0 or self._waiting >= self._chunk_bytes):
                    rest -= self._write_chunk()
                if self.writer is not None:
                    self.writer.seal_if_due()
            except Exception as error:  # whatever it is, it must reach the caller's thread
                self.fail(error)
                self.abandon()

    def _write_chunk(self) -> int:
        """Writes what makes a chunk; returns how many segments that were."""
        group: list[Segment] = []
        size = 0
        while self._segments and (not group or size + self._segments[0].size <= self._chunk_bytes):
            group.append(self._segments.popleft())
            size += group[-1].size
        fragments, columns = joined(group)
        if len(fragments):
            if self.writer is None:
                self.writer = self._open_writer()
            self.writer.write(fragments, columns)
        self.spare += [segment.done_with for segment in group if segment.done_with]
        with self._lock:
            self._waiting -= size
            self._room.notify()
        return len(group)

    def fail(self, error: Exception) -> None:
        """Ends recording: what was written stays, what was not is dropped."""
        with self._lock:
            self.failure = self.failure or error
            self._segments.clear()
            self._waiting = 0
            self._room.notify()
        self._wake.set()
        self._notice()

    def _finish(self) -> None:
        self._drain(everything=True)
        with self._draining:
            if self._finished:
                return
            self._finished = True
            if self.writer is not None and self.failure is None:
                try:
                    self.writer.close(self._summary())
                except Exception as error:  # as in _drain
                    self.fail(error)
                    self.abandon()
