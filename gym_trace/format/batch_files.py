"""Write the files of one writer: its batches in order, and its manifest."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.values import Array
from gym_trace.errors import InvalidOption
from gym_trace.format import wire
from gym_trace.format.batch_reader import PART, BatchReader, StoredChunk
from gym_trace.format.batch_writer import BatchWriter, copy_batch
from gym_trace.format.columns import Buffer, ColumnDescriptor, ColumnEncoder, EncodedColumn, LargeRows, Workspace
from gym_trace.format.columns import Path as ColumnPath
from gym_trace.format.directory import batch_name
from gym_trace.format.encoding_threads import EncodingThreads, Job
from gym_trace.format.fragments import Fragments
from gym_trace.format.manifest import FAILED, SUFFIX, created, line
from gym_trace.storage.protocol import Appender, Storage
from gym_trace.storage.reserve import Reserve

# A batch is sealed and synced when it reaches one of these limits.
BATCH_BYTES = 64 << 20
BATCH_SECONDS = 600.0
BATCH_FRAGMENTS = 200_000  # bounds the index, which stays in memory until the batch is sealed


RowsOrEncoded = Array | list[bytes] | tuple[ColumnDescriptor, Buffer]
_Encode = Callable[[Workspace], EncodedColumn]


class _EncodingChunk(NamedTuple):
    """Arguments of BatchWriter.write_chunk(), of a chunk whose columns may still be encoded."""

    fragments: Array
    columns: Job[list[EncodedColumn]]
    slab: tuple[int, bool] | None
    pending: Sequence[Any]


class BatchFiles:
    """Writes fragment tables and columns as chunks, batches and manifest lines.

    Not thread-safe. Raises OSError from the file system.
    """

    def __init__(
        self,
        storage: Storage,
        schema: dict[str, Any],
        level: int,
        fsync: bool,
        manifest: Appender | None = None,
        threads: int = 0,
    ):
        """Create the manifest.

        Args:
            manifest: reopened manifest of a dead writer; see resume().
            threads: number of threads that may encode the chunks of a large slab, beside the caller's.
        """
        self.writer: str = schema["writer"]
        self._storage = storage
        self._schema = schema
        self._threads = EncodingThreads(level, threads)
        self._encoding: deque[_EncodingChunk] = deque()  # chunks of a slab that are not appended yet
        self._fsync = fsync
        self._encoders: dict[ColumnPath, ColumnEncoder] = {}
        self._batch: BatchWriter | None = None
        self._opened_at = 0.0
        self._batches = 0
        self._batch_episodes = self._batch_steps = 0
        self.bytes = self.episodes = self.steps = 0
        self._in_sealed = 0
        self.batch_bytes = BATCH_BYTES
        self._reserve: Reserve | None = None
        try:
            self._manifest = manifest or created(storage, f"{self.writer}{SUFFIX}", schema)
        except FileExistsError as error:
            raise InvalidOption(f"uid={self.writer!r}: exists in {storage.root}; pass another or omit it") from error

    def reserve(self) -> None:
        """Reserve a file descriptor for the next batch until it is open, and again after each batch.

        Without a descriptor for a ring, the steps before the first batch are only in memory.
        """
        self._reserve = Reserve()
        self._reserve.take()

    def resume(self, batches: int, last: BatchReader | None) -> None:
        """Continue the files of a dead writer.

        batches: number of sealed batches. last: the unsealed batch, if any; it must end with a complete record.
        """
        self._batches = batches
        if last is not None:
            self._batch = BatchWriter(self._storage, batch_name(self.writer, batches), batches, self._schema, last)
            self._opened_at = time.monotonic()
            self._count(last.fragments)

    def write(
        self,
        fragments: Array,
        columns: Mapping[ColumnPath, RowsOrEncoded | LargeRows],
        slab: tuple[int, bool] | None = None,
        pending: Sequence[Any] = (),
    ) -> None:
        """Append one chunk.

        Args:
            columns: rows, see ColumnEncoder.prepared(), or encoded columns.
            slab: sequence number of the slab that the chunk comes from, and True if more of its chunks follow.
            pending: actions without a result so far (docs/FORMAT.md, section 4); final if this is the last chunk.

        Raises UnstorableValue for data that a reader would reject.
        """
        while len(fragments) > wire.MAX_TABLE:  # a repair puts fragments without rows, which end episodes, first
            ends = min(len(fragments) - wire.MAX_TABLE, wire.MAX_TABLE)
            self._write(fragments[:ends], [], slab and (slab[0], True))
            fragments = fragments[ends:]
        self._write(fragments, [self._prepared(path, rows) for path, rows in columns.items()], slab, pending)

    def _write(
        self, fragments: Array, columns: list[_Encode], slab: tuple[int, bool] | None, pending: Sequence[Any] = ()
    ) -> None:
        columns = [self._prepared(("fragments",), fragments), *columns]
        has_more = slab is not None and slab[1]
        job = Job(lambda workspace: [encode(workspace) for encode in columns])
        if has_more:
            self._threads.submit(job)
        self._encoding.append(_EncodingChunk(fragments, job, slab, pending))
        self._append_chunks(2 * self._threads.count if has_more else 0)

    def _append_chunks(self, most: int = 0) -> None:
        """Append chunks in order until `most` are left, which bounds the memory; if none is left, end the threads."""
        while len(self._encoding) > most:
            fragments, job, slab, pending = self._encoding.popleft()
            columns = job.result(self._threads.workspace)
            self._batch_with_space(fragments).write_chunk(fragments, columns, slab, pending)
            self._wrote(fragments)
        if not most:
            self._threads.stop()

    def copy_chunk(self, fragments: Array, chunk: StoredChunk) -> None:
        """Append a chunk of another batch as stored. fragments: fragment table of the chunk."""
        self._batch_with_space(fragments).copy_chunk(fragments, chunk)
        self._wrote(fragments)

    def copy_batch(self, batch: BatchReader, crc: int | None) -> None:
        """Seal the current batch, and copy a sealed batch. crc: CRC of the file of that batch, if known.

        Raises UnstorableValue if the batch must be rewritten chunk by chunk instead; CorruptTrace.
        """
        self.seal()
        name = batch_name(self.writer, self._batches)
        crc, index = copy_batch(batch, crc, self._storage, name, self._batches)
        self._batches += 1
        self._count(batch.fragments)
        self._sealed(name, batch.size, crc, index)

    def _batch_with_space(self, fragments: Array) -> BatchWriter:
        """Return the current batch, or a new one if these fragments do not fit."""
        if self._batch is not None and not self._batch.has_space(len(fragments)):
            self.seal()
        return self.batch()

    def _wrote(self, fragments: Array) -> None:
        self._count(fragments)
        self.bytes = self._in_sealed + self.batch().size
        if self._fsync:
            self.batch().sync()

    def _count(self, fragments: Array | Fragments) -> None:
        self._batch_steps += int(fragments["steps"].sum())
        self._batch_episodes += int(np.count_nonzero(fragments["flags"] & wire.ENDS))

    def batch(self) -> BatchWriter:
        if self._batch is None:
            name, schema = batch_name(self.writer, self._batches), {**self._schema, "batch": self._batches}
            if self._reserve is not None:
                self._reserve.release()
            self._batch = BatchWriter(self._storage, name, self._batches, schema)
            self._opened_at = time.monotonic()
            if self._fsync:
                self._storage.sync()
        return self._batch

    def seal_if_due(self) -> None:
        self._append_chunks()
        batch = self._batch
        if batch is not None and (
            batch.size >= self.batch_bytes
            or batch.fragments >= BATCH_FRAGMENTS
            or time.monotonic() - self._opened_at >= BATCH_SECONDS
        ):
            self.seal()

    def seal(self) -> None:
        batch = self._batch
        if batch is None:
            return
        batch.seal(self._threads)
        if self._reserve is not None:
            self._reserve.take()
        self._batch = None
        self._batches += 1
        self._sealed(batch.name, batch.size, batch.crc, batch.index)

    def _sealed(self, name: str, size: int, crc: int, index: str) -> None:
        """Add a sealed batch to the manifest: last, because it must not list a batch that is not durable."""
        self._in_sealed += size
        self.bytes = self._in_sealed
        counts = {"episodes": self._batch_episodes, "steps": self._batch_steps}
        entry = {"type": "batch", "file": name, "bytes": size, "crc32": crc, **counts, "index": index}
        self._manifest.write(line(entry))
        self.episodes += self._batch_episodes
        self.steps += self._batch_steps
        self._batch_episodes = self._batch_steps = 0

    def close(self, extra: dict[str, Any]) -> None:
        """Seal the batch, mark the writer as closed in the manifest, and close all files, even after an error."""
        try:
            self.seal()
            self._manifest.write(line({"type": "closed", "episodes": self.episodes, "steps": self.steps, **extra}))
            self._manifest.close()
        finally:
            self.detach()

    def fail(self, problem: str) -> None:
        """Close all files as they are; write the problem to the manifest, if the disk has space for it."""
        self._detach_batch()  # first: truncating its torn end may free space
        with contextlib.suppress(OSError):
            self._manifest.write(line({"type": FAILED, "problem": problem}))
        self.detach()

    def discard(self) -> None:
        """Remove the batch that is being written."""
        if self._batch is not None:
            name = self._batch.name + PART
            self._detach_batch()
            self._storage.remove(name)

    def detach(self) -> None:
        """Close all files without sealing the batch. Never raises OSError: unwritten data is lost."""
        self._encoding.clear()
        self._threads.stop()
        self._detach_batch()
        if self._reserve is not None:
            self._reserve.release()
        with contextlib.suppress(OSError):
            self._manifest.close()

    def _detach_batch(self) -> None:
        batch, self._batch = self._batch, None
        if batch is not None:
            with contextlib.suppress(OSError):
                batch.detach()

    def _prepared(self, path: ColumnPath, rows: RowsOrEncoded | LargeRows) -> _Encode:
        """Return the function that encodes a column, in any thread."""
        if isinstance(rows, tuple):
            column, blob = rows
            return lambda workspace: (column, [blob])
        if path not in self._encoders:
            self._encoders[path] = ColumnEncoder(path, self._threads.workspace)
        return self._encoders[path].prepared(rows)
