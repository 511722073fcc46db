"""Parquet as DuckDB, Polars, pandas, Spark and Ray Data read it: each gets the path alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import local_ray
import numpy as np
import pytest
from planted_defects import check_exporter

from gym_trace import TraceRecordingWrapper, open_trace
from gym_trace.data.json_values import untagged
from gym_trace.exchange.formats.conformance import (
    Loaded,
    check_export,
    check_importer,
    check_round_trip,
    difference,
    make_zoo,
)
from gym_trace.exchange.formats.exporting import export
from gym_trace.exchange.formats.parquet.traces import ParquetExporter, ParquetImporter
from gym_trace.exchange.formats.source import ExportSource

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

IS_NARROW = False  # the reader has only some numeric types: Spark, and Python lists
Table = Any  # a pyarrow.Table
Reader = Callable[[Path, str], Table]


class Constant(gymnasium.Env[Any, Any]):
    """Five steps of the same reward."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, reward: float):
        self.reward, self.step_count = reward, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.step_count = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.step_count += 1
        return np.ones(2, np.float32), self.reward, self.step_count == 5, False, {}


def with_duckdb(path: Path, table: str) -> Table:
    duckdb = pytest.importorskip("duckdb")
    order = "episode, step" if table == "steps" else "episode"
    found = duckdb.sql(f"SELECT * FROM '{path}/{table}/*.parquet' ORDER BY {order}").arrow()
    return found.read_all() if isinstance(found, pa.RecordBatchReader) else found


def with_polars(path: Path, table: str) -> Table:
    return pytest.importorskip("polars").read_parquet(path / table).to_arrow()


def with_pandas(path: Path, table: str) -> Table:
    frame = pytest.importorskip("pandas").read_parquet(path / table)
    return {name: frame[name].tolist() for name in frame.columns}


def with_spark(path: Path, table: str) -> Table:
    spark = pytest.importorskip("pyspark.sql").SparkSession
    session = spark.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    order = ["episode", "step"] if table == "steps" else ["episode"]
    return session.read.parquet(str(path / table)).orderBy(*order).toArrow()


def with_ray(path: Path, table: str) -> Table:
    rows = local_ray.start().data.read_parquet(str(path / table)).take_all()
    rows.sort(key=lambda row: (row["episode"], row.get("step", 0)))
    names = pq.read_schema(next((path / table).glob("*.parquet"))).names
    return {name: [row[name] for row in rows] for name in names}


def schema_of_steps(path: Path) -> Any:
    return pq.read_schema(next((path / "steps").glob("*.parquet")))


def loader(read: Reader, schema_of: Callable[[Path], Any] = schema_of_steps) -> Callable[[Path], Iterator[Loaded]]:
    """load() of the conformance tests by one of these packages."""

    def load(path: Path) -> Iterator[Loaded]:
        forms = {tuple(form[0]): form for form in json.loads(schema_of(path).metadata[b"gym_trace.columns"])}
        steps, episodes = (columns(read(path, table)) for table in ("steps", "episodes"))
        begin = 0
        for row, count in enumerate(episodes["steps"]):
            some = {name: values[begin : begin + count] for name, values in steps.items()}
            begin += count
            assert some["episode"] == [row] * count
            one = {name: values[row] for name, values in episodes.items()}
            observed = [*some["observation"], one["final_observation"]]
            notes = {} if "annotations" not in some else dict(some["annotations"][0]) if count else {}
            infos = some.get("info")
            yield Loaded(
                tree(observed, ("observations",), forms),
                tree(some["action"], ("actions",), forms),
                leaf(some["reward"], forms[("rewards",)]),
                np.array(some["terminated"], np.bool_),
                np.array(some["truncated"], np.bool_),
                seed=None if missing(one["seed"]) else int(one["seed"]),
                options=None if missing(one["options"]) else untagged(json.loads(one["options"])),
                outcome=one["outcome"],
                infos=None if infos is None else [untagged(json.loads(text)) for text in infos],
                annotations={
                    name: leaf([row[name] for row in some["annotations"]], forms[("annotations", name)])
                    for name in notes
                },
                identity=one["gym_trace"],
            )

    return load


def missing(value: Any) -> bool:
    return value is None or value != value  # pandas has NaN for a number that is not there


def columns(table: Table) -> dict[str, list[Any]]:
    """Plain values by column, each number as it was read."""
    if isinstance(table, dict):
        return table
    return {name: values(table[name].combine_chunks()) for name in table.column_names}


def values(array: Any) -> list[Any]:
    """The rows of an Arrow array: lists of numbers as NumPy arrays, so that they keep their dtype."""
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_struct(array.type):
        parts = {field.name: values(array.field(field.name)) for field in array.type}
        return [{name: rows[row] for name, rows in parts.items()} for row in range(len(array))]
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        return [None if row is None else np.asarray(row.values) for row in array]
    if (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)) and not array.null_count:
        return list(array.to_numpy())
    return array.to_pylist()


def tree(rows: list[Any], path: tuple[Any, ...], forms: dict[Any, Any]) -> Any:
    """The rows of a space; structs are Dicts, or Tuples if their names are numbers."""
    if path in forms:
        return leaf(rows, forms[path])
    below = {form[len(path)] for form in forms if form[: len(path)] == path}
    ordered = list(rows[0] if rows else sorted(below, key=str))
    keys = [key if key in below else int(key) for key in ordered]
    parts = {key: tree([row[str(key)] for row in rows], (*path, key), forms) for key in keys}
    return tuple(parts.values()) if all(isinstance(key, int) for key in keys) else parts


def leaf(rows: list[Any], form: Any) -> Any:
    """The rows of a leaf: of the dtype that was read, and the shape that is known of them."""
    _, kind, dtype, shape, *_ = form
    if kind == "text":
        return list(rows)
    if kind == "json":
        return [None if row is None else untagged(json.loads(row)) for row in rows]
    if any(missing(row) for row in rows if not isinstance(row, (np.ndarray, list))):
        return rows
    found = np.array(rows) if rows else np.empty(0, dtype)
    if found.dtype.kind == "O" or found.dtype != np.dtype(dtype):  # readers with fewer types: the numbers are equal
        same = found.astype(dtype)
        assert found.dtype.kind in "iufbO"
        assert np.array_equal(same.astype(found.dtype), found, equal_nan=found.dtype.kind == "f")
        found = same if IS_NARROW else found
    return found.reshape(len(rows), *shape)


@pytest.mark.parametrize("read", [with_duckdb, with_polars])
def test_traces_of_every_kind_are_what_is_read(read: Reader, tmp_path: Path) -> None:
    assert check_exporter(ParquetExporter(), loader(read), tmp_path) == {}


@pytest.mark.parametrize("read", [with_duckdb, with_polars])
def test_real_environments_are_what_is_read(read: Reader, real: Path, tmp_path: Path) -> None:
    check_export(ParquetExporter(), loader(read), real, tmp_path / "out")


def test_a_trace_comes_back_bit_for_bit(tmp_path: Path) -> None:
    assert check_importer(ParquetExporter(), ParquetImporter(), tmp_path) == {}


def test_a_real_environment_comes_back_bit_for_bit(real: Path, tmp_path: Path) -> None:
    assert check_round_trip(ParquetExporter(), ParquetImporter(), real, tmp_path / "out", tmp_path / "back") == []


@pytest.mark.parametrize("read", [with_pandas, with_spark, with_ray])
def test_readers_with_fewer_types_read_the_same_numbers(
    read: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "IS_NARROW", True)
    for name, trace in make_zoo(tmp_path / "traces", ("dict", "text", "seeds")).items():
        check_export(ParquetExporter(), loader(read), trace, tmp_path / name)


@pytest.mark.parametrize("name", ["CartPole", "MiniGrid", "Pong"])
def test_they_read_real_environments(
    name: str, record: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "IS_NARROW", True)
    export(record(name), tmp_path / "out", "parquet")
    for read in (with_pandas, with_ray) if name == "Pong" else (with_pandas, with_spark, with_ray):
        problem = difference(ExportSource(open_trace(record(name))), loader(read)(tmp_path / "out"), ())
        assert not problem, f"{read.__name__}: {problem}"


def test_ray_gives_images_their_shape(record: Callable[[str], Path], tmp_path: Path) -> None:
    export(open_trace(record("Pong"))[:1], tmp_path / "out", "parquet")
    row = local_ray.start().data.read_parquet(str(tmp_path / "out" / "steps")).take(1)[0]
    assert (row["observation"].shape, row["observation"].dtype) == ((210, 160, 3), np.uint8)


def test_duckdb_has_returns_by_policy_and_by_seed(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    for policy, reward in (("greedy", 2.0), ("random", 1.0)):
        with TraceRecordingWrapper(
            Constant(reward), tmp_path / "trace", metadata={"policy": policy}, on_exist="append"
        ) as env:
            for seed in (3, 3, 8):
                env.reset(seed=seed)
                for _ in range(5):
                    env.step(0)
    export(tmp_path / "trace", tmp_path / "out", "parquet")
    episodes = f"'{tmp_path}/out/episodes/*.parquet'"
    by_policy = duckdb.sql(
        f"""SELECT metadata->>'policy' AS policy, avg("return") FROM {episodes} GROUP BY ALL ORDER BY ALL"""
    ).fetchall()
    assert by_policy == [("greedy", 10.0), ("random", 5.0)]
    by_seed = duckdb.sql(f"""SELECT seed, avg("return"), count(*) FROM {episodes} GROUP BY ALL ORDER BY ALL""")
    assert by_seed.fetchall() == [(3, 7.5, 4), (8, 7.5, 2)]
