"""RLlib's Parquet without Ray: what is written comes back, and what is not to be trusted is not."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import gymnasium
import msgpack
import numpy as np
import pytest
from gymnasium import spaces

import gym_trace
from gym_trace import diff_traces
from gym_trace.errors import InvalidOption, TraceError, UnreadableRecording

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from gym_trace.interop.rllib.loading import spaces_of  # noqa: E402

BOX = spaces.Box(-1, 1, (3,), np.float32)


class Steps(gymnasium.Env[Any, Any]):
    """Samples of any space."""

    def __init__(self, observation_space: Any, info: dict[Any, Any]) -> None:
        self.observation_space, self.action_space, self.info = observation_space, spaces.Discrete(3), info
        observation_space.seed(0)

    def reset(self, **options: Any) -> tuple[Any, dict[Any, Any]]:
        self.left = 4
        return self.observation_space.sample(), self.info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[Any, Any]]:
        self.left -= 1
        return self.observation_space.sample(), 0.5, self.left == 0, False, self.info


def recorded(
    directory: Path, observation_space: Any = BOX, info: dict[Any, Any] | None = None, annotated: Any = None
) -> gym_trace.Trace:
    env = gym_trace.TraceRecordingWrapper(
        Steps(observation_space, info or {}), directory, record_infos=info is not None
    )
    env.action_space.seed(0)
    for number, count in enumerate((4, 2, 0, 4)):
        env.reset(seed=number)
        for _ in range(count):
            if annotated is not None:
                env.annotate(**annotated)
            env.step(env.action_space.sample())
    env.close()
    return gym_trace.open_trace(directory)


def states(path: Path) -> list[dict[str, Any]]:
    return [msgpack.unpackb(item) for item in pq.read_table(path)["item"].to_pylist()]


SPACES = {
    "box": BOX,
    "nested": spaces.Dict({"a": spaces.Tuple((BOX, spaces.Discrete(3))), "b": spaces.MultiBinary(4)}),
    "text": spaces.Dict({"image": spaces.Box(0, 255, (2, 2, 3), np.uint8), "said": spaces.Text(9)}),
    "alone": spaces.Text(5),
}


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize(
    "info", [None, {}, {"a": 1, "of": np.arange(3)}, {1: (2, 3), "x": {2**70: ()}, b"nd": True}], ids=str
)
def test_episodes_come_back_bit_for_bit(name: str, info: Any, tmp_path: Path) -> None:
    trace = recorded(tmp_path / "trace", SPACES[name], info)
    gym_trace.export(trace, tmp_path / "out", "rllib")
    report = gym_trace.import_trace(tmp_path / "out", tmp_path / "back")
    assert (report.format, report.episodes, report.steps, report.notes) == ("rllib", 4, 10, [])
    back = gym_trace.open_trace(tmp_path / "back")
    assert all(pair.difference is None for pair in diff_traces(trace, back))
    assert back.episodes["seed"].tolist() == [0, 1, 2, 3]
    assert back.observation_space == trace.observation_space
    for one, other in zip(trace, back):
        assert repr(one.reset_info) == repr(other.reset_info)
        if info is not None:
            assert repr(one.infos) == repr(other.infos)
        else:
            with pytest.raises(TraceError, match="not recorded"):
                _ = other.infos


def test_annotations_are_what_the_model_put_out(tmp_path: Path) -> None:
    notes = {"logprob": np.float32(-0.5), "obs": np.zeros(2), "why": "because"}
    trace = recorded(tmp_path / "trace", annotated=notes)
    gym_trace.export(trace, tmp_path / "out", "rllib")
    assert list(states(tmp_path / "out")[0]["extra_model_outputs"]) == ["logprob"]
    gym_trace.import_trace(tmp_path / "out", tmp_path / "back")
    for one, other in zip(trace, gym_trace.open_trace(tmp_path / "back")):
        assert one.annotations.keys() == other.annotations.keys()
        for name, rows in one.annotations.items():
            assert rows.dtype == other.annotations[name].dtype
            assert rows.tolist() == other.annotations[name].tolist()


def test_rows_are_the_steps_and_tensors_have_no_permutation(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "trace")
    report = gym_trace.export(trace, tmp_path / "out", "rllib", kind="rows")
    assert [loss.what for loss in report.lost] == ["outcome", "empty_episode"]
    table = pq.read_table(tmp_path / "out")
    assert table.column_names == ["eps_id", "t", "obs", "new_obs", "actions", "rewards", "terminateds", "truncateds"]
    assert table.schema.field("obs").type == pa.fixed_shape_tensor(pa.float32(), (3,))
    assert table.schema.field("obs").type.permutation is None
    after = table["new_obs"].combine_chunks().to_numpy_ndarray()
    assert after.tobytes() == b"".join(episode.observations[1:].tobytes() for episode in trace)
    assert len(set(table["eps_id"].to_pylist())) == 3
    assert table["t"].to_pylist() == [0, 1, 2, 3, 0, 1, 0, 1, 2, 3]
    assert table["truncateds"].to_pylist() == [False] * 5 + [True] + [False] * 4


@pytest.mark.parametrize(
    ("kind", "space", "told"),
    [
        ("rows", spaces.Dict({"a": BOX}), "of a Dict or Tuple"),
        ("rows", spaces.Box(0, 1, (2,), np.bool_), "bool"),
        ("rows", spaces.Text(4), "no dtype and shape that all share"),
        ("episodes", spaces.Sequence(BOX), "no words for values of a Sequence"),
        ("both", BOX, 'RLlib reads "episodes" or "rows"'),
    ],
)
def test_what_rllib_cannot_hold_is_refused(kind: str, space: Any, told: str, tmp_path: Path) -> None:
    trace = recorded(tmp_path / "trace", space)
    with pytest.raises(InvalidOption, match=told):
        gym_trace.export(trace, tmp_path / "out", "rllib", kind=kind)
    assert not (tmp_path / "out").exists()


def test_episodes_that_are_too_long_for_one_value_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.interop.rllib.episodes._MOST_BYTES", 100)
    with pytest.raises(InvalidOption, match="kind=rows holds episodes of any length"):
        gym_trace.export(recorded(tmp_path / "trace"), tmp_path / "out", "rllib")


def test_several_files_are_one_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.interop.rllib.shards._FILE_BYTES", 1)
    monkeypatch.setattr("gym_trace.interop.rllib.episodes._GROUP_BYTES", 1)
    trace = recorded(tmp_path / "trace")
    gym_trace.export(trace, tmp_path / "out", "rllib")
    assert len(list((tmp_path / "out").iterdir())) == 4
    gym_trace.import_trace(tmp_path / "out", tmp_path / "back")
    assert all(pair.difference is None for pair in diff_traces(trace, tmp_path / "back"))


# -- what others have written -----------------------------------------------------------------------------------------


def write(path: Path, *items: Any) -> Path:
    path.mkdir()
    packed = [item if isinstance(item, bytes) else msgpack.packb(item) for item in items]
    pq.write_table(pa.table({"item": pa.array(packed, pa.binary())}), path / "0.parquet")
    return path


def buffer(data: list[Any], lookback: int = 0) -> dict[str, Any]:
    return {"data": data, "lookback": lookback, "finalized": False, "space": None}


def piece(name: str, begin: int, end: int, lookback: int = 0, **other: Any) -> dict[str, Any]:
    """Of an episode in which step i leads from i to i + 1."""
    steps = list(map(float, range(begin - lookback, end)))
    return {
        "id_": name,
        "agent_id": None,
        "observations": buffer([*steps, float(end)], lookback),
        "actions": buffer([int(step) % 2 for step in steps], lookback),
        "rewards": buffer(steps, lookback),
        "infos": buffer([{"at": int(step)} for step in [*steps, end]], lookback),
        "extra_model_outputs": {"logprob": buffer([-step for step in steps], lookback)},
        "is_terminated": False,
        "is_truncated": False,
        "t_started": begin,
        "t": end,
        "_observation_space": None,
        "_action_space": {"space": "discrete", "n": 2, "start": 0},
        **other,
    }


def test_pieces_of_an_episode_are_joined(tmp_path: Path) -> None:
    write(
        tmp_path / "in",
        piece("b", 3, 5),
        piece("a", 0, 2),
        piece("b", 0, 3),
        piece("b", 3, 5),
        piece("a", 2, 6, lookback=2, is_terminated=True),
        piece("c", 4, 5, is_truncated=True),
    )
    report = gym_trace.import_trace(tmp_path / "in", tmp_path / "trace")
    assert any("of 1 episodes the first steps are missing" in note for note in report.notes)
    assert "1 rows that are there more than once were read once" in report.notes
    episodes = list(gym_trace.open_trace(tmp_path / "trace"))
    assert [(len(episode), episode.outcome) for episode in episodes] == [
        (5, "cut"),
        (6, "terminated"),
        (1, "truncated"),
    ]
    assert episodes[1].observations.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert episodes[1].rewards.tolist() == [0, 1, 2, 3, 4, 5]
    assert [info["at"] for info in episodes[1].infos] == [1, 2, 3, 4, 5, 6]
    assert episodes[1].reset_info == {"at": 0}
    assert episodes[1].annotations["logprob"].tolist() == [0, -1, -2, -3, -4, -5]
    assert [episode.seed for episode in episodes] == [None] * 3


class Bomb:
    """What must never be undone."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("unpickled",)


def _state(**other: Any) -> dict[str, Any]:
    return piece("a", 0, 2, **other)


HOSTILE = {
    "pickled": _state(
        rewards=buffer([{b"nd": True, b"type": [], b"kind": b"O", b"shape": [1], b"data": pickle.dumps(Bomb())}])
    ),
    "dtype": _state(rewards=buffer([{b"nd": True, b"type": "O", b"kind": b"", b"shape": [1], b"data": b"12345678"}])),
    "shape": _state(rewards=buffer([{b"nd": True, b"type": "<f8", b"kind": b"", b"shape": [1 << 40], b"data": b""}])),
    "rows": _state(rewards=buffer([1.0])),
    "no rows": _state(infos=buffer([])),
    "lookback": _state(actions=buffer([1, 0], -1)),
    "lookback of text": _state(actions=buffer([1, 0], "a")),  # type: ignore[arg-type]
    "no buffer": _state(actions=3),
    "no list": _state(actions={"data": 3, "lookback": 0, "finalized": False}),
    "other arrays": _state(actions={"data": {"a": [1]}, "lookback": 0, "finalized": True}),
    "space": _state(_action_space={"space": "box", "low": "!", "high": "", "shape": [1], "dtype": "<f4"}),
    "deep space": _state(_action_space={"space": "tuple", "spaces": [{"space": "discrete", "n": -4}]}),
    "steps": _state(t=1 << 63),
    "before": _state(t=-1),
    "garbage": b"\xc1\xff",
    "cut off": msgpack.packb(_state())[:-10],
    "no map": msgpack.packb([1, 2]),
    "nothing": b"",
    "identity": _state(custom_data={"gym_trace": "{"}),
    "infos": _state(custom_data={"gym_trace.infos": [b"\xc1"]}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_malformed_is_told_with_the_file(name: str, tmp_path: Path) -> None:
    write(tmp_path / "in", HOSTILE[name])
    with pytest.raises(UnreadableRecording) as told:
        gym_trace.import_trace(tmp_path / "in", tmp_path / "trace", "rllib")
    assert str(tmp_path / "in" / "0.parquet") in str(told.value)
    assert "\n" not in str(told.value)
    assert not (tmp_path / "trace").exists()


def test_a_file_that_is_cut_off_is_told(tmp_path: Path) -> None:
    gym_trace.export(recorded(tmp_path / "trace"), tmp_path / "out", "rllib")
    file = tmp_path / "out" / "00000.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(UnreadableRecording, match=r"00000\.parquet: no Parquet"):
        gym_trace.import_trace(tmp_path / "out", tmp_path / "back", "rllib")


def test_a_value_that_many_rows_share_takes_memory_once(tmp_path: Path) -> None:
    shared = pa.array([b"\x81\xa1a\xc4" + bytes(1 << 20)])
    rows = pa.DictionaryArray.from_arrays(pa.array([0] * 200, pa.int32()), shared)
    pq.write_table(pa.table({"item": rows}), tmp_path / "a.parquet", store_schema=False)
    before = pa.total_allocated_bytes()
    items = pytest.importorskip("gym_trace.interop.rllib.items").Items([tmp_path / "a.parquet"])
    assert items[0] == items[199]
    assert pa.total_allocated_bytes() - before < 20 << 20


@pytest.mark.parametrize("kind", ["episodes", "rows"])
def test_an_export_says_which_spaces_it_has(tmp_path: Path, kind: str) -> None:
    with gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path / "trace") as env:
        env.reset(seed=0)
        env.step(0)
    report = gym_trace.export(tmp_path / "trace", tmp_path / "out", "rllib", kind=kind)
    made = gymnasium.make("CartPole-v1")
    assert spaces_of(tmp_path / "out") == (made.observation_space, made.action_space)
    assert "observation_space=observation_space" in report.how_to_load
    with pytest.raises(UnreadableRecording, match="is not what export --to rllib writes"):
        spaces_of(tmp_path / "trace")
