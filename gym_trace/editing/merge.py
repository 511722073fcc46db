"""Several traces as one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gym_trace.editing.sources import Taken, TraceOrPath, opened, taken_of
from gym_trace.editing.writer_copy import EditReport, Progress, WriterCopy, bytes_of, schema_of
from gym_trace.errors import InvalidOption, RecordingError, TraceError
from gym_trace.format.facts import agreed, write_facts
from gym_trace.model.episode import Episode, infos_of
from gym_trace.model.packing import pack_lenient
from gym_trace.storage.protocol import Storage
from gym_trace.storage.staging import StagedStorage, new_directory

_OF_THE_RESET = ("seed", "options", "rng_state", "reset_info", "pending_action")
_OF_THE_STEPS = ("observations", "actions", "rewards", "terminations", "truncations", "annotations")


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
    if not traces:
        raise InvalidOption("traces: give one or more to be merged")
    sources = list(map(opened, traces))
    report = EditReport(Path(destination))
    writers: dict[str, list[Taken]] = {}
    for trace in sources:
        taken, running = taken_of(trace)
        report.running += running
        for one in taken:
            writers.setdefault(one.reader.writer, []).append(one)
    for several in writers.values():
        report.duplicates += _reconciled(several)
    with new_directory(destination, *(trace.directory for trace in sources)) as staged:
        storage = StagedStorage(staged)
        write_taken(storage, writers, report, on_progress)
        if facts := agreed(trace.facts for trace in sources):
            write_facts(storage, facts)
    return report


def write_taken(
    storage: Storage, writers: dict[str, list[Taken]], report: EditReport, on_progress: Progress | None = None
) -> None:
    """Writes what is taken of each writer. Raises InvalidOption if that is nothing, RecordingError."""
    done, total = 0, sum(bytes_of(one.reader) for several in writers.values() for one in several)

    def advance(more: int) -> None:
        nonlocal done
        done += more
        if on_progress is not None:
            on_progress(min(done, total), total)

    try:
        for several in writers.values():
            with WriterCopy(storage, schema_of(several[0].reader), report, advance) as copy:
                for one in several:
                    copy.add(one.reader, one.rows)
                copy.close()
    except OSError as error:
        raise RecordingError(f"{report.destination}: the new trace could not be written: {error}") from error
    if not report.writers:
        raise InvalidOption(f"{report.destination}: there is no episode for it; nothing was written")


def _reconciled(several: list[Taken]) -> int:
    """Takes each episode of a writer once; returns how many others had. Raises TraceError where they differ."""
    first = several[0]
    known: dict[tuple[int, int], tuple[Taken, int]] = {}
    duplicates = 0
    for number, one in enumerate(several):
        if number and pack_lenient(schema_of(one.reader))[0] != pack_lenient(schema_of(first.reader))[0]:
            raise TraceError(
                f"writer {first.reader.writer} is in {first.trace.directory} and in {one.trace.directory}, and does "
                "not say the same of itself there: these are not pieces of one recording, and cannot be merged"
            )
        if len(several) == 1:
            break
        rows, table = np.flatnonzero(one.rows).tolist(), one.reader.parts.table
        for row, episode, step in zip(rows, table["episode_id"][rows].tolist(), table["first_step"][rows].tolist()):
            other, place = known.setdefault((episode, step), (one, row))
            if other is not one:
                _compare(other, place, one, row)
                one.rows[row] = False
                duplicates += 1
    return duplicates


def _compare(one: Taken, row: int, other: Taken, other_row: int) -> None:
    """Raises TraceError unless an episode is the same in both traces, to the bit."""
    a, b = one.reader.parts.table[row], other.reader.parts.table[other_row]
    names = [
        name for name in a.dtype.names if name not in ("index", "writer") and a[name].tobytes() != b[name].tobytes()
    ]
    if not names:
        pair = one.trace[int(one.places[row])], other.trace[int(other.places[other_row])]
        names = [name for name in (*_OF_THE_RESET, *_OF_THE_STEPS) if not _same(pair, name)]
        names += [] if pack_lenient(infos_of(pair[0]))[0] == pack_lenient(infos_of(pair[1]))[0] else ["infos"]
    if names:
        raise TraceError(
            f"episode {a['episode_id']} of {one.reader.writer} is in {one.trace.directory} and in "
            f"{other.trace.directory}, with other {', '.join(names)}; leave it out of one of them with 'edit filter'"
        )


def _same(pair: tuple[Episode, Episode], name: str) -> bool:
    one, other = (pack_lenient(getattr(episode, name))[0] for episode in pair)
    return one == other
