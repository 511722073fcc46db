"""The ring file of a writer: memory-mapped slabs that survive a kill of the process."""

from __future__ import annotations

import contextlib
import os
import struct
import sys
from typing import Any, NamedTuple
from zlib import crc32

from gym_trace.data.packing import pack, unpack
from gym_trace.errors import CorruptTrace, UnsupportedTrace
from gym_trace.format import wire
from gym_trace.format.directory import RING
from gym_trace.storage.exchange import macos_boot_id
from gym_trace.storage.protocol import NO_DESCRIPTORS, Mapping, Reader, Storage

MAJOR, MINOR = 1, 0
ROWS, LANES = 1, 2  # kinds of slabs: single environment, vector environment
SLAB_HEADER = 64
NOT_BEGUN = b"", b""
MOST_SLABS, MOST_SLAB_BYTES, MOST_LAYOUT = 16, 1 << 30, 64 << 20

_HEADER = struct.Struct("<8sHHI16s16sIIQQII44x")
_CRC = struct.Struct("<I")
_HEADER_BYTES = _HEADER.size + _CRC.size  # 128; the layout follows
_SEQUENCE = struct.Struct("<Q")
_PAGE = 4096


def _boot_id() -> bytes:
    """Return the boot id of the operating system; zeros if it has none."""
    with contextlib.suppress(OSError, ValueError):
        if sys.platform == "darwin":
            return macos_boot_id()
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return bytes.fromhex(file.read().strip().replace("-", ""))
    return bytes(16)


BOOT_ID = _boot_id()


class Ring:
    """The slabs of a writer, in a new mapped file, or in private memory if the file system cannot map one safely.

    begin() gives a slab the next sequence number. Once it is full, it is written as chunks with that number; only then
    may it begin again. Raises OSError if the disk has no space for the file. Without free file descriptors the ring
    also uses private memory; the caller may open another ring later.

    Attributes:
        slabs: memory of the slabs. Call begin() before filling one.
        mapped: True if the memory survives the process.
        shortage: the error if no file descriptor was free, which may be temporary; otherwise None.
    """

    def __init__(
        self,
        storage: Storage,
        writer: str,
        kind: int,
        layout: dict[str, Any],
        slabs: int,
        slab_bytes: int,
        begun: tuple[bytes, bytes] = NOT_BEGUN,
    ):
        """begun: first and last bytes of the only slab, which the file has from the moment it has its name."""
        self._storage, self._name = storage, writer + RING
        self.sequence = 0  # sequence number of the latest slab
        packed = pack(layout)
        first = -(-(_HEADER_BYTES + len(packed)) // _PAGE) * _PAGE
        slab_bytes = -(-slab_bytes // _PAGE) * _PAGE
        size = first + slabs * slab_bytes
        numbers = kind, slabs, slab_bytes, first, len(packed), crc32(packed)
        header = _HEADER.pack(wire.RING_MAGIC, MAJOR, MINOR, 0, os.urandom(16), BOOT_ID, *numbers)
        content = header + _CRC.pack(crc32(header)) + packed
        start, end = begun
        if start:
            content = content.ljust(first, b"\0") + start
        self._mapping: Mapping | None = None
        self.shortage: OSError | None = None
        try:
            if any(BOOT_ID):  # otherwise a ring from before a power failure would be read
                self._mapping = storage.map(self._name, content, size, end)
        except OSError as error:
            if error.errno not in NO_DESCRIPTORS:
                raise
            self.shortage = error
        self.mapped = self._mapping is not None
        memory = memoryview(bytearray(size)) if self._mapping is None else self._mapping.memory
        if self._mapping is None:
            memory[: len(content)], memory[size - len(end) :] = content, end
        self.slabs = [memory[first + i * slab_bytes : first + (i + 1) * slab_bytes] for i in range(slabs)]

    def next_slab(self) -> tuple[memoryview, int]:
        """Return the memory of the next slab and its new sequence number."""
        self.sequence += 1
        return self.slabs[self.sequence % len(self.slabs)], self.sequence

    def remove(self) -> None:
        """Delete the file: all its content is in batches. Raises OSError."""
        self.abandon()
        with contextlib.suppress(FileNotFoundError):  # no file, or one from an earlier ring
            self._storage.remove(self._name)

    def abandon(self) -> None:
        """Close the file without deleting it. The memory stays valid as long as it is referenced."""
        self.slabs = []
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None


def begin(slab: memoryview, sequence: int) -> None:
    """Empty a slab and set its sequence number, which invalidates its old content."""
    slab[SLAB_HEADER : SLAB_HEADER + 64] = bytes(64)  # clears the first log entry of a RowSlab; LaneSlab clears its own
    _SEQUENCE.pack_into(slab, 0, sequence)


class RingHeader(NamedTuple):
    """Header of a ring file.

    Attributes:
        kind: ROWS or LANES.
        slab_bytes: size of each slab.
        offsets: of the slabs.
    """

    kind: int
    layout: dict[str, Any]
    slab_bytes: int
    offsets: range


def read_header(file: Reader) -> RingHeader | None:
    """Read the header of a ring file; return None if it is empty, or from before a reboot: the ring is then unusable.

    Raises CorruptTrace, UnsupportedTrace.
    """
    raw = file.read(0, _HEADER_BYTES)
    if not any(raw[:8]):
        return None
    if len(raw) < _HEADER_BYTES or raw[:8] != wire.RING_MAGIC or crc32(raw[:-4]) != _CRC.unpack(raw[-4:])[0]:
        raise CorruptTrace("checksum mismatch in the header of a ring")
    _, major, _, features, _, boot, kind, count, slab_bytes, first, length, crc = _HEADER.unpack(raw[:-4])
    if major != MAJOR or features or kind not in (ROWS, LANES):
        raise UnsupportedTrace(f"ring of version {major}, features {features:#x}, kind {kind}; upgrade gym-trace")
    if count > MOST_SLABS or not SLAB_HEADER < slab_bytes <= MOST_SLAB_BYTES or length > MOST_LAYOUT:
        raise CorruptTrace("ring declares sizes beyond the limits")
    end = first + count * slab_bytes
    if first < _HEADER_BYTES + length or end > file.size:
        raise CorruptTrace("ring larger than its file")
    if boot != BOOT_ID:
        return None
    packed = file.read(_HEADER_BYTES, length)
    layout = unpack(packed) if crc32(packed) == crc else None
    if not isinstance(layout, dict):
        raise CorruptTrace("checksum mismatch in the layout of a ring")
    return RingHeader(kind, layout, slab_bytes, range(first, end, slab_bytes))


def sequence_of(file: Reader, offset: int) -> int:
    """Return the sequence number of the slab at an offset of a ring file."""
    return int(_SEQUENCE.unpack(file.read(offset, _SEQUENCE.size))[0])
