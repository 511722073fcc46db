"""The files of an old recording: none is opened but regular ones in its directory, none is trusted, none changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace, TraceNotFound, UnreadableRecording
from gym_trace.exchange.formats.foreign import in_parts
from gym_trace.format.manifest import is_bomb
from gym_trace.format.ring.segment import Segment
from gym_trace.storage.local import open_regular, size_on_disk

MAX_JSON = 256 << 20  # bytes; what is in it takes several times that in memory
_DEEPEST = 64
_MOST_AGAIN = 16  # times the bytes of a directory may be read: one file or array can be named many times


class NewWriter(NamedTuple):
    """A writer of the new trace.

    name: its id, if valid.
    schema: for its schema record (docs/FORMAT.md, section 4).
    segments: its episodes, read on demand.
    """

    name: str
    schema: dict[str, Any]
    segments: Iterator[Segment]


class OldFile:
    """A file that is open for reading."""

    def __init__(self, path: Path, fd: int, size: int):
        self.path, self.size = path, size
        self._fd = fd

    def read(self, offset: int, count: int) -> bytes:
        """count bytes from offset on, which are known to be there."""
        pieces = []
        while count and (piece := os.pread(self._fd, count, offset)):
            pieces.append(piece)
            offset, count = offset + len(piece), count - len(piece)
        if count:
            raise UnreadableRecording(f"{self.path}: file shrank while being read; try again")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        os.close(self._fd)


class OldDirectory:
    """A directory with an old recording; to be closed.

    Attributes:
        path: pathlib.Path.
        names: of its regular files, numbers in them in their order.
        kept: arrays that were read whole and are needed again.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._latest: OldFile | None = None
        self.kept: dict[Any, Array] = {}
        try:
            with os.scandir(self.path) as entries:  # a link could lead out of the directory, reading a pipe never ends
                found = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
                size = sum(entry.stat(follow_symlinks=False).st_size for entry in found)
        except FileNotFoundError as error:
            raise TraceNotFound(f"{self.path}: no such directory") from error
        except NotADirectoryError as error:
            raise TraceNotFound(f"{self.path}: is a file; pass the directory of a recording") from error
        self.names = sorted((entry.name for entry in found), key=in_parts)
        self._left = _MOST_AGAIN * size

    def close(self) -> None:
        if self._latest is not None:
            self._latest.close()
            self._latest = None

    def count_bytes(self, size: int, said_in: Path) -> None:
        """Count bytes that are read. Raises UnreadableRecording if files or arrays are named again and again."""
        self._left -= size
        if self._left < 0:
            raise malformed(said_in, f"read more than {_MOST_AGAIN} times, as it or its arrays are named so often")

    def file(self, name: str) -> OldFile:
        """The file of this name, which is closed when another one is asked for."""
        if self._latest is None or self._latest.path.name != name:
            self.close()
            self._latest = self._opened(name)
        return self._latest

    def json(
        self, name: str, object_hook: Callable[[dict[str, Any]], Any] | None = None, limit: int = MAX_JSON
    ) -> dict[str, Any]:
        """The JSON object in a file of up to limit bytes."""
        with closing(self._opened(name)) as file:
            if file.size > limit:
                raise UnreadableRecording(f"{file.path}: {file.size} bytes of JSON, more than the limit of {limit}")
            self.count_bytes(file.size, file.path)
            raw = file.read(0, file.size)
        if is_bomb(raw):
            raise malformed(file.path, "too many lists, maps and entries")
        try:
            content = json.loads(raw, object_hook=object_hook)
        except (ValueError, RecursionError) as error:
            what = " ".join(str(error).split())
            raise UnreadableRecording(
                f"{file.path}: not JSON ({what:.100}): truncated or damaged; import from a good copy, or "
                "remove what names it to import the rest"
            ) from error
        if not isinstance(content, dict):
            raise malformed(file.path, "not a JSON object")
        if not _is_shallow(content, _DEEPEST):
            raise malformed(file.path, f"values nested more than {_DEEPEST} deep")
        return content

    def _opened(self, name: str) -> OldFile:
        path = self.path / name
        try:
            fd = open_regular(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise UnreadableRecording(f"{path}: file of the recording is missing") from error
        except OSError as error:
            raise UnreadableRecording(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            return OldFile(path, fd, size_on_disk(fd, path))
        except CorruptTrace as error:
            os.close(fd)
            raise UnreadableRecording(f"{path}: {error.problem}") from error


def plain_name(name: Any, said_in: Path) -> str:
    """name, which a file of the recording gives for another one. Raises UnreadableRecording if it leads elsewhere."""
    if isinstance(name, str) and name == os.path.basename(name) and name not in ("", ".", "..") and "\0" not in name:
        return name
    raise UnreadableRecording(
        f"{said_in}: names {name!r:.100}, not a file next to it; nothing outside of the directory is read"
    )


def malformed(path: Path, what: str) -> UnreadableRecording:
    """Return the error for a file that is JSON, but malformed."""
    text = what if what.isprintable() else ascii(what)
    return UnreadableRecording(f"{path}: {text}; damaged, or from an unknown recorder")


def _is_shallow(value: Any, depth: int) -> bool:
    items = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_shallow(item, depth - 1) for item in items if isinstance(item, (dict, list)))
