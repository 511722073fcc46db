"""One writer's journal: JSON lines, append-only (docs/FORMAT.md, section 7)."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gym_trace.errors import CorruptTrace, UnstorableValue
from gym_trace.model.containers import MAX_CONTAINERS
from gym_trace.model.values import shown
from gym_trace.storage.local import descriptor_of, opened
from gym_trace.storage.regular import open_regular

try:
    import fcntl
except ImportError:  # not a POSIX system: writers cannot be told alive from dead
    fcntl = None  # type: ignore[assignment]

SUFFIX = ".manifest.jsonl"
_MOST_BITS = 4096  # of an integer in a line that holds such ones; Python reads 4300 digits at most
_MAX_LINE = 64 << 20  # bytes; a longer line is none, and neither is what follows it
MAX_LINES = 1 << 20  # what follows them is not read
_written_here: set[str] = set()  # manifests that this process writes


def lock(fd: int) -> bool:
    """Whether this process now holds the lock of a file that nobody else has; always so where there are no locks."""
    if fcntl is not None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


class ManifestWriter:
    """Appends lines to a new manifest, and holds its lock until closed: a reader sees by it that the writer lives."""

    def __init__(self, path: Path, schema: dict[str, Any]):
        first = as_json({"type": "writer", **schema})
        if len(first) >= _MAX_LINE:  # of which those of a batch, that are to be read, have about as many
            raise UnstorableValue(f"spaces and metadata take {len(first)} bytes in the manifest; at most {_MAX_LINE}")
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        self._name = os.path.realpath(path)
        _written_here.add(self._name)
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks, as clusters have them
                fcntl.flock(self._fd, fcntl.LOCK_EX)  # may wait a moment for a reader that asks whether we live
        try:
            self._write(first)
        except OSError:
            self.close()
            raise

    def batch(self, file: str, size: int, crc: int, episodes: int, steps: int) -> None:
        self._line({"type": "batch", "file": file, "bytes": size, "crc32": crc, "episodes": episodes, "steps": steps})

    def closed(self, episodes: int, steps: int, extra: dict[str, Any]) -> None:
        self._line({"type": "closed", "episodes": episodes, "steps": steps, **extra})

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            _written_here.discard(self._name)

    def _line(self, entry: dict[str, Any]) -> None:
        self._write(as_json(entry))

    def _write(self, line: bytes) -> None:
        line += b"\n"
        while line:
            line = line[os.write(self._fd, line) :]


def append(path: Path, entry: dict[str, Any]) -> None:
    """Appends a line to a manifest that somebody else may be writing to, at once. Raises OSError."""
    fd = open_regular(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(fd, as_json(entry) + b"\n")
    finally:
        os.close(fd)


def as_json(entry: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(entry, default=_as_json, separators=(",", ":"))
    except (TypeError, ValueError):  # a key that JSON does not know, an integer of so many digits that Python refuses
        text = json.dumps(_as_text(entry), default=_as_json, separators=(",", ":"))
    return text.encode()


def _as_text(value: Any) -> Any:
    """value with keys that are text, and with integers beyond all that is usual as text, in hexadecimal digits."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else shown(_as_text(key)): _as_text(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_text(item) for item in value]
    if isinstance(value, np.ndarray):
        return _as_text(value.tolist())
    return hex(value) if isinstance(value, int) and value.bit_length() > _MOST_BITS else value


def _as_json(value: Any) -> Any:
    """What JSON does not know, as what comes nearest: manifests are for people and for `jq`, batches are exact."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return shown(value)


class Line(NamedTuple):
    """A line of a manifest: its range of bytes, and its entry, or None if it is not a JSON object."""

    start: int
    end: int
    entry: dict[str, Any] | None
    whole: bool  # whether it ends in a newline; the last line of a writer that was killed may not


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a manifest; what is beyond the limits is one line without an entry. Raises CorruptTrace, OSError."""
    start = 0
    with opened(path) as raw_file, io.BufferedReader(raw_file) as file:
        size = os.fstat(file.fileno()).st_size
        for number in range(MAX_LINES + 1):
            raw = file.readline(_MAX_LINE)
            if not raw:
                return
            end = start + len(raw)
            if number == MAX_LINES or (len(raw) == _MAX_LINE and not raw.endswith(b"\n")):
                yield Line(start, max(size, end), None, True)
                return
            yield Line(start, end, _entry(raw), raw.endswith(b"\n"))
            start = end


def read_manifest(path: Path) -> Iterator[dict[str, Any]]:
    """The entries of a manifest but for lines that are not whole or no JSON objects; none of what is no file."""
    with contextlib.suppress(CorruptTrace, FileNotFoundError):
        for line in read_lines(path):
            if line.whole and line.entry is not None:
                yield line.entry


def _entry(raw: bytes) -> dict[str, Any] | None:
    if is_bomb(raw):
        return None
    try:
        entry = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def is_bomb(raw: bytes) -> bool:
    """Whether JSON has so many lists, maps and entries that it would take many times its size in memory."""
    return len(raw) > MAX_CONTAINERS and raw.count(b"[") + raw.count(b"{") + raw.count(b":") > MAX_CONTAINERS


def is_written_here(path: Path) -> bool:
    """Whether it is this process that writes this manifest."""
    return os.path.realpath(path) in _written_here


def is_alive(path: Path) -> bool:
    """Whether a process holds the lock of this manifest; False where there are no such locks."""
    if fcntl is None:
        return False
    try:
        fd = descriptor_of(path)
    except (CorruptTrace, OSError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False
