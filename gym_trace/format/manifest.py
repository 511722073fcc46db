"""One writer's journal: JSON lines, append-only (docs/FORMAT.md, section 7)."""

from __future__ import annotations

import base64
import contextlib
import io
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from gym_trace.errors import CorruptTrace, UnstorableValue
from gym_trace.model.containers import MAX_CONTAINERS
from gym_trace.model.values import shown
from gym_trace.storage.protocol import Reader, Storage

SUFFIX = ".manifest.jsonl"
FAILED = "failed"  # the type of the line that says why a writer stopped
_MOST_BITS = 4096  # of an integer in a line that holds such ones; Python reads 4300 digits at most
_MAX_LINE = 64 << 20  # bytes; a longer line is none, and neither is what follows it
MAX_LINES = 1 << 20  # what follows them is not read


class ManifestWriter:
    """Appends lines to a new manifest, and holds its lock until closed: a reader sees by it that the writer lives."""

    def __init__(self, storage: Storage, name: str, schema: dict[str, Any]):
        first = as_json({"type": "writer", **schema})
        if len(first) >= _MAX_LINE:  # of which those of a batch, that are to be read, have about as many
            raise UnstorableValue(f"spaces and metadata take {len(first)} bytes in the manifest; at most {_MAX_LINE}")
        self._file = storage.create(name, lock=True)
        try:
            self._file.write(first + b"\n")
        except OSError:
            self.close()
            raise

    def batch(self, file: str, size: int, crc: int, episodes: int, steps: int) -> None:
        self._write({"type": "batch", "file": file, "bytes": size, "crc32": crc, "episodes": episodes, "steps": steps})

    def closed(self, episodes: int, steps: int, extra: dict[str, Any]) -> None:
        self._write({"type": "closed", "episodes": episodes, "steps": steps, **extra})

    def failed(self, problem: str) -> None:
        self._write({"type": FAILED, "problem": problem})

    def close(self) -> None:
        self._file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(as_json(entry) + b"\n")


def append(storage: Storage, writer: str, entry: dict[str, Any]) -> None:
    """Appends a line to the manifest of a writer, which may be writing to it. Raises OSError."""
    storage.append(f"{writer}{SUFFIX}", as_json(entry) + b"\n")


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


def read_lines(storage: Storage, name: str) -> Iterator[Line]:
    """The lines of a manifest; what is beyond the limits is one line without an entry. Raises CorruptTrace, OSError."""
    start = 0
    with storage.open(name) as reader, io.BufferedReader(_Stream(reader)) as file:
        for number in range(MAX_LINES + 1):
            raw = file.readline(_MAX_LINE)
            if not raw:
                return
            end = start + len(raw)
            if number == MAX_LINES or (len(raw) == _MAX_LINE and not raw.endswith(b"\n")):
                yield Line(start, max(reader.size, end), None, True)
                return
            yield Line(start, end, _entry(raw), raw.endswith(b"\n"))
            start = end


class _Stream(io.RawIOBase):
    """A file that is read from its beginning on."""

    def __init__(self, file: Reader):
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int:
        data = self._file.read(self._at, len(out))
        self._at += len(data)
        out[: len(data)] = data
        return len(data)


def read_manifest(storage: Storage, name: str) -> Iterator[dict[str, Any]]:
    """The entries of a manifest but for lines that are not whole or no JSON objects; none of what is no file."""
    with contextlib.suppress(CorruptTrace, FileNotFoundError):
        for line in read_lines(storage, name):
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
