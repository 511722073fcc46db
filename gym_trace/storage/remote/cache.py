"""Caches of blocks fetched from object stores, in memory or in a directory, with a limit in bytes.

The key of an object includes its size and version, so an overwritten object gets new blocks. In a directory, files of
1 MiB hold blocks after their checksums; a block with a wrong checksum is ignored. fsspec's disk caches cannot replace
this: they lack a byte limit, checksums and locks between processes, and serve only fsspec's file systems.
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
from gym_trace.storage.local import lock, open_regular, shared_lock, shared_with_others
from gym_trace.storage.remote.objects import StoredObject

BLOCK = 16 << 10
MEMORY_BYTES = 128 << 20
CACHE_BYTES = 10 << 30
CACHE_VARIABLE, LIMIT_VARIABLE = "GYM_TRACE_URL_CACHE", "GYM_TRACE_URL_CACHE_BYTES"
_BLOCKS_PER_FILE = 64
_SUM = np.dtype([("crc", "<u4"), ("length", "<u4")])  # length 0: no block
_FIRST_BLOCK = 4096  # offset of the first block; the checksums are before it
_FILE_BYTES = _FIRST_BLOCK + _BLOCKS_PER_FILE * BLOCK
_MOST_OPEN_FILES = 128
_OBJECT_DIRECTORY = re.compile(r"object-[0-9a-f]{32}")
_BLOCK_FILE = re.compile(r"\d{6,9}\.blocks")
_REMOVE_DOWN_TO = 0.9  # share of the limit


class _PerProcess(Protocol):
    def init_process(self) -> None:
        """Create what a forked process must not share with its parent: locks, threads, connections, locked files."""


_owners: weakref.WeakValueDictionary[int, _PerProcess] = weakref.WeakValueDictionary()


def init_in_each_process(owner: _PerProcess) -> None:
    """Call init_process() now, and after each fork in the child."""
    owner.init_process()
    _owners[id(owner)] = owner


def _after_fork() -> None:
    for owner in list(_owners.values()):
        owner.init_process()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class BlockCache(Protocol):
    """Cache of blocks. A block has the key of its object and a number. Usable from any number of threads.

    Attributes:
        limit: maximum size in bytes.
    """

    limit: int

    def has(self, key: str, numbers: Iterable[int]) -> bool:
        """Return True if all these blocks are present. Does not read them."""

    def get(self, key: str, number: int) -> bytes | None:
        """Return a block, or None if it is not in the cache."""

    def put(self, key: str, number: int, block: bytes) -> None:
        """Add a block; remove the least recently used ones beyond the limit."""


@lru_cache(4096)
def object_key(url: str, name: str, stored: StoredObject) -> str:
    """Return the key of an object in a version."""
    identity = "\0".join((url, name, str(stored.size), stored.version))
    return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class MemoryBlocks:
    """Blocks in memory; see BlockCache."""

    def __init__(self, limit: int = MEMORY_BYTES):
        self.limit = limit
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._bytes = 0
        init_in_each_process(self)

    def init_process(self) -> None:
        self._lock = Lock()

    def has(self, key: str, numbers: Iterable[int]) -> bool:
        return all(self.get(key, number) is not None for number in numbers)  # keeps them: they are read next

    def get(self, key: str, number: int) -> bytes | None:
        with self._lock:
            block = self._blocks.get((key, number))
            if block is not None:
                self._blocks.move_to_end((key, number))
            return block

    def put(self, key: str, number: int, block: bytes) -> None:
        with self._lock:
            if (key, number) not in self._blocks:
                self._bytes += len(block)
            self._blocks[key, number] = block
            self._blocks.move_to_end((key, number))
            while self._bytes > self.limit and self._blocks:
                self._bytes -= len(self._blocks.popitem(last=False)[1])


class _BlockFile:
    """A file of blocks, open and locked so that no other process removes it; closed with the last reference to it."""

    def __init__(self, fd: int):
        self._fd, self._sums, self._verified = fd, np.zeros(_BLOCKS_PER_FILE, _SUM), set[int]()
        weakref.finalize(self, os.close, fd)
        self._read_sums()

    def has(self, index: int) -> bool:
        if not self._sums["length"][index]:
            self._read_sums()
        return bool(self._sums["length"][index])

    def read(self, index: int) -> bytes | None:
        if not self.has(index):
            return None
        crc, length = self._sums[index].tolist()
        block = os.pread(self._fd, length, _FIRST_BLOCK + index * BLOCK)
        if index not in self._verified:
            if len(block) != length or zlib.crc32(block) != crc:
                return None
            self._verified.add(index)
        return block

    def write(self, index: int, block: bytes) -> None:
        os.pwrite(self._fd, block, _FIRST_BLOCK + index * BLOCK)
        entry = np.array([(zlib.crc32(block), len(block))], _SUM)
        os.pwrite(self._fd, entry.tobytes(), index * _SUM.itemsize)  # last, because it makes the block valid

    def _read_sums(self) -> None:
        """Read the checksums again, as write() or other processes may have added blocks."""
        raw = os.pread(self._fd, _BLOCKS_PER_FILE * _SUM.itemsize, 0).ljust(_BLOCKS_PER_FILE * _SUM.itemsize, b"\0")
        sums = np.frombuffer(raw, _SUM).copy()
        sums["length"][sums["length"] > BLOCK] = 0
        self._verified -= set(np.flatnonzero(sums != self._sums).tolist())
        self._sums = sums


class DiskBlocks:
    """Blocks in a directory, which several processes may share; see BlockCache.

    Files that a process has open are never removed; if the limit leaves no space besides them, new blocks are not kept.

    Raises InvalidOption if the limit is less than the size of a file, or if other users can write to the directory:
    checksums do not protect blocks from forgery.
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
        self._most_open = max(1, min(_MOST_OPEN_FILES, limit // (4 * _FILE_BYTES)))
        self._bytes = sum(size for *_, size in self._files())
        self._is_full = False
        init_in_each_process(self)

    def init_process(self) -> None:
        self._lock = Lock()
        self._open_files: OrderedDict[Path, _BlockFile] = OrderedDict()

    def has(self, key: str, numbers: Iterable[int]) -> bool:
        return all((file := self._file(key, n, False)) is not None and file.has(n % _BLOCKS_PER_FILE) for n in numbers)

    def get(self, key: str, number: int) -> bytes | None:
        file = self._file(key, number, False)
        return None if file is None else file.read(number % _BLOCKS_PER_FILE)

    def put(self, key: str, number: int, block: bytes) -> None:
        self._free_space()
        with contextlib.suppress(OSError):  # a block that is not stored is fetched again
            file = self._file(key, number, create=not self._is_full)
            if file is not None:
                file.write(number % _BLOCKS_PER_FILE, block)
                self._bytes += len(block)

    def _file(self, key: str, number: int, create: bool) -> _BlockFile | None:
        path = self.root / f"object-{key}" / f"{number // _BLOCKS_PER_FILE:06d}.blocks"
        with self._lock:
            if path in self._open_files:
                self._open_files.move_to_end(path)
                return self._open_files[path]
            try:
                if create:
                    os.makedirs(path.parent, mode=0o700, exist_ok=True)
                if path.parent.is_symlink() or shared_with_others(path.parent):  # made when others could write to root
                    return None
                fd = open_regular(path, os.O_RDWR | (os.O_CREAT if create else 0))
            except FileNotFoundError:
                return None
            file = _BlockFile(fd)
            shared_lock(fd)
            if os.fstat(fd).st_nlink == 0:  # removed between opening and locking
                return None
            os.utime(fd)
            self._open_files[path] = file
            if len(self._open_files) > self._most_open:
                self._open_files.popitem(last=False)
            return file

    def _files(self) -> list[tuple[float, Path, int]]:
        """Return time of last use, path and bytes on the disk of each file, least recently used first."""
        found = []
        for directory in self.root.iterdir():
            if _OBJECT_DIRECTORY.fullmatch(directory.name) and not directory.is_symlink():
                with contextlib.suppress(OSError), os.scandir(directory) as entries:
                    for entry in entries:
                        if _BLOCK_FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                            status = entry.stat(follow_symlinks=False)
                            found.append((status.st_mtime, directory / entry.name, 512 * status.st_blocks))
        return sorted(found)

    def _free_space(self) -> None:
        """Remove the least recently used files if the cache is full, but none that a process has open."""
        if self._bytes + BLOCK <= self.limit:
            return
        with self._lock:
            files = self._files()
            self._bytes = sum(size for *_, size in files)  # includes blocks of other processes
            if self._bytes + BLOCK <= self.limit:
                self._is_full = False
                return
            order = {path: i for i, path in enumerate(self._open_files)}  # open files were used after all others
            files.sort(key=lambda file: order.get(file[1], -1))
            for _, path, size in files:
                if self._bytes <= _REMOVE_DOWN_TO * self.limit:
                    break
                self._open_files.pop(path, None)
                if _removed(path):
                    self._bytes -= size
            self._is_full = self._bytes + BLOCK > self.limit


def _removed(path: Path) -> bool:
    """Remove a file of blocks; return False if another process has it open."""
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
