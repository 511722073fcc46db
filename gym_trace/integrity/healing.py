"""Write the bytes that parity restores back into the batches of a trace."""

from __future__ import annotations

from dataclasses import dataclass, field

from gym_trace.errors import CorruptTrace, RecordingError
from gym_trace.format.batch_reader import PART, BatchReader, Damage, restored_ranges
from gym_trace.format.directory import find_writers
from gym_trace.format.kernels import crc32
from gym_trace.format.parity import HealedReader, heal, right_record, stored_parity
from gym_trace.integrity.scan import Progress
from gym_trace.playback.trace import TraceLike, writable_storage_of
from gym_trace.storage.protocol import Reader, Storage

__all__ = ["HealReport", "heal_trace"]
_BLOCK = 1 << 20


@dataclass
class HealReport:
    """Result of heal_trace.

    Attributes:
        healed: ranges of bytes that are as they were recorded again.
        hopeless: damaged ranges that parity cannot restore. Their files are left as they are.
        files, bytes: batches that were compared with their parity, and their bytes.
        unprotected: sealed batches without parity, as older releases wrote them.
    """

    healed: list[Damage] = field(default_factory=list)
    hopeless: list[Damage] = field(default_factory=list)
    files: int = 0
    bytes: int = 0
    unprotected: list[str] = field(default_factory=list)


def heal_trace(directory: TraceLike, on_progress: Progress | None = None) -> HealReport:
    """Restore damaged bytes of sealed batches in place, from their parity.

    A file is replaced atomically, and only by the very bytes that were recorded: the checksums of all blocks are
    compared, and that of the file, if the manifest has it. Unsealed batches, rings and manifests are left alone.

    Args:
        directory: of the trace, its storage, or the trace. It may still be written to.
        on_progress: called now and then with the bytes done and the bytes there are.

    Raises:
        TraceNotFound: there is no trace in directory.
        RecordingError: a file cannot be written.
    """
    storage, report = writable_storage_of(directory), HealReport()
    names = [
        (name, {str(entry.get("file")): entry.get("crc32") for entry in files.entries()})
        for files in find_writers(storage)
        for name in files.batches.values()
        if not name.endswith(PART)
    ]
    total = sum(storage.size(name) for name, _ in names)
    for name, checksums in names:
        try:
            _heal(storage, name, checksums.get(name), report)
        except OSError as error:
            raise RecordingError(f"{storage.path(name)}: cannot be restored: {error}") from error
        if on_progress is not None:
            on_progress(report.bytes, total)
    return report


def _heal(storage: Storage, name: str, checksum: object, report: HealReport) -> None:
    path = storage.path(name)
    with storage.open(name) as file:
        report.files += 1
        report.bytes += file.size
        try:
            stored = stored_parity(file, BatchReader(storage, name, warns=False).header.file_id)
        except CorruptTrace as error:
            report.hopeless.append(Damage(path, 0, file.size, error.problem))
            return
        if stored is None:
            report.unprotected.append(path)
            return
        found = heal(file, stored)
        for offset in found.hopeless:
            report.hopeless.append(
                Damage(path, offset, offset + stored.shape.block, "more damage than parity restores")
            )
        if found.hopeless:
            return
        reader, shape = HealedReader(file, found.blocks), stored.shape
        record = right_record(reader, stored)
        if record is None:
            report.hopeless.append(Damage(path, 0, shape.covered, "the index is not where the footer says"))
            return
        ranges = restored_ranges(path, found.blocks)
        if file.read(shape.covered, len(record)) != record:
            ranges.append(Damage(path, shape.covered, shape.covered + len(record), "parity computed again"))
        if not ranges:
            return
        if checksum not in (None, crc32(record + stored.footer, _crc(reader, shape.covered))):
            report.hopeless.append(
                Damage(path, 0, file.size, "restored, it does not match the checksum in the manifest")
            )
            return
        _write(storage, name, reader, shape.covered, record + stored.footer)
        report.healed += ranges


def _crc(file: Reader, length: int) -> int:
    crc = 0
    for at in range(0, length, _BLOCK):
        crc = crc32(file.read(at, min(_BLOCK, length - at)), crc)
    return crc


def _write(storage: Storage, name: str, file: Reader, length: int, end: bytes) -> None:
    copy = storage.create(name + PART)
    try:
        copy.copy(file, 0, length)
        copy.write(end)
        copy.sync()
    except BaseException:
        copy.close()
        storage.remove(name + PART)
        raise
    copy.close()
    storage.rename(name + PART, name)
    storage.sync()
