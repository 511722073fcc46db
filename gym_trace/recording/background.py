"""Write slabs as chunks, in order, in background threads."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from gym_trace.ring.chunk_builder import ChunkWriter
from gym_trace.ring.pending import Pending
from gym_trace.ring.segment import Segment
from gym_trace.storage.interrupts import held_back

_HEADROOM = 32 << 20  # bytes of address space needed to start a thread


class SlabWriter:
    """Writes slabs in background threads. Signals such as Ctrl-C interrupt only the main thread.

    A slab may be reused once .written has reached its sequence number. After a failure, writing stops and unwritten
    steps stay in the slabs.

    Args:
        notice: called from a background thread when the caller should look at .failure.

    Attributes:
        failure: the error that stopped writing, or None.
        is_finished: True if the files are closed.
        submitted, written: sequence numbers of the latest submitted and written slabs.
    """

    def __init__(self, name: str, chunks: ChunkWriter, notice: Callable[[], None]):
        self.failure: Exception | None = None
        self.written = self.submitted = 0
        self._name, self._chunks, self._notice = name, chunks, notice
        # Sequence number, function that makes the segments, and descriptions of the pending actions, for the metadata.
        self._jobs: deque[tuple[int, Callable[[], list[Segment]], list[Any]]] = deque()
        self._working = threading.Lock()
        self._thread: threading.Thread | None = None
        self.is_finished = False

    @property
    def is_complete(self) -> bool:
        """True if every submitted slab is written."""
        return self.failure is None and self.written == self.submitted

    def submit(self, sequence: int, segments: Callable[[], list[Segment]], pending: Iterable[Pending] = ()) -> None:
        """Queue the content of a slab. Submitting it again is harmless.

        segments: makes the segments, in a background thread. Their arrays must not change until written.
        """
        self._jobs.append((sequence, segments, [action.described() for action in pending]))
        self.submitted = sequence
        self._start(self._work)  # if no thread can start, wait() does the work

    def wait(self, sequence: int | None = None) -> None:
        """Wait until this slab is written (None: all slabs) or .failure is set. Ctrl-C may interrupt it."""
        wanted = self.submitted if sequence is None else sequence
        while self.written < wanted and self.failure is None:
            thread = self._thread
            if thread is None or not thread.is_alive():
                self._run(self._work)
            else:
                thread.join(0.1)

    def pause(self) -> None:
        """Write everything and end the thread, so that no lock is held at a fork."""
        self.wait()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def close(self, summary: Callable[[], dict[str, Any]]) -> None:
        """Write everything and seal the batch. summary: returns the last entry of the manifest."""
        self.pause()
        if not self.is_finished:
            self._run(lambda: self._finish(summary))

    def _run(self, target: Callable[[], None]) -> None:
        """Run target in a thread and wait for it; Ctrl-C may interrupt the wait."""
        thread = self._start(target)
        if thread is None:
            with held_back():
                target()
        while thread is not None and thread.is_alive():
            thread.join(0.1)

    def _start(self, target: Callable[[], None]) -> threading.Thread | None:
        """Start a thread that runs target; return None if that is impossible, as at interpreter shutdown.

        It checks for memory first: start() would wait forever for a thread that dies without memory.
        """
        thread = threading.Thread(target=target, name=self._name, daemon=True)
        with held_back():  # a thread whose start is interrupted may never run
            try:
                mmap.mmap(-1, _HEADROOM).close()
                thread.start()
            except (RuntimeError, OSError, MemoryError):
                return None
            self._thread = thread
        return thread

    def abandon(self) -> None:
        """Close the files without writing, in a forked child: the parent owns them."""
        if self._chunks.writer is not None:
            self._chunks.writer.abandon()

    def fail(self, error: Exception) -> None:
        """Stop recording: written steps stay in the files, unwritten ones in the slabs."""
        self.failure = error
        if self._chunks.writer is not None:
            self._chunks.writer.fail((isinstance(error, OSError) and error.strerror) or str(error))
        self._notice()

    # -- in threads ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        with self._working:
            while self._jobs:
                sequence, segments, pending = self._jobs[0]
                if self.failure is None and sequence > self.written:
                    try:
                        self._chunks.write_slab(sequence, segments(), pending)
                    except Exception as error:  # of any type: reported in the caller's thread
                        self.fail(error)
                    else:
                        self.written = sequence
                self._jobs.popleft()

    def _finish(self, summary: Callable[[], dict[str, Any]]) -> None:
        with self._working:
            writer = self._chunks.writer
            if writer is not None and self.failure is None and not self.is_finished:
                try:
                    writer.close(summary())
                except Exception as error:  # as above
                    self.fail(error)
                self.is_finished = True
