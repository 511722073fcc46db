"""The dataset file handler for Isaac Lab, with a stand-in for its base classes and its recorder manager.

The stand-in follows the interface of Isaac Lab 2.3: isaaclab.utils.datasets and isaaclab.managers.recorder_manager.
"""

import abc
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked_python
import numpy as np
import pytest

import gym_trace
from gym_trace import check_trace, open_trace
from gym_trace.errors import InvalidOption, MissingExtra, TraceExists


class DatasetFileHandlerBase(abc.ABC):
    """The abstract methods of Isaac Lab's base class."""

    @abc.abstractmethod
    def open(self, file_path: str, mode: str = "r") -> Any: ...
    @abc.abstractmethod
    def create(self, file_path: str, env_name: str | None = None) -> Any: ...
    @abc.abstractmethod
    def get_env_name(self) -> str | None: ...
    @abc.abstractmethod
    def write_episode(self, episode: Any) -> Any: ...
    @abc.abstractmethod
    def flush(self) -> Any: ...
    @abc.abstractmethod
    def close(self) -> Any: ...
    @abc.abstractmethod
    def load_episode(self, episode_name: str) -> Any: ...
    @abc.abstractmethod
    def get_num_episodes(self) -> int: ...


class EpisodeData:
    """Nested dicts of rows, as Isaac Lab's recorder manager fills and exports them."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.seed: int | None = None
        self.env_id: int | None = None
        self.success: bool | None = None

    def is_empty(self) -> bool:
        return not self.data


@pytest.fixture
def handler_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return TraceFileHandler, imported with the stand-in."""
    datasets = types.ModuleType("isaaclab.utils.datasets")
    datasets.DatasetFileHandlerBase, datasets.EpisodeData = DatasetFileHandlerBase, EpisodeData  # type: ignore[attr-defined]
    for name in ("isaaclab", "isaaclab.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, datasets.__name__, datasets)
    from gym_trace.exchange.isaaclab import TraceFileHandler

    yield TraceFileHandler
    del sys.modules["gym_trace.exchange.isaaclab"], gym_trace.exchange.isaaclab


def exported(steps: int, seed: int = 0, success: bool = False) -> EpisodeData:
    """Return an episode as ActionStateRecorderManagerCfg records it."""
    random, episode = np.random.default_rng(seed), EpisodeData()

    def scene(rows: int) -> dict[str, Any]:
        return {
            "articulation": {"robot": {"joint_position": random.random((rows, 7), np.float32)}},
            "rigid_object": {"cube": {"root_pose": random.random((rows, 7), np.float32)}},
        }

    episode.data = {
        "initial_state": scene(1),
        "obs": {
            "joint_pos": random.random((steps, 9), np.float32),
            "camera": random.integers(0, 255, (steps, 4, 4, 3), np.uint8),
        },
        "actions": random.random((steps, 8), np.float32),
        "states": scene(steps),
        "processed_actions": random.random((steps, 8), np.float32),
        "substeps": random.random((4 * steps, 2), np.float32),
    }  # fmt: skip
    episode.success = success
    return episode


def test_exported_episodes_are_recorded_bit_for_bit(handler_class: Any, tmp_path: Path) -> None:
    episodes = [exported(5, 1, success=True), exported(1, 2), exported(300, 3)]
    handler = handler_class()
    handler.create(str(tmp_path / "dataset"), env_name="Isaac-Stack-Cube-v0")
    handler.add_env_args({"sim_args": {"dt": 0.01, "decimation": 5}})
    for number, episode in enumerate(episodes):
        handler.write_episode(episode, demo_id=number)
    handler.flush()
    handler.close()
    trace = open_trace(tmp_path / "dataset")
    assert [len(one) for one in trace] == [5, 1, 300]
    assert [one.outcome for one in trace] == ["terminated", "cut", "cut"]
    assert not any(one.has_final_observation for one in trace)
    assert trace.env_spec["id"] == "Isaac-Stack-Cube-v0"
    for one, episode in zip(trace, episodes):
        expected = episode.data
        for name, rows in expected["obs"].items():
            assert one.observations[name][:-1].tobytes() == rows.tobytes()
            assert one.observations[name].dtype == rows.dtype
        assert one.actions.tobytes() == expected["actions"].tobytes()
        assert np.isnan(one.rewards).all()
        joints = one.annotations["states/articulation/robot/joint_position"]
        assert joints.tobytes() == expected["states"]["articulation"]["robot"]["joint_position"].tobytes()
        assert one.reset_info["data"]["substeps"].tobytes() == expected["substeps"].tobytes()
        pose = one.reset_info["data"]["initial_state/rigid_object/cube/root_pose"]
        assert pose.tobytes() == expected["initial_state"]["rigid_object"]["cube"]["root_pose"].tobytes()
        assert one.reset_info["env_args"]["sim_args"] == {"dt": 0.01, "decimation": 5}
    assert not check_trace(tmp_path / "dataset").damages


def test_loaded_episodes_have_the_exported_tensors(handler_class: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    episodes = [exported(4, 1, success=True), exported(3, 2), exported(3, 3)]
    episodes[1].data["rewards"], episodes[1].seed = np.arange(3, dtype=np.float32), 7
    del episodes[0].data["obs"]
    episodes[2].data["obs"]["history"] = np.zeros((12, 2))
    handler = handler_class()
    handler.create(str(tmp_path / "dataset"), "Isaac-Lift-v0")
    for episode in episodes:
        handler.write_episode(episode)
    assert list(handler.get_episode_names()) == ["demo_0", "demo_1", "demo_2"]
    for reader in (handler, handler_class()):
        if reader is not handler:
            handler.close()
            reader.open(str(tmp_path / "dataset"))
        assert (reader.get_num_episodes(), reader.get_env_name()) == (3, "Isaac-Lift-v0")
        for number, episode in enumerate(episodes):
            loaded = reader.load_episode(f"demo_{number}", device="cpu")
            assert (loaded.seed, loaded.success) == (episode.seed, episode.success)
            assert shapes(loaded.data) == shapes(episode.data)
            assert torch.equal(loaded.data["actions"], torch.tensor(episode.data["actions"]))
        assert reader.load_episode("demo_3", device="cpu") is None
        assert reader.load_episode("other", device="cpu") is None


def shapes(tree: Any) -> Any:
    """Return shapes and bytes of nested arrays or tensors."""
    if isinstance(tree, dict):
        return {name: shapes(part) for name, part in tree.items()}
    rows = np.asarray(tree)
    return rows.shape, rows.dtype, rows.tobytes()


def test_a_trace_is_not_replaced_and_can_be_appended_to(handler_class: Any, tmp_path: Path) -> None:
    def recorded(made: Any, opens: bool = False) -> None:
        handler = made()
        getattr(handler, "open" if opens else "create")(str(tmp_path / "dataset"), *(["r+"] if opens else []))
        handler.write_episode(exported(2))
        handler.close()
        handler.close()

    recorded(handler_class)
    with pytest.raises(TraceExists):
        recorded(handler_class)
    recorded(type("Appending", (handler_class,), {"options": {"on_exist": "append"}}))
    recorded(handler_class, opens=True)
    assert len(open_trace(tmp_path / "dataset")) == 3


def test_episodes_without_actions_are_skipped(handler_class: Any, tmp_path: Path) -> None:
    handler = handler_class()
    handler.create(str(tmp_path / "dataset"))
    only_reset, empty = EpisodeData(), EpisodeData()
    only_reset.data = {"initial_state": {"robot": np.zeros((1, 3))}}
    handler.write_episode(only_reset)
    handler.write_episode(empty)
    handler.flush()
    assert handler.get_num_episodes() == 0
    handler.write_episode(exported(2))
    handler.close()
    assert len(open_trace(tmp_path / "dataset")) == 1


def test_calls_without_an_open_trace_name_what_to_call(handler_class: Any, tmp_path: Path) -> None:
    handler = handler_class()
    with pytest.raises(InvalidOption, match="call create"):
        handler.write_episode(exported(2))
    handler.create(str(tmp_path / "dataset"))
    with pytest.raises(InvalidOption, match="close it first"):
        handler.create(str(tmp_path / "other"))


def test_a_kill_loses_no_flushed_episode(tmp_path: Path) -> None:
    program = f"""
import os, signal, sys, types
sys.path.insert(0, {os.path.dirname(__file__)!r})
import test_isaaclab as stand_in
datasets = types.ModuleType("isaaclab.utils.datasets")
datasets.DatasetFileHandlerBase, datasets.EpisodeData = stand_in.DatasetFileHandlerBase, stand_in.EpisodeData
for name in ("isaaclab", "isaaclab.utils"):
    sys.modules[name] = types.ModuleType(name)
sys.modules[datasets.__name__] = datasets
from gym_trace.exchange.isaaclab import TraceFileHandler
handler = TraceFileHandler()
handler.create({str(tmp_path / "dataset")!r})
for seed in range(3):
    handler.write_episode(stand_in.exported(20, seed))
    handler.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    forked_python.run([sys.executable, "-c", program])
    trace = open_trace(tmp_path / "dataset")
    assert [one.actions.tobytes() for one in trace] == [
        exported(20, seed).data["actions"].tobytes() for seed in range(3)
    ]


def test_without_isaac_lab_the_import_says_what_is_missing() -> None:
    with pytest.raises(MissingExtra, match="runs within Isaac Lab"):
        from gym_trace.exchange import isaaclab  # noqa: F401
