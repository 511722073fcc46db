"""The writer thread: blocks are encoded and written in order; callers can wait for it, pause it and close it."""

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
    """Encodes blocks to segments."""

    complaints: dict[str, str]

    def begun(self, block: Any) -> Any:
        """The progress at the start of the first block."""

    def encoded(self, progress: Any, blocks: list[Any], partly: bool) -> tuple[Any, list[Segment]]:
        """What was added to blocks since progress, which is in the first of them; and the progress after it.

        partly: whether to encode the last block, too, which is still being filled.

        It has no side effects, so that a thread that is interrupted or overtaken can repeat it.
        """


class _Node:
    """A node of the linked list of encoded segments, to which any thread may append: the first one wins."""

    def __init__(self, progress: Any, segments: list[Segment], total: int, since: float):
        self.progress, self.segments = progress, segments
        self.total = total  # bytes of all segments up to this node
        self.since = since  # time.monotonic(): no row in this node, or after it, is older
        self._next: dict[str, _Node] = {}

    @property
    def next(self) -> _Node | None:
        return self._next.get("")

    def append(self, node: _Node) -> bool:
        """Appends node, unless there is a next one. dict.setdefault is atomic to threads and signals."""
        return self._next.setdefault("", node) is node


class BlockWriter:
    """Encodes blocks, and writes them in a thread of its own.

    Encoding changes nothing but the linked list of encoded segments, a node at a time. So any thread may encode, and
    Ctrl-C may interrupt it. As a rule the caller does, while the values are in its processor's cache. Only the writer
    thread writes: signals never interrupt it, and it goes on while the caller is busy. A caller of single steps waits
    for it, because two running threads would contend for the interpreter lock thousands of times a second.

    Args:
        progress: where the encoder begins.
        current: returns the block that is being filled. Its attribute "before" is the block before it; its attribute
            "created" is time.monotonic() before its first row.
        notice: called, from any thread, when the caller's thread should look at .failure and at complaints.
        flush_seconds: within which everything recorded has to be written.
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
        self._pause = self._interval  # seconds between writes; less than the interval where writing takes long
        self._took = 0.0  # seconds that recent writes took
        self.patience = self._interval / 4  # seconds after which a caller should begin a new block
        self._requests: SimpleQueue[tuple[bool, Any]] = SimpleQueue()  # reentrant, unlike Queue
        self.running = False  # whether the thread runs
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
            except RuntimeError:  # the interpreter is shutting down; close() writes the rest
                self.running, self._thread = False, None

    def advance(self) -> None:
        """Encodes all blocks but the current one, and has them written if they fill a chunk.

        Waits for the thread if it has to write, or is writing already.
        """
        encoded = self.encode()
        if encoded is None or encoded - self._written.total >= self._chunks.chunk_bytes or self._draining.locked():
            self.work(everything=False)

    def catch_up(self) -> None:
        """Waits for the thread if it is late: beside a running caller it gets half of the interpreter lock at most."""
        if self.running and time.monotonic() - self._written_until > 1.2 * self._pause:
            self.work(everything=True)

    def encode(self) -> int | None:
        """Encodes all blocks but the current one; returns the bytes of all so far, or None if they cannot be."""
        try:
            return self._encode(partly=False).total
        except Exception:  # the thread will meet it, too, after writing what is before it, and report it
            return None

    def progress(self) -> Any:
        """The encoder's progress after everything that was recorded, or None if it cannot be encoded."""
        try:
            return self._encode(partly=True).progress
        except Exception:  # the thread will meet it, too, and report it
            return None

    def work(self, everything: bool) -> None:
        """Has full chunks written, or everything recorded; returns when that is done, or .failure is set."""
        self.wait(self.request(everything), everything)

    def request(self, everything: bool = False) -> Any:
        """As work(), without waiting; returns the argument for wait()."""
        done = threading.Lock()
        done.acquire()
        self._requests.put((everything, done))
        return done

    def wait(self, done: Any, everything: bool = False) -> None:
        """Returns when a request is done; does the work in the caller's thread if there is no other."""
        while self.running:
            if done.acquire(timeout=1.0):
                return
        self._drain(everything)

    def pause(self) -> None:
        """Writes everything and ends the thread, so that no lock is held at a fork."""
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
        """Writes everything and seals the batch. summary: for the end of the manifest."""
        self._summary = summary
        self._closing = self._stop = True
        if self._thread is threading.current_thread():
            return  # a finalizer called this in the writer thread, which finishes on its way out
        self._await_end()
        self._finish()

    def _await_end(self) -> None:
        """Waits for the thread. Unlike Thread.join(), it can be interrupted by Ctrl-C and called again."""
        while self.running:
            done = threading.Lock()
            done.acquire()
            self._requests.put((False, done))
            done.acquire(timeout=0.1)

    def abandon(self) -> None:
        """Closes the files without writing: after a failure, or in a forked child, whose parent owns them."""
        if self._chunks.writer is not None:
            self._chunks.writer.abandon()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        requests: list[tuple[bool, Any]] = []
        try:
            while not self._stop:
                due = self._unwritten_since + self._pause
                with contextlib.suppress(Empty):
                    requests.append(self._requests.get(timeout=min(3600.0, max(0.0, due - time.monotonic()))))
                    while True:
                        requests.append(self._requests.get_nowait())
                self._drain(everything=any(whole for whole, _ in requests))
                if time.monotonic() >= self._unwritten_since + self._pause:
                    self._drain(everything=True)
                while requests:
                    requests.pop()[1].release()
            if self._closing:
                self._finish()
            else:
                self._drain(everything=True)
        finally:
            self.running = False
            while not self._requests.empty():
                requests.append(self._requests.get_nowait())
            for _, done in requests:
                done.release()

    def _encode(self, partly: bool) -> _Node:
        """Encodes all blocks, the current one only with partly=True. Returns the last node."""
        while (node := self._encode_once(partly)) is None:
            pass
        return node

    def _encode_once(self, partly: bool) -> _Node | None:
        """As _encode(), but returns None if another thread has appended first, so that there may be more to encode."""
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
        node = _Node(progress, segments, total, blocks[0].created)
        if not last.append(node):
            return None
        progress.block.before = None  # frees the blocks that are encoded
        return node

    def _drain(self, everything: bool) -> None:
        """Adds what is encoded to chunks, which are written when full; with everything=True also the last one."""
        with self._draining:
            began = time.monotonic()
            if everything:
                self._unwritten_since = began
            if self.failure is not None or self._finished:
                return
            try:
                is_encoded = False
                while not is_encoded:  # the caller may have appended first; write that, and try again
                    is_encoded = self._encode_once(partly=everything) is not None
                    self._gather()
                    if everything:
                        self._chunks.write()
                if everything:
                    self._written_until = began
                if self._chunks.writer is not None:
                    self._chunks.writer.seal_if_due()
                self._took = max(time.monotonic() - began, 0.7 * self._took)
                self._pause = min(self._interval, max(self._interval / 8, 2 * (self._interval - self._took)))
            except Exception as error:  # of any kind: the caller's thread reports it
                self._fail(error)

    def _gather(self) -> None:
        """Adds what is encoded to chunks, which writes those that are full."""
        chunks = self._chunks.chunks
        while (node := self._written.next) is not None:
            for segment in node.segments:
                self._chunks.add(segment)
            if self._chunks.chunks != chunks:  # a chunk was written, with everything before this node
                chunks = self._chunks.chunks
                self._unwritten_since = max(self._unwritten_since, node.since)
            node.segments = []
            self._written = node

    def _fail(self, error: Exception) -> None:
        """Stops recording: what was written stays, the rest is dropped."""
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
    """All blocks from first to current; None if another thread has encoded first, so that it is linked no more."""
    blocks = [current]
    while blocks[-1] is not first:
        before = blocks[-1].before  # read once: another thread may set it to None
        if before is None:
            return None
        blocks.append(before)
    return blocks[::-1]
