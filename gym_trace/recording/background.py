"""Write slabs as chunks, in order, in a background thread."""

from __future__ import annotations

import contextlib
import mmap
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from gym_trace.errors import RecordingError
from gym_trace.format.ring.chunk_builder import ChunkWriter
from gym_trace.format.ring.pending import Pending
from gym_trace.format.ring.segment import Segment
from gym_trace.storage.interrupts import held_back

_HEADROOM = 32 << 20  # bytes of address space needed to start a thread
_LEAST_WAITED = 1.0  # seconds; shorter waits are not reported


class _Server(threading.Thread):
    """A thread that calls serve(), then ended(). is_serving: False once it has ended."""

    def __init__(self, name: str, serve: Callable[[], None], ended: Callable[[], None]):
        super().__init__(target=serve, name=name, daemon=True)
        self.is_serving = True
        self._ended = ended

    def run(self) -> None:
        try:
            super().run()
        finally:
            self.is_serving = False
            self._ended()
            del self._ended  # avoid a reference cycle; Thread does the same with its target


class SlabWriter:
    """Writes slabs in a background thread. Signals such as Ctrl-C interrupt only the main thread.

    The thread starts with the first slab and waits for more, because starting a thread takes longer than many slabs. It
    ends at forks and at close(). A slab may be reused once .written has reached its sequence number. After a failure,
    writing stops and unwritten steps stay in the slabs.

    Args:
        notice: called from the background thread when the caller should look at .failure.

    Attributes:
        failure: the error that stopped writing, or None.
        is_finished: True if the files are closed.
        is_abandoned: True after abandon().
        submitted, written: sequence numbers of the latest submitted and written slabs.
        waited: seconds that calls of wait() took.
    """

    def __init__(self, name: str, chunks: ChunkWriter, notice: Callable[[], None]):
        self.failure: Exception | None = None
        self.written = self.submitted = 0
        self.is_finished = self.is_abandoned = False
        self.waited = 0.0
        self._name, self._chunks, self._notice = name, chunks, notice
        # Neither has a Python lock that a signal handler, which may fork, could find held by the code it interrupts.
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None: the thread ends
        self._progress = threading.Lock()  # released after each job, to wake wait()
        self._working = threading.Lock()  # held by the thread that does the jobs
        self._thread: _Server | None = None

    @property
    def is_complete(self) -> bool:
        """True if every submitted slab is written."""
        return self.failure is None and self.written == self.submitted

    def submit(self, sequence: int, segments: Callable[[], list[Segment]], pending: Iterable[Pending] = ()) -> None:
        """Queue the content of a slab. Submitting it again is harmless.

        segments: makes the segments, in the background thread. Their arrays must not change until written.
        pending: descriptions of these actions go into the metadata.
        """
        job = partial(self._write, sequence, segments, [action.described() for action in pending])
        with held_back():  # if interrupted between these, the recorder would add rows to a submitted slab
            self._jobs.put(job)
            self.submitted = sequence
        self._served_by()  # if no thread can start, wait() does the work

    def wait(self, sequence: int | None = None) -> None:
        """Wait until this slab is written (None: all slabs) or .failure is set. Ctrl-C may interrupt it."""
        wanted, begun = self.submitted if sequence is None else sequence, time.monotonic()
        while self.written < wanted and self.failure is None:
            if (thread := self._served_by()) is not None:
                self._rest(thread)
            else:
                self._serve_here()
        self.waited += time.monotonic() - begun

    def pause(self) -> None:
        """Do all jobs and end the thread, so that no lock is held at a fork."""
        thread = self._thread
        if thread is not None and thread.is_serving:
            self._jobs.put(None)
            current = threading.current_thread()
            if thread in (
                current,
                getattr(current, "starter", None),
            ):  # garbage collection may close a recorder in them
                return
            while thread.is_serving:
                self._rest(thread)
        if thread is not None and thread is not threading.current_thread():
            with held_back():  # see _rest(); the thread is at its end
                thread.join()
        self._serve_here()  # jobs that the thread left, or all of them if none could start

    def close(self, summary: Callable[[], dict[str, Any]]) -> None:
        """Write everything and seal the batch. summary: returns the last entry of the manifest."""
        if not self.is_finished:
            self._jobs.put(partial(self._finish, summary))
            self._served_by()
        self.pause()

    def _served_by(self) -> _Server | None:
        """Return the thread that does the jobs; start it if necessary. None: impossible, as at interpreter shutdown.

        It checks for memory first: start() would wait forever for a thread that dies without memory.
        """
        if self._thread is not None and self._thread.is_serving:
            return self._thread
        with held_back():  # a thread whose start is interrupted may never run
            if self._thread is not None and self._thread.is_serving:  # a signal handler has started it
                return self._thread
            thread = _Server(self._name, self._serve, self._wake)
            before, self._thread = self._thread, thread  # first: the thread may need it before start() returns
            try:
                mmap.mmap(-1, _HEADROOM).close()
                thread.start()
            except (RuntimeError, OSError, MemoryError):
                self._thread = before
                return None
        return thread

    def _rest(self, thread: _Server) -> None:
        """Wait a moment for the thread to do a job, or to end. Ctrl-C may interrupt it."""
        if not self._progress.acquire(timeout=0.1):
            with held_back():  # up to Python 3.12, a thread counts as dead if a signal interrupts is_alive() or join()
                is_alive = thread.is_alive()
            if not is_alive:  # at interpreter shutdown
                thread.is_serving = False

    def _serve_here(self) -> None:
        """Do the queued jobs in the caller's thread, unless another thread does them."""
        if self._jobs.empty():
            return
        with held_back():
            if not self._working.acquire(timeout=0.1):
                return
            try:
                while not self._jobs.empty():
                    self._do(iter(lambda: None if self._jobs.empty() else self._jobs.get(), None))
            finally:
                self._working.release()

    def abandon(self) -> None:
        """Close the files without writing, in a forked child: the parent owns them. Nothing is written from now on."""
        self.failure, self.is_finished, self.is_abandoned = RecordingError("forked"), True, True
        if self._chunks.writer is not None:
            self._chunks.writer.detach()

    def fail(self, error: Exception) -> None:
        """Stop recording: written steps stay in the files, unwritten ones in the slabs."""
        self.failure = error
        if self._chunks.writer is not None:
            self._chunks.writer.fail((isinstance(error, OSError) and error.strerror) or str(error))
        self._notice()

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        with self._working:
            self._do(iter(self._jobs.get, None))

    def _do(self, jobs: Iterator[Callable[[], None]]) -> None:
        try:
            for job in jobs:
                job()
                del job  # and the arrays that it holds
                self._wake()
        except BaseException as error:  # any error, also a SystemExit: reported in the caller's thread
            self.fail(error if isinstance(error, Exception) else RuntimeError(f"{error!r} in the writing thread"))

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # not acquired since the last job
            self._progress.release()

    def _write(self, sequence: int, segments: Callable[[], list[Segment]], pending: list[Any]) -> None:
        if self.failure is None and sequence > self.written:
            self._chunks.write_slab(sequence, segments(), pending)
            self.written = sequence

    def _finish(self, summary: Callable[[], dict[str, Any]]) -> None:
        writer = self._chunks.writer
        if writer is not None and self.failure is None and not self.is_finished:
            try:
                waited = {"waited": round(self.waited, 3)} if self.waited >= _LEAST_WAITED else {}
                writer.close({**summary(), **waited})
            finally:
                self.is_finished = True
