"""The tables of traces in Arrow and DuckDB: their rows, what is decoded for them, and partitions."""

import json
import pickle
import signal
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import forked_python
import gymnasium
import numpy as np
import pytest
from damage import flip
from long_tests import TRACES
from scripted_env import Result, ToyEnv
from shell import ok, run

import gym_trace
from gym_trace import Trace, TraceRecordingWrapper, open_trace, record_episodes
from gym_trace.edit import merge
from gym_trace.errors import CorruptTrace, InvalidOption
from gym_trace.exchange.formats.conformance import make_zoo
from gym_trace.exchange.formats.exporting import export
from gym_trace.exchange.formats.identity import KEY
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.writer_reader import WriterReader

pa = pytest.importorskip("pyarrow")
ds = pytest.importorskip("pyarrow.dataset")
pq = pytest.importorskip("pyarrow.parquet")


def cartpole(directory: Path, episodes: int = 40, split: str = "train", seed: int = 1, **options: Any) -> Path:
    options.setdefault("on_exist", "append")
    with TraceRecordingWrapper(gymnasium.make("CartPole-v1"), directory, split=split, **options) as env:
        for part in range(0, episodes, 300):
            record_episodes(env, episodes=min(300, episodes - part), seed=seed + part)
            env.flush()  # ends a chunk
    return directory


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two writers, of a split each, and several chunks of each."""
    directory = tmp_path_factory.mktemp("recorded")
    for number, split in enumerate(("train", "eval")):
        cartpole(directory, 900, split, number)
    return directory


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Episodes with large observations, in several chunks, of which some have reward 1."""

    class Pictures(ToyEnv):
        observation_space = gymnasium.spaces.Box(0, 255, (64, 64), np.uint8)
        action_space = gymnasium.spaces.Discrete(4)

        def result(self, action: Any) -> Result:
            return Result(self.observation_space.sample(), float(self.t == 43), self.t == 50)

    directory = tmp_path_factory.mktemp("pictures")
    with TraceRecordingWrapper(Pictures(), directory) as env:
        record_episodes(env, episodes=40, seed=0)
    return directory


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Chunks and columns that are read, in order."""
    read: list[tuple[int, str]] = []
    chunk = WriterReader.chunk

    def noted(self: WriterReader, number: int, roots: Any, *rows: Any) -> Any:
        read.extend((number, str(root)) for root in sorted(map(str, roots)))
        return chunk(self, number, roots, *rows)

    monkeypatch.setattr(WriterReader, "chunk", noted)
    return read


@pytest.mark.parametrize("name", TRACES or sorted(["vectors"]))
def test_the_tables_are_those_of_a_parquet_export(tmp_path: Path, name: str) -> None:
    (directory,) = make_zoo(tmp_path / "zoo", [name]).values()
    export(directory, tmp_path / "out", "parquet")
    for table in ("steps", "episodes"):
        exported = pq.read_table(tmp_path / "out" / table).replace_schema_metadata()
        exported = exported.drop_columns([column for column in exported.column_names if column == KEY])
        found = open_trace(directory).to_arrow(table=table).read_all()
        if "next_observation" in found.schema.names:
            check_next_observations(open_trace(directory), found)
            found = found.drop_columns(["next_observation"])
        assert found.schema.names == exported.schema.names
        assert found.schema.types == exported.schema.types
        assert str(found.to_pylist()) == str(exported.to_pylist()), table


def check_next_observations(trace: Trace, steps: pa.Table) -> None:
    """Compare next_observation with the observation of the next row, or the final one of the episode."""
    finals = trace.to_arrow(["episode", "final_observation"], table="episodes").read_all().to_pylist()
    final = {row["episode"]: row["final_observation"] for row in finals}
    rows = steps.to_pylist()
    for row, following in zip(rows, [*rows[1:], None]):
        is_last = following is None or following["episode"] != row["episode"]
        expected = final[row["episode"]] if is_last else following["observation"]
        assert str(row["next_observation"]) == str(expected)


def test_only_the_columns_that_are_asked_for_are_decoded(pictures: Path, decoded: list[Any]) -> None:
    trace = open_trace(pictures)
    trace.to_arrow(["episode", "step"]).read_all()
    assert not decoded
    trace.to_arrow(["reward", "episode"]).read_all()
    trace.to_arrow(["episode", "return", "split"], table="episodes").read_all()
    assert {column for _, column in decoded} == {"rewards"}


def test_batches_are_read_as_they_are_asked_for(pictures: Path, decoded: list[Any]) -> None:
    reader = open_trace(pictures).to_arrow(["observation"])
    reader.read_next_batch()
    assert 0 < len({number for number, _ in decoded}) < len(index_of(open_trace(pictures)).readers[0].chunk_positions)


CONDITIONS: list[Any] = ["action == 3 and step > 40", (ds.field("action") == 3) & (ds.field("step") > 40)]


@pytest.mark.parametrize("where", CONDITIONS)
def test_a_condition_selects_steps(pictures: Path, where: Any) -> None:
    trace = open_trace(pictures)
    everything = trace.to_arrow(["episode", "step", "action", "observation"]).read_all()
    holds = (everything["action"].to_numpy() == 3) & (everything["step"].to_numpy() > 40)
    found = trace.to_arrow(["episode", "step", "observation"], where).read_all()
    assert 0 < len(found) < len(everything)
    assert found.equals(everything.filter(pa.array(holds)).drop_columns(["action"]))


@pytest.mark.parametrize("where", ["reward == 1 and episode == 17", (ds.field("episode") == 17)])
def test_other_columns_are_decoded_only_where_a_condition_holds(pictures: Path, decoded: list[Any], where: Any) -> None:
    (found,) = (open_trace(pictures).to_arrow(["observation"], where).read_all().num_rows,)
    assert found in (1, 50)
    assert len({number for number, column in decoded if column == "observations"}) == 1


def test_conditions_of_episodes_are_those_of_select(recorded: Path) -> None:
    trace = open_trace(recorded)
    found = trace.to_arrow(["episode", "return"], "return > 50 and split == 'eval'", table="episodes").read_all()
    assert found["episode"].to_pylist() == trace.select("return > 50 and split == 'eval'").indices.tolist()
    same = trace.to_arrow(
        ["episode", "return"], (ds.field("return") > 50) & (ds.field("split") == "eval"), table="episodes"
    )
    assert same.read_all().equals(found)


def test_a_view_numbers_its_own_episodes(recorded: Path) -> None:
    view = open_trace(recorded)[[5, 1000, 7]]
    found = view.to_arrow(["episode", "step"]).read_all()
    assert found["episode"].to_pylist() == np.repeat(np.arange(3), view.episodes["steps"]).tolist()


def test_running_episodes_are_left_out_and_the_others_keep_their_numbers(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path)
    env.reset(seed=0)
    env.step(0)
    cartpole(tmp_path, 3)
    trace = open_trace(tmp_path)
    assert trace.episodes["outcome"].tolist()[0] == "running"
    for found in (trace.to_arrow(table="episodes"), *(part.to_arrow(table="episodes") for part in trace.partitions(1))):
        assert found.read_all()["episode"].to_pylist() == [1, 2, 3]
    env.close()


def test_nothing_to_read_raises(tmp_path: Path) -> None:
    trace = open_trace(cartpole(tmp_path, 2))
    with pytest.raises(InvalidOption, match="no finished episodes"):
        trace[:0].to_arrow()
    with pytest.raises(InvalidOption, match="no column 'frame'; choose from episode, step"):
        trace.to_arrow(["frame"])
    with pytest.raises(InvalidOption, match="table='runs'"):
        trace.to_arrow(table="runs")
    assert trace.to_arrow(["step"], "reward > 5").read_all().num_rows == 0
    assert trace[:0].partitions(3) == []


# -- partitions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7, 10_000])
def test_partitions_have_each_episode_once_in_order(recorded: Path, count: int) -> None:
    trace = open_trace(recorded)
    parts = [pickle.loads(pickle.dumps(part)) for part in trace.partitions(count)]
    assert 1 <= len(parts) <= count
    assert [part.first for part in parts] == np.cumsum([0, *(part.episodes for part in parts[:-1])]).tolist()
    assert sum(part.steps for part in parts) == trace.episodes["steps"].sum()
    some = parts if count < 10_000 else parts[::400]
    for part in some:
        (opened, view) = part.open(), trace[part.first : part.first + part.episodes]
        assert [episode.rewards.sum() for episode in opened] == view.episodes["return"].tolist()
    if count < 10_000:
        whole = trace.to_arrow(["episode", "step", "reward"]).read_all()
        assert pa.concat_tables([part.to_arrow(["episode", "step", "reward"]).read_all() for part in parts]).equals(
            whole
        )
        most = max(part.steps for part in parts)
        assert most < 2 * trace.episodes["steps"].sum() / count


def test_partitions_begin_with_chunks(recorded: Path) -> None:
    trace = open_trace(recorded)

    def chunk_of(episode: int) -> tuple[str, int]:
        reader, row = index_of(trace).locate(episode)
        first = reader.parts.first_of(np.array([row]))
        return reader.writer, int(np.searchsorted(reader.chunk_bounds, first, side="right")[0])

    parts = trace.partitions(3)
    assert len(parts) == 3
    assert len({chunk_of(episode) for episode in range(len(trace))}) >= 6
    for part in parts[1:]:
        assert chunk_of(part.first) != chunk_of(part.first - 1)


def test_a_partition_carries_nothing_of_other_writers_and_stays_the_same(tmp_path: Path) -> None:
    for seed in range(12):
        cartpole(tmp_path, 2, seed=seed)
    trace = open_trace(tmp_path)
    parts = trace.partitions(12)
    sizes = [len(pickle.dumps(part)) for part in parts]
    for part, size in zip(parts, sizes):
        held = [writer for writer in trace.writers if writer.encode() in pickle.dumps(part)]
        assert held == part.open().writers
        assert size < 2000
    before = [part.to_arrow().read_all() for part in parts]
    cartpole(tmp_path, 5, seed=100)
    assert [part.to_arrow().read_all() for part in parts] == before


def test_partitions_have_the_columns_of_the_whole_trace(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path, flush_seconds=0)
    for number in range(4):
        env.reset(seed=number)
        over = False
        while not over:
            if number == 3:
                env.annotate(value=0.5)
            _, _, over, _, _ = env.step(0)
    env.close()
    trace = open_trace(tmp_path)
    schemas = [part.to_arrow().schema for part in trace.partitions(4)]
    assert len(schemas) > 1
    assert all(schema == trace.to_arrow().schema for schema in schemas)
    assert schemas[0].field("annotations").type.field("value").type == pa.float64()


def test_invalid_numbers_of_partitions_raise(recorded: Path) -> None:
    with pytest.raises(InvalidOption, match=r"partitions\(0\)"):
        open_trace(recorded).partitions(0)


# -- what others do with the dataset ----------------------------------------------------------------------------------


def test_the_dataset_is_one_of_pyarrow(recorded: Path) -> None:
    trace = open_trace(recorded)
    dataset = pickle.loads(pickle.dumps(trace.to_dataset()))
    assert isinstance(dataset, ds.Dataset)
    steps = int(trace.episodes["steps"].sum())
    assert dataset.count_rows() == steps
    assert dataset.head(3, columns=["step"])["step"].to_pylist() == [0, 1, 2]
    assert dataset.take([2], columns=["step"])["step"].to_pylist() == [2]
    assert dataset.filter(ds.field("step") == 0).count_rows() == len(trace)
    assert sum(map(len, dataset.to_batches(columns=[]))) == steps
    table = dataset.to_table(columns=["reward"], filter=ds.field("action") == 1)
    assert 0 < len(table) < steps
    for name in ("get_fragments", "sort_by", "join", "join_asof", "replace_schema"):
        with pytest.raises(InvalidOption, match="to_table"):
            getattr(dataset, name)()


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    opened: list[Any] = []
    yield lambda connection: opened.append(connection) or connection
    for connection in opened:
        connection.close()


def test_duckdb_answers_without_decoding_observations(
    recorded: Path, pictures: Path, decoded: list[Any], closing: Callable[[Any], Any]
) -> None:
    pytest.importorskip("duckdb")
    trace = open_trace(recorded)
    found = closing(trace.to_duckdb()).sql("SELECT split, avg(return) FROM episodes GROUP BY split ORDER BY split")
    expected = {split: trace.select(f"split == '{split}'").episodes["return"].mean() for split in ("eval", "train")}
    assert dict(found.fetchall()) == pytest.approx(expected)
    assert not decoded
    actions = closing(open_trace(pictures).to_duckdb())
    rows = actions.sql("SELECT reward FROM steps WHERE action = 3").fetchall()
    assert {column for _, column in decoded} == {"actions", "rewards"}
    assert len(rows) == sum(int((episode.actions == 3).sum()) for episode in open_trace(pictures))
    numbers = actions.sql(
        "SELECT step FROM steps JOIN episodes USING (episode) WHERE return = 1 AND reward = 1"
    ).fetchall()
    assert numbers == [(42,)] * 40


@pytest.mark.parametrize("name", ["observation", "next_observation"])
def test_sql_and_find_steps_have_the_same_columns(recorded: Path, closing: Callable[[Any], Any], name: str) -> None:
    pytest.importorskip("duckdb")
    trace = open_trace(recorded)
    rest = "reward > 0 AND action = 1 AND NOT terminated AND step > 2"
    query = f"SELECT episode, step FROM steps WHERE {name}[3] > 0 AND {rest} ORDER BY ALL"  # lists count from 1
    rows = closing(trace.to_duckdb()).sql(query).fetchall()
    found = trace.find_steps(f"{name}[2] > 0 and {rest.lower().replace('=', '==')}")
    assert len(found) > 1000
    assert rows == list(map(tuple, found.tolist()))


def test_a_query_of_steps_computes_no_columns_of_episodes(recorded: Path) -> None:
    def columns_after(text: str) -> set[str]:
        trace = open_trace(recorded)
        gym_trace.query(text, [trace])
        return set(index_of(trace)._computed)

    assert "seed" not in columns_after("SELECT count(*) FROM steps")
    assert "seed" in columns_after("SELECT count(*) FROM steps JOIN episodes USING (episode)")
    assert list(gym_trace.query("SHOW TABLES", [open_trace(recorded)])[1]) == [["episodes"], ["steps"]]


def test_sql_of_several_traces_names_them(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    for number in (1, 2):
        cartpole(tmp_path / str(number), number)
    printed = ok(
        "sql", tmp_path / "1", tmp_path / "2", "SELECT trace, count(*) AS n FROM episodes GROUP BY ALL", "--json"
    )
    rows = sorted(map(json.loads, printed.output.splitlines()), key=lambda row: row["n"])
    assert rows == [{"trace": str(tmp_path / "1"), "n": 1}, {"trace": str(tmp_path / "2"), "n": 2}]
    printed = ok("sql", tmp_path / "1", "SELECT outcome, sum(steps) FROM episodes GROUP BY outcome")
    steps = open_trace(tmp_path / "1").episodes["steps"].sum()
    assert printed.output.split() == ["outcome", "sum(steps)", "terminated", str(steps)]


def test_columns_whose_types_differ_are_left_out_and_said(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    cartpole(tmp_path / "a", 2)
    with TraceRecordingWrapper(gymnasium.make("MountainCar-v0", max_episode_steps=9), tmp_path / "b") as env:
        record_episodes(env, episodes=3, seed=0)
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    for directories in ([tmp_path / "both"], [tmp_path / "a", tmp_path / "b"]):
        query = "SELECT environment, count(*) FROM episodes JOIN steps USING (episode) GROUP BY ALL ORDER BY 1"
        assert "CartPole-v1" in ok("sql", *directories, query).output
        refused = run("sql", *directories, "SELECT observation FROM steps")
        assert refused.exit_code == 2
        assert "the traces have different types of observation" in refused.output
    assert open_trace(tmp_path / "both").to_arrow(["episode"], table="episodes").read_all()["episode"].to_pylist() == [
        *range(5)
    ]


def test_annotations_that_only_one_trace_has_are_null_in_the_other(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    for name in ("a", "b"):
        with TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path / name) as env:
            env.reset(seed=0)
            if name == "b":
                env.annotate(value=2.5)
            env.step(0)
    query = "SELECT annotations.value FROM steps ORDER BY trace"
    values = [
        json.loads(line) for line in ok("sql", tmp_path / "a", tmp_path / "b", query, "--json").output.splitlines()
    ]
    assert values == [{"value": None}, {"value": 2.5}]


def test_an_invalid_query_is_a_usage_error(recorded: Path) -> None:
    pytest.importorskip("duckdb")
    refused = run("sql", recorded, "SELECT nonsense FROM steps")
    assert refused.exit_code == 2
    assert 'column "nonsense" not found' in refused.output
    assert run("sql", "SELECT 1").exit_code == 2
    empty = run("sql", recorded, " ; ")
    assert (empty.exit_code, empty.stderr) == (2, "error: sql: the query is empty; pass a SELECT\n")
    assert "is a directory; pass DIR, then QUERY" in run("sql", "SELECT 1", recorded).stderr
    for more in ((), ("-o", recorded / "rows.csv")):
        assert run("sql", recorded, "SELECT '\udc80'", *more).stderr == "error: sql: the query is not valid UTF-8\n"


class Nested(ToyEnv):
    observation_space: Any = gymnasium.spaces.Dict(
        image=gymnasium.spaces.Box(0, 255, (2, 3), np.uint8), direction=gymnasium.spaces.Discrete(4)
    )
    action_space = gymnasium.spaces.Discrete(4)

    def result(self, action: Any) -> Result:
        return Result(self.observation_space.sample(), 0.0, self.t == 9)


def test_a_dict_with_pictures_is_null_in_a_trace_without_observations(tmp_path: Path) -> None:
    class Blind(Nested):
        observation_space = gymnasium.spaces.Box(0, 1, (0,))

    for env, name in ((Nested(), "a"), (Blind(), "b")):
        with TraceRecordingWrapper(env, tmp_path / name) as recorded:
            record_episodes(recorded, episodes=1, seed=0)
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    rows = open_trace(tmp_path / "both").to_arrow(["observation"]).read_all()["observation"].to_pylist()
    assert [row is None for row in rows] == [False] * 9 + [True] * 9


def test_a_condition_is_evaluated_where_a_dict_has_pictures(tmp_path: Path) -> None:
    with TraceRecordingWrapper(Nested(), tmp_path) as env:
        record_episodes(env, episodes=5, seed=0)
    trace = open_trace(tmp_path)
    found = trace.to_arrow(["episode", "observation"], ds.field("observation", "direction") == 1).read_all().to_pylist()
    rows = trace.to_arrow(["episode", "observation"]).read_all().to_pylist()
    assert 0 < len(found) < len(rows)
    assert found == [row for row in rows if row["observation"]["direction"] == 1]


def test_a_query_is_written_to_a_file_whole_or_not_at_all(recorded: Path, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    table, text = tmp_path / "out.parquet", tmp_path / "out.csv"
    query = "SELECT episode, step, observation FROM steps WHERE action = 1 ORDER BY ALL; -- the end"
    rows = open_trace(recorded).to_arrow(["episode", "step", "observation"], ds.field("action") == 1).read_all()
    count = rows.num_rows
    assert ok("sql", recorded, query, "-o", table).output == f"{count:,} rows written to {table}\n"
    assert pq.read_table(table).to_pylist() == rows.to_pylist()
    assert ok("sql", recorded, "SELECT count(*) AS n FROM episodes", "-o", text).output == f"1 row written to {text}\n"
    assert text.read_text() == "n\n1800\n"
    for other in (
        "SELECT nonsense FROM steps",
        " ",
        "SELECT 1; SELECT 2",
        "CREATE TABLE x AS FROM steps",
        "SET threads=1",
    ):
        assert run("sql", recorded, other, "-o", text).exit_code == 2
    assert run("sql", recorded, "SELECT 1", "-o", text, "--json").exit_code == 2
    assert text.read_text() == "n\n1800\n"
    assert "pass a name that ends with .parquet or .csv" in run("sql", recorded, "SELECT 1", "-o", "rows.arrow").stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "out.parquet"]
    assert (
        gym_trace.write_query(
            "PIVOT (SELECT outcome FROM episodes) ON outcome USING count(*)",
            [open_trace(recorded)],
            tmp_path / "it's.csv",
        )
        == 1
    )


def test_a_full_disk_ends_a_query_with_an_error_of_one_line(recorded: Path, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    limited = """
        import resource, signal, sys
        import gym_trace
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            gym_trace.write_query("FROM steps", [gym_trace.open_trace(sys.argv[1])], sys.argv[2])
        except OSError as error:
            print(error.strerror, error.filename)
    """
    for name in ("out.parquet", "out.csv"):
        command = [sys.executable, "-c", textwrap.dedent(limited), str(recorded), str(tmp_path / name)]
        done = forked_python.run(command, capture_output=True, text=True, timeout=60)
        assert done.stdout == f"File too large {tmp_path / name}\n", done.stderr
    assert not list(tmp_path.iterdir())


def test_a_query_of_something_else_than_a_list_of_traces_raises(recorded: Path) -> None:
    pytest.importorskip("duckdb")
    given: list[Any] = [open_trace(recorded), str(recorded), [recorded], []]
    for traces in given:
        with pytest.raises(InvalidOption, match="pass a list of opened traces"):
            gym_trace.query("SELECT 1", traces)


def test_ctrl_c_stops_a_query_within_one_of_its_tasks(recorded: Path, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    endless = "SELECT count(*) FROM range(100000) a, range(100000) b, range(100000) c WHERE a.range < b.range + c.range"
    main = threading.get_ident()
    ways: list[Callable[..., Any]] = [gym_trace.query, partial(gym_trace.write_query, path=tmp_path / "rows.parquet")]
    for ask in ways:
        ctrl_c = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT))
        ctrl_c.start()
        with pytest.raises(KeyboardInterrupt):
            ask(endless, [open_trace(recorded)])
    assert not list(tmp_path.iterdir())


def test_damage_is_raised_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    cartpole(tmp_path, 300)
    (batch,) = tmp_path.glob("*.gtb")
    chunks = index_of(open_trace(tmp_path)).readers[0].batches[0].chunks
    flip(batch, int(chunks["offset"][0]) + int(chunks["length"][0]) // 2)  # damages the observations
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CorruptTrace):
            Trace(tmp_path).to_arrow().read_all()
        failed = run("sql", tmp_path, "SELECT avg(observation[1]) FROM steps")
    assert failed.exit_code == 5, failed.output
    assert ok("sql", tmp_path, "SELECT count(*) FROM steps").output
