"""The storage of a trace at a URL."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, NamedTuple

from gym_trace.errors import TraceNotFound, warn
from gym_trace.storage.protocol import Overwritten, Reader, ReadStorage, Span
from gym_trace.storage.remote.cache import (
    BLOCK,
    BlockCache,
    DiskBlocks,
    default_cache,
    init_in_each_process,
    object_key,
)
from gym_trace.storage.remote.objects import StoredObject, Wanted
from gym_trace.storage.remote.ranges import RangeReader

_MOST_AHEAD = 32 << 20  # bytes fetched ahead
_READ_AHEAD_THREADS = 8
_MOST_OVERWRITTEN = 16  # overwritten objects, after which no others are fetched
_IMMUTABLE = ".gtb"  # suffix of files that never change
_Block = tuple[str, int]  # key of an object, and number of the block in it


class _Run(NamedTuple):
    """Successive blocks that are fetched together. data: all of them, from the first one on."""

    wanted: Wanted
    key: str
    numbers: range
    data: Future[bytes]

    def block(self, number: int) -> bytes:
        begin = (number - self.numbers.start) * BLOCK
        return self.data.result()[begin : begin + BLOCK]


class RemoteStorage(ReadStorage):
    """The files of a trace at a URL, for reading.

    Blocks of files are fetched once and cached. An overwritten file has another version, which names() reads; blocks
    of other versions are never used.
    """

    def __init__(self, url: str | os.PathLike[str], cache: BlockCache | None = None):
        """cache: see default_cache() for the default. Raises InvalidOption, MissingExtra."""
        self._cache = default_cache() if cache is None else cache
        self._reader = RangeReader(url)
        self.url, self.root = self._reader.url, self._reader.shown
        self.ahead = min(self._cache.limit // 4, _MOST_AHEAD)
        init_in_each_process(self)

    def init_process(self) -> None:
        self._listing: dict[str, StoredObject] | None = None
        self._lock = Lock()
        self._in_flight: dict[_Block, _Run] = {}
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
        found = self._reader.entries()
        if not found:
            raise TraceNotFound(f"{self.root}: nothing there")
        self._listing = found
        return list(found)

    def stored(self, name: str) -> StoredObject:
        """Return size and version of a file. Raises FileNotFoundError."""
        listing = self._listed()
        if name not in listing:
            raise FileNotFoundError(self.path(name))
        return listing[name]

    def _listed(self) -> dict[str, StoredObject]:
        """Return the objects as last listed."""
        if self._listing is None:
            self.names()
        assert self._listing is not None
        return self._listing

    def size(self, name: str) -> int:
        return self.stored(name).size

    def allocated(self) -> int:
        return sum(stored.size for stored in self._listed().values())

    def version(self, name: str) -> str:
        return self.stored(name).version or str(self.size(name))

    def open(self, name: str, holes: int = 0) -> RemoteReader:
        return RemoteReader(self, name)

    def expect(self, spans: Iterable[Span], gaps: bool = True) -> None:
        wanted: dict[str, set[int]] = {}
        space = most = self._cache.limit // BLOCK  # more would not stay in the cache
        for name, offset, length in spans:
            stored = self.stored(name)
            offset, end = max(0, offset), min(offset + length, stored.size)
            numbers = range(offset // BLOCK, -(-end // BLOCK))
            if end <= offset or self._cache.has(object_key(self.url, name, stored), numbers):
                continue
            if len(numbers) > most:
                warn(
                    f"{self.root}: a chunk is larger than the cache of {self._cache.limit} bytes, so each read fetches "
                    "it again; raise the limit",
                )
            new = set(numbers[:space]) - wanted.setdefault(name, set())
            wanted[name] |= new
            space -= len(new)
        runs = deque[_Run]()
        for name in sorted(wanted):
            runs += self._begin(name, self.stored(name), sorted(wanted[name]), gaps)[0]
        self._fetch(runs)

    def soon(self, call: Callable[[], object]) -> None:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_READ_AHEAD_THREADS, "gym-trace-ahead")
        self._pool.submit(call)  # after an error, the read that needs the bytes fetches them again, or raises

    def blocks(self, name: str, stored: StoredObject, numbers: Iterable[int]) -> list[bytes]:
        """Return blocks of a file, from the cache or the store. Threads that need the same block share its request.

        Raises FileNotFoundError, Overwritten, RemoteError.
        """
        key = object_key(self.url, name, stored)
        found = {number: self._cache.get(key, number) for number in numbers}
        if missing := [number for number, block in found.items() if block is None]:
            new, runs = self._begin(name, stored, missing)
            self._fetch(new)
            found |= {number: run.block(number) for number, run in zip(missing, runs)}
        return [block for block in found.values() if block is not None]

    def _begin(
        self, name: str, stored: StoredObject, numbers: list[int], gaps: bool = True
    ) -> tuple[deque[_Run], list[_Run]]:
        """Put blocks in flight; return the runs that the caller has to fetch, and the run of each block.

        numbers: ascending. gaps: see expect(); without it, a gap has at most half the blocks before it in the run.
        """
        key, gap, most = object_key(self.url, name, stored), self._reader.gap // BLOCK, self._reader.most // BLOCK
        new: list[range] = []
        with self._lock:
            for number in numbers:
                if (key, number) in self._in_flight:
                    continue
                if new and number - new[-1].stop <= (gap if gaps else min(gap, len(new[-1]) // 2)):
                    new[-1] = range(new[-1].start, number + 1)
                else:
                    new.append(range(number, number + 1))
            mine = deque[_Run]()
            for joined in new:
                size = -(-len(joined) // max(1, round(len(joined) / most)))  # parts of equal size, about `most`
                for part in (joined[at : at + size] for at in range(0, len(joined), size)):
                    offset, end = part.start * BLOCK, min(part.stop * BLOCK, stored.size)
                    mine.append(_Run(Wanted(name, stored, offset, end - offset), key, part, Future()))
                    self._in_flight |= {(key, number): mine[-1] for number in part}
            return mine, [self._in_flight[key, number] for number in numbers]

    def _fetch(self, runs: deque[_Run]) -> None:
        """Fetch and cache runs that this thread has put in flight, and remove them from there, also after an error.

        If a few objects were overwritten, the others are fetched before the error is raised: a caller that lists the
        objects again finds them in the cache.
        """
        overwritten: Overwritten | None = None
        files_left = _MOST_OVERWRITTEN
        try:
            while runs:
                try:
                    self._fetch_in_order(runs)
                except Overwritten as error:
                    overwritten, files_left = error, files_left - 1
                    if not files_left:
                        raise
                    for run in [run for run in runs if run.key == runs[0].key]:
                        self._failed(run, error)
                        runs.remove(run)
        except BaseException as error:
            for run in runs:
                self._failed(run, error)
            raise
        if overwritten is not None:
            raise overwritten

    def _fetch_in_order(self, runs: deque[_Run]) -> None:
        """Fetch and cache runs, and remove each from the deque; the first one left is the one that failed."""
        for data in self._reader.read([run.wanted for run in runs]):
            for number, begin in zip(runs[0].numbers, range(0, len(data), BLOCK)):
                self._cache.put(runs[0].key, number, data[begin : begin + BLOCK])
            runs[0].data.set_result(data)
            self._landed(runs.popleft())

    def _failed(self, run: _Run, error: BaseException) -> None:
        run.data.set_exception(error)
        self._landed(run)

    def _landed(self, run: _Run) -> None:
        with self._lock:
            for number in run.numbers:
                if self._in_flight.get((run.key, number)) is run:
                    del self._in_flight[run.key, number]


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
            found = self._storage.blocks(self._name, self._stored, numbers)
        except Overwritten:
            if self._is_fixed:
                raise
            self._storage.names()
            self._stored = self._storage.stored(self._name)  # the file may be a manifest that has grown
            self.size, self._is_fixed = self._stored.size, True
            return self.read(offset, length)
        self._is_fixed = True
        data = found[0] if len(found) == 1 else b"".join(found)
        return data[offset - numbers[0] * BLOCK : end - numbers[0] * BLOCK]


def _reopened(url: str, disk: tuple[str, int] | None) -> RemoteStorage:
    return RemoteStorage(url, None if disk is None else DiskBlocks(*disk))
