"""Worker processes of a Ray cluster."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gym_trace.errors import MissingExtra
from gym_trace.printable import error_text
from gym_trace.recording.processes.fleet import Job, Key, Lost, lost_by, move_to

try:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as missing:
    raise MissingExtra(f"--ray needs Ray ({missing}): pip install ray") from missing

_TAKE_SECONDS = 0.5  # an actor waits this long for messages to return
_LISTENING_SECONDS = 10.0  # a live parent polls at least this often
_ORPHANED_SECONDS = 60.0  # without a poll; the parent may be busy
_LEASE_SECONDS = _ORPHANED_SECONDS + 10.0  # then a process that its parent cannot reach has ended
_CLOSE_SECONDS = 5.0  # wait for each process at the end of the run
_RELEASE_SECONDS = 300.0  # wait for a lost process, or for a file system to notice that its node is gone
_THREADS = 4  # per actor: the job, messages to it, messages from it, and one to spare


class _Mailbox:
    """Connection of a job in an actor: send(), recv(), has_parent()."""

    def __init__(self) -> None:
        self.inbox: queue.Queue[Any] = queue.Queue()
        self.outbox: queue.Queue[Any] = queue.Queue()
        self.polled = time.monotonic()  # time of the parent's last poll

    def send(self, message: Any) -> None:
        self.outbox.put(message)

    def recv(self) -> Any:
        """Return the next message. Raises EOFError if the parent is gone."""
        while self.is_polled():
            with contextlib.suppress(queue.Empty):
                return self.inbox.get(timeout=_TAKE_SECONDS)
        raise EOFError

    def is_polled(self) -> bool:
        """Return False if the parent may have abandoned this process."""
        return time.monotonic() - self.polled < _ORPHANED_SECONDS

    def has_parent(self) -> bool:
        """Return True at the next poll: Ray delivers no calls of a parent that considers this process dead."""
        now = time.monotonic()
        while time.monotonic() - now < _LISTENING_SECONDS:
            if self.polled > now:
                return True
            time.sleep(0.01)
        return False


class _Node(NamedTuple):
    """First message of an actor: the node that it runs on."""

    id: str


class _Actor:
    """A worker. One thread runs the job, others the calls of the parent."""

    def __init__(self) -> None:
        self._mailbox = _Mailbox()

    def run(self, body: Any, args: tuple[Any, ...], directory: str, niceness: int, cpu: int | None) -> None:
        """Run a job, and report what it raises. directory: working directory, if it exists."""
        with contextlib.suppress(OSError):
            os.chdir(directory)
        move_to(niceness, cpu)
        self._mailbox.send(_Node(ray.get_runtime_context().get_node_id()))
        try:
            body(self._mailbox, *args)
        except BaseException as error:  # also SystemExit, which an environment may raise
            self._mailbox.send(lost_by(error))

    def deliver(self, message: Any) -> None:
        self._mailbox.inbox.put(message)

    def take(self) -> list[Any]:
        """Return the messages since the last call; wait some time for the first."""
        mailbox = self._mailbox
        mailbox.polled = time.monotonic()
        found: list[Any] = []
        with contextlib.suppress(queue.Empty):
            found.append(mailbox.outbox.get(timeout=_TAKE_SECONDS))
            while True:
                found.append(mailbox.outbox.get_nowait())
        return found


class _RunningWorker(NamedTuple):
    """A worker. run, take: pending results of these calls. polled: time of the last take(). node: id, once known."""

    job: Job
    actor: Any
    run: Any
    take: Any
    polled: float
    node: str = ""


class _LeavingWorker(NamedTuple):
    """A lost worker whose process may still run. until: end of the wait. ended: pending _await_end(), if remote."""

    job: Job
    lost: Lost
    until: float
    ended: Any


def _await_end(is_over: Callable[[], bool]) -> bool:
    """Wait until a job is over; return whether it is. A task on the node of a lost actor."""
    until = time.monotonic() + _RELEASE_SECONDS
    while not (over := is_over()) and time.monotonic() < until:
        time.sleep(0.1)
    return over


class RayActors:
    """Actors of a Ray cluster, each a process of its own. A Backend: gym_trace.collect(backend=RayActors()).

    All nodes need gym-trace, the environment, and the directory of the trace, which is on a shared file system or is a
    URL. Actors work in the current directory of the driver where that exists, so they find modules and models there.

    Args:
        address: of the cluster, as for ray.init; None: $RAY_ADDRESS, or a new cluster on this machine.
        runtime_env: what the actors need on their nodes, as for ray.init.
        options: of each actor, such as num_cpus (default: 1), num_gpus, memory or resources.

    Raises MissingExtra.

    Examples:
        >>> engine = gym_trace.recording.RayActors()  # doctest: +SKIP
        >>> gym_trace.collect(make_env, directory="traces/ray", episodes=1000, engine=engine)  # doctest: +SKIP
    """

    def __init__(
        self, address: str | None = None, runtime_env: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            ray.init(address, runtime_env=dict(runtime_env or {}), log_to_driver=False, logging_level="ERROR")
        options = {"num_cpus": 1, **options}
        self._kind = ray.remote(_Actor).options(**options, max_concurrency=_THREADS, max_restarts=0, max_task_retries=0)
        self._needs = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0), **options.get("resources", {})}
        self._workers: dict[Key, _RunningWorker] = {}
        self._leaving: dict[Key, _LeavingWorker] = {}
        self._heard: list[tuple[Key, Any]] = []

    def start(self, key: Key, job: Job) -> None:
        actor = self._kind.remote()
        run = actor.run.remote(job.body, job.args, os.getcwd(), job.niceness, job.cpu)
        self._workers[key] = _RunningWorker(job, actor, run, actor.take.remote(), time.monotonic())

    def send(self, key: Key, message: Any) -> None:
        if key in self._workers:
            self._workers[key].actor.deliver.remote(message)

    def poll(self, seconds: float) -> list[tuple[Key, Any]]:
        self._receive(0 if self._heard else seconds)
        for key, leaving in list(self._leaving.items()):
            if self._has_left(key, leaving):
                del self._leaving[key]
                self._heard.append((key, leaving.lost))
        heard, self._heard = self._heard, []
        return heard

    def _receive(self, seconds: float) -> None:
        if takes := [worker.take for worker in self._workers.values()]:
            ray.wait(takes, num_returns=1, timeout=seconds)
        else:
            time.sleep(seconds)
        for key, worker in list(self._workers.items()):
            if ray.wait([worker.take], timeout=0)[0]:
                self._heard += self._messages_of(key, worker)

    def _messages_of(self, key: Key, worker: _RunningWorker) -> list[tuple[Key, Any]]:
        """Return the messages of a worker, except its Lost, which is held until its process has ended."""
        try:
            has_ended = bool(ray.wait([worker.run], timeout=0)[0])
            messages = ray.get(worker.take)
            if messages and isinstance(messages[0], _Node):
                worker = self._workers[key] = worker._replace(node=messages.pop(0).id)
            if not has_ended:
                self._workers[key] = worker._replace(take=worker.actor.take.remote(), polled=time.monotonic())
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
        ended = None
        if worker.job.is_remote and worker.node:
            ended = _task_on(worker.node, _await_end).remote(worker.job.is_over)
        until = worker.polled + _LEASE_SECONDS if worker.job.is_remote else time.monotonic() + _RELEASE_SECONDS
        self._leaving[key] = _LeavingWorker(worker.job, lost, until, ended)

    def _has_left(self, key: Key, leaving: _LeavingWorker) -> bool:
        if not leaving.job.is_remote:
            return leaving.job.is_over() or time.monotonic() > leaving.until
        if leaving.ended is None:
            return time.monotonic() > leaving.until
        if not ray.wait([leaving.ended], timeout=0)[0]:
            return False
        try:
            if ray.get(leaving.ended):
                return True
        except ray.exceptions.RayTaskError as error:  # the writer has ended, but is not published
            reason = f"{leaving.lost.reason}; its files are not published: {error_text(error.cause)}"
            self._leaving[key] = leaving._replace(lost=leaving.lost._replace(reason=reason), until=0.0, ended=None)
            return False
        except ray.exceptions.RayError:  # the node is lost: its actor may be alive
            pass
        self._leaving[key] = leaving._replace(ended=None)
        return False

    def kill(self, key: Key, is_last: bool = False) -> None:
        if key in self._workers:
            self._leave(key, Lost("killed"))
        until = time.monotonic() + (_CLOSE_SECONDS if is_last else math.inf)
        while key in self._leaving and not self._has_left(key, self._leaving[key]) and time.monotonic() < until:
            self._receive(0.05)  # otherwise the other workers consider this process dead
            time.sleep(0.05)
        self._leaving.pop(key, None)

    def everywhere(self, call: Callable[[], None]) -> None:
        for node in ray.nodes():
            resources = node["Resources"]
            if node["Alive"] and all(resources.get(name, 0) >= count for name, count in self._needs.items()):
                try:
                    ray.get(_task_on(node["NodeID"], _call).remote(call))
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                except ray.exceptions.RayError:  # the node was lost
                    continue

    def close(self) -> None:
        """Disconnect from the cluster, or stop it, if this object joined or started it."""
        if self._owns_ray:
            ray.shutdown()


def _task_on(node: str, function: Callable[..., Any]) -> Any:
    """Return a function as a task that runs at most once, on this node."""
    where = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=where)


def _call(call: Callable[[], None]) -> None:
    call()


def _reason(error: Exception) -> str:
    """Return the first line of a Ray error; the others are advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"its actor ended: {lines[0] if lines else type(error).__name__}"
