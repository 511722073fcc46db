"""Several traces as one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gym_trace.editing.sources import TraceOrPath, groups_of, opened, taken_of, write_groups
from gym_trace.editing.writer_copy import EditReport, Progress
from gym_trace.errors import InvalidOption
from gym_trace.format.facts import agreed, write_facts
from gym_trace.playback.trace import Trace
from gym_trace.storage.local import LocalStorage
from gym_trace.storage.staging import StagedStorage, new_directory


def merge_traces(
    traces: Sequence[TraceOrPath],
    destination: str | os.PathLike[str],
    *,
    on_progress: Progress | None = None,
) -> EditReport:
    """Writes a new trace with the episodes of several.

    Every episode keeps its writer and its id. A writer that several of the traces have, such as pieces of a trace that
    was split, is one writer again; an episode that several of them have is kept once. Facts on which all agree are
    kept. Batches that need no change are copied as files, without being read.

    Args:
        traces: traces, views, or directories. Of one that is being recorded, the episodes that are over.
        destination: a new or empty directory. It is there when it is complete.
        on_progress: called now and then with the bytes done and the bytes there are.

    Raises:
        TraceError: an episode, or what a writer says of itself, is not the same in two of them; nothing was written.
        TraceNotFound, TraceExists, InvalidOption, CorruptTrace, UnsupportedTrace
        RecordingError: the new trace could not be written.
    """
    if isinstance(traces, (str, os.PathLike, Trace)) or not traces:
        raise InvalidOption("traces: give a list of one or more to be merged")
    sources = list(map(opened, traces))
    report = EditReport(Path(destination))
    taken = []
    for trace in sources:
        more, running = taken_of(trace)
        taken += more
        report.running += running
    groups = groups_of(taken, report)
    with new_directory(destination, *(trace.directory for trace in sources)) as staged:
        storage = StagedStorage(staged)
        write_groups(storage, groups, report, on_progress)
        if facts := agreed(trace.facts for trace in sources):
            write_facts(storage, facts)
    report.bytes = LocalStorage(report.destination).allocated()
    return report
