"""Restore damaged bytes of a batch from its parity (docs/FORMAT.md, section 4).

Parity may replace only bytes that fail their own check: the checksum of a header, of metadata or of a column, or zeros
in padding. Intact bytes are never replaced.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from gym_trace.errors import CorruptTrace, UnsupportedTrace
from gym_trace.format import wire
from gym_trace.format.kernels import crc32
from gym_trace.format.parity import HealedReader, Parity, StoredParity, group_digest, parity_of
from gym_trace.format.records import SCAN_BLOCK, columns_of, gaps_of, header_at, metadata_of, next_record
from gym_trace.storage.protocol import Reader


class Healed(NamedTuple):
    """Result of heal().

    Attributes:
        blocks: restored bytes, by their offset in the file.
        hopeless: offsets of damaged blocks that could not be restored.
        contradicts: True if the parity contradicts intact data; then nothing is restored.
        parity: parity of the file as it is.
    """

    blocks: dict[int, bytes]
    hopeless: list[int]
    contradicts: bool
    parity: Parity


def heal(file: Reader, stored: StoredParity) -> Healed:
    """Find the damaged bytes of a batch and restore them. Takes memory for the restored blocks and a few stripes."""
    shape, end = stored.shape, file.size - len(stored.footer)
    found = parity_of(file, shape)
    footer = {} if file.read(end, len(stored.footer)) == stored.footer else {end: stored.footer}
    # If the checksums of the data match their stored CRC, the data is intact: only the stored checksums may be damaged.
    is_intact = stored.crcs is not None and crc32(found.checksums.data) == stored.crcs[1]
    bad: list[int] = np.flatnonzero(not is_intact and found.checksums != stored.parity.checksums).tolist()
    groups = {number % shape.groups for number in bad}
    contradicts = bool(stored.parity.digests) and any(
        found.digest(group) != stored.parity.digest(group) for group in range(shape.groups) if group not in groups
    )
    candidates = _candidates(file, stored, found, bad)
    restored = HealedReader(file, candidates)
    starts = [number * shape.block for number in bad]
    accepted: dict[int, bytes] = {}
    failing, hopeless = set[int](), set[int]()
    for part in _checked_ranges(file, restored, stored) if bad else ():
        first = bisect_left(starts, part.start - shape.block + 1)
        touched = starts[first : bisect_left(starts, part.end)]
        if not touched:
            continue
        changed = dict[int, bytes]()
        for at in touched:
            start, stop = max(at, part.start), min(at + shape.block, part.end)
            new = candidates.get(at, b"")[start - at : stop - at]
            if new and new != file.read(start, len(new)):
                changed[start] = new
        if part.is_right(file):
            contradicts = contradicts or bool(changed)
            continue
        failing.update(touched)
        if changed and part.is_right(restored):
            accepted |= changed
        else:
            hopeless.update(touched)
    # A sound record has the recorded checksums. If they differ from an intact block, the parity contradicts it.
    if contradicts or (stored.is_sound and not failing.issuperset(starts)):
        return Healed({}, sorted(failing), True, found)
    return Healed(accepted | footer, sorted(hopeless), False, found)


def _candidates(file: Reader, stored: StoredParity, found: Parity, bad: list[int]) -> dict[int, bytes]:
    """Compute the bad blocks from parity; return those with the recorded checksum and digest, by offset."""
    shape, parity = stored.shape, stored.parity
    counts = np.bincount(np.array(bad, np.int64) % shape.groups, minlength=shape.groups)
    difference = np.roll(parity.blocks ^ found.blocks, shape.rotation)  # recorded XOR damaged bytes, per group
    candidates = dict[int, bytes]()
    for number in bad:
        offset, group = number * shape.block, number % shape.groups
        damaged = np.frombuffer(file.read(offset, min(shape.block, shape.covered - offset)), np.uint8)
        block = (damaged ^ difference[group * shape.block :][: len(damaged)]).tobytes()
        if counts[group] > 1 or crc32(block) != parity.checksums[number]:
            continue
        known = parity.digest(group) if parity.digests else None
        if known is None or known == group_digest(HealedReader(file, {offset: block}), shape, group):
            candidates[offset] = block
    return candidates


class _CheckedRange(NamedTuple):
    """A range of bytes of a batch, and the function that checks it."""

    start: int
    end: int
    is_right: Callable[[Reader], bool]


def _checked_ranges(file: Reader, restored: Reader, stored: StoredParity) -> Iterator[_CheckedRange]:
    """Yield the checked ranges of a batch, in order. A restored header or metadata stands in for a damaged one.

    A record with a restored header must end before the next record that is intact in the file.
    """
    covered, file_id = stored.shape.covered, stored.footer[24:40]
    yield _CheckedRange(0, wire.HEADER_SIZE, lambda reader: _has_file_header(reader, file_id))
    at = limit = wire.HEADER_SIZE
    while at < covered:
        header = header_at(file, at, file_id)
        if header is None or header.end > covered:
            if at >= limit:
                limit = min(covered, next_record(file, at + 8, file_id)[0] or covered)
            header = header_at(restored, at, file_id)
            if header is None or header.end > limit:
                yield _CheckedRange(at, limit, _unknown)
                at = limit
                continue
        yield _header_range(header, file_id)
        yield from _ranges_of(header, file, restored)
        at = header.end


def _header_range(header: wire.RecordHeader, file_id: bytes) -> _CheckedRange:
    at = header.offset
    return _CheckedRange(at, at + wire.HEADER_SIZE, lambda reader: header_at(reader, at, file_id) == header)


def _ranges_of(header: wire.RecordHeader, file: Reader, restored: Reader) -> Iterator[_CheckedRange]:
    """Yield the checked ranges of a record after its header."""
    yield _checked(header.offset + wire.HEADER_SIZE, header.metadata_length, header.metadata_crc)
    for reader in (file, restored):
        with suppress(CorruptTrace, UnsupportedTrace):
            metadata = metadata_of(reader, header)
            columns = [] if header.type == wire.SCHEMA else list(columns_of(header, metadata))
            yield from (_checked(at, column.stored, column.crc) for column, at in columns)
            yield from (_CheckedRange(start, end, _zeros(start, end)) for start, end in gaps_of(header, columns))
            return
    yield _CheckedRange(header.offset + wire.HEADER_SIZE + header.metadata_length, header.end, _unknown)


def _unknown(_: Reader) -> bool:
    return False


def _has_file_header(reader: Reader, file_id: bytes) -> bool:
    with suppress(CorruptTrace, UnsupportedTrace):
        return wire.unpack_file_header(reader.read(0, wire.HEADER_SIZE)).file_id == file_id
    return False


def _checked(start: int, length: int, crc: int) -> _CheckedRange:
    """Return a range that is checked by a CRC."""

    def is_right(reader: Reader) -> bool:
        computed = 0
        for block in _blocks(reader, start, start + length):
            computed = crc32(block, computed)
        return computed == crc

    return _CheckedRange(start, start + length, is_right)


def _zeros(start: int, end: int) -> Callable[[Reader], bool]:
    return lambda reader: not any(map(any, _blocks(reader, start, end)))


def _blocks(reader: Reader, start: int, end: int) -> Iterator[bytes]:
    return (reader.read(at, min(SCAN_BLOCK, end - at)) for at in range(start, end, SCAN_BLOCK))
