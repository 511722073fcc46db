"""Import: an old recording written as a trace."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gym_trace.errors import InvalidOption, RecordingError, TraceNotFound
from gym_trace.format import wire
from gym_trace.format.directory import check_writer_id, find_writers, new_writer_id
from gym_trace.format.trace_writer import TraceWriter
from gym_trace.interop.legacy.gym_recording import GymRecording, find_recordings
from gym_trace.interop.legacy.monitor import MonitorRun, differences, find_runs
from gym_trace.interop.legacy.new_writer import NewWriter
from gym_trace.interop.legacy.old_files import OldDirectory
from gym_trace.model.schema import IMPORTED_FROM, WriterSchema
from gym_trace.ring.chunk_builder import LARGE_CHUNK, SMALL_CHUNK, ChunkWriter
from gym_trace.storage.local import LocalStorage, storage_of_copy
from gym_trace.storage.protocol import Storage

Progress = Callable[[int, int], None]  # files done, files in all
_LEVEL = 3  # of zstd


@dataclass
class ImportReport:
    """What import_recording has written.

    Attributes:
        destination: the trace.
        kinds: what it was imported from: "gym_recording", "OpenAI Gym Monitor".
        writers: ids of the writers, one for each process and, of Monitor, each type of episode.
        episodes, steps: how many.
        videos: names of the videos that were copied.
        notes: what an import cannot tell, in a sentence each.
    """

    destination: Path
    kinds: list[str] = field(default_factory=list)
    writers: list[str] = field(default_factory=list)
    episodes: int = 0
    steps: int = 0
    videos: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def import_recording(
    path: str | os.PathLike[str], destination: str | os.PathLike[str], on_progress: Progress | None = None
) -> ImportReport:
    """Writes a directory of gym_recording, or of OpenAI Gym's Monitor, as a trace. Never changes the original.

    Arrays keep their dtype, shape and bits. Memory does not grow with the number of episodes of gym_recording; of
    Monitor's it takes what their statistics take. What goes wrong leaves nothing behind.

    Args:
        path: the old directory.
        destination: a new or empty directory.
        on_progress: called with the files of episodes that are done, and how many there are.

    Raises:
        TraceNotFound: there is no old recording at path.
        UnreadableRecording: it is damaged, or pickled.
        TraceExists: destination is not empty.
        InvalidOption: destination lies in path.
        RecordingError: the trace could not be written.
    """
    target = Path(destination)
    with OldDirectory(path) as source:
        found = find_old(source)
        existed = target.exists()
        storage = storage_of_copy(target, source.path)
        report = ImportReport(target)
        try:
            _import(source, found, storage, report, on_progress)
        except BaseException as error:
            _clear(target, existed)
            if isinstance(error, OSError):
                raise RecordingError(f"{target}: the imported trace could not be written: {error}") from error
            raise
    return report


def find_old(source: OldDirectory) -> list[GymRecording | MonitorRun]:
    """The recordings in a directory, at least one. Raises TraceNotFound, UnreadableRecording."""
    found: list[GymRecording | MonitorRun] = [*find_recordings(source), *find_runs(source)]
    if found:
        return found
    problem = f"{source.path}: no old recording here"
    if find_writers(LocalStorage(source.path)):
        raise TraceNotFound(f"{problem}: it holds a trace of gym-trace already, which can be read as it is")
    raise TraceNotFound(
        f"{problem}; gym_recording leaves openaigym.trace.*.manifest.json, OpenAI Gym's Monitor "
        "openaigym.manifest.*.json"
    )


def _import(
    source: OldDirectory,
    found: list[GymRecording | MonitorRun],
    storage: Storage,
    report: ImportReport,
    on_progress: Progress | None,
) -> None:
    done, total = 0, sum(recording.files for recording in found)

    def on_file() -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(done, total)

    created = time.time_ns()
    for recording in found:
        for writer in recording.writers(on_file):
            # The writers of a trace are read in the order of this time.
            _write(writer, recording.kind, created + len(report.writers), storage, report)
    report.kinds = list(dict.fromkeys(recording.kind for recording in found))
    runs = [recording for recording in found if isinstance(recording, MonitorRun)]
    if problem := differences([run.env_info for run in runs]):
        warnings.warn(f"{source.path}: {problem}; each process is a writer of its own", stacklevel=3)
    for run in runs:
        for names in run.videos:
            report.videos += [name for name in names if _copied(source, name, report.destination)]


def _write(new: NewWriter, kind: str, created: int, storage: Storage, report: ImportReport) -> None:
    schema = _schema(new, kind, created)
    layouts = WriterSchema.of(schema).layouts[:2]
    large = any(leaf.row_size >= wire.LARGE_ROW for layout in layouts for leaf in layout.leaves())
    writer = TraceWriter(storage, schema, _LEVEL, fsync=False)
    try:
        chunks = ChunkWriter(lambda: writer, LARGE_CHUNK if large else SMALL_CHUNK)
        for segment in new.segments:
            chunks.add(segment)
            writer.seal_if_due()
        chunks.write()
        writer.close({})
    finally:
        writer.abandon()
    report.writers.append(writer.writer)
    report.episodes += writer.episodes
    report.steps += writer.steps
    if (note := schema["environment"]["note"]) not in report.notes:
        report.notes.append(note)


def _schema(new: NewWriter, kind: str, created: int) -> dict[str, Any]:
    """The schema record of a writer (docs/FORMAT.md, section 4)."""
    numbers = re.search(r"\.\d+\.(\d{1,9})(\.|$)", new.name)  # of the recorder, and of its process
    return {
        "format": [wire.MAJOR, wire.MINOR],
        "writer": _writer_id(new.name),
        "created": created,
        **new.schema,
        "environment": {"spec": None, "wrappers": [], "render_mode": None, **new.schema["environment"]},
        "host": "unknown",
        "pid": int(numbers[1]) if numbers else 0,
        "platform": "",
        "recorder": {IMPORTED_FROM: kind, **new.schema["recorder"]},
    }


def _writer_id(name: str) -> str:
    try:
        return check_writer_id(name)
    except InvalidOption:
        return new_writer_id()


def _copied(source: OldDirectory, name: str, target: Path) -> bool:
    """Copies a file beside the trace, where it is no part of it. Warns if it is not there."""
    if name not in source.names:
        warnings.warn(f"{source.path / name}: this video is missing; the statistics are imported", stacklevel=4)
        return False
    shutil.copyfile(source.path / name, target / name, follow_symlinks=False)
    return True


def _clear(target: Path, existed: bool) -> None:
    """Removes what was written into a directory that had been empty."""
    with contextlib.suppress(OSError):
        for path in target.iterdir():
            path.unlink()
        if not existed:
            target.rmdir()
