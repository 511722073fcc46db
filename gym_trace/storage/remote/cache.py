"""Blocks of objects that were fetched, in memory or in a directory, limited by bytes.

An object is known by its URL, size and version, so an object that was overwritten has blocks of its own. In a directory
the blocks lie in files of 1 MiB, each with the checksums of its blocks in front: a block counts if its checksum is
right. The disk caches of fsspec cannot replace it: they have neither a limit of bytes nor checksums nor locks between
processes, and serve fsspec's file systems alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Protocol

import numpy as np

from gym_trace.errors import InvalidOption
from gym_trace.storage.local import LocalStorage, lock, open_regular, shared_lock, shared_with_others
from gym_trace.storage.remote.objects import StoredObject

BLOCK = 16 << 10
MEMORY_BYTES = 128 << 20
CACHE_BYTES = 10 << 30
CACHE_VARIABLE, LIMIT_VARIABLE = "GYM_TRACE_URL_CACHE", "GYM_TRACE_URL_CACHE_BYTES"
_EACH = 64  # blocks of a file
_SUM = np.dtype([("crc", "<u4"), ("length", "<u4")])  # length: 0 where there is no block
_HEAD = 4096
_FILE_BYTES = _HEAD + _EACH * BLOCK
_MOST_OPEN = 128  # files
_OBJECT = re.compile(r"object-[0-9a-f]{32}")
_PIECE = re.compile(r"\d{6,9}\.blocks")
_LEFT = 0.9  # share of the limit that stays used when blocks are removed


class _OfEachProcess(Protocol):
    def begin(self) -> None:
        """Make what a forked process cannot have of its parent: locks, threads, connections, locked files."""


_begun: weakref.WeakValueDictionary[int, _OfEachProcess] = weakref.WeakValueDictionary()


def begin_in_each_process(one: _OfEachProcess) -> None:
    """Call begin() now, and after each fork in the child."""
    one.begin()
    _begun[id(one)] = one


def _begin_again() -> None:
    for one in list(_begun.values()):
        one.begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)


class BlockCache(Protocol):
    """Blocks by object and number. Usable from any number of threads.

    Attributes:
        limit: bytes.
    """

    limit: int

    def has(self, key: str, numbers: Iterable[int]) -> bool:
        """Return True if all these blocks are present, judged without reading them."""

    def get(self, key: str, number: int) -> bytes | None:
        """Return a block, or None if it is not there."""

    def put(self, key: str, number: int, block: bytes) -> None:
        """Keep a block; others that were not used for the longest time are removed."""


@lru_cache(4096)
def object_key(url: str, name: str, stored: StoredObject) -> str:
    identity = "\0".join((url, name, str(stored.size), stored.version))
    return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class MemoryBlocks:
    """Blocks in memory; see BlockCache."""

    def __init__(self, limit: int = MEMORY_BYTES):
        self.limit = limit
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._bytes = 0
        begin_in_each_process(self)

    def begin(self) -> None:
        self._lock = Lock()

    def has(self, key: str, numbers: Iterable[int]) -> bool:
        return all((key, number) in self._blocks for number in numbers)

    def get(self, key: str, number: int) -> bytes | None:
        with self._lock:
            block = self._blocks.get((key, number))
            if block is not None:
                self._blocks.move_to_end((key, number))
            return block

    def put(self, key: str, number: int, block: bytes) -> None:
        with self._lock:
            if (key, number) not in self._blocks:
                self._blocks[key, number] = block
                self._bytes += len(block)
            while self._bytes > self.limit and self._blocks:
                self._bytes -= len(self._blocks.popitem(last=False)[1])


class _BlockFile:
    """A file of blocks, open and locked, so that no other process removes it; closed with the last reference to it."""

    def __init__(self, fd: int):
        self._fd, self._sums, self._verified = fd, np.zeros(_EACH, _SUM), set[int]()
        weakref.finalize(self, os.close, fd)
        self._reread()

    def has(self, place: int) -> bool:
        return bool(self._sums["length"][place])

    def read(self, place: int) -> bytes | None:
        if not self.has(place):
            self._reread()
        crc, length = self._sums[place].tolist()
        block = os.pread(self._fd, length, _HEAD + place * BLOCK)
        if place not in self._verified:
            if not length or len(block) != length or zlib.crc32(block) != crc:
                return None
            self._verified.add(place)
        return block

    def write(self, place: int, block: bytes) -> None:
        os.pwrite(self._fd, block, _HEAD + place * BLOCK)
        entry = np.array([(zlib.crc32(block), len(block))], _SUM)
        os.pwrite(self._fd, entry.tobytes(), place * _SUM.itemsize)  # last: it makes the block count

    def _reread(self) -> None:
        raw = os.pread(self._fd, _EACH * _SUM.itemsize, 0).ljust(_EACH * _SUM.itemsize, b"\0")
        sums = np.frombuffer(raw, _SUM).copy()
        sums["length"][sums["length"] > BLOCK] = 0
        self._verified -= set(np.flatnonzero(sums != self._sums).tolist())
        self._sums = sums


class DiskBlocks:
    """Blocks in a directory, which several processes may share; see BlockCache.

    Files that a process reads from are never removed; if no others are left, new blocks are not kept.

    Raises InvalidOption for a limit under the size of a file, and for a directory that other users can write to: blocks
    have checksums, which anyone can compute.
    """

    def __init__(self, root: str | os.PathLike[str], limit: int = CACHE_BYTES):
        self.root, self.limit = Path(root).expanduser().absolute(), limit
        if limit < _FILE_BYTES:
            raise InvalidOption(f"cache limit of {limit} bytes: too small; use {_FILE_BYTES} or more")
        os.makedirs(self.root, mode=0o700, exist_ok=True)
        if why := shared_with_others(self.root):
            raise InvalidOption(
                f"{self.root}: {why}; keep blocks in a directory that only you can write to (chmod go-w)"
            )
        self._most_open = max(1, min(_MOST_OPEN, limit // (4 * _FILE_BYTES)))
        self._bytes = sum(size for *_, size in self._files())
        self._is_full = False
        begin_in_each_process(self)

    def begin(self) -> None:
        self._lock = Lock()
        self._open: OrderedDict[Path, _BlockFile] = OrderedDict()

    def has(self, key: str, numbers: Iterable[int]) -> bool:
        return all((file := self._file(key, n, False)) is not None and file.has(n % _EACH) for n in numbers)

    def get(self, key: str, number: int) -> bytes | None:
        file = self._file(key, number, False)
        return None if file is None else file.read(number % _EACH)

    def put(self, key: str, number: int, block: bytes) -> None:
        self._make_room()
        with contextlib.suppress(OSError):  # the next reader fetches it again
            file = self._file(key, number, create=not self._is_full)
            if file is not None:
                file.write(number % _EACH, block)
                self._bytes += len(block)

    def _file(self, key: str, number: int, create: bool) -> _BlockFile | None:
        path = self.root / f"object-{key}" / f"{number // _EACH:06d}.blocks"
        with self._lock:
            if path in self._open:
                self._open.move_to_end(path)
                return self._open[path]
            try:
                if create:
                    os.makedirs(path.parent, mode=0o700, exist_ok=True)
                if path.parent.is_symlink() or shared_with_others(path.parent):  # from before the root was closed
                    return None
                fd = open_regular(path, os.O_RDWR | (os.O_CREAT if create else 0))
            except FileNotFoundError:
                return None
            file = _BlockFile(fd)
            shared_lock(fd)
            if os.fstat(fd).st_nlink == 0:  # removed between opening and locking
                return None
            os.utime(fd)
            self._open[path] = file
            if len(self._open) > self._most_open:
                self._open.popitem(last=False)
            return file

    def _files(self) -> list[tuple[float, Path, int]]:
        """Return when each file was used last, its path, and its bytes on the disk; the oldest first."""
        found = []
        for directory in self.root.iterdir():
            if _OBJECT.fullmatch(directory.name) and not directory.is_symlink():
                with contextlib.suppress(OSError), os.scandir(directory) as entries:
                    for entry in entries:
                        if _PIECE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                            about = entry.stat(follow_symlinks=False)
                            found.append((about.st_mtime, directory / entry.name, 512 * about.st_blocks))
        return sorted(found)

    def _make_room(self) -> None:
        """Remove the files that were not used for the longest time, but none that is in use."""
        if self._bytes + BLOCK <= self.limit:
            return
        with self._lock:
            files = self._files()
            self._bytes = sum(size for *_, size in files)  # also of other processes
            if self._bytes + BLOCK <= self.limit:
                self._is_full = False
                return
            order = {path: place for place, path in enumerate(self._open)}  # open files were used after all others
            files.sort(key=lambda file: order.get(file[1], -1))
            for _, path, size in files:
                if self._bytes <= _LEFT * self.limit:
                    break
                self._open.pop(path, None)
                if _removed(path):
                    self._bytes -= size
            self._is_full = self._bytes + BLOCK > self.limit


def _removed(path: Path) -> bool:
    """Remove a file of blocks unless another process uses it."""
    try:
        fd = open_regular(path, os.O_RDWR)
    except OSError:
        return True
    try:
        if not lock(fd):
            return False
        os.unlink(path)
    except OSError:
        return False
    finally:
        os.close(fd)
    with contextlib.suppress(OSError):
        os.rmdir(path.parent)
    return True


def clear_cache(root: str | os.PathLike[str]) -> int:
    """Remove all blocks in a cache directory, and nothing else; return the number of bytes.

    Raises InvalidOption if there is no such directory, and OSError.
    """
    place, removed = Path(root).expanduser(), 0
    if not place.is_dir():
        raise InvalidOption(f"{root}: no such directory; pass the one given as --cache")
    for directory in place.iterdir():
        if _OBJECT.fullmatch(directory.name) and directory.is_dir() and not directory.is_symlink():
            before = LocalStorage(directory).allocated()
            for path in directory.iterdir():
                if _PIECE.fullmatch(path.name):
                    path.unlink()
            removed += before - LocalStorage(directory).allocated()
            with contextlib.suppress(OSError):  # others put something there, or a reader does
                directory.rmdir()
    return removed


def default_cache() -> BlockCache:
    """Return the cache that the environment names, or one in memory. Raises InvalidOption."""
    root = os.environ.get(CACHE_VARIABLE)
    return DiskBlocks(root, bytes_in(LIMIT_VARIABLE, CACHE_BYTES)) if root else MemoryBlocks()


def bytes_in(variable: str, default: int) -> int:
    """Return the number of bytes in an environment variable. Raises InvalidOption."""
    given = os.environ.get(variable, str(default))
    if not given.isdigit():
        raise InvalidOption(f"{variable}={given}: not a number of bytes")
    return int(given)
