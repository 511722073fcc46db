"""Import of directories of gym_recording and OpenAI Gym's Monitor."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from gym_trace.errors import TraceError, TraceNotFound
from gym_trace.exchange.formats.imported import Imported, together
from gym_trace.exchange.formats.legacy.gym_recording import find_recordings, is_recording
from gym_trace.exchange.formats.legacy.monitor import differences, find_runs, is_manifest
from gym_trace.exchange.formats.legacy.old_files import OldDirectory, malformed


class GymImporter:
    """A directory of gym_recording, or of OpenAI Gym's Monitor, or of both

    Memory does not grow with the episodes of gym_recording. The statistics of Monitor are read as a whole.
    """

    name: ClassVar[str] = "gym"
    skips_links: ClassVar[bool] = True

    def recognises(self, path: Path) -> bool:
        try:
            return any(is_recording(name) or is_manifest(name) for name in OldDirectory(path).names)
        except (TraceError, OSError):
            return False

    def read(self, path: Path) -> Imported:
        """Read all recordings. Raises TraceNotFound without any, UnreadableRecording for a damaged or pickled one."""
        source = OldDirectory(path)
        runs = find_runs(source)
        parts = [recording.imported() for recording in find_recordings(source)] + [run.imported() for run in runs]
        if not parts:
            raise TraceNotFound(
                f"{source.path}: no old recording; gym_recording writes openaigym.trace.*.manifest.json, OpenAI Gym's "
                "Monitor openaigym.manifest.*.json"
            )
        names = [name for part in parts for name in part.schemas]
        if len(set(names)) < len(names):
            raise malformed(source.path, "several manifests of one process")
        content = together(parts)
        if problem := differences([run.results.env_info for run in runs]):
            content.warnings.append(f"{problem}; each process is a writer of its own")
        videos = [name for run in runs for names in run.results.videos for name in names]
        missing = [name for name in videos if name not in source.names]
        content.warnings += [f"the video {name} is missing; the statistics are imported" for name in missing]
        content.beside = [source.path / name for name in videos if name not in missing]
        return content
