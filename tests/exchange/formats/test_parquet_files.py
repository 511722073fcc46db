"""Parquet: the content of its tables, and tampered tables."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from scripted_env import Result, ToyEnv

from gym_trace import Trace, TraceRecordingVectorWrapper, TraceRecordingWrapper, open_trace
from gym_trace.data.json_values import json_text, tagged
from gym_trace.errors import UnreadableRecording
from gym_trace.exchange.formats.conformance import check_round_trip, make_zoo
from gym_trace.exchange.formats.exporting import export
from gym_trace.exchange.formats.importing import import_trace
from gym_trace.exchange.formats.source import ExportSource
from gym_trace.playback.column_selection import select_columns
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.scan import EPISODE, Scan, StepRuns

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
exporting = pytest.importorskip("gym_trace.exchange.formats.parquet.traces")
importing = pytest.importorskip("gym_trace.exchange.formats.parquet.traces")
tables = pytest.importorskip("gym_trace.exchange.formats.parquet.tables")


class Listed(ToyEnv):
    """Returns the given observations and rewards, one after the other; ten steps are an episode."""

    def __init__(self, space: spaces.Space[Any], observations: list[Any], rewards: list[Any]):
        super().__init__(space, spaces.Discrete(2))
        self._observations, self._rewards, self._count = observations, rewards or [1.0], 0

    def result(self, action: Any) -> Result:
        self._count += 1
        observation, reward = (rows[self._count % len(rows)] for rows in (self._observations, self._rewards))
        return Result(observation, reward, self._count % 11 == 10)


def record(directory: Path, space: Any, observations: list[Any], rewards: Any = (1.0,), notes: Any = None) -> Path:
    with TraceRecordingWrapper(Listed(space, observations, list(rewards)), directory) as env:
        over = True
        for step in range(45):
            if over:
                env.reset(seed=step)
            if notes is not None and (note := notes(step)):
                env.annotate(**note)
            _, _, over, _, _ = env.step(env.action_space.sample())
    return directory


def box(*shape: int, dtype: Any = np.float32) -> spaces.Box:
    return spaces.Box(0, 1, shape, dtype)


ODD: dict[str, tuple[Any, list[Any]]] = {
    "no elements": (box(0, 3), [np.zeros((0, 3), np.float32)]),
    "no elements in a dict": (
        spaces.Dict({"a": box(0), "b": box(2)}),
        [{"a": np.zeros(0, np.float32), "b": np.ones(2, np.float32)}],
    ),
    "an empty dict in a dict": (
        spaces.Dict({"a": spaces.Dict({}), "b": box(2)}),
        [{"a": {}, "b": np.ones(2, np.float32)}],
    ),
    "keys alike": (
        spaces.Dict({"x": box(1), "X": box(2), "": box(1), "a.b": box(1), "a/b": spaces.Discrete(3)}),
        [{"x": np.ones(1, "f4"), "X": np.ones(2, "f4"), "": np.ones(1, "f4"), "a.b": np.zeros(1, "f4"), "a/b": 2}],
    ),
    "half": (box(3, dtype=np.float16), [np.array([0.1, np.nan, -0.0], np.float16), np.zeros(3, np.float16)]),
    "a matrix of bool": (box(2, 2, dtype=np.bool_), [np.eye(2, dtype=np.bool_)]),
    "large integers": (box(dtype=np.uint64), [np.array(2**64 - 1, np.uint64), np.array(0, np.uint64)]),
    "text": (spaces.Text(9), ["a", "\x00'\"\n", "é", ""]),
    "text of no encoding": (spaces.Text(9), ["a", "\ud800"]),
    "several dtypes": (box(2), [np.ones(2, np.float32), np.ones(2, np.float64)]),
    "several shapes": (box(2), [np.ones(2, np.float32), np.ones((1, 2), np.float32)]),
    "a sequence": (spaces.Sequence(spaces.Discrete(3)), [(1, 2), (), (np.int64(1),)]),
    "complex": (box(1, dtype=np.float64), [np.array([1 + 2j])]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ODD)
def test_odd_values_come_back(name: str, tmp_path: Path) -> None:
    trace = record(tmp_path / "trace", *ODD[name])
    assert _back(trace, tmp_path) == []


@pytest.mark.filterwarnings("ignore")
def test_values_without_the_structure_of_their_space_come_back(tmp_path: Path) -> None:
    seen = [{"a": np.ones(2, np.float32)}, None, {"b": 1}]
    trace = record(tmp_path / "trace", spaces.Dict({"a": box(2)}), seen)
    export(trace, tmp_path / "out", "parquet", strict=True)
    import_trace(tmp_path / "out", tmp_path / "back")
    told = [
        [json_text([tagged(row) for row in episode.observations]) for episode in open_trace(path)]
        for path in (trace, tmp_path / "back")
    ]
    assert told[0] == told[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "rewards",
    [
        [1, 0.5],
        [np.float32(1), np.float32(0.1)],
        [1, np.float64(2)],
        [np.array([1.0, 2.0])],
        [None, 1.0],
        [np.inf, np.nan],
    ],
    ids=str,
)
def test_rewards_of_every_kind_come_back(rewards: list[Any], tmp_path: Path) -> None:
    assert _back(record(tmp_path / "trace", box(2), [np.ones(2, np.float32)], rewards), tmp_path) == []


@pytest.mark.parametrize(
    "note",
    [
        lambda step: {"value": step / 3} if step % 3 else {},
        lambda step: {"value": float("nan") if step % 2 else None},
        lambda step: {"value": np.float32(step)} if step > 20 else {},
        lambda step: {"value": np.arange(3.0) + step} if step % 7 else {},
        lambda step: {"value": np.full((2, 3), step, np.uint8)} if step % 7 else {},
        lambda step: {"value": step % 2 == 0} if step % 5 else {},
        lambda step: {"value": "text" if step % 2 else 2**70, "other": {"a": (1, None)}},
        lambda step: {"value": step if step % 2 else np.int64(step)} if step % 3 else {},
        lambda step: {"value": np.array(step / 3)} if step % 3 else {},
        lambda step: {"value": float(step) if step % 2 else np.float64(step)} if step % 3 else {},
        lambda step: {"value": None},
    ],
)
def test_annotations_that_some_steps_lack_come_back(note: Callable[[int], Any], tmp_path: Path) -> None:
    assert _back(record(tmp_path / "trace", box(2), [np.ones(2, np.float32)], notes=note), tmp_path) == []


def test_an_episode_without_steps_has_no_vector_as_its_return(tmp_path: Path) -> None:
    trace = record(tmp_path / "trace", box(2), [np.ones(2, np.float32)], [np.array([1.0, 2.0])])
    with TraceRecordingWrapper(Listed(box(2), [np.ones(2, np.float32)], []), trace, on_exist="append") as env:
        env.reset()
    assert _back(trace, tmp_path) == []
    returns = pq.read_table(tmp_path / "out" / "episodes")["return"].to_pylist()
    assert (returns[0], returns[-1]) == ([9.0, 18.0], None)


def test_lists_of_a_wrong_length_are_refused(tmp_path: Path) -> None:
    def note(step: int) -> dict[str, Any]:
        return {"value": np.arange(3.0)} if step % 7 else {}

    export(record(tmp_path / "trace", box(2), [np.ones(2, np.float32)], notes=note), tmp_path / "out", "parquet")
    file = tmp_path / "out" / "steps" / "00000.parquet"
    steps = pq.read_table(file)
    place, field = steps.schema.get_field_index("annotations"), steps.schema.field("annotations")
    uneven = [
        None if row["value"] is None else [0.0] * (2 + i % 2 * 2) for i, row in enumerate(steps[place].to_pylist())
    ]
    notes = pa.StructArray.from_arrays([pa.array(uneven, field.type.field(0).type)], fields=list(field.type))
    pq.write_table(steps.set_column(place, field, notes), file)
    with pytest.raises(UnreadableRecording, match="a list does not have 3 elements"):
        import_trace(tmp_path / "out", tmp_path / "back")


def _back(trace: Path, directory: Path) -> list[str]:
    lost = check_round_trip(
        exporting.ParquetExporter(), importing.ParquetImporter(), trace, directory / "out", directory / "back"
    )
    schema = pq.read_schema(directory / "out" / "steps" / "00000.parquet")
    assert schema.names[:2] == ["episode", "step"]
    return lost


def test_a_seed_that_no_integer_column_holds_makes_the_seeds_text(tmp_path: Path) -> None:
    trace = make_zoo(tmp_path / "zoo", ["seeds"])["seeds"]
    export(trace, tmp_path / "out", "parquet")
    seeds = pq.read_table(tmp_path / "out" / "episodes")["seed"].to_pylist()
    assert seeds == [None if episode.seed is None else str(episode.seed) for episode in open_trace(trace)]


def test_tables_have_types_that_say_what_is_in_them(tmp_path: Path) -> None:
    export(make_zoo(tmp_path / "zoo", ["dict"])["dict"], tmp_path / "out", "parquet")
    steps = pq.read_schema(tmp_path / "out" / "steps" / "00000.parquet")
    assert [field.nullable for field in steps] == [False] * 7
    camera = steps.field("observation").type.field("camera").type
    assert (camera.shape, camera.value_type, camera.permutation) == ([16, 12, 3], pa.uint8(), None)
    angles = steps.field("observation").type.field("arm").type.field("angles").type
    assert (angles.list_size, angles.value_type) == (4, pa.float32())
    episodes = pq.read_schema(tmp_path / "out" / "episodes" / "00000.parquet")
    assert episodes.field("final_observation").type == steps.field("observation").type
    assert (episodes.field("seed").type, episodes.field("seed").nullable) == (pa.int64(), True)


def test_files_have_row_groups_statistics_and_dictionaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "_GROUP_ROWS", 5000)
    monkeypatch.setattr(exporting, "_FILE_BYTES", 100_000)
    trace = make_zoo(tmp_path / "zoo", ["long"])["long"]
    check = check_round_trip(
        exporting.ParquetExporter(), importing.ParquetImporter(), trace, tmp_path / "out", tmp_path / "back"
    )
    assert check == []
    files = sorted((tmp_path / "out" / "steps").iterdir())
    assert len(files) > 2
    group = pq.read_metadata(files[1]).row_group(0)
    assert 5000 <= group.num_rows < 10_000
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    assert columns["step"].statistics.max - columns["step"].statistics.min == group.num_rows - 1
    assert columns["step"].statistics.null_count == 0
    assert "RLE_DICTIONARY" in columns["action"].encodings
    assert "RLE_DICTIONARY" not in columns["observation.list.element"].encodings


def test_identities_of_many_episodes_equal_those_of_each(tmp_path: Path) -> None:
    for trace in make_zoo(tmp_path / "zoo", ["ends", "seeds", "infos", "parts", "flags-within"]).values():
        source = ExportSource(open_trace(trace))
        many = source.identities(np.arange(len(source.trace))[::-1])
        assert [json.loads(text) for text in many[::-1]] == [json.loads(source.identity(e)) for e in source.trace]


def _check_blocks(trace: Trace) -> list[StepRuns]:
    """Check that blocks have what the episodes have. Return them."""
    blocks = list(Scan(index_of(trace), select_columns(trace, None).columns, order=EPISODE))
    for run in (run for block in blocks for run in block.each()):
        start = int(run.starts_at[0])
        part = trace[int(run.episode[0])][start : start + run.size]
        for column in ("actions", "rewards", "terminations", "truncations"):
            if (column,) in run.columns:
                assert np.array_equal(run.columns[(column,)], getattr(part, column))
        if ("observations",) in run.columns:
            assert run.columns[("observations",)].tobytes() == part.observations.tobytes()
    assert [int(it) for block in blocks for it in block.episode[block.closes]] == list(range(len(trace)))
    return blocks


def test_blocks_of_episodes_are_what_the_episodes_are(tmp_path: Path) -> None:
    for path in make_zoo(tmp_path / "zoo", ["vectors", "dict", "text", "ends", "parts", "flags-within"]).values():
        whole = open_trace(path)
        for trace in (whole, whole[::-1], whole[[0, 2, 2, 1]] if len(whole) > 2 else whole):
            _check_blocks(trace)


def test_episodes_of_lanes_that_lie_in_several_chunks_come_many_at_once(tmp_path: Path) -> None:
    envs = TraceRecordingVectorWrapper(gymnasium.make_vec("CartPole-v1", num_envs=8), tmp_path / "lanes")
    envs.reset(seed=0)
    envs.action_space.seed(0)
    for step in range(400):
        envs.step(envs.action_space.sample())
        if step % 20 == 0:
            envs.flush()  # ends a chunk
    envs.close()
    whole = open_trace(tmp_path / "lanes")
    assert len(whole) > 100
    assert np.diff(index_of(whole).readers[0].parts.first).max() > 2
    assert len(_check_blocks(whole)) < 40
    _check_blocks(whole[::2])
    _check_blocks(whole[::-1])


# -- tampered with ----------------------------------------------------------------------------------------------------


def _tampered(tmp_path: Path, table: str, change: Callable[[Any], Any]) -> Path:
    if not (tmp_path / "out").exists():
        export(make_zoo(tmp_path / "zoo", ["vectors"])["vectors"], tmp_path / "out", "parquet")
    file = tmp_path / "out" / table / "00000.parquet"
    changed = change(pq.read_table(file))
    pq.write_table(changed, file)
    return tmp_path / "out"


def _with(name: str, values: Callable[[list[Any]], list[Any]]) -> Callable[[Any], Any]:
    def change(table: Any) -> Any:
        place = table.schema.get_field_index(name)
        field = table.schema.field(place)
        return table.set_column(place, field, pa.array(values(table[name].to_pylist()), field.type))

    return change


TAMPERED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a step is gone": ("steps", lambda table: table.slice(1)),
    "an episode is gone": ("episodes", lambda table: table.slice(0, table.num_rows - 1)),
    "episodes in another order": ("episodes", lambda table: table.take(list(range(table.num_rows))[::-1])),
    "no observations": ("steps", lambda table: table.drop_columns(["observation"])),
    "a column is another type": ("steps", lambda table: table.set_column(4, "reward", table["step"])),
    "a column is twice": ("steps", lambda table: table.append_column("reward", table["step"])),
    "no metadata": ("episodes", lambda table: table.replace_schema_metadata({})),
    "metadata is garbage": ("episodes", lambda table: table.replace_schema_metadata({"gym_trace": b"\xff"})),
    "columns are garbage": (
        "episodes",
        lambda table: table.replace_schema_metadata({**table.schema.metadata, b"gym_trace.columns": b'[["a"], 7]'}),
    ),
    "a huge shape": (
        "episodes",
        lambda table: table.replace_schema_metadata(
            {
                **table.schema.metadata,
                b"gym_trace.columns": table.schema.metadata[b"gym_trace.columns"].replace(b"[4]", b"[4, 1073741824]"),
            }
        ),
    ),
    "more steps than there are": ("episodes", _with("steps", lambda steps: [*steps[:-1], 10**12])),
    "fewer steps than none": ("episodes", _with("steps", lambda steps: [-1, *steps[1:]])),
    "an identity is garbage": ("episodes", _with("gym_trace", lambda texts: ["{" for _ in texts])),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_tables_that_were_tampered_with_are_refused_in_a_line(name: str, tmp_path: Path) -> None:
    path = _tampered(tmp_path, *TAMPERED[name])
    with pytest.raises(UnreadableRecording) as raised:
        import_trace(path, tmp_path / "back", "parquet")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "back").exists()


def test_files_that_are_cut_or_flipped_are_refused_or_read(tmp_path: Path) -> None:
    export(make_zoo(tmp_path / "zoo", ["vectors"])["vectors"], tmp_path / "out", "parquet")
    file = tmp_path / "out" / "steps" / "00000.parquet"
    whole, random, told = file.read_bytes(), np.random.default_rng(0), []
    for attempt in range(60):
        data = bytearray(whole)
        if attempt % 3 == 0:
            data = data[: int(random.integers(len(data)))]
        else:
            for place in random.integers(len(data), size=1 + attempt % 5):
                data[place] ^= int(random.integers(1, 256))
        file.write_bytes(data)
        try:
            import_trace(tmp_path / "out", tmp_path / f"back{attempt}", "parquet")
        except UnreadableRecording as error:
            told.append(str(error))
    assert len(told) > 10
    assert not any("\n" in text for text in told)


def test_pictures_in_a_struct_are_read_where_arrow_has_no_indices_for_them(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    pictures = [{"bytes": generator.bytes(20_000), "path": f"{row}.png"} for row in range(300)]
    pq.write_table(pa.table({"picture": pictures, "row": list(range(300))}), tmp_path / "t", row_group_size=150)
    found = [row for batch in tables.batches(tmp_path / "t", 100, ["picture", "row"]) for row in batch.to_pylist()]
    assert found == [{"picture": picture, "row": row} for row, picture in enumerate(pictures)]
