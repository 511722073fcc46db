"""The tables of a trace in Ray Data, Polars, pandas, Dask, Daft and Spark: each gives the rows that scan() has."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import gymnasium
import local_ray
import numpy as np
import pytest

import gym_trace
from gym_trace import TraceRecordingWrapper, open_trace, record_episodes
from gym_trace.errors import InvalidOption

pa = pytest.importorskip("pyarrow")


def record(directory: Path, episodes: int, seed: int, split: str = "train") -> Path:
    with TraceRecordingWrapper(gymnasium.make("CartPole-v1"), directory, split=split, on_exist="append") as env:
        record_episodes(env, episodes=episodes, seed=seed)
    return directory


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("trace")
    for seed, split in enumerate(("train", "eval")):
        record(directory, 200, seed, split)
    return open_trace(directory)


def means(trace: Any) -> dict[str, float]:
    """Mean return by split."""
    return {split: trace.select(f"split == '{split}'").episodes["return"].mean() for split in ("eval", "train")}


def right(trace: Any) -> list[float]:
    """Rewards of the steps with action 1."""
    return np.concatenate([episode.rewards[episode.actions == 1] for episode in trace.scan()]).tolist()


# -- Ray Data ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running() -> Any:
    return local_ray.start()


def test_ray_reads_the_steps_of_a_scan(running: Any, trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = running.data.DataContext.get_current().execution_options
    monkeypatch.setattr(options, "preserve_order", True)
    read = gym_trace.exchange.ray.read_trace(trace.directory, override_num_blocks=3)
    batches = list(read.iter_batches(batch_size=None, batch_format="pyarrow"))
    found = pa.concat_tables(batches)
    expected = trace.to_arrow().read_all()
    assert len(batches) >= 3
    assert found.num_rows == read.count() == len(expected)
    assert found.select(expected.schema.names).to_pylist() == expected.to_pylist()


def test_ray_makes_one_array_of_the_vectors_of_a_batch(running: Any, trace: Any) -> None:
    shapes = gym_trace.exchange.ray.read_trace(trace).map_batches(
        lambda batch: {"dimensions": [batch["observation"].ndim], "dtype": [str(batch["observation"].dtype)]}
    )
    assert {tuple(row.values()) for row in shapes.take_all()} == {(2, "float32")}


def test_ray_hands_columns_and_conditions_down(running: Any, trace: Any) -> None:
    from ray.data.expressions import col

    read = gym_trace.exchange.ray.read_trace(trace)
    some = read.filter(expr=(col("action") == 1) & (col("step") > 20)).select_columns(["reward"])
    count = sum(int((episode.actions[21:] == 1).sum()) for episode in trace.scan())
    assert some.count() == count
    assert [set(row) for row in some.take(2)] == [{"reward"}] * 2
    same = gym_trace.exchange.ray.read_trace(trace, ["reward"], "action == 1 and step > 20")
    assert same.count() == count
    grouped = gym_trace.exchange.ray.read_trace(trace, ["split", "return"], table="episodes").groupby("split")
    found = {row["split"]: row["mean(return)"] for row in grouped.mean("return").take_all()}
    assert found == pytest.approx(means(trace))


def test_ray_reads_many_traces_by_their_paths_alone(running: Any, tmp_path: Path) -> None:
    directories = [record(tmp_path / f"{k:03}", 1, k) for k in range(60)]
    read = gym_trace.exchange.ray.read_trace(directories, ["trace", "step"])
    rows = read.to_pandas().groupby("trace")["step"].max()
    assert {Path(name).name: last + 1 for name, last in rows.items()} == {
        path.name: int(open_trace(path).episodes["steps"][0]) for path in directories
    }
    source = gym_trace.exchange.ray._Traces(directories, "steps").limited(None, None)
    tasks = source.get_read_tasks(20)
    assert len(tasks) == 20
    assert max(len(pickle.dumps(task.read_fn)) for task in tasks) < 3000
    assert sum(task.metadata.num_rows for task in tasks) == pytest.approx(rows.sum() + 60, rel=0.5)


def test_ray_gets_few_tasks_that_fill_the_processors(running: Any, trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = gym_trace.exchange.ray
    one, many = module._OneTrace(trace, "steps"), module._Traces([trace] * 100, "steps")
    size = one.estimate_inmemory_data_size()
    monkeypatch.setattr(module, "_TASK_BYTES", many.estimate_inmemory_data_size())
    monkeypatch.setattr(module, "_LEAST_TASK_BYTES", size // 50)
    for processors, expected in ((1, (2, 6)), (4, (8, 8)), (1000, (50, 100))):
        monkeypatch.setattr(module.ray, "cluster_resources", lambda processors=processors: {"CPU": processors})
        assert (one.tasks(), many.tasks()) == expected
    monkeypatch.setattr(module, "_TASK_BYTES", size // 2500)
    assert one.tasks() >= 2500


def test_ray_rejects_what_is_not_there(running: Any, trace: Any) -> None:
    with pytest.raises(InvalidOption, match="no column 'frame'"):
        gym_trace.exchange.ray.read_trace(trace, ["frame"])
    with pytest.raises(InvalidOption, match="no traces"):
        gym_trace.exchange.ray.read_trace([])


# -- others -----------------------------------------------------------------------------------------------------------


def test_polars_answers(trace: Any) -> None:
    polars = pytest.importorskip("polars")
    steps = polars.scan_pyarrow_dataset(trace.to_dataset())
    assert steps.filter(polars.col("action") == 1).select("reward").collect()["reward"].to_list() == right(trace)
    episodes = polars.scan_pyarrow_dataset(trace.to_dataset("episodes"))
    found = episodes.group_by("split").agg(polars.col("return").mean()).collect()
    assert dict(found.iter_rows()) == pytest.approx(means(trace))


def test_pandas_answers(trace: Any) -> None:
    pytest.importorskip("pandas")
    episodes = trace.to_arrow(["split", "return"], table="episodes").read_pandas()
    assert episodes.groupby("split")["return"].mean().to_dict() == pytest.approx(means(trace))
    assert trace.to_arrow(["reward"], "action == 1").read_pandas()["reward"].tolist() == right(trace)


def test_dask_reads_partitions(trace: Any) -> None:
    dask = pytest.importorskip("dask.dataframe")
    steps = dask.from_map(lambda part: part.to_arrow(["action", "reward"]).read_pandas(), trace.partitions(4))
    assert steps.npartitions == 4
    assert steps[steps["action"] == 1]["reward"].compute(scheduler="sync").tolist() == right(trace)


def test_daft_reads_arrow(trace: Any) -> None:
    daft = pytest.importorskip("daft")
    steps = daft.from_arrow(trace.to_arrow(["action", "reward"]).read_all())
    assert steps.where(daft.col("action") == 1).to_pydict()["reward"] == right(trace)


def test_spark_reads_partitions(trace: Any) -> None:
    spark = pytest.importorskip("pyspark.sql").SparkSession
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

    class Steps(DataSource):
        @classmethod
        def name(cls) -> str:
            return "gym_trace"

        def schema(self) -> str:
            return "episode long, step long, action long, reward double"

        def reader(self, schema: Any) -> Any:
            return Reader(self.options["path"], schema.names)

    class Reader(DataSourceReader):
        def __init__(self, path: str, names: list[str]):
            self.path, self.names = path, names

        def partitions(self) -> Any:
            return [InputPartition(part) for part in open_trace(self.path).partitions(4)]

        def read(self, partition: Any) -> Any:
            for batch in partition.value.to_arrow(self.names):
                yield pa.RecordBatch.from_arrays(batch.columns, self.names)  # Spark wants all fields to be nullable

    session = spark.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    session.dataSource.register(Steps)
    steps = session.read.format("gym_trace").load(str(trace.directory))
    rows = steps.where("action = 1").orderBy("episode", "step").select("reward").collect()
    assert [row.reward for row in rows] == right(trace)
    session.stop()
