"""A trace without some of its columns."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from gym_trace.editing.closing import copy_videos, entries_of, finish
from gym_trace.editing.compact import check_whole_and_over, report_of
from gym_trace.editing.in_place import edited
from gym_trace.editing.sources import TraceOrPath, opened
from gym_trace.editing.writer_copy import LEVEL, EditReport, Progress, schema_of
from gym_trace.errors import InvalidOption, RecordingError
from gym_trace.format import wire
from gym_trace.format.columns import Path as ColumnPath
from gym_trace.format.directory import find_writers
from gym_trace.format.facts import write_facts
from gym_trace.format.trace_writer import RowsOrEncoded, TraceWriter
from gym_trace.model.origins import ORIGINS, packed_origins, unpacked_origins
from gym_trace.model.packing import pack_lenient, unpack
from gym_trace.model.schema import as_map
from gym_trace.model.vocabulary import COLUMNS
from gym_trace.playback.trace import Trace, storage_of
from gym_trace.printable import shown
from gym_trace.reading.writer_reader import WriterReader
from gym_trace.storage.local import LocalStorage
from gym_trace.storage.protocol import Storage

DROPPABLE = ("infos", "annotations")


def drop_columns(
    trace: TraceOrPath,
    columns: str | Iterable[str],
    destination: str | os.PathLike[str] | None = None,
    *,
    in_place: bool = False,
    on_progress: Progress | None = None,
) -> EditReport:
    """Writes a trace without some columns; all others are copied as they are stored, without being decoded.

    Args:
        trace: a trace, or a directory; not a view. Nobody is recording it.
        columns: "infos" (those of resets, too), "annotations", or "annotations.NAME". The others are what a trace is.
        destination: a new or empty directory. It is there when it is complete.
        in_place: put it in the place of the trace instead, at once, with all that lies beside the trace.
        on_progress: called now and then with the steps done and the steps there are.

    Raises:
        InvalidOption: there is no such column, or it cannot be dropped; or no destination; or the trace is a view.
        TraceError: a writer is still recording, or another process edits the trace.
        TraceNotFound, TraceExists, CorruptTrace, UnsupportedTrace
        RecordingError: the new trace could not be written.
    """
    source = opened(trace)
    check_whole_and_over(source, "drop columns of")
    dropped = _dropped(source, [columns] if isinstance(columns, str) else list(columns))
    stored = [WriterReader(files) for files in find_writers(storage_of(source))]
    total, done = sum(int(reader.fragments["steps"].sum()) for reader in stored), 0
    with edited(source, destination, in_place) as storage:
        try:
            for reader in stored:
                with _Copy(reader, storage, dropped) as copy:
                    for number in range(reader.chunk_count):
                        done += copy.add(number)
                        if on_progress is not None:
                            on_progress(done, total)
                    copy.close()
        except OSError as error:
            raise RecordingError(f"{storage.root}: the new trace could not be written: {error}") from error
        if not in_place:
            copy_videos(source.readers, storage)
            if facts := source.facts:
                write_facts(storage, facts)
        report = report_of(Trace(storage.root), source, destination)
    report.bytes = LocalStorage(report.destination).allocated()
    return report


def _dropped(trace: Trace, names: list[str]) -> set[ColumnPath]:
    """The paths, or beginnings of paths, that go. Raises InvalidOption."""
    if not names:
        raise InvalidOption(f"columns: name what is to be dropped: {_choices(trace)}")
    there = _paths(trace)
    dropped: set[ColumnPath] = set()
    for name in names:
        root, dot, rest = str(name).partition(".")
        path: ColumnPath = (root, rest) if dot else (root,)
        if root in COLUMNS and root not in DROPPABLE:
            raise InvalidOption(f"columns: {root} cannot be dropped, a trace is made of them; {_choices(trace)}")
        if root not in DROPPABLE or (dot and root == "infos") or not any(one[: len(path)] == path for one in there):
            raise InvalidOption(f"columns: this trace has no {shown(name)}; {_choices(trace)}")
        dropped.add(path)
    return dropped


def _choices(trace: Trace) -> str:
    there = _paths(trace)
    names = [root for root in DROPPABLE if any(path[0] == root for path in there)]
    names += sorted(f"annotations.{path[1]}" for path in there if path[0] == "annotations")
    return f"it can do without {', '.join(names)}" if names else "it has nothing that it can do without"


def _paths(trace: Trace) -> set[ColumnPath]:
    """Return the paths of info and annotation columns."""
    paths = {path for reader in trace.readers for batch in reader.read_batches for path in batch.totals}
    if any(reader.layouts.infos for reader in trace.readers if reader.chunk_count):
        paths.add(("infos",))
    return {path for path in paths if path == ("infos",) or (path[0] == "annotations" and len(path) == 2)}


class _Copy:
    """Rewrite the files of one writer. A context manager that closes them without finishing."""

    def __init__(self, reader: WriterReader, storage: Storage, dropped: set[ColumnPath]):
        self._reader, self._storage, self._dropped = reader, storage, dropped
        self._has_infos = ("infos",) not in dropped
        schema = schema_of(reader)
        self._writer = TraceWriter(storage, schema if self._has_infos else _without_infos(schema), LEVEL, fsync=False)

    def __enter__(self) -> _Copy:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.abandon()

    def add(self, number: int) -> int:
        """A chunk; returns how many steps it has. Raises CorruptTrace."""
        reader = self._reader
        chunk, (begin, end) = reader.read_chunk(number), reader.chunk_bounds[number : number + 2].tolist()
        columns: dict[ColumnPath, RowsOrEncoded] = {
            path: chunk.encoded(path)
            for path in chunk.columns
            if path != ("fragments",) and not {path[:1], path[:2]} & self._dropped
        }
        if ("starts",) in columns and not self._has_infos:
            columns[("starts",)] = [_without_info(row) for row in chunk.packed(("starts",))]
        self._writer.write(reader.fragments[begin:end], columns)
        self._writer.seal_if_due()
        return int(reader.fragments["steps"][begin:end].sum())

    def close(self) -> None:
        if pending := [one.described() for one in self._reader.pending]:
            self._writer.write(np.zeros(0, wire.FRAGMENT), {}, pending=pending)
        finish(self._writer, self._storage, entries_of(self._reader))


def _without_info(start: bytes) -> bytes:
    """Return a row of starts without the info of the reset, if it has one."""
    said = unpack(start)
    if not isinstance(said, dict) or "reset_info" not in said:
        return start
    return pack_lenient({key: value for key, value in said.items() if key != "reset_info"})[0]


def _without_infos(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a writer's metadata as if it had not recorded infos, also in its origins."""
    said = dict(schema)
    if as_map(said.get("recorder")).get("record_infos"):
        said["recorder"] = {**as_map(said["recorder"]), "record_infos": False}
    if ORIGINS in said:
        said[ORIGINS] = packed_origins(
            [
                {**one, "schema": _without_infos(as_map(one["schema"]))} if "schema" in as_map(one) else one
                for one in unpacked_origins(said[ORIGINS])
            ]
        )
    return said
