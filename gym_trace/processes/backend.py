"""Interface of the places where workers run: processes of this machine, or a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from gym_trace.errors import TraceError

Key = int | str  # of a worker: a name of the caller's choice


class Job(NamedTuple):
    """Work for a worker: ``body(connection, *args)``. The body is a function of a module; the arguments are picklable.

    niceness: added to that of this process. cpu: processor to run on; None: any.
    """

    name: str
    body: Callable[..., None]
    args: tuple[Any, ...]
    niceness: int = 0
    cpu: int | None = None


class Lost(NamedTuple):
    """Last message of a worker: why it ended.

    reason: one line. traceback, kind: of the error, if the body raised one; kind only for errors of this library.
    """

    reason: str
    traceback: str = ""
    kind: type[TraceError] | None = None


class Backend(Protocol):
    """Start workers, exchange messages with them, and kill them."""

    def start(self, key: Key, job: Job) -> None:
        """Start a worker. The body's connection has send() and recv(); recv() raises EOFError if the parent is gone."""

    def send(self, key: Key, message: Any) -> None:
        """Send a message; drop it if the worker has ended, which poll() reports."""

    def poll(self, seconds: float) -> list[tuple[Key, Any]]:
        """Return messages of workers; wait up to `seconds` for the first. A Lost is the last one of each worker."""

    def kill(self, key: Key) -> None:
        """Kill a worker and wait for its end; poll() returns nothing more from it."""
