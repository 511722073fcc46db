"""Manifest of one writer: append-only JSON lines (docs/FORMAT.md, section 7)."""

from __future__ import annotations

import base64
import contextlib
import io
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.packing import MAX_CONTAINERS, pack, pack_lenient
from gym_trace.data.values import shown
from gym_trace.errors import CorruptTrace, UnstorableValue
from gym_trace.format.kernels import crc32
from gym_trace.storage.protocol import Appender, Overwritten, Reader, ReadStorage, Span, Storage

SUFFIX = ".manifest.jsonl"
FAILED = "failed"  # type of the line with the reason why a writer stopped
DROPPED = "dropped"  # type of the line written before a batch is removed or loses episodes
_MOST_BITS = 4096  # larger integers are written as text, because Python parses at most 4300 digits
_MAX_LINE = 64 << 20  # bytes; reading stops at a longer line
READ_AHEAD = 16 << 20  # bytes that are fetched together at a URL
MAX_LINES = 1 << 20  # reading stops after this many lines


def created(storage: Storage, name: str, schema: dict[str, Any]) -> Appender:
    """Create and lock the manifest of a writer. The lock, held until it is closed, shows that the writer is alive."""
    first = line({"type": "writer", **schema, "crc32": crc32(pack(schema))})
    if len(first) > _MAX_LINE:  # readers reject longer lines
        raise UnstorableValue(f"spaces and metadata take {len(first)} bytes; the limit is {_MAX_LINE}")
    file = storage.create(name, lock=True)
    try:
        file.write(first)
    except OSError:
        file.close()
        raise
    return file


def reopened(storage: Storage, name: str) -> Appender | None:
    """Open and lock the manifest of a dead writer, and remove a torn last line; return None if it cannot be locked.

    Raises CorruptTrace, OSError.
    """
    file = storage.reopen(name, locked=True)
    if file is not None:
        try:
            for last in read_lines(storage, name):
                if not last.whole:
                    file.truncate(last.start)
        except BaseException:
            file.close()
            raise
    return file


def schema_in(first: dict[str, Any]) -> tuple[dict[str, Any], bool] | None:
    """Return the schema in the first line of a manifest, and True if JSON holds it exactly; None: no such line."""
    if first.get("type") != "writer":
        return None
    schema = {key: value for key, value in first.items() if key not in ("type", "crc32")}
    return schema, "crc32" in first and crc32(pack_lenient(schema)[0]) == first["crc32"]


def append(storage: Storage, writer: str, entry: dict[str, Any]) -> None:
    """Append a line to the manifest of a writer, which may be writing to it. Raises OSError."""
    storage.append(f"{writer}{SUFFIX}", line(entry))


def line(entry: dict[str, Any]) -> bytes:
    return as_json(entry) + b"\n"


def as_json(entry: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(entry, default=_as_json, separators=(",", ":"))
    except (TypeError, ValueError):  # a key that JSON does not support, or an integer with too many digits
        text = json.dumps(_as_text(entry), default=_as_json, separators=(",", ":"))
    return text.encode()


def _as_text(value: Any) -> Any:
    """Return value with keys converted to text, and very large integers to hexadecimal text."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else shown(_as_text(key)): _as_text(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_text(item) for item in value]
    if isinstance(value, np.ndarray):
        return _as_text(value.tolist())
    return hex(value) if isinstance(value, int) and value.bit_length() > _MOST_BITS else value


def _as_json(value: Any) -> Any:
    """Approximate a value that JSON does not support. Batches hold the exact value; manifests are for people."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return shown(value)


class Line(NamedTuple):
    """A line of a manifest: its byte range, and its entry, or None if it is not a JSON object."""

    start: int
    end: int
    entry: dict[str, Any] | None
    whole: bool  # True if it ends in a newline; the last line of a killed writer may not


def read_lines(storage: ReadStorage, name: str) -> Iterator[Line]:
    """Yield the lines of a manifest, and everything beyond the limits as one line without entry.

    Raises CorruptTrace, OSError.
    """
    start = 0
    with storage.open(name) as reader, io.BufferedReader(_ManifestFile(storage, name, reader)) as file:
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


class _ManifestFile(io.RawIOBase):
    """Sequential access to a Reader."""

    def __init__(self, storage: ReadStorage, name: str, file: Reader):
        self._storage, self._name, self._file, self._at, self._expected = storage, name, file, 0, 0

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int:
        if self._at >= self._expected:
            with contextlib.suppress(Overwritten):  # the first read finds the new version
                self._storage.expect([Span(self._name, self._at, READ_AHEAD)])
            self._expected = self._at + READ_AHEAD
        data = self._file.read(self._at, len(out))
        self._at += len(data)
        out[: len(data)] = data
        return len(data)


def read_manifest(storage: ReadStorage, name: str) -> Iterator[dict[str, Any]]:
    """Yield the entries of a manifest; skip incomplete and invalid lines. A missing file has no entries."""
    with contextlib.suppress(CorruptTrace, FileNotFoundError):
        for one in read_lines(storage, name):
            if one.whole and one.entry is not None:
                yield one.entry


def _entry(raw: bytes) -> dict[str, Any] | None:
    try:
        entry = json_of(raw)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def json_of(text: str | bytes, **options: Any) -> Any:
    """Parse JSON; reject a text whose values would take much more memory. options: arguments of json.loads.

    Raises ValueError, RecursionError.
    """
    if is_bomb(text.encode(errors="replace") if isinstance(text, str) else text):
        raise ValueError(f"more than {MAX_CONTAINERS} lists, maps and entries")
    return json.loads(text, **options)


def is_bomb(raw: bytes) -> bool:
    """Return True if JSON has too many lists, maps and entries: in memory they take many times its size."""
    return len(raw) > MAX_CONTAINERS and raw.count(b"[") + raw.count(b"{") + raw.count(b":") > MAX_CONTAINERS
