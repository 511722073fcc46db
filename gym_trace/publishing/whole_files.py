"""Whole files of a trace to and from an object store, each there whole or not at all."""

from __future__ import annotations

import contextlib
import io
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from gym_trace.errors import CorruptTrace, TraceExists
from gym_trace.storage.local import LocalStorage
from gym_trace.storage.remote.objects import ObjectStore, Stored, Wanted, fetched, persistently

_PIECE = 8 << 20  # bytes of a request
_AT_ONCE = 4  # pieces of a file
OnBytes = Callable[[int], None]


def upload(
    store: ObjectStore, shown: str, name: str, content: Path | bytes, crc: int | None = None, new: bool = True
) -> None:
    """Publish a file, or bytes. A conflict with an object of the same content is a success whose answer was lost.

    Args:
        shown: URL for messages.
        crc: of the file, if known: it is not published with another one.
        new: create it only; False: overwrite it.

    Raises:
        TraceExists: an object of this name has other content.
        CorruptTrace, RemoteError, OSError.
    """
    if crc is not None and isinstance(content, Path) and (found := _crc_of(content)) != crc:
        raise CorruptTrace(f"checksum {found:#x}, but {crc:#x} in the manifest", content)
    try:
        persistently(lambda: store.put(name, content, new), f"{shown}/{name}")
    except FileExistsError:
        if not is_same(store, shown, name, content):
            raise TraceExists(f"{shown}/{name}: exists with other content; pass another URL") from None


def download(
    store: ObjectStore, shown: str, name: str, stored: Stored, target: Path, crc: int | None, on_bytes: OnBytes
) -> None:
    """Fetch an object into a file, which gets its name once it is whole and checked, and replaces one of this name.

    Raises CorruptTrace for another checksum than crc, RemoteError, OSError.
    """
    fresh = target.with_name(f".{target.name}.pulled")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(fresh)
    try:
        found = 0
        with open(fresh, "xb") as file:
            for piece in pieces(store, shown, name, stored):
                file.write(piece)
                found = zlib.crc32(piece, found)
                on_bytes(len(piece))
            file.flush()
            os.fsync(file.fileno())
        if crc is not None and found != crc:
            raise CorruptTrace(f"checksum {found:#x}, but {crc:#x} in the manifest", f"{shown}/{name}")
        os.replace(fresh, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise
    LocalStorage(target.parent).sync()


def pieces(store: ObjectStore, shown: str, name: str, stored: Stored) -> Iterator[bytes]:
    """Yield an object from front to back. Raises RemoteError, Overwritten, FileNotFoundError."""
    for begin in range(0, stored.size, _AT_ONCE * _PIECE):
        ends = range(begin, min(begin + _AT_ONCE * _PIECE, stored.size), _PIECE)
        wanted = [Wanted(name, stored, at, min(_PIECE, stored.size - at)) for at in ends]
        yield from fetched(lambda: store, wanted, f"{shown}/{name}")


def is_same(store: ObjectStore, shown: str, name: str, content: Path | bytes) -> bool:
    """Read an object back and compare it with a file, or bytes."""
    stored = persistently(store.entries, shown).get(name)
    size = content.stat().st_size if isinstance(content, Path) else len(content)
    if stored is None or stored.size != size:
        return False
    with open(content, "rb") if isinstance(content, Path) else io.BytesIO(content) as file:
        return all(file.read(len(piece)) == piece for piece in pieces(store, shown, name, stored))


def _crc_of(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc
