"""Write and read the episodes of a Minari dataset as arrow or parquet: one directory and one file per episode.

An episode is one record batch, because Minari takes each batch for an episode; long columns are gathered in scratch
files, not in memory. Actions, rewards and flags have one more row at the end, without meaning. In addition to Minari's
data, metadata.json has a key gym_trace, the identity of the episode, and for infos the file has a column gym_trace
with the output of packed().
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gym_trace.data.episode import Episode
from gym_trace.data.layout import PlainSpace
from gym_trace.data.values import Array
from gym_trace.errors import UnreadableRecording
from gym_trace.exchange.formats.foreign import read_json, widest
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.imported import NewEpisode
from gym_trace.exchange.formats.infos import PackedInfos, packed
from gym_trace.exchange.formats.minari.plan import FILE, MinariPlan, are_options
from gym_trace.exchange.formats.minari.reading import InfoRows, KnownSpaces, episode_of, spaces_in
from gym_trace.exchange.formats.minari.spaces import Name
from gym_trace.exchange.formats.parquet.tables import (
    batches,
    dtype_of,
    is_list,
    is_number,
    located,
    numbers_in,
    parquet_file,
    row_size,
    rows_at_a_time,
)
from gym_trace.exchange.formats.rows import custom
from gym_trace.exchange.formats.steps.windows import Window
from gym_trace.playback.row_types import RowType

_IN_MEMORY = 32 << 20  # bytes of a column of an episode; longer ones are gathered in a scratch file


class ArrowEpisodes:
    """Writes one directory per episode. count: episodes so far.

    Minari cannot read episodes without steps, so they are skipped.
    """

    def __init__(self, data: FilePath, plan: MinariPlan, kind: str):
        self.count = 0
        self._data, self._plan, self._kind = data, plan, kind
        self._scratch: list[FilePath] = []

    def begin(self, episode: Episode, identity: str) -> None:
        """Write the metadata of an episode, before its steps."""
        if not len(episode):
            return
        self._directory = self._data / str(self.count)
        self._directory.mkdir()
        metadata: dict[str, Any] = {"id": self.count, "total_steps": len(episode), KEY: identity}
        if episode.seed is not None:
            metadata["seed"] = episode.seed
        if episode.options is not None and are_options(episode.options, is_hdf5=False):
            metadata["options"] = episode.options
        (self._directory / FILE).write_text(json.dumps(metadata))
        rows = len(episode) + 1
        self._rows = [self._column(rows, column.form) for column in self._plan.columns]
        self._packed: list[bytes | None] = [None] * rows if self._plan.infos.need_packing else []

    def _column(self, rows: int, form: RowType | None) -> Any:
        """Return an array for the rows of an episode, the last of them 0; for text, a list of None."""
        if form is None:
            return [None] * rows
        if rows * math.prod(form.shape) * form.dtype.itemsize <= _IN_MEMORY:
            data: Array = np.empty((rows, *form.shape), form.dtype)
        else:
            self._scratch.append(self._data / f".{len(self._scratch)}.scratch")
            data = np.memmap(self._scratch[-1], form.dtype, "w+", shape=(rows, *form.shape))
        data[-1] = 0
        return data

    def add(self, window: Window) -> None:
        """Add steps of the current episode; write it after the last of them."""
        if not window.steps:
            return
        for column, array in zip(self._plan.columns, self._rows):
            rows, begin = column.rows(window), window.start + column.offset(window)
            array[begin : begin + len(rows)] = rows
        if self._packed:
            for first, data in packed(window.columns, window.start, window.steps, self._plan.infos):
                self._packed[first] = data
        if window.closes:
            self._write()

    def _write(self) -> None:
        named_rows = [(column.name, rows) for column, rows in zip(self._plan.columns, self._rows)]
        arrays, fields = _arrays(named_rows)
        if self._packed:
            arrays.append(pa.array(self._packed, pa.binary()))
            fields.append(pa.field(KEY, pa.binary()))
        batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
        path = str(self._directory / f"part-0.{self._kind}")
        if self._kind == "arrow":
            with pa.ipc.new_file(path, batch.schema) as file:
                file.write_batch(batch)
        else:
            with pq.ParquetWriter(path, batch.schema, use_dictionary=False, compression="zstd") as file:
                file.write_batch(batch, batch.num_rows)
        self.close()
        self.count += 1

    def close(self) -> None:
        """Remove the scratch files."""
        while self._scratch:
            self._scratch.pop().unlink(missing_ok=True)


def _arrays(columns: list[tuple[Name, Any]], in_infos: bool = False) -> tuple[list[pa.Array], list[pa.Field]]:
    """Return columns as arrays and their fields; those with longer names are in structs.

    Arrays of infos are lists, with their shape as metadata of the field, as Minari reads them.
    """
    arrays, fields = [], []
    for name, group in groupby(columns, key=lambda column: column[0][0]):
        members = [(path[1:], rows) for path, rows in group]
        metadata, rows = None, members[0][1]
        if members[0][0]:
            inner, inner_fields = _arrays(members, in_infos or name == "infos")
            arrays.append(pa.StructArray.from_arrays(inner, fields=inner_fields))
        elif isinstance(rows, list):
            arrays.append(pa.array(rows, pa.string()))
        elif rows.ndim == 1:
            arrays.append(pa.array(rows))
        else:
            arrays.append(pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), math.prod(rows.shape[1:])))
            metadata = {"shape": ",".join(map(str, rows.shape[1:]))} if in_infos else None
        fields.append(pa.field(name, arrays[-1].type, metadata=metadata))
    return arrays, fields


_DEEPEST = 32
_MAGIC_BYTES = 8  # before the first message of an Arrow file


class ArrowReader:
    """Reads the directories. known: its spaces. has_jpeg: images are JPEG."""

    def __init__(self, data: FilePath, kind: str, known: KnownSpaces, has_jpeg: bool):
        self._kind = kind
        paths = [path for path in data.iterdir() if path.name.isdecimal() and path.is_dir() and not path.is_symlink()]
        self._directories = sorted(paths, key=lambda path: int(path.name))
        if not self._directories:
            raise UnreadableRecording(f"{data}: no episodes")
        with self._opened(self._directories[0]) as file, located(file.path):
            self.spaces, self._columns = spaces_in(file, known, has_jpeg)

    def __len__(self) -> int:
        return len(self._directories)

    def _opened(self, directory: FilePath) -> _ArrowFile:
        metadata = read_json(directory / FILE) if (directory / FILE).is_file() else {}
        return _ArrowFile(directory / f"part-0.{self._kind}", metadata)

    def episodes(self) -> Iterator[NewEpisode]:
        """Yield the episodes. Raises UnreadableRecording."""
        for directory in self._directories:
            with self._opened(directory) as file, located(file.path):
                yield episode_of(file, *self._columns)


class _ArrowFile:
    """The file of an episode; see StoredEpisode. rows: their number, one more than steps.

    A row has an observation, its info and the action; the last row has no action.
    """

    def __init__(self, path: FilePath, attributes: dict[str, Any]):
        self.path, self.attributes = path, attributes
        self.part_of_tuple: Callable[[int], str] = str
        self._mapped: pa.MemoryMappedFile | None = None
        with located(path):
            if path.suffix == ".parquet":
                with parquet_file(path) as parquet:
                    self.rows = parquet.metadata.num_rows
                    self.schema: pa.Schema = parquet.schema_arrow
            else:
                self._mapped = pa.memory_map(str(path))
                with pa.ipc.open_file(self._mapped) as file:
                    self.schema = file.schema
                self.rows = sum(map(len, self._mapped_batches()))
            for name in ("observations", "actions", "rewards", "terminations", "truncations"):
                if name not in self.schema.names:
                    raise self.fault(f"has no column {name}")
            total_size = sum(row_size(field.type) for field in self.schema)
        self._rows_at_a_time = rows_at_a_time(total_size)
        if not self.rows:
            raise self.fault("no rows; even an episode without steps has one, for the reset")
        self.steps = self.rows - 1
        self._block: pa.RecordBatch | None = None
        self._first = 0  # row of the episode at which self._block begins
        self._unpacked = PackedInfos() if KEY in self.schema.names else None

    def __enter__(self) -> _ArrowFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._mapped is not None:
            self._mapped.close()

    def fault(self, problem: str) -> UnreadableRecording:
        """Return an error about the file."""
        return UnreadableRecording(f"{self.path}: {problem}")

    # -- columns --------------------------------------------------------------------------------------------------

    def _field(self, name: Name) -> pa.Field:
        field = self.schema.field(name[0])
        for part in name[1:]:
            if not pa.types.is_struct(field.type) or field.type.get_field_index(part) < 0:
                raise self.fault(f"{'/'.join(name)}: missing, or named twice")
            field = field.type.field(part)
        return field

    def parts(self, name: Name) -> list[str] | None:
        kind = self._field(name).type
        return [field.name for field in kind] if pa.types.is_struct(kind) else None

    def widest(self, name: Name) -> PlainSpace:
        kind, shape = self._field(name).type, tuple[int, ...]()
        if pa.types.is_fixed_size_list(kind):
            shape, kind = (kind.list_size,), kind.value_type
        return widest(dtype_of(kind), shape) if is_number(kind) else custom(str(kind)[:100])

    def info_names(self) -> list[Name]:
        names, pending = list[Name](), [("infos",)] if "infos" in self.schema.names else list[Name]()
        while pending:
            name = pending.pop(0)
            parts = self.parts(name)
            if parts is not None and len(name) <= _DEEPEST:
                pending += [(*name, part) for part in parts]
            elif len(name) == 1 or parts is not None:
                raise self.fault("infos must be a struct")
            else:
                names.append(name[1:])
        return names

    def row_size(self, name: Name) -> int:
        return row_size(self._field(name).type)

    def has_files(self, name: Name) -> bool:
        return bool(pa.types.is_binary(self._field(name).type))

    # -- rows -----------------------------------------------------------------------------------------------------

    def ranges(self, row_size: int) -> Iterator[tuple[int, int]]:
        before, end = None, 0
        with located(self.path):
            for batch in self.batches(self._rows_at_a_time):
                if self._unpacked is not None:
                    for first, data in enumerate(batch.column(KEY).to_pylist(), end):
                        if data is not None:
                            self._unpacked.add(first, data)
                self._block = batch if before is None else pa.concat_batches([before, batch])
                before, end = batch.slice(len(batch) - 1), end + len(batch)
                self._first = end - len(self._block)
                if len(self._block) > 1 or self.rows == 1:
                    yield self._first, end - 1

    def read(self, name: Name, begin: int, end: int, shape: tuple[int, ...] | None = None) -> Any:
        if self._block is None:
            self._block = next(self.batches(1))
        field, column = self._field(name), self._block.slice(begin - self._first, end - begin).column(name[0])
        for part in name[1:]:
            column = column.field(part)
        if not is_number(field.type) and not is_list(field.type):
            return column.to_pylist()
        if shape is None and field.metadata and name[0] == "infos":
            sizes = field.metadata.get(b"shape", b"").split(b",")
            shape = tuple(map(int, sizes)) if all(size.isdigit() for size in sizes) else None
        rows = numbers_in(column, shape)
        if rows is None:
            problem = f"{'/'.join(name)}: missing rows, or rows of several shapes"
            raise self.fault(problem if shape is None else f"{problem}; the space has shape {shape}")
        return rows

    def packed(self, begin: int, end: int) -> InfoRows | None:
        return None if self._unpacked is None else self._unpacked.take(end - begin)

    def batches(self, rows: int) -> Iterator[pa.RecordBatch]:
        """Yield all rows, some at a time."""
        if self._mapped is None:
            for batch in batches(self.path, rows, self.schema.names):
                batch.validate(full=True)
                yield batch.cast(self.schema)
            return
        for batch in self._mapped_batches():
            batch.validate(full=True)
            for begin in range(0, len(batch), rows):
                yield batch.slice(begin, rows)

    def _mapped_batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the batches in file order, each once: the footer of a malicious file may name one many times."""
        assert self._mapped is not None
        self._mapped.seek(_MAGIC_BYTES)
        messages = pa.ipc.MessageReader.open_stream(self._mapped)
        with contextlib.suppress(StopIteration):
            if (first := messages.read_next_message()).type != "schema":
                raise self.fault(f"unexpected first message {first.type}")
            while (message := messages.read_next_message()).type == "record batch":
                if _is_compressed(message.metadata.to_pybytes()):
                    raise self.fault("compressed: not supported, as its size in memory is unknown")
                yield pa.ipc.read_record_batch(message, self.schema)
            raise self.fault(f"unexpected message {message.type}")


def _is_compressed(metadata: bytes) -> bool:
    """Return True if a record batch is compressed (Message.fbs of Arrow: Message.header, RecordBatch.compression)."""

    def number(offset: int, size: int = 4, signed: bool = False) -> int:
        return int.from_bytes(metadata[offset : offset + size], "little", signed=signed)

    def field(table: int, index: int) -> int:
        """Return the offset of a field of a FlatBuffers table; 0 if it is missing."""
        vtable, slot = table - number(table, signed=True), 4 + 2 * index
        offset = number(vtable + slot, 2) if slot < number(vtable, 2) else 0
        return table + offset if offset else 0

    header = field(number(0), 2)
    return header == 0 or field(header + number(header), 3) != 0
