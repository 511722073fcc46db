"""Play the reference of an audit in a fresh process."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gym_trace.errors import EnvironmentUnavailable
from gym_trace.recording.processes.fleet import Job, Lost
from gym_trace.recording.processes.local import LocalProcesses
from gym_trace.tools.audit.arranged import Arranged, Make
from gym_trace.tools.audit.reference import Compared, Reference, record
from gym_trace.tools.audit.world import World

_HASH_SEED = "PYTHONHASHSEED"
_POLL_SECONDS = 1.0


def in_fresh_process(hash_seed: int, work: Callable[..., Any], make: Make, modules: Sequence[str], *paths: str) -> Any:
    """Return what work(env, *paths) returns in a new process. work: a function of this module.

    Raises EnvironmentUnavailable if the environment cannot be made there, or the process ends.
    """
    processes = LocalProcesses(variables={})
    with _set(hash_seed):
        processes.start(0, Job("audit", _body, (work, make, modules, *paths)))
    try:
        messages: list[Any] = []
        while not messages:
            messages = [message for _, message in processes.poll(_POLL_SECONDS)]
    finally:
        processes.kill(0)
    if isinstance(messages[0], Lost):
        raise EnvironmentUnavailable(f"in a fresh process: {messages[0].reason}")
    return messages[0]


def compare(env: Arranged, directory: str) -> Compared:
    """Compare an environment with a reference."""
    return Reference(directory).compared(env)


def compare_reversed(env: Arranged, directory: str) -> Compared:
    """Compare an environment with a reference whose last episode is played first: caches of the process are empty."""
    reference = Reference(directory)
    return reference.compared(env, reference.everything[::-1])


def record_again(env: Arranged, directory: str, other: str) -> None:
    """Record what a reference plays, to another directory."""
    record(env, other, Reference(directory).scripts())


def _body(connection: Any, work: Callable[..., Any], make: Make, modules: Sequence[str], *paths: str) -> None:
    for module in modules:
        if module != "__main__":
            importlib.import_module(module)
    world = World()
    env = Arranged(make, world)
    with world.around(env.inner):
        connection.send(work(env, *paths))


@contextmanager
def _set(hash_seed: int) -> Iterator[None]:
    before = os.environ.get(_HASH_SEED)
    os.environ[_HASH_SEED] = str(hash_seed)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_HASH_SEED]
        else:
            os.environ[_HASH_SEED] = before
