"""Take a batch file apart and rebuild it with valid checksums, as an attacker would."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from gym_trace.data.packing import pack, unpack
from gym_trace.format import manifest as manifests
from gym_trace.format import wire
from gym_trace.format.columns import ColumnEncoder, Workspace, decode, parse_column
from gym_trace.format.listed_index import index_text

PATH, DTYPE, SHAPE, ROWS, ENCODING, STORED, RAW, CRC = range(8)  # fields of a column descriptor


@dataclass
class Record:
    kind: int
    metadata: dict[str, Any]
    blobs: list[bytes]
    flags: int = 0
    claims: dict[str, int] = field(default_factory=dict)  # false values for the header
    fragments: Any = None  # index rows of a chunk

    @property
    def columns(self) -> dict[tuple[Any, ...], int]:
        """Positions of the columns, by path."""
        return {tuple(descriptor[PATH]): i for i, descriptor in enumerate(self.metadata.get("columns", []))}

    def describe(self, path: tuple[Any, ...], /, **changes: Any) -> None:
        """Change the descriptor of a column."""
        for name, value in changes.items():
            self.metadata["columns"][self.columns[path]][globals()[name.upper()]] = value

    def store(self, path: tuple[Any, ...], blob: bytes, /, **changes: Any) -> None:
        """Replace the bytes of a column, with a valid checksum."""
        self.blobs[self.columns[path]] = blob
        self.describe(path, stored=len(blob), crc=crc32(blob), **changes)

    def table(self, name: str, dtype: np.dtype[Any]) -> Any:
        place = self.columns[(name,)]
        return decode(parse_column(self.metadata["columns"][place]), self.blobs[place]).view(dtype)

    def put_table(self, name: str, table: Any) -> None:
        place = self.columns[(name,)]
        column, self.blobs[place] = ColumnEncoder((name,), Workspace(1)).encode(np.ascontiguousarray(table))
        self.metadata["columns"][place] = column.descriptor()

    def drop_column_table(self) -> None:
        """Remove the tables of columns from an index, as that of a trace before format 1.3."""
        for path in (("columns",), ("blocks",)):
            if (place := self.columns.get(path)) is not None:
                del self.metadata["columns"][place], self.blobs[place]
        self.metadata.pop("forms", None)

    def change_fragments(self, change: Callable[[Any], Any]) -> None:
        self.fragments = change(self.table("fragments", wire.FRAGMENT))
        self.put_table("fragments", self.fragments)


@dataclass
class Forgery:
    """Records of a batch."""

    file_id: bytes
    number: int
    records: list[Record]
    sealed: bool

    @property
    def chunks(self) -> list[Record]:
        return [record for record in self.records if record.kind == wire.CHUNK]

    @property
    def index(self) -> Record:
        return next(record for record in self.records if record.kind == wire.INDEX)

    def without_index(self) -> Forgery:
        self.records = [record for record in self.records if record.kind != wire.INDEX]
        self.sealed = False
        return self

    def data(self, reindexed: bool = True) -> bytes:
        """Return the file. reindexed: rebuild the index from the current chunks."""
        data = bytearray(wire.pack_file_header(self.file_id, self.number))
        places, tables, index_at = [], [], 0
        for sequence, record in enumerate(self.records):
            start = len(data)
            if record.kind == wire.INDEX:
                index_at = start
                if reindexed:
                    record.drop_column_table()
                    record.put_table("fragments", np.concatenate(tables))
                    record.put_table("chunks", np.array(places, wire.CHUNK_ENTRY))
            metadata = pack(record.metadata)
            pieces = wire.pack_record(
                record.kind, metadata, [[blob] for blob in record.blobs], start, sequence, self.file_id, record.flags
            )  # fmt: skip
            if record.claims:
                pieces[0] = _claiming(bytes(pieces[0]), record.claims)
            data += b"".join(pieces)
            if record.kind == wire.CHUNK and reindexed and self.sealed:
                table = record.fragments
                rows = sum(table["steps"].tolist()) + int(np.count_nonzero(table["flags"] & wire.HAS_INITIAL))
                places.append((start, len(data) - start, len(table), rows))
                tables.append(table)
        if self.sealed:
            data += wire.pack_footer(index_at, len(data) + wire.HEADER_SIZE, self.file_id)
        return bytes(data)


def replace_batch(path: Path, forgery: Forgery) -> None:
    """Write a sealed batch, and what its manifest says of it, with valid checksums."""
    data, size = forgery.data(), wire.HEADER_SIZE
    path.write_bytes(data)
    footer = wire.unpack_footer(data[-size:], len(data), forgery.file_id)
    assert footer is not None
    start = footer.index_offset
    index = index_text(path.name, [data[start : start + size], data[start + size : -size]])
    schema = {name: value for name, value in forgery.records[0].metadata.items() if name != "batch"}
    manifest = path.with_name(f"{path.name.split('.')[0]}.manifest.jsonl")
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    lines[0] = {"type": "writer", **schema, "crc32": crc32(pack(schema))}
    for line in lines:
        if line.get("file") == path.name:
            line.update(bytes=len(data), crc32=crc32(data), index=index)
    manifest.write_bytes(b"".join(map(manifests.line, lines)))


_FIELDS = {"type": (8, 2), "flags": (10, 2), "metadata_length": (12, 4), "body_length": (16, 8)}


def _claiming(header: bytes, claims: dict[str, int]) -> bytes:
    for name, value in claims.items():
        at, size = _FIELDS[name]
        header = header[:at] + value.to_bytes(size, "little") + header[at + size :]
    return header[:60] + crc32(header[:60]).to_bytes(4, "little")


def taken_apart(path: Path) -> Forgery:
    data = path.read_bytes()
    header = wire.unpack_file_header(data[: wire.HEADER_SIZE])
    records, offset = [], wire.HEADER_SIZE
    while raw := wire.unpack_record_header(data[offset : offset + wire.HEADER_SIZE], offset, header.file_id):
        start = offset + wire.HEADER_SIZE
        metadata = unpack(data[start : start + raw.metadata_length])
        blobs, at = [], raw.body_offset
        for descriptor in metadata.get("columns", []):
            blobs.append(data[at : at + descriptor[STORED]])
            at += wire.aligned(descriptor[STORED])
        record = Record(raw.type, metadata, blobs, raw.flags)
        if raw.type == wire.CHUNK:
            record.fragments = record.table("fragments", wire.FRAGMENT)
        if raw.type != wire.PARITY:  # parity of other bytes would be wrong
            records.append(record)
        offset = raw.end
    return Forgery(header.file_id, header.batch, records, offset < len(data))
