"""Watch workers, on this machine or in a cluster, and restart them within a budget; measure throughput."""

from __future__ import annotations

import math
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from gym_trace.errors import TraceError
from gym_trace.printable import error_text

_FIRST_BACKOFF, _MAX_BACKOFF = 0.1, 30.0  # seconds
_WINDOWS = (10.0, 60.0, 300.0)  # seconds
Key = int | str  # name of a worker, chosen by the caller


def _always() -> bool:
    return True


class Job(NamedTuple):
    """Work for a worker: ``body(connection, *args)``. The body is a function of a module; the arguments are picklable.

    niceness: added to that of this process. cpu: processor to run on; None: any.
    is_over: returns True once a lost process of this job has stopped writing; for backends that cannot await its end.
    is_remote: call is_over on the machine of the process; it is picklable.
    """

    name: str
    body: Callable[..., None]
    args: tuple[Any, ...]
    niceness: int = 0
    cpu: int | None = None
    is_over: Callable[[], bool] = _always
    is_remote: bool = False


class Lost(NamedTuple):
    """Last message of a worker: why it ended.

    reason: one line. traceback, kind: of the error, if the body raised one; kind only for errors of this library.
    """

    reason: str
    traceback: str = ""
    kind: type[TraceError] | None = None


def lost_by(error: BaseException) -> Lost:
    """Return the last message of a worker whose body raised an error. Call it in the except clause."""
    kind = type(error) if isinstance(error, TraceError) else None
    reason = error_text(error) if kind is None else " ".join(str(error).split())
    return Lost(reason, traceback.format_exc(), kind)


def move_to(niceness: int, cpu: int | None) -> None:
    """Run this process at the niceness and on the processor of its job."""
    if niceness:
        os.nice(niceness)
    if cpu is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cpu})


class Backend(Protocol):
    """Start workers, exchange messages with them, and kill them."""

    def start(self, key: Key, job: Job) -> None:
        """Start a worker. The body's connection has send() and recv(); recv() raises EOFError if the parent is gone."""

    def send(self, key: Key, message: Any) -> None:
        """Send a message; drop it if the worker has ended, which poll() reports."""

    def poll(self, seconds: float) -> list[tuple[Key, Any]]:
        """Return messages of workers; wait up to `seconds` for the first. A Lost is the last one of each worker."""

    def kill(self, key: Key, is_last: bool = False) -> None:
        """Kill a worker and wait for its end; poll() returns nothing more from it.

        is_last: the run ends without this worker, so a backend need not wait long.
        """


@runtime_checkable
class Cluster(Backend, Protocol):
    """A backend whose workers may be on other machines."""

    def everywhere(self, call: Callable[[], None]) -> None:
        """Call a picklable function on each machine that can be reached, one after the other. Raises what it raises."""


@dataclass
class Member:
    """State of one worker.

    Attributes:
        state: "starting", "restarting" (waits until `due`), or a state set by the owner.
        failures: losses in a row. The owner sets it to 0 when the worker makes progress.
        lives: number of starts. is_watched: whether it is killed when it is silent.
    """

    state: str = "starting"
    is_alive: bool = False
    is_watched: bool = True
    lives: int = 0
    restarts: int = 0
    failures: int = 0
    heard: float = 0.0
    due: float = math.inf


class Fleet:
    """Start workers, receive their messages, and restart them.

    Args:
        members: states of the workers, by key.
        stall_timeout: seconds of silence before a worker is killed. start_timeout: the same before its first message,
            if that is longer.
        max_restarts: of all members together. max_failures: of one member in a row.
    """

    def __init__(
        self,
        backend: Backend,
        members: Mapping[Key, Member],
        *,
        stall_timeout: float,
        max_restarts: int,
        max_failures: int,
        start_timeout: float = 0.0,
    ):
        self._backend, self._members = backend, members
        self._stall_timeout, self._start_timeout = stall_timeout, max(start_timeout, stall_timeout)
        self._max_restarts, self._max_failures = max_restarts, max_failures
        self.restarts = 0

    def start(self, key: Key, job: Job) -> None:
        member = self._members[key]
        self._backend.start(key, job)
        member.state, member.is_alive, member.heard, member.due = "starting", True, time.monotonic(), math.inf
        member.lives += 1

    def send(self, key: Key, message: Any) -> None:
        """Send a message; drop it if the worker has ended."""
        if self._members[key].is_alive:
            self._backend.send(key, message)

    def poll(self, seconds: float) -> Iterator[tuple[Key, Any]]:
        """Yield messages; a Lost is the last one of each life, also of a worker killed for its silence."""
        messages = self._backend.poll(seconds)
        lives = {key: member.lives for key, member in self._members.items()}
        for key, message in messages:
            member = self._members[key]
            if not member.is_alive or member.lives != lives[key]:  # killed or restarted since, by the caller
                continue
            member.heard = time.monotonic()
            member.is_alive = not isinstance(message, Lost)
            yield key, message
        for key, member in self._members.items():
            patience = self._start_timeout if member.state == "starting" else self._stall_timeout
            if member.is_alive and member.is_watched and time.monotonic() - member.heard > patience:
                self.kill(key)
                yield key, Lost(f"no heartbeat for {patience:g} s (stall_timeout)")
                return  # first process messages sent during the kill

    def retry(self, key: Key) -> str:
        """Schedule a restart of a lost worker. Return "", or the reason against it if its budget is spent."""
        member = self._members[key]
        member.failures += 1
        if member.failures > self._max_failures:
            return f"it failed {member.failures} times without getting anything done"
        if self.restarts >= self._max_restarts:
            return f"max_restarts={self._max_restarts} allows no more restarts"
        self.restarts += 1
        member.restarts += 1
        backoff = min(_MAX_BACKOFF, _FIRST_BACKOFF * 2.0 ** (member.failures - 1))
        member.state, member.due = "restarting", time.monotonic() + backoff
        return ""

    def due(self) -> list[Key]:
        """Return the keys of workers to start again now."""
        now = time.monotonic()
        return [key for key, member in self._members.items() if member.due <= now]

    def kill(self, key: Key, is_last: bool = False) -> None:
        """Kill a worker, and forget a scheduled restart."""
        member = self._members[key]
        if member.is_alive:
            self._backend.kill(key, is_last)
        member.is_alive, member.due = False, math.inf

    def close(self) -> None:
        """Kill all workers."""
        for key in self._members:
            self.kill(key, is_last=True)


class Meter:
    """Clock of a run that measures steps per second over several windows."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start again from zero."""
        self._begin = time.monotonic()
        self._samples: deque[tuple[float, int]] = deque([(self._begin, 0)])

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin

    def speeds(self, steps: int) -> tuple[float, float, float]:
        """Return steps per second over the last 10 s, 1 min and 5 min, or since the start if that is less.

        steps: total since the start. Call it regularly: each call is a sample.
        """
        now = time.monotonic()
        self._samples.append((now, steps))
        while len(self._samples) > 2 and now - self._samples[1][0] >= _WINDOWS[-1]:
            self._samples.popleft()
        ten, minute, five = (self._speed(now, window) for window in _WINDOWS)
        return ten, minute, five

    def _speed(self, now: float, window: float) -> float:
        since, before = next(sample for sample in self._samples if now - sample[0] <= window)
        return (self._samples[-1][1] - before) / (now - since) if now > since else 0.0
