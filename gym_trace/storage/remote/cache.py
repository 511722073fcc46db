"""Blocks of objects that were fetched, in memory or in a directory, limited by bytes.

An object is known by its URL, size and version, so an object that was overwritten has blocks of its own. In a directory
the blocks lie in files of 1 MiB, each with the checksums of its blocks in front: a block counts if its checksum is
right.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Protocol

import numpy as np

from gym_trace.errors import InvalidOption
from gym_trace.model.values import Array
from gym_trace.storage.local import lock, open_regular, shared_lock
from gym_trace.storage.remote.objects import Stored

BLOCK = 16 << 10
MEMORY_BYTES = 128 << 20
CACHE_BYTES = 10 << 30
CACHE_VARIABLE, LIMIT_VARIABLE = "GYM_TRACE_URL_CACHE", "GYM_TRACE_URL_CACHE_BYTES"
_EACH = 64  # blocks of a file
_SUM = np.dtype([("crc", "<u4"), ("is_there", "<u4")])
_HEAD = 4096
_FILE_BYTES = _HEAD + _EACH * BLOCK
_MOST_OPEN = 128  # files
_OBJECT = re.compile(r"object-[0-9a-f]{32}")
_PIECE = re.compile(r"\d{6,9}\.blocks")
_LEFT = 0.9  # of the limit, after blocks were removed


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
def object_key(url: str, name: str, stored: Stored) -> str:
    """Return the key of an object in one version."""
    said = "\0".join((url, name, str(stored.size), stored.version))
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class MemoryBlocks:
    """Blocks in memory; see BlockCache."""

    def __init__(self, limit: int = MEMORY_BYTES):
        self.limit = limit
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._bytes = 0
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


@dataclass
class _Open:
    """A file of blocks, open and locked, so that no other process removes it. users: threads that read it now."""

    fd: int
    path: Path
    sums: Array
    verified: set[int]
    users: int = 0


class DiskBlocks:
    """Blocks in a directory, which several processes may share; see BlockCache.

    Files that a process reads from are never removed; if no others are left, new blocks are not kept.

    Raises InvalidOption for a limit under the size of a file.
    """

    def __init__(self, root: str | os.PathLike[str], limit: int = CACHE_BYTES):
        self.root, self.limit = Path(root).expanduser().absolute(), limit
        if limit < _FILE_BYTES:
            raise InvalidOption(f"cache limit of {limit} bytes: too small; use {_FILE_BYTES} or more")
        os.makedirs(self.root, mode=0o700, exist_ok=True)
        self._pid = os.getpid()
        self._lock = Lock()
        self._open: OrderedDict[tuple[str, int], _Open] = OrderedDict()
        self._most_open = max(1, min(_MOST_OPEN, limit // (4 * _FILE_BYTES)))
        self._bytes = sum(size for *_, size in self._files())
        self._is_full = False

    def has(self, key: str, numbers: Iterable[int]) -> bool:
        for number in numbers:
            file = self._open.get((key, number // _EACH))
            if file is None:
                with self._used(key, number, create=False) as file:
                    pass
            if file is None or not file.sums[number % _EACH]["is_there"]:
                return False
        return True

    def get(self, key: str, number: int) -> bytes | None:
        with self._used(key, number, create=False) as file:
            if file is None:
                return None
            place = number % _EACH
            if not file.sums[place]["is_there"]:
                self._reread(file)
                if not file.sums[place]["is_there"]:
                    return None
            block = os.pread(file.fd, BLOCK, _HEAD + place * BLOCK)
            if place not in file.verified:
                size = int(file.sums[place]["is_there"])
                block = block[:size]
                if len(block) != size or zlib.crc32(block) != file.sums[place]["crc"]:
                    return None
                file.verified.add(place)
            return block[: int(file.sums[place]["is_there"])]

    def put(self, key: str, number: int, block: bytes) -> None:
        self._make_room()
        with contextlib.suppress(OSError), self._used(key, number, create=not self._is_full) as file:
            if file is None:
                return
            place = number % _EACH
            os.pwrite(file.fd, block, _HEAD + place * BLOCK)
            entry = np.array([(zlib.crc32(block), len(block))], _SUM)
            os.pwrite(file.fd, entry.tobytes(), place * _SUM.itemsize)  # last: it makes the block count
            self._bytes += len(block)

    @contextlib.contextmanager
    def _used(self, key: str, number: int, create: bool) -> Iterator[_Open | None]:
        with self._lock:
            file = self._opened(key, number // _EACH, create)
            if file is not None:
                file.users += 1
        try:
            yield file
        finally:
            if file is not None:
                with self._lock:
                    file.users -= 1

    def _opened(self, key: str, piece: int, create: bool) -> _Open | None:
        if self._pid != os.getpid():  # forked: the locks of these files are the parent's
            self._pid, self._open = os.getpid(), OrderedDict()
        if (key, piece) in self._open:
            self._open.move_to_end((key, piece))
            return self._open[key, piece]
        directory = self.root / f"object-{key}"
        path = directory / f"{piece:06d}.blocks"
        try:
            if create:
                os.makedirs(directory, mode=0o700, exist_ok=True)
            fd = open_regular(path, os.O_RDWR | (os.O_CREAT if create else 0))
        except FileNotFoundError:
            return None
        try:
            shared_lock(fd)
            if os.fstat(fd).st_nlink == 0:  # removed between opening and locking
                os.close(fd)
                return None
            os.utime(fd)
        except OSError:
            os.close(fd)
            raise
        file = _Open(fd, path, np.zeros(_EACH, _SUM), set())
        self._reread(file)
        self._open[key, piece] = file
        for known in list(self._open):
            if len(self._open) <= self._most_open:
                break
            if not self._open[known].users and known != (key, piece):
                os.close(self._open.pop(known).fd)
        return file

    def _reread(self, file: _Open) -> None:
        raw = os.pread(file.fd, _EACH * _SUM.itemsize, 0).ljust(_EACH * _SUM.itemsize, b"\0")
        sums = np.frombuffer(raw, _SUM).copy()
        sums["is_there"][sums["is_there"] > BLOCK] = 0
        file.verified -= set(np.flatnonzero(sums != file.sums).tolist())
        file.sums = sums

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
            ours = {file.path: key for key, file in self._open.items()}
            order = {path: place for place, path in enumerate(ours)}  # files that are open were used after all others
            files.sort(key=lambda file: order.get(file[1], -1))
            for _, path, size in files:
                if self._bytes <= _LEFT * self.limit:
                    break
                key = ours.get(path)
                if key is not None:
                    if self._open[key].users:
                        continue
                    os.close(self._open.pop(key).fd)
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


def clear(root: str | os.PathLike[str]) -> int:
    """Remove all blocks in a cache directory, and nothing else; return the number of bytes.

    Raises InvalidOption if there is no such directory.
    """
    place, removed = Path(root).expanduser(), 0
    if not place.is_dir():
        raise InvalidOption(f"{root}: no such directory; pass the one given as --cache")
    for directory in place.iterdir():
        if _OBJECT.fullmatch(directory.name) and directory.is_dir() and not directory.is_symlink():
            removed += sum(512 * entry.stat(follow_symlinks=False).st_blocks for entry in os.scandir(directory))
            shutil.rmtree(directory)
    return removed


def default_cache() -> BlockCache:
    """Return the cache that the environment names, or one in memory. Raises InvalidOption."""
    root, limit = os.environ.get(CACHE_VARIABLE), os.environ.get(LIMIT_VARIABLE, str(CACHE_BYTES))
    if not root:
        return MemoryBlocks()
    if not limit.isdigit():
        raise InvalidOption(f"{LIMIT_VARIABLE}={limit}: not a number of bytes")
    return DiskBlocks(root, int(limit))


def warn_if_small(cache: BlockCache, needed: int, where: str) -> None:
    """Say once per place that one chunk takes more bytes than the cache may have."""
    if needed > cache.limit and where not in _warned:
        _warned.add(where)
        warnings.warn(
            f"{where}: a chunk takes {needed} bytes, and the cache may have {cache.limit}: it is fetched again each "
            "time; raise the limit",
            UserWarning,
            stacklevel=2,
        )


_warned: set[str] = set()
