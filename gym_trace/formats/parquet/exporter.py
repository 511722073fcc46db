"""A trace as Parquet: steps/ and episodes/, which DuckDB, Polars, pandas, Spark and Ray Data read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path as FilePath
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gym_trace.formats.contract import Plan, Target, losses
from gym_trace.formats.identity import KEY
from gym_trace.formats.parquet.columns import NUMBER, Column, columns_of, table_column
from gym_trace.formats.source import Source
from gym_trace.formats.steps.plain import json_text, tagged, untagged
from gym_trace.formats.steps.windows import KEPT, Block
from gym_trace.model.layout import Layout, Path, put_together
from gym_trace.model.values import Array, objects, row_of

COLUMNS_KEY = "gym_trace.columns"
_GROUP_ROWS, _GROUP_BYTES = 122_880, 32 << 20  # of a row group: whichever comes first
_FILE_BYTES = 256 << 20  # after which another file is begun
_TIME = pa.timestamp("us")  # UTC. Spark has no nanoseconds, and DuckDB needs a package more for a time zone


@dataclass(frozen=True)
class ParquetExporter:
    """Parquet: a table of steps and a table of episodes, for DuckDB, Polars, pandas, Spark and Ray Data"""

    name: ClassVar[str] = "parquet"
    makes: ClassVar[str] = "directory"
    finals: ClassVar[str] = KEPT

    def plan(self, source: Source) -> Plan:
        return Plan(list(losses(source, "dtype")), partial(self._write, source), self._how_to_load)

    def _write(self, source: Source, target: Target) -> None:
        tables = _Tables(source, target.staged)
        try:
            for block in source.blocks():
                tables.add(block)
                source.advance(block.size)
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

    def __init__(self, source: Source, target: FilePath):
        self._source, self._table = source, source.episodes
        self._columns = columns_of(source)
        rewards = self._columns[("rewards",)]
        self._objectives = math.prod(rewards.shape) if rewards.kind == NUMBER and rewards.shape else 0
        self._has_large_seeds = bool((self._table["seed"] < -1).any())
        readers = source.trace.readers
        metadata = [None if reader.metadata is None else json_text(tagged(reader.metadata)) for reader in readers]
        environments = [reader.about.environment.get("id") for reader in readers]
        self._of_writers = environments, [one.split for one in readers], metadata, [one.writer for one in readers]
        said = {KEY: source.about, COLUMNS_KEY: json_text([column.told() for column in self._columns.values()])}
        steps = pa.schema([field for field in self._step_fields() if field is not None], said)
        episodes = pa.schema([field for field in self._episode_fields() if field is not None], said)
        dictionaries = [
            path for column in self._columns.values() for path in _stored_as(column) if column.has_few_values
        ]
        self._steps = _Files(target / "steps", steps, ["episode", "step"], dictionaries)
        self._episodes = _Files(target / "episodes", episodes, ["episode"], dictionaries)
        self._rewarded = source.trace.scan(columns=["rewards"])  # for returns of several objectives

    def close(self) -> None:
        self._steps.close()
        self._episodes.close()

    def abandon(self) -> None:
        self._steps.abandon()
        self._episodes.abandon()

    # -- what they have -----------------------------------------------------------------------------------------------

    def _step_fields(self) -> Iterator[pa.Field | None]:
        yield pa.field("episode", pa.int64(), nullable=False)
        yield pa.field("step", pa.int64(), nullable=False)
        yield self._space("observation", "observations")[0]
        yield self._space("action", "actions")[0]
        yield self._columns[("rewards",)].field("reward") if self._columns[("rewards",)].is_there else None
        yield pa.field("terminated", pa.bool_(), nullable=False)
        yield pa.field("truncated", pa.bool_(), nullable=False)
        if ("infos",) in self._columns:
            yield self._columns[("infos",)].field("info")
        notes = [column.field(str(column.path[1])) for column in self._notes if column.is_there]
        if notes:
            yield pa.field("annotations", pa.struct(notes), nullable=False)

    @property
    def _notes(self) -> list[Column]:
        return sorted(column for path, column in self._columns.items() if path[0] == "annotations")

    def _episode_fields(self) -> Iterator[pa.Field | None]:
        whole, text = pa.int64(), pa.string()
        several = pa.list_(pa.field("element", pa.float64(), nullable=False), self._objectives)
        yield pa.field("episode", whole, nullable=False)
        yield pa.field("steps", whole, nullable=False)
        yield pa.field("return", several if self._objectives else pa.float64())
        yield pa.field("outcome", text, nullable=False)
        yield pa.field("seed", text if self._has_large_seeds else whole)
        yield pa.field("options", text)
        yield self._space("final_observation", "observations")[0]
        yield pa.field("has_final_observation", pa.bool_(), nullable=False)
        yield pa.field("environment", text)
        yield pa.field("split", text, nullable=False)
        yield pa.field("metadata", text)
        yield pa.field("writer", text, nullable=False)
        for name in ("episode_id", "lane", "first_step"):
            yield pa.field(name, whole, nullable=False)
        for name in ("start_time", "end_time"):
            yield pa.field(name, _TIME)
        yield pa.field(KEY, text, nullable=False)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def add(self, block: Block) -> None:
        if block.size:
            self._steps.add(list(self._rows_of_steps(block)))
        if block.closes.any():
            self._episodes.add(list(self._rows_of_episodes(block)))

    def _rows_of_steps(self, block: Block) -> Iterator[pa.Array | None]:
        columns = block.columns
        first = self._table["first_step"][block.episodes] + block.starts
        ends = np.cumsum(block.steps)
        yield pa.array(np.repeat(block.episodes, block.steps))
        yield pa.array(np.repeat(first - (ends - block.steps), block.steps) + np.arange(block.size))
        before: Any = slice(0, -1) if len(block.steps) == 1 else block.before
        yield self._space("observation", "observations", self._rows_under("observations", block, before))[1]
        yield self._space("action", "actions", self._rows_under("actions", block))[1]
        rewards = self._columns[("rewards",)]
        yield rewards.encoded(columns[("rewards",)]) if rewards.is_there else None
        yield pa.array(columns[("terminations",)])
        yield pa.array(columns[("truncations",)])
        nothing = objects([None] * block.size)
        if ("infos",) in self._columns:
            yield self._columns[("infos",)].encoded(columns.get(("infos",), nothing))
        notes = [column for column in self._notes if column.is_there]
        if notes:
            arrays = [column.encoded(columns.get(column.path, nothing)) for column in notes]
            yield pa.StructArray.from_arrays(arrays, fields=[column.field(str(column.path[1])) for column in notes])

    def _layout(self, root: str) -> Layout:
        return self._source.layouts.observations if root == "observations" else self._source.layouts.actions

    def _space(self, name: str, root: str, rows: dict[Path, Array] | None = None) -> tuple[Any, Any]:
        """Return the field and the array of a space, None each where it has nothing that tables have."""
        return table_column(name, self._layout(root), self._columns, (root,), rows) or (None, None)

    def _rows_under(self, root: str, block: Block, which: Any = slice(None)) -> dict[Path, Array]:
        """The rows of each column of a space."""
        layout, whole = self._layout(root), (root,)
        if whole in self._columns and whole not in block.columns:  # JSON of what has the structure of its space
            tree = put_together(layout, [block.columns[leaf.path] for leaf in layout.leaves()])
            places = range(block.size + len(block.steps) * (root == "observations"))
            return {whole: objects([row_of(tree, place) for place in places])[which]}
        return {path: rows[which] for path, rows in block.columns.items() if path[0] == root}

    def _rows_of_episodes(self, block: Block) -> Iterator[pa.Array | None]:
        places = block.episodes[block.closes]
        table = self._table[places]
        writers = table["writer"].tolist()
        identities = self._source.identities(places)
        yield pa.array(places)
        yield pa.array(table["steps"])
        yield self._returns(table)
        yield pa.array(table["outcome"].tolist(), pa.string())
        yield self._seeds(table["seed"].tolist(), identities)
        options = (json.loads(text).get("options") if '"options"' in text else None for text in identities)
        yield pa.array([None if given is None else json_text(given) for given in options], pa.string())
        last = self._rows_under("observations", block, block.last_observations[block.closes])
        yield self._space("final_observation", "observations", last)[1]
        yield pa.array(table["has_final_observation"])
        for texts in self._of_writers:
            yield pa.array([texts[writer] for writer in writers], pa.string())
        for name in ("episode_id", "lane", "first_step"):
            yield pa.array(table[name].astype(np.int64))
        for name in ("start_time", "end_time"):
            yield pa.array(table[name]).cast(_TIME, safe=False)
        yield pa.array(identities, pa.string())

    def _returns(self, table: Array) -> pa.Array:
        if not self._objectives:
            return pa.array(table["return"], from_pandas=True)  # which has NULL for NaN
        totals = [np.ravel(next(self._rewarded).total_reward) for _ in range(len(table))]
        known = [total.tolist() if len(total) == self._objectives else None for total in totals]
        return pa.array(known, pa.list_(pa.field("element", pa.float64(), nullable=False), self._objectives))

    def _seeds(self, seeds: list[int], identities: list[str]) -> pa.Array:
        if not self._has_large_seeds:
            return pa.array([None if seed < 0 else seed for seed in seeds], pa.int64())
        given = [untagged(json.loads(text).get("seed")) for text in identities]
        return pa.array([None if seed is None else str(seed) for seed in given], pa.string())


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

    def add(self, arrays: list[pa.Array | None]) -> None:
        batch = pa.RecordBatch.from_arrays([array for array in arrays if array is not None], schema=self._schema)
        self._held.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._rows >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self._write_group()

    def _write_group(self) -> None:
        if self._writer is None:
            self._file = open(self._folder / f"{self._count:05}.parquet", "wb")  # noqa: SIM115
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


def _stored_as(column: Column) -> Iterator[str]:
    """Yield Parquet's names for its values in the tables."""
    names = {"observations": ("observation", "final_observation"), "actions": ("action",), "rewards": ("reward",)}
    for name in names.get(str(column.path[0]), (str(column.path[0]),)):
        parts = [name, *map(str, column.path[1:]), *["list", "element"] * bool(column.kind == NUMBER and column.shape)]
        yield ".".join(parts)
