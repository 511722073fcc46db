"""Writing what slabs hold: as chunks, in order, in threads; callers wait for it, pause it, close it."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from gym_trace.ring.chunk_builder import ChunkWriter
from gym_trace.ring.pending import Pending
from gym_trace.ring.segment import Segment
from gym_trace.storage.interrupts import held_back

_HEADROOM = 32 << 20  # bytes of address space that have to be there for a thread


class _Job(NamedTuple):
    """The content of a slab, to be written."""

    sequence: int
    segments: list[Segment]
    pending: list[Any]  # the actions in it that are not answered yet, as metadata has them


class SlabWriter:
    """Writes the contents of slabs, each in a thread of its own: signals, such as Ctrl-C, interrupt but the main one.

    The memory of a slab may be used again once .written has reached its sequence number. After a failure nothing more
    is written: what could not be stays in the slabs.

    Args:
        notice: called from such a thread when the caller's should look at .failure.

    Attributes:
        failure: why nothing is written any more, if so.
        is_finished: whether the files are closed.
        submitted, written: the sequence numbers of the slabs that were submitted and written last.
    """

    def __init__(self, name: str, chunks: ChunkWriter, notice: Callable[[], None]):
        self.failure: Exception | None = None
        self.written = self.submitted = 0
        self._name, self._chunks, self._notice = name, chunks, notice
        self._jobs: deque[_Job] = deque()
        self._working = threading.Lock()
        self._thread: threading.Thread | None = None
        self.is_finished = False

    @property
    def is_complete(self) -> bool:
        """Whether all that was submitted is written."""
        return self.failure is None and self.written == self.submitted

    def submit(self, sequence: int, segments: list[Segment], pending: Iterable[Pending] = ()) -> None:
        """Has the content of a slab written. Its arrays must not change before that. Doing it twice does no harm."""
        self._jobs.append(_Job(sequence, segments, [action.described() for action in pending]))
        self.submitted = sequence
        self._start(self._work)  # or, where that fails, wait() does the work

    def wait(self, sequence: int | None = None) -> None:
        """Returns when that slab is written, None: all of them, or .failure is set. Ctrl-C may interrupt it."""
        wanted = self.submitted if sequence is None else sequence
        while self.written < wanted and self.failure is None:
            thread = self._thread
            if thread is None or not thread.is_alive():
                self._run(self._work)
            else:
                thread.join(0.1)

    def pause(self) -> None:
        """Writes everything, so that no lock is held at a fork."""
        self.wait()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def close(self, summary: Callable[[], dict[str, Any]]) -> None:
        """Writes everything and seals the batch. summary: for the end of the manifest."""
        self.pause()
        self._summary = summary
        if not self.is_finished:
            self._run(self._finish)

    def _run(self, target: Callable[[], None]) -> None:
        """Runs it in a thread, and waits for that; Ctrl-C may interrupt the waiting."""
        thread = self._start(target)
        if thread is None:
            with held_back():
                target()
        while thread is not None and thread.is_alive():
            thread.join(0.1)

    def _start(self, target: Callable[[], None]) -> threading.Thread | None:
        """A thread that runs it; None where there can be none, as when the interpreter is shutting down.

        A thread that finds no memory when it begins dies, and start() waits for it for ever.
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
        """Closes the files without writing, in a forked child: its parent owns them."""
        if self._chunks.writer is not None:
            self._chunks.writer.abandon()

    def fail(self, error: Exception) -> None:
        """Stops recording: what was written stays, and what was not is left in the slabs."""
        self.failure = error
        if self._chunks.writer is not None:
            self._chunks.writer.fail((isinstance(error, OSError) and error.strerror) or str(error))
        self._notice()

    # -- in threads ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        with self._working:
            while self._jobs:
                job = self._jobs[0]
                if self.failure is None and job.sequence > self.written:
                    try:
                        self._chunks.write_slab(*job)
                    except Exception as error:  # of any kind: the caller's thread reports it
                        self.fail(error)
                    else:
                        self.written = job.sequence
                self._jobs.popleft()

    def _finish(self) -> None:
        with self._working:
            writer = self._chunks.writer
            if writer is not None and self.failure is None and not self.is_finished:
                try:
                    writer.close(self._summary())
                except Exception as error:  # as above
                    self.fail(error)
                self.is_finished = True
