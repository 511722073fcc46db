"""TorchRL's TensorDict without TorchRL: the bytes of the files are the rows, and meta.json says which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import gym_trace
from gym_trace.errors import InvalidOption
from gym_trace.interop.identity import read_identity
from gym_trace.interop.torchrl.exporting import EPISODES


class Steps(gymnasium.Env[Any, Any]):
    """Samples of any space."""

    def __init__(self, observation_space: Any) -> None:
        self.observation_space, self.action_space = observation_space, spaces.Discrete(3)
        observation_space.seed(0)

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        self.left = 4
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return self.observation_space.sample(), 0.5, self.left == 0, False, {}


def recorded(directory: Path, observation_space: Any, steps: tuple[int, ...] = (4, 2, 0, 4)) -> Path:
    env = gym_trace.TraceRecordingWrapper(Steps(observation_space), directory)
    env.action_space.seed(0)
    for number, count in enumerate(steps):
        env.reset(seed=number)
        for _ in range(count):
            env.step(env.action_space.sample())
    env.close()
    return directory


def tensor(folder: Path, name: str) -> Any:
    said = json.loads((folder / "meta.json").read_text())[name]
    dtype = np.dtype(said["dtype"].removeprefix("torch."))
    return np.fromfile(folder / f"{name}.memmap", dtype).reshape(said["shape"])


BOX = spaces.Box(-1, 1, (3,), np.float32)


def test_files_are_the_rows(tmp_path: Path) -> None:
    trace = gym_trace.open_trace(recorded(tmp_path / "trace", BOX))
    report = gym_trace.export(trace, tmp_path / "out", "torchrl")
    out = tmp_path / "out"
    assert tensor(out, "observation").tobytes() == b"".join(e.observations[:-1].tobytes() for e in trace)
    assert tensor(out / "next", "observation").tobytes() == b"".join(e.observations[1:].tobytes() for e in trace)
    assert tensor(out, "episode").tolist() == [0] * 4 + [1] * 2 + [2] * 4
    assert tensor(out / "next", "reward").shape == (10, 1)
    assert tensor(out / "next", "reward").dtype == np.float64
    assert tensor(out / "next", "terminated")[:, 0].tolist() == [False] * 3 + [True] + [False] * 5 + [True]
    assert tensor(out / "next", "truncated")[:, 0].tolist() == [False] * 5 + [True] + [False] * 4
    assert not tensor(out, "done").any()
    assert [loss.what for loss in report.lost] == ["outcome", "empty_episode"]
    assert report.episodes == 3
    told = [read_identity(line) for line in (out / EPISODES).read_text().splitlines()]
    assert [known["seed"] for known in told] == [0, 1, 3]
    assert [known["outcome"] for known in told] == ["terminated", "cut", "terminated"]


def test_a_dict_is_at_the_root_unless_a_name_is_taken(tmp_path: Path) -> None:
    recorded(tmp_path / "free", spaces.Dict({"a": BOX, "b/c": spaces.Dict({"": BOX})}))
    gym_trace.export(tmp_path / "free", tmp_path / "free-out", "torchrl")
    assert tensor(tmp_path / "free-out", "a").shape == (10, 3)
    assert json.loads((tmp_path / "free-out" / "meta.json").read_text())["b/c"] == {"type": "TensorDict"}
    assert (tmp_path / "free-out" / "next" / "b%2Fc" / "%.memmap").stat().st_size == 10 * 12
    recorded(tmp_path / "taken", spaces.Dict({"a": BOX, "action": BOX}))
    gym_trace.export(tmp_path / "taken", tmp_path / "taken-out", "torchrl")
    assert tensor(tmp_path / "taken-out" / "observation", "action").shape == (10, 3)
    assert tensor(tmp_path / "taken-out", "action").shape == (10,)


@pytest.mark.parametrize(
    ("space", "told"),
    [
        (spaces.Text(8), "any of the observations"),
        (spaces.Dict({"a": spaces.Dict({"shape": BOX})}), "cannot have the key 'a/shape'"),
        (spaces.Dict({1: BOX, "1": BOX}), "cannot have the key '1'"),
    ],
)
def test_what_tensors_cannot_hold_is_refused(space: Any, told: str, tmp_path: Path) -> None:
    recorded(tmp_path / "trace", space)
    with pytest.raises(InvalidOption, match=told):
        gym_trace.export(tmp_path / "trace", tmp_path / "out", "torchrl")
    assert not (tmp_path / "out").exists()


def test_a_trace_without_steps_is_refused(tmp_path: Path) -> None:
    recorded(tmp_path / "trace", BOX, (0,))
    with pytest.raises(InvalidOption, match="no episode has a step"):
        gym_trace.export(tmp_path / "trace", tmp_path / "out", "torchrl")
