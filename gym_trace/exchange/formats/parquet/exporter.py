"""A trace as Parquet: steps/ and episodes/, which DuckDB, Polars, pandas, Spark and Ray Data read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path as FilePath
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from gym_trace.data.json_values import json_text
from gym_trace.exchange.formats.contract import ExportPlan, Target, losses
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.source import ExportSource
from gym_trace.playback.scan import KEPT, StepRuns
from gym_trace.playback.tables.columns import NUMBER, ArrowColumn, columns_of
from gym_trace.playback.tables.rows import TableColumn, Tables

COLUMNS_KEY = "gym_trace.columns"
_GROUP_ROWS, _GROUP_BYTES = 122_880, 32 << 20  # limits of a row group
_FILE_BYTES = 256 << 20  # after which another file is begun


@dataclass(frozen=True)
class ParquetExporter:
    """Parquet: a table of steps and a table of episodes, for DuckDB, Polars, pandas, Spark and Ray Data"""

    name: ClassVar[str] = "parquet"
    makes: ClassVar[str] = "directory"
    finals: ClassVar[str] = KEPT

    def plan(self, source: ExportSource) -> ExportPlan:
        return ExportPlan(list(losses(source, "dtype")), partial(self._write, source), self._how_to_load)

    def _write(self, source: ExportSource, target: Target) -> None:
        tables = _Tables(source, target.staged)
        try:
            for runs in source.runs():
                tables.add(runs)
                source.advance(runs.size)
            tables.close()
        finally:
            tables.abandon()

    def _how_to_load(self, path: FilePath) -> str:
        steps, episodes = (f"{path}/{name}/*.parquet" for name in ("steps", "episodes"))
        return (
            "import duckdb\n"
            f"steps, episodes = duckdb.read_parquet({steps!r}), duckdb.read_parquet({episodes!r})\n"
            """duckdb.sql('SELECT outcome, count(*), avg("return") FROM episodes GROUP BY ALL').show()"""
        )


class _Tables:
    """The two tables of a trace."""

    def __init__(self, source: ExportSource, target: FilePath):
        columns = columns_of(source.trace)
        tables = Tables(source.trace, columns, source.episodes)
        identity = TableColumn(
            pa.field(KEY, pa.string(), nullable=False), (), lambda places, _: pa.array(source.identities(places))
        )
        self._step_columns, self._episode_columns = tables.steps, [*tables.episodes, identity]
        said = {KEY: source.about, COLUMNS_KEY: json_text([column.to_json() for column in columns.values()])}
        steps, episodes = (
            pa.schema([column.field for column in made], said) for made in (self._step_columns, self._episode_columns)
        )
        dictionaries = [path for column in columns.values() for path in _stored_as(column) if column.has_few_values]
        self._steps = _Files(target / "steps", steps, ["episode", "step"], dictionaries)
        self._episodes = _Files(target / "episodes", episodes, ["episode"], dictionaries)

    def close(self) -> None:
        self._steps.close()
        self._episodes.close()

    def abandon(self) -> None:
        self._steps.abandon()
        self._episodes.abandon()

    def add(self, runs: StepRuns) -> None:
        if runs.size:
            self._steps.add([column.make(runs) for column in self._step_columns])
        if runs.closes.any():
            episodes = runs.episode[runs.closes]
            self._episodes.add([column.make(episodes, runs) for column in self._episode_columns])


class _Files:
    """A table, in files of some row groups each."""

    def __init__(self, folder: FilePath, schema: pa.Schema, order: list[str], dictionaries: list[str]):
        folder.mkdir()
        self._folder, self._schema = folder, schema
        plain = [field.name for field in schema if not pa.types.is_nested(field.type)]
        whole = [name for name in plain if not pa.types.is_floating(schema.field(name).type)]
        self._options = {
            "compression": "zstd",
            "use_dictionary": [*dictionaries, *whole],
            "write_statistics": [*plain, "reward"],
            "sorting_columns": pq.SortingColumn.from_ordering(schema, [(name, "ascending") for name in order]),
        }
        self._held: list[pa.RecordBatch] = []
        self._rows = self._bytes = self._count = 0
        self._file: Any = None
        self._writer: pq.ParquetWriter | None = None

    def add(self, arrays: list[pa.Array]) -> None:
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._held.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._rows >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self._write_group()

    def _write_group(self) -> None:
        if self._writer is None:
            self._file = open(self._folder / f"{self._count:05}.parquet", "wb")  # noqa: SIM115 - closed by _end_file()
            self._writer = pq.ParquetWriter(self._file, self._schema, **self._options)
            self._count += 1
        table = pa.Table.from_batches(self._held, self._schema)
        self._writer.write_table(table, row_group_size=max(1, self._rows))
        self._held, self._rows, self._bytes = [], 0, 0
        if self._file.tell() >= _FILE_BYTES:
            self._end_file()

    def _end_file(self) -> None:
        assert self._writer is not None
        self._writer.close()
        self._file.close()
        self._writer = self._file = None

    def close(self) -> None:
        if self._held or not self._count:
            self._write_group()
        if self._writer is not None:
            self._end_file()

    def abandon(self) -> None:
        """Close the file after an error."""
        if self._file is not None:
            self._file.close()


def _stored_as(column: ArrowColumn) -> Iterator[str]:
    """Yield Parquet's names for its values in the tables."""
    names = {"observations": ("observation", "final_observation"), "actions": ("action",), "rewards": ("reward",)}
    for name in names.get(str(column.path[0]), (str(column.path[0]),)):
        parts = [name, *map(str, column.path[1:]), *["list", "element"] * bool(column.kind == NUMBER and column.shape)]
        yield ".".join(parts)
