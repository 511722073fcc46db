"""The storage of a trace at a URL."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby, islice
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
    default_cache,
    init_in_each_process,
    object_key,
)
from gym_trace.storage.remote.objects import ObjectStore, Overwritten, StoredObject, Wanted, fetched, persistently
from gym_trace.storage.remote.stores import store_at

_MOST_GAP = 2  # blocks between two ranges that one request fetches, with the gap
_MOST_BLOCKS_PER_REQUEST = 256
_MOST_AT_ONCE = (64 << 20) // BLOCK  # blocks that expect() has in memory at the same time
_READ_AHEAD_THREADS = 8
_IMMUTABLE = ".gtb"  # suffix of files that never change
_Block = tuple[str, int]  # name of a file, and number of the block in it


class RemoteStorage(ReadStorage):
    """The files of a trace at a URL, for reading.

    Blocks of files are fetched once and cached. An overwritten file has another version, which names() reads; blocks
    of other versions are never used.
    """

    def __init__(self, url: str | os.PathLike[str], cache: BlockCache | None = None):
        """cache: see default_cache() for the default. Raises InvalidOption, MissingExtra."""
        self.url = url_of(url)
        self.root = redacted(self.url)
        self._cache = default_cache() if cache is None else cache
        self.ahead = self._cache.limit // 4
        init_in_each_process(self)
        self._store: ObjectStore | None = store_at(self.url)

    def init_process(self) -> None:
        self._store = None
        self._listing: dict[str, StoredObject] | None = None
        self._lock = Lock()
        self._in_flight: dict[tuple[str, int], Future[bytes]] = {}  # by key of the object, and number
        self._pool: ThreadPoolExecutor | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteStorage) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __reduce__(self) -> Any:
        disk = (str(self._cache.root), self._cache.limit) if isinstance(self._cache, DiskBlocks) else None
        return _reopened, (self.url, disk)

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
        files: dict[str, StoredObject] = {}
        wanted: dict[_Block, None] = {}
        most = self._cache.limit // BLOCK  # more would not stay in the cache
        for name, offset, length in spans:
            stored = self.stored(name)
            offset, end = max(0, offset), min(offset + length, stored.size)
            numbers = range(offset // BLOCK, -(-end // BLOCK))
            if end <= offset or self._cache.has(object_key(self.url, name, stored), numbers):
                continue
            files[name] = stored
            if len(numbers) > most:
                warn(
                    f"{self.root}: a chunk is larger than the cache of {self._cache.limit} bytes, so each read fetches "
                    "it again; raise the limit",
                )
            wanted |= dict.fromkeys((name, number) for number in numbers[: most - len(wanted)])
        in_order = iter(sorted(wanted))
        while portion := list(islice(in_order, _MOST_AT_ONCE)):
            blocks = {name: [number for _, number in group] for name, group in groupby(portion, itemgetter(0))}
            try:
                self.blocks({name: (files[name], numbers) for name, numbers in blocks.items()})
            except Overwritten:
                raise self.overwritten(*blocks) from None

    def soon(self, call: Callable[[], object]) -> None:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_READ_AHEAD_THREADS, "gym-trace-ahead")
        self._pool.submit(call)  # after an error, the read that needs the bytes fetches them again, or raises

    def overwritten(self, *names: str) -> RemoteError:
        """Return the error for a file, or one of several, that no longer has the listed version."""
        path = self.path(names[0]) if len(names) == 1 else self.root
        return RemoteError(f"{path}: was overwritten while it was read; open the trace again")

    def blocks(self, wanted: dict[str, tuple[StoredObject, Iterable[int]]]) -> dict[_Block, bytes]:
        """Return blocks of files, from the cache or the store. Threads that need the same block share its request.

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
                    is_mine = (key, number) not in self._in_flight
                    future = self._in_flight.setdefault((key, number), Future())
                (mine if is_mine else others)[name, number] = future
        if mine:
            self._fetch(mine, {name: stored for name, (stored, _) in wanted.items()})
        return found | {block: future.result() for block, future in (mine | others).items()}

    def _fetch(self, mine: dict[_Block, Future[bytes]], files: dict[str, StoredObject]) -> None:
        """Fetch and cache the blocks that this thread has put in flight. Sets their futures, also after an error."""
        try:
            requests = [
                Wanted(name, files[name], first * BLOCK, min(last * BLOCK, files[name].size) - first * BLOCK)
                for name, blocks in groupby(mine, itemgetter(0))
                for first, last in _runs([number for _, number in blocks])
            ]
            for request, data in zip(requests, self._ranges(requests)):
                key = object_key(self.url, request.name, request.stored)
                for at in range(0, request.length, BLOCK):
                    number, block = (request.offset + at) // BLOCK, data[at : at + BLOCK]
                    self._cache.put(key, number, block)
                    if (request.name, number) in mine:
                        mine[request.name, number].set_result(block)
        except BaseException as error:
            for future in mine.values():
                if not future.done():
                    future.set_exception(error)
            raise
        finally:
            with self._lock:
                for name, number in mine:
                    del self._in_flight[object_key(self.url, name, files[name]), number]

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
    """An open file of a store; see gym_trace.storage.protocol.Reader."""

    def __init__(self, storage: RemoteStorage, name: str):
        self._storage, self._name = storage, name
        self._stored = storage.stored(name)
        self.size = self._stored.size
        self._is_fixed = name.endswith(_IMMUTABLE)  # True: another version is an error; set by the first read

    def read(self, offset: int, length: int) -> bytes:
        if not 0 <= offset < self.size or length <= 0:
            return b""
        end = min(offset + length, self.size)
        numbers = range(offset // BLOCK, (end - 1) // BLOCK + 1)
        try:
            found = self._storage.blocks({self._name: (self._stored, numbers)})
        except Overwritten:
            if self._is_fixed:
                raise self._storage.overwritten(self._name) from None
            self._storage.names()
            self._stored = self._storage.stored(self._name)  # the file may be a manifest that has grown
            self.size, self._is_fixed = self._stored.size, True
            return self.read(offset, length)
        self._is_fixed = True
        data = found[self._name, numbers[0]]
        if len(numbers) > 1:
            data = b"".join(found[self._name, number] for number in numbers)
        return data[offset - numbers[0] * BLOCK : end - numbers[0] * BLOCK]


def _runs(numbers: list[int]) -> Iterable[tuple[int, int]]:
    """Join ascending numbers of blocks into requests, as (first, last + 1), which may include small gaps."""
    begin = last = numbers[0]
    for number in numbers[1:]:
        if number - last > _MOST_GAP + 1 or number - begin >= _MOST_BLOCKS_PER_REQUEST:
            yield begin, last + 1
            begin = number
        last = number
    yield begin, last + 1


def _reopened(url: str, disk: tuple[str, int] | None) -> RemoteStorage:
    return RemoteStorage(url, None if disk is None else DiskBlocks(*disk))
