"""One writer of a new trace, made of what is stored of it: files and chunks are copied where nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gym_trace.editing.closing import Entries, copy_videos, entries_of, finish
from gym_trace.editing.kept import Kept, Wanted, kept_of, part_of
from gym_trace.editing.pieces import Pieces
from gym_trace.errors import UnstorableValue
from gym_trace.format import wire
from gym_trace.format.batch_reader import PART, BatchReader
from gym_trace.format.batch_writer import stored_chunk
from gym_trace.format.trace_writer import TraceWriter
from gym_trace.model.packing import pack_lenient
from gym_trace.model.values import Array
from gym_trace.reading.episode_table import row_of_pending
from gym_trace.reading.writer_reader import WriterReader
from gym_trace.storage.protocol import Reader, Storage

LEVEL = 3  # of zstd, for what is encoded anew
Advance = Callable[[int], None]  # bytes that are done
Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass
class EditReport:
    """Result of an edit.

    Attributes:
        destination: the new trace.
        episodes, steps: what it has; episodes as a Trace has them. bytes: of its directory, as du counts them.
        writers: their ids.
        files: batches that were copied whole. chunks: further chunks that were copied as they are stored.
        encoded: chunks of which only a part was kept, and which were decoded for it.
        running: episodes that were left out, because they are still being recorded.
        duplicates: episodes that several of the traces had, and that were kept once.
    """

    destination: Path
    episodes: int = 0
    steps: int = 0
    bytes: int = 0
    writers: list[str] = field(default_factory=list)
    files: int = 0
    chunks: int = 0
    encoded: int = 0
    running: int = 0
    duplicates: int = 0


def schema_of(reader: WriterReader) -> dict[str, Any]:
    """Return the metadata of a writer, without the fields of a single batch. Raises CorruptTrace."""
    said = {key: value for key, value in reader.schema.items() if key not in ("batch", "type")}
    return {**said, "writer": reader.writer}


def is_said_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if two schemas are equal, in any order of keys."""
    packed = ({key: pack_lenient(value)[0] for key, value in schema.items()} for schema in (one, other))
    return next(packed) == next(packed)


class WriterCopy:
    """Write the files of one writer. A context manager that closes them unfinished unless close() was called.

    Chunks go into the files in the order in which they are added, and so do fragments: ids, seeds, times and sums of
    rewards stay as they are to the bit. Raises OSError.
    """

    def __init__(self, storage: Storage, schema: dict[str, Any], report: EditReport, advance: Advance | None = None):
        """schema: as schema_of() gives it; batches that say the same are copied as files."""
        self._storage = storage
        self._schema = schema
        self._report = report
        self._advance = advance or (lambda done: None)
        self.writer = TraceWriter(storage, schema, LEVEL, fsync=False)
        self.pieces = Pieces(self.writer)
        self._pending: dict[bytes, Any] = {}  # actions that were never answered, by what they are packed to
        self._last_pending: Any = []  # what the last chunk says of such
        self._videos: list[tuple[WriterReader, Collection[int]]] = []
        self._entries: Entries = []  # of its manifest
        self._died = False

    def __enter__(self) -> WriterCopy:
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.abandon()

    def add(self, reader: WriterReader, rows: Array, wanted: Wanted = lambda path: True) -> None:
        """Adds episodes of a writer: those of the rows of its table for which rows is true.

        wanted: which columns of them are kept.

        Raises CorruptTrace, UnsupportedTrace.
        """
        kept = kept_of(reader, rows)
        listed = _listed(reader)
        first = 0
        for batch, count in _batches(reader):
            last = first + count
            whole = reader.has_own_files and count == len(batch.chunks) and bool(kept.whole[first:last].all())
            if not (whole and self._add_batch(reader, batch, listed, wanted)):
                self._add_chunks(reader, kept, batch, range(first, last), wanted)
            first = last
        self.pieces.write()
        ids = set(kept.ids.tolist())
        for one in reader.pending:
            row = row_of_pending(reader.parts.table, one)
            if rows.all() or (one.episode in ids if row < 0 else rows[row]):
                described = one.described()
                self._pending[pack_lenient(described)[0]] = described
        entries = entries_of(reader)
        self._entries += [entry for entry in entries if entry.get("type") != "video" or entry.get("episode") in ids]
        self._died |= not reader.alive and all(entry.get("type") != "closed" for entry in entries)
        self.add_videos(reader, ids)
        self._report.episodes += int(np.count_nonzero(rows))
        self._report.steps += int(reader.parts.table["steps"][rows].sum())

    def add_videos(self, reader: WriterReader, ids: Collection[int]) -> None:
        """Adds the videos of these episodes that were filmed while they were recorded."""
        self._videos.append((reader, ids))

    def close(self) -> None:
        """Seals, and says so in the manifest; what has died stays known to have died."""
        self.pieces.write()
        pending = list(self._pending.values())
        if pack_lenient(pending)[0] != pack_lenient(self._last_pending or [])[0]:
            self.writer.write(np.zeros(0, wire.FRAGMENT), {}, pending=pending)
        entries = [*self._entries, {"type": "closed"}]
        if self._died:
            entries = [entry for entry in entries if entry.get("type") != "closed"]
        finish(self.writer, self._storage, entries)
        for reader, ids in self._videos:
            copy_videos([reader], self._storage, ids)

    def _add_batch(
        self, reader: WriterReader, batch: BatchReader, listed: dict[str, dict[str, Any]], wanted: Wanted
    ) -> bool:
        """Copies a batch as a file, if it can be; otherwise nothing."""
        if not _is_sealed(batch) or batch.schema is None or not all(map(wanted, batch.totals)):
            return False
        said = {key: value for key, value in batch.schema.items() if key != "batch"}
        if not is_said_alike(said, self._schema):
            return False
        entry = listed.get(batch.name, {})
        crc = entry.get("crc32") if entry.get("bytes") == batch.size else None
        self.pieces.write()
        try:
            self.writer.copy_batch(batch, reader.files.storage, crc if isinstance(crc, int) else None)
        except UnstorableValue:
            return False
        self._last_pending = batch.slabs.pending
        self._report.files += 1
        self._advance(batch.size)
        return True

    def _add_chunks(self, reader: WriterReader, kept: Kept, batch: BatchReader, numbers: range, wanted: Wanted) -> None:
        """Adds chunks of one batch, by their numbers in all of the writer's."""
        bounds, own = reader.chunk_bounds.tolist(), reader.has_own_files
        opened = reader.files.storage.open(batch.name) if own and _is_sealed(batch) else nullcontext()
        with opened as file:
            for number in numbers:
                begin, end = bounds[number : number + 2]
                fragments, place = reader.fragments[begin:end], reader.chunk_places[number][1]
                if kept.whole[number] and own:
                    self.pieces.write()
                    self._add_chunk(fragments, batch, place, file, wanted)
                elif kept.whole[number] or kept.part[number]:
                    chunk = reader.read_chunk(number)
                    self.pieces.add(*part_of(chunk, fragments, kept.kept[begin:end], kept.bare[begin:end], wanted))
                    self._last_pending = []
                    self._report.encoded += 1
                self._advance(int(batch.chunks["length"][place]))

    def _add_chunk(self, fragments: Array, batch: BatchReader, place: int, file: Reader | None, wanted: Wanted) -> None:
        stored = None if file is None else stored_chunk(file, batch, place)
        if stored is not None and all(wanted(column.path) for column in stored.columns):
            self.writer.copy_chunk(fragments, stored)
            self._last_pending = stored.pending
        else:
            chunk = batch.read_chunk(place, lambda path: path != ("fragments",) and wanted(path))
            self.writer.write(fragments, {path: chunk.encoded(path) for path in chunk.columns})
            self._last_pending = []
        self.writer.seal_if_due()
        self._report.chunks += 1


def _is_sealed(batch: BatchReader) -> bool:
    """Return True if no process can change or rename the file."""
    return batch.sealed and not batch.name.endswith(PART) and not batch.damage


def _batches(reader: WriterReader) -> list[tuple[BatchReader, int]]:
    """Its batches, with how many of its chunks are in each; that of its ring comes last."""
    counts: dict[int, list[Any]] = {}
    for batch, _ in reader.chunk_places:
        counts.setdefault(id(batch), [batch, 0])[1] += 1
    return [(batch, count) for batch, count in counts.values()]


def _listed(reader: WriterReader) -> dict[str, dict[str, Any]]:
    """Return the manifest lines of batches, by name."""
    return {str(entry.get("file")): entry for entry in reader.files.entries() if entry.get("type") == "batch"}
