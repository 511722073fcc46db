"""The thread that encodes blocks and writes them, and how it is waited for, paused and stopped."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
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
        self._asks: SimpleQueue[tuple[bool, Any]] = SimpleQueue()  # all in C: signals and collections may fall anywhere
        self._running = False
        self.started = False  # whether there was anything to record
        self._draining = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = self._closing = self._finished = False

    # -- called by the recorder ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread, unless it runs or the interpreter is shutting down."""
        self.started = True
        if self._thread is None and not self._stop:
            self._thread = thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._running = True
            try:
                thread.start()
            except RuntimeError:  # shutting down: what is left is written by close()
                self._running, self._thread = False, None

    def put(self, block: Any) -> None:
        """Takes a full block."""
        self._blocks.append(block)

    def work(self, everything: bool, ahead: int = 0) -> None:
        """Has the blocks encoded, and whole chunks written, or all that was recorded; returns when that is done.

        ahead: how many blocks may wait without this waiting for them. If it cannot be done, .failure says why.
        """
        done = threading.Lock()
        done.acquire()
        self._asks.put((everything, done))
        if 0 < len(self._blocks) <= ahead and self._running:
            return
        while self._running:
            if done.acquire(timeout=1.0):
                return
        self._drain(everything)

    def pause(self) -> None:
        """Writes everything and ends the thread, so that a fork finds no lock held."""
        thread, self._stop = self._thread, True
        try:
            self._await_end()
            if thread is None:
                self._drain(everything=True)
            else:
                thread.join()
        finally:
            if not self._running:
                self._thread = None
            self._stop = self._closing

    def close(self, summary: Callable[[], dict[str, Any]]) -> None:
        """Writes everything and seals it. summary: what the manifest is to say at the end."""
        self._summary = summary
        self._closing = self._stop = True
        if self._thread is threading.current_thread():
            return  # collected as garbage in our own thread, which finishes on its way out
        self._await_end()
        self._finish()

    def _await_end(self) -> None:
        """As Thread.join(), which takes a thread for dead when Ctrl-C falls into it."""
        while self._running:
            done = threading.Lock()
            done.acquire()
            self._asks.put((False, done))
            done.acquire(timeout=0.1)

    def abandon(self) -> None:
        """Lets go of the files as they are; in a forked child, whose parent goes on with them."""
        if self._chunks.writer is not None:
            self._chunks.writer.abandon()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        due = time.monotonic() + self._interval
        asks: list[tuple[bool, Any]] = []
        try:
            while not self._stop:
                with contextlib.suppress(Empty):
                    asks.append(self._asks.get(timeout=min(3600.0, max(0.0, due - time.monotonic()))))
                    while True:
                        asks.append(self._asks.get_nowait())
                everything = any(whole for whole, _ in asks) or time.monotonic() >= due
                self._drain(everything)
                if everything:
                    due = time.monotonic() + self._interval
                while asks:
                    asks.pop()[1].release()
            if self._closing:
                self._finish()
            else:
                self._drain(everything=True)
        finally:
            self._running = False
            while not self._asks.empty():
                asks.append(self._asks.get_nowait())
            for _, done in asks:
                done.release()

    def _drain(self, everything: bool) -> None:
        """Encodes the blocks that there are, and with everything=True also writes what does not fill a chunk."""
        with self._draining:
            if self.failure is not None or self._finished:
                return
            try:
                current = self._current()  # before the queue is looked at: it may get there meanwhile, and be full
                for _ in range(len(self._blocks)):
                    self._encode(self._blocks[0])
                    self._blocks.popleft()
                if everything:
                    self._encode(current)
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
