"""Blocks encoded and written in their order, and the thread that writes them: how it is waited for and stopped."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from gym_trace.recording.chunk_builder import ChunkWriter
from gym_trace.recording.segment import Segment


class BlockEncoder(Protocol):
    """Turns what was added to blocks into segments."""

    complaints: dict[str, str]

    def begun(self, block: Any) -> Any:
        """The progress at the start of the first block."""

    def encoded(self, progress: Any, blocks: list[Any], partly: bool) -> tuple[Any, list[Segment]]:
        """What was added to blocks since progress, which was in the first of them, and the progress after it.

        partly: whether the last block counts, which is still being filled.

        Changes nothing, so that whoever is interrupted in it, or overtaken, can do it again.
        """


class _Node:
    """Encoded segments, and how far they go. A chain of links grows at its end, by whoever is the first to do so."""

    def __init__(self, progress: Any, segments: list[Segment], total: int, since: float):
        self.progress, self.segments = progress, segments
        self.total = total  # bytes of all segments so far
        self.since = since  # nothing in its segments, or in what comes after it, is older
        self._next: dict[str, _Node] = {}

    @property
    def next(self) -> _Node | None:
        return self._next.get("")

    def append(self, link: _Node) -> bool:
        """Whether link is the next one from now on. In one call of C, which neither threads nor signals can part."""
        return self._next.setdefault("", link) is link


class BlockWriter:
    """Encodes blocks, and writes them in a thread of its own.

    Encoding changes nothing but the chain of what is encoded, by one link at a time: any thread may do it, and be torn
    out of it by Ctrl-C. The caller does it, whose processor has the values at hand. Writing is for the thread, which
    nothing tears, and which goes on when the caller is busy. The caller of single steps waits for it: writing takes as
    long either way, but both at once would take turns at the interpreter lock, thousands of times a second.

    Args:
        progress: where the encoder begins.
        current: gives the block that is being filled; it and those before it are linked by their attribute "before",
            and no row of it is older than its attribute "created", of time.monotonic().
        notice: called, from any thread, when the caller's thread should look at .failure and at complaints.
        flush_seconds: after which all that was recorded has to be written, in seconds.
    """

    def __init__(
        self,
        name: str,
        encoder: BlockEncoder,
        progress: Any,
        chunks: ChunkWriter,
        current: Callable[[], Any],
        notice: Callable[[], None],
        flush_seconds: float,
    ):
        self.failure: Exception | None = None
        self._name = name
        self._encoder, self._chunks = encoder, chunks
        self._written = _Node(progress, [], 0, time.monotonic())
        self._current, self._notice = current, notice
        self._unwritten_since = self._written_until = time.monotonic()
        self._interval = max(0.005, flush_seconds / 2)
        self._pause = self._interval  # less where writing takes long, on a busy machine
        self._took = 0.0  # seconds that writing took of late
        self.patience = self._interval / 4  # seconds that a caller may let a block grow, where encoding takes long
        self._asks: SimpleQueue[tuple[bool, Any]] = SimpleQueue()  # all in C: signals and collections may fall anywhere
        self.running = False  # the thread
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
            self.running = True
            self._unwritten_since = self._written_until = time.monotonic()
            try:
                thread.start()
            except RuntimeError:  # shutting down: what is left is written by close()
                self.running, self._thread = False, None

    def advance(self) -> None:
        """Encodes all blocks but the current one, and has them written where that makes a chunk.

        Where the thread is writing already, because it was time to, this waits for it, too.
        """
        encoded = self.encode()
        if encoded is None or encoded - self._written.total >= self._chunks.chunk_bytes or self._draining.locked():
            self.work(everything=False)

    def catch_up(self) -> None:
        """Waits for the thread if it is late: beside a caller that goes on it gets half of the process at most."""
        if self.running and time.monotonic() - self._written_until > 1.2 * self._pause:
            self.work(everything=True)

    def encode(self) -> int | None:
        """Encodes all blocks but the current one; returns the bytes of all so far, or None if they cannot be."""
        try:
            return self._encode(partly=False).total
        except Exception:  # the thread comes upon it likewise, after what is before it, and says so
            return None

    def progress(self) -> Any:
        """The encoder's progress after everything that was recorded, or None if it cannot be encoded."""
        try:
            return self._encode(partly=True).progress
        except Exception:  # the thread comes upon it likewise, and says so
            return None

    def work(self, everything: bool) -> None:
        """Has whole chunks written, or all that was recorded; returns when that is done, or .failure says why not."""
        self.wait(self.ask(everything), everything)

    def ask(self, everything: bool = False) -> Any:
        """Has the thread do as work() does, and returns what wait() needs."""
        done = threading.Lock()
        done.acquire()
        self._asks.put((everything, done))
        return done

    def wait(self, done: Any, everything: bool = False) -> None:
        """Returns when what was asked for is done; does it here if there is no thread."""
        while self.running:
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
            if not self.running:
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
        while self.running:
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
        asks: list[tuple[bool, Any]] = []
        try:
            while not self._stop:
                due = self._unwritten_since + self._pause
                with contextlib.suppress(Empty):
                    asks.append(self._asks.get(timeout=min(3600.0, max(0.0, due - time.monotonic()))))
                    while True:
                        asks.append(self._asks.get_nowait())
                self._drain(everything=any(whole for whole, _ in asks))
                if time.monotonic() >= self._unwritten_since + self._pause:
                    self._drain(everything=True)
                while asks:
                    asks.pop()[1].release()
            if self._closing:
                self._finish()
            else:
                self._drain(everything=True)
        finally:
            self.running = False
            while not self._asks.empty():
                asks.append(self._asks.get_nowait())
            for _, done in asks:
                done.release()

    def _encode(self, partly: bool) -> _Node:
        """Encodes the blocks that there are, and with partly=True also the current one. Returns the last link."""
        while (link := self._next_link(partly)) is None:
            pass
        return link

    def _next_link(self, partly: bool) -> _Node | None:
        """As _encode(), or None if another thread was quicker, so that there may be more to encode now."""
        last = self._written
        while (following := last.next) is not None:
            last = following
        blocks = _blocks_since(last.progress.block, self._current())
        if blocks is None:
            return None
        progress, segments = self._encoder.encoded(last.progress, blocks, partly)
        if self._encoder.complaints:
            self._notice()
        if progress is last.progress:
            return last
        total = last.total + sum(segment.size for segment in segments)
        link = _Node(progress, segments, total, blocks[0].created)
        if not last.append(link):
            return None
        progress.block.before = None  # so that their memory can be used again
        return link

    def _drain(self, everything: bool) -> None:
        """Adds what is encoded to chunks, and with everything=True also writes what does not fill one."""
        with self._draining:
            began = time.monotonic()
            if everything:
                self._unwritten_since = began
            if self.failure is not None or self._finished:
                return
            try:
                is_encoded = False
                while not is_encoded:  # the caller may be quicker again and again: what it has encoded is written first
                    is_encoded = self._next_link(partly=everything) is not None
                    self._gather()
                    if everything:
                        self._chunks.write()
                if everything:
                    self._written_until = began
                if self._chunks.writer is not None:
                    self._chunks.writer.seal_if_due()
                self._took = max(time.monotonic() - began, 0.7 * self._took)
                self._pause = min(self._interval, max(self._interval / 8, 2 * (self._interval - self._took)))
            except Exception as error:  # whatever it is, it must reach the caller's thread
                self._fail(error)

    def _gather(self) -> None:
        """Adds what is encoded to chunks, which writes those that are full."""
        chunks = self._chunks.chunks
        while (link := self._written.next) is not None:
            for segment in link.segments:
                self._chunks.add(segment)
            if self._chunks.chunks != chunks:  # so all before this link is written
                chunks = self._chunks.chunks
                self._unwritten_since = max(self._unwritten_since, link.since)
            link.segments = []
            self._written = link

    def _fail(self, error: Exception) -> None:
        """Ends recording: what was written stays, what was not is dropped."""
        self.failure = error
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


def _blocks_since(first: Any, current: Any) -> list[Any] | None:
    """All blocks from first to current, or None if first is none of those before current any more."""
    blocks = [current]
    while blocks[-1] is not first:
        before = blocks[-1].before  # read once: the thread may take it away
        if before is None:
            return None
        blocks.append(before)
    return blocks[::-1]
