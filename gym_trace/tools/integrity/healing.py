"""Restore damaged bytes in the batches of a trace, from their parity."""

from __future__ import annotations

from gym_trace.errors import CorruptTrace, RecordingError, UnsupportedTrace
from gym_trace.format.batch_reader import PART, Damage
from gym_trace.format.directory import find_writers
from gym_trace.format.healing import HealReport, heal_batch
from gym_trace.playback.trace import TraceLike, writable_storage_of
from gym_trace.tools.integrity.scan import Progress

__all__ = ["HealReport", "heal_trace"]


def heal_trace(directory: TraceLike, on_progress: Progress | None = None) -> HealReport:
    """Restore damaged bytes of sealed batches in place, from their parity.

    A file is replaced atomically, and only by the bytes that were recorded: the checksums of all blocks must match, and
    the checksum of the file, if the manifest has it. Unsealed batches, rings and manifests are never changed.

    Args:
        directory: a trace, its directory, or its storage. Writers may still be recording.
        on_progress: called periodically with the bytes done and the total.

    Raises:
        TraceNotFound: no trace in directory.
        RecordingError: a file cannot be written.

    Examples:
        >>> gym_trace.heal_trace("traces/cartpole").healed  # nothing was damaged
        []
    """
    storage, report = writable_storage_of(directory), HealReport()
    names = [
        (name, {str(entry.get("file")): entry.get("crc32") for entry in files.entries()})
        for files in find_writers(storage)
        for name in files.batches.values()
        if not name.endswith(PART)
    ]
    for number, (name, checksums) in enumerate(names, 1):
        path, size = storage.path(name), report.bytes
        try:
            heal_batch(storage, name, checksums.get(name), report)
        except FileNotFoundError:
            pass  # an edit has replaced the trace
        except (CorruptTrace, UnsupportedTrace) as error:
            report.hopeless.append(Damage(path, 0, report.bytes - size, str(error)))
        except OSError as error:
            raise RecordingError(f"{path}: cannot be restored: {error}") from error
        if on_progress is not None:
            on_progress(report.bytes, report.bytes * len(names) // number)
    return report
