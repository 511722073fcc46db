"""Compact a trace: few files with full chunks instead of many small writers. Every episode keeps its writer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from gym_trace.data.origins import ID_BITS, MOST_ORIGINS, Origin, with_origins
from gym_trace.data.packing import pack_lenient
from gym_trace.errors import InvalidOption, TraceError
from gym_trace.format.columns import Path as ColumnPath
from gym_trace.format.directory import find_writers, new_writer_id
from gym_trace.playback.episode_index import index_of, whole_of
from gym_trace.playback.trace import Trace
from gym_trace.playback.writer_reader import WriterReader
from gym_trace.storage.protocol import Storage
from gym_trace.tools.editing.in_place import edited, report_for
from gym_trace.tools.editing.rewrite import (
    EditReport,
    Output,
    Progress,
    Selection,
    entries_of,
    joined_sources,
    rewrite,
    source_of,
)
from gym_trace.tools.editing.sources import TraceOrPath, opened

_MOST_SCHEMA_BYTES = 4 << 20  # schemas of all origins of a file; each of its batches repeats them


def compact_trace(
    trace: TraceOrPath,
    destination: str | os.PathLike[str] | None = None,
    *,
    in_place: bool = False,
    on_progress: Progress | None = None,
) -> EditReport:
    """Rewrite many small writers and batches as few files with full chunks.

    Every episode keeps its writer with its metadata, its id and its position in the trace. Writers with the same
    spaces share files. Recorded chunks of small rows are joined into chunks of up to 9 MiB, so that a column at a URL
    takes few requests; full chunks are copied without being decoded.

    Args:
        trace: a trace, or a directory; not a view. No writer may be recording it.
        destination: a new or empty directory. It appears when it is complete.
        in_place: replace the trace instead, atomically, and keep all other files in its directory.
        on_progress: called periodically with the steps done and the total.

    Raises:
        InvalidOption: the trace is a view or cannot be edited in place here, or there is no destination.
        TraceError: a writer is still recording, or another process edits the trace.
        CorruptTrace: the trace is damaged; repair it first.
        TraceNotFound, TraceExists, UnsupportedTrace
        RecordingError: the new trace could not be written.

    Examples:
        >>> report = gym_trace.edit.compact("traces/cartpole", "traces/compact")
        >>> report.files, report.episodes
        (0, 20)
    """
    source = opened(trace)
    check_editable(source, "compact")
    report = report_for(source, destination, in_place)
    selections = [
        Selection(source, reader, np.ones(len(reader.parts), np.bool_), np.broadcast_to(-1, len(reader.parts)))
        for reader in index_of(source).readers
    ]
    with edited(report, [source], in_place) as storage:
        existing = {files.writer for files in find_writers(storage)}
        rewrite(
            [_output_of(group, existing) for group in _groups(selections)],
            storage,
            report,
            fills_chunks=True,
            counts_steps=True,
            copies_videos=not in_place,
            on_progress=on_progress,
        )
        check_same(storage, source)
    report.writers = source.writers
    return report


def check_editable(trace: Trace, edit: str) -> None:
    """Raise InvalidOption for a view, and TraceError if a writer is still recording."""
    if whole_of(trace) is not trace:
        raise InvalidOption(f"{edit}: views are not supported; filter into a new trace first")
    for writer in index_of(trace).readers:
        if writer.alive:
            raise TraceError(f"{writer.files.where}: this writer is still recording; {edit} after it has ended")


def check_same(storage: Storage, source: Trace) -> None:
    """Raise TraceError unless the new trace has the episodes and writers of the source."""
    written = Trace(storage.root)
    if written.writers != source.writers or not index_of(written).has_rows_of(index_of(source)):
        raise TraceError(f"{source.directory}: the new trace differs from it; this should never happen")


def _groups(selections: Iterable[Selection]) -> Iterator[list[Selection]]:
    """Group writers with the same columns, in their order; each group becomes one file."""
    groups: dict[Any, list[Selection]] = {}
    sizes: dict[Any, int] = {}
    for number, selection in enumerate(selections):
        reader = selection.reader
        key: Any = number  # unless it can be grouped
        if not len(reader.fragments) or int(reader.fragments["episode"].max()) >> ID_BITS == 0:  # has no origins
            spaces = [reader.about_or_empty.raw.get(name) for name in ("observation_space", "action_space")]
            key = pack_lenient(spaces)[0], _columns_of(reader)
            size = len(pack_lenient([reader.about_or_empty.raw, list(reader.files.entries())])[0])
            if key in groups and (sizes[key] + size > _MOST_SCHEMA_BYTES or len(groups[key]) == MOST_ORIGINS):
                yield groups.pop(key)
            sizes[key] = size + (sizes[key] if key in groups else 0)
        groups.setdefault(key, []).append(selection)
    yield from groups.values()


def _columns_of(reader: WriterReader) -> frozenset[ColumnPath]:
    """Return the columns that have rows in the first chunk of a writer."""
    rows = reader.read_chunk(0, frozenset()).rows if reader.chunk_count else {}
    return frozenset(path for path, count in rows.items() if count and path[0] != "starts")


def _output_of(group: list[Selection], existing: set[str]) -> Output:
    """Return the file of these writers. existing: ids that name other files."""
    first = group[0].reader
    if len(group) == 1 and first.writer not in existing:
        existing.add(first.writer)
        schema = {key: value for key, value in first.about_or_empty.raw.items() if key not in ("batch", "type")}
        schema["writer"] = first.writer  # file names decide about the id
        return Output(schema, [source_of(group[0])], entries_of(first), group)
    readers = [selection.reader for selection in group]
    origins = [Origin(reader.writer, reader.about_or_empty.raw, entries_of(reader)) for reader in readers]
    sources = joined_sources(source_of(selection, number) for number, selection in enumerate(group))
    return Output(with_origins(origins, new_writer_id()), sources, [{"type": "closed"}], group)
