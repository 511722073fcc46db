"""Read every byte of a trace, writer by writer: valid chunks, damage, and lost steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, groupby, islice
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.origins import Origin, origins_of, split_id
from gym_trace.data.packing import pack
from gym_trace.data.schema import Layouts, WriterSchema
from gym_trace.data.values import ABSENT, Array, distinct, dtype_from
from gym_trace.data.vocabulary import OPTIONAL_ROOTS
from gym_trace.errors import CorruptTrace, TraceNotFound
from gym_trace.format import wire
from gym_trace.format.batch_reader import (
    FOREIGN,
    MISSING,
    PARITY_CONTRADICTS,
    PART,
    BatchReader,
    Chunk,
    Damage,
    Index,
    RowBudget,
    SlabLedger,
    add_totals,
    observation_rows,
    size_and_crc,
)
from gym_trace.format.column_table import StoredColumns
from gym_trace.format.columns import MSGPACK, STEP_COLUMNS, Buffer, ColumnDescriptor, ColumnEncoder, Workspace, decode
from gym_trace.format.columns import Path as ColumnPath
from gym_trace.format.directory import WriterFiles, batch_name, find_writers
from gym_trace.format.fragments import Fragments
from gym_trace.format.parity import is_right, parity_of, stored_parity
from gym_trace.format.records import columns_of, gaps_of, metadata_of, verify
from gym_trace.format.ring.pending import Pending, pending_in
from gym_trace.format.ring.recovered import read_ring
from gym_trace.playback.episode_table import step_offsets
from gym_trace.playback.origins import origin_numbers, origin_problem
from gym_trace.playback.ring_tail import RingTail, tail_of
from gym_trace.storage import is_url
from gym_trace.storage.protocol import Reader, ReadStorage, Span
from gym_trace.tools.integrity.manifest_check import ManifestCheck, SealedBatch

Progress = Callable[[int, int], None]  # bytes done, total bytes
_BLOCK = 1 << 20
_LISTED_NOTES = 3  # paths that have a line each for the same note
_FRAGMENTS: ColumnPath = ("fragments",)
_STARTS: ColumnPath = ("starts",)


class LostSteps(NamedTuple):
    """Lost steps of one episode.

    Examples:
        >>> gym_trace.results.LostSteps("worker-0", episode_id=3, first_step=100, steps=64)
        LostSteps(writer='worker-0', episode_id=3, first_step=100, steps=64)
    """

    writer: str
    episode_id: int
    first_step: int
    steps: int


class LostChunk(NamedTuple):
    """Steps that damage has cost.

    exact: True if steps lists all lost steps. Otherwise it lists the gaps that the chunks around the damage show.

    Examples:
        >>> gym_trace.repair_trace("traces/cartpole", "traces/whole").losses  # a list of LostChunk
        []
    """

    damage: Damage
    steps: list[LostSteps]
    exact: bool


class SalvagedSteps(NamedTuple):
    """Steps kept without some of their columns.

    columns: the lost columns, such as "observations/position": NaN stands for floats, ABSENT for other values.

    Examples:
        >>> report = gym_trace.repair_trace("traces/cartpole", "traces/salvaged", salvage=True)
        >>> report.salvaged  # a list of SalvagedSteps
        []
    """

    damage: Damage
    columns: list[str]
    steps: list[LostSteps]


@dataclass
class CheckReport:
    """Result of check_trace.

    Attributes:
        files, bytes: number of batches, and of their bytes.
        chunks, episodes, steps: numbers of readable ones.
        damages: damaged ranges of bytes, each with its file and the problem.
        healed: damaged ranges of bytes that parity restores on reading; heal_trace() writes the restored bytes.
        remarks: notes that are not damage, such as the torn end that a killed writer leaves.

    Examples:
        >>> report = gym_trace.check_trace("traces/cartpole")
        >>> report.files, report.steps, report.damages
        (1, 461, [])
    """

    files: int = 0
    bytes: int = 0
    chunks: int = 0
    episodes: int = 0
    steps: int = 0
    damages: list[Damage] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    healed: list[Damage] = field(default_factory=list)


def examinations(
    storage: ReadStorage, report: CheckReport, on_progress: Progress | None, salvage: bool = False
) -> Iterator[Examination]:
    """Yield an examination of each writer, to be finished before the next. salvage: see Examination."""
    writers = find_writers(storage)
    if not writers:
        raise TraceNotFound(
            f"{storage.root}: no trace here; it has no *.manifest.jsonl and no *.gtb files", directory=storage.root
        )
    total = sum(_size(storage, name) for files in writers for name in files.batches.values())

    def advance(done: int) -> None:
        if on_progress is not None:
            on_progress(min(report.bytes + done, total), total)

    unclosed: list[Unclosed] = []
    notes: dict[str, list[str]] = {}
    for files in writers:
        yield (examination := Examination(files, report, advance, salvage))
        unclosed += [examination.unclosed] if examination.unclosed is not None else []
        for path, note in examination.notes:
            notes.setdefault(note, []).append(path)
    for note, paths in notes.items():
        if len(paths) > _LISTED_NOTES:
            report.remarks.append(f"{paths[0]}: {note}; the same of {len(paths) - 1:,} other files")
        else:
            report.remarks += [f"{path}: {note}" for path in paths]
    report.remarks += _remarks_about(unclosed, is_url(storage.root))


class Unclosed(NamedTuple):
    """A dead writer that did not close.

    Attributes:
        failure: why it stopped, if its manifest says so; otherwise it was killed.
        steps: number of steps in its ring.
        actions: texts of the actions without a result.
    """

    writer: str
    failure: str | None
    steps: int
    actions: list[str]


def _remarks_about(unclosed: list[Unclosed], is_remote: bool) -> list[str]:
    """Return one line for all killed writers, and one for each writer that stopped with an error.

    is_remote: locks cannot be seen, so that the process may be alive.
    """
    killed = [writer for writer in unclosed if writer.failure is None]
    lines = [
        f"writer {one.writer} stopped recording: {one.failure}{_unsealed_data(one.steps, one.actions)}"
        for one in unclosed
        if one.failure
    ]
    if killed:
        data = _unsealed_data(sum(one.steps for one in killed), [text for one in killed for text in one.actions])
        if len(killed) == 1:
            end = "did not close, or records elsewhere" if is_remote else "was killed"
            lines.insert(0, f"writer {killed[0].writer} {end}{data}")
        else:
            end = "did not close, or record elsewhere" if is_remote else "were killed"
            lines.insert(0, f"{len(killed):,} writers {end}{data}")
    return lines


def _unsealed_data(steps: int, actions: list[str]) -> str:
    """Return what to append to a line about the end of writers: the data that is not in a batch."""
    ring = f"; {steps:,} steps are only in a ring, without checksums" if steps else ""
    if len(actions) > 1:
        return f"{ring}; {len(actions):,} actions were never answered"
    return ring + "".join(f"; an action was never answered, {text}" for text in actions)


def _size(storage: ReadStorage, name: str) -> int:
    try:
        return storage.size(name)
    except FileNotFoundError:  # sealed, and so renamed, since it was listed
        return 0


class BatchInspector(BatchReader):
    """A BatchReader that finds chunks by their records only, and compares the index and the padding with them.

    It does not read the columns of the chunks.

    Attributes:
        without_table: offsets of the chunks with a damaged fragment table; the index has a copy, as for other readers.
    """

    def __init__(self, storage: ReadStorage, name: str):
        self.is_named_sealed = not name.endswith(PART)
        super().__init__(storage, name, warns=False)
        if self.index is not None and not self._matches(self.index):
            self._damaged(self._data_end or 0, self.size, "the index does not agree with the chunks")

    def parity_damage(self) -> list[Damage]:
        """Return the parity record as damage if it is damaged itself, or contradicts the batch."""
        with self.open() as file:
            stored = stored_parity(file, self.header.file_id)
            if stored is None or is_right(stored, parity_of(file, stored.shape)):
                return []
            problem = PARITY_CONTRADICTS if stored.is_sound else "the parity is damaged; no step depends on it"
            return [Damage(self.path, stored.shape.covered, self.size - wire.HEADER_SIZE, problem)]

    def _load(self, file: Reader) -> None:
        self.index: Index | None = None
        self.without_table: set[int] = set()
        self._data_start = wire.HEADER_SIZE
        self._data_end: int | None = None  # offset of the index, once known
        self._padding: set[Damage] = set()
        super()._load(file)

    def is_harmless(self, damage: Damage) -> bool:
        """Return True if no chunk can have been in a damaged range."""
        if damage.end <= self._data_start or damage in self._padding:
            return True
        return self._data_end is not None and damage.start >= self._data_end

    def lost_fragments(self, damage: Damage) -> Array | None:
        """Return the fragments of the chunks in a damaged range, from the index; None without an index."""
        if self.index is None:
            return None
        chunks, bounds, is_lost = self._indexed_chunks
        starts, stops = chunks["offset"], chunks["offset"] + chunks["length"]
        first, last = np.searchsorted(stops, damage.start, side="right"), np.searchsorted(starts, damage.end)
        lost = np.arange(first, max(first, last))[is_lost[first:last]]
        tables = [self.index.fragments[bounds[i] : bounds[i + 1]] for i in lost.tolist()]
        return np.concatenate([np.empty(0, wire.FRAGMENT), *tables])

    @cached_property
    def _indexed_chunks(self) -> tuple[Array, Array, Array]:
        """Return the chunks of the index, the bounds of their fragments in it, and True for chunks not found."""
        assert self.index is not None
        chunks = self.index.chunks
        bounds = np.concatenate([[0], np.cumsum(chunks["fragments"].astype(np.int64))])
        return chunks, bounds, ~np.isin(chunks["offset"], self.chunks["offset"])

    def _read_index(self, file: Reader) -> bool:
        has_index = super()._read_index(file)  # reports a damaged footer
        self._listed = Index(self.fragments, self.chunks, {}, self.slabs) if has_index else None
        self._reset_row_limit()  # records and index have the same rows
        footer = self._footer(file)
        self._data_end = None if footer is None else footer.index_offset
        self.fragments, self.chunks = Fragments(), np.empty(0, wire.CHUNK_ENTRY)
        self.totals, self.columns, self.sealed, self.slabs = {}, None, False, SlabLedger()
        return False

    def _walk_record(
        self, file: Reader, header: wire.RecordHeader, fragments: list[Array], chunks: list[tuple[int, int, int, int]]
    ) -> None:
        if header.sequence == 1:
            self._data_start = header.offset
        if header.type == wire.INDEX:
            self._data_end = header.offset
        try:
            super()._walk_record(file, header, fragments, chunks)
        except CorruptTrace as error:
            if header.type != wire.CHUNK or not self._add_indexed(file, header, fragments, chunks):
                raise
            self._damaged(header.offset, header.end, error.problem)
        if header.type == wire.INDEX:
            self._reset_row_limit()
            self.index = self._index(file, header)
        if header.type in (wire.SCHEMA, wire.CHUNK, wire.INDEX):
            self._check_padding(file, header)

    def _add_indexed(
        self, file: Reader, header: wire.RecordHeader, fragments: list[Array], chunks: list[tuple[int, int, int, int]]
    ) -> bool:
        """Add a chunk with the fragment table that the index has of it; return False if the index has none.

        Raises CorruptTrace if the metadata of the chunk is damaged, too.
        """
        if self._listed is None:
            return False
        length, entries = header.end - header.offset, self._listed.chunks
        (found,) = np.nonzero((entries["offset"] == header.offset) & (entries["length"] == length))
        if len(found) != 1:
            return False
        begin = int(entries["fragments"][: found[0]].sum())
        table = self._listed.fragments[begin : begin + int(entries["fragments"][found[0]])]
        metadata = metadata_of(file, header)
        add_totals(self.totals, (column for column, _ in columns_of(header, metadata)))
        self.slabs.take(metadata)
        fragments.append(table)
        chunks.append((header.offset, length, len(table), observation_rows(table)))
        self.without_table.add(header.offset)
        return True

    def read_whole(self, number: int) -> Chunk:
        """Read all columns of a chunk, except a damaged fragment table that the index has. Raises like read_chunk()."""
        has_table = int(self.chunks["offset"][number]) not in self.without_table
        return self.read_chunk(number, lambda path: has_table or path != _FRAGMENTS)

    def _reset_row_limit(self) -> None:
        self._budget = RowBudget()
        self._budget.grant(self.size)

    def _check_padding(self, file: Reader, header: wire.RecordHeader) -> None:
        metadata = metadata_of(file, header)
        for start, end in gaps_of(header, columns_of(header, metadata) if header.type != wire.SCHEMA else ()):
            while start < end:
                block = file.read(start, min(end - start, _BLOCK))
                if any(block):
                    self._damaged(start, start + len(block), "bytes between the columns are not zero")
                    self._padding.add(self.damage[-1])
                start += len(block)

    def _matches(self, index: Index) -> bool:
        """Return True if the index has the chunks that were found, and others only in damaged ranges."""
        is_found = np.isin(index.chunks["offset"], self.chunks["offset"])
        if not np.array_equal(index.chunks[is_found], self.chunks):
            return False
        per_chunk = index.chunks["fragments"].astype(np.int64)
        if index.fragments[np.repeat(is_found, per_chunk)].tobytes() != self.fragments[:].tobytes():
            return False
        if index.columns is not None and not self._match_columns(index.columns, np.flatnonzero(is_found).tolist()):
            return False
        if is_found.all():
            return index.totals == self.totals
        damages = sorted(self.damage, key=lambda damage: damage.start)
        starts = np.array([damage.start for damage in damages], np.int64)
        ends = np.maximum.accumulate(np.array([0, *(damage.end for damage in damages)], np.int64))
        offsets = index.chunks["offset"][~is_found].astype(np.int64)
        return bool((offsets < ends[np.searchsorted(starts, offsets, side="right")]).all())

    def _match_columns(self, columns: StoredColumns, found: list[int]) -> bool:
        """Return True if the index has the columns of the chunks. found: their numbers in the index."""
        try:
            with self.open() as file:
                return all(columns.columns_in(i) == self._chunk_record(file, n)[2] for n, i in enumerate(found))
        except CorruptTrace:
            return False


class Examination:
    """One pass over the files of a writer; the findings go into a report.

    Attributes:
        losses: damage that cost steps, or may have.
        salvaged: steps that are kept without some of their columns.
        last_inexact: the last loss with unknown steps.
        origins: the writers of the episodes in compacted files; set when chunks() begins.
        pending: actions without a result.
        unclosed: how the writer ended, if it is dead and did not close; set by finish().
        notes: (path, note) of what is not damage.
    """

    def __init__(self, files: WriterFiles, report: CheckReport, advance: Callable[[int], None], salvage: bool = False):
        """salvage: yield also damaged chunks, with their intact columns."""
        self.files = files
        self.losses: list[LostChunk] = []
        self.salvaged: list[SalvagedSteps] = []
        self.last_inexact: LostChunk | None = None
        self.origins: list[Origin | None] = []
        self.pending: list[Pending] = []
        self.unclosed: Unclosed | None = None
        self.notes: list[tuple[str, str]] = []
        self._unsealed: list[str] = []
        self._in_ring: tuple[int, list[str]] = 0, []  # number of steps, and texts of the actions without a result
        self._storage, self._report, self._advance, self._salvage = files.storage, report, advance, salvage
        self._alive = files.is_alive()
        self._manifest_check = ManifestCheck(files)
        self._own: dict[str, Any] | None = None  # schema of the writer that the manifest names
        self._layouts: Layouts  # set by chunks(), if the schema is readable
        self._episodes: list[Array] = []
        self._started: set[int] | None = None  # episodes whose start was read; None: no batches were dropped
        self._tail = RingTail()
        self._last_origin = 0

    @cached_property
    def schema(self) -> dict[str, Any] | None:
        """Return the first readable schema of the writer, and find batches of other writers."""
        schemas: dict[int, dict[str, Any] | None] = {}
        listed = self.files.schema()
        for number, name in self.files.batches.items():
            with suppress(CorruptTrace, FileNotFoundError):
                schema = schemas[number] = BatchReader(self._storage, name, warns=False).schema
                if schema is not None and listed is not None and schema.get("created") == listed[0].get("created"):
                    self._own = schema  # other writers' batches differ from it
                    break
        self._foreign = self.files.foreign(schemas)
        for number, schema in schemas.items():
            if schema is not None and number not in self._foreign:
                found = {key: value for key, value in schema.items() if key not in ("batch", "type")}
                self._manifest_check.schema = found
                return found
        listed = self.files.schema()
        return None if listed is None else listed[0]

    def chunks(self) -> Iterator[tuple[Array, Chunk]]:
        """Yield the readable chunks in order, each with its fragments."""
        schema = self.schema
        problem = None if schema is not None else "the schema is lost, and with it what the columns mean"
        if schema is not None:
            try:
                about = WriterSchema.of(schema)
                self._layouts, self._started = about.layouts, set() if about.drops_batches else None
                self.origins = origins_of(schema, self.files.writer)
            except CorruptTrace as error:
                problem = error.problem
        self._read_ring()
        missing = self.files.missing()
        for number, name in self._fetched_batches():
            while missing and missing[0].start < number:
                self._report_missing(missing.pop(0))
            if problem is not None or number in self._foreign:
                self._report_unreadable(name, problem or FOREIGN)
            else:
                yield from self._chunks_of_batch(number, name)
        if problem is None:
            yield from self._chunks_of_ring()
        elif self._tail.slabs:
            self._report_loss(Damage(self._storage.path(self.files.ring), 0, 0, problem))

    def _fetched_batches(self) -> Iterator[tuple[int, str]]:
        """Yield the numbers and names of the batches, and fetch whole batches ahead where reads take a round trip."""
        batches, storage, most = sorted(self.files.batches.items()), self._storage, self._storage.ahead
        if not most:
            yield from batches
            return
        spans = [Span(name, 0, _size(storage, name)) for _, name in batches]
        begins = accumulate((span.length for span in spans), initial=0)
        grouped = groupby(zip(spans, begins), lambda item: item[1] // most)
        groups = [[span for span, _ in group] for _, group in grouped]
        names = iter(batches)
        for group, following in zip(groups, [*groups[1:], []]):
            size, later = (sum(span.length for span in one) for one in (group, following))
            if size <= 2 * most:  # otherwise the cache is too small for a batch
                with suppress(FileNotFoundError):
                    storage.expect(group)
            if size + later <= 2 * most:
                storage.soon(partial(storage.expect, following))
            yield from islice(names, len(group))

    def finish(self) -> None:
        """Report the manifest and the end of the writer, after all chunks were read."""
        report, check = self._report, self._manifest_check
        if self._alive:
            self.notes.append((self.files.where, "the writer is still recording"))
        elif self.files.has_new_ring:
            path = self._storage.path(self.files.new_ring)
            self.notes.append((path, "unused copy of a ring, as the writer died while it made it; delete the file"))
        check.compare(self._alive)
        report.damages += check.damages
        self.notes += check.notes
        if check.is_open:
            self.unclosed = Unclosed(self.files.writer, self.files.failure(), *self._in_ring)
        else:
            self.notes += [(path, "not sealed; the writer died") for path in self._unsealed]
        for damage in check.lost:
            self._report_loss(damage)
        if self._episodes:
            report.episodes += len(distinct(np.concatenate(self._episodes)))

    def _read_ring(self) -> None:
        """Read the ring before the batches: data that moves into a batch leaves the ring."""
        if not self.files.has_ring:
            return
        try:
            image = read_ring(self._storage, self.files.writer, self._alive)
            last: dict[int, BatchReader] = {}  # the newest batches, back to one with slab numbers
            for number, name in sorted(self.files.batches.items(), reverse=True):
                with suppress(CorruptTrace, FileNotFoundError):
                    last[number] = BatchReader(self._storage, name, warns=False)
                    if last[number].slabs.complete:
                        break
            self._tail = tail_of(self.files, image, last)
        except CorruptTrace as error:
            self._report_loss(self._damaged_ring(error))

    def _damaged_ring(self, error: CorruptTrace) -> Damage:
        return Damage(self._storage.path(self.files.ring), 0, _size(self._storage, self.files.ring), error.problem)

    def _chunks_of_ring(self) -> Iterator[tuple[Array, Chunk]]:
        batch = self._tail.batch
        for number, fragments in enumerate(_tables_of(batch) if batch is not None else ()):
            assert batch is not None
            try:
                chunk = batch.read_chunk(number, lambda path: True)
                self._verify(chunk, fragments)
            except CorruptTrace as error:
                self._report_loss(self._damaged_ring(error), fragments)
            else:
                yield self._counted(fragments, chunk)
        if not self._alive:
            self.pending = self._tail.actions or self.pending
            steps = 0 if batch is None else int(batch.fragments["steps"].sum())
            self._in_ring = steps, [action.as_text(self._layouts.actions) for action in self._tail.actions]

    def _chunks_of_batch(self, batch_number: int, name: str) -> Iterator[tuple[Array, Chunk]]:
        try:
            batch = BatchInspector(self._storage, name)
        except FileNotFoundError:
            if name in self._storage.names():
                self._report_unreadable(name, "listed, but cannot be read")
            elif not name.endswith(PART):  # which was sealed, and so renamed
                self.files.batches.pop(batch_number)  # missing if the manifest lists it now
            return
        except CorruptTrace as error:
            self._report_unreadable(name, error.problem)
            return
        if self._own is not None and self.files.foreign({-1: self._own, batch_number: batch.schema}):
            self._report_unreadable(name, FOREIGN)
            return
        for damage in _merged(batch.damage):
            self._report_damage(batch, damage)
        if batch.torn:
            torn = "does not end with a whole record; the writer died, or is still recording"
            self.notes.append((batch.path, torn))
        elif not batch.is_named_sealed and not self._alive:
            self._unsealed.append(batch.path)
        is_clean = not batch.damage
        for number, fragments in enumerate(_tables_of(batch)):
            if number >= self._tail.counts.get(batch_number, len(batch.chunks)):
                break  # the chunk belongs to a slab that is in the ring
            self.pending = pending_in(batch.slabs.pending)
            offset, length = batch.chunks[["offset", "length"]][number].tolist()
            try:
                chunk = batch.read_whole(number)
                self._verify(chunk, fragments)
            except CorruptTrace as error:
                is_clean = False
                damage = Damage(batch.path, offset, offset + length, error.problem)
                if (salvaged := self._salvaged(batch, number, fragments, damage)) is not None:
                    yield self._counted(*salvaged)
                else:
                    self._report_loss(damage, fragments)
            else:
                yield self._counted(fragments, chunk)
            self._advance(offset + length)
        ended = int(np.count_nonzero(batch.fragments["flags"] & wire.ENDS))
        self._report.healed += batch.healed
        if (is_clean or batch.parity_contradicts) and batch.is_named_sealed and (damages := batch.parity_damage()):
            is_clean = False
            self._report.damages += damages
        if batch.is_named_sealed:
            is_clean = is_clean and not batch.healed  # the manifest has the checksum of the original bytes
            steps = int(batch.fragments["steps"].sum())
            with batch.open() as file:
                index, crc = batch.index_text(name, file), size_and_crc(file)[1] if is_clean else None
            self._manifest_check.sealed[name] = SealedBatch(batch.size, crc, ended, steps, index)
        self._report.files += 1
        self._report.bytes += batch.size
        self._advance(0)

    def _salvaged(
        self, batch: BatchReader, number: int, fragments: Array, damage: Damage
    ) -> tuple[Array, Chunk] | None:
        """Return the fragments and intact columns of a damaged chunk, if wanted and possible."""
        if not self._salvage:
            return None
        try:
            chunk, lost = _intact_columns(batch, number)
            if _STARTS in lost:  # the reset records are unknown
                fragments = fragments.copy()
                fragments["flags"] &= ~np.uint32(wire.STARTS)
            self._verify(chunk, fragments)
        except CorruptTrace:
            return None
        self._report.damages.append(damage)
        names = ["/".join(map(str, path)) for path in lost]
        self.salvaged.append(SalvagedSteps(damage, names, self._steps(fragments)))
        return fragments, chunk

    def _verify(self, chunk: Chunk, fragments: Array) -> None:
        """Decode every column of a chunk.

        Raises CorruptTrace if that fails, a column is missing or has the wrong number of rows, or fragments do not
        belong to a known writer.
        """
        observation_rows, steps = (int(offsets[-1]) for offsets in step_offsets(fragments["steps"], fragments["flags"]))
        rows = {**dict.fromkeys(STEP_COLUMNS, steps), "observations": observation_rows}
        rows["starts"] = int(np.count_nonzero(fragments["flags"] & wire.STARTS))
        needed = [leaf.path for leaf in self._layouts.observations.leaves()] if observation_rows else []
        needed += [*(leaf.path for leaf in self._layouts.actions.leaves()), ("rewards",)] if steps else []
        for path in needed:
            if path not in chunk:
                raise CorruptTrace(f"a chunk lacks the column {'/'.join(map(str, path))}")
        for path, column in chunk.columns.items():
            if column.rows != rows.get(str(path[0]), column.rows):
                raise CorruptTrace(f"column {'/'.join(map(str, path))} has the wrong number of rows")
            verify(*chunk.encoded(path))
        if self.origins and len(fragments):
            if problem := origin_problem(fragments, self.origins, self._last_origin):
                raise CorruptTrace(problem)
            self._last_origin = int(origin_numbers(fragments)[-1])

    def _report_damage(self, batch: BatchInspector, damage: Damage) -> None:
        """Report damage that was found without reading columns; it is a loss if a chunk may have been there."""
        fragments = batch.lost_fragments(damage)
        if batch.is_harmless(damage) or (fragments is not None and not len(fragments)):
            self._report.damages.append(damage)
        else:
            self._report_loss(damage, fragments)

    def _counted(self, fragments: Array, chunk: Chunk) -> tuple[Array, Chunk]:
        """Count a readable chunk, and return it."""
        counted = fragments
        if self._started is not None:
            self._started.update(fragments["episode"][fragments["flags"] & wire.STARTS > 0].tolist())
            counted = fragments[[not self.start_dropped(episode) for episode in fragments["episode"].tolist()]]
        has_rows = (counted["steps"] > 0) | (counted["flags"] & wire.HAS_INITIAL > 0)
        self._episodes.append(distinct(counted["episode"][has_rows]))
        self._report.chunks += 1
        self._report.steps += int(counted["steps"].sum())
        return fragments, chunk

    def start_dropped(self, episode: int) -> bool:
        """Return True for an episode whose start was in a dropped batch."""
        return self._started is not None and episode not in self._started

    def _report_unreadable(self, name: str, problem: str) -> None:
        size, path = _size(self._storage, name), self._storage.path(name)
        self._report.files += 1
        self._report.bytes += size
        self._advance(0)
        if name.endswith(PART) and size < wire.HEADER_SIZE:
            self.notes.append((path, "nothing recorded; the writer died, or has just begun"))
        else:
            self._report_loss(Damage(path, 0, size, problem))

    def _report_missing(self, numbers: range) -> None:
        name = batch_name(self.files.writer, numbers[0])
        if not self.files.is_there(name):
            more = f", and {len(numbers) - 1} after it" if len(numbers) > 1 else ""
            self._manifest_check.missing.append(numbers)
            self._report_loss(Damage(self._storage.path(name), 0, 0, MISSING + more))

    def _report_loss(self, damage: Damage, fragments: Array | None = None) -> None:
        """Report a loss. fragments: the lost fragments; None: unknown."""
        is_exact = fragments is not None
        self._report.damages.append(damage)
        self.losses.append(LostChunk(damage, self._steps(fragments) if fragments is not None else [], is_exact))
        if not is_exact:
            self.last_inexact = self.losses[-1]

    def _steps(self, fragments: Array) -> list[LostSteps]:
        with_steps = fragments[fragments["steps"] > 0]
        return [self.lost_steps(*run) for run in with_steps[["episode", "first_step", "steps"]].tolist()]

    def lost_steps(self, episode: int, first: int, steps: int) -> LostSteps:
        """Return lost steps by writer and episode. episode: its id in the fragment table."""
        if not self.origins:
            return LostSteps(self.files.writer, episode, first, steps)
        number, own = split_id(episode)
        origin = self.origins[number] if number < len(self.origins) else None
        return LostSteps(self.files.writer if origin is None else origin.writer, own, first, steps)


def _tables_of(batch: BatchReader) -> Iterator[Array]:
    """Yield the fragment table of each chunk."""
    first = 0
    for count in batch.chunks["fragments"].tolist():
        yield batch.fragments[first : first + count]
        first += count


def _merged(damages: list[Damage]) -> list[Damage]:
    """Return damages in order, with overlapping ones joined."""
    merged: list[Damage] = []
    for damage in sorted(damages, key=lambda d: (d.start, -d.end)):
        if merged and damage.start < merged[-1].end:
            merged[-1] = merged[-1]._replace(end=max(damage.end, merged[-1].end))
        else:
            merged.append(damage)
    return merged


def _intact_columns(batch: BatchReader, number: int) -> tuple[Chunk, list[ColumnPath]]:
    """Return a damaged chunk, with NaN in lost columns of floats and ABSENT in others, and the paths of these columns.

    Raises CorruptTrace if no column of steps is readable.
    """
    described = batch.read_chunk(number, lambda path: False).described
    found: dict[ColumnPath, tuple[ColumnDescriptor, Buffer]] = {}
    lost: list[ColumnPath] = []
    workspace = Workspace(level=3)
    for column in described:
        try:
            stored = batch.read_chunk(number, {column.path}.__contains__).encoded(column.path)
            rows = decode(*stored)
            if column.blocks is not None:  # their table may be wrong
                stored = ColumnEncoder(column.path, workspace).encode(rows)
            found[column.path] = stored
        except CorruptTrace:
            lost.append(column.path)
            if column.path[0] not in (*OPTIONAL_ROOTS, "starts"):  # a chunk may lack these
                found[column.path] = _placeholder_column(column, workspace)
    if _FRAGMENTS in lost or not found.keys() - {_FRAGMENTS, _STARTS} - set(lost):
        raise CorruptTrace("no column of a chunk can be read")
    return Chunk(found, [column for column, _ in found.values()], lambda error: error), lost


def _placeholder_column(column: ColumnDescriptor, workspace: Workspace) -> tuple[ColumnDescriptor, Buffer]:
    """Return a column of NaN or ABSENT, with the same number of rows."""
    encoder = ColumnEncoder(column.path, workspace)
    if column.dtype != MSGPACK and (dtype := dtype_from(column.dtype)).kind in "fc":
        return encoder.encode(np.full((column.rows, *column.shape), np.nan, dtype))
    return encoder.encode([pack(ABSENT)] * column.rows)
