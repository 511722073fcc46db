"""An opened trace, and the sources of the columns of its episodes."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import lru_cache, partial
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from gym_trace.data.layout import Path
from gym_trace.data.trees import cut
from gym_trace.errors import CorruptTrace, TraceError, TraceNotFound
from gym_trace.format.batch_reader import ALL_ROWS, BatchReader, Chunk, Damage, RowBudget, RowRanges
from gym_trace.format.columns import MSGPACK
from gym_trace.format.directory import expect_indexes, find_writers
from gym_trace.playback.assembly import assemble
from gym_trace.playback.origins import readers_by_origin
from gym_trace.playback.writer_reader import FileSnapshot, WriterReader
from gym_trace.storage.protocol import Overwritten, ReadStorage

_CACHE_BYTES = 64 << 20  # decoded chunks that random access keeps
_OBJECT_FACTOR = 9  # estimate: additional bytes of decoded objects per byte of MessagePack
_OVERHEAD = 1 << 8  # estimate: additional bytes per chunk, and per column
_ATTEMPTS = 10  # attempts to open a URL while its manifests are overwritten
_T = TypeVar("_T")
_Columns = str | Path | frozenset[str | Path]
_Key = tuple["weakref.ref[BatchReader]", int, _Columns]


class ChunkCache:
    """An LRU cache of decoded chunks for random access, limited by bytes; thread-safe.

    It keeps no batch alive, because each refresh of a live trace makes a new batch of the end of the ring.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._chunks: OrderedDict[_Key, tuple[Chunk, int]] = OrderedDict()  # chunk, bytes
        self._bytes = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._chunks)

    def get(self, writer: WriterReader, number: int, columns: _Columns) -> Chunk | None:
        """Return chunk() if it is in the cache; otherwise None."""
        key = _key(writer, number, columns)
        with self._lock:
            if key not in self._chunks:
                return None
            self._chunks.move_to_end(key)
            return self._chunks[key][0]

    def chunk(self, writer: WriterReader, number: int, columns: _Columns, rows: RowRanges | None = None) -> Chunk:
        """Return a decoded chunk with the columns under a root, the column of a path, or several of these.

        rows: rows that are needed; others may not be decoded. None: all rows.

        Raises CorruptTrace.
        """
        chunk = self.get(writer, number, columns)
        if chunk is None:
            roots = columns if isinstance(columns, frozenset) else frozenset((columns,))
            chunk = writer.unshared_chunk(number, roots, rows)
            chunk.decode()
            chunk = self._added(_key(writer, number, columns), chunk)
        chunk.read_more(ALL_ROWS if rows is None else rows, partial(writer.unshared_chunk, number))
        return chunk

    def _added(self, key: _Key, chunk: Chunk) -> Chunk:
        """Add a chunk, or return the one that another thread added first."""
        with self._lock:
            if key in self._chunks:
                return self._chunks[key][0]
            self._chunks[key] = chunk, (size := _size_of(chunk))
            self._bytes += size
            while self._bytes > self._limit and len(self._chunks) > 1:
                self._bytes -= self._chunks.popitem(last=False)[1][1]
        return chunk

    def expect(self, writer: WriterReader, rows: Mapping[int, RowRanges | None], root: str | Path) -> None:
        """Fetch rows of several chunks together, before chunk() reads them, if each read takes a round trip."""
        if not writer.files.storage.ahead:
            return
        missing = {number: some for number, some in rows.items() if self.get(writer, number, root) is None}
        if len(missing) > 1:
            with suppress(CorruptTrace):  # raised again where the chunk is read
                writer.expect(missing, frozenset((root,)))

    def drop_gone(self) -> None:
        """Drop the chunks of batches that no trace or view uses."""
        with self._lock:
            for key in [key for key in self._chunks if key[0]() is None]:
                self._bytes -= self._chunks.pop(key)[1]


def _key(writer: WriterReader, number: int, columns: _Columns) -> _Key:
    batch, i = writer.chunk_positions[number]
    return weakref.ref(batch), i, columns


def _size_of(chunk: Chunk) -> int:
    """Return the approximate size of a decoded chunk. Objects are much larger than their packed bytes."""
    packed = sum(column.full_size for column in chunk.columns.values() if column.dtype == MSGPACK)
    return chunk.full_size + _OBJECT_FACTOR * packed + _OVERHEAD * (1 + len(chunk.described))


class Opened:
    """State shared by a Trace, its views and its episodes. Unpickling opens the trace again, with the same content.

    Attributes:
        writers: readers by key, in order of creation; a refresh that finds changes replaces the dict.
        skipped: damage that was found and skipped while reading.
    """

    def __init__(self, storage: ReadStorage, writers: Sequence[WriterReader] = ()):
        self.storage = storage
        self._stored = {writer.writer: writer for writer in writers}
        self._by_origin = {writer.writer: readers_by_origin(writer) for writer in writers}
        self.writers = self._in_order()
        self.cache = ChunkCache(_CACHE_BYTES)
        self.skipped: dict[Damage, None] = {}
        self._budget = RowBudget()
        self._lock = Lock()

    def refresh(self) -> dict[str, WriterReader]:
        """Look for new data, and return the writers. Raises TraceNotFound."""
        with self._lock:
            known, before = self._stored, self._by_origin
            self._stored = _persistently(self._read)
            self._by_origin = {
                name: before[name] if stored is known.get(name) else readers_by_origin(stored)
                for name, stored in self._stored.items()
            }
            present = self._in_order()
            if list(self.writers.values()) != list(present.values()):
                self.writers = present
                self.cache.drop_gone()
            return self.writers

    def _read(self) -> dict[str, WriterReader]:
        """Return current readers of the stored writers, by id. Raises TraceNotFound."""
        found, known = find_writers(self.storage), self._stored
        if self.storage.ahead:
            expect_indexes(self.storage, found, {batch.name for reader in known.values() for batch in reader.batches})
        return {
            files.writer: known[files.writer].refreshed(files)
            if files.writer in known
            else WriterReader(files, budget=self._budget)
            for files in found
        }

    def _in_order(self) -> dict[str, WriterReader]:
        readers = [reader for readers in self._by_origin.values() for reader in readers]
        readers.sort(key=lambda writer: (writer.about_or_empty.created, writer.writer))
        return {reader.key: reader for reader in [one for one in readers if one.has_begun] or readers}

    def __copy__(self) -> Opened:
        return self

    def __deepcopy__(self, memo: Any) -> Opened:
        return self

    def __reduce__(self) -> Any:
        return reopened, (self.storage, extents_of(list(self._stored.values())))


def _persistently(read: Callable[[], _T]) -> _T:
    """Call again if a recorder has overwritten a manifest at a URL since it was listed; a call lists the files again.

    Raises Overwritten after _ATTEMPTS calls: files that were read before are in the cache, so each call gets further.
    """
    for _ in range(_ATTEMPTS - 1):
        with suppress(Overwritten):
            return read()
    return read()


def extents_of(writers: Sequence[WriterReader]) -> tuple[FileSnapshot, ...]:
    """Return a snapshot of the files of each of these writers."""
    return tuple(dict.fromkeys(writer.extent for writer in writers))


def reopened(storage: ReadStorage, extents: tuple[FileSnapshot, ...]) -> Opened:
    """Open a trace in another process, with the data of these snapshots. Raises TraceError if data is missing."""
    return Opened(storage, _persistently(lambda: _read_again(storage, extents)))


@lru_cache(maxsize=1)  # workers unpickle many episodes of the same trace in sequence
def _read_again(storage: ReadStorage, extents: tuple[FileSnapshot, ...]) -> list[WriterReader]:
    found = {files.writer: files for files in find_writers(storage)}
    if missing := [extent.writer for extent in extents if extent.writer not in found]:
        raise TraceNotFound(f"{storage.root}: writer {missing[0]} no longer exists")
    budget = RowBudget()
    if storage.ahead:
        expect_indexes(storage, [found[extent.writer] for extent in extents])
    writers = [WriterReader(found[extent.writer], extent, budget) for extent in extents]
    if changed := [writer.writer for writer, extent in zip(writers, extents) if writer.extent != extent]:
        raise TraceError(f"{storage.root}: data of writer {changed[0]} was changed or removed; open the trace again")
    return writers


class _At(NamedTuple):
    """The row where an episode was found last. has_grown: True if it has more steps there than in its record."""

    writer: weakref.ref[WriterReader]
    row: int
    has_grown: bool


class OnDisk:
    """An episode whose steps are read on request: always the same steps, also after a refresh."""

    __slots__ = ("_at", "_last", "_opened", "_position", "_record", "_writer")

    def __init__(self, opened: Opened, writer: WriterReader, row: int, record: Any):
        self._opened, self._writer, self._position = opened, writer.key, writer.position_of(row)
        self._record = record  # the row of the table when the episode was looked up
        self._at: _At | None = _At(weakref.ref(writer), row, False)
        self._last: Any = None  # the slices that were read last

    def __getstate__(self) -> Any:
        return self._opened, self._writer, self._position, self._record

    def __setstate__(self, state: Any) -> None:
        self._opened, self._writer, self._position, self._record = state
        self._at = self._last = None

    @property
    def storage(self) -> ReadStorage:
        return self._opened.storage

    def column(self, name: str, steps: range | None) -> Any:
        writer, row, has_grown = self._found()
        if steps is None and has_grown:
            steps = range(int(self._record["steps"]))
        last, wanted = self._last, None if steps is None else (steps.start, steps.stop)
        if last is None or last[0]() is not writer or last[1] != wanted:
            pieces = writer.pieces(row, steps)
            last = self._last = weakref.ref(writer), wanted, pieces, writer.rows_of(pieces)
        cache, pieces, rows = self._opened.cache, last[2], last[3]
        cache.expect(writer, rows, name)
        chunks = {number: cache.chunk(writer, number, name, some) for number, some in rows.items()}
        pieces = [piece._replace(chunk=chunks[piece.chunk_number]) for piece in pieces]
        return assemble(name, pieces, writer.layouts, copy=True)

    def start(self) -> dict[str, Any]:
        writer, row, _ = self._found()
        return writer.start_of(row)

    def pending(self) -> Any:
        writer, row, has_grown = self._found()
        if has_grown:
            return None  # the action has its result by now
        return writer.pending_action(row)

    def _found(self) -> tuple[WriterReader, int, bool]:
        """Return the current reader of the writer, the row of the episode in it, and True if it has more steps."""
        writer, then, known = self._opened.writers.get(self._writer), self._record, self._at
        if writer is not None:
            if known is not None and known.writer() is writer:
                return writer, known.row, known.has_grown
            row = writer.row_at(self._position)
            if not self._is_at(writer, row):  # it may have moved when it left the ring
                row = writer.parts.row_of(int(then["episode_id"]), int(then["first_step"]))
            if row is not None and self._is_at(writer, row):
                self._position = writer.position_of(row)
                has_grown = bool(writer.parts.column("steps", slice(row, row + 1))[0] != then["steps"])
                self._at = _At(weakref.ref(writer), row, has_grown)
                return writer, row, has_grown
        raise TraceError(
            f"{self._opened.storage.root}: episode {then['episode_id']} of {self._writer}, from step "
            f"{then['first_step']} on, was changed or removed; look it up again"
        )

    def _is_at(self, writer: WriterReader, row: int | None) -> bool:
        if row is None:
            return False
        then, own_row = self._record, slice(row, row + 1)
        now = {name: int(writer.parts.column(name, own_row)[0]) for name in ("episode_id", "first_step", "steps")}
        same = now["episode_id"] == then["episode_id"] and now["first_step"] == then["first_step"]
        return bool(same and now["steps"] >= then["steps"])


class InMemory:
    """An episode in memory, without files."""

    __slots__ = ("_columns", "_pending", "_start")

    def __init__(self, columns: dict[str, Any], start: dict[str, Any], pending: Any = None):
        self._columns, self._start, self._pending = columns, start, pending

    def column(self, name: str, steps: range | None) -> Any:
        if name not in self._columns:
            raise TraceError(f"{name} not requested; name them in scan(columns=...)")
        column = self._columns[name]
        if steps is None or column is None:
            return deepcopy(column)
        return deepcopy(cut(column, steps.start, steps.stop + (name == "observations")))

    def start(self) -> dict[str, Any]:
        return deepcopy(self._start)

    def pending(self) -> Any:
        return deepcopy(self._pending)
