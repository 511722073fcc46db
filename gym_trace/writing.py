"""The thread that encodes blocks and writes them, and how it is waited for, paused and stopped."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from gym_trace.chunks import ChunkWriter
from gym_trace.encoder import Segment


class BlockEncoder(Protocol):
    """Turns what was added to blocks into segments."""

    complaints: dict[str, str]

    def take(self, block: Any) -> list[Segment]:
        """What was added to block since the last call."""


class BlockWriter:
    """Writes blocks in their order, in a thread of its own.

    The caller waits for the thread now and then: what the thread does takes as long either way, but both at once would
    take turns at the interpreter lock, thousands of times a second. Yet it is done in a thread, where Ctrl-C cannot
    tear it, and which goes on when the caller is busy.

    Args:
        current: gives the block that is being filled.
        notice: called, from any thread, when the caller's thread should look at .failure and at complaints.
        flush_seconds: after which all that was recorded has to be written, in seconds.
    """

    def __init__(
        self,
        name: str,
        encoder: BlockEncoder,
        chunks: ChunkWriter,
        current: Callable[[], Any],
        notice: Callable[[], None],
        flush_seconds: float,
    ):
        self.failure: Exception | None = None
        self._name = name
        self._encoder, self._chunks = encoder, chunks
        self._current, self._notice = current, notice
        self._interval = max(0.005, flush_seconds / 2)
        self._blocks: deque[Any] = deque()
        self._lock = threading.Lock()  # a plain lock is let go of even where Ctrl-C falls, a condition may not be
        self._turned = threading.Condition(self._lock)
        self._asked = self._done = 0  # turns of the thread that were asked for, and those that it has taken
        self._all_asked = False  # whether the next turn is to write everything
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

    def put(self, block: Any) -> None:
        """Takes a full block."""
        self._blocks.append(block)

    def work(self, everything: bool, ahead: int = 0) -> None:
        """Has the blocks encoded, and whole chunks written, or all that was recorded; returns when that is done.

        ahead: how many blocks may wait without this waiting for them. If it cannot be done, .failure says why.
        """
        if 0 < len(self._blocks) <= ahead and self._thread_lives():
            self._wake.set()
            return
        with self._lock:
            self._asked += 1
            turn = self._asked
            self._all_asked |= everything
            while self._done < turn and self._thread_lives():
                self._wake.set()
                self._turned.wait(1.0)
        if self._done < turn:
            self._drain(everything)

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
        if self._chunks.writer is not None:
            self._chunks.writer.abandon()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        due = time.monotonic() + self._interval
        while not self._stop:
            self._wake.wait(max(0.0, due - time.monotonic()))
            self._wake.clear()
            with self._lock:
                turn = self._asked
                everything = self._all_asked or time.monotonic() >= due
                self._all_asked = False
            self._drain(everything)
            if everything:
                due = time.monotonic() + self._interval
            with self._lock:
                self._done = turn
                self._turned.notify_all()
        if self._closing:
            self._finish()
        with self._lock:
            self._turned.notify_all()

    def _thread_lives(self) -> bool:
        return self._thread is not None and not self._stop and self._thread.is_alive()

    def _drain(self, everything: bool) -> None:
        """Encodes the blocks that there are, and with everything=True also writes what does not fill a chunk."""
        with self._draining:
            if self.failure is not None or self._finished:
                return
            try:
                for _ in range(len(self._blocks)):
                    self._encode(self._blocks[0])
                    self._blocks.popleft()
                if everything:
                    self._encode(self._current())
                    self._chunks.write()
                if self._chunks.writer is not None:
                    self._chunks.writer.seal_if_due()
            except Exception as error:  # whatever it is, it must reach the caller's thread
                self._fail(error)

    def _encode(self, block: Any) -> None:
        for segment in self._encoder.take(block):
            self._chunks.add(segment)
        if self._encoder.complaints:
            self._notice()

    def _fail(self, error: Exception) -> None:
        """Ends recording: what was written stays, what was not is dropped."""
        self.failure = error
        self._blocks.clear()
        self.abandon()
        self._notice()

    def _finish(self) -> None:
        self._drain(everything=True)
        with self._draining:
            if self._finished:
                return
            self._finished = True
            writer = self._chunks.writer
            if writer is not None and self.failure is None:
                try:
                    writer.close(self._summary())
                except Exception as error:  # as in _drain
                    self._fail(error)
