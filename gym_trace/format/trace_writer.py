"""All files of one writer: its batches one after the other, and its manifest."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gym_trace.errors import InvalidOption
from gym_trace.format import wire
from gym_trace.format.batch_reader import BatchReader
from gym_trace.format.batch_writer import BatchWriter, StoredChunk, copy_batch
from gym_trace.format.column_encoder import ColumnEncoder, Workspace
from gym_trace.format.columns import Column, Piece
from gym_trace.format.columns import Path as ColumnPath
from gym_trace.format.directory import batch_name
from gym_trace.format.manifest import SUFFIX, ManifestWriter
from gym_trace.model.deltas import DeltaRows
from gym_trace.model.values import Array
from gym_trace.storage.protocol import Storage

# A batch is sealed, and so made durable, when it has reached one of these.
BATCH_BYTES = 64 << 20
BATCH_SECONDS = 600.0
BATCH_FRAGMENTS = 200_000  # their index is kept in memory until then


RowsOrEncoded = Array | list[bytes] | tuple[Column, Piece]


class TraceWriter:
    """Turns tables of fragments and columns of rows into chunks, batches and manifest lines.

    Not thread-safe. Raises OSError as the file system does.
    """

    def __init__(self, storage: Storage, schema: dict[str, Any], level: int, fsync: bool):
        self.writer: str = schema["writer"]
        self._storage = storage
        self._schema = schema
        self._workspace = Workspace(level)
        self._fsync = fsync
        self._encoders: dict[ColumnPath, ColumnEncoder] = {}
        self._fed: dict[ColumnPath, None] = {}
        self._batch: BatchWriter | None = None
        self._opened_at = 0.0
        self._batches = 0
        self._batch_episodes = self._batch_steps = 0
        self.bytes = self.episodes = self.steps = 0
        self._in_sealed = 0
        try:
            self._manifest = ManifestWriter(storage, f"{self.writer}{SUFFIX}", schema)
        except FileExistsError as error:
            raise InvalidOption(f"uid={self.writer!r} is taken in {storage.root}; pass another one, or none") from error

    def write(
        self,
        fragments: Array,
        columns: Mapping[ColumnPath, RowsOrEncoded],
        slab: tuple[int, bool] | None = None,
        pending: Sequence[Any] = (),
    ) -> None:
        """Appends one chunk, which also has the columns that were fed.

        Args:
            columns: typed arrays of rows, lists of MessagePack values, or what is encoded already.
            slab: the sequence number of the slab that it is of, and whether more chunks of that follow.
            pending: actions that were not answered yet (docs/FORMAT.md, section 4): never, if no chunk follows.

        Raises UnstorableValue for what a reader would refuse.
        """
        while len(fragments) > wire.MAX_TABLE:  # a repair puts ends, which have no rows, before them
            ends = min(len(fragments) - wire.MAX_TABLE, wire.MAX_TABLE)
            self._write(fragments[:ends], [], slab and (slab[0], True))
            fragments = fragments[ends:]
        encoded: list[tuple[Column, Sequence[Piece]]] = [self._encoders[path].finish() for path in self._fed]
        self._fed.clear()
        encoded += [self._encoded(path, rows) for path, rows in columns.items()]
        self._write(fragments, encoded, slab, pending)

    def _write(
        self,
        fragments: Array,
        columns: list[tuple[Column, Sequence[Piece]]],
        slab: tuple[int, bool] | None,
        pending: Sequence[Any] = (),
    ) -> None:
        columns = [self._encoded(("fragments",), fragments), *columns]
        self._with_room(fragments).write_chunk(fragments, _observation_rows(fragments), columns, slab, pending)
        self._wrote(fragments)

    def copy_chunk(self, fragments: Array, chunk: StoredChunk) -> None:
        """Appends a chunk of another batch as it is stored; fragments: its fragment table."""
        self._with_room(fragments).copy_chunk(fragments, _observation_rows(fragments), chunk)
        self._wrote(fragments)

    def copy_batch(self, batch: BatchReader, source: Storage, crc: int | None) -> None:
        """Seals, and appends a sealed batch as it is stored in source. crc: of its file, if that is known.

        Raises UnstorableValue if it has to be written anew, chunk by chunk; CorruptTrace.
        """
        self.seal()
        name = batch_name(self.writer, self._batches)
        crc = copy_batch(batch, source, crc, self._storage, name, self._batches)
        self._batches += 1
        self._count(batch.fragments)
        self._sealed(name, batch.size, crc)

    def _with_room(self, fragments: Array) -> BatchWriter:
        """The batch for a chunk of these fragments."""
        if self._batch is not None and not self._batch.has_room(len(fragments)):
            self.seal()
        return self.batch()

    def _wrote(self, fragments: Array) -> None:
        self._count(fragments)
        self.bytes = self._in_sealed + self.batch().size
        if self._fsync:
            self.batch().sync()

    def _count(self, fragments: Array) -> None:
        self._batch_steps += int(fragments["steps"].sum())
        self._batch_episodes += int(np.count_nonzero(fragments["flags"] & wire.ENDS))

    def feed(self, path: ColumnPath, rows: Array | DeltaRows) -> None:
        """Takes some of the large rows of a column of the next chunk; all of one dtype and shape, not to be changed."""
        self._fed[path] = None
        self._encoder(path).feed(rows)

    def batch(self) -> BatchWriter:
        if self._batch is None:
            name, schema = batch_name(self.writer, self._batches), {**self._schema, "batch": self._batches}
            self._batch = BatchWriter(self._storage, name, self._batches, schema)
            self._opened_at = time.monotonic()
            if self._fsync:
                self._storage.sync()
        return self._batch

    def seal_if_due(self) -> None:
        batch = self._batch
        if batch is not None and (
            batch.size >= BATCH_BYTES
            or batch.fragments >= BATCH_FRAGMENTS
            or time.monotonic() - self._opened_at >= BATCH_SECONDS
        ):
            self.seal()

    def seal(self) -> None:
        batch = self._batch
        if batch is None:
            return
        batch.seal(self._workspace)
        self._batch = None
        self._batches += 1
        self._sealed(batch.name, batch.size, batch.crc)

    def _sealed(self, name: str, size: int, crc: int) -> None:
        """Has the manifest tell of a batch that is sealed."""
        self._in_sealed += size
        self.bytes = self._in_sealed
        self._manifest.batch(name, size, crc, self._batch_episodes, self._batch_steps)
        self.episodes += self._batch_episodes
        self.steps += self._batch_steps
        self._batch_episodes = self._batch_steps = 0

    def close(self, extra: dict[str, Any]) -> None:
        """Seals, says closed in the manifest, and lets go of all files, also where that fails."""
        try:
            self.seal()
            self._manifest.closed(self.episodes, self.steps, extra)
            self._manifest.close()
        finally:
            self.abandon()

    def fail(self, problem: str) -> None:
        """Lets go of all files as they are, after the manifest has said why, if there is room for that."""
        self._abandon_batch()  # whose torn end leaves room
        with contextlib.suppress(OSError):
            self._manifest.failed(problem)
        self.abandon()

    def abandon(self) -> None:
        """Lets go of all files as they are. Never raises OSError: what could not be written is not there."""
        self._abandon_batch()
        with contextlib.suppress(OSError):
            self._manifest.close()

    def _abandon_batch(self) -> None:
        batch, self._batch = self._batch, None
        if batch is not None:
            with contextlib.suppress(OSError):
                batch.abandon()

    def _encoded(self, path: ColumnPath, rows: RowsOrEncoded) -> tuple[Column, Sequence[Piece]]:
        if isinstance(rows, tuple):
            column, blob = rows
        else:
            encoder = self._encoder(path)
            column, blob = encoder.encode_values(rows) if isinstance(rows, list) else encoder.encode(rows)
        return column, [blob]

    def _encoder(self, path: ColumnPath) -> ColumnEncoder:
        if path not in self._encoders:
            self._encoders[path] = ColumnEncoder(path, self._workspace)
        return self._encoders[path]


def _observation_rows(fragments: Array) -> int:
    return int(fragments["steps"].sum()) + int(np.count_nonzero(fragments["flags"] & wire.LEADS))
