"""Export to Lance, as stable-worldmodel reads it, and import of Lance tables.

The tables are those of Parquet (parquet/traces.py) with flat columns: "arm" in "observation" is observation_arm.
"""

from __future__ import annotations

import base64
import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import lance
import numpy as np
import pyarrow as pa
from lance.fragment import FragmentMetadata, write_fragments

from gym_trace.data.showing.pictures import png
from gym_trace.errors import UnreadableRecording
from gym_trace.exchange.formats.contract import ExportPlan, Target, losses
from gym_trace.exchange.formats.foreign import are_plausible_rows
from gym_trace.exchange.formats.images import is_image, pixels
from gym_trace.exchange.formats.imported import Imported
from gym_trace.exchange.formats.parquet.table_importer import imported_table
from gym_trace.exchange.formats.parquet.tables import Table, dtype_of, located, rows_at_a_time
from gym_trace.exchange.formats.parquet.traces import imported_tables, write_tables
from gym_trace.exchange.formats.source import ExportSource
from gym_trace.playback.row_types import RowType
from gym_trace.playback.scan import KEPT
from gym_trace.printable import printable

_SCHEMA_KEY = "gym_trace.schema"
_TABLES = ("steps", "episodes")
_FRAGMENT_ROWS, _FRAGMENT_BYTES = 1 << 20, 64 << 20  # limits of a fragment
_MOST_TEXT = 64 << 20  # bytes of a schema


class _Column(NamedTuple):
    """A column of a Lance table.

    name: in Lance. path: of the field in the table of Parquet. kind: its type there. is_image: True if stored as PNG.
    """

    name: str
    path: tuple[str, ...]
    kind: pa.DataType
    is_image: bool

    @property
    def storage(self) -> pa.DataType:
        """Return the type without the extension for tensors."""
        return self.kind.storage_type if isinstance(self.kind, pa.BaseExtensionType) else self.kind


def _columns_of(schema: pa.Schema) -> list[_Column]:
    """Return the columns for a table of Parquet; names are unique, even if case is ignored."""

    def leaves(kind: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], pa.DataType]]:
        if isinstance(kind, pa.DataType) and not pa.types.is_struct(kind):
            yield path, kind
        else:
            for part in kind:
                yield from leaves(part.type, (*path, part.name))

    found = [*leaves(schema, ())]
    images = [path for path, kind in found if path[0] == "observation" and _is_png(kind)]
    taken: set[str] = set()
    columns = []
    for path, kind in found:
        name = "_".join(path)
        if name in ("episode", "step"):
            name += "_idx"
        elif path in images:  # the names by which stable-worldmodel knows images
            name = "pixels" if len(images) == 1 else "_".join(("pixels", *path[1:]))
        name = name.replace(".", "_")
        while name.lower() in taken:
            name += "_"
        taken.add(name.lower())
        columns.append(_Column(name, path, kind, _is_png(kind)))
    return columns


def _is_png(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.FixedShapeTensorType) and is_image(RowType(dtype_of(kind.value_type), tuple(kind.shape)))


# -- export -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LanceExporter:
    """Lance: a table of steps, which stable-worldmodel reads, and a table of episodes"""

    name: ClassVar[str] = "lance"
    makes: ClassVar[str] = "directory"
    finals: ClassVar[str] = KEPT

    def plan(self, source: ExportSource) -> ExportPlan:
        return ExportPlan(list(losses(source, "dtype")), partial(self._write, source), self._how_to_load)

    def _write(self, source: ExportSource, target: Target) -> None:
        write_tables(source, lambda name, schema, _: _LanceWriter(target.staged / f"{name}.lance", schema))

    def _how_to_load(self, path: Path) -> str:
        steps, episodes = (str(path / f"{name}.lance") for name in _TABLES)
        return (
            f"import lance\nsteps, episodes = lance.dataset({steps!r}), lance.dataset({episodes!r})\n"
            "print(steps.schema.names, steps.count_rows(), episodes.count_rows())"
        )


class _LanceWriter:
    """Collects the rows of a table, and writes them as fragments, which close() makes a table."""

    def __init__(self, path: Path, schema: pa.Schema):
        self._path, self._columns = path, _columns_of(schema)
        metadata = {_SCHEMA_KEY: base64.b64encode(schema.serialize()).decode()}
        fields = [(column.name, pa.binary() if column.is_image else column.storage) for column in self._columns]
        self._schema, self._names = pa.schema(fields, metadata), schema.names
        self._fragments: list[FragmentMetadata] = []
        self._pending: list[pa.RecordBatch] = []

    def add(self, arrays: list[pa.Array]) -> None:
        tops = dict(zip(self._names, arrays))
        rows = []
        for column in self._columns:
            array = tops[column.path[0]]
            for name in column.path[1:]:
                array = array.field(name)
            if column.is_image:
                array = pa.array([png(row, 1) for row in array.to_numpy_ndarray()], pa.binary())
            rows.append(array.storage if isinstance(array, pa.ExtensionArray) else array)
        self._pending.append(pa.RecordBatch.from_arrays(rows, schema=self._schema))
        if (
            sum(batch.num_rows for batch in self._pending) >= _FRAGMENT_ROWS
            or sum(batch.nbytes for batch in self._pending) >= _FRAGMENT_BYTES
        ):
            self._write_fragment()

    def _write_fragment(self) -> None:
        if self._pending:
            rows = pa.Table.from_batches(self._pending)
            self._fragments += write_fragments(rows, self._path, self._schema, mode="create")
            self._pending = []

    def close(self) -> None:
        self._write_fragment()
        lance.LanceDataset.commit(self._path, lance.LanceOperation.Overwrite(self._schema, self._fragments))

    def detach(self) -> None:
        self._pending = []


# -- import -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LanceImporter:
    """Lance tables of gym-trace, or one table with one row per step, such as those of stable-worldmodel.

    map: columns of a table of others, as for "table".
    """

    map: str | Mapping[str, str] = field(default_factory=dict)

    name: ClassVar[str] = "lance"

    def recognises(self, path: Path) -> bool:
        return bool(_tables_at(path))

    def read(self, path: Path) -> Imported:
        """Read the tables. Raises InvalidOption if the mapping names a missing column."""
        tables = {table.stem: table for table in _tables_at(path)}
        if set(tables) == set(_TABLES) and not self.map:
            return imported_tables("Lance", *(_LanceTable(tables[name]) for name in _TABLES))
        if len(tables) != 1:
            raise UnreadableRecording(f"{path}: has {len(tables)} Lance tables; pass one: {printable([*tables])}")
        return imported_table("Lance table", _LanceTable(*tables.values()), self.map)


def _tables_at(path: Path) -> list[Path]:
    """Return the Lance table at a path, or those in a directory."""
    found = [path] if path.suffix.lower() == ".lance" else sorted(path.glob("*.lance")) if path.is_dir() else []
    return [table for table in found if (table / "_versions").is_dir()]


@contextlib.contextmanager
def _located(path: Path) -> Iterator[None]:
    """Name the table in errors that malformed contents cause; Lance panics at some. Raises UnreadableRecording."""
    try:
        with located(path):
            yield
    except BaseException as error:
        if not isinstance(error, RuntimeError) and type(error).__name__ != "PanicException":
            raise
        raise UnreadableRecording(f"{path}: cannot be read: {printable(error):.200}") from error


class _LanceTable(Table):
    """A Lance table: one of write_tables(), or with images as tensors."""

    def __init__(self, path: Path):
        self.path = path
        with _located(path):
            self._dataset = lance.dataset(path)
            self.rows = self._dataset.count_rows()
            files = [file for fragment in self._dataset.get_fragments() for file in fragment.data_files()]
            if any(file.base_id is not None or Path(file.path).name != file.path for file in files):
                raise self.fault("some of its files are outside of it; import a copy of the whole table")
            stored = sum((path / "data" / file.path).stat().st_size for file in files)
            if not are_plausible_rows(self.rows, stored):
                raise self.fault(f"{self.rows:,} rows, which take too much memory for {stored:,} bytes")
            schema = self._dataset.schema
            text = (schema.metadata or {}).get(_SCHEMA_KEY.encode(), b"")
            self.schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text[:_MOST_TEXT]))) if text else schema
            self._columns = _columns_of(self.schema) if text else [*self._foreign_columns()]
            if not text:
                self.schema = pa.schema([(column.name, column.kind) for column in self._columns])
            for column in self._columns:
                kind = schema.field(column.name).type
                if column.is_image != _is_binary(kind) or not (column.is_image or _is_same(kind, column.storage)):
                    raise self.fault(f"{printable(column.name)} contradicts its metadata")

    def _foreign_columns(self) -> Iterator[_Column]:
        """Yield the columns of a table of others. The shape of an image is that of the first."""
        for part in self._dataset.schema:
            kind, is_image = part.type, False
            if _is_binary(kind) and self.rows:
                with contextlib.suppress(ValueError):
                    (data,) = self._dataset.take([0], [part.name])[part.name].to_pylist()
                    kind, is_image = pa.fixed_shape_tensor(pa.uint8(), pixels(data or b"", (None, None, 3)).shape), True
            if is_image or not _is_binary(kind):
                yield _Column(part.name, (part.name,), kind, is_image)

    def batches(self, columns: list[str], row_bytes: int = 0) -> Iterator[pa.RecordBatch]:
        most = rows_at_a_time(row_bytes or self.row_bytes(columns))
        stored = [column for column in self._columns if column.path[0] in columns]
        schema = pa.schema([self.schema.field(name) for name in columns])
        with _located(self.path):
            scanner = self._dataset.scanner([column.name for column in stored], batch_size=most, batch_readahead=1)
            for batch in scanner.to_batches():
                rows = {column.path: _decoded(column, batch.column(column.name)) for column in stored}
                yield pa.RecordBatch.from_arrays([_nested(part, (part.name,), rows) for part in schema], schema=schema)


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_same(stored: pa.DataType, kind: pa.DataType) -> bool:
    """Return True for equal types; Lance renames the elements of a list of a fixed size."""
    if not pa.types.is_fixed_size_list(stored) or not pa.types.is_fixed_size_list(kind):
        return bool(stored == kind)
    return bool(stored.list_size == kind.list_size and _is_same(stored.value_type, kind.value_type))


def _decoded(column: _Column, array: pa.Array) -> pa.Array:
    """Return the rows of a column with its type in the table of Parquet. Raises ValueError, pyarrow.ArrowException."""
    storage = column.storage
    if column.is_image:
        shape = tuple(column.kind.shape)
        rows = np.empty((len(array), math.prod(shape)), np.uint8)
        for row, data in zip(rows, array.to_pylist()):
            row[:] = pixels(data or b"", shape).reshape(-1)
        array = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), type=storage)
    elif pa.types.is_fixed_size_list(storage) and array.type != storage:
        if array.null_count:
            raise ValueError(f"{column.name}: some rows have no value")
        array = pa.FixedSizeListArray.from_arrays(array.flatten(), type=storage)
    return array if storage is column.kind else pa.ExtensionArray.from_storage(column.kind, array)


def _nested(part: pa.Field, path: tuple[str, ...], rows: Mapping[tuple[str, ...], pa.Array]) -> pa.Array:
    if path in rows:
        return rows[path]
    parts = [_nested(child, (*path, child.name), rows) for child in part.type]
    return pa.StructArray.from_arrays(parts, fields=[*part.type])
