"""Minari and D4RL without their packages: round trips, what is refused, and files that are not what they say."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from long_tests import LONG
from scripted_env import Result, ToyEnv

import gym_trace
from gym_trace.errors import InvalidOption, UnreadableRecording

h5py = pytest.importorskip("h5py")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("PIL")

from gym_trace.exchange.formats.minari.arrow import _ArrowFile  # noqa: E402 - takes pyarrow
from gym_trace.exchange.formats.parquet.tables import parquet_file  # noqa: E402

FORMS = [("minari", {"kind": "hdf5"}), ("minari", {"kind": "arrow"}), ("minari", {"kind": "parquet"}), ("d4rl", {})]
of_each_form = pytest.mark.parametrize(("form", "options"), FORMS)


class Counting(ToyEnv):
    """Observes numbers, or whatever space it is given."""

    action_space = spaces.Discrete(3)

    def __init__(self, space: Any = None, length: int = 6):
        self.observation_space = space or spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.observation_space.seed(0)
        self._length = length

    def result(self, action: Any) -> Result:
        info = {"level": self.t / 2, "name": "x" * self.t} if self.t else {"level": 1.5}
        if self.t == 2:
            info["won"] = [1, (2,)]
        return Result(self.observation_space.sample(), 0.1 * self.t, self.t == self._length, False, info)


def record(directory: Path, env: Any = None, steps: int = 20, **options: Any) -> gym_trace.Trace:
    """Episodes that ended, and one that was closed."""
    with gym_trace.TraceRecordingWrapper(env or Counting(), directory, **options) as recorder:
        over, episodes = True, 0
        for step in range(steps):
            if over:
                recorder.reset(seed=[7, None, 2**64 + 1][episodes % 3], options=[None, {"a": {"b": 2}}][episodes % 2])
                episodes += 1
            recorder.annotate(logprob=np.float32(step), **({"odd": "text"} if step % 2 else {}))
            over = recorder.step(step % 3)[2]
    return gym_trace.open_trace(directory)


def export(trace: Any, tmp_path: Path, form: str, options: dict[str, Any]) -> Path:
    out = tmp_path / "out-v0"
    gym_trace.export(trace, out, form, **options)
    return out


@of_each_form
@pytest.mark.parametrize("infos", [True, False])
def test_a_trace_comes_back_as_it_was(tmp_path: Path, form: str, options: dict[str, Any], infos: bool) -> None:
    trace = record(tmp_path / "trace", record_infos=infos)
    gym_trace.import_trace(export(trace, tmp_path, form, options), tmp_path / "back")
    for one, other in zip(trace, gym_trace.open_trace(tmp_path / "back"), strict=True):
        for name in ("seed", "options", "outcome", "writer", "reset_info", "start_time", *["infos"] * infos):
            assert getattr(one, name) == getattr(other, name)
        for name in ("observations", "actions", "rewards"):
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes()
        notes = [{key: rows.tolist() for key, rows in e.annotations.items()} for e in (one, other)]
        assert notes[0] == notes[1]
    assert all(difference.difference is None for difference in gym_trace.diff_traces(trace, tmp_path / "back"))


@of_each_form
def test_episodes_of_many_windows_come_back(
    tmp_path: Path, form: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr("gym_trace.exchange.formats.minari.arrow._IN_MEMORY", 1000)
    trace = record(tmp_path / "trace", Counting(length=3000), 6500, record_infos=True)
    out = export(trace, tmp_path, form, options)
    assert not list(tmp_path.rglob("*.scratch"))
    gym_trace.import_trace(out, tmp_path / "back")
    assert all(difference.difference is None for difference in gym_trace.diff_traces(trace, tmp_path / "back"))


@of_each_form
@pytest.mark.parametrize("space", [spaces.Sequence(spaces.Discrete(2)), spaces.Graph(spaces.Discrete(2), None)])
def test_unsupported_spaces_raise_before_anything_is_written(
    tmp_path: Path, form: str, options: dict[str, Any], space: Any
) -> None:  # fmt: skip
    trace = record(tmp_path / "trace", Counting(space))
    with pytest.raises(InvalidOption, match="observations"):
        export(trace, tmp_path, form, options)
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


@of_each_form
def test_rewards_of_several_types_of_numbers_are_floats(tmp_path: Path, form: str, options: dict[str, Any]) -> None:
    rewards = [1, np.int64(2), np.float32(0.5), True, 0.1]
    with gym_trace.TraceWriter(tmp_path / "trace") as writer:
        writer.begin(np.zeros(2))
        for reward in rewards:
            writer.step(0, np.ones(2), reward, truncated=reward == 0.1)
    gym_trace.import_trace(export(gym_trace.open_trace(tmp_path / "trace"), tmp_path, form, options), tmp_path / "back")
    back = gym_trace.open_trace(tmp_path / "back")[0].rewards
    assert (back.dtype, back.tolist()) == (np.dtype(np.float64), [1, 2, 0.5, 1, 0.1])


@of_each_form
def test_lists_among_the_rewards_are_refused(tmp_path: Path, form: str, options: dict[str, Any]) -> None:
    with gym_trace.TraceWriter(tmp_path / "trace") as writer:
        writer.begin(np.zeros(2))
        writer.step(0, np.ones(2), 1.0)
        writer.step(0, np.ones(2), [1, 2.0])
    with pytest.raises(InvalidOption, match="rewards"):
        export(gym_trace.open_trace(tmp_path / "trace"), tmp_path, form, options)


def test_keys_that_hdf5_has_not_are_refused_with_the_kind_that_has_them(tmp_path: Path) -> None:
    trace = record(tmp_path / "trace", Counting(spaces.Dict({"a/b": spaces.Discrete(2)})))
    with pytest.raises(InvalidOption, match="--set kind=arrow"):
        export(trace, tmp_path, "minari", {})
    export(trace, tmp_path, "minari", {"kind": "arrow"})


@pytest.mark.parametrize(("options", "told"), [({"kind": "csv"}, "hdf5, arrow, parquet"), ({"id": "a b"}, "random-v0")])
def test_options_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidOption, match=told):
        export(record(tmp_path / "trace"), tmp_path, "minari", options)


@pytest.mark.parametrize(
    ("place", "name", "said"),
    [
        ("sets/cartpole/random-v0", "cartpole/random-v0", "load_dataset('cartpole/random-v0')"),
        ("elsewhere/random-v0", "random-v0", "MINARI_DATASETS_PATH"),
        ("elsewhere/my poles", "my-poles-v0", "MinariDataset("),
    ],
)
def test_a_data_set_is_called_as_minari_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, name: str, said: str
) -> None:  # fmt: skip
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "sets"))
    report = gym_trace.export(record(tmp_path / "trace"), tmp_path / place, "minari")
    assert json.loads((tmp_path / place / "data" / "metadata.json").read_text())["dataset_id"] == name
    assert said in report.how_to_load


# -- untrusted files --------------------------------------------------------------------------------------------------


def _outside(group: Any, file: Path) -> None:
    (file.parent / "raw").write_bytes(bytes(8 * 20))
    group.create_dataset("rewards", (6,), "f8", external=[(str(file.parent / "raw"), 0, 48)])


# In place of the rewards of a group: called with the group, its file and the rewards.
CHANGED: dict[str, Any] = {
    "external link": lambda group, file, _: group.update(rewards=h5py.ExternalLink("/etc/passwd", "/rewards")),
    "soft link": lambda group, file, _: group.update(rewards=h5py.SoftLink("/nowhere")),
    "external storage": lambda group, file, _: _outside(group, file),
    "huge": lambda group, file, _: group.create_dataset(
        "rewards", (1 << 40,), "f8", chunks=(1 << 16,), compression="gzip"
    ),
    "compound": lambda group, file, _: group.update(rewards=np.zeros(6, [("a", "f8")])),
    "short": lambda group, file, rewards: group.update(rewards=rewards[:-1]),
    "missing": lambda group, file, _: None,
}


@pytest.mark.parametrize(("form", "options"), [FORMS[0], FORMS[3]])
@pytest.mark.parametrize("change", CHANGED)
def test_a_changed_file_raises(tmp_path: Path, form: str, options: dict[str, Any], change: str) -> None:
    out = export(record(tmp_path / "trace"), tmp_path, form, options)
    file = out / "data" / "main_data.hdf5" if out.is_dir() else out
    with h5py.File(file, "r+") as opened:
        group = opened["episode_0"] if out.is_dir() else opened
        rewards = group["rewards"][()]
        del group["rewards"]
        CHANGED[change](group, file, rewards)
    with pytest.raises(UnreadableRecording, match="out-v0"):
        gym_trace.import_trace(out, tmp_path / "back", form)
    assert not (tmp_path / "back").exists()


@of_each_form
def test_bytes_that_were_changed_raise_or_show(tmp_path: Path, form: str, options: dict[str, Any]) -> None:
    out = export(record(tmp_path / "trace", record_infos=True), tmp_path, form, options)
    files = [path for path in ([out] if out.is_file() else sorted(out.rglob("*"))) if path.is_file()]
    rng, tried = np.random.default_rng(0), 0
    for number in range(240 if LONG else 36):
        file = files[number % len(files)]
        whole = bytearray(file.read_bytes())
        kept = bytes(whole)
        whole[int(rng.integers(len(whole)))] ^= int(rng.integers(1, 256))
        file.write_bytes(whole if number % 3 else whole[: len(whole) // 2])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                gym_trace.import_trace(out, tmp_path / f"back-{number}", form)
            except gym_trace.errors.TraceError:
                tried += 1
        file.write_bytes(kept)
    assert tried > 6


def test_a_data_set_that_says_nothing_of_its_spaces_has_the_widest(tmp_path: Path) -> None:
    out = export(record(tmp_path / "trace"), tmp_path, "minari", {})
    metadata = out / "data" / "metadata.json"
    said = json.loads(metadata.read_text())
    kept = {key: said[key] for key in ("data_format", "total_episodes", "dataset_id")}
    metadata.write_text(json.dumps(kept))
    with h5py.File(out / "data" / "main_data.hdf5", "r+") as file:
        for episode in file.values():
            del episode.attrs["gym_trace"]
    report = gym_trace.import_trace(out, tmp_path / "back")
    trace = gym_trace.open_trace(tmp_path / "back")
    assert trace.observation_space == spaces.Box(-np.inf, np.inf, (3,), np.float32)
    assert [episode.seed for episode in trace][:2] == [7, None]
    assert any("no spaces" in text for text in report.warnings)


def test_groups_that_are_in_themselves_are_refused(tmp_path: Path) -> None:
    out = export(record(tmp_path / "trace"), tmp_path, "minari", {})
    with h5py.File(out / "data" / "main_data.hdf5", "r+") as file:
        infos = file["episode_0/infos"].create_group("a").create_group("b")
        for name in "xyz":
            infos[name] = file["episode_0/infos"]
    with pytest.raises(UnreadableRecording, match="infos"):
        gym_trace.import_trace(out, tmp_path / "back")


def test_a_compressed_arrow_file_is_refused_before_it_is_decompressed(tmp_path: Path) -> None:
    out = export(record(tmp_path / "trace"), tmp_path, "minari", {"kind": "arrow"})
    file = out / "data" / "0" / "part-0.arrow"
    table = pa.ipc.open_file(file.read_bytes()).read_all()
    with pa.ipc.new_file(str(file), table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as written:
        written.write_table(table)
    with pytest.raises(UnreadableRecording, match="compressed"):
        gym_trace.import_trace(out, tmp_path / "back")


def test_an_arrow_file_of_several_batches_is_read_whole(tmp_path: Path) -> None:
    trace = record(tmp_path / "trace")
    out = export(trace, tmp_path, "minari", {"kind": "arrow"})
    file = out / "data" / "0" / "part-0.arrow"
    table = pa.ipc.open_file(file.read_bytes()).read_all()
    with pa.ipc.new_file(str(file), table.schema) as written:
        written.write_table(table, max_chunksize=2)
    gym_trace.import_trace(out, tmp_path / "back")
    assert gym_trace.open_trace(tmp_path / "back")[0].observations.tobytes() == trace[0].observations.tobytes()


def test_a_text_that_every_row_of_a_table_shares_takes_memory_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = export(record(tmp_path / "trace"), tmp_path, "minari", {"kind": "parquet"})
    file = out / "data" / "0" / "part-0.parquet"
    table = pq.read_table(file)
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * len(table), pa.int32()), pa.array(["x" * 4096]))
    pq.write_table(table.append_column("text", shared), file, store_schema=False)
    monkeypatch.setattr("gym_trace.exchange.formats.parquet.tables._MOST_BYTES", 8192)
    with _ArrowFile(file, {}) as opened:
        assert {len(batch) for batch in opened.batches(1024)} <= {1, 2}


def test_lists_of_more_values_than_a_file_can_hold_are_refused(tmp_path: Path) -> None:
    values = pa.array(np.zeros(40_000_000, np.bool_))
    lists = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
    pq.write_table(pa.table({"rewards": lists}), tmp_path / "t.parquet", compression="zstd")
    with pytest.raises(UnreadableRecording, match="40000000 values"):
        parquet_file(tmp_path / "t.parquet")
