"""Many writers with little in them put into few well-filled files; who recorded what stays known."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gym_trace.editing.closing import copy_videos, entries_of, finish
from gym_trace.editing.in_place import edited
from gym_trace.editing.kept import Rows
from gym_trace.editing.pieces import Pieces
from gym_trace.editing.sources import TraceOrPath, opened
from gym_trace.editing.writer_copy import LEVEL, EditReport, Progress
from gym_trace.errors import InvalidOption, RecordingError, TraceError, UnsupportedTrace
from gym_trace.format import wire
from gym_trace.format.batch_reader import Chunk
from gym_trace.format.columns import MSGPACK
from gym_trace.format.columns import Path as ColumnPath
from gym_trace.format.directory import find_writers, new_writer_id
from gym_trace.format.facts import write_facts
from gym_trace.format.trace_writer import TraceWriter
from gym_trace.model.origins import ID_BITS, MOST_ORIGINS, Origin, with_origins
from gym_trace.model.packing import pack, pack_lenient
from gym_trace.model.values import Array
from gym_trace.playback.trace import Trace
from gym_trace.reading.writer_reader import WriterReader
from gym_trace.ring.chunk_builder import LARGE_CHUNK, SMALL_CHUNK
from gym_trace.storage.local import LocalStorage
from gym_trace.storage.protocol import Storage

_KNOWN = ("fragments", "starts", "observations", "actions", "rewards", "infos", "annotations")
_FULL = 2  # a chunk that has at least one part in so many of what a chunk may have is left as it is
_MOST_SCHEMA = 4 << 20  # bytes of the schemas of all origins in one file, which each of its batches repeats


def compact_trace(
    trace: TraceOrPath,
    destination: str | os.PathLike[str] | None = None,
    *,
    in_place: bool = False,
    on_progress: Progress | None = None,
) -> EditReport:
    """Rewrite many small writers and batches as few files with full chunks.

    Every episode keeps its writer, what that said of itself, its id and its place in the trace. Writers of the same
    spaces share files; chunks that are well filled are copied without being decoded.

    Args:
        trace: a trace, or a directory; not a view. Nobody is recording it.
        destination: a new or empty directory. It is there when it is complete.
        in_place: put it in the place of the trace instead, at once, with all that lies beside the trace.
        on_progress: called now and then with the steps done and the steps there are.

    Raises:
        InvalidOption: the trace is a view, or no destination, or it cannot be edited in place here.
        TraceError: a writer is still recording, or another process edits the trace.
        CorruptTrace: some of it is damaged: repair comes first.
        TraceNotFound, TraceExists, UnsupportedTrace
        RecordingError: the new trace could not be written.
    """
    source = opened(trace)
    check_whole_and_over(source, "compact")
    with edited(source, destination, in_place) as storage:
        _write(source, storage, on_progress)
        if not in_place:
            copy_videos(source.readers, storage)
            if facts := source.facts:
                write_facts(storage, facts)
        report = report_of(Trace(storage.root), source, destination)
    report.bytes = LocalStorage(report.destination).allocated()
    return report


def check_whole_and_over(trace: Trace, edit: str) -> None:
    """Raises InvalidOption for a view, and TraceError where a writer is still recording."""
    if trace.whole is not trace:
        raise InvalidOption(f"a view of a trace cannot be edited so: filter it into a new trace, and {edit} that")
    for writer in trace.readers:
        if writer.alive:
            raise TraceError(f"{writer.files.where}: this writer is still recording; {edit} when it has ended")


def report_of(written: Trace, source: Trace, destination: str | os.PathLike[str] | None) -> EditReport:
    """What was written. Raises TraceError if it does not tell of the episodes and writers of the source."""
    if written.writers != source.writers or written.episodes.tobytes() != source.episodes.tobytes():
        raise TraceError(f"{source.directory}: what was written is not what was read; this should never happen")
    return EditReport(
        source.directory if destination is None else Path(destination),
        episodes=len(source),
        steps=int(source.episodes["steps"].sum()),
        writers=source.writers,
    )


def _write(trace: Trace, storage: Storage, on_progress: Progress | None) -> None:
    total, done = sum(int(writer.fragments["steps"].sum()) for writer in trace.readers), 0
    try:
        for group in _groups(trace.readers):
            for steps in _written(group, storage):
                done += steps
                if on_progress is not None:
                    on_progress(done, total)
    except OSError as error:
        raise RecordingError(f"{storage.root}: the compacted trace could not be written: {error}") from error


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
    """Writes a file of these writers' episodes; yields the steps of each of their chunks once it is taken in."""
    (first, *others), taken = group, {files.writer for files in find_writers(storage)}
    is_alone = not others and first.writer not in taken
    if is_alone:
        schema = {key: value for key, value in first.about_or_empty.raw.items() if key not in ("batch", "type")}
        schema["writer"] = first.writer  # the name of the files is what counts
    else:
        origins = [Origin(one.writer, one.about_or_empty.raw, entries_of(one)) for one in group]
        schema = with_origins(origins, new_writer_id())
    writer = TraceWriter(storage, schema, LEVEL, fsync=False)
    try:
        pieces, pending = Pieces(writer), []
        for number, reader in enumerate(group):
            mark = np.uint64(0 if is_alone else number << ID_BITS)
            for chunk in range(reader.chunk_count):
                begin, end = reader.chunk_bounds[chunk : chunk + 2].tolist()
                fragments = reader.fragments[begin:end].copy()
                fragments["episode"] |= mark
                _add(writer, pieces, fragments, reader.read_chunk(chunk), reader.has_own_files)
                yield int(fragments["steps"].sum())
            pending += [one._replace(episode=one.episode | int(mark)).described() for one in reader.pending]
        pieces.write()
        if pending:
            writer.write(np.zeros(0, wire.FRAGMENT), {}, pending=pending)
        finish(writer, storage, entries_of(first) if is_alone else [{"type": "closed"}])
    finally:
        writer.abandon()


def _add(writer: TraceWriter, pieces: Pieces, fragments: Array, chunk: Chunk, is_stored: bool) -> None:
    """Adds a chunk. is_stored: whether it is stored as it is, so that a full one can be copied. Raises CorruptTrace."""
    if unknown := sorted({str(path[0]) for path in chunk.rows} - {*_KNOWN}):
        raise UnsupportedTrace(f"column {unknown[0]!r} is of a newer gym-trace; upgrade gym-trace to edit this trace")
    stored = {path: column for path, column in chunk.columns.items() if path != ("fragments",)}
    most = _most(column.row_size if column.dtype != MSGPACK else 0 for column in stored.values())
    if is_stored and sum(column.full_size for column in stored.values()) * _FULL >= most:
        pieces.write()
        writer.write(fragments, {path: chunk.encoded(path) for path in stored})
        writer.seal_if_due()
        return
    columns = {path: _rows_of(chunk, path) for path, column in stored.items() if column.rows}
    if ("starts",) not in columns:
        missing = int(np.count_nonzero(fragments["flags"] & wire.STARTS))
        columns |= {("starts",): [pack({})] * missing} if missing else {}
    pieces.add(fragments, columns)


def _most(row_sizes: Iterable[int]) -> int:
    """Bytes that a chunk of such rows may have."""
    return LARGE_CHUNK if max(row_sizes, default=0) >= wire.LARGE_ROW else SMALL_CHUNK


def _rows_of(chunk: Chunk, path: ColumnPath) -> Rows:
    return chunk.packed(path) if chunk.columns[path].dtype == MSGPACK else chunk.array(path)
