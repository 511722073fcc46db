"""A trace at a URL."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from operator import itemgetter
from threading import Lock
from typing import Any

from gym_trace.errors import RemoteError, TraceNotFound, warn
from gym_trace.storage.protocol import Reader, ReadStorage, Span
from gym_trace.storage.remote.address import redacted, url_of
from gym_trace.storage.remote.cache import (
    BLOCK,
    BlockCache,
    DiskBlocks,
    begin_in_each_process,
    default_cache,
    object_key,
)
from gym_trace.storage.remote.objects import ObjectStore, Overwritten, StoredObject, Wanted, fetched, persistently
from gym_trace.storage.remote.stores import store_at

_GAP = 2  # blocks between two ranges that are fetched along, to save a request
_LONGEST = 256  # blocks of a request
_THREADS = 8  # threads that read ahead
_FIXED = ".gtb"  # files of this ending never change
_Block = tuple[str, int]


class RemoteStorage(ReadStorage):
    """The files of a trace at a URL, for reading.

    Blocks of files are fetched once and kept in a cache. A file that is overwritten has another version, which names()
    sees; blocks of another version are never used.
    """

    def __init__(self, url: str | os.PathLike[str], cache: BlockCache | None = None):
        """cache: None: a directory that the environment names, or memory. Raises InvalidOption, MissingExtra."""
        self.url = url_of(url)
        self.root = redacted(self.url)
        self._cache = default_cache() if cache is None else cache
        self.ahead = self._cache.limit // 4
        begin_in_each_process(self)
        self._store: ObjectStore | None = store_at(self.url)

    def begin(self) -> None:
        self._store = None
        self._listing: dict[str, StoredObject] | None = None
        self._lock = Lock()
        self._flying: dict[_Block, Future[bytes]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteStorage) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __reduce__(self) -> Any:
        disk = (str(self._cache.root), self._cache.limit) if isinstance(self._cache, DiskBlocks) else None
        return _again, (self.url, disk)

    def __deepcopy__(self, memo: Any) -> RemoteStorage:
        return self

    def names(self) -> list[str]:
        found = persistently(self._connected().entries, self.root)
        if not found:
            raise TraceNotFound(f"{self.root}: nothing there")
        self._listing = found
        return list(found)

    def stored(self, name: str) -> StoredObject:
        """Return size and version of a file. Raises FileNotFoundError."""
        if self._listing is None:
            self.names()
        assert self._listing is not None
        if name not in self._listing:
            raise FileNotFoundError(self.path(name))
        return self._listing[name]

    def size(self, name: str) -> int:
        return self.stored(name).size

    def version(self, name: str) -> str:
        return self.stored(name).version or str(self.size(name))

    def open(self, name: str, holes: int = 0) -> RemoteReader:
        return RemoteReader(self, name)

    def expect(self, spans: Iterable[Span]) -> None:
        wanted: dict[str, tuple[StoredObject, set[int]]] = {}
        for name, offset, length in spans:
            stored = self.stored(name)
            offset, end = max(0, offset), min(offset + length, stored.size)
            numbers = range(offset // BLOCK, -(-end // BLOCK))
            if end > offset and not self._cache.has(object_key(self.url, name, stored), numbers):
                wanted.setdefault(name, (stored, set()))[1].update(numbers)
        if any(BLOCK * len(numbers) > self._cache.limit for _, numbers in wanted.values()):
            warn(
                f"{self.root}: a chunk is larger than the cache of {self._cache.limit} bytes, so each read fetches it "
                "again; raise the limit",
            )
        try:
            self.blocks({name: (stored, sorted(numbers)) for name, (stored, numbers) in wanted.items()})
        except Overwritten:
            raise self.overwritten(*wanted) from None

    def soon(self, call: Callable[[], object]) -> None:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, "gym-trace-ahead")
        self._pool.submit(call)  # an error is raised again where the bytes are needed

    def overwritten(self, *names: str) -> RemoteError:
        """Return the error to raise when a file has another version than when it was listed."""
        place = self.path(names[0]) if len(names) == 1 else self.root
        return RemoteError(f"{place}: was overwritten while it was read; open the trace again")

    def blocks(self, wanted: dict[str, tuple[StoredObject, Iterable[int]]]) -> dict[_Block, bytes]:
        """Return blocks of files, from the cache or from the store. Threads share the request for a block.

        Raises FileNotFoundError, Overwritten, RemoteError.
        """
        found: dict[_Block, bytes] = {}
        mine: dict[_Block, Future[bytes]] = {}
        others: dict[_Block, Future[bytes]] = {}
        for name, (stored, numbers) in wanted.items():
            key = object_key(self.url, name, stored)
            for number in numbers:
                block = self._cache.get(key, number)
                if block is not None:
                    found[name, number] = block
                    continue
                with self._lock:
                    is_mine = (key, number) not in self._flying
                    future = self._flying.setdefault((key, number), Future())
                (mine if is_mine else others)[name, number] = future
        if mine:
            self._fetch(mine, {name: stored for name, (stored, _) in wanted.items()})
        return found | {place: future.result() for place, future in (mine | others).items()}

    def _fetch(self, mine: dict[_Block, Future[bytes]], files: dict[str, StoredObject]) -> None:
        """Fetch blocks that this thread has announced, and keep them. After an error, too, no thread waits for them."""
        try:
            requests = [
                Wanted(name, files[name], first * BLOCK, min(last * BLOCK, files[name].size) - first * BLOCK)
                for name, blocks in groupby(mine, itemgetter(0))
                for first, last in _runs([number for _, number in blocks])
            ]
            for one, data in zip(requests, self._ranges(requests)):
                key = object_key(self.url, one.name, one.stored)
                for at in range(0, one.length, BLOCK):
                    number, block = (one.offset + at) // BLOCK, data[at : at + BLOCK]
                    self._cache.put(key, number, block)
                    if (one.name, number) in mine:
                        mine[one.name, number].set_result(block)
        except BaseException as error:
            for future in mine.values():
                if not future.done():
                    future.set_exception(error)
            raise
        finally:
            with self._lock:
                for name, number in mine:
                    del self._flying[object_key(self.url, name, files[name]), number]

    def _ranges(self, requests: list[Wanted]) -> list[bytes]:
        path = self.path(requests[0].name)
        try:
            return fetched(self._connected, requests, path)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "no longer there", path) from None

    def _connected(self) -> ObjectStore:
        if self._store is None:
            self._store = store_at(self.url)
        return self._store


class RemoteReader(Reader):
    """A file of a store that is open for reading; see gym_trace.storage.protocol.Reader."""

    def __init__(self, storage: RemoteStorage, name: str):
        self._storage, self._name = storage, name
        self._stored = storage.stored(name)
        self.size = self._stored.size
        self._has_read = name.endswith(_FIXED)

    def read(self, offset: int, length: int) -> bytes:
        if not 0 <= offset < self.size or length <= 0:
            return b""
        end = min(offset + length, self.size)
        numbers = range(offset // BLOCK, (end - 1) // BLOCK + 1)
        try:
            found = self._storage.blocks({self._name: (self._stored, numbers)})
        except Overwritten:
            if self._has_read:
                raise self._storage.overwritten(self._name) from None
            self._storage.names()
            self._stored = self._storage.stored(self._name)  # a manifest grows
            self.size, self._has_read = self._stored.size, True
            return self.read(offset, length)
        self._has_read = True
        data = found[self._name, numbers[0]]
        if len(numbers) > 1:
            data = b"".join(found[self._name, number] for number in numbers)
        return data[offset - numbers[0] * BLOCK : end - numbers[0] * BLOCK]


def _runs(numbers: list[int]) -> Iterable[tuple[int, int]]:
    """Join ascending blocks into requests, as (first, after the last). Small gaps are fetched along."""
    begin = last = numbers[0]
    for number in numbers[1:]:
        if number - last > _GAP + 1 or number - begin >= _LONGEST:
            yield begin, last + 1
            begin = number
        last = number
    yield begin, last + 1


def _again(url: str, disk: tuple[str, int] | None) -> RemoteStorage:
    return RemoteStorage(url, None if disk is None else DiskBlocks(*disk))
