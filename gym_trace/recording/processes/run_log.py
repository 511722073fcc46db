"""The event log of a run, next to its trace; rings that dead workers left."""

from __future__ import annotations

import functools
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from gym_trace.errors import InvalidOption, RecordingError, warn
from gym_trace.recording.dead_rings import take_in_rings
from gym_trace.storage.local import lock, open_regular

EVENTS = "events.jsonl"


class Events:
    """Event log of a run, as JSON lines. It locks the directory for one run at a time, or one of each shard."""

    def __init__(self, directory: Path, name: str = EVENTS):
        """Raises InvalidOption if another run uses the directory, or the file cannot be written."""
        self._path = directory / name
        try:
            fd = open_regular(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            raise InvalidOption(f"{self._path}: {error.strerror}; record into another directory") from error
        self._file = open(fd, "ab+", buffering=0)  # noqa: SIM115 - open as long as the run
        if not lock(self._file.fileno()):
            self._file.close()
            raise InvalidOption(f"{directory}: in use by another run; wait or pick another directory")
        size = self._file.seek(0, os.SEEK_END)
        if size:
            self._file.seek(size - 1)
            if self._file.read(1) != b"\n":  # the run was killed while it wrote this line
                self._write(b"\n")

    def __call__(self, kind: str, **facts: Any) -> None:
        line = json.dumps({"time": time.time(), "event": kind, **facts}, default=str)
        self._write(line.encode() + b"\n")

    def _write(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise RecordingError(
                f"{self._path}: write failed: {error.strerror}; earlier steps are readable, and the run can be resumed"
            ) from error

    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()


@contextmanager
def rings_taken_in(directory: Path, event: Callable[..., None]) -> Iterator[None]:
    """At the end of the block, write the rings of dead workers into their batches.

    Rings are unreadable after a reboot or on another machine. After an error, such as a full disk, rings that
    cannot be written stay unchanged.

    Raises:
        RecordingError: a batch cannot be written
    """
    try:
        yield
    except BaseException:
        with suppress(RecordingError):  # the first error is the one to report
            _take_in(directory, event)
        raise
    _take_in(directory, event)


def _take_in(directory: Path, event: Callable[..., None]) -> None:
    done, problems = take_in_rings(directory)
    for writer in done:
        event("ring taken in", writer=writer)
    for problem in problems:
        event("ring left", problem=problem)
        warn(problem)


def machine() -> dict[str, Any]:
    """Return platform, processors, and the versions of Python and of all packages."""
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "packages": _packages(),
    }


@functools.cache  # the function reads a file of every package
def _packages() -> dict[str, str]:
    return {name: found.version for found in distributions() if (name := found.metadata["Name"])}
