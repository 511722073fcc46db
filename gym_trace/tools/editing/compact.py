"""Compact a trace: few files with full chunks instead of many small writers. Every episode keeps its writer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from gym_trace.data.origins import ID_BITS, MOST_ORIGINS, Origin, with_origins
from gym_trace.data.packing import pack_lenient
from gym_trace.data.values import Array
from gym_trace.errors import InvalidOption, TraceError, UnsupportedTrace
from gym_trace.format import wire
from gym_trace.format.batch_files import BatchFiles
from gym_trace.format.batch_reader import Chunk
from gym_trace.format.columns import MSGPACK
from gym_trace.format.columns import Path as ColumnPath
from gym_trace.format.directory import find_writers, new_writer_id
from gym_trace.format.ring.chunk_builder import LARGE_CHUNK, SMALL_CHUNK, ChunkWriter
from gym_trace.format.ring.segment import part_of
from gym_trace.playback.trace import Trace
from gym_trace.playback.writer_reader import WriterReader
from gym_trace.storage.protocol import Storage
from gym_trace.tools.editing.in_place import edited, report_for
from gym_trace.tools.editing.sources import TraceOrPath, opened
from gym_trace.tools.editing.writer_copy import LEVEL, EditReport, Progress, chunks_of, copy_videos, entries_of, finish

_KNOWN = ("fragments", "starts", "observations", "actions", "rewards", "infos", "annotations", "states")
_FULL = 2  # a chunk of at least 1/_FULL of the largest size is copied as it is
_MOST_SCHEMA = 4 << 20  # bytes of the schemas of all origins in one file, which each of its batches repeats


def compact_trace(
    trace: TraceOrPath,
    destination: str | os.PathLike[str] | None = None,
    *,
    in_place: bool = False,
    on_progress: Progress | None = None,
) -> EditReport:
    """Rewrite many small writers and batches as few files with full chunks.

    Every episode keeps its writer, with the metadata of that, its id and its place in the trace. Writers of the same
    spaces share files; chunks that are well filled are copied without being decoded.

    Args:
        trace: a trace, or a directory; not a view. No writer is recording it.
        destination: a new or empty directory. It appears when it is complete.
        in_place: replace the trace instead, atomically, and keep all other files in its directory.
        on_progress: called periodically with the steps done and the total.

    Raises:
        InvalidOption: the trace is a view, or no destination, or it cannot be edited in place here.
        TraceError: a writer is still recording, or another process edits the trace.
        CorruptTrace: some of it is damaged: repair it first.
        TraceNotFound, TraceExists, UnsupportedTrace
        RecordingError: the new trace could not be written.
    """
    source = opened(trace)
    check_editable(source, "compact")
    report = report_for(source, destination, in_place)
    report.episodes, report.steps = len(source), int(source.episodes["steps"].sum())
    report.writers = source.writers
    with edited(report, [source], in_place) as storage:
        _write(source, storage, on_progress)
        if not in_place:
            copy_videos(source.readers, storage)
        check_same(storage, source)
    return report


def check_editable(trace: Trace, edit: str) -> None:
    """Raise InvalidOption for a view, and TraceError if a writer is still recording."""
    if trace.whole is not trace:
        raise InvalidOption(f"{edit}: views are not supported; filter into a new trace first")
    for writer in trace.readers:
        if writer.alive:
            raise TraceError(f"{writer.files.where}: this writer is still recording; {edit} after it has ended")


def check_same(storage: Storage, source: Trace) -> None:
    """Raise TraceError unless the new trace has the episodes and writers of the source."""
    written = Trace(storage.root)
    if written.writers != source.writers or written.episodes.tobytes() != source.episodes.tobytes():
        raise TraceError(f"{source.directory}: the new trace differs from it; this should never happen")


def _write(trace: Trace, storage: Storage, on_progress: Progress | None) -> None:
    total, done = sum(int(writer.fragments["steps"].sum()) for writer in trace.readers), 0
    for group in _groups(trace.readers):
        for steps in _written(group, storage):
            done += steps
            if on_progress is not None:
                on_progress(done, total)


def _groups(readers: Iterable[WriterReader]) -> Iterator[list[WriterReader]]:
    """Group writers with the same columns, in their order; each group becomes one file."""
    groups: dict[Any, list[WriterReader]] = {}
    sizes: dict[Any, int] = {}
    for number, reader in enumerate(readers):
        key: Any = number  # by itself
        if not len(reader.fragments) or int(reader.fragments["episode"].max()) >> ID_BITS == 0:
            spaces = [reader.about_or_empty.raw.get(name) for name in ("observation_space", "action_space")]
            key = pack_lenient(spaces)[0], _first_form(reader)
            size = len(pack_lenient([reader.about_or_empty.raw, list(reader.files.entries())])[0])
            if key in groups and (sizes[key] + size > _MOST_SCHEMA or len(groups[key]) == MOST_ORIGINS):
                yield groups.pop(key)
            sizes[key] = size + (sizes[key] if key in groups else 0)
        groups.setdefault(key, []).append(reader)
    yield from groups.values()


def _first_form(reader: WriterReader) -> frozenset[ColumnPath]:
    """The columns of a writer's first chunk, but for the values of their rows."""
    rows = reader.read_chunk(0, frozenset()).rows if reader.chunk_count else {}
    return frozenset(path for path, count in rows.items() if count and path[0] != "starts")


def _written(group: list[WriterReader], storage: Storage) -> Iterator[int]:
    """Write a file with the episodes of these writers; yield the steps of each chunk once it is added."""
    (first, *others), taken = group, {files.writer for files in find_writers(storage)}
    is_alone = not others and first.writer not in taken
    if is_alone:
        schema = {key: value for key, value in first.about_or_empty.raw.items() if key not in ("batch", "type")}
        schema["writer"] = first.writer  # the name of the files is what counts
    else:
        origins = [Origin(one.writer, one.about_or_empty.raw, entries_of(one)) for one in group]
        schema = with_origins(origins, new_writer_id())
    writer = BatchFiles(storage, schema, LEVEL, fsync=False)
    try:
        chunks, pending = chunks_of(writer), []
        for number, reader in enumerate(group):
            mark = np.uint64(0 if is_alone else number << ID_BITS)
            for chunk in range(reader.chunk_count):
                begin, end = reader.chunk_bounds[chunk : chunk + 2].tolist()
                fragments = reader.fragments[begin:end].copy()
                fragments["episode"] |= mark
                kept = ~reader.is_headless[begin:end]
                _add(writer, chunks, fragments, kept, reader.read_chunk(chunk), reader.has_own_files)
                yield int(fragments["steps"].sum())
            pending += [one._replace(episode=one.episode | int(mark)).described() for one in reader.pending]
        chunks.write()
        if pending:
            writer.write(np.zeros(0, wire.FRAGMENT), {}, pending=pending)
        finish(writer, storage, entries_of(first) if is_alone else [{"type": "closed"}])
    finally:
        writer.abandon()


def _add(writer: BatchFiles, chunks: ChunkWriter, fragments: Array, kept: Array, chunk: Chunk, is_stored: bool) -> None:
    """Add the kept fragments of a chunk; copy it if it is well filled.

    is_stored: it is a chunk of a file. Raises CorruptTrace.
    """
    if unknown := sorted({str(path[0]) for path in chunk.rows} - {*_KNOWN}):
        raise UnsupportedTrace(f"column {unknown[0]!r} is of a newer gym-trace; upgrade gym-trace to edit this trace")
    stored = [path for path in chunk.columns if path != ("fragments",)]
    columns = [chunk.columns[path] for path in stored]
    is_large = any(column.dtype != MSGPACK and column.row_size >= wire.LARGE_ROW for column in columns)
    most = LARGE_CHUNK if is_large else SMALL_CHUNK
    if is_stored and kept.all() and sum(column.full_size for column in columns) * _FULL >= most:
        chunks.write()
        writer.write(fragments, {path: chunk.encoded(path) for path in stored})
        writer.seal_if_due()
    else:
        chunks.add(part_of(chunk, fragments, kept, np.zeros(len(fragments), np.bool_)))
