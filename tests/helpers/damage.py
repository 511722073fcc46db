"""Damage files of a trace."""

import json
from pathlib import Path
from zlib import crc32

from gym_trace.format import wire
from gym_trace.format.parity import Shape, parity_of, parity_record, shape_for
from gym_trace.storage.memory import MemoryReader


def flip(path: Path | str, *places: int, mask: int = 0x10) -> None:
    """Invert bits of a file at each of these places; of a batch, beyond what parity restores."""
    path = Path(path)
    if path.suffix == ".gtb":
        strip_parity(path)
    data = bytearray(path.read_bytes())
    for place in places:
        data[place] ^= mask
    path.write_bytes(data)


def strip_parity(batch: Path) -> None:
    """Make a sealed batch one of an older release, without parity; its manifest knows its size and checksum."""
    data = batch.read_bytes()
    file_id = data[16:32]
    footer = wire.unpack_footer(data[-wire.HEADER_SIZE :], len(data), file_id)
    if footer is None or not footer.parity[0]:
        return
    end = footer.parity[0]
    stripped = data[:end] + wire.pack_footer(footer.index_offset, end + wire.HEADER_SIZE, file_id)
    batch.write_bytes(stripped)
    manifest = batch.with_name(batch.name.rpartition(".gtb")[0][:-7] + ".manifest.jsonl")
    if not manifest.exists():
        return
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    for line in lines:
        if line.get("file") == batch.name:
            line.update(bytes=len(stripped), crc32=crc32(stripped))
    manifest.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def with_parity(
    data: bytes, said: bytes, block: int | None = None, groups: int = 0, digests: bytes | None = None
) -> bytes:
    """Return a batch with the parity of other bytes of its length.

    Args:
        block, groups: shape of the parity; None: the one that writers choose.
        digests: of its groups; None: those of the other bytes; empty: none, as older releases wrote it.
    """
    file_id = data[16:32]
    footer = wire.unpack_footer(data[-wire.HEADER_SIZE :], len(data), file_id)
    assert footer is not None
    end = footer.parity[0]
    header = wire.unpack_record_header(data[end : end + wire.HEADER_SIZE], end, file_id)
    assert header is not None
    shape = shape_for(end) if block is None else Shape(end, block, groups)
    parity = parity_of(MemoryReader(said), shape)
    if digests is not None:
        parity = parity._replace(digests=digests)
    record = parity_record(shape, parity, footer.index_offset, header.sequence, file_id)
    size = end + len(record) + wire.HEADER_SIZE
    return data[:end] + record + wire.pack_footer(footer.index_offset, size, file_id, shape)
