"""Read the files of one writer of a trace: its batches as one sequence of chunks and fragments."""

from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from copy import copy
from functools import partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np

from gym_trace.data.layout import Path
from gym_trace.data.origins import OWN_ID, Origin, split_id
from gym_trace.data.schema import Layouts, WriterSchema
from gym_trace.data.values import Array, copied, objects
from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.format.batch_reader import (
    FOREIGN,
    MISSING,
    PART,
    BatchReader,
    Chunk,
    Damage,
    RowBudget,
    RowRanges,
)
from gym_trace.format.columns import ColumnDescriptor, unpacked
from gym_trace.format.directory import WriterFiles, batch_name
from gym_trace.format.fragments import Fragments
from gym_trace.format.ring.pending import Pending, pending_in
from gym_trace.format.ring.recovered import Recovered, read_ring
from gym_trace.playback.assembly import ChunkSlice, cut_down
from gym_trace.playback.episode_table import episode_runs, step_offsets, with_start_dropped
from gym_trace.playback.ring_tail import RingTail, complete_in, is_behind, tail_of
from gym_trace.storage.protocol import Span

_ROOTS = frozenset(("observations", "actions", "rewards", "infos", "annotations", "states"))
_STARTS = frozenset(("starts",))
_MOST_STARTS = 8  # chunks whose reset records are cached: episodes of several lanes end out of order
_GROUP_BYTES = 4 << 20  # bytes of chunks that are fetched together
_MOST_AHEAD = 64  # chunks
_DECODED_WHOLE = 2 << 20  # bytes of a chunk, up to which random access decodes more than the blocks that it needs
_LISTINGS = 3  # retries if a writer begins new batches while they are read


_Item = TypeVar("_Item")
_Versions = dict[str, tuple[int, str]]


class ChunkRows(NamedTuple):
    """The n fragments of one chunk, and where their rows are in its columns.

    Attributes:
        number: number of the chunk.
        begin: number of the first fragment in all fragments of the writer.
        rows: (n,) row of the episode of each fragment in parts, -1 if it is not wanted or has no episode.
        table: (n,) fragment table; see docs/FORMAT.md.
        rows_before: number of observations, steps and reset records of other origins before these in the chunk.
    """

    number: int
    begin: int
    rows: Array
    table: Array
    rows_before: tuple[int, int, int] = (0, 0, 0)

    @property
    def wanted_rows(self) -> RowRanges | None:
        """The rows of the wanted episodes in the chunk; None: all are wanted."""
        wanted = self.rows >= 0
        if wanted.all():
            return None
        offsets = zip(step_offsets(self.table["steps"], self.table["flags"]), self.rows_before)
        observations, steps = (
            list(zip((before + ends[:-1][wanted]).tolist(), (before + ends[1:][wanted]).tolist()))
            for ends, before in offsets
        )
        return RowRanges(observations, steps)


class FileSnapshot(NamedTuple):
    """The data of a writer that was read, to read the same data in another process, also if more was recorded."""

    writer: str
    alive: bool
    chunks: tuple[tuple[int, int], ...]  # (number of a batch, number of its chunks)
    episodes: int
    ring: Recovered = Recovered()  # steps that were not in a batch
    number: int = 0  # number of the batch that these steps will be in


class SharedChunks:
    """The last chunk that origins of the same files have read, to decode it once for all of them.

    Origins are read in order. If one reads the chunk again, it is decoded again, because users may have changed rows.
    """

    def __init__(self) -> None:
        self._last: tuple[int, dict[Any, tuple[int, Chunk]]] = (-1, {})  # number; by columns: (last origin, chunk)

    def read(self, share: Share, number: int, columns: Any, read: Callable[[int], Chunk]) -> Chunk:
        """Return a chunk of an origin. number: in the chunks of the origin. columns: what read() reads, hashable."""
        number += share.first_chunk
        known, chunks = self._last
        if known != number:
            chunks = {}
            self._last = number, chunks
        last, chunk = chunks.get(columns, (share.number, None))
        if chunk is None or last >= share.number:
            chunk = read(number)
        chunks[columns] = share.number, chunk
        return chunk.again()


class Share(NamedTuple):
    """Part of the files of a writer that belongs to one origin (docs/FORMAT.md, Origins).

    Attributes:
        stored: reader of the files. number: number of the origin in them.
        first_row: its first row in stored.parts. first_chunk: number of its first chunk in stored.
        rows_before: observations, steps and reset records of other origins before its own in that chunk.
        size: its share of the bytes of the files.
        damage: damage of the fragment table, in addition to damage of the files.
        chunks: the chunk cache of all origins of the files.
    """

    stored: WriterReader
    number: int
    first_row: int
    first_chunk: int
    rows_before: tuple[int, int, int]
    size: int
    damage: list[Damage]
    chunks: SharedChunks


def _versions_of(files: WriterFiles) -> _Versions | None:
    """Return the size and version of each file of a writer; None if one was renamed or removed since it was listed."""
    names = [*files.batches.values(), *([files.ring] if files.has_ring else ()), *filter(None, [files.manifest])]
    try:
        return {name: (files.storage.size(name), files.storage.version(name)) for name in names}
    except FileNotFoundError:
        return None


class WriterReader:
    """An immutable snapshot of one writer's files; refreshed() returns a newer one.

    Attributes:
        writer: its id.
        key: unique name among the readers of a trace.
        alive: True if a process holds the lock of its manifest.
        about: its description. about_or_empty: the same, empty if it is lost. schema: as stored.
        batches: its readable batches, in order.
        tail: steps of its ring that are not in a batch.
        damage: damage found so far.
        start_dropped: (fragments,) bool, True if the start of the episode was dropped with an older batch.
        parts: its episodes.
        files: names and storage of its files.
        share: its part of the files of another writer; None: it has files of its own.
    """

    share: Share | None = None

    def __init__(self, files: WriterFiles, extent: FileSnapshot | None = None, budget: RowBudget | None = None):
        """budget: limit for the tables of all writers of a trace; None: a limit for this one alone."""
        self.writer = self.key = files.writer
        self._extent = extent
        self.budget = RowBudget() if budget is None else budget
        self.tail = RingTail()
        self._unreadable: list[Damage] = []
        self._missing: list[Damage] = []
        self._missing_among: tuple[int, ...] | None = None  # numbers of the batches that _missing was computed from
        self._readers: dict[int, BatchReader] = {}
        self._starts: dict[int, tuple[Array, Array]] = {}  # reset records of the latest chunks, and their ranks
        self._about: WriterSchema | None = None
        self._has_missed = False
        self._versions: _Versions | None = None  # sizes and versions of its files if it was dead when they were read
        self._read(files)

    def refreshed(self, files: WriterFiles) -> WriterReader:
        """Return the current content of the files; itself if nothing is new. Not thread-safe."""
        if self._extent is not None:
            return WriterReader(files)
        if self._is_unchanged(files):
            return self
        if self._is_replaced(files):
            files.indexes = {}  # they may list what was replaced
            return WriterReader(files, budget=self.budget)
        newer = copy(self)
        newer._starts = {}
        newer._readers, newer._unreadable = dict(self._readers), list(self._unreadable)
        newer._read(files)
        if newer._has_missed:  # batches were dropped since they were listed, and with them all older ones
            return WriterReader(files.listed_again(), budget=self.budget)
        return self if newer.extent == self.extent and newer._unreadable == self._unreadable else newer

    def of_origin(self, share: Share, origin: Origin, fragments: slice, rows: slice) -> WriterReader:
        """Return a reader of the episodes of one origin. fragments, rows: its part of those of this reader."""
        one = copy(self)
        one.share, one.writer, one.key = share, origin.writer, f"{origin.writer} ({self.writer}:{share.number})"
        one.files = self.files.of_origin(origin.writer, [{"type": "writer", **origin.schema}, *origin.entries])
        one.tail, one._starts, one._about = RingTail(), {}, WriterSchema.of(origin.schema)
        one._numbers, one._begins = [0], [0]
        table = self.fragments[fragments].copy()
        table["episode"] &= np.uint64(OWN_ID)
        one.fragments, one.start_dropped = Fragments([table]), self.start_dropped[fragments]
        begin, end = fragments.start, fragments.stop
        if begin == end:
            one.parts, one.chunk_bounds = episode_runs(one.fragments, False), np.zeros(1, np.int64)
            one.chunk_positions, one.batches = [], []
            return one
        last = int(np.searchsorted(self.chunk_bounds, end))
        one.chunk_bounds = self.chunk_bounds[share.first_chunk : last + 1].clip(begin, end) - begin
        one.chunk_positions = self.chunk_positions[share.first_chunk : last]
        one.batches = list(dict.fromkeys(batch for batch, _ in one.chunk_positions))
        one.parts = self.parts.share(one.fragments, begin, rows.start, rows.stop)
        return one

    def _is_unchanged(self, files: WriterFiles) -> bool:
        """Return True if a dead writer has the files that were read, so that nothing must be read again."""
        if self._versions is None or any(batch.is_stale for batch in self._readers.values()):
            return False
        return self._versions == _versions_of(files) and not files.is_alive()

    def _is_replaced(self, files: WriterFiles) -> bool:
        """Return True if an edit in place has replaced the files of this writer."""
        for number, name in files.batches.items():
            with contextlib.suppress(FileNotFoundError):  # sealed since it was listed
                if number in self._readers and self._readers[number].is_replaced(name):
                    return True
        return False

    def _read(self, files: WriterFiles) -> None:
        # Asked before the files are read: what a dead writer left is all there.
        self.alive = files.is_alive() if self._extent is None else self._extent.alive
        self._versions = None if self.alive or self._extent is not None else _versions_of(files)
        self.files = files
        if self._extent is None:
            self._read_ring_and_batches()
        else:
            self._read_batches()
            ring, number = self._extent.ring, self._extent.number
            self.tail = RingTail(ring, ring.open(files.storage, self.writer), number, dict(self._extent.chunks))
        if self.alive or self._extent is not None:  # a live writer may just be sealing a batch
            self._missing, self._missing_among = [], None
        elif self._missing_among != (among := tuple(self.files.batches)):
            self._missing, self._missing_among = self._missing_batches(), among
        self._join()

    def _missing_batches(self) -> list[Damage]:
        names = [batch_name(self.writer, numbers.start) for numbers in self.files.missing()]
        storage = self.files.storage
        return [Damage(storage.path(name), 0, 0, MISSING) for name in names if not self.files.is_there(name)]

    def _read_ring_and_batches(self) -> None:
        for _ in range(_LISTINGS):
            complete = complete_in(self._readers)
            image, is_gone = None, False
            try:
                if self.files.has_ring:
                    image = read_ring(self.files.storage, self.writer, self.alive, complete)
                    is_gone = image is None and not self.files.is_there(self.files.ring)
            except CorruptTrace as error:
                self._take_damage(self.files.ring, error)
            self._read_batches()
            if not (is_gone or is_behind(image, self._readers)):
                break
            listed = self.files.listed_again()  # finds batches that were begun since
            if listed.batches.keys() == self.files.batches.keys() and listed.has_ring == self.files.has_ring:
                break
            self.files, self._versions = listed, None
        try:
            self.tail = tail_of(self.files, image, self._readers, self.tail)
        except CorruptTrace as error:
            self._take_damage(self.files.ring, error)
            self.tail = tail_of(self.files, None, self._readers)

    def _read_batches(self) -> None:
        self._readers = {number: reader for number, reader in self._readers.items() if number in self.files.batches}
        # Backwards, as batches are dropped from the first one on: what began in a batch that is there goes on in the
        # batches that were read before it.
        for number, name in reversed(self.files.batches.items()):
            reader = self._readers.get(number)
            if reader is None:
                reader = self._opened(name)
                if reader is not None:
                    self._readers[number] = reader
            elif not reader.sealed:
                try:
                    reader.refresh()
                except FileNotFoundError:
                    del self._readers[number]
                    self._has_missed = True
        for number in sorted(self.files.foreign({number: batch.schema for number, batch in self._readers.items()})):
            batch = self._readers.pop(number)
            self._take_damage(batch.name, CorruptTrace(FOREIGN), batch.size)

    def _join(self) -> None:
        """Collect the chunks of the batches and those of the ring."""
        chunks = [(number, self.tail.counts[number]) for number in sorted(self.tail.counts.keys() & self._readers)]
        self.batches = [self._readers[number] for number, _ in chunks]
        read = [(self._readers[number], count) for number, count in chunks]
        if self.tail.batch is not None:
            read.append((self.tail.batch, len(self.tail.batch.chunks)))
        self.chunk_positions = [(batch, i) for batch, count in read for i in range(count)]
        counts = [batch.chunks["fragments"][:count].astype(np.int64) for batch, count in read]
        self.chunk_bounds = np.concatenate([[0], np.cumsum(np.concatenate([np.empty(0, np.int64), *counts]))])
        sizes = [int(count.sum()) for count in counts]
        begins = [0, *accumulate(sizes)]
        self.fragments = Fragments.joined([batch.fragments.part(0, size) for (batch, _), size in zip(read, sizes)])
        for (batch, _), begin, size in zip(read, begins, sizes):
            if size == len(batch.fragments):  # share memory with the batch
                batch.fragments = self.fragments.part(begin, begin + size)
        found = tuple((number, len(count)) for (number, _), count in zip(chunks, counts))
        numbers = [number for number, _ in chunks]
        if self.tail.batch is not None:  # steps in the ring are numbered as in their future batch
            numbers = [*numbers[: bisect_left(numbers, self.tail.number)], self.tail.number]
        self._numbers, self._begins = numbers, begins[: len(numbers)]
        self.start_dropped = np.zeros(len(self.fragments), np.bool_)
        if self.about_or_empty.drops_batches:
            self.start_dropped = with_start_dropped(self.fragments)
        shown = np.flatnonzero(~self.start_dropped) if self.start_dropped.any() else None
        self.parts = episode_runs(self.fragments, self.alive, shown)
        number = 0 if self.tail.batch is None else self.tail.number
        self.extent = FileSnapshot(self.writer, self.alive, found, len(self.parts), self.tail.ring, number)

    def _opened(self, name: str) -> BatchReader | None:
        """Return a batch; None if it is unreadable, or if its writer died before it wrote the header."""
        size = wire.HEADER_SIZE
        with contextlib.suppress(FileNotFoundError):  # sealed since it was listed; BatchReader tries the new name
            size = self.files.storage.size(name)  # before opening: the header may be written in between
        try:
            return BatchReader(self.files.storage, name, self.budget, listed=self.files.indexes.get(name))
        except CorruptTrace as error:
            if not (name.endswith(PART) and size < wire.HEADER_SIZE):
                self._take_damage(name, error, size)
            return None
        except FileNotFoundError:
            self._has_missed = True
            return None

    def take_damage(self, error: CorruptTrace) -> None:
        """Note damage that concerns all files of the writer."""
        damage = Damage(self.batches[0].path if self.batches else self.files.where, 0, 0, error.problem)
        self._unreadable = [*self._unreadable, damage]

    def _take_damage(self, name: str, error: CorruptTrace, size: int = 0) -> None:
        """Note an unreadable file."""
        damage = Damage(self.files.storage.path(name), 0, size, error.problem)
        if damage not in self._unreadable:
            self._unreadable.append(damage)

    @property
    def damage(self) -> list[Damage]:
        if self.share is not None:
            return [*self.share.stored.damage, *self.share.damage]
        batches = (damage for batch in self.read_batches for damage in batch.damage)
        return [*self._unreadable, *self._missing, *batches]

    @property
    def read_batches(self) -> list[BatchReader]:
        """Its readable batches, and the batch made of its ring."""
        return self.batches if self.tail.batch is None else [*self.batches, self.tail.batch]

    @property
    def size(self) -> int:
        """Bytes of its batches and manifest; for a ring, the bytes of its steps in a batch."""
        if self.share is not None:
            return self.share.size
        size = sum(batch.size for batch in self.read_batches)
        if self.files.manifest is not None:
            with contextlib.suppress(FileNotFoundError):
                size += self.files.storage.size(self.files.manifest)
        return size

    @property
    def steps(self) -> int:
        """Number of steps in its files, without episodes whose start was dropped."""
        return int(self.fragments["steps"][~self.start_dropped].sum())

    @property
    def has_own_files(self) -> bool:
        """Return True if its files hold no data of other writers."""
        return self.share is None

    @property
    def pending(self) -> list[Pending]:
        """Return the actions of a dead writer that have no result."""
        if self.share is not None:
            mine = [(one, *split_id(one.episode)) for one in self.share.stored.pending]
            return [one._replace(episode=own) for one, number, own in mine if number == self.share.number]
        if self.alive:
            return []
        last = self.batches[-1].slabs.pending if self.batches and self.tail.batch is None else None
        return self.tail.actions or pending_in(last)

    @property
    def about(self) -> WriterSchema:
        """The schema: of the first batch that has one, or of the manifest. Raises CorruptTrace if it is lost."""
        if self._about is None:
            found: Any = next((batch.schema for batch in self.batches if batch.schema is not None), None)
            if found is None and (listed := self.files.schema()) is not None:
                found = listed[0]
            if found is None:
                raise CorruptTrace(f"writer {self.writer}: no readable schema", self.files.where)
            self._about = WriterSchema.of(found)
        return self._about

    @property
    def about_or_empty(self) -> WriterSchema:
        """Return the description; an empty one if the writer died before writing it."""
        try:
            return self.about
        except CorruptTrace:
            return WriterSchema.of({})

    @property
    def has_begun(self) -> bool:
        """False for a writer without a schema, steps and damage: it is starting, or died before it wrote anything."""
        return bool(len(self.fragments) or self.damage or self.about_or_empty.raw)

    @property
    def schema(self) -> dict[str, Any]:
        return self.about.raw

    @property
    def metadata(self) -> Any:
        """Metadata passed to the recorder."""
        return self.about.metadata

    @property
    def env_spec(self) -> dict[str, Any]:
        """The recorded environment: id, spec (JSON), wrappers, class."""
        return dict(self.about.environment)

    @property
    def observation_space(self) -> Any:
        """The recorded gymnasium space, with a StandIn for each custom space in it."""
        from gym_trace.envs.spaces import restore  # here, because most reading does not need gymnasium

        return restore(self.schema.get("observation_space"), stand_in=True)

    @property
    def action_space(self) -> Any:
        """The recorded gymnasium space, with a StandIn for each custom space in it."""
        from gym_trace.envs.spaces import restore

        return restore(self.schema.get("action_space"), stand_in=True)

    @property
    def layouts(self) -> Layouts:
        return self.about.layouts

    @property
    def split(self) -> str:
        return self.about.split

    @property
    def chunk_count(self) -> int:
        return len(self.chunk_positions)

    def chunk(self, number: int, roots: frozenset[str | Path], rows: RowRanges | None = None) -> Chunk:
        """Return a chunk with the columns in roots, or below one of them. Raises CorruptTrace.

        The rows of this writer begin after rows_before().

        rows: rows that are needed; others may not be read. None: all.
        """
        if self.share is not None:
            stored = self.share.stored
            if rows is not None:
                return stored.chunk(self.share.first_chunk + number, roots, rows)
            return self.share.chunks.read(self.share, number, (roots, "checked"), lambda at: stored.chunk(at, roots))
        batch, i = self.chunk_positions[number]
        chunk = batch.read_chunk(i, partial(_is_in, roots), rows)
        steps, flags = self._steps_and_flags(number)
        step_rows = int(steps.sum(dtype=np.int64))
        observation_rows = step_rows + int(np.count_nonzero(flags & wire.HAS_INITIAL))
        for path, count in {("rewards",): 0, **chunk.rows}.items():  # a chunk with steps must have rewards
            expected = observation_rows if path[0] == "observations" else step_rows
            if path[0] in _ROOTS and count != expected:
                problem = f"column {'/'.join(map(str, path))} has the wrong number of rows"
                raise chunk.located(CorruptTrace(problem))
        return chunk

    def read_chunk(self, number: int, roots: frozenset[str | Path] | None = None) -> Chunk:
        """Return a chunk of any size. roots: None: all columns. Raises CorruptTrace."""
        if self.share is not None:
            stored = self.share.stored
            return self.share.chunks.read(self.share, number, roots, lambda at: stored.read_chunk(at, roots))
        batch, i = self.chunk_positions[number]
        return batch.read_chunk(i, partial(_is_in, roots))

    def unshared_chunk(self, number: int, roots: frozenset[str | Path], rows: RowRanges | None = None) -> Chunk:
        """Return chunk() as an object that no other caller has. Raises CorruptTrace."""
        if self.share is None:
            return self.chunk(number, roots, rows)
        return self.share.stored.chunk(self.share.first_chunk + number, roots, rows)

    def rows_before(self, number: int) -> tuple[int, int, int]:
        """Return the number of observations, steps and reset records of other origins before its own in a chunk."""
        return (0, 0, 0) if self.share is None or number else self.share.rows_before

    def offsets(self, number: int) -> tuple[Array, Array]:
        """Return the offsets in a chunk of the observations, and of the steps, of each of its fragments."""
        observations, steps = step_offsets(*self._steps_and_flags(number))
        before = self.rows_before(number)
        return observations + before[0], steps + before[1]

    def _steps_and_flags(self, number: int) -> tuple[Array, Array]:
        """Return these columns of the fragments of a chunk."""
        mine = slice(*self.chunk_bounds[number : number + 2].tolist())
        return self.fragments.steps[mine], self.fragments.flags[mine]

    def rows_of(self, pieces: Iterable[ChunkSlice]) -> dict[int, RowRanges | None]:
        """Return the rows to read of the chunks of these slices, by their numbers. None: all, as the chunk is small."""
        grouped: dict[int, list[ChunkSlice]] = {}
        for piece in pieces:
            grouped.setdefault(piece.chunk_number, []).append(piece)
        return {number: self._rows_of(number, some) for number, some in grouped.items()}

    def _rows_of(self, number: int, pieces: list[ChunkSlice]) -> RowRanges | None:
        batch, i = self.chunk_positions[number]
        if int(batch.chunks["length"][i]) <= _DECODED_WHOLE:
            return None
        observations = [(piece.observations.start, piece.observations.stop) for piece in pieces]
        return RowRanges(observations, [(piece.steps.start, piece.steps.stop) for piece in pieces])

    def spans(self, rows: Mapping[int, RowRanges | None], roots: frozenset[str | Path]) -> list[Span]:
        """Return what chunk() reads for some rows of chunks, by their numbers. Raises OSError, CorruptTrace."""
        found: list[Span] = []
        for batch, group in groupby(rows.items(), lambda item: self.chunk_positions[item[0]][0]):
            if batch is not self.tail.batch:
                found += batch.spans(
                    {self.chunk_positions[number][1]: some for number, some in group}, partial(_is_in, roots)
                )
        return found

    def expect(self, rows: Mapping[int, RowRanges | None], roots: frozenset[str | Path]) -> None:
        """Fetch rows of several chunks for chunk() together, if that is faster. Raises OSError, CorruptTrace."""
        if self.files.storage.ahead:
            self.files.storage.expect(self.spans(rows, roots))

    def ahead(
        self, items: Iterator[_Item], roots: Set[str | Path], chunks: Callable[[_Item], Mapping[int, RowRanges | None]]
    ) -> Iterator[_Item]:
        """Yield items, while the chunks of the next items are fetched.

        roots: the columns to fetch; the set may change. Nothing is fetched while it is empty.
        chunks: returns the rows that an item needs of its chunks, by their numbers; None: all rows.
        """
        storage = self.files.storage
        if not storage.ahead:
            yield from items
            return
        waiting: deque[tuple[_Item, int]] = deque()
        group: dict[int, RowRanges | None] = {}
        held = asked = 0
        for item in items:
            if not roots and not waiting:
                yield item
                continue
            new = {number: rows for number, rows in chunks(item).items() if number not in group}
            positions = (self.chunk_positions[number] for number in new)
            size = sum(int(batch.chunks["length"][i]) for batch, i in positions)
            waiting.append((item, size))
            group |= new
            held, asked = held + size, asked + size
            if asked >= min(_GROUP_BYTES, storage.ahead // 4) or len(group) >= _MOST_AHEAD:
                if roots:
                    storage.soon(partial(self.expect, group, frozenset(roots)))
                group, asked = {}, 0
            while held > storage.ahead or len(waiting) > 4 * _MOST_AHEAD:
                item, size = waiting.popleft()
                held -= size
                yield item
        if roots:
            storage.soon(partial(self.expect, group, frozenset(roots)))
        yield from (item for item, _ in waiting)

    def columns_of(self, number: int) -> list[ColumnDescriptor]:
        """Return descriptors of the columns of a chunk, without reading the columns. Raises CorruptTrace."""
        batch, i = self.chunk_positions[number]
        return batch.read_chunk(i, lambda path: False).described

    def blocks(self, wanted: Array | None = None, first: int = 0) -> Iterator[ChunkRows]:
        """Yield the chunks with wanted episodes, in order, from chunk first on. Decodes nothing.

        wanted: a mask over the rows of parts; None: all.
        """
        rows = self._rows_of_fragments(wanted)
        for number in self._chunks_with(rows, first):
            begin, end = self.chunk_bounds[number : number + 2].tolist()
            yield ChunkRows(number, begin, rows[begin:end], self.fragments[begin:end], self.rows_before(number))

    def chunks_with(self, wanted: Array) -> list[int]:
        """Return the numbers of the chunks with wanted episodes. wanted: a mask over the rows of parts."""
        return self._chunks_with(self._rows_of_fragments(wanted), 0)

    def _chunks_with(self, rows: Array, first: int) -> list[int]:
        has_rows = np.append(0, np.cumsum(rows >= 0))[self.chunk_bounds]
        numbers: list[int] = (first + np.flatnonzero(np.diff(has_rows[first:]))).tolist()
        return numbers

    def _rows_of_fragments(self, wanted: Array | None) -> Array:
        """Return the row of each fragment in parts; -1 if it is not wanted or has no episode."""
        of_fragment = self.parts.of_fragment
        if wanted is None:
            return of_fragment
        chosen = np.append(wanted, False)  # the last item is for -1
        return np.where(chosen[of_fragment], of_fragment, -1)

    @property
    def steps_in_chunks(self) -> Array:
        """(chunks,) int64, number of steps in each chunk."""
        ends = np.concatenate([[0], np.cumsum(self.fragments.steps, dtype=np.int64)])
        steps: Array = np.diff(ends[self.chunk_bounds])
        return steps

    def without_chunks(self, numbers: Sequence[int]) -> WriterReader:
        """Return a reader without some chunks: parts of an episode before and after them become episodes."""
        lacks = np.zeros(self.chunk_count, np.bool_)
        lacks[numbers] = True
        left = np.flatnonzero(~(np.repeat(lacks, np.diff(self.chunk_bounds)) | self.start_dropped))
        other = copy(self)
        other.parts = episode_runs(self.fragments, self.alive, left)
        return other

    # -- single episodes ----------------------------------------------------------------------------------------------

    def position_of(self, row: int) -> tuple[int, int]:
        """Return the first fragment of an episode, as (number of batch, fragment in it).

        It is stable once the episode has left the ring.
        """
        f = int(self.parts.fragments[self.parts.first[row]])
        i = bisect_right(self._begins, f) - 1
        return self._numbers[i], f - self._begins[i]

    def row_at(self, position: tuple[int, int]) -> int | None:
        """Return the row of the episode at a position from position_of(); None if missing."""
        number, fragment = position
        numbers, begins = self._numbers, self._begins
        i = bisect_left(numbers, number)
        if numbers[i : i + 1] != [number]:
            return None
        f = begins[i] + fragment
        row = int(self.parts.of_fragment[f]) if f < len(self.fragments) else -1
        return row if row >= 0 and self.position_of(row) == (number, fragment) else None

    def pending_action(self, row: int) -> Any:
        """Return the action without a result at the end of an episode, structured like its space; None if missing."""
        for action in self.pending:
            if row == self.parts.row_of_pending(action):
                return copied(action.action(self.layouts.actions))
        return None

    def pieces(self, row: int, steps: range | None = None) -> list[ChunkSlice]:
        """Return the slices of an episode, or of some steps and the observation before them. Chunks are not read."""
        fragments = self.parts.fragments[self.parts.first[row] : self.parts.first[row + 1]]
        lost, skipped = int(self.parts.first_step_lost[row]), None
        if steps is not None:
            ends = np.cumsum(self.fragments.steps[fragments], dtype=np.int64) - lost
            last = int(np.searchsorted(ends, steps.stop - 1, side="right"))
            if steps.start:  # the first observation is a row of the step before
                first = min(int(np.searchsorted(ends, steps.start - 1, side="right")), len(fragments) - 1)
                skipped = int(ends[first - 1]) if first else None
                lost = 0 if first else lost
                fragments = fragments[first:]
                last -= first
            fragments = fragments[: last + 1]
        numbers = np.searchsorted(self.chunk_bounds, fragments, side="right") - 1
        found, known, at, done, seen = [], -1, 0, 0, 0  # chunk, fragment, and rows before it in the chunk
        all_steps, all_flags = self.fragments.steps, self.fragments.flags
        for f, number in zip(fragments.tolist(), numbers.tolist()):
            if number != known:
                known, at = number, int(self.chunk_bounds[number])
                seen, done, _ = self.rows_before(number)
            before = int(all_steps[at:f].sum(dtype=np.int64))
            done += before
            seen += before + int(np.count_nonzero(all_flags[at:f] & wire.HAS_INITIAL))
            at, count, flags = f, int(all_steps[f]), int(all_flags[f])
            rows = count + bool(flags & wire.HAS_INITIAL)
            found.append(ChunkSlice(_UNREAD, number, slice(seen, seen + rows), slice(done + lost, done + count), flags))
            lost = 0
        if steps is None:
            return found
        return cut_down(found, steps.start, steps.stop, skipped)

    def start_of(self, row: int) -> dict[str, Any]:
        """Return the reset record of an episode: options, rng_state, reset_info, a large seed."""
        start: dict[str, Any] = copied(self.shared_start_of(row))
        return start

    def shared_start_of(self, row: int) -> dict[str, Any]:
        """Return the reset record of an episode without copying it: do not change it."""
        f = int(self.parts.starts[row])
        if f < 0:
            return _NO_START
        number = int(np.searchsorted(self.chunk_bounds, f, side="right")) - 1
        entries, ranks = self._starts_in(number)
        begun = int(ranks[f - int(self.chunk_bounds[number])])
        start: dict[str, Any] = entries[begun] if begun < len(entries) else _NO_START
        return start

    def starts_of(self, rows: Array) -> Array:
        """Return the reset records of episodes as objects, {} if missing. Reads each chunk once. Not copied."""
        return self._begun(rows, self._starts_in, _NO_START)

    def packed_starts_of(self, rows: Array) -> Array:
        """Return the reset records of episodes as stored, as objects, b"" if missing. Reads each chunk once."""
        return self._begun(rows, self._packed_starts_in, b"")

    def _begun(self, rows: Array, starts_in: Callable[[int], tuple[Array, Array]], missing: Any) -> Array:
        """Return the reset records of episodes. starts_in: returns those of a chunk, as _starts_in()."""
        found = objects([missing] * len(rows))
        starts = self.parts.starts[rows]
        chunks = np.searchsorted(self.chunk_bounds, starts, side="right") - 1
        order = np.argsort(chunks, kind="stable")
        order = order[starts[order] >= 0]
        for part in np.split(order, np.flatnonzero(np.diff(chunks[order])) + 1) if len(order) else ():
            number = int(chunks[part[0]])
            entries, ranks = starts_in(number)
            own = ranks[starts[part] - int(self.chunk_bounds[number])]
            found[part[own < len(entries)]] = entries[own[own < len(entries)]]
        return found

    def _starts_in(self, number: int) -> tuple[Array, Array]:
        """Return the reset records of a chunk, and for each fragment the index of its record, if it has one."""
        known = self._starts.get(number)
        if known is None:
            known = self._read_starts(number)
            self._starts = {**dict(list(self._starts.items())[1 - _MOST_STARTS :]), number: known}
        return known

    def _read_starts(self, number: int) -> tuple[Array, Array]:
        packed, ranks = self._packed_starts_in(number)
        own = packed.tolist()
        distinct = list(dict.fromkeys(own))  # most are equal
        try:
            values = unpacked(distinct).tolist()
        except CorruptTrace as error:
            raise self.read_chunk(number, frozenset()).located(error) from error
        entries = {entry: value if isinstance(value, dict) else _NO_START for entry, value in zip(distinct, values)}
        return objects([entries[entry] for entry in own]), ranks

    def _packed_starts_in(self, number: int) -> tuple[Array, Array]:
        chunk, before = self.read_chunk(number, _STARTS), self.rows_before(number)[2]
        begun = self.fragments.flags[self.chunk_bounds[number] : self.chunk_bounds[number + 1]] & wire.STARTS > 0
        packed = chunk.packed(("starts",)) if ("starts",) in chunk else []
        return objects(packed[before : before + int(np.count_nonzero(begun))]), np.cumsum(begun) - 1


def _is_in(roots: frozenset[str | Path] | None, path: Path) -> bool:
    """Return True for a column in roots, or below one of them. None: all columns."""
    return roots is None or path[0] in roots or path in roots


_NO_START: dict[str, Any] = {}
_UNREAD = Chunk({}, [], lambda error: error)
