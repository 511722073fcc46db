"""Worker processes of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import queue
import time
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

from gym_trace.errors import MissingExtra, TraceError, told
from gym_trace.processes.fleet import Job, Key, Lost

try:
    import ray
except ImportError as missing:
    raise MissingExtra(f"--engine ray needs Ray ({missing}): pip install ray") from missing

_TAKE_SECONDS = 0.5  # that an actor waits for messages to hand over
_LISTENING_SECONDS = 10.0  # in which a parent that lives asks for messages
_ORPHANED_SECONDS = 60.0  # without being asked; the parent may be busy
_RELEASE_SECONDS = 60.0  # for a lost process to end, when its node is not reachable
_THREADS = 4  # of an actor: the job, messages to it, messages from it, and one to spare


class _Mailbox:
    """Connection of a job in an actor: send(), recv(), has_parent()."""

    def __init__(self) -> None:
        self.inbox: queue.Queue[Any] = queue.Queue()
        self.outbox: queue.Queue[Any] = queue.Queue()
        self.asked = time.monotonic()  # when the parent began to ask for messages last

    def send(self, message: Any) -> None:
        self.outbox.put(message)

    def recv(self) -> Any:
        """Return the next message. Raises EOFError if the parent is gone."""
        while time.monotonic() - self.asked < _ORPHANED_SECONDS:
            with contextlib.suppress(queue.Empty):
                return self.inbox.get(timeout=_TAKE_SECONDS)
        raise EOFError

    def has_parent(self) -> bool:
        """Return True as soon as the parent asks again: Ray carries no calls of a parent that took this for dead."""
        now = time.monotonic()
        while time.monotonic() - now < _LISTENING_SECONDS:
            if self.asked > now:
                return True
            time.sleep(0.01)
        return False


class _Actor:
    """A worker. Its threads are the job, and calls of the parent."""

    def __init__(self) -> None:
        self._mailbox = _Mailbox()

    def run(self, body: Any, args: tuple[Any, ...], directory: str, niceness: int, cpu: int | None) -> None:
        """Run a job, and report what it raises. directory: to work in, if it is there."""
        with contextlib.suppress(OSError):
            os.chdir(directory)
        if niceness:
            os.nice(niceness)
        if cpu is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {cpu})
        try:
            body(self._mailbox, *args)
        except BaseException as error:  # also SystemExit, which an environment may raise
            kind = type(error) if isinstance(error, TraceError) else None
            reason = told(error) if kind is None else " ".join(str(error).split())
            self._mailbox.send(Lost(reason, traceback.format_exc(), kind))

    def deliver(self, message: Any) -> None:
        self._mailbox.inbox.put(message)

    def take(self) -> list[Any]:
        """Return the messages since the last call; wait some time for the first."""
        mailbox = self._mailbox
        mailbox.asked = time.monotonic()
        found: list[Any] = []
        with contextlib.suppress(queue.Empty):
            found.append(mailbox.outbox.get(timeout=_TAKE_SECONDS))
            while True:
                found.append(mailbox.outbox.get_nowait())
        return found


class _Running(NamedTuple):
    """A worker of the parent. run, take: results that are awaited."""

    job: Job
    actor: Any
    run: Any
    take: Any


class RayActors:
    """Actors of a Ray cluster, each a process of its own. A Backend: gym_trace.collect(backend=RayActors()).

    All nodes need gym-trace, the environment, and the directory of the trace: a shared file system. Actors work in the
    current directory of the driver where that exists, so they find modules and models that lie there.

    Args:
        address: of the cluster, as for ray.init; None: $RAY_ADDRESS, or a new cluster on this machine.
        runtime_env: what the actors need on their nodes, as for ray.init.
        options: of each actor, such as num_cpus (default: 1), num_gpus, memory or resources.

    Raises MissingExtra.
    """

    def __init__(
        self, address: str | None = None, runtime_env: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self._begun = not ray.is_initialized()
        if self._begun:
            ray.init(address, runtime_env=dict(runtime_env or {}), log_to_driver=False, logging_level="ERROR")
        self._kind = ray.remote(_Actor).options(
            **{"num_cpus": 1, **options}, max_concurrency=_THREADS, max_restarts=0, max_task_retries=0
        )
        self._workers: dict[Key, _Running] = {}
        self._leaving: dict[Key, tuple[Job, Lost, float]] = {}  # until when they are waited for

    def start(self, key: Key, job: Job) -> None:
        actor = self._kind.remote()
        run = actor.run.remote(job.body, job.args, os.getcwd(), job.niceness, job.cpu)
        self._workers[key] = _Running(job, actor, run, actor.take.remote())

    def send(self, key: Key, message: Any) -> None:
        if key in self._workers:
            self._workers[key].actor.deliver.remote(message)

    def poll(self, seconds: float) -> list[tuple[Key, Any]]:
        heard: list[tuple[Key, Any]] = []
        if takes := [worker.take for worker in self._workers.values()]:
            ray.wait(takes, num_returns=1, timeout=seconds)
        else:
            time.sleep(seconds)
        for key, worker in list(self._workers.items()):
            if ray.wait([worker.take], timeout=0)[0]:
                heard += self._taken(key, worker)
        for key, (job, lost, until) in list(self._leaving.items()):
            if job.is_over() or time.monotonic() > until:
                del self._leaving[key]
                heard.append((key, lost))
        return heard

    def _taken(self, key: Key, worker: _Running) -> list[tuple[Key, Any]]:
        """Return the messages of a worker, but for its Lost, which waits for the end of its process."""
        try:
            has_ended = bool(ray.wait([worker.run], timeout=0)[0])
            messages = ray.get(worker.take)
            if not has_ended:
                self._workers[key] = worker._replace(take=worker.actor.take.remote())
            else:
                ray.get(worker.run)  # raises if the process died
                messages += ray.get(worker.actor.take.remote())  # the last ones
        except ray.exceptions.RayError as error:
            self._leave(key, Lost(_reason(error)))
            return []
        if has_ended:
            lost = [message for message in messages if isinstance(message, Lost)]
            self._leave(key, lost[0] if lost else Lost("its job ended"))
        return [(key, message) for message in messages if not isinstance(message, Lost)]

    def _leave(self, key: Key, lost: Lost) -> None:
        worker = self._workers.pop(key)
        ray.kill(worker.actor)
        self._leaving[key] = worker.job, lost, time.monotonic() + _RELEASE_SECONDS

    def kill(self, key: Key) -> None:
        self._leaving.pop(key, None)
        if key not in self._workers:
            return
        worker = self._workers.pop(key)
        ray.kill(worker.actor)
        until = time.monotonic() + _RELEASE_SECONDS
        while not worker.job.is_over() and time.monotonic() < until:
            time.sleep(0.05)

    def close(self) -> None:
        """Leave the cluster, if this joined or began it."""
        if self._begun:
            ray.shutdown()


def _reason(error: Exception) -> str:
    """Return the first line of an error of Ray, which goes on with advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"its actor ended: {lines[0] if lines else type(error).__name__}"
