"""Copy one writer into a new trace. Files and chunks are copied as stored where nothing changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gym_trace.data.packing import pack_lenient
from gym_trace.data.values import Array
from gym_trace.errors import UnstorableValue
from gym_trace.format import manifest, wire
from gym_trace.format.batch_files import BatchFiles, RowsOrEncoded
from gym_trace.format.batch_reader import PART, BatchReader
from gym_trace.format.columns import Path as ColumnPath
from gym_trace.format.directory import video_name
from gym_trace.format.manifest import DROPPED
from gym_trace.format.ring.chunk_builder import ChunkWriter
from gym_trace.format.ring.segment import part_of
from gym_trace.playback.writer_reader import WriterReader
from gym_trace.storage.protocol import Reader, Storage

LEVEL = 3  # of zstd, for data that is encoded again
Advance = Callable[[int, int], None]  # bytes and steps that are done
Progress = Callable[[int, int], None]  # done, total
Entries = list[dict[str, Any]]
_STARTS = ("starts",)


@dataclass
class EditReport:
    """Result of an edit.

    Attributes:
        destination: the new trace.
        episodes, steps: numbers in the new trace, counted as Trace does.
        bytes: size of its directory, like du.
        writers: their ids.
        files: batches that were copied whole.
        chunks: further chunks that were copied as stored.
        encoded: chunks that were kept in part, and decoded for it.
        running: episodes that were skipped, because they are still being recorded.
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
    schema = {key: value for key, value in reader.schema.items() if key not in ("batch", "type")}
    return {**schema, "writer": reader.writer}


def are_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if two schemas are equal, in any order of keys."""
    packed = ({key: pack_lenient(value)[0] for key, value in schema.items()} for schema in (one, other))
    return next(packed) == next(packed)


def chunks_of(writer: BatchFiles) -> ChunkWriter:
    """Return a ChunkWriter that joins parts of chunks for this writer."""
    return ChunkWriter(lambda: writer, None, is_edit=True)


class WriterCopy:
    """Write the files of one writer. A context manager that closes them unfinished unless close() was called.

    Chunks are written in the order in which they are added, and so are fragments: ids, seeds, times and sums of
    rewards stay as they are, to the bit. Raises OSError.

    Args:
        schema: from schema_of(). Batches with the same schema are copied as files.
        wanted: returns True for the columns to keep.
        start_of: changes the packed rows of starts.
    """

    def __init__(
        self,
        storage: Storage,
        schema: dict[str, Any],
        report: EditReport,
        advance: Advance,
        wanted: Callable[[ColumnPath], bool] = lambda path: True,
        start_of: Callable[[bytes], bytes] | None = None,
    ):
        self._storage, self._schema, self._report, self._advance = storage, schema, report, advance
        self._wanted, self._start_of = wanted, start_of
        self._writer = BatchFiles(storage, schema, LEVEL, fsync=False)
        self._chunks = chunks_of(self._writer)
        self._pending: dict[bytes, Any] = {}  # actions without an answer, by their packed form
        self._last_pending: Any = []  # those stored in the last chunk
        self._entries: Entries = []  # of the manifest
        self._died = False

    def __enter__(self) -> WriterCopy:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.abandon()

    def add(self, reader: WriterReader, rows: Array) -> None:
        """Add the episodes of a writer where rows is True: one boolean per row of its table. Raises TraceError."""
        kept, bare, whole = _kept_of(reader, rows)
        listed, _ = reader.files.listed()
        first = 0
        for batch, count in _batches(reader):
            numbers = range(first, first + count)
            first += count
            is_whole = reader.has_own_files and count == len(batch.chunks) and whole[numbers.start : numbers.stop].all()
            if not (is_whole and self._add_batch(reader, batch, listed.get(batch.name, {}))):
                self._add_chunks(reader, batch, numbers, kept, bare, whole)
        self._chunks.write()
        ids = set(reader.parts.column("episode_id", rows).tolist())
        for one in reader.pending:
            row = reader.parts.row_of_pending(one)
            if rows.all() or (one.episode in ids if row < 0 else rows[row]):
                described = one.described()
                self._pending[pack_lenient(described)[0]] = described
        entries = entries_of(reader)
        self._entries += [entry for entry in entries if entry.get("type") != "video" or entry.get("episode") in ids]
        self._died |= not reader.alive and all(entry.get("type") != "closed" for entry in entries)
        self._report.episodes += int(np.count_nonzero(rows))
        self._report.steps += int(reader.parts.column("steps", rows).sum())

    def close(self) -> None:
        """Seal the files and write the end of the manifest; a writer that died stays known to have died."""
        pending = list(self._pending.values())
        if pack_lenient(pending)[0] != pack_lenient(self._last_pending or [])[0]:
            self._writer.write(np.zeros(0, wire.FRAGMENT), {}, pending=pending)
        entries = [*self._entries, {"type": "closed"}]
        if self._died:
            entries = [entry for entry in entries if entry.get("type") != "closed"]
        finish(self._writer, self._storage, entries)

    def _add_batch(self, reader: WriterReader, batch: BatchReader, entry: dict[str, Any]) -> bool:
        """Copy a batch as a file, if possible; otherwise do nothing. entry: its line in the manifest."""
        if not _is_sealed(batch) or batch.schema is None or self._start_of is not None:
            return False
        if not all(map(self._wanted, batch.totals)):
            return False
        if not are_alike({key: value for key, value in batch.schema.items() if key != "batch"}, self._schema):
            return False
        crc = entry.get("crc32") if entry.get("bytes") == batch.size else None
        self._chunks.write()
        try:
            self._writer.copy_batch(batch, crc if isinstance(crc, int) else None)
        except UnstorableValue:
            return False
        self._last_pending = batch.slabs.pending
        self._report.files += 1
        self._advance(batch.size, int(batch.fragments["steps"].sum()))
        return True

    def _add_chunks(
        self, reader: WriterReader, batch: BatchReader, numbers: range, kept: Array, bare: Array, whole: Array
    ) -> None:
        """Add chunks of one batch, by their numbers among all of the writer's."""
        own = reader.has_own_files
        batch.heal()  # columns are copied unread, and become those of a batch with parity of its own
        with batch.open() if own and _is_sealed(batch) else contextlib.nullcontext() as file:
            for number in numbers:
                begin, end = reader.chunk_bounds[number : number + 2].tolist()
                fragments, place = reader.fragments[begin:end], reader.chunk_places[number][1]
                if whole[number] and own:
                    self._chunks.write()
                    self._add_chunk(fragments, batch, place, file)
                elif (kept | bare)[begin:end].any():
                    self._chunks.add(part_of(reader.read_chunk(number), fragments, kept[begin:end], bare[begin:end]))
                    self._last_pending = []
                    self._report.encoded += 1
                self._advance(int(batch.chunks["length"][place]), int(fragments["steps"].sum()))

    def _add_chunk(self, fragments: Array, batch: BatchReader, place: int, file: Reader | None) -> None:
        stored = None if file is None or self._start_of is not None else batch.stored_chunk(file, place)
        if stored is not None and all(self._wanted(column.path) for column in stored.columns):
            self._writer.copy_chunk(fragments, stored)
            self._last_pending = stored.pending
        else:
            chunk = batch.read_chunk(place, lambda path: path != ("fragments",) and self._wanted(path))
            columns: dict[ColumnPath, RowsOrEncoded] = {path: chunk.encoded(path) for path in chunk.columns}
            if _STARTS in columns and self._start_of is not None:
                columns[_STARTS] = list(map(self._start_of, chunk.packed(_STARTS)))
            self._writer.write(fragments, columns)
            self._last_pending = []
        self._writer.seal_if_due()
        self._report.chunks += 1


def _is_sealed(batch: BatchReader) -> bool:
    """Return True if no process can change or rename the file."""
    return batch.sealed and not batch.name.endswith(PART) and not batch.damage


def _batches(reader: WriterReader) -> list[tuple[BatchReader, int]]:
    """Return the batches of a writer with the number of its chunks in each; that of its ring comes last."""
    counts: dict[int, list[Any]] = {}
    for batch, _ in reader.chunk_places:
        counts.setdefault(id(batch), [batch, 0])[1] += 1
    return [(batch, count) for batch, count in counts.values()]


def _kept_of(reader: WriterReader, rows: Array) -> tuple[Array, Array, Array]:
    """Return which fragments are kept with their rows, which without, and which chunks stay as they are.

    Fragments without rows are kept for the start or end of an episode of which other parts are kept.
    """
    fragments, owner = reader.fragments, reader.parts.of_fragment
    if rows.all() and not reader.is_headless.any():
        everything = np.ones(len(fragments), np.bool_)
        return everything, ~everything, np.ones(reader.chunk_count, np.bool_)
    kept = np.append(rows, np.False_)[owner]  # fragments without rows have the owner -1
    dropped = ((owner >= 0) & ~kept) | reader.is_headless
    of_kept = np.isin(fragments["episode"].astype(np.int64), np.unique(reader.parts.column("episode_id", rows)))
    kept |= (owner < 0) & of_kept
    bare = dropped & of_kept & (fragments["flags"] & (wire.STARTS | wire.ENDS) > 0)
    kept_in, dropped_in = (np.diff(np.append(0, np.cumsum(some))[reader.chunk_bounds]) for some in (kept, dropped))
    return kept, bare, (kept_in > 0) & (dropped_in == 0)


def entries_of(reader: WriterReader) -> Entries:
    """Return the lines of a manifest that are not about its files."""
    return [entry for entry in reader.files.entries() if entry.get("type") not in ("writer", "batch", DROPPED)]


def finish(writer: BatchFiles, storage: Storage, entries: Entries) -> None:
    """Seal, and write the entries to the manifest; without a "closed" entry, the writer stays known to have died."""
    closed = next((entry for entry in entries if entry.get("type") == "closed"), None)
    if closed is None:
        writer.seal()
    else:
        writer.close({key: value for key, value in closed.items() if key not in ("type", "episodes", "steps")})
    for entry in entries:
        if entry.get("type") != "closed":
            manifest.append(storage, writer.writer, entry)


def copy_videos(readers: Iterable[WriterReader], storage: Storage, episodes: Collection[int] | None = None) -> None:
    """Copy the videos that were filmed during the recording and are as the manifests describe them.

    episodes: ids of the wanted episodes; None: all.
    """
    for reader, entry in ((one, entry) for one in readers for entry in entries_of(one)):
        episode = entry.get("episode")
        if entry.get("type") != "video" or not isinstance(episode, int) or episode < 0:
            continue
        if episodes is not None and episode not in episodes:
            continue
        name = video_name(reader.writer, episode)
        with contextlib.suppress(FileNotFoundError, FileExistsError), reader.files.storage.open(name) as file:
            if file.size == entry.get("bytes") and name == entry.get("file"):
                with contextlib.closing(storage.create(name)) as copy:
                    copy.copy(file, 0, file.size)
