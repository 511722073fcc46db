"""Damage files of a trace."""

from __future__ import annotations

import json
from pathlib import Path
from zlib import crc32

from gym_trace.format import wire


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
