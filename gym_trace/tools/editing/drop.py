"""A trace without some of its columns."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from gym_trace.data.origins import changed_schema
from gym_trace.data.packing import pack_lenient, unpack
from gym_trace.data.schema import as_map
from gym_trace.data.vocabulary import COLUMNS
from gym_trace.errors import InvalidOption
from gym_trace.format.columns import Path as ColumnPath
from gym_trace.format.rewrite import ColumnEdits
from gym_trace.playback.trace import Trace
from gym_trace.printable import shown
from gym_trace.tools.editing.compact import check_editable, check_same
from gym_trace.tools.editing.in_place import edited, report_for
from gym_trace.tools.editing.rewrite import EditReport, Progress, rewrite
from gym_trace.tools.editing.sources import TraceOrPath, opened, outputs_of, selections_of

DROPPABLE = ("infos", "annotations")


def drop_columns(
    trace: TraceOrPath,
    columns: str | Iterable[str],
    destination: str | os.PathLike[str] | None = None,
    *,
    in_place: bool = False,
    on_progress: Progress | None = None,
) -> EditReport:
    """Write a trace without some columns; all others are copied as stored, without being decoded.

    Args:
        trace: a trace, or a directory; not a view. No writer is recording it.
        columns: "infos" (also those of resets), "annotations", or "annotations.NAME". No other column can be dropped.
        destination: a new or empty directory. It appears when it is complete.
        in_place: replace the trace instead, atomically, and keep all other files in its directory.
        on_progress: called periodically with the steps done and the total.

    Raises:
        InvalidOption: unknown column, or one that cannot be dropped; or no destination; or the trace is a view.
        TraceError: a writer is still recording, or another process edits the trace.
        TraceNotFound, TraceExists, CorruptTrace, UnsupportedTrace
        RecordingError: the new trace could not be written.
    """
    source = opened(trace)
    check_editable(source, "drop columns of")
    dropped = _dropped(source, [columns] if isinstance(columns, str) else list(columns))
    report = report_for(source, destination, in_place)

    def path_of(path: ColumnPath) -> ColumnPath | None:
        return None if {path[:1], path[:2]} & dropped else path

    edits = ColumnEdits(path_of, _without_info if ("infos",) in dropped else None)
    outputs = outputs_of(selections_of(source)[0], report)
    if ("infos",) in dropped:
        outputs = [one._replace(schema=changed_schema(one.schema, _without_infos)) for one in outputs]
    with edited(report, [source], in_place) as storage:
        rewrite(outputs, storage, report, edits, counts_steps=True, copies_videos=not in_place, on_progress=on_progress)
        check_same(storage, source)
    report.writers = source.writers
    return report


def _dropped(trace: Trace, names: list[str]) -> set[ColumnPath]:
    """Return the paths, or beginnings of paths, to drop. Raises InvalidOption."""
    if not names:
        raise InvalidOption(f"columns: name those to drop: {_choices(trace)}")
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


def _without_info(start: bytes) -> bytes:
    """Return a row of starts without the info of the reset, if it has one."""
    said = unpack(start)
    if not isinstance(said, dict) or "reset_info" not in said:
        return start
    return pack_lenient({key: value for key, value in said.items() if key != "reset_info"})[0]


def _without_infos(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a writer's metadata as if it had not recorded infos."""
    recorder = as_map(schema.get("recorder"))
    return {**schema, "recorder": {**recorder, "record_infos": False}} if recorder.get("record_infos") else schema
