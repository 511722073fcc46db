"""A trace at a URL, for reading; see gym_trace.storage.protocol.ReadStorage."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any

from gym_trace.errors import RemoteError, TraceNotFound
from gym_trace.storage.protocol import Span
from gym_trace.storage.remote.address import shown, url_of
from gym_trace.storage.remote.cache import (
    BLOCK,
    BlockCache,
    DiskBlocks,
    default_cache,
    object_key,
    warn_if_small,
)
from gym_trace.storage.remote.objects import ObjectStore, Overwritten, Stored, Wanted, fetched, persistently
from gym_trace.storage.remote.stores import store_at

_GAP = 2  # blocks between two ranges that are fetched along, to save a request
_LONGEST = 256  # blocks of a request
_THREADS = 8  # that read ahead
_FIXED = ".gtb"  # files of this ending never change
_Block = tuple[str, int]


class RemoteStorage:
    """The files of a trace at a URL.

    Blocks of files are fetched once and kept in a cache. A file that is overwritten has another version, which names()
    sees; blocks of another version are never used.
    """

    def __init__(self, url: str | os.PathLike[str], cache: BlockCache | None = None):
        """cache: None: a directory that the environment names, or memory. Raises InvalidOption, MissingExtra."""
        self.url = url_of(url)
        self.root = shown(self.url)
        self._cache = default_cache() if cache is None else cache
        self.ahead = self._cache.limit // 4
        self._start()
        self._store = store_at(self.url)

    def _start(self) -> None:
        self._pid = os.getpid()
        self._listing: dict[str, Stored] | None = None
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

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def names(self) -> list[str]:
        found = persistently(self._connected().entries, self.root)
        if not found:
            raise TraceNotFound(f"{self.root}: nothing there")
        self._listing = found
        return list(found)

    def stored(self, name: str) -> Stored:
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

    def allocated(self) -> int:
        return sum(map(self.size, self.names()))

    def holder(self, name: str) -> None:
        return None

    def open(self, name: str, holes: int = 0) -> RemoteReader:
        return RemoteReader(self, name)

    def expect(self, spans: Iterable[Span]) -> None:
        wanted: dict[str, tuple[Stored, set[int]]] = {}
        for name, offset, length in spans:
            stored = self.stored(name)
            offset, end = max(0, offset), min(offset + length, stored.size)
            numbers = range(offset // BLOCK, -(-end // BLOCK))
            if end > offset and not self._cache.has(object_key(self.url, name, stored), numbers):
                wanted.setdefault(name, (stored, set()))[1].update(numbers)
        warn_if_small(self._cache, max((BLOCK * len(blocks) for _, blocks in wanted.values()), default=0), self.root)
        try:
            self.blocks({name: (stored, sorted(blocks)) for name, (stored, blocks) in wanted.items()})
        except Overwritten:
            raise self.overwritten(*wanted) from None

    def soon(self, call: Callable[[], object]) -> None:
        self._connected()
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, "gym-trace-ahead")
        self._pool.submit(call)  # what it raises is raised again where the bytes are needed

    def overwritten(self, *names: str) -> RemoteError:
        """Return the error to raise when a file has another version than when it was listed."""
        place = self.path(names[0]) if len(names) == 1 else self.root
        return RemoteError(f"{place}: was overwritten while it was read; open the trace again")

    def relisted(self, name: str) -> Stored:
        """Return size and version of a file as they are now. Raises FileNotFoundError."""
        self.names()
        return self.stored(name)

    def blocks(self, wanted: dict[str, tuple[Stored, Sequence[int]]]) -> dict[tuple[str, int], bytes]:
        """Return blocks of files: of the cache, or fetched, each once however many threads want it.

        Raises FileNotFoundError, Overwritten, RemoteError.
        """
        found: dict[tuple[str, int], bytes] = {}
        waiting: dict[tuple[str, int], Future[bytes]] = {}
        mine: dict[str, tuple[Stored, str, list[int]]] = {}
        for name, (stored, numbers) in wanted.items():
            key = object_key(self.url, name, stored)
            for number in numbers:
                block = self._cache.get(key, number)
                if block is not None:
                    found[name, number] = block
                    continue
                with self._lock:
                    flying = self._flying.get((key, number))
                    if flying is None:
                        self._flying[key, number] = Future()
                if flying is not None:
                    waiting[name, number] = flying
                else:
                    mine.setdefault(name, (stored, key, []))[2].append(number)
        if mine:
            found |= self._fetched(mine)
        for place, future in waiting.items():
            found[place] = future.result()
        return found

    def _fetched(self, mine: dict[str, tuple[Stored, str, list[int]]]) -> dict[tuple[str, int], bytes]:
        """Fetch blocks that this thread has announced, and keep them. On an error, too, no thread waits for them."""
        found: dict[tuple[str, int], bytes] = {}
        try:
            requests = [
                Wanted(name, stored, first * BLOCK, min(last * BLOCK, stored.size) - first * BLOCK)
                for name, (stored, _, numbers) in mine.items()
                for first, last in _runs(numbers)
            ]
            for one, data in zip(requests, self._ranges(requests)):
                _, key, numbers = mine[one.name]
                asked = set(numbers)
                for number in range(one.offset // BLOCK, -(-(one.offset + one.length) // BLOCK)):
                    block = data[number * BLOCK - one.offset : (number + 1) * BLOCK - one.offset]
                    self._cache.put(key, number, block)
                    if number in asked:
                        found[one.name, number] = block
        except BaseException as error:
            self._landed(mine, {}, error)
            raise
        self._landed(mine, found, None)
        return found

    def _ranges(self, requests: list[Wanted]) -> list[bytes]:
        path = self.path(requests[0].name)
        try:
            return fetched(self._connected, requests, path)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "no longer there", path) from None

    def _landed(
        self,
        mine: dict[str, tuple[Stored, str, list[int]]],
        found: dict[tuple[str, int], bytes],
        error: BaseException | None,
    ) -> None:
        with self._lock:
            for name, (_, key, numbers) in mine.items():
                for number in numbers:
                    future = self._flying.pop((key, number))
                    if error is None:
                        future.set_result(found[name, number])
                    else:
                        future.set_exception(error)

    def _connected(self) -> ObjectStore:
        """Return the store; in a forked process a new one, as threads and connections stay with the parent."""
        if self._pid != os.getpid():
            self._start()
            self._store = store_at(self.url)
        return self._store


class RemoteReader:
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
            self._stored = self._storage.relisted(self._name)  # such as a manifest, which grows
            self.size, self._has_read = self._stored.size, True
            return self.read(offset, length)
        self._has_read = True
        data = found[self._name, numbers[0]]
        if len(numbers) > 1:
            data = b"".join(found[self._name, number] for number in numbers)
        return data[offset - numbers[0] * BLOCK : end - numbers[0] * BLOCK]

    def read_into(self, offset: int, out: memoryview) -> int:
        data = self.read(offset, len(out))
        out[: len(data)] = data
        return len(data)

    def __enter__(self) -> RemoteReader:
        return self

    def __exit__(self, *_: object) -> None:
        pass


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
