"""Import of directories of gym_recording and OpenAI Gym's Monitor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, ClassVar

from gym_trace.data.schema import IMPORTED_FROM
from gym_trace.errors import TraceError, TraceNotFound
from gym_trace.exchange.formats.imported import Imported, Schema
from gym_trace.exchange.formats.legacy.gym_recording import GymRecording, find_recordings, is_recording
from gym_trace.exchange.formats.legacy.monitor import MonitorRun, differences, find_runs, is_manifest
from gym_trace.exchange.formats.legacy.old_files import NewWriter, OldDirectory
from gym_trace.format.directory import is_writer_id, new_writer_id
from gym_trace.format.ring.segment import Segment


class GymImporter:
    """A directory of gym_recording, or of OpenAI Gym's Monitor, or of both.

    Memory does not grow with the number of episodes of gym_recording; of Monitor's it takes what their statistics take.
    """

    name: ClassVar[str] = "gym"
    skips_links: ClassVar[bool] = True

    def recognises(self, path: Path) -> bool:
        try:
            with closing(OldDirectory(path)) as source:
                return any(is_recording(name) or is_manifest(name) for name in source.names)
        except (TraceError, OSError):
            return False

    def read(self, path: Path) -> Imported:
        """Raises TraceNotFound if neither is found, UnreadableRecording if it is damaged, or pickled."""
        with ExitStack() as stack:
            found = _imported(stack.enter_context(closing(OldDirectory(path))))
            stack.pop_all()  # its segments close the directory
            return found


def _imported(source: OldDirectory) -> Imported:
    recordings, runs = find_recordings(source), find_runs(source)
    found: list[GymRecording | MonitorRun] = [*recordings, *runs]
    if not found:
        raise TraceNotFound(
            f"{source.path}: no old recording; gym_recording writes openaigym.trace.*.manifest.json, OpenAI Gym's "
            "Monitor openaigym.manifest.*.json"
        )
    done = 0

    def on_file() -> None:
        nonlocal done
        done += 1

    schemas: dict[str, Schema] = {}
    writers: list[tuple[str, NewWriter]] = []
    for recording in found:
        for writer in recording.writers(on_file):
            name = writer.name if is_writer_id(writer.name) and writer.name not in schemas else new_writer_id()
            schemas[name] = _schema(writer, recording.kind)
            writers.append((name, writer))
    notes = [schema["environment"]["note"] for schema in schemas.values()]
    if problem := differences([run.results.env_info for run in runs]):
        notes.append(f"{problem}; each process is a writer of its own")
    videos = [name for run in runs for names in run.results.videos for name in names]
    missing = [name for name in videos if name not in source.names]
    notes += [f"the video {name} is missing; the statistics are imported" for name in missing]
    return Imported(
        " and ".join(dict.fromkeys(recording.kind for recording in found)),
        schemas,
        _segments(source, writers),
        sum(recording.files for recording in found),
        lambda: done,
        notes=notes,
        beside=[source.path / name for name in videos if name not in missing],
    )


def _segments(source: OldDirectory, writers: list[tuple[str, NewWriter]]) -> Iterator[tuple[str, Segment | None]]:
    with closing(source):
        for name, writer in writers:
            for segment in writer.segments:
                yield name, segment
            yield name, None


def _schema(new: NewWriter, kind: str) -> dict[str, Any]:
    return {
        **new.schema,
        "environment": {"spec": None, "wrappers": [], "render_mode": None, **new.schema["environment"]},
        "platform": "",
        "recorder": {IMPORTED_FROM: kind, **new.schema["recorder"]},
    }
