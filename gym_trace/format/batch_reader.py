"""Reading one batch file: find its records and verify their checksums."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace, TraceError, UnsupportedTrace, warn
from gym_trace.format import wire
from gym_trace.format.column_table import BLOCK_TABLE, COLUMNS, StoredColumns
from gym_trace.format.columns import (
    STEP_COLUMNS,
    Buffer,
    ColumnDescriptor,
    Path,
    StoredBlocks,
    decode,
    decode_rows,
    is_path,
    packed_values,
)
from gym_trace.format.fragments import Fragments, read_fragments
from gym_trace.format.kernels import crc32
from gym_trace.format.listed_index import ListedIndex, index_text
from gym_trace.format.parity import HealedReader, stored_parity
from gym_trace.format.records import SCAN_BLOCK, checked, columns_of, extent_of, header_at, metadata_of, next_record
from gym_trace.format.restoring import heal
from gym_trace.storage import staging
from gym_trace.storage.protocol import Reader, ReadStorage, Span

PART = staging.PART
MISSING = "this batch is missing"
FOREIGN = "this batch belongs to another recording"
PARITY_CONTRADICTS = "the parity contradicts intact data; nothing is restored from it"
_NO_RECORD = "not a record"
_FARTHEST = 1 << 40  # largest plausible offset; operating systems reject much larger ones
_HEALING = threading.Lock()  # heal one batch at a time; other threads wait for the restored bytes
_ROOTS_WITH_ROWS = ("observations", *STEP_COLUMNS)
_SMALL = 1 << 16  # bytes; smaller chunks are fetched whole, larger ones in two round trips: header, then columns
_CACHED_CHUNKS = 4096  # chunks whose parsed descriptors are kept


class Damage(NamedTuple):
    """A damaged range of bytes in a file.

    Examples:
        >>> damage = gym_trace.results.Damage("t.gtb", 64, 128, "checksum mismatch")
        >>> damage.end - damage.start, damage.problem
        (64, 'checksum mismatch')
    """

    path: str
    start: int
    end: int
    problem: str

    def error(self) -> CorruptTrace:
        """Return the error to raise when these bytes are needed.

        Examples:
            >>> gym_trace.results.Damage("t.gtb", 64, 128, "checksum mismatch").error().offset
            64
        """
        return CorruptTrace(self.problem, self.path, self.start)


def restored_ranges(path: str, blocks: Mapping[int, bytes]) -> list[Damage]:
    """Return the damaged ranges that these blocks, by their offsets, restore."""
    ranges: list[Damage] = []
    for offset, block in sorted(blocks.items()):
        start = ranges.pop().start if ranges and ranges[-1].end == offset else offset
        ranges.append(Damage(path, start, offset + len(block), "restored from parity"))
    return ranges


class RowRanges(NamedTuple):
    """Ranges of rows (begin, end) of a chunk: of its observations, and of its steps.

    known: by path, the blocks of columns that were read before.
    """

    observations: Sequence[tuple[int, int]]
    steps: Sequence[tuple[int, int]]
    known: Mapping[Path, Set[int]] = MappingProxyType({})

    def runs_in(self, column: ColumnDescriptor) -> list[range]:
        """Return the blocks of a column with these rows, as runs."""
        assert column.blocks is not None
        return column.blocks.runs(self.observations if column.path[0] == "observations" else self.steps)

    def are_in(self, column: ColumnDescriptor, blocks: Set[int]) -> bool:
        """Return True if these blocks of a column hold all of these rows."""
        return all(number in blocks for run in self.runs_in(column) for number in run)


def _runs_in(rows: RowRanges | None, column: ColumnDescriptor) -> list[range] | None:
    """Return the blocks to read of a column, as runs; None: read the whole column.

    If some are known, as many are read ahead: a caller that reads one episode after the other needs them next.
    """
    if rows is None or column.blocks is None or column.path[0] not in _ROOTS_WITH_ROWS:
        return None
    runs = rows.runs_in(column)
    if known := rows.known.get(column.path):
        new = {number for run in runs for number in run} - known
        end = max(new, default=-1) + 1
        new |= set(range(end, end + len(known))) - known
        size = column.blocks.rows
        runs = column.blocks.runs((number * size, (number + 1) * size) for number in new)
    return None if 2 * sum(map(len, runs)) > column.blocks.total else runs


ALL_ROWS = RowRanges([(0, wire.MAX_ROWS)], [(0, wire.MAX_ROWS)])


class Chunk:
    """The columns of one chunk: read, verified, and decoded on access.

    Some columns may have been read in part, in blocks; then the other rows of array() are undefined, until
    read_more() reads them.

    Attributes:
        described: descriptors of all columns, also of unread ones.
        rows: number of rows of each column, by path.
        located: function that adds the position of the chunk to an error.
    """

    def __init__(
        self,
        blobs: Mapping[Path, tuple[ColumnDescriptor, Buffer | StoredBlocks]],
        described: list[ColumnDescriptor],
        located: Callable[[CorruptTrace], CorruptTrace],
    ):
        self.described = described
        self.rows = {column.path: column.rows for column in described}
        self._blobs = dict(blobs)
        self.located = located
        self._decoded: dict[Path, Array] = {}
        self._packed: dict[Path, list[bytes]] = {}
        self._known = {
            path: {number for run in blob for number in run}
            for path, (_, blob) in blobs.items()
            if isinstance(blob, dict)
        }
        self._reading = threading.Lock()

    @property
    def columns(self) -> dict[Path, ColumnDescriptor]:
        return {path: column for path, (column, _) in self._blobs.items()}

    @property
    def full_size(self) -> int:
        """Bytes of the decoded columns; delta-encoded columns count with their stored bytes."""
        sizes = [
            column.stored if self.is_delta_encoded(path) else column.full_size for path, column in self.columns.items()
        ]
        return sum(sizes)

    def __contains__(self, path: Path) -> bool:
        return path in self._blobs

    def only(self, wanted: Callable[[Path], bool]) -> Chunk:
        """Return a chunk with the wanted columns only."""
        blobs = {path: blob for path, blob in self._blobs.items() if wanted(path)}
        return Chunk(blobs, self.described, self.located)

    def again(self) -> Chunk:
        """Return another chunk that shares the decoded rows."""
        other = Chunk(self._blobs, self.described, self.located)
        other._decoded = self._decoded
        return other

    def encoded(self, path: Path) -> tuple[ColumnDescriptor, Buffer]:
        """Return a column as stored, if it was read whole. Call it before the column is decoded."""
        column, blob = self._blobs[path]
        assert not isinstance(blob, dict)
        return column, blob

    def array(self, path: Path) -> Array:
        """Return the decoded rows of a column: the same writable array on every call."""
        if path not in self._decoded:
            self._decoded[path] = self._by(decode, path)
        return self._decoded[path]

    def packed(self, path: Path) -> list[bytes]:
        """Return the packed rows of a msgpack column. Call it before the column is decoded. Raises CorruptTrace."""
        if path not in self._packed:
            self._packed[path] = self._by(packed_values, path)
        return self._packed[path]

    def _by(self, decoder: Callable[..., Any], path: Path, *rest: Any) -> Any:
        try:
            return decoder(*self._blobs[path], *rest)
        except CorruptTrace as error:
            raise self.located(error) from error

    def decode(self) -> None:
        """Decode all columns except delta-encoded ones, and release their stored bytes."""
        for path, column in self.columns.items():
            if not self.is_delta_encoded(path):
                self.array(path)
                self._blobs[path] = column, b""

    def read_more(self, rows: RowRanges, read: Callable[[frozenset[Path], RowRanges], Chunk]) -> None:
        """Read and decode the blocks with these rows that are not known. Call it after decode(), from any thread.

        read: returns a chunk with these rows of some columns. Raises CorruptTrace.
        """
        with self._reading:
            known = {path: it for path, it in self._known.items() if not rows.are_in(self._blobs[path][0], it)}
            if not known:
                return
            more = read(frozenset(known), rows._replace(known=known))
            for path in known:
                if path in more._known:
                    more._by(decode, path, self._decoded[path])
                    self._known[path] |= more._known[path]
                else:
                    self._decoded[path] = more.array(path)
                    del self._known[path]

    def decode_all(self) -> None:
        for path in self._blobs:
            self.array(path)

    def is_delta_encoded(self, path: Path) -> bool:
        """Return True if a column stores the changes of each row: a range of its rows can be decoded alone."""
        return self._blobs[path][0].is_delta_encoded

    def decode_rows(self, path: Path, begin: int, out: Array) -> None:
        """Decode rows of a delta-encoded column, from begin on, into out, (rows, *row shape). Raises CorruptTrace."""
        self._by(decode_rows, path, begin, out)


class StoredChunk(NamedTuple):
    """A chunk as stored in a batch: its record header and metadata, without the bytes of its columns.

    pending: pending actions: actions without a result.
    """

    file: Reader
    header: wire.RecordHeader
    columns: list[ColumnDescriptor]
    pending: Any


class SlabLedger:
    """The slabs of the writer's ring (docs/FORMAT.md, section 8) that are in a batch.

    Attributes:
        complete: number of the latest slab that is completely in the batches so far; earlier slabs are, too.
        unfinished: number of the slab that the last chunks come from, if more chunks of it follow; otherwise 0.
        chunks: number of these last chunks.
        pending: pending actions in the last chunk: actions without a result.
    """

    def __init__(self) -> None:
        self.complete = self.unfinished = self.chunks = 0
        self.pending: Any = None

    @classmethod
    def of_index(cls, metadata: dict[str, Any]) -> SlabLedger:
        """Return the ledger stored in the metadata of an index."""
        ledger = cls()
        ledger.take(metadata)
        match metadata.get("slab"):
            case [_, _, int(chunks), *_] if ledger.unfinished:
                ledger.chunks = max(0, chunks)
        return ledger

    def take(self, metadata: dict[str, Any]) -> None:
        """Update from the untrusted metadata of the next chunk."""
        self.pending = metadata.get("pending")
        before, self.unfinished, self.chunks = (self.unfinished, self.chunks), 0, 0
        match metadata.get("slab"):
            case [int(sequence), bool(more), *_]:
                self.complete = max(self.complete, sequence - more)
                if more:
                    self.unfinished, self.chunks = sequence, 1 + (before[1] if before[0] == sequence else 0)


class Index(NamedTuple):
    """Contents of the index of a batch; see BatchReader."""

    fragments: Fragments
    chunks: Array
    totals: dict[Path, list[int]]
    slabs: SlabLedger
    columns: StoredColumns | None = None


class RowBudget:
    """Limits the table rows of a trace: tables stay in memory, and a few stored bytes may become many rows."""

    def __init__(self) -> None:
        self._rows = wire.TABLE_ROWS

    def grant(self, size: int) -> None:
        """Allow more rows, for `size` bytes on disk."""
        self._rows += size * wire.ROWS_A_BYTE

    def take(self, rows: int) -> None:
        if rows > self._rows:
            raise CorruptTrace(f"table of {rows} rows exceeds the limit for a trace of this size")
        self._rows -= rows


class BatchReader:
    """Finds the chunks of one batch: sealed or unsealed, intact or damaged.

    Attributes:
        schema: contents of the schema record, or None if it is damaged, or was not read.
        sealed: True if the index and footer were read.
        ended: True if no chunk can follow.
        fragments: fragment tables of all readable chunks.
        chunks: offset, length, number of fragments and observation rows of each chunk (wire.CHUNK_ENTRY).
        totals: raw and stored bytes of each column.
        columns: columns of the chunks by the index; None: they are only in the chunks.
        slabs: the slabs of the ring that these chunks come from.
        damage: damage found so far, except the torn end of an unsealed batch and ranges restored by parity.
        healed: damaged ranges that parity has restored.
        parity_contradicts: True if heal() ignored the parity because it contradicts intact data.
        torn: bytes of an incomplete record at the end of an unsealed batch.
        is_stale: True once chunks showed that the manifest lists the index of another file.
    """

    def __init__(
        self,
        storage: ReadStorage,
        name: str,
        budget: RowBudget | None = None,
        warns: bool = True,
        listed: ListedIndex | None = None,
    ):
        """Open a batch.

        budget: row limit shared by the tables of several batches; None: a limit for this batch alone.
        warns: warn once if damaged bytes were restored from the parity of the batch.
        listed: the index in the manifest, which saves reading the batch if it is valid.
        """
        self.name = name
        self.healed: list[Damage] = []
        self.parity_contradicts = False
        self._is_checked = False  # True once compared with the parity
        self.is_stale = False
        self._warns = warns
        self._restored: dict[int, bytes] = {}  # blocks by their offset
        self._storage = storage
        self._budget = RowBudget() if budget is None else budget
        self._known: dict[int, list[tuple[ColumnDescriptor, int]]] = {}  # columns with offsets, by the chunk's offset
        with self.open() as file:
            self.size = file.size
            self._version = storage.version(self.name)
            self._budget.grant(self.size)
            self.is_listed = listed is not None and self._load_listed(file, listed)
            if not self.is_listed:
                self._load(file)
        if self.damage and self.heal():
            with self.open() as file:
                self._budget.grant(self.size)
                self._load(file)

    def _load(self, file: Reader) -> None:
        self._clear()
        self.header = self._file_header(file)
        if not self._read_index(file):
            self._walk(file)
        else:
            self._read_schema(file)

    def _clear(self) -> None:
        self.damage: list[Damage] = []
        self.torn = 0
        self.sealed = False
        self.ended = not self.name.endswith(PART)
        self.slabs = SlabLedger()
        self.schema: dict[str, Any] | None = None
        self.totals: dict[Path, list[int]] = {}
        self.fragments = Fragments()
        self.chunks: Array = np.empty(0, wire.CHUNK_ENTRY)
        self.columns: StoredColumns | None = None
        self._read_to = wire.HEADER_SIZE

    def _load_listed(self, file: Reader, listed: ListedIndex) -> bool:
        """Take the index that the manifest lists; return False if it is damaged, or not that of this file."""
        self._clear()
        self.header = wire.FileHeader(listed.file_id, 0)
        source = listed.source(file)
        try:
            if self._header_at(source, listed.header.offset) != listed.header:
                return False
            self._take(self._index(source, listed.header))
        except CorruptTrace:
            return False
        self.sealed = self.ended = True
        if listed.reads_schema:
            self._read_schema(file)
        return True

    def refresh(self) -> None:
        """Read records appended since the last read; does nothing for a sealed batch."""
        if self.sealed:
            return
        with self.open() as file:
            before, self.size = self.size, file.size
            self._budget.grant(max(0, self.size - before))
            self._walk(file)
        with contextlib.suppress(FileNotFoundError):  # the file is being renamed, which keeps the version
            self._version = self._storage.version(self.name)

    def is_replaced(self, name: str) -> bool:
        """Return True if an edit in place has replaced the file of this name since the batch was opened.

        Raises OSError.
        """
        size = self._storage.size(name)
        if size < self.size or (self.sealed and size > self.size):
            return True
        if self.sealed:  # no read needed
            return self.is_stale or self._storage.version(name) != self._version
        with contextlib.suppress(CorruptTrace, UnsupportedTrace), self._storage.open(name) as file:
            return wire.unpack_file_header(file.read(0, wire.HEADER_SIZE)).file_id != self.header.file_id
        return False

    def read_chunk(self, number: int, wanted: Callable[[Path], bool], rows: RowRanges | None = None) -> Chunk:
        """Read the wanted columns of a chunk and verify their checksums.

        rows: rows that are needed; of columns in blocks, only the blocks with these are read. None: all rows.

        Raises CorruptTrace, and TraceError if the file was removed or replaced since it was opened.
        """
        before = self._restored
        try:
            return self._read_chunk(number, wanted, rows)
        except (CorruptTrace, FileNotFoundError) as error:
            try:
                is_there = not self.is_replaced(self.name)
            except FileNotFoundError:
                is_there = False
            if not is_there:
                gone = f"{self.path}: removed or replaced since it was opened; call refresh() or open the trace again"
                raise TraceError(gone) from error
            self._confirm()
            self.heal()
            if self._restored is before:
                raise
            return self._read_chunk(number, wanted, rows)  # the file is healed, perhaps by another thread

    def _confirm(self) -> None:
        """Raise TraceError if the manifest lists the index of another file than this one."""
        if not self.is_listed:
            return
        actual = BatchReader(self._storage, self.name, warns=False)
        self.is_stale = actual.header.file_id != self.header.file_id or not np.array_equal(actual.chunks, self.chunks)
        if self.is_stale:
            raise TraceError(f"{self.path}: not the batch that its manifest lists; call refresh() to read it as it is")
        self.is_listed = False

    def _read_chunk(self, number: int, wanted: Callable[[Path], bool], rows: RowRanges | None) -> Chunk:
        offset = int(self.chunks["offset"][number])
        blobs: dict[Path, tuple[ColumnDescriptor, Buffer | StoredBlocks]] = {}
        try:
            with self.open() as file:
                columns = self._columns_at(file, number)
                if self._storage.ahead:
                    self._storage.expect(self._spans(columns, wanted, rows))
                for column, at in columns:
                    if wanted(column.path):
                        runs = _runs_in(rows, column)
                        if runs is None:
                            blobs[column.path] = column, checked(file, at, column)
                        else:
                            blobs[column.path] = column, {run: checked(file, at, column, run) for run in runs}
        except CorruptTrace as error:
            raise error if error.path else error.located(self.path, offset) from error
        path = self.path  # a chunk must not keep its batch alive, whose table can be large
        return Chunk(blobs, [column for column, _ in columns], lambda error: error.located(path, offset))

    def _spans(
        self, columns: list[tuple[ColumnDescriptor, int]], wanted: Callable[[Path], bool], rows: RowRanges | None
    ) -> Iterator[Span]:
        for column, at in columns:
            runs = _runs_in(rows, column) if wanted(column.path) else []
            for run in [None] if runs is None else runs:
                begin, end, *_ = extent_of(column, run)
                yield Span(self.name, at + begin, end - begin)

    def spans(self, rows: Mapping[int, RowRanges | None], wanted: Callable[[Path], bool]) -> list[Span]:
        """Return what read_chunk() reads for these chunks, but for damaged ones. rows: the needed rows, by chunk.

        Takes one round trip without an index of columns. Raises OSError, CorruptTrace.
        """
        if self.columns is None and self._storage.ahead:
            entries = [self.chunks[["offset", "length"]][number].tolist() for number in rows]
            unread = [(at, length) for at, length in entries if at not in self._known]
            self._storage.expect(Span(self.name, at, n if n <= _SMALL else wire.HEADER_SIZE) for at, n in unread)
        spans: list[Span] = []
        # Errors are raised again where the chunk is read.
        with contextlib.suppress(FileNotFoundError), self.open() as file:
            for number, some in rows.items():
                with contextlib.suppress(CorruptTrace):
                    spans += self._spans(self._columns_at(file, number), wanted, some)
        return spans

    def heal(self) -> bool:
        """Restore damaged bytes from the parity, on the first call; return True if any were restored.

        Reads the whole batch. From then on open() returns the restored bytes. Intact bytes are never replaced.
        """
        with _HEALING:
            if self._is_checked:
                return False
            blocks: dict[int, bytes] = {}
            with self.open() as file, contextlib.suppress(CorruptTrace):
                if (stored := stored_parity(file, self.header.file_id)) is not None:
                    blocks, _, self.parity_contradicts, _ = heal(file, stored)
            self._is_checked = not self.name.endswith(PART)  # an unsealed batch gets its parity later
            if blocks:
                self.healed, self._restored = restored_ranges(self.path, blocks), blocks
        if blocks and self._warns:
            warn(
                f"{self.path}: damaged, but read as recorded, restored by its parity; "
                "'gym-trace edit repair --in-place' writes the original bytes back",
            )
        if self.parity_contradicts and self._warns:
            warn(f"{self.path}: {PARITY_CONTRADICTS}")
        return bool(blocks)

    def stored_chunk(self, file: Reader, number: int) -> StoredChunk:
        """Return a chunk as stored. file: this batch, open. Raises CorruptTrace."""
        try:
            header, metadata, columns = self._chunk_record(file, number)
        except CorruptTrace as error:
            raise error.located(self.path, int(self.chunks["offset"][number])) from error
        return StoredChunk(file, header, [column for column, _ in columns], metadata.get("pending"))

    def index_text(self, name: str, file: Reader) -> str:
        """Return the index for a manifest; "" without one. name: of the file there. file: this batch, open."""
        footer = self._footer(file)
        header = None if footer is None else self._header_at(file, footer.index_offset)
        if header is None:
            return ""
        head = file.read(header.offset, wire.HEADER_SIZE)
        return index_text(name, [head, file.read(header.offset + len(head), header.end - header.offset - len(head))])

    # -- reading records ----------------------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """Path of the file, for messages."""
        return self._storage.path(self.name)

    def open(self) -> Reader:
        """Open the file, with restored bytes in place of damaged ones. Raises OSError, CorruptTrace."""
        name = self.name  # another thread may change self.name
        try:
            file = self._storage.open(name)
        except FileNotFoundError:
            if not name.endswith(PART):
                raise
            self.name = name.removesuffix(PART)  # sealed since: same bytes, followed by an index
            file = self._storage.open(self.name)
        return HealedReader(file, self._restored) if self._restored else file

    def _file_header(self, file: Reader) -> wire.FileHeader:
        try:
            return wire.unpack_file_header(file.read(0, wire.HEADER_SIZE))
        except CorruptTrace as error:
            # The first record and the footer hold the file id, too: the other records stay readable.
            file_id = wire.file_id_of(file.read(wire.HEADER_SIZE, wire.HEADER_SIZE), wire.HEADER_SIZE)
            if file_id is None:
                end = file.read(max(0, self.size - wire.HEADER_SIZE), wire.HEADER_SIZE)
                file_id = wire.file_id_of_footer(end, self.size)
            if file_id is None:
                raise error.located(self.path, 0) from error
            self._damaged(0, wire.HEADER_SIZE, error.problem)
            return wire.FileHeader(file_id, 0)
        except UnsupportedTrace as error:
            raise UnsupportedTrace(f"{self.path}: {error}") from error

    def _header_at(self, file: Reader, offset: int) -> wire.RecordHeader | None:
        return header_at(file, offset, self.header.file_id)

    def _chunk_record(
        self, file: Reader, number: int
    ) -> tuple[wire.RecordHeader, dict[str, Any], list[tuple[ColumnDescriptor, int]]]:
        """Return the header, the metadata and the columns of a chunk, with their offsets."""
        offset, length = (int(self.chunks[name][number]) for name in ("offset", "length"))
        header = self._header_at(file, offset)
        if header is None or header.type != wire.CHUNK or header.end != offset + length:
            raise CorruptTrace("checksum mismatch in the header of a record")
        metadata = metadata_of(file, header)
        return header, metadata, list(columns_of(header, metadata))

    def _columns_at(self, file: Reader, number: int) -> list[tuple[ColumnDescriptor, int]]:
        """Return the columns of a chunk with their offsets, by the index where each read takes a round trip."""
        offset = int(self.chunks["offset"][number])
        columns = self._known.get(offset)
        if columns is None:
            listed = self.columns if self._storage.ahead else None
            columns = self._chunk_record(file, number)[2] if listed is None else listed.columns_in(number)
            if len(self._known) >= _CACHED_CHUNKS:
                self._known.clear()
            self._known[offset] = columns
        return columns

    # -- finding chunks -----------------------------------------------------------------------------------------------

    def _read_index(self, file: Reader) -> bool:
        """Read the index; return False if it is missing or damaged."""
        footer = self._footer(file)
        if footer is None:
            if not self.name.endswith(PART):
                self._damaged(max(0, self.size - wire.HEADER_SIZE), self.size, "invalid footer")
            return False
        try:
            header = self._header_at(file, footer.index_offset)
            if header is None or header.type != wire.INDEX:
                raise CorruptTrace("checksum mismatch in the header of the index")
            self._take(self._index(file, header))
        except CorruptTrace as error:
            self._damaged(footer.index_offset, self.size, error.problem)
            return False
        self.sealed = self.ended = True
        return True

    def _take(self, index: Index) -> None:
        self.fragments, self.chunks, self.totals, self.slabs, self.columns = index

    def _index(self, file: Reader, header: wire.RecordHeader) -> Index:
        metadata = metadata_of(file, header)
        tables = {c.path: (c, checked(file, at, c)) for c, at in columns_of(header, metadata)}
        fragments = read_fragments(*self._table(tables, "fragments", wire.FRAGMENT))
        chunks = decode(*self._table(tables, "chunks", wire.CHUNK_ENTRY)).view(wire.CHUNK_ENTRY)
        if sum(chunks["fragments"].tolist()) != len(fragments) or not _are_apart(chunks, header.offset):
            raise CorruptTrace("the tables of the index contradict each other")
        columns: StoredColumns | None = None
        if COLUMNS in tables:
            entries = decode(*self._table(tables, "columns", wire.COLUMN_ENTRY)).view(wire.COLUMN_ENTRY)
            blocks = np.empty(0, wire.BLOCK)
            if BLOCK_TABLE in tables:
                blocks = decode(*self._table(tables, "blocks", wire.BLOCK)).view(wire.BLOCK)
            columns = StoredColumns(entries, metadata.get("forms"), chunks, blocks)
        return Index(fragments, chunks, _totals_of(metadata.get("totals")), SlabLedger.of_index(metadata), columns)

    def _read_schema(self, file: Reader) -> None:
        header = self._header_at(file, wire.HEADER_SIZE)
        try:
            if header is None or header.type != wire.SCHEMA:
                raise CorruptTrace("checksum mismatch in the schema record")
            self.schema = metadata_of(file, header)
        except CorruptTrace as error:
            end = int(self.chunks["offset"][0]) if len(self.chunks) else self.size
            self._damaged(wire.HEADER_SIZE, end, error.problem)

    def _walk(self, file: Reader) -> None:
        """Read records from the end of the last walk; after damage, continue at the next valid record."""
        fragments: list[Array] = []
        chunks: list[tuple[int, int, int, int]] = []
        offset = self._read_to
        self.torn = 0
        while offset < self.size:
            header = self._header_at(file, offset)
            if header is not None and header.end <= self.size:
                try:
                    self._walk_record(file, header, fragments, chunks)
                except CorruptTrace as error:
                    self._damaged(offset, header.end, error.problem)
                offset = header.end
                continue
            if self._footer(file) and offset == self.size - wire.HEADER_SIZE:
                offset = self.size
                break
            following, last = next_record(file, offset + 8, self.header.file_id)
            if following is None:
                torn_at, header = (offset, header) if last is None else (last.offset, last)
                if self._is_torn(file, torn_at, header):
                    if torn_at > offset:
                        self._damaged(offset, torn_at, _NO_RECORD)
                    offset, self.torn = torn_at, self.size - torn_at
                    break
                following = self.size - wire.HEADER_SIZE if self._footer(file) else self.size
            self._damaged(offset, following, _NO_RECORD)
            offset = following
        self._read_to = offset
        self.fragments = Fragments.joined([self.fragments, Fragments(fragments)])
        self.chunks = np.concatenate([self.chunks, np.array(chunks, wire.CHUNK_ENTRY)])

    def _walk_record(
        self, file: Reader, header: wire.RecordHeader, fragments: list[Array], chunks: list[tuple[int, int, int, int]]
    ) -> None:
        metadata = metadata_of(file, header)
        if header.type == wire.SCHEMA:
            self.schema = metadata
        elif header.type == wire.CHUNK:
            columns = list(columns_of(header, metadata))
            tables = {c.path: (c, checked(file, at, c)) for c, at in columns[:1]}
            table = decode(*self._table(tables, "fragments", wire.FRAGMENT)).view(wire.FRAGMENT)
            fragments.append(table)
            chunks.append((header.offset, header.end - header.offset, len(table), observation_rows(table)))
            self.slabs.take(metadata)
            add_totals(self.totals, (column for column, _ in columns))
        elif header.type == wire.INDEX:
            self.ended = True
        elif not header.flags & wire.OPTIONAL:
            raise UnsupportedTrace(f"{self.path}: unknown record type {header.type}; upgrade gym-trace")

    def _is_torn(self, file: Reader, offset: int, header: wire.RecordHeader | None) -> bool:
        """Return True if the bytes after offset are the torn end of a killed writer, not damage."""
        if not self.name.endswith(PART):
            return False
        if header is not None or self.size - offset < wire.HEADER_SIZE:
            return True
        return not any(file.read(offset, min(self.size - offset, SCAN_BLOCK)))

    def _table(
        self, columns: dict[Path, tuple[ColumnDescriptor, Buffer]], name: str, dtype: np.dtype[Any]
    ) -> tuple[ColumnDescriptor, Buffer]:
        """Return the column of a table as stored, and count its rows. Raises CorruptTrace."""
        found = columns.get((name,))
        if found is None or found[0].dtype != f"|V{dtype.itemsize}":
            raise CorruptTrace(f"record without a {name} table")
        self._budget.take(found[0].rows)
        return found

    def _footer(self, file: Reader) -> wire.Footer | None:
        tail = file.read(self.size - wire.HEADER_SIZE, wire.HEADER_SIZE)
        return wire.unpack_footer(tail, self.size, self.header.file_id)

    def _damaged(self, start: int, end: int, problem: str) -> None:
        if self.damage and self.damage[-1][2:] == (start, problem):
            start = self.damage.pop().start
        self.damage.append(Damage(self.path, start, end, problem))


def size_and_crc(file: Reader, end: int | None = None) -> tuple[int, int]:
    """Read a file up to `end`; return the number of bytes and their CRC. Raises OSError."""
    size = crc = 0
    end = file.size if end is None else end
    while block := file.read(size, min(SCAN_BLOCK, end - size)):
        size, crc = size + len(block), crc32(block, crc)
    return size, crc


def observation_rows(fragments: Array | Fragments) -> int:
    """Return the number of observation rows of these fragments."""
    return int(fragments["steps"].sum()) + int(np.count_nonzero(fragments["flags"] & wire.HAS_INITIAL))


def add_totals(totals: dict[Path, list[int]], columns: Iterable[ColumnDescriptor]) -> None:
    """Add the decoded and stored bytes of the columns of a chunk."""
    for column in columns:
        total = totals.setdefault(column.path, [0, 0])
        total[0] += column.full_size
        total[1] += column.stored


def _are_apart(chunks: Array, end: int) -> bool:
    """Return True if chunks are in order, do not overlap, and end before `end`: no byte is read twice."""
    offsets, lengths = chunks["offset"], chunks["length"]
    if not len(chunks) or max(offsets.max(), lengths.max()) > _FARTHEST:
        return not len(chunks)
    ends = offsets + lengths
    return bool(offsets[0] >= wire.HEADER_SIZE and ends[-1] <= end and (ends[:-1] <= offsets[1:]).all())


def _totals_of(raw: Any) -> dict[Path, list[int]]:
    try:
        totals = {tuple(path): [full, stored] for path, full, stored in raw}
    except (TypeError, ValueError) as error:
        raise CorruptTrace("malformed totals in the index") from error
    numbers = [number for sizes in totals.values() for number in sizes]
    if not all(map(is_path, totals)) or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        raise CorruptTrace("malformed totals in the index")
    return totals
