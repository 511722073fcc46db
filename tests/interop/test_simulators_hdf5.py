"""HDF5 of simulators: files of robosuite's and ManiSkill's own recorders, there and back, and what robosuite, robomimic
and ManiSkill make of ours. tests/interop.sh has an environment for them, simulators.

SAPIEN makes no environment without a rendering device, so ManiSkill's recorder gets a small one with the same methods.
"""

from __future__ import annotations

import ast
import datetime
import glob
import importlib.util
import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from planted_defects import check_exporter

import gym_trace
from gym_trace.data.packing import unpack
from gym_trace.exchange.formats.conformance import Loaded, check_importer

h5py = pytest.importorskip("h5py")

from gym_trace.exchange.formats.simulators.maniskill import ManiSkillExporter, ManiSkillImporter  # noqa: E402
from gym_trace.exchange.formats.simulators.robomimic import RobomimicExporter, RobomimicImporter  # noqa: E402

EPISODES = 2


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two episodes of Lift, recorded by robosuite's wrapper and gathered by the function of its script."""
    suite: Any = pytest.importorskip("robosuite")
    folder = tmp_path_factory.mktemp("robosuite")
    arguments = {"env_name": "Lift", "robots": "Panda"}
    env = suite.make(**arguments, has_renderer=False, has_offscreen_renderer=False, use_camera_obs=False)
    env._check_success = lambda: True  # only what succeeded is gathered
    recorder = importlib.import_module("robosuite.wrappers").DataCollectionWrapper(env, str(folder / "raw"))
    random = np.random.default_rng(0)
    for episode in range(EPISODES):
        recorder.reset()
        for _ in range(6 + episode):
            recorder.step(random.uniform(-1, 1, env.action_dim))
    recorder.close()
    script = Path(suite.__file__).parent / "scripts" / "collect_human_demonstrations.py"  # it also imports a keyboard
    chosen = [
        node
        for node in ast.parse(script.read_text()).body
        if getattr(node, "name", "") == "gather_demonstrations_as_hdf5"
    ]
    names: dict[str, Any] = {"os": os, "glob": glob.glob, "datetime": datetime, "np": np, "h5py": h5py, "suite": suite}
    exec(compile(ast.Module(chosen, []), str(script), "exec"), names)
    names["gather_demonstrations_as_hdf5"](str(folder / "raw"), str(folder), json.dumps(arguments))
    return folder / "demo.hdf5"


def episodes_of(path: Path) -> Iterator[dict[str, Any]]:
    with h5py.File(path) as file:
        for name in sorted(file["data"]):
            demo = file["data"][name]
            yield {"actions": demo["actions"][()], "states": demo["states"][()], "model": demo.attrs["model_file"]}


def test_demonstrations_of_robosuite_come_in_and_go_out_as_they_were(demonstrations: Path, tmp_path: Path) -> None:
    gym_trace.import_trace(demonstrations, tmp_path / "trace")
    trace = gym_trace.open_trace(tmp_path / "trace")
    gym_trace.export(trace, tmp_path / "out.hdf5", "robomimic")
    stored, out = [*episodes_of(demonstrations)], [*episodes_of(tmp_path / "out.hdf5")]
    assert len(stored) == len(out) == len(trace) == EPISODES
    for one, other in zip(stored, out, strict=True):
        assert one["model"] == other["model"]
        for name in ("actions", "states"):
            assert (one[name].dtype, one[name].tobytes()) == (other[name].dtype, other[name].tobytes())
    with h5py.File(demonstrations) as one, h5py.File(tmp_path / "out.hdf5") as other:
        assert dict(one["data"].attrs) == {key: value for key, value in other["data"].attrs.items() if key != "total"}


def test_an_environment_of_robosuite_is_set_to_each_state(demonstrations: Path, tmp_path: Path) -> None:
    gym_trace.import_trace(demonstrations, tmp_path / "trace")
    for index, demo in enumerate(episodes_of(demonstrations)):
        env: Any = gym_trace.env_at(tmp_path / "trace", index, 5, start="states", trust=True)
        assert unpack(env.unwrapped.get_state()).tobytes() == demo["states"][5].tobytes()
        env.step(demo["actions"][5])
        env.close()


def test_robosuite_through_its_gymnasium_interface_is_recorded_with_states(tmp_path: Path) -> None:
    pytest.importorskip("robosuite")
    from gym_trace.envs.robosuite import RobosuiteEnv

    with gym_trace.TraceRecordingWrapper(RobosuiteEnv("Lift", robots="Panda"), tmp_path / "trace", states=1) as env:
        env.reset(seed=0)
        for _ in range(4):
            env.step(env.action_space.sample())
    report = gym_trace.export(tmp_path / "trace", tmp_path / "out.hdf5", "robomimic")
    with h5py.File(tmp_path / "out.hdf5") as file:
        assert file["data/demo_0/states"].shape[0] == file["data/demo_0/next_obs/cube_pos"].shape[0] == 4
    assert "states" in {loss.what for loss in report.lost}  # states lack Gymnasium's generator


# -- robomimic --------------------------------------------------------------------------------------------------------


def dataset_of(path: Path, names: list[str]) -> Any:
    """robomimic's SequenceDataset of single steps; the arguments of its versions differ."""
    module: Any = pytest.importorskip("robomimic.utils.dataset")
    observations: Any = importlib.import_module("robomimic.utils.obs_utils")
    observations.initialize_obs_utils_with_obs_specs({"obs": {"low_dim": names, "rgb": []}})
    wanted = {"action_keys": ("actions",), "action_config": {"actions": {"normalization": None}}}
    known = inspect.signature(module.SequenceDataset).parameters
    more = {name: value for name, value in wanted.items() if name in known}
    keys = ("actions", "rewards", "dones")
    return module.SequenceDataset(str(path), obs_keys=names, dataset_keys=keys, load_next_obs=True, **more)


def test_robomimic_loads_the_steps_of_a_trace(tmp_path: Path) -> None:
    pytest.importorskip("robomimic")
    env = gymnasium.make("Pendulum-v1", max_episode_steps=20)
    with gym_trace.TraceRecordingWrapper(env, tmp_path / "trace") as recorder:
        for seed in range(2):
            recorder.reset(seed=seed)
            for _ in range(20):
                recorder.step(recorder.action_space.sample())
    trace = gym_trace.open_trace(tmp_path / "trace")
    gym_trace.export(trace, tmp_path / "out.hdf5", "robomimic")
    dataset = dataset_of(tmp_path / "out.hdf5", ["flat"])
    assert len(dataset) == sum(map(len, trace))
    steps = ((episode, step) for episode in trace for step in range(len(episode)))
    for item, (episode, step) in zip((dataset[index] for index in range(len(dataset))), steps, strict=True):
        assert np.array_equal(item["obs"]["flat"][0], episode.observations[step])
        assert np.array_equal(item["next_obs"]["flat"][0], episode.observations[step + 1])
        assert np.array_equal(item["actions"][0], episode.actions[step])
        assert np.float32(item["rewards"][0]) == np.float32(episode.rewards[step])
        assert item["dones"][0] == episode.terminations[step]


# -- ManiSkill --------------------------------------------------------------------------------------------------------


class Lane(gymnasium.Env[Any, Any]):
    """An environment with one lane, as ManiSkill's recorder takes it: batches of tensors, and states as dicts."""

    num_envs, control_mode, gpu_sim_enabled = 1, "pd_joint_pos", False
    single_action_space = action_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    observation_space = gymnasium.spaces.Dict({"agent": gymnasium.spaces.Box(-9, 9, (1, 5), np.float32)})
    spec = SimpleNamespace(id="PushCube-v1", kwargs={"obs_mode": "state_dict"}, max_episode_steps=50)

    def _observed(self) -> Any:
        import torch

        self.state = {"actors": {"cube": torch.tensor(self.np_random.normal(size=(1, 13)).astype(np.float32))}}
        return {"agent": self.state["actors"]["cube"][:, :5] / 3}

    def get_state_dict(self) -> Any:
        return self.state

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._episode_seed, self.t = np.array([seed]), 0
        return self._observed(), {"reconfigure": False}

    def step(self, action: Any) -> Any:
        import torch

        self.t += 1
        flag = torch.tensor([self.t == 6])
        return self._observed(), torch.rand(1), flag, ~flag & False, {"success": flag}


@pytest.fixture(scope="module")
def trajectories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    record = pytest.importorskip("mani_skill.utils.wrappers.record")
    folder = tmp_path_factory.mktemp("maniskill")
    env = record.RecordEpisode(Lane(), str(folder), save_video=False, trajectory_name="trajectory")
    for seed in range(3):
        env.reset(seed=seed)
        for _ in range(4 + seed):
            env.step(env.action_space.sample()[None])
    env.close()
    return folder / "trajectory.h5"


def arrays_of(path: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with h5py.File(path) as file:
        file.visititems(lambda name, item: found.update({name: item[()].tobytes()} if hasattr(item, "shape") else {}))
    return found


def test_trajectories_of_maniskill_come_in_and_go_out_as_they_were(trajectories: Path, tmp_path: Path) -> None:
    module = importlib.import_module("mani_skill.trajectory.dataset")
    gym_trace.import_trace(trajectories, tmp_path / "trace")
    trace = gym_trace.open_trace(tmp_path / "trace")
    assert [(e.seed, e.outcome, e.has_final_observation) for e in trace] == [
        (0, "cut", True), (1, "cut", True), (2, "terminated", True)
    ]  # fmt: skip
    assert not gym_trace.export(trace, tmp_path / "out", "maniskill").lost
    assert arrays_of(trajectories) == arrays_of(tmp_path / "out" / "trajectory.h5")
    one, other = (module.ManiSkillTrajectoryDataset(str(p)) for p in (trajectories, tmp_path / "out" / "trajectory.h5"))
    assert len(one) == len(other) == sum(map(len, trace))
    assert (one.env_id, one.env_kwargs) == (other.env_id, other.env_kwargs)
    for index in range(len(one)):
        a, b = one[index], other[index]
        assert np.array_equal(a["obs"]["agent"], b["obs"]["agent"])
        assert all(
            np.array_equal(a[name], b[name]) for name in ("action", "terminated", "truncated", "reward", "success")
        )


# -- the contract -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["robomimic", "maniskill"])
def test_traces_of_all_kinds_come_back(tmp_path: Path, form: str) -> None:
    here = Path(__file__).parents[1] / "exchange" / "formats" / "test_simulator_files.py"
    described = importlib.util.spec_from_file_location("simulator_files", here)
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    exporter: Any = RobomimicExporter() if form == "robomimic" else ManiSkillExporter()
    importer: Any = RobomimicImporter() if form == "robomimic" else ManiSkillImporter()

    def load(path: Path) -> Iterator[Loaded]:
        yield from getattr(module, f"load_{form}")(path)

    suffix = ".hdf5" * (form == "robomimic")
    refused = check_exporter(exporter, load, tmp_path / "out", suffix=suffix)
    assert {*refused} == {"dict", "text", "several-rewards"}
    assert check_importer(exporter, importer, tmp_path / "in", suffix=suffix) == refused
