"""Write the bytes that parity restores back into a batch."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass, field

from gym_trace.format import wire
from gym_trace.format.batch_reader import PARITY_CONTRADICTS, BatchReader, Damage, restored_ranges, size_and_crc
from gym_trace.format.kernels import crc32
from gym_trace.format.parity import HealedReader, is_right, parity_of, record_for, stored_parity
from gym_trace.format.restoring import heal
from gym_trace.storage.local import LocalAppender, LocalReader
from gym_trace.storage.protocol import Reader, Storage
from gym_trace.storage.staging import staged_file


@dataclass
class HealReport:
    """Result of heal_trace.

    Attributes:
        healed: ranges of bytes that were restored.
        hopeless: damaged ranges that parity cannot restore. Their files stay unchanged.
        files, bytes: number of batches compared with their parity, and their size.
        unprotected: sealed batches without parity, as older releases wrote them.

    Examples:
        >>> report = gym_trace.heal_trace("traces/cartpole")
        >>> report.files, report.hopeless
        (1, [])
    """

    healed: list[Damage] = field(default_factory=list)
    hopeless: list[Damage] = field(default_factory=list)
    files: int = 0
    bytes: int = 0
    unprotected: list[str] = field(default_factory=list)


def heal_batch(storage: Storage, name: str, checksum: object, report: HealReport) -> None:
    """Restore a sealed batch and add the result to report. checksum: CRC of the file in the manifest; None: unknown.

    Raises CorruptTrace, UnsupportedTrace, OSError.
    """
    path = storage.path(name)
    with storage.open(name) as file:
        report.files += 1
        report.bytes += file.size
        stored = stored_parity(file, BatchReader(storage, name, warns=False).header.file_id)
        if stored is None:
            report.unprotected.append(path)
            return
        found = heal(file, stored)
        why = PARITY_CONTRADICTS if found.contradicts else "more damage than parity restores"
        for offset in found.hopeless:
            report.hopeless.append(Damage(path, offset, offset + stored.shape.block, why))
        if found.hopeless:
            return
        reader, covered = HealedReader(file, found.blocks), stored.shape.covered
        ranges = restored_ranges(path, found.blocks)
        parity = parity_of(reader, stored.shape) if found.blocks else found.parity
        record = record_for(reader, stored, parity)
        is_ours = record is not None and file.read(covered, len(record)) == record
        if not is_ours and (record is not None or not is_right(stored, parity)):
            why = "the parity contradicted intact data; recomputed" if stored.is_sound else "parity recomputed"
            ranges.append(Damage(path, covered, file.size - wire.HEADER_SIZE, why))
        if not ranges:
            return
        if record is None:
            report.hopeless.append(Damage(path, covered, file.size, "the parity does not fit the batch"))
            return
        tail = record + stored.footer
        if checksum not in (None, crc32(tail, size_and_crc(reader, covered)[1])):
            report.hopeless.append(Damage(path, 0, file.size, "the restored file would not match its manifest"))
            return
        if _replace(storage, name, file, reader, covered, tail):
            report.healed += ranges


def _replace(storage: Storage, name: str, before: Reader, file: Reader, length: int, end: bytes) -> bool:
    """Replace the file that was read by the restored one; return False if another file has taken its name."""
    try:
        with staged_file(storage, name) as copy:
            if isinstance(copy, LocalAppender) and isinstance(before, LocalReader) and os.name == "posix":
                with contextlib.suppress(OSError):  # a file system without permissions
                    os.fchmod(copy.fileno(), stat.S_IMODE(os.fstat(before.fileno()).st_mode))
            copy.copy(file, 0, length)
            copy.write(end)
            copy.sync()
            if not _is_same(storage, name, before):
                raise _Replaced
    except _Replaced:
        return False
    return True


class _Replaced(Exception):
    """An edit in place has replaced the trace since the batch was read."""


def _is_same(storage: Storage, name: str, before: Reader) -> bool:
    """Return True if a batch is still the one that was read."""
    with storage.open(name) as now:
        return now.size == before.size and all(
            now.read(at, wire.HEADER_SIZE) == before.read(at, wire.HEADER_SIZE)
            for at in (0, wire.HEADER_SIZE, now.size - wire.HEADER_SIZE)
        )
