"""Write the files of an edited trace. Edits pass the selected episodes and their changes of columns to rewrite()."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.origins import ID_BITS, split_id
from gym_trace.data.packing import pack_lenient
from gym_trace.data.values import Array, distinct
from gym_trace.errors import InvalidOption
from gym_trace.format import manifest, wire
from gym_trace.format.batch_files import BatchFiles
from gym_trace.format.batch_reader import BatchReader
from gym_trace.format.directory import video_name
from gym_trace.format.manifest import DROPPED
from gym_trace.format.rewrite import AS_RECORDED, LEVEL, ColumnEdits, Rewriter, SourceChunk, is_sealed
from gym_trace.playback.trace import Trace
from gym_trace.playback.writer_reader import WriterReader
from gym_trace.storage.protocol import Storage

Progress = Callable[[int, int], None]  # done, total
Entries = list[dict[str, Any]]  # lines of a manifest


@dataclass
class EditReport:
    """Result of an edit.

    Attributes:
        destination: the new trace.
        episodes, steps: numbers in the new trace, counted as Trace does.
        bytes: size of its directory, like du.
        writers: ids of its writers.
        files: batches that were copied whole.
        chunks: further chunks whose unchanged columns were copied as stored.
        encoded: chunks that were decoded, because they were kept in part or were small.
        running: episodes that were skipped, because they are still being recorded.
        duplicates: repeated episodes of several traces; each episode was written once.

    Examples:
        >>> report = gym_trace.edit.filter("traces/cartpole", "traces/first", slice(3))
        >>> report.episodes, report.steps, report.files
        (3, 34, 0)
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


class Selection(NamedTuple):
    """Episodes of one writer of one trace.

    Attributes:
        reader: the writer.
        rows: (episodes of the writer,) bool, True for the selected ones.
        indices: (episodes of the writer,) int64, their indices in the trace; -1 for episodes that a view lacks.
    """

    trace: Trace
    reader: WriterReader
    rows: Array
    indices: Array


class Source(NamedTuple):
    """Episodes to read from the files of a writer, which may hold several origins.

    Attributes:
        trace, reader, rows, indices: see Selection; the reader reads the files, with all their origins.
        numbers: new number of each selected origin; 0 for the only writer. None: ids stay as they are.
    """

    trace: Trace
    reader: WriterReader
    rows: Array
    indices: Array
    numbers: Mapping[int, int] | None = None


class Output(NamedTuple):
    """The files of one writer to be written.

    Attributes:
        schema: its metadata, without the fields of a single batch.
        sources: episodes that its files will hold, in order.
        entries: lines of its manifest; without a "closed" line, the writer counts as dead.
        selections: writers that its files will hold.
    """

    schema: dict[str, Any]
    sources: list[Source]
    entries: Entries
    selections: list[Selection]


# Called with a source, a chunk of it, and the row in reader.parts of each fragment's episode (-1: none); returns the
# changed chunk.
Change = Callable[[Source, SourceChunk, Array], SourceChunk]


def source_of(selection: Selection, number: int | None = None) -> Source:
    """Return the source of a selection. number: new number of its writer among several origins."""
    trace, reader, rows, indices = selection
    share = reader.share
    if share is None:
        return Source(trace, reader, rows, indices, None if number is None else {0: number})
    stored, own = share.stored, slice(share.first_row, share.first_row + len(rows))
    all_rows, all_indices = np.zeros(len(stored.parts), np.bool_), np.full(len(stored.parts), -1)
    all_rows[own], all_indices[own] = rows, indices
    return Source(trace, stored, all_rows, all_indices, {share.number: number or 0})


def joined_sources(sources: Iterable[Source]) -> list[Source]:
    """Join sources of the same files that follow each other, so that their chunks are read once."""
    joined: list[Source] = []
    for source in sources:
        if not joined or not _can_follow(joined[-1], source):
            joined.append(source)
            continue
        before = joined[-1]
        rows, indices = before.rows | source.rows, np.maximum(before.indices, source.indices)
        numbers = {**(before.numbers or {}), **(source.numbers or {})}
        joined[-1] = before._replace(rows=rows, indices=indices, numbers=numbers)
    return joined


def _can_follow(before: Source, source: Source) -> bool:
    """Return True if one pass over the files gives the episodes of both in the same order."""
    if before.reader is not source.reader or before.numbers is None or source.numbers is None:
        return False
    return max(before.numbers) < min(source.numbers)


def schema_of(reader: WriterReader) -> dict[str, Any]:
    """Return the metadata of a writer, without the fields of a single batch. Raises CorruptTrace."""
    schema = {key: value for key, value in reader.schema.items() if key not in ("batch", "type")}
    return {**schema, "writer": reader.writer}


def entries_of(reader: WriterReader) -> Entries:
    """Return the lines of a manifest that are not about its files."""
    return [entry for entry in reader.files.entries() if entry.get("type") not in ("writer", "batch", DROPPED)]


def rewrite(
    outputs: list[Output],
    into: Storage,
    report: EditReport,
    columns: ColumnEdits = AS_RECORDED,
    *,
    change: Change | None = None,
    fills_chunks: bool = False,
    counts_steps: bool = False,
    copies_videos: bool = True,
    on_progress: Progress | None = None,
) -> None:
    """Write the files of these writers, and update a report.

    Args:
        columns: changes of columns that do not depend on rows.
        change: changes a chunk; called with each chunk that has selected episodes.
        fills_chunks: join small chunks.
        counts_steps: report progress in steps, not in bytes.
        copies_videos: also copy the videos of the selected episodes.

    Raises InvalidOption without an output, CorruptTrace, UnsupportedTrace, OSError.
    """
    if not outputs:
        raise InvalidOption(f"{report.destination}: no episodes selected; nothing written")
    sources = [source for output in outputs for source in output.sources]
    done, total = 0, sum(_steps_of(source) if counts_steps else source.reader.size for source in sources)

    def advance(size: int, steps: int) -> None:
        nonlocal done
        done += steps if counts_steps else size
        if on_progress is not None:
            on_progress(min(done, total), total)

    for output in outputs:
        files = BatchFiles(into, output.schema, LEVEL, fsync=False)
        try:
            rewriter = Rewriter(files, columns, fills_chunks=fills_chunks)
            for source in output.sources:
                _add(rewriter, source, output.schema, change, advance)
                report.episodes += int(np.count_nonzero(source.rows))
                report.steps += _steps_of(source)
            rewriter.finish(list(_pending_of(output.sources).values()))
            _close(files, into, output.entries)
        finally:
            files.detach()
        report.files, report.chunks = report.files + rewriter.batches, report.chunks + rewriter.copied
        report.encoded += rewriter.encoded
        report.writers += dict.fromkeys(selection.reader.writer for selection in output.selections)
        for selection in output.selections if copies_videos else ():
            _copy_videos(selection, into)


def _steps_of(source: Source) -> int:
    return int(source.reader.parts.column("steps", source.rows).sum())


def _add(
    rewriter: Rewriter,
    source: Source,
    schema: dict[str, Any],
    change: Change | None,
    advance: Callable[[int, int], None],
) -> None:
    """Add the episodes of a source. Raises TraceError, OSError."""
    reader, first = source.reader, 0
    listed, _ = reader.files.listed()
    kept, bare, whole = _masks_of(source)  # fragments with rows, fragments without rows, chunks
    is_as_stored = source.numbers is None and change is None
    for batch, count in _batches(reader):
        numbers = range(first, first + count)  # numbers of the chunks in this batch
        first += count
        if is_as_stored and count == len(batch.chunks) and whole[numbers.start : numbers.stop].all():
            entry = listed.get(batch.name, {})
            crc = entry.get("crc32") if entry.get("bytes") == batch.size else None
            if rewriter.add_batch(batch, schema, crc if isinstance(crc, int) else None):
                advance(batch.size, int(batch.fragments["steps"].sum()))
                continue
        batch.heal()  # columns are copied unread into a batch with new parity, so restore damaged bytes first
        with batch.open() if is_sealed(batch) else contextlib.nullcontext() as file:
            for number in numbers:
                begin, end = reader.chunk_bounds[number : number + 2].tolist()
                index = reader.chunk_positions[number][1]
                if kept[begin:end].any() or bare[begin:end].any():
                    chunk = SourceChunk(
                        _renumbered(reader.fragments[begin:end], source.numbers),
                        partial(batch.read_chunk, index),
                        None if whole[number] else kept[begin:end],
                        None if whole[number] else bare[begin:end],
                    )
                    if file is not None and is_as_stored:
                        chunk = chunk._replace(stored=partial(batch.stored_chunk, file, index))
                    if change is not None:
                        chunk = change(source, chunk, reader.parts.of_fragment[begin:end])
                    rewriter.add(chunk)
                steps = int(reader.fragments.steps[begin:end][kept[begin:end]].sum())
                advance(int(batch.chunks["length"][index]), steps)


def _renumbered(table: Array, numbers: Mapping[int, int] | None) -> Array:
    """Return fragments with new ids. numbers: new numbers of origins; fragments of other origins get invalid ids."""
    if numbers is None:
        return table
    new = np.zeros(max(numbers, default=0) + 2, np.uint64)  # the last element is for all larger numbers
    new[list(numbers)] = list(numbers.values())
    table = table.copy()
    old = np.minimum(table["episode"] >> np.uint64(ID_BITS), np.uint64(len(new) - 1)).astype(np.int64)
    table["episode"] &= np.uint64((1 << ID_BITS) - 1)
    table["episode"] |= new[old] << np.uint64(ID_BITS)
    return table


def _masks_of(source: Source) -> tuple[Array, Array, Array]:
    """Return masks: fragments to keep with their rows, fragments to keep without rows, and chunks that stay whole.

    A fragment is kept without rows if other fragments of its episode are kept, and it has the start or end.
    """
    reader, rows = source.reader, source.rows
    fragments = reader.fragments
    if rows.all() and not reader.start_dropped.any():
        everything = np.ones(len(fragments), np.bool_)
        return everything, ~everything, np.ones(reader.chunk_count, np.bool_)
    owner = reader.parts.of_fragment
    kept = np.append(rows, np.False_)[owner]  # fragments without rows have the owner -1
    dropped = ((owner >= 0) & ~kept) | reader.start_dropped
    of_kept = np.isin(fragments["episode"].astype(np.int64), distinct(reader.parts.column("episode_id", rows)))
    kept |= (owner < 0) & of_kept
    bare = dropped & of_kept & (fragments["flags"] & (wire.STARTS | wire.ENDS) > 0)
    left_out = dropped if source.numbers is None else ~kept
    counts, counts_left_out = (np.diff(np.append(0, np.cumsum(mask))[reader.chunk_bounds]) for mask in (kept, left_out))
    return kept, bare, (counts > 0) & (counts_left_out == 0)


def _batches(reader: WriterReader) -> Iterator[tuple[BatchReader, int]]:
    """Yield the batches of a writer, each with its number of chunks; the batch of the ring is the last."""
    counts: dict[int, list[Any]] = {}
    for batch, _ in reader.chunk_positions:
        counts.setdefault(id(batch), [batch, 0])[1] += 1
    for batch, count in counts.values():
        yield batch, count


def _pending_of(sources: list[Source]) -> dict[bytes, Any]:
    """Return the selected actions without a result, each once, by their packed form."""
    found: dict[bytes, Any] = {}
    for source in sources:
        parts, rows = source.reader.parts, source.rows
        ids = set(parts.column("episode_id", rows).tolist()) if source.reader.pending else set()
        for action in source.reader.pending:
            row = parts.row_of_pending(action)
            if not (rows.all() or (action.episode in ids if row < 0 else rows[row])):
                continue
            if source.numbers is not None:
                number, own = split_id(action.episode)
                if number not in source.numbers:
                    continue
                action = action._replace(episode=own | source.numbers[number] << ID_BITS)
            described = action.described()
            found[pack_lenient(described)[0]] = described
    return found


def _close(files: BatchFiles, storage: Storage, entries: Entries) -> None:
    """Seal the files, and write the entries to the manifest; without a "closed" entry, the writer counts as dead."""
    closed = next((entry for entry in entries if entry.get("type") == "closed"), None)
    if closed is None:
        files.seal()
    else:
        files.close({key: value for key, value in closed.items() if key not in ("type", "episodes", "steps")})
    for entry in entries:
        if entry.get("type") != "closed":
            manifest.append(storage, files.writer, entry)


def _copy_videos(selection: Selection, storage: Storage) -> None:
    """Copy the videos that were filmed during the recording and match the manifest."""
    reader, entries = selection.reader, entries_of(selection.reader)
    listed = [entry for entry in entries if entry.get("type") == "video" and isinstance(entry.get("episode"), int)]
    ids = set(reader.parts.column("episode_id", selection.rows).tolist()) if listed else set()
    for entry in listed:
        if entry["episode"] not in ids:
            continue
        name = video_name(reader.writer, entry["episode"])
        with contextlib.suppress(FileNotFoundError, FileExistsError), reader.files.storage.open(name) as file:
            if file.size == entry.get("bytes") and name == entry.get("file"):
                with contextlib.closing(storage.create(name)) as copy:
                    copy.copy(file, 0, file.size)
