"""Parity of a sealed batch: it restores damaged bytes from the intact ones (docs/FORMAT.md, section 4).

The bytes before the parity record are cut into blocks, and `groups` consecutive blocks are a stripe. Block i belongs to
group i % groups; the parity block of a group is the XOR of its blocks. One damaged block in each group can be restored,
and so can any one damaged stretch of up to Shape.stretch bytes. Checksums of the blocks show which ones are damaged.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.packing import pack, unpack
from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace
from gym_trace.format import kernels, wire
from gym_trace.format.columns import ColumnDescriptor
from gym_trace.format.kernels import crc32
from gym_trace.storage.protocol import Reader

LARGEST_BLOCK, SMALLEST_BLOCK = 4096, 64  # bytes: a disk sector; a header
_STRIPES = 48  # stripes of a large batch: its parity takes 1/48 of its size
_FEWEST_GROUPS = 4
_SECTOR = 4096  # bytes; every batch survives a damaged stretch of this length
_SMALLEST_CHOSEN = 256  # bytes; writers choose no smaller block
CHECKSUM = np.dtype("<u4")
_MOST_BLOCKS = 1 << 22
_PIECE_BYTES = 128 << 10  # limit of a piece, which stays in the processor's cache between its passes
_LEAST_SHARE = 4 << 20  # bytes of a batch per thread that computes its parity
_SEARCHED = 64 << 10  # bytes at the end of a batch that are searched for its parity record
DIGEST = 16  # bytes of the digest of a group
_HASHED = 128  # bytes that BLAKE2b hashes at once
_MOST_DIGESTS = 4000  # groups; with more, the metadata of the record would exceed _SEARCHED


class Shape(NamedTuple):
    """Division of the bytes of a batch into blocks and groups.

    Attributes:
        covered: number of bytes before the parity record: the protected ones.
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
    def rotation(self) -> int:
        """Bytes by which parity blocks are rotated; see Parity."""
        return self.blocks % self.groups * self.block

    @property
    def stretch(self) -> int:
        """Length of the longest damaged stretch that can be restored wherever it begins."""
        return (self.groups - 1) * self.block + 1

    def divided(self, most: int) -> list[range]:
        """Divide the groups among up to `most` threads, if the batch is large."""
        count = max(1, min(most, self.groups, self.covered // _LEAST_SHARE))
        bounds = [self.groups * i // count for i in range(count + 1)]
        return [range(begin, end) for begin, end in pairwise(bounds)]

    def is_plausible(self, size: int) -> bool:
        """Return True if a batch of this size can have parity of this shape. The numbers are untrusted."""
        sound = 0 < self.covered <= size and SMALLEST_BLOCK <= self.block <= LARGEST_BLOCK and self.groups > 0
        return (
            sound
            and self.blocks <= _MOST_BLOCKS
            and wire.aligned(self.stripe) + self.blocks * CHECKSUM.itemsize <= size - self.covered
        )


def shape_for(covered: int) -> Shape:
    """Return the shape for a batch of `covered` bytes: parity of about 2 %, in a small batch enough for one sector.

    If a batch has fewer blocks than groups, the parity blocks of the empty groups come first, right after the data.
    """
    wanted = covered // (_STRIPES * _FEWEST_GROUPS)
    block = min(LARGEST_BLOCK, max(_SMALLEST_CHOSEN, 1 << (wanted - 1).bit_length() if wanted > 1 else 1))
    large, small = -(-covered // (block * _STRIPES)), -(-(_SECTOR - 1) // block) + 1
    return Shape(covered, block, max(_FEWEST_GROUPS, large, small))


class Parity(NamedTuple):
    """Parity blocks and checksums of a batch.

    Attributes:
        blocks: uint8, shape (stripe,). They are rotated: the first belongs to the group after that of the last data
            block. So a damaged stretch across the end of the data never hits one group twice.
        checksums: CRC-32 of each block of data; the last block may be short.
        digests: BLAKE2b of the blocks of each group, DIGEST bytes each; empty: unknown. A CRC can be forged, a digest
            cannot.
    """

    blocks: Array
    checksums: Array
    digests: bytes = b""

    def digest(self, group: int) -> bytes:
        return self.digests[group * DIGEST : (group + 1) * DIGEST]


class ParityPart(NamedTuple):
    """Parity of some groups of a batch; see Parity.

    Attributes:
        blocks: not rotated.
        checksums: shape (stripes, groups); 0 after the end of the data.
    """

    blocks: Array
    checksums: Array
    digests: bytes


def parity_of(file: Reader, shape: Shape) -> Parity:
    """Compute the parity of the first shape.covered bytes of a file. Raises CorruptTrace if it is too short."""
    return joined_parity([parity_part(file, shape, range(shape.groups))], shape)


def parity_part(file: Reader, shape: Shape, groups: range) -> ParityPart:
    """Compute the parity of consecutive groups. Raises CorruptTrace like parity_of()."""
    total = np.zeros(len(groups) * shape.block, np.uint8)
    checksums = np.zeros((-(-shape.covered // shape.stripe), len(groups)), CHECKSUM)
    digests = _Digests(shape, groups) if shape.groups <= _MOST_DIGESTS else None
    for stripe, begin, piece in _pieces(file, shape, groups):
        _xor(total[begin:], piece)
        first = begin // shape.block
        blocks = [piece.data[at : at + shape.block] for at in range(0, len(piece), shape.block)]
        checksums[stripe, first : first + len(blocks)] = list(map(crc32, blocks))
        if digests is not None:
            digests.add(stripe, first, piece, blocks)
    return ParityPart(total, checksums, b"" if digests is None else digests.joined())


class _Digests:
    """Digests of consecutive groups: by hashlib, or by the C module, which hashes four groups at once."""

    def __init__(self, shape: Shape, groups: range):
        self._shape, self._groups = shape, groups
        self._hashes = [blake2b(digest_size=DIGEST) for _ in groups]
        self._states: Array | None = None
        if kernels.hash_blocks is not None and shape.block % _HASHED == 0:
            self._states = np.zeros((len(groups), 8), "<u8")
            empty = slice(max(0, shape.blocks - groups.start), None)  # groups without a block
            self._states[empty, :2] = np.frombuffer(blake2b(digest_size=DIGEST).digest(), "<u8")

    def add(self, stripe: int, first: int, piece: Array, blocks: list[memoryview]) -> None:
        """Add the blocks of a piece, of the groups from the index `first` on."""
        if self._states is None:
            for digest, block in zip(self._hashes[first:], blocks):
                digest.update(block)
            return
        shape, states = self._shape, self._states[first : first + len(blocks)]
        last = shape.blocks - (stripe + 1) * shape.groups - self._groups.start - first
        kernels.hash_blocks(states, piece, shape.block, stripe * shape.block, max(0, last))

    def joined(self) -> bytes:
        """Return the digests, one after the other."""
        if self._states is not None:
            return self._states[:, : DIGEST // 8].tobytes()
        return b"".join(digest.digest() for digest in self._hashes)


def joined_parity(parts: Sequence[ParityPart], shape: Shape) -> Parity:
    """Join the parity of all groups, in order."""
    blocks, checksums = (
        np.concatenate(arrays, axis=-1) for arrays in ([p.blocks for p in parts], [p.checksums for p in parts])
    )
    digests = b"".join(part.digests for part in parts)
    return Parity(np.roll(blocks, -shape.rotation), checksums.reshape(-1)[: shape.blocks], digests)


def group_digest(file: Reader, shape: Shape, group: int) -> bytes:
    """Return the digest of the blocks of one group."""
    digest = blake2b(digest_size=DIGEST)
    for offset in range(group * shape.block, shape.covered, shape.stripe):
        digest.update(file.read(offset, min(shape.block, shape.covered - offset)))
    return digest.digest()


class StoredParity(NamedTuple):
    """The parity record of a batch.

    Attributes:
        footer: the footer after the record.
        crcs: CRCs of the parity blocks and of the checksums; None: unknown.
    """

    shape: Shape
    parity: Parity
    footer: bytes
    crcs: tuple[int, int] | None = None

    @property
    def is_sound(self) -> bool:
        """True if the record matches its own checksums: it is undamaged."""
        return self.crcs == (crc32(self.parity.blocks.data), crc32(self.parity.checksums.data))


def stored_parity(file: Reader, file_id: bytes) -> StoredParity | None:
    """Find the parity record of a sealed batch by its footer, or by a search; None: missing or damaged."""
    raw = file.read(file.size - wire.HEADER_SIZE, wire.HEADER_SIZE)
    footer = wire.unpack_footer(raw, file.size, file_id)
    if footer is None:
        footer = _footer_by_record(file, file_id)
    shape = Shape(*footer.parity)
    if not shape.is_plausible(file.size):
        return None
    header = wire.unpack_record_header(file.read(shape.covered, wire.HEADER_SIZE), shape.covered, file_id)
    if header is not None and (header.type != wire.PARITY or header.end + wire.HEADER_SIZE != file.size):
        return None
    # The body can be found without the header, because its length follows from the shape.
    length = wire.aligned(shape.stripe) + wire.aligned(shape.blocks * CHECKSUM.itemsize)
    body = file.read(header.body_offset if header else file.size - wire.HEADER_SIZE - length, length)
    if len(body) < length:
        return None
    checksums = np.frombuffer(body, CHECKSUM, shape.blocks, wire.aligned(shape.stripe))
    packed = wire.pack_footer(footer.index_offset, file.size, file_id, shape)
    crcs: tuple[int, int] | None = None
    digests = b""
    if header is not None:
        match metadata := _metadata(file, header):
            case {"columns": [[*_, int(blocks_crc)], [*_, int(checksums_crc)]]}:
                crcs = blocks_crc, checksums_crc
        match metadata:
            case {"digests": bytes(known)}:
                digests = known
    return StoredParity(shape, Parity(np.frombuffer(body, np.uint8, shape.stripe), checksums, digests), packed, crcs)


def _footer_by_record(file: Reader, file_id: bytes) -> wire.Footer:
    """Return the parity fields of a damaged footer from the parity record; zeros if it is not found near the end."""
    begin = max(0, file.size - max(_SEARCHED, file.size >> 4)) & ~7
    tail = file.read(begin, file.size - begin)
    for at in reversed(wire.header_positions(tail, begin, file_id)):
        header = wire.unpack_record_header(tail[at : at + wire.HEADER_SIZE], begin + at, file_id)
        if header is None or header.type != wire.PARITY or header.end + wire.HEADER_SIZE != file.size:
            continue
        match _metadata(file, header):
            case {"block": int(block), "groups": int(groups), "index": int(index)} if 0 <= index < header.offset:
                return wire.Footer(index, file.size, (header.offset, block, groups))
    return wire.Footer(0, 0)


def _metadata(file: Reader, header: wire.RecordHeader) -> Any:
    """Return the metadata of a parity record; None if it is damaged."""
    raw = file.read(header.offset + wire.HEADER_SIZE, min(header.metadata_length, _SEARCHED))
    try:
        return unpack(raw) if crc32(raw) == header.metadata_crc else None
    except CorruptTrace:
        return None


def parity_record(shape: Shape, parity: Parity, index_offset: int, sequence: int, file_id: bytes) -> bytes:
    """Pack the parity record, which follows the bytes that it protects."""
    columns = [
        ColumnDescriptor(
            (name,), rows.dtype.str, (), len(rows), 0, rows.nbytes, rows.nbytes, crc32(rows.data)
        ).descriptor()
        for name, rows in (("parity", parity.blocks), ("checksums", parity.checksums))
    ]
    described = {"columns": columns, "block": shape.block, "groups": shape.groups, "index": index_offset}
    metadata = pack(described | ({"digests": parity.digests} if parity.digests else {}))
    blobs = [[parity.blocks.tobytes()], [parity.checksums.tobytes()]]
    record = wire.pack_record(wire.PARITY, metadata, blobs, shape.covered, sequence, file_id, wire.OPTIONAL)
    return b"".join(record)


def record_for(file: Reader, stored: StoredParity, parity: Parity) -> bytes | None:
    """Pack the record of this parity for a batch; return None if it would not fit, or the index is damaged."""
    file_id = stored.footer[24:40]
    footer = wire.unpack_footer(stored.footer, file.size, file_id)
    assert footer is not None  # it was packed by stored_parity()
    raw = file.read(footer.index_offset, wire.HEADER_SIZE)
    index = wire.unpack_record_header(raw, footer.index_offset, file_id)
    if index is None:
        return None
    for digests in (parity.digests, b""):  # older releases wrote none
        known = parity._replace(digests=digests)
        record = parity_record(stored.shape, known, index.offset, index.sequence + 1, file_id)
        if stored.shape.covered + len(record) + wire.HEADER_SIZE == file.size:
            return record
    return None


def is_right(stored: StoredParity, parity: Parity) -> bool:
    """Return True if a record is sound and matches the parity computed from its batch."""
    recorded = stored.parity
    is_same = np.array_equal(recorded.blocks, parity.blocks) and np.array_equal(recorded.checksums, parity.checksums)
    return is_same and recorded.digests in (b"", parity.digests) and stored.is_sound


class HealedReader:
    """A file whose damaged blocks are replaced by restored ones; see gym_trace.storage.protocol.Reader."""

    def __init__(self, file: Reader, blocks: dict[int, bytes]):
        self._file, self._blocks, self.size = file, blocks, file.size
        self._offsets = sorted(blocks)

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
        """Return the offsets of the blocks in a range. Blocks do not overlap."""
        first = max(0, bisect_right(self._offsets, offset) - 1)
        found = self._offsets[first : bisect_left(self._offsets, offset + length)]
        return [at for at in found if offset < at + len(self._blocks[at])]

    def _patch(self, offset: int, data: memoryview) -> None:
        for at in self._touched(offset, len(data)):
            block = self._blocks[at]
            begin, end = max(at, offset), min(at + len(block), offset + len(data))
            data[begin - offset : end - offset] = block[begin - at : end - at]

    def __enter__(self) -> HealedReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(None, None, None)


def _pieces(file: Reader, shape: Shape, groups: range) -> Iterator[tuple[int, int, Array]]:
    """Yield the data of groups in pieces of whole blocks: stripe, offset in its groups, bytes. All share one array."""
    first, end = groups.start * shape.block, groups.stop * shape.block
    buffer = np.empty(min(end - first, _PIECE_BYTES // shape.block * shape.block), np.uint8)
    for stripe, offset in enumerate(range(0, shape.covered, shape.stripe)):
        last = min(offset + end, shape.covered)
        for begin in range(offset + first, last, len(buffer)):
            wanted = buffer[: min(len(buffer), last - begin)]
            if file.read_into(begin, wanted.data) != len(wanted):
                raise CorruptTrace("shorter than its parity declares")
            yield stripe, begin - offset - first, wanted


def _xor(total: Array, stripe: Array) -> None:
    whole = len(stripe) & ~7
    total[:whole].view(np.uint64)[...] ^= stripe[:whole].view(np.uint64)
    total[whole : len(stripe)] ^= stripe[whole:]
