"""Some of the episodes of a trace as a new one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gym_trace.editing.in_place import edited
from gym_trace.editing.sources import TraceOrPath, groups_of, opened, taken_of, write_groups
from gym_trace.editing.writer_copy import EditReport, Progress
from gym_trace.format.facts import write_facts
from gym_trace.model.values import Array
from gym_trace.storage.local import LocalStorage


def filter_trace(
    trace: TraceOrPath,
    destination: str | os.PathLike[str] | None = None,
    episodes: slice | Sequence[int] | Array | None = None,
    *,
    in_place: bool = False,
    on_progress: Progress | None = None,
) -> EditReport:
    """Writes a new trace with some of the episodes of another; a view of a trace is those that it has.

    Every episode keeps its writer, its id, and their order; writers without an episode are left out. Batches and chunks
    of which all is kept are copied as they are stored, without being decoded.

    Args:
        trace: a trace, a view (``trace[mask]``), or a directory. Episodes that are being recorded are left out.
        destination: a new or empty directory. It is there when it is complete.
        episodes: a slice, indices, or a boolean array over the trace; None: all that it has.
        in_place: put it in the place of the trace instead, at once, with all that lies beside the trace.
        on_progress: called now and then with the bytes done and the bytes there are.

    Raises:
        InvalidOption: there is no such episode, or no destination, or it lies in the trace, or the trace cannot be
            edited in place here; nothing was written.
        TraceError: in place, and a writer is still recording, or another process edits the trace.
        TraceNotFound, TraceExists, CorruptTrace, UnsupportedTrace
        RecordingError: the new trace could not be written.
    """
    source = opened(trace)
    source = source if episodes is None else source[episodes]
    taken, running = taken_of(source, np.ones(len(source), np.bool_))
    report = EditReport(source.directory if destination is None else Path(destination), running=running)
    groups = groups_of(taken, report)
    with edited(source, destination, in_place) as storage:
        write_groups(storage, groups, report, on_progress)
        if facts := source.facts:
            write_facts(storage, facts)
    report.bytes = LocalStorage(report.destination).allocated()
    return report
