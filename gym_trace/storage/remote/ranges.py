"""The reader of ranges of objects, through which the bytes of all files at a URL come."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice, takewhile
from math import inf
from threading import Event, Lock

from gym_trace.storage.protocol import Gone, Overwritten
from gym_trace.storage.remote.address import redacted, url_of
from gym_trace.storage.remote.cache import init_in_each_process
from gym_trace.storage.remote.objects import ObjectStore, StoredObject, Wanted, persistently
from gym_trace.storage.remote.stores import store_at

_MOST_REQUESTS = 32  # requests in flight
_WINDOW_ROUND_TRIPS, _REQUEST_ROUND_TRIPS, _GAP_ROUND_TRIPS = 4, 1, 0.1  # sizes, as times in which so much arrives
_WINDOW_BYTES, _REQUEST_BYTES, _GAP_BYTES = (8 << 20, 64 << 20), (4 << 20, 8 << 20), (32 << 10, 256 << 10)  # limits
_LATENCY, _THROUGHPUT = 0.03, 1e8  # seconds and bytes per second, until they are measured
_SLICE_SECONDS = 0.1  # throughput is the maximum of slices of time of this length
_FORGOTTEN = 0.02  # share of an old measurement that no longer counts after a new one


class RangeReader:
    """Reads ranges of the objects at a URL, many at the same time. Usable from any number of threads.

    The bytes in flight, of all threads together, are four times what the connection carries in a round trip, by the
    latency and throughput measured so far. Failed requests are repeated.

    Attributes:
        url, shown: the URL; the URL for messages.
    """

    def __init__(self, url: str | os.PathLike[str]):
        """Raises InvalidOption, MissingExtra, RemoteError."""
        self.url = url_of(url)
        self.shown = redacted(self.url)
        init_in_each_process(self)
        self._store: ObjectStore | None = store_at(self.url)

    def init_process(self) -> None:
        self._store = None
        self._pool: ThreadPoolExecutor | None = None
        self._lock = Lock()
        self._in_flight = self._arrived = 0  # bytes; those of the current slice
        self._latency = self._throughput = self._slice_begin = 0.0

    @property
    def store(self) -> ObjectStore:
        if self._store is None:
            self._store = store_at(self.url)
        return self._store

    def entries(self) -> dict[str, StoredObject]:
        """Return the objects directly at the URL, by name. Raises RemoteError."""
        return persistently(self.store.entries, self.shown)

    @property
    def gap(self) -> int:
        """Bytes between two ranges that should be fetched with them, because another request would cost more."""
        return self._arriving(_GAP_ROUND_TRIPS, _GAP_BYTES)

    @property
    def most(self) -> int:
        """Bytes of the largest request; longer ranges should be split."""
        return self._arriving(_REQUEST_ROUND_TRIPS, _REQUEST_BYTES)

    def _arriving(self, round_trips: float, limits: tuple[int, int]) -> int:
        """Return the bytes that arrive during a number of round trips, between limits."""
        size = round_trips * (self._latency or _LATENCY) * (self._throughput or _THROUGHPUT)
        return int(min(max(size, limits[0]), limits[1]))

    def whole(self, objects: Mapping[str, StoredObject]) -> Iterator[tuple[str, Iterator[bytes]]]:
        """Yield the names of objects, each with its bytes from front to back; see read()."""
        most = self.most
        wanted = {
            name: [Wanted(name, stored, at, min(most, stored.size - at)) for at in range(0, max(1, stored.size), most)]
            for name, stored in objects.items()
        }
        data = self.read(list(chain.from_iterable(wanted.values())))
        for name, ranges in wanted.items():
            yield name, (content := islice(data, len(ranges)))  # ends without a look at the next object, which may fail
            deque(content, 0)  # skip what the caller has not read

    def read(self, wanted: Sequence[Wanted]) -> Iterator[bytes]:
        """Yield the bytes of ranges, in order, while the next ones are fetched.

        Raises RemoteError; Overwritten and Gone if an object was overwritten or removed.
        """
        coming, stop = iter(wanted), Event()
        waiting: deque[tuple[Wanted, Future[bytes]]] = deque()
        held = confirmed = 0  # bytes in flight; number of the first of `waiting` whose versions are the wanted ones
        following = next(coming, None)
        try:
            while waiting or following is not None:
                if following is not None and self._begin(following.length, at_once=not waiting):
                    held += following.length
                    waiting.append((following, self._submit(following, stop, alone=len(wanted) == 1)))
                    following = next(coming, None)
                    continue
                confirmed = (confirmed or self._confirm(waiting)) - 1
                request, data = waiting.popleft()
                held -= request.length
                self._end(request.length)
                yield data.result()
        finally:
            stop.set()
            for _, data in waiting:
                data.cancel()
            self._end(held)

    def _begin(self, length: int, at_once: bool) -> bool:
        """Count bytes as in flight; return False if the window has no space for them, unless at_once."""
        with self._lock:
            if not self._in_flight:
                self._arrived, self._slice_begin = 0, time.monotonic()
            elif not at_once and self._in_flight + length > self._arriving(_WINDOW_ROUND_TRIPS, _WINDOW_BYTES):
                return False
            self._in_flight += length
            return True

    def _end(self, length: int) -> None:
        with self._lock:
            self._in_flight -= length

    def _submit(self, request: Wanted, stop: Event, alone: bool) -> Future[bytes]:
        if not alone:
            with self._lock:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(_MOST_REQUESTS, "gym-trace-get")
            with suppress(RuntimeError):  # the interpreter is shutting down, and starts no threads
                return self._pool.submit(self._get, request, stop)
        future: Future[bytes] = Future()
        future.set_result(self._get(request, stop))
        return future

    def _get(self, request: Wanted, stop: Event) -> bytes:
        def attempt() -> bytes:
            begin = time.monotonic()
            data = self.store.get(request) if request.length else b""
            if len(data) != request.length:
                raise ConnectionError("incomplete answer")
            self._measure(begin, len(data))
            return data

        path = f"{self.shown}/{request.name}"
        try:
            return persistently(attempt, path, stop.wait)
        except FileNotFoundError:
            raise Gone(f"{path}: no longer there") from None

    def _measure(self, begin: float, length: int) -> None:
        now = time.monotonic()
        with self._lock:
            self._latency = min((1 + _FORGOTTEN) * self._latency or inf, now - begin)
            self._arrived += length
            if (seconds := now - self._slice_begin) >= _SLICE_SECONDS:
                self._throughput = max((1 - _FORGOTTEN) * self._throughput, self._arrived / seconds)
                self._arrived, self._slice_begin = 0, now

    def _confirm(self, waiting: deque[tuple[Wanted, Future[bytes]]]) -> int:
        """Confirm the versions of the first ranges, as far as they have arrived; return their number, at least 1.

        Raises Overwritten only for the first one: if another one was overwritten, those before it are yielded first.
        """
        waiting[0][1].result()
        arrived = [request for request, _ in takewhile(lambda one: one[1].done() and not one[1].exception(), waiting)]
        with suppress(Overwritten):
            self._confirm_all(arrived)
            return len(arrived)
        self._confirm_all(arrived[:1])
        return 1

    def _confirm_all(self, read: list[Wanted]) -> None:
        path = f"{self.shown}/{read[0].name}"
        persistently(lambda: self.store.confirm({it.name: it.stored for it in read}), path)
