"""Limits for untrusted files, and spaces for their arrays."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from gym_trace.data.json_values import json_text, tagged, untagged
from gym_trace.data.layout import PlainSpace, to_array_map
from gym_trace.data.values import is_utf8
from gym_trace.errors import CorruptTrace, UnreadableRecording
from gym_trace.format.manifest import json_of
from gym_trace.storage.local import size_on_disk

_MOST_JSON = 64 << 20  # bytes of a file
_MOST_MEMORY = 256 << 20  # estimated bytes of the values of a batch
_JSON_PREFIX = "\0"  # marks JSON in place of text
_MEMORY = {b",": 40, b"[": 64, b"{": 64, b":": 100}  # bytes of an item, a list, a map and an entry of a map
_FREE_BYTES, _BYTES_PER_BYTE = 16 << 20, 4096  # decompressed bytes of any file, and per stored byte
_FREE_ROWS, _ROWS_PER_BYTE, _EPISODES_PER_BYTE = 64 << 10, 1024, 4  # rows or episodes of any file, and per stored byte


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises UnreadableRecording."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_JSON + 1)
        content = None if len(raw) > _MOST_JSON else json_of(raw)
    except (FileNotFoundError, NotADirectoryError):
        raise UnreadableRecording(f"{path}: missing; this format requires it") from None
    except OSError as error:
        raise UnreadableRecording(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise UnreadableRecording(f"{path}: not a JSON object, or too large")
    return content


def check_files(path: Path) -> int:
    """Check all files that an importer of this path may open: the file, or those in the directory.

    Return their size in bytes. Raises UnreadableRecording for pipes and similar files without an end, and for files
    that are mostly holes.
    """
    inner = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    return sum(map(_checked_size, chain([path], inner)))


def check_links(path: Path) -> None:
    """Raise UnreadableRecording for a link in a directory that leads out of it.

    Links of a Hugging Face cache to its blobs are allowed. path itself may be a link, as the user named it.
    """
    root = Path(os.path.realpath(path))
    blobs = _blobs_of(root)
    for folder, folders, names in os.walk(path):
        for file in (Path(folder, name) for name in (*folders, *names)):
            target = Path(os.path.realpath(file)) if file.is_symlink() else root
            if not target.is_relative_to(root) and not (target.parent == blobs and target.is_file()):
                raise UnreadableRecording(
                    f"{file}: is a link out of {path}, which is not followed; import a copy with the files themselves "
                    "(cp -rL)"
                )


def _blobs_of(root: Path) -> Path | None:
    """Return the folder of blobs to which datasets--NAME/snapshots/REVISION of a Hugging Face cache has links."""
    for folder in (root, *root.parents):
        if folder.parent.name == "snapshots" and re.match("(datasets|models|spaces)--", folder.parent.parent.name):
            return folder.parent.parent / "blobs"
    return None


def _checked_size(file: Path) -> int:
    try:
        status = file.stat()
    except OSError:  # reading the file raises a better message
        return 0
    if stat.S_ISDIR(status.st_mode):
        return 0
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableRecording(f"{file}: not a regular file")
    if 512 * getattr(status, "st_blocks", 0) >= status.st_size:  # no holes: need not open it
        return status.st_size
    with contextlib.suppress(OSError), file.open("rb") as opened:
        try:
            size_on_disk(opened.fileno(), file)
        except CorruptTrace as error:
            raise UnreadableRecording(f"{file}: {error.problem}; file rejected") from error
    return status.st_size


class Values:
    """Decoder of the JSON texts of one batch, in bounded memory: a compressed file may hold texts of any size."""

    def __init__(self) -> None:
        self._memory_left = _MOST_MEMORY

    def json(self, text: str | bytes) -> Any:
        """Decode JSON. Raises ValueError, RecursionError."""
        self._memory_left -= _memory_of(text)
        if self._memory_left < 0:
            raise ValueError("too many lists, maps and numbers")
        return json_of(text)

    def of(self, text: str | bytes) -> Any:
        """Decode tagged JSON (docs/reference/steps.md). Raises UnreadableRecording."""
        try:
            return untagged(self.json(text))
        except (ValueError, RecursionError) as error:
            raise UnreadableRecording(f"invalid JSON value ({error!s:.100})") from error

    def of_text(self, text: str) -> Any:
        """Invert text_of(). Raises UnreadableRecording."""
        return self.of(text[1:]) if text.startswith(_JSON_PREFIX) else text


def text_of(value: Any) -> str:
    """Return text unchanged, other values as a zero byte and tagged JSON (docs/reference/steps.md)."""
    is_plain = type(value) is str and not value.startswith(_JSON_PREFIX) and is_utf8(value)
    return value if is_plain else _JSON_PREFIX + json_text(tagged(value))


def unpacked(texts: Iterable[bytes]) -> list[Any]:
    """Invert text_of() for a batch. Raises UnreadableRecording."""
    values = Values()
    return [values.of_text(text.decode(errors="replace")) for text in texts]


def all_from_json(texts: Iterable[bytes]) -> list[Any]:
    """Decode a batch of tagged JSON; None for an empty text. Raises UnreadableRecording."""
    values = Values()
    return [values.of(text) if text else None for text in texts]


def _memory_of(text: str | bytes) -> int:
    """Estimate the bytes of memory that the values in a JSON text take."""
    raw = text.encode(errors="replace") if isinstance(text, str) else text
    return 2 * len(raw) + sum(size * raw.count(mark) for mark, size in _MEMORY.items())


def is_plausible(size: int, stored: int) -> bool:
    """Return True if a compressed file of `stored` bytes may hold `size`: only a malicious one is all zeros."""
    return 0 <= size <= _FREE_BYTES + _BYTES_PER_BYTE * stored


def are_plausible_rows(rows: int, stored: int) -> bool:
    """Return True if a compressed file of `stored` bytes may hold this number of rows, each of which takes time."""
    return 0 <= rows <= _FREE_ROWS + _ROWS_PER_BYTE * stored


def most_episodes(stored: int) -> int:
    """Return the max number of episodes in files of `stored` bytes; an episode takes much more time than a row."""
    return _FREE_ROWS + _EPISODES_PER_BYTE * stored


def begins_with(path: Path, magic: bytes) -> bool:
    """Return True if a file begins with these bytes; False if it is unreadable."""
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError:
        return False


def widest(dtype: np.dtype[Any], shape: tuple[int, ...]) -> PlainSpace:
    """Return the Box of all values of a boolean, integer or float dtype."""
    bounds: tuple[Any, Any] = (-np.inf, np.inf)
    if dtype.kind in "iu":
        bounds = (np.iinfo(dtype).min, np.iinfo(dtype).max)
    elif dtype.kind == "b":
        bounds = (False, True)
    dtype = dtype.newbyteorder("<")
    low, high = (to_array_map(np.array(bound, dtype)) for bound in bounds)
    return {"type": "Box", "dtype": dtype.str, "shape": list(shape), "low": low, "high": high}


def in_parts(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts a10 after a9."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d{1,18})", name)]
