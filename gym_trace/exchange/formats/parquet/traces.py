"""Export to Parquet, and its import: steps/ and episodes/, which DuckDB, Polars, pandas, Spark and Ray Data read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path as FilePath
from typing import Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gym_trace.data.json_values import json_text
from gym_trace.data.layout import Branch, Layout, Leaf, Path
from gym_trace.data.values import Array
from gym_trace.exchange.formats.contract import ExportPlan, Target, losses
from gym_trace.exchange.formats.foreign import Values
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.imported import Imported, NewEpisode, imported
from gym_trace.exchange.formats.parquet.files import ParquetFiles
from gym_trace.exchange.formats.parquet.tables import Table, located
from gym_trace.exchange.formats.rows import RowQueue, first_writer, steps_of
from gym_trace.exchange.formats.source import ExportSource, episode_columns
from gym_trace.format.manifest import json_of
from gym_trace.playback.scan import KEPT, StepRuns
from gym_trace.playback.tables.columns import NUMBER, TEXT, ArrowColumn, columns_of, parts_of, table_column
from gym_trace.playback.tables.rows import TableColumn, Tables

COLUMNS_KEY = "gym_trace.columns"
_GROUP_ROWS, _GROUP_BYTES = 122_880, 32 << 20  # limits of a row group
_FILE_BYTES = 256 << 20  # approximate size of a file


@dataclass(frozen=True)
class ParquetExporter:
    """Parquet: a table of steps and a table of episodes, for DuckDB, Polars, pandas, Spark and Ray Data"""

    name: ClassVar[str] = "parquet"
    makes: ClassVar[str] = "directory"
    finals: ClassVar[str] = KEPT

    def plan(self, source: ExportSource) -> ExportPlan:
        return ExportPlan(list(losses(source, "dtype")), partial(self._write, source), self._how_to_load)

    def _write(self, source: ExportSource, target: Target) -> None:
        write_tables(source, partial(_RowGroups, target.staged))

    def _how_to_load(self, path: FilePath) -> str:
        steps, episodes = (f"{path}/{name}/*.parquet" for name in ("steps", "episodes"))
        return (
            "import duckdb\n"
            f"steps, episodes = duckdb.read_parquet({steps!r}), duckdb.read_parquet({episodes!r})\n"
            """duckdb.sql('SELECT outcome, count(*), avg("return") FROM episodes GROUP BY ALL').show()"""
        )


class TableWriter(Protocol):
    """Writes the rows of a table in a container, such as Parquet."""

    def add(self, arrays: list[pa.Array]) -> None:
        """Write some rows, one array per field of the schema. Raises OSError."""

    def close(self) -> None:
        """Complete the table. Raises OSError."""

    def detach(self) -> None:
        """Close an incomplete table as it is."""


def write_tables(source: ExportSource, writer: Callable[[str, pa.Schema, list[str]], TableWriter]) -> None:
    """Write the tables of steps and episodes.

    writer: returns the writer of a table; called with its name, its schema, whose metadata an import needs, and the
    paths of the columns of few values. Raises OSError, CorruptTrace.
    """
    tables = _Tables(source, writer)
    try:
        for runs in source.runs():
            tables.add(runs)
            source.advance(runs.size)
        tables.close()
    finally:
        tables.detach()


class _Tables:
    def __init__(self, source: ExportSource, writer: Callable[[str, pa.Schema, list[str]], TableWriter]):
        columns = columns_of(source.trace)
        tables = Tables(source.trace, columns, episode_columns(source))
        identity = TableColumn(
            pa.field(KEY, pa.string(), nullable=False), (), lambda indices, _: pa.array(source.identities(indices))
        )
        self._step_columns, self._episode_columns = tables.steps, [*tables.episodes, identity]
        metadata = {KEY: source.about, COLUMNS_KEY: json_text([column.to_json() for column in columns.values()])}
        steps, episodes = (
            pa.schema([column.field for column in table], metadata)
            for table in (self._step_columns, self._episode_columns)
        )
        dictionaries = [path for column in columns.values() for path in _paths_of(column) if column.has_few_values]
        self._steps, self._episodes = writer("steps", steps, dictionaries), writer("episodes", episodes, dictionaries)

    def add(self, runs: StepRuns) -> None:
        if runs.size:
            self._steps.add([column.make(runs) for column in self._step_columns])
        if runs.closes.any():
            episodes = runs.episode[runs.closes]
            self._episodes.add([column.make(episodes, runs) for column in self._episode_columns])

    def close(self) -> None:
        self._steps.close()
        self._episodes.close()

    def detach(self) -> None:
        self._steps.detach()
        self._episodes.detach()


class _RowGroups:
    """Collects the rows of a table, and writes them as row groups."""

    def __init__(self, target: FilePath, name: str, schema: pa.Schema, dictionaries: list[str]):
        order = [column for column in ("episode", "step") if column in schema.names]
        scalars = [field.name for field in schema if not pa.types.is_nested(field.type)]
        not_floats = [name for name in scalars if not pa.types.is_floating(schema.field(name).type)]
        self._files = ParquetFiles(
            lambda number: target / name / f"{number:05}.parquet",
            schema,
            use_dictionary=[*dictionaries, *not_floats],
            write_statistics=[*scalars, "reward"],
            sorting_columns=pq.SortingColumn.from_ordering(schema, [(name, "ascending") for name in order]),
        )
        self._pending: list[pa.RecordBatch] = []
        self._rows = self._bytes = self._groups = 0

    def add(self, arrays: list[pa.Array]) -> None:
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._files.schema)
        self._pending.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._rows >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self._write_group()

    def _write_group(self) -> None:
        self._files.write(pa.Table.from_batches(self._pending, self._files.schema))
        self._pending, self._rows, self._bytes, self._groups = [], 0, 0, self._groups + 1
        if self._files.has_reached(_FILE_BYTES):
            self._files.next_file()

    def close(self) -> None:
        if self._pending or not self._groups:
            self._write_group()
        self._files.close()

    def detach(self) -> None:
        self._files.detach()


def _paths_of(column: ArrowColumn) -> Iterator[str]:
    """Yield the paths of a column in the Parquet schemas."""
    names = {"observations": ("observation", "final_observation"), "actions": ("action",), "rewards": ("reward",)}
    for name in names.get(str(column.path[0]), (str(column.path[0]),)):
        parts = [name, *map(str, column.path[1:]), *["list", "element"] * bool(column.kind == NUMBER and column.shape)]
        yield ".".join(parts)


_FOLDERS = ("steps", "episodes")
_FIELDS = {  # the field of NewSteps for each column
    "observation": "observations",
    "action": "actions",
    "reward": "rewards",
    "terminated": "terminations",
    "truncated": "truncations",
    "info": "infos",
}
_MOST_TEXT = 64 << 20  # bytes of a text in the metadata
# The type of a column, None if the table lacks it, and a function (array or None, number of rows) that decodes rows.
_ColumnReader = tuple[pa.DataType | None, Callable[[Any, int], Any]]


class ParquetImporter:
    """Parquet, as gym-trace export writes it"""

    name: ClassVar[str] = "parquet"

    def recognises(self, path: FilePath) -> bool:
        return all(_files_in(path / folder) for folder in _FOLDERS)

    def read(self, path: FilePath) -> Imported:
        return imported_tables("Parquet", *(Table(path / folder, _files_in(path / folder)) for folder in _FOLDERS))


def imported_tables(kind: str, steps: Table, episodes: Table) -> Imported:
    """Return what write_tables() wrote. Raises UnreadableRecording."""
    with located(episodes.path):
        about = _metadata(episodes, KEY)
        schema, (observations, actions, _) = first_writer(about)
        columns = {
            column.path: column for column in map(ArrowColumn.from_json, json_of(_metadata(episodes, COLUMNS_KEY)))
        }
        list_bytes = sum(column.list_bytes for column in columns.values())
        step_rows = _rows_of(steps, _step_readers(columns, observations, actions), list_bytes)
        episode_rows = _rows_of(episodes, _episode_readers(columns, observations), list_bytes)
    return imported(kind, _episodes(steps, step_rows, episode_rows), schema, about, steps=steps.rows)


def _files_in(folder: FilePath) -> list[FilePath]:
    return sorted(file for file in folder.glob("*.parquet") if file.is_file()) if folder.is_dir() else []


def _metadata(table: Table, key: str) -> str:
    """Return a text in the metadata of the files. Raises UnreadableRecording, ValueError."""
    text = (table.schema.metadata or {}).get(key.encode(), b"")
    if not 0 < len(text) <= _MOST_TEXT:
        raise table.fault(f"no {key} in its metadata; only exports of gym-trace can be imported")
    return str(text, "utf-8")


# -- columns ----------------------------------------------------------------------------------------------------------


def _step_readers(columns: dict[Path, ArrowColumn], observations: Layout, actions: Layout) -> dict[str, _ColumnReader]:
    readers = {
        "episode": (pa.int64(), _numbers),
        "observation": _tree(columns, observations, "observations"),
        "action": _tree(columns, actions, "actions"),
        "reward": _tree(columns, Leaf(("rewards",), None, ()), "rewards"),
        "terminated": (pa.bool_(), _numbers),
        "truncated": (pa.bool_(), _numbers),
    }
    if ("infos",) in columns:
        readers["info"] = _tree(columns, Leaf(("infos",), None, ()), "infos")
    annotations = {str(path[1]): column for path, column in columns.items() if path[0] == "annotations"}
    annotations = {name: column for name, column in annotations.items() if column.is_stored}
    if annotations:
        kind = pa.struct([column.field(name) for name, column in sorted(annotations.items())])
        readers["annotations"] = kind, partial(_annotations, annotations)
    return readers


def _episode_readers(columns: dict[Path, ArrowColumn], observations: Layout) -> dict[str, _ColumnReader]:
    return {
        "episode": (pa.int64(), _numbers),
        "steps": (pa.int64(), _numbers),
        "final_observation": _tree(columns, observations, "observations"),
        KEY: (pa.string(), lambda array, count: array.to_pylist()),
    }


def _tree(columns: dict[Path, ArrowColumn], layout: Layout, root: str) -> _ColumnReader:
    column = table_column(root, layout, columns, (root,))
    kind = None if column is None else column[0].type
    return kind, lambda array, count: tree_rows(layout, columns, array, count, (root,))


def _numbers(array: pa.Array, count: int) -> Any:
    return array.to_numpy(zero_copy_only=False)


def _annotations(columns: dict[str, ArrowColumn], array: pa.Array, count: int) -> dict[str, Any]:
    return {name: decoded(column, array.field(name)) for name, column in columns.items()}


def _rows_of(table: Table, readers: dict[str, _ColumnReader], list_bytes: int) -> RowQueue:
    """Return the decoded rows of a table. list_bytes: bytes per row of the columns whose type has no size.

    Raises UnreadableRecording if the columns of the table differ.
    """
    for name, (kind, _) in readers.items():
        indices = table.schema.get_all_field_indices(name)
        if [table.schema.field(index).type for index in indices] != ([] if kind is None else [kind]):
            raise table.fault(f"{name} contradicts its metadata")
    return RowQueue(_decoded(table, readers, list_bytes))


def _decoded(table: Table, readers: dict[str, _ColumnReader], list_bytes: int) -> Iterator[tuple[int, dict[str, Any]]]:
    present = [name for name, (kind, _) in readers.items() if kind is not None]
    for batch in table.batches(present, table.row_bytes(present) + list_bytes):
        with located(table.path):
            rows = {
                name: decode(None if kind is None else batch.column(name), batch.num_rows)
                for name, (kind, decode) in readers.items()
            }
        yield batch.num_rows, rows


# -- episodes ---------------------------------------------------------------------------------------------------------


def _episodes(table: Table, steps: RowQueue, episodes: RowQueue) -> Iterator[NewEpisode]:
    while not episodes.is_over():
        _, row = episodes.take(1)
        number, count = int(row["episode"][0]), int(row["steps"][0])
        if not 0 <= count <= table.rows:
            raise table.fault(f"episode {number} declares {count} steps, but the table has {table.rows}")
        parts = steps_of(steps, count, row["final_observation"], fields=partial(_steps_in, table, number))
        yield NewEpisode(count, parts, identity=row[KEY][0])
    if not steps.is_over():
        raise table.fault("steps without an episode")


def _steps_in(table: Table, number: int, rows: dict[str, Any]) -> dict[str, Any]:
    if not (rows["episode"] == number).all():
        raise table.fault(f"the steps of episode {number} are not consecutive, or fewer than declared")
    return {_FIELDS.get(name, name): values for name, values in rows.items()}


def decoded(column: ArrowColumn, array: pa.Array) -> Any:
    """Return the rows of a column: an array, or a list of any values. Raises UnreadableRecording, ValueError."""
    if column.kind == NUMBER:
        rows = _number_rows(column, array)
        if not array.null_count:
            return rows
        values = rows.tolist() if column.is_python else list(rows)
        return [value if is_valid else None for value, is_valid in zip(values, array.is_valid().to_pylist())]
    if not isinstance(array, pa.DictionaryArray):
        array = array.dictionary_encode()
    indices = array.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    used, inverse = np.unique(indices, return_inverse=True)
    texts = array.dictionary.take(pa.array(used[used >= 0])).to_pylist()
    values = [*[None] * bool(len(used) and used[0] < 0), *(texts if column.kind == TEXT else map(Values().of, texts))]
    return [values[i] for i in inverse.tolist()]


def _number_rows(column: ArrowColumn, array: pa.Array) -> Array:
    rows: Array
    storage = array.storage if isinstance(array, pa.ExtensionArray) else array
    if pa.types.is_list(storage.type):
        if pc.any(pc.not_equal(pc.list_value_length(storage), column.size)).as_py():
            raise ValueError(f"a list does not have {column.size} elements")
        rows = np.zeros((len(array), *column.shape), column.dtype)
        rows[storage.is_valid()] = storage.flatten().to_numpy(zero_copy_only=False).reshape(-1, *column.shape)
        return rows
    if column.shape:
        size = column.size
        storage = storage.values[storage.offset * size : (storage.offset + len(storage)) * size]
    elif storage.null_count:
        storage = storage.fill_null(False if storage.type == pa.bool_() else 0)
    flat = storage.to_numpy(zero_copy_only=False)
    rows = flat.astype(column.dtype, copy=True).reshape(len(array), *column.shape)
    return rows


def tree_rows(layout: Layout, columns: Mapping[Path, ArrowColumn], array: Any, count: int, root: Path) -> Any:
    """Decode the rows of table_column(). array: None if it returned None. Raises UnreadableRecording, LookupError."""
    if root in columns:
        column = columns[root]
        return np.empty((count, *column.shape), column.dtype) if array is None else decoded(column, array)
    if not isinstance(layout, Branch):
        raise LookupError(f"{root} has no column")
    rows = []
    for name, key, child in parts_of(layout):
        has_column = table_column(name, child, columns, (*root, key)) is not None
        rows.append(tree_rows(child, columns, array.field(name) if has_column else None, count, (*root, key)))
    return tuple(rows) if layout.keys is None else dict(zip(layout.keys, rows))
