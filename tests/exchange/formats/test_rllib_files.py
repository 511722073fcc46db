"""RLlib's Parquet without Ray: what is written comes back, and what is not to be trusted is not."""

from __future__ import annotations

import base64
import io
import pickle
import zlib
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

import gym_trace
from gym_trace.errors import UnreadableRecording

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

# -- what others have written -----------------------------------------------------------------------------------------


def write(path: Path, *items: Any) -> Path:
    path.mkdir()
    packed = [item if isinstance(item, bytes) else msgpack.packb(item) for item in items]
    pq.write_table(pa.table({"item": pa.array(packed, pa.binary())}), path / "0.parquet")
    return path


def buffer(data: list[Any], lookback: int = 0) -> dict[str, Any]:
    return {"data": data, "lookback": lookback, "finalized": False, "space": None}


def piece(name: str, begin: int, end: int, lookback: int = 0, **other: Any) -> dict[str, Any]:
    """An episode in which step i leads from i to i + 1."""
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


def test_notes_say_that_actions_of_a_box_may_be_scaled(tmp_path: Path) -> None:
    def packed(bound: float) -> str:
        file = io.BytesIO()
        np.save(file, np.full((1,), bound, np.float32))
        return base64.b64encode(zlib.compress(file.getvalue())).decode()

    box = {"space": "box", "low": packed(-2), "high": packed(2), "shape": [1], "dtype": "<f4"}
    notes = {
        name: gym_trace.import_trace(
            write(tmp_path / name, piece("a", 0, 2, **other)), tmp_path / f"{name}-trace"
        ).notes
        for name, other in {"box": {"_action_space": box, "actions": buffer([[0.5], [1.0]])}, "discrete": {}}.items()
    }
    told = {name: any("scaled to [-1, 1], unless" in note for note in found) for name, found in notes.items()}
    assert told == {"box": True, "discrete": False}


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
    assert any("the first steps of 1 episodes are missing" in note for note in report.notes)
    assert "1 repeated rows were read once" in report.notes
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
    """An object that must never be unpickled."""

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
}


@pytest.mark.parametrize("name", HOSTILE)
def test_malformed_files_raise_with_their_path(name: str, tmp_path: Path) -> None:
    write(tmp_path / "in", HOSTILE[name])
    with pytest.raises(UnreadableRecording) as told:
        gym_trace.import_trace(tmp_path / "in", tmp_path / "trace", "rllib")
    assert str(tmp_path / "in" / "0.parquet") in str(told.value)
    assert "\n" not in str(told.value)
    assert not (tmp_path / "trace").exists()


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "in", piece("a", 0, 2)) / "0.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(UnreadableRecording, match=r"0\.parquet: cannot be read"):
        gym_trace.import_trace(tmp_path / "in", tmp_path / "back", "rllib")


def test_a_value_that_many_rows_share_takes_memory_once(tmp_path: Path) -> None:
    shared = pa.array([b"\x81\xa1a\xc4" + bytes(1 << 20)])
    rows = pa.DictionaryArray.from_arrays(pa.array([0] * 200, pa.int32()), shared)
    pq.write_table(pa.table({"item": rows}), tmp_path / "a.parquet", store_schema=False)
    before = pa.total_allocated_bytes()
    items = pytest.importorskip("gym_trace.exchange.formats.rllib.importing").Items([tmp_path / "a.parquet"])
    assert items[0] == items[199]
    assert pa.total_allocated_bytes() - before < 20 << 20
