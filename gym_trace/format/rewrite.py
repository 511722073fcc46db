"""The one way to rewrite recorded chunks: choose fragments, change columns, write them into the files of a writer.

`gym-trace edit`, repair, keep_bytes and recovered rings of dead writers use it. An unchanged chunk is copied as stored.
If all fragments of a changed chunk are kept, its unchanged columns are copied as stored; otherwise its kept rows are
decoded and joined with the rows of neighbouring chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.packing import pack, pack_lenient
from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace, UnstorableValue, UnsupportedTrace
from gym_trace.format import wire
from gym_trace.format.batch_files import BatchFiles, RowsOrEncoded
from gym_trace.format.batch_reader import PART, BatchReader, Chunk, StoredChunk
from gym_trace.format.columns import MSGPACK, STEP_COLUMNS, Path
from gym_trace.format.ring.chunk_builder import FULL_ROWS, ChunkWriter, full_size
from gym_trace.format.ring.segment import Columns, Segment, size_of
from gym_trace.format.wire import ENDS, HAS_INITIAL, STARTS

LEVEL = 3  # zstd level for rewritten data
FRAGMENTS, START_RECORDS = ("fragments",), ("starts",)
_WELL_FILLED = 2  # a chunk of at least 1/_WELL_FILLED of the largest size is not joined with others


class SourceChunk(NamedTuple):
    """A chunk to rewrite.

    Attributes:
        table: (n,) the fragments of the chunk, as they will be written.
        read: reads the columns that a predicate accepts.
        kept: (n,) bool, the fragments to keep with their rows; None: all.
        bare: (n,) bool, other fragments to keep, without their rows; None: none.
        stored: returns the chunk as stored; None: its table changes, or it is not in a file.
        changed: columns to replace or add: rows of the kept fragments, or stored columns.
        slab, pending: see BatchFiles.write().
    """

    table: Array
    read: Callable[[Callable[[Path], bool]], Chunk]
    kept: Array | None = None
    bare: Array | None = None
    stored: Callable[[], StoredChunk] | None = None
    changed: Mapping[Path, RowsOrEncoded] = {}
    slab: tuple[int, bool] | None = None
    pending: Sequence[Any] = ()

    @property
    def is_whole(self) -> bool:
        """True if all fragments are kept."""
        return self.kept is None or bool(self.kept.all())


class ColumnEdits(NamedTuple):
    """Changes of columns that do not depend on rows.

    Attributes:
        path_of: returns the new path of a column; None: the column is dropped.
        start_of: changes a packed reset record; None: no change.
    """

    path_of: Callable[[Path], Path | None] = lambda path: path
    start_of: Callable[[bytes], bytes] | None = None

    def leave(self, paths: Iterable[Path]) -> bool:
        """Return True if none of these columns changes."""
        return self.start_of is None and all(self.path_of(path) == path for path in paths)


AS_RECORDED = ColumnEdits()


def rewrite(
    chunks: Iterable[SourceChunk], files: BatchFiles, columns: ColumnEdits = AS_RECORDED, *, is_one_batch: bool = False
) -> int:
    """Write chunks, in order, into the files of a writer; return the number of chunks with kept fragments.

    is_one_batch: write all chunks into the open batch.

    Raises CorruptTrace, UnsupportedTrace, OSError.
    """
    rewriter = Rewriter(files, columns, is_one_batch=is_one_batch)
    for chunk in chunks:
        rewriter.add(chunk)
    rewriter.flush()
    return rewriter.copied + rewriter.encoded


class Rewriter:
    """Writes chunks and batches of sources into the files of one writer.

    Fragments are written in the order in which they are added. Ids, seeds, times and sums of rewards stay exact.

    Attributes:
        batches: number of batches copied whole.
        copied: number of other chunks whose unchanged columns were copied as stored.
        encoded: number of chunks that were decoded.

    Args:
        columns: changes of columns in all chunks.
        fills_chunks: also join chunks that are not well filled.
        is_one_batch: write all chunks into the open batch, without joining any.
    """

    def __init__(
        self,
        files: BatchFiles,
        columns: ColumnEdits = AS_RECORDED,
        *,
        fills_chunks: bool = False,
        is_one_batch: bool = False,
    ):
        self.batches = self.copied = self.encoded = 0
        self._files, self._columns = files, columns
        self._fills_chunks, self._is_one_batch = fills_chunks, is_one_batch
        self._joined = ChunkWriter(lambda: files, None, is_edit=True, fills_chunks=fills_chunks)
        self._pending: Any = ()  # actions in the metadata of the last chunk

    def add_batch(self, batch: BatchReader, schema: dict[str, Any], crc: int | None) -> bool:
        """Copy a batch as a file; return False, and do nothing, if that is not possible.

        schema: schema of the files, without "batch". crc: CRC of the batch, if known. Raises CorruptTrace, OSError.
        """
        if self._fills_chunks or not is_sealed(batch) or batch.schema is None:
            return False
        stored_schema = {key: value for key, value in batch.schema.items() if key != "batch"}
        if not self._columns.leave(batch.totals) or not are_alike(stored_schema, schema):
            return False
        self.flush()
        try:
            self._files.copy_batch(batch, crc)
        except UnstorableValue:
            return False
        self._pending = batch.slabs.pending or ()
        self.batches += 1
        return True

    def add(self, chunk: SourceChunk) -> None:
        """Add the kept fragments of a chunk. Raises CorruptTrace, UnsupportedTrace, OSError."""
        if not chunk.is_whole:
            self._add_part(chunk, chunk.read(lambda path: self._is_copied(chunk, path)))
        elif self._fills_chunks:
            columns = chunk.read(lambda path: self._is_copied(chunk, path))
            if not _is_well_filled(columns):
                self._add_part(chunk, columns)
            else:
                self.flush()
                self._write(chunk, columns)
        else:
            self.flush()
            stored = chunk.stored() if chunk.stored is not None and self._columns.start_of is None else None
            if stored is None or chunk.changed or not self._columns.leave(column.path for column in stored.columns):
                self._write(chunk, chunk.read(lambda path: self._is_copied(chunk, path)))
                return
            self._files.copy_chunk(chunk.table, stored)
            self._pending = stored.pending or ()
            self._count_copied()

    def flush(self) -> None:
        """Write the rows that wait to be joined. Raises OSError."""
        self._joined.write()

    def finish(self, pending: Sequence[Any]) -> None:
        """Write the remaining rows. pending: actions without a result (docs/FORMAT.md, section 4)."""
        self.flush()
        if pack_lenient(list(pending))[0] != pack_lenient(list(self._pending))[0]:
            self._files.write(np.zeros(0, wire.FRAGMENT), {}, pending=pending)

    def _is_copied(self, chunk: SourceChunk, path: Path) -> bool:
        return path != FRAGMENTS and path not in chunk.changed and self._columns.path_of(path) is not None

    def _write(self, chunk: SourceChunk, columns: Chunk) -> None:
        """Write a whole chunk, with its unchanged columns as stored."""
        rows: dict[Path, RowsOrEncoded] = {}
        for path in columns.columns:
            column, blob = columns.encoded(path)
            new = self._columns.path_of(path) or path
            rows[new] = column._replace(path=new), blob
        if START_RECORDS in rows and self._columns.start_of is not None:
            rows[START_RECORDS] = list(map(self._columns.start_of, columns.packed(START_RECORDS)))
        self._files.write(chunk.table, {**rows, **chunk.changed}, chunk.slab, chunk.pending)
        self._pending = chunk.pending
        self._count_copied()

    def _count_copied(self) -> None:
        self.copied += 1
        if not self._is_one_batch:
            self._files.seal_if_due()

    def _add_part(self, chunk: SourceChunk, columns: Chunk) -> None:
        """Add the kept rows of a chunk, decoded."""
        table, rows = _part_of(columns, chunk)
        if START_RECORDS in rows and self._columns.start_of is not None:
            rows[START_RECORDS] = [self._columns.start_of(bytes(row)) for row in rows[START_RECORDS]]
        rows = {self._columns.path_of(path) or path: some for path, some in rows.items()}
        changed = {path: some for path, some in chunk.changed.items() if not isinstance(some, tuple) and len(some)}
        rows |= changed
        if not len(table):
            return
        self.encoded += 1
        self._pending = ()
        if self._is_one_batch:
            self._files.write(table, rows)
        else:
            self._joined.add(Segment(table, rows, table.nbytes + sum(map(size_of, rows.values()))))


def _part_of(columns: Chunk, chunk: SourceChunk) -> tuple[Array, Columns]:
    """Return the kept fragments of a chunk, and their rows in some of its columns.

    Raises CorruptTrace, UnsupportedTrace.
    """
    count = len(chunk.table)
    kept = np.ones(count, np.bool_) if chunk.kept is None else chunk.kept
    bare = np.zeros(count, np.bool_) if chunk.bare is None else chunk.bare
    steps, flags = chunk.table["steps"].astype(np.int64), chunk.table["flags"]
    masks = dict.fromkeys(STEP_COLUMNS, np.repeat(kept, steps))
    masks["observations"] = np.repeat(kept, steps + (flags & HAS_INITIAL > 0))
    masks["starts"] = (kept | bare)[flags & STARTS > 0]
    rows: Columns = {}
    for path, column in columns.columns.items():
        mask = masks.get(str(path[0]))
        if mask is None:
            raise UnsupportedTrace(
                f"column {path[0]!r} was written by a newer gym-trace; upgrade gym-trace to edit this trace"
            )
        if column.rows != len(mask):
            problem = f"column {'/'.join(map(str, path))} has the wrong number of rows"
            raise columns.located(CorruptTrace(problem))
        if mask.any() and column.dtype == MSGPACK:
            rows[path] = [value for value, is_kept in zip(columns.packed(path), mask.tolist()) if is_kept]
        elif mask.any():
            array = columns.array(path)
            rows[path] = array if mask.all() else array[mask]
    if START_RECORDS not in rows and masks["starts"].any():  # it may be joined with a chunk that has some
        rows[START_RECORDS] = [pack({})] * int(np.count_nonzero(masks["starts"]))
    table = chunk.table.copy()
    table["flags"][bare] &= np.uint32(STARTS | ENDS)
    table["steps"][bare] = 0
    table["reward_sum"][bare] = 0
    return table[kept | bare], rows


def _is_well_filled(chunk: Chunk) -> bool:
    columns = chunk.columns.values()
    is_large = any(column.dtype != MSGPACK and column.row_size >= wire.LARGE_ROW for column in columns)
    values = sum(it.full_size + wire.VALUE_SIZE * it.rows for it in columns if it.dtype == MSGPACK)
    size, rows = sum(column.full_size for column in columns), max((it.rows for it in columns), default=0)
    return size * _WELL_FILLED >= full_size(is_large, values) or rows * _WELL_FILLED >= FULL_ROWS


def is_sealed(batch: BatchReader) -> bool:
    """Return True if no process can change or rename the file."""
    return batch.sealed and not batch.name.endswith(PART) and not batch.damage


def are_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if two schemas are equal, in any order of keys."""
    packed = ({key: pack_lenient(value)[0] for key, value in schema.items()} for schema in (one, other))
    return next(packed) == next(packed)
