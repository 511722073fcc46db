"""Untrusted files of an old recording: regular files in its directory only, never changed."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gym_trace.errors import CorruptTrace, UnreadableRecording
from gym_trace.exchange.formats.foreign import in_parts
from gym_trace.format.manifest import json_of
from gym_trace.storage.local import LocalReader, LocalStorage

MAX_JSON = 256 << 20  # bytes; the values in it take several times that in memory
_DEEPEST = 64
_MOST_READS = 16  # per byte of a directory, as a file or array can be named many times


class OldDirectory:
    """A directory with an old recording.

    Attributes:
        path: pathlib.Path.
        names: of its regular files, in natural order (a9 before a10).
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Raises TraceNotFound."""
        self.path, self._storage = Path(path), LocalStorage(path)
        self.names = sorted(self._storage.names(), key=in_parts)
        self._mapped: tuple[str, Any] = "", b""  # name and bytes of the file that was mapped last
        self._bytes_left = _MOST_READS * sum(map(self._storage.size, self.names))

    def count_bytes(self, size: int, json_path: Path) -> None:
        """Count bytes that are read. Raises UnreadableRecording if files or arrays are named too often."""
        self._bytes_left -= size
        if self._bytes_left < 0:
            raise malformed(json_path, f"read more than {_MOST_READS} times, as it or its arrays are named so often")

    def mapped(self, name: str) -> Any:
        """Return the bytes of a file, mapped into memory. Raises UnreadableRecording."""
        if self._mapped[0] != name:
            with self._opened(name) as file:
                raw = mmap.mmap(file.fileno(), file.size, access=mmap.ACCESS_READ) if file.size else b""
            self._mapped = name, raw
        return self._mapped[1]

    def json(
        self, name: str, object_hook: Callable[[dict[str, Any]], Any] | None = None, limit: int = MAX_JSON
    ) -> dict[str, Any]:
        """Return the JSON object in a file of up to `limit` bytes. object_hook: see json.loads."""
        path = self.path / name
        with self._opened(name) as file:
            if file.size > limit:
                raise UnreadableRecording(f"{path}: {file.size} bytes of JSON, more than the limit of {limit}")
            self.count_bytes(file.size, path)
            raw = file.read(0, file.size)
        try:
            content = json_of(raw, object_hook=object_hook)
        except (ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())
            raise UnreadableRecording(
                f"{path}: not JSON ({reason:.100}): truncated or damaged; import from a good copy, or "
                "remove what names it to import the rest"
            ) from error
        if not isinstance(content, dict):
            raise malformed(path, "not a JSON object")
        if not _is_shallow(content, _DEEPEST):
            raise malformed(path, f"values nested more than {_DEEPEST} deep")
        return content

    def _opened(self, name: str) -> LocalReader:
        path = self.path / name
        try:
            return self._storage.open(name)
        except FileNotFoundError as error:
            raise UnreadableRecording(f"{path}: file of the recording is missing") from error
        except CorruptTrace as error:
            raise UnreadableRecording(f"{path}: cannot be opened: {error.problem}") from error
        except OSError as error:
            raise UnreadableRecording(f"{path}: cannot be opened: {error.strerror}") from error


def plain_name(name: Any, json_path: Path) -> str:
    """Check a file name in a JSON file. Raises UnreadableRecording for a path."""
    if isinstance(name, str) and name == os.path.basename(name) and name not in ("", ".", "..") and "\0" not in name:
        return name
    raise UnreadableRecording(
        f"{json_path}: names {name!r:.100}, not a file next to it; nothing outside of the directory is read"
    )


def malformed(path: Path, problem: str) -> UnreadableRecording:
    """Return the error for a file that is JSON, but malformed."""
    text = problem if problem.isprintable() else ascii(problem)
    return UnreadableRecording(f"{path}: {text}; damaged, or from an unknown recorder")


def _is_shallow(value: Any, depth: int) -> bool:
    items = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_shallow(item, depth - 1) for item in items if isinstance(item, (dict, list)))
