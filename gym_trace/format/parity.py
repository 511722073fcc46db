"""Parity of a sealed batch: damaged bytes are computed again from the intact ones (docs/FORMAT.md, section 4).

The bytes before the parity record are cut into blocks, and `groups` consecutive blocks are a stripe. Block i belongs to
group i % groups; the parity block of a group is the XOR of its blocks. One damaged block in each group can be restored,
and so can any one damaged stretch of up to Shape.stretch bytes. Checksums of the blocks tell which ones are damaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from gym_trace.errors import CorruptTrace
from gym_trace.format.kernels import crc32
from gym_trace.model.values import Array
from gym_trace.storage.protocol import Reader

LARGEST_BLOCK, SMALLEST_BLOCK = 4096, 64  # bytes; a sector of a disk, and a header
_STRIPES = 48  # stripes of a large batch: its parity takes 1/48 of its size
_FEWEST_GROUPS = 4
CHECKSUM = np.dtype("<u4")


class Shape(NamedTuple):
    """How the bytes of a batch are divided.

    Attributes:
        covered: bytes before the parity record, which it protects.
        block: bytes of a block.
        groups: number of groups, and of parity blocks.
    """

    covered: int
    block: int
    groups: int

    @property
    def blocks(self) -> int:
        return -(-self.covered // self.block)

    @property
    def stripe(self) -> int:
        """Bytes of a stripe, and of all parity blocks."""
        return self.block * self.groups

    @property
    def stretch(self) -> int:
        """Length of the longest damaged stretch that can be restored wherever it begins."""
        return (self.groups - 1) * self.block + 1

    def is_plausible(self, size: int) -> bool:
        """Return True if a batch of this size can have parity of this shape. The numbers are untrusted."""
        sound = 0 < self.covered <= size and SMALLEST_BLOCK <= self.block <= LARGEST_BLOCK and self.groups > 0
        return sound and self.stripe + self.blocks * CHECKSUM.itemsize <= size - self.covered


def shape_for(covered: int) -> Shape:
    """Return the shape for this many bytes: about 2 % of a large batch, a few more per cent of a small one."""
    wanted = covered // (_STRIPES * _FEWEST_GROUPS)
    block = min(LARGEST_BLOCK, max(SMALLEST_BLOCK, 1 << (wanted - 1).bit_length() if wanted > 1 else 1))
    blocks = -(-covered // block)
    return Shape(covered, block, min(blocks, max(_FEWEST_GROUPS, -(-blocks // _STRIPES))))


class Parity(NamedTuple):
    """Parity blocks and checksums of a batch.

    Attributes:
        blocks: uint8, shape (stripe,). They are turned: the first is that of the group after the last data block, so
            that a stretch of damage across the end of the data never hits one group twice.
        checksums: CRC-32 of each block of data; the last block may be short.
    """

    blocks: Array
    checksums: Array


def parity_of(file: Reader, shape: Shape) -> Parity:
    """Compute the parity of the first shape.covered bytes of a file. Raises CorruptTrace if it is too short."""
    total, checksums = np.zeros(shape.stripe, np.uint8), []
    for stripe in _stripes(file, shape):
        _xor(total, stripe)
        checksums += [crc32(stripe[at : at + shape.block].data) for at in range(0, len(stripe), shape.block)]
    return Parity(np.roll(total, -(shape.blocks % shape.groups) * shape.block), np.array(checksums, CHECKSUM))


class Healed(NamedTuple):
    """What parity makes of the damage in a batch.

    Attributes:
        blocks: restored bytes, by their offset in the file.
        hopeless: offsets of the damaged blocks that could not be restored.
    """

    blocks: dict[int, bytes]
    hopeless: list[int]


def heal(file: Reader, shape: Shape, parity: Parity) -> Healed:
    """Find the damaged blocks of a batch and restore them. Takes memory for the restored blocks and a few stripes."""
    bad = [
        number
        for first, stripe in zip(range(0, shape.blocks, shape.groups), _stripes(file, shape))
        for number, at in enumerate(range(0, len(stripe), shape.block), first)
        if crc32(stripe[at : at + shape.block].data) != parity.checksums[number]
    ]
    alone = {number % shape.groups: number for number in bad}
    counts = np.bincount([number % shape.groups for number in bad], minlength=shape.groups)
    hopeless = [number for number in bad if counts[number % shape.groups] > 1]
    total = np.roll(parity.blocks, (shape.blocks % shape.groups) * shape.block)
    for stripe in _stripes(file, shape) if len(hopeless) < len(bad) else ():
        _xor(total, stripe)
    blocks = {}
    for group, number in alone.items():
        if counts[group] > 1:
            continue
        offset = number * shape.block
        length = min(shape.block, shape.covered - offset)
        damaged = np.zeros(shape.block, np.uint8)
        damaged[:length] = np.frombuffer(file.read(offset, length), np.uint8)
        restored = (total[group * shape.block : (group + 1) * shape.block] ^ damaged)[:length].tobytes()
        if crc32(restored) == parity.checksums[number]:
            blocks[offset] = restored
        else:
            hopeless.append(number)
    return Healed(blocks, sorted(number * shape.block for number in hopeless))


class HealedReader:
    """A file with its restored blocks in place of the damaged ones; see gym_trace.storage.protocol.Reader."""

    def __init__(self, file: Reader, blocks: dict[int, bytes]):
        self._file, self._blocks, self.size = file, blocks, file.size

    def read(self, offset: int, length: int) -> bytes:
        data = self._file.read(offset, length)
        if not self._touched(offset, len(data)):
            return data
        changed = bytearray(data)
        self._patch(offset, memoryview(changed))
        return bytes(changed)

    def read_into(self, offset: int, out: memoryview) -> int:
        count = self._file.read_into(offset, out)
        self._patch(offset, out[:count])
        return count

    def _touched(self, offset: int, length: int) -> list[int]:
        return [at for at, block in self._blocks.items() if at < offset + length and offset < at + len(block)]

    def _patch(self, offset: int, data: memoryview) -> None:
        for at in self._touched(offset, len(data)):
            block = self._blocks[at]
            begin, end = max(at, offset), min(at + len(block), offset + len(data))
            data[begin - offset : end - offset] = block[begin - at : end - at]

    def __enter__(self) -> HealedReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(None, None, None)


def _stripes(file: Reader, shape: Shape) -> Iterator[Array]:
    """Yield the data a stripe at a time; the last one may be short. The array is reused."""
    room = np.empty(shape.stripe, np.uint8)
    for offset in range(0, shape.covered, shape.stripe):
        wanted = room[: min(shape.stripe, shape.covered - offset)]
        if file.read_into(offset, wanted.data) != len(wanted):
            raise CorruptTrace("shorter than its parity says")
        yield wanted


def _xor(total: Array, stripe: Array) -> None:
    whole = len(stripe) & ~7
    total[:whole].view(np.uint64)[...] ^= stripe[:whole].view(np.uint64)
    total[whole : len(stripe)] ^= stripe[whole:]
