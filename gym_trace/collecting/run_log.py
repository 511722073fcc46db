"""A run as its directory knows it: its settings, what has happened, which episodes are there."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np

from gym_trace.envs.seeding import EPISODES, episode_of
from gym_trace.errors import CorruptTrace, InvalidOption, RecordingError
from gym_trace.format.directory import find_writers
from gym_trace.format.manifest import json_of
from gym_trace.integrity.rings import take_in_rings
from gym_trace.model.schema import as_map
from gym_trace.model.vocabulary import Outcome
from gym_trace.reading.origins.reader import presented
from gym_trace.reading.writer_reader import WriterReader
from gym_trace.storage.local import LocalStorage, lock, open_regular, size_on_disk

EVENTS = "events.jsonl"
_SETTINGS = {"run", "seed", "policy", "environment", "recording"}
_MOST_SEED = 1 << 128
_MOST_BYTES = 1 << 32  # that are read of it
_LONGEST_LINE = 16 << 20
_START = b'"start"'  # in each line that tells of a beginning, and in few others
_ORPHANS_SECONDS = 15


class Events:
    """What happens in a run, a line of JSON each, beside the trace."""

    def __init__(self, directory: Path):
        """Raises InvalidOption if another run is going on in the directory, or the file cannot be written to."""
        self._path = directory / EVENTS
        try:
            fd = open_regular(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            raise InvalidOption(f"{self._path}: {error.strerror}; record into another directory") from error
        self._file = open(fd, "ab+", buffering=0)  # noqa: SIM115 - open as long as the run
        if not lock(self._file.fileno()):
            self._file.close()
            raise InvalidOption(f"{directory}: a run is going on here; wait for it to end, or record elsewhere")
        size = self._file.seek(0, os.SEEK_END)
        if size:
            self._file.seek(size - 1)
            if self._file.read(1) != b"\n":  # the line that was being written when the run was killed
                self._write(b"\n")

    def __call__(self, kind: str, **facts: Any) -> None:
        line = json.dumps({"time": time.time(), "event": kind, **facts}, default=str)
        self._write(line.encode() + b"\n")

    def _write(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise RecordingError(
                f"{self._path} cannot be written: {error.strerror}; what was recorded before can be read, and the run "
                "be resumed"
            ) from error

    def size(self) -> int:
        """Bytes."""
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()


def settings_of(directory: Path) -> dict[str, Any] | None:
    """The settings of the run that was last started in a directory, None if there was none.

    Anybody may have written the file. Raises CorruptTrace if they are not such as a run has.
    """
    path = directory / EVENTS
    try:
        fd = open_regular(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CorruptTrace(f"cannot be resumed from: {error.strerror}", path) from error
    found = None
    with open(fd, "rb") as file:
        if size_on_disk(fd, path) > _MOST_BYTES:
            raise CorruptTrace(f"larger than {_MOST_BYTES} bytes, which no run writes", path)
        while line := file.readline(_LONGEST_LINE):
            if _START in line and (event := _entry(line)).get("event") == "start":
                found = event.get("settings")
    if found is not None and not _is_settings(found):
        raise CorruptTrace("the settings of its last run are not such as a run has: it cannot be resumed", path)
    return found


def _entry(line: bytes) -> dict[str, Any]:
    try:
        entry = json_of(line)
    except (ValueError, RecursionError):  # such as the line that was being written when the run was killed
        return {}
    return entry if isinstance(entry, dict) else {}


def _is_settings(found: Any) -> bool:
    """Whether they are as collect() writes them."""
    if not isinstance(found, dict) or set(found) - _SETTINGS:
        return False
    run, seed = found.get("run"), found.get("seed")
    return (
        isinstance(run, str)
        and re.fullmatch("[0-9a-f]{1,32}", run) is not None
        and type(seed) is int
        and 0 <= seed < _MOST_SEED
        and isinstance(found.get("policy"), str)
        and isinstance(found.get("environment"), (dict, type(None)))
        and isinstance(found.get("recording"), dict)
    )


def check_same(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises InvalidOption where a run would go on as another one."""
    for name in sorted({*before, *now} - {"run"}):
        if before.get(name) != now.get(name):
            raise InvalidOption(
                f"this run was started with {name}={before.get(name)!r}, not {now.get(name)!r}: resume it with the "
                "same, or record into another directory"
            )


def await_writers(directory: Path, run: str) -> None:
    """Returns when no process of a run writes any more: they end soon after their parent. Raises InvalidOption."""
    deadline = time.monotonic() + _ORPHANS_SECONDS
    while time.monotonic() < deadline:
        writers = [WriterReader(files) for files in find_writers(LocalStorage(directory))]
        if not any(writer.alive and _belongs(writer, run) for writer in writers):
            return
        time.sleep(0.1)
    raise InvalidOption(f"{directory}: processes of this run are still writing; end them before it is resumed")


def _belongs(writer: WriterReader, run: str) -> bool:
    return as_map(writer.about_or_empty.metadata).get("run") == run  # one killed at once has not said anything


def finished(directory: Path, run: str, root: int, writer: str | None = None) -> dict[int, int]:
    """The episodes of a run that are on disk whole, and how many steps they have.

    writer: only those of this writer. Only writers count that say that they belong to the run.
    """
    found: dict[int, int] = {}
    for files in find_writers(LocalStorage(directory)) if directory.is_dir() else ():
        if writer is not None and files.writer != writer:
            continue
        for reader in presented(WriterReader(files)):
            if not _belongs(reader, run):
                continue
            table = reader.parts.table
            whole = table[np.isin(table["outcome"], (Outcome.TERMINATED.word, Outcome.TRUNCATED.word))]
            whole = whole[(whole["first_step"] == 0) & (whole["seed"] >= 0) & (whole["seed"] < EPISODES)]
            found.update(
                (episode_of(root, seed), steps) for seed, steps in zip(whole["seed"].tolist(), whole["steps"].tolist())
            )
    return found


@contextlib.contextmanager
def rings_taken_in(events: Mapping[Path, Callable[..., None]]) -> Iterator[None]:
    """Write the rings of dead workers into batches when the block ends, so that the traces outlive this machine.

    Raises RecordingError if a ring cannot be written. An error of the block comes first.

    Args:
        events: the event logger of each trace directory.
    """
    try:
        yield
    except BaseException:
        for directory, event in events.items():
            with contextlib.suppress(RecordingError):  # the rings stay readable, and --resume takes them in
                _take_in(directory, event)
        raise
    for directory, event in events.items():
        _take_in(directory, event)


def _take_in(directory: Path, event: Callable[..., None]) -> None:
    done, problems = take_in_rings(directory)
    for writer in done:
        event("ring taken in", writer=writer)
    for problem in problems:
        event("ring left", problem=problem)
        warnings.warn(problem, stacklevel=2)


def machine() -> dict[str, Any]:
    """Platform, processors, and the versions of Python and of all packages."""
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "packages": {name: found.version for found in distributions() if (name := found.metadata["Name"])},
    }
