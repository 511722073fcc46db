"""Threads that encode chunks of a slab, and the parity of a batch, side by side."""

from __future__ import annotations

import contextlib
import mmap
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from gym_trace.format.columns import Workspace

_HEADROOM = 32 << 20  # bytes of address space needed to start a thread
Result = TypeVar("Result")


class Job(Generic[Result]):
    """Work that one thread does, whichever is first."""

    def __init__(self, work: Callable[[Workspace], Result]):
        self._work: Callable[[Workspace], Result] | None = work
        self._claim, self._done = threading.Lock(), threading.Lock()
        self._done.acquire()
        self._error: BaseException | None = None

    def run(self, workspace: Workspace) -> None:
        """Do the work, unless a thread does it."""
        if self._work is None or not self._claim.acquire(blocking=False):
            return
        try:
            self._result = self._work(workspace)
        except BaseException as error:
            self._error = error
        finally:
            self._work = None
            self._done.release()

    def result(self, workspace: Workspace) -> Result:
        """Return the result of the work; do it or wait for it. Raises its error."""
        self.run(workspace)
        with self._done:
            if self._error is not None:
                raise self._error
            return self._result


class _EncodingThread(threading.Thread):
    """Does jobs until it gets None. starter: the thread that waits for it; see SlabWriter.pause()."""

    def __init__(self, jobs: queue.SimpleQueue[Job[Any] | None], workspace: Workspace):
        super().__init__(name="gym-trace encoding", daemon=True)
        self._jobs, self.workspace = jobs, workspace
        self.starter = threading.current_thread()

    def run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run(self.workspace)
            del job  # and the arrays that it holds


class EncodingThreads:
    """Up to `count` threads beside the caller's. They live from submit() to stop(), so that none is there at a fork.

    Where no thread can start, the caller does all jobs. Not thread-safe.
    """

    def __init__(self, level: int, count: int):
        self.workspace = Workspace(level)  # for the caller's thread
        self.count = count
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._threads: list[_EncodingThread] = []
        self._workspaces: list[Workspace] = []  # left by threads that have ended

    def submit(self, job: Job[Any]) -> None:
        """Let a thread do the job, unless the caller asks for its result before."""
        if len(self._threads) < self.count:
            self._start()
        if self._threads:
            self._jobs.put(job)

    def _start(self) -> None:
        workspace = self._workspaces.pop() if self._workspaces else Workspace(self.workspace.level)
        thread = _EncodingThread(self._jobs, workspace)
        try:
            mmap.mmap(-1, _HEADROOM).close()  # start() would wait forever for a thread that dies without memory
            thread.start()
        except (RuntimeError, OSError, MemoryError):  # also at interpreter shutdown
            return
        self._threads.append(thread)

    def map(self, works: Sequence[Callable[[Workspace], Result]]) -> list[Result]:
        """Do all of the work; return the results in order."""
        jobs = [Job(work) for work in works]
        try:
            for job in jobs[1:]:
                self.submit(job)
            return [job.result(self.workspace) for job in jobs]
        finally:
            self.stop()

    def stop(self) -> None:
        """End the threads. Jobs that none has begun are left to Job.result()."""
        with contextlib.suppress(queue.Empty):
            while self._threads:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)
        while self._threads:
            thread = self._threads.pop()
            thread.join()
            self._workspaces.append(thread.workspace)
