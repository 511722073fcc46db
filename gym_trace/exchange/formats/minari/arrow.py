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
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gym_trace.data.episode import Episode
from gym_trace.data.layout import Layout, Leaf, PlainSpace
from gym_trace.data.schema import Layouts
from gym_trace.data.values import Array, placeholder
from gym_trace.errors import UnreadableRecording
from gym_trace.exchange.formats.foreign import read_json, widest
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.imported import NewEpisode, NewSteps
from gym_trace.exchange.formats.infos import ANNOTATIONS, PackedInfos, packed
from gym_trace.exchange.formats.minari.plan import FILE, MinariPlan, are_options
from gym_trace.exchange.formats.minari.spaces import is_picture, jpeg_pictures
from gym_trace.exchange.formats.parquet.tables import (
    batches,
    dtype_of,
    is_list,
    is_number,
    located,
    numbers_in,
    parquet_file,
    row_size,
)
from gym_trace.exchange.formats.rows import custom, infos_of
from gym_trace.exchange.formats.source import flags
from gym_trace.exchange.formats.steps.windows import Window
from gym_trace.playback.row_types import RowType

_IN_MEMORY = 32 << 20  # bytes of a column of an episode; longer ones are gathered in a scratch file
_FLAG = RowType(np.dtype(np.bool_), ())


class ArrowEpisodes:
    """Writes one directory per episode. count: episodes so far.

    Minari cannot read episodes without steps, so they are skipped.
    """

    def __init__(self, data: FilePath, plan: MinariPlan, layouts: Layouts, kind: str):
        self.count = 0
        self._data, self._plan, self._layouts, self._kind = data, plan, layouts, kind
        self._scratch: list[FilePath] = []

    def begin(self, episode: Episode, identity: str) -> None:
        """Write the metadata of an episode, before its steps."""
        self._steps = len(episode)
        if not self._steps:
            return
        self._directory = self._data / str(self.count)
        self._directory.mkdir()
        metadata: dict[str, Any] = {"id": self.count, "total_steps": self._steps, KEY: identity}
        if episode.seed is not None:
            metadata["seed"] = episode.seed
        if episode.options is not None and are_options(episode.options, is_hdf5=False):
            metadata["options"] = episode.options
        (self._directory / FILE).write_text(json.dumps(metadata))
        rows, plan = self._steps + 1, self._plan
        self._columns = {path: self._column(rows, form) for path, form in plan.forms.items()}
        self._rewards = self._column(rows, plan.rewards)
        self._flags = [self._column(rows, _FLAG), self._column(rows, _FLAG)]
        forms = (None if column.dtype is None else RowType(column.dtype, column.shape) for column in plan.infos.columns)
        self._infos = [self._column(rows, form) for form in forms]
        self._packed: list[bytes | None] = [None] * rows if plan.infos.need_packing else []
        for column, data in zip(plan.infos.columns, self._infos):
            value = column.of_reset(episode.reset_info)
            data[:1] = placeholder(column.dtype, column.shape) if value is None else value

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
        if not self._steps:
            return
        columns, start, end = window.columns, window.start, window.start + window.steps
        skipped = 0 if window.opens else 1
        for path, data in self._columns.items():
            if path[0] == "observations":
                data[start + skipped : end + 1] = columns[path][skipped:]
            else:
                data[start:end] = columns[path]
        for data, rows in zip((self._rewards, *self._flags), (columns[("rewards",)], *flags(window)), strict=True):
            data[start:end] = rows
        for column, data in zip(self._plan.infos.columns, self._infos):
            data[start + 1 : end + 1] = column.rows(window)
        if self._packed:
            for first, packed_infos in packed(window, self._plan.infos):
                self._packed[first] = packed_infos
        if window.closes:
            self._write()

    def _write(self) -> None:
        batch = pa.RecordBatch.from_pydict(dict(self._arrays()))
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

    def _arrays(self) -> Iterator[tuple[str, pa.Array]]:
        columns = iter(self._columns.values())
        yield "observations", _tree(self._layouts.observations, columns)
        yield "actions", _tree(self._layouts.actions, columns)
        for name, data in zip(("rewards", "terminations", "truncations"), (self._rewards, *self._flags), strict=True):
            yield name, pa.array(data)
        if self._infos:
            paths = [column.path for column in self._plan.infos.columns]
            yield "infos", _struct(list(zip(paths, self._infos)))
        if self._packed:
            yield KEY, pa.array(self._packed, pa.binary())


def _tree(layout: Layout, columns: Iterator[Any]) -> pa.Array:
    if isinstance(layout, Leaf):
        return _arrow_array(next(columns))
    parts = {str(key): _tree(child, columns) for key, child in layout.parts()}
    return pa.StructArray.from_arrays(list(parts.values()), names=list(parts))


def _arrow_array(data: Any) -> pa.Array:
    if isinstance(data, list):
        return pa.array(data, pa.string())
    if data.ndim == 1:
        return pa.array(data)
    return pa.FixedSizeListArray.from_arrays(pa.array(data.reshape(-1)), math.prod(data.shape[1:]))


def _struct(columns: list[tuple[tuple[str, ...], Any]]) -> pa.Array:
    """Return infos as Minari reads them: arrays are lists, with their shape as metadata of the field.

    Values in maps get names such as "goal/x", because Minari would convert the values of maps to Python's types.
    """
    arrays, fields = [], []
    for path, data in columns:
        arrays.append(_arrow_array(data))
        is_array = isinstance(data, np.ndarray) and data.ndim > 1
        shape = {"shape": ",".join(map(str, data.shape[1:]))} if is_array else None
        fields.append(pa.field("/".join(path), arrays[-1].type, metadata=shape))
    return pa.StructArray.from_arrays(arrays, fields=fields)


_MOST_ROWS, _MOST_BYTES = 1024, 4 << 20  # limits of the rows that are read at a time
_DEEPEST = 32
_MAGIC_BYTES = 8  # before the first message of an Arrow file
Fault = Callable[[str], UnreadableRecording]


class ArrowReader:
    """Reads the directories. spaces: None: as wide as the arrays. has_jpeg: images are JPEG."""

    def __init__(self, data: FilePath, kind: str, spaces: tuple[PlainSpace | None, PlainSpace | None], has_jpeg: bool):
        self._data, self._kind, self._has_jpeg = data, kind, has_jpeg
        paths = [path for path in data.iterdir() if path.name.isdecimal() and path.is_dir() and not path.is_symlink()]
        self._directories = sorted(paths, key=lambda path: int(path.name))
        self.spaces = self._space("observations", spaces[0]), self._space("actions", spaces[1])

    def __len__(self) -> int:
        return len(self._directories)

    def _space(self, root: str, known: PlainSpace | None) -> PlainSpace:
        if known is not None:
            return known
        if not self._directories:
            raise UnreadableRecording(f"{self._data}: no episodes and no spaces")
        with _ArrowFile(self._directories[0] / f"part-0.{self._kind}") as file, located(file.path):
            return _widest(file.field(root), 0)

    def episodes(self) -> Iterator[NewEpisode]:
        """Yield the episodes. Raises UnreadableRecording."""
        for directory in self._directories:
            with _ArrowFile(directory / f"part-0.{self._kind}") as file, located(file.path):
                yield self._episode(file, directory)

    def _episode(self, file: _ArrowFile, directory: FilePath) -> NewEpisode:
        metadata = read_json(directory / FILE) if (directory / FILE).is_file() else {}
        identity, seed, options = metadata.get(KEY), metadata.get("seed"), metadata.get("options")
        reset_info, is_ours = None, isinstance(identity, str)
        if "infos" in file.schema.names and not is_ours:
            reset_info = _infos(next(file.batches(1)).column("infos"), file.fault)[0]
        return NewEpisode(
            file.rows - 1,
            self._parts(file, is_ours),
            seed=seed if type(seed) is int and seed >= 0 else None,
            options=options if isinstance(options, dict) else None,
            reset_info=reset_info,
            identity=identity if is_ours else None,
        )

    def _parts(self, file: _ArrowFile, is_ours: bool) -> Iterator[NewSteps]:
        """Yield steps. A row of the file has an observation, its info and the action; the last row has no action."""
        unpacked = PackedInfos() if KEY in file.schema.names else None
        row, before = 0, None
        with located(file.path):
            for batch in file.batches(file.rows_at_a_time):
                if unpacked is not None:
                    for first, data in enumerate(batch.column(KEY).to_pylist(), row):
                        if data is not None:
                            unpacked.add(first, data)
                row += len(batch)
                rows = batch if before is None else pa.concat_batches([before, batch])
                before = batch.slice(len(batch) - 1)
                if len(rows) > 1 or file.rows == 1:
                    yield self._steps(rows, unpacked, is_ours, has_initial=len(rows) == row, fault=file.fault)

    def _steps(
        self, rows: pa.RecordBatch, unpacked: PackedInfos | None, is_ours: bool, has_initial: bool, fault: Fault
    ) -> NewSteps:  # fmt: skip
        steps, observed = rows.slice(0, len(rows) - 1), rows if has_initial else rows.slice(1)
        infos, annotations = (None, {}) if unpacked is None else unpacked.take(len(steps))
        if is_ours:
            annotations |= _annotations(rows.slice(1), fault)
        elif "infos" in rows.schema.names:
            infos = _infos(rows.slice(1).column("infos"), fault)
        terminations, truncations = (_flags(steps.column(name), fault) for name in ("terminations", "truncations"))
        return NewSteps(
            self._tree(observed.column("observations"), self.spaces[0], fault, 0),
            self._tree(steps.column("actions"), self.spaces[1], fault, 0),
            _array(steps.column("rewards"), fault),
            terminations,
            truncations,
            infos,
            annotations,
        )

    def _tree(self, column: pa.Array, space: PlainSpace, fault: Fault, depth: int) -> Any:
        if space["type"] in ("Dict", "Tuple"):
            if not pa.types.is_struct(column.type) or depth > _DEEPEST:
                raise fault("column of a Dict or Tuple space must be a struct")
            is_dict = space["type"] == "Dict"
            parts = space["spaces"] if is_dict else list(enumerate(space["spaces"]))
            if sorted(field.name for field in column.type) != sorted(str(key) for key, _ in parts):
                raise fault("column lacks parts of its space")
            values = {key: self._tree(column.field(str(key)), child, fault, depth + 1) for key, child in parts}
            return values if is_dict else tuple(values.values())
        if self._has_jpeg and pa.types.is_binary(column.type) and is_picture(space):
            return jpeg_pictures(column.to_pylist(), tuple(space["shape"]), fault)
        return _array(column, fault, tuple(space["shape"]) if "shape" in space else None)


class _ArrowFile:
    """The file of an episode. rows: number of rows, at least one. rows_at_a_time: number of rows to read at a time."""

    def __init__(self, path: FilePath):
        self.path = path
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
                self.field(name)
            total_size = sum(row_size(field.type) for field in self.schema)
        self.rows_at_a_time = max(1, min(_MOST_ROWS, _MOST_BYTES // max(1, total_size)))
        if not self.rows:
            raise self.fault("no rows; even an episode without steps has one, for the reset")

    def __enter__(self) -> _ArrowFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._mapped is not None:
            self._mapped.close()

    def fault(self, problem: str) -> UnreadableRecording:
        """Return an error about the file."""
        return UnreadableRecording(f"{self.path}: {problem}")

    def field(self, name: str) -> pa.DataType:
        """Return the type of a column."""
        if name not in self.schema.names:
            raise self.fault(f"has no column {name}")
        return self.schema.field(name).type

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


def _array(column: pa.Array, fault: Fault, shape: tuple[int, ...] | None = None) -> Any:
    """Return a column as an array of numbers (rows, *shape), or a list of other values."""
    if not is_number(column.type) and not is_list(column.type):
        return column.to_pylist()
    flat = numbers_in(column, shape)
    if flat is None:
        problem = "has a column with missing rows, or rows of several shapes"
        raise fault(problem if shape is None else f"{problem}; the space has shape {shape}")
    return flat


def _flags(column: pa.Array, fault: Fault) -> Array:
    return np.asarray(_array(column, fault)).astype(np.bool_)


def _widest(kind: pa.DataType, depth: int) -> PlainSpace:
    """Return the widest space of values of this type."""
    if pa.types.is_struct(kind) and depth < _DEEPEST:
        children = [[field.name, _widest(field.type, depth + 1)] for field in kind]
        if children and [name for name, _ in children] == [str(i) for i in range(len(children))]:
            return {"type": "Tuple", "spaces": [child for _, child in children]}
        return {"type": "Dict", "spaces": children}
    shape: tuple[int, ...] = ()
    if pa.types.is_fixed_size_list(kind):
        shape, kind = (kind.list_size,), kind.value_type
    if not is_number(kind):
        return custom(str(kind)[:100])
    return widest(dtype_of(kind), shape)


def _columns(column: pa.StructArray, path: tuple[str, ...], fault: Fault) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not pa.types.is_struct(column.type) or len(path) > _DEEPEST:
        raise fault("infos must be a struct")
    for i, field in enumerate(column.type):
        inner = column.field(i)
        if pa.types.is_struct(field.type):
            yield from _columns(inner, (*path, field.name), fault)
            continue
        sizes = (field.metadata or {}).get(b"shape", b"").split(b",")
        shape = tuple(map(int, sizes)) if all(size.isdigit() for size in sizes) else None
        yield (*path, field.name), _array(inner, fault, shape)


def _infos(column: pa.StructArray, fault: Fault) -> list[dict[str, Any]]:
    return infos_of(dict(_columns(column, (), fault)), len(column))


def _annotations(rows: pa.RecordBatch, fault: Fault) -> dict[str, Any]:
    """Return the annotations that gym-trace has stored among the infos."""
    if "infos" not in rows.schema.names:
        return {}
    columns, prefix = _columns(rows.column("infos"), (), fault), f"{ANNOTATIONS}/"
    return {path[0].removeprefix(prefix): values for path, values in columns if path[0].startswith(prefix)}
