"""Files of robomimic and ManiSkill without their packages: as their writers make them, there and back; hostile ones."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from planted_defects import check_exporter
from scripted_env import Result, ToyEnv

import gym_trace
from gym_trace.data.packing import pack, unpack
from gym_trace.errors import EnvironmentUnavailable, UnreadableRecording
from gym_trace.exchange.formats.conformance import Loaded, check_importer
from gym_trace.playback.episode_index import writer_agreed_on

h5py = pytest.importorskip("h5py")

from gym_trace.exchange.formats.simulators.maniskill import (  # noqa: E402 - take h5py
    ManiSkillExporter,
    ManiSkillImporter,
)
from gym_trace.exchange.formats.simulators.robomimic import RobomimicExporter, RobomimicImporter  # noqa: E402

ENV_ARGS = json.dumps({"env_name": "Lift", "env_version": "1.5.2", "type": 1, "env_kwargs": {"robots": ["Panda"]}})
ROLES = ["actions", "rewards", "dones", "states", "obs", "next_obs"]


def of_robomimic(path: Path, only: Any = ROLES, **attributes: Any) -> Path:
    """Three demonstrations as robomimic's dataset_states_to_obs writes them. only: names of arrays and groups."""
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for name, value in (attributes or {"env_args": ENV_ARGS, "total": 12}).items():
            file.create_group("data") if "data" not in file else None
            file["data"].attrs[name] = value
        for number, steps in enumerate((3, 4, 5), 8):
            demo, camera = file.create_group(f"data/demo_{number}"), random.integers(0, 255, (steps + 1, 8, 8, 3))
            joints, dones = random.normal(size=(steps + 1, 7)), np.zeros(steps, np.int64)
            dones[[1, -1]] = 1, number % 2
            arrays = {
                "actions": random.normal(size=(steps, 7)),
                "rewards": random.normal(size=steps),
                "dones": dones,
                "states": random.normal(size=(steps, 32)),
                "obs": {"joints": joints[:-1], "camera": camera[:-1].astype(np.uint8)},
                "next_obs": {"joints": joints[1:], "camera": camera[1:].astype(np.uint8)},
            }
            extra = {"action_dict/pos": random.normal(size=(steps, 3)).astype(np.float32), "at_start": np.arange(7.0)}
            for name, rows in ({name: arrays[name] for name in only} | extra).items():
                for part, part_rows in rows.items() if isinstance(rows, dict) else [("", rows)]:
                    demo[f"{name}/{part}".rstrip("/")] = part_rows
            demo.attrs["model_file"], demo.attrs["num_samples"] = f"<mujoco model='{number}'/>" * 4000, steps
        file["mask/train"], file["mask/valid"] = np.array(["demo_8", "demo_10"], "S"), np.array([], "S")
    return path


def of_maniskill(path: Path) -> Path:
    """Two trajectories as ManiSkill's RecordEpisode writes them, with numbers that are not in the order of letters."""
    random = np.random.default_rng(1)
    episodes = []
    with h5py.File(path, "w") as file:
        for number, steps in ((2, 5), (10, 3)):
            group = file.create_group(f"traj_{number}", track_order=True)
            group["obs/state"] = random.normal(size=(steps + 1, 4)).astype(np.float32)
            group.create_dataset("obs/rgb", data=random.integers(0, 255, (steps + 1, 9, 9, 3), np.uint8), compression=5)
            group["actions"] = random.normal(size=(steps, 2)).astype(np.float32)
            group["terminated"], group["truncated"] = np.arange(steps) == steps - 1, np.arange(steps) == number
            group["success"], group["fail"] = np.arange(steps) > 1, np.zeros(steps, bool)
            group["env_states/actors/cube"] = random.normal(size=(steps + 1, 13)).astype(np.float32)
            group["env_states/articulations/panda"] = random.normal(size=(steps + 1, 31)).astype(np.float32)
            group["rewards"] = random.normal(size=steps).astype(np.float32)
            kwargs = {"seed": number, "options": {"level": 2}}
            episodes.append({"episode_id": number, "episode_seed": number, "control_mode": "pd", "reset_kwargs": kwargs,
                             "elapsed_steps": steps, "success": True})  # fmt: skip
    env = {"env_id": "PushCube-v1", "env_kwargs": {"obs_mode": "rgb"}, "max_episode_steps": 50}
    path.with_suffix(".json").write_text(json.dumps({"env_info": env, "source_type": "rl", "episodes": episodes}))
    return path


def arrays_of(path: Path) -> list[dict[str, Any]]:
    """The arrays and attributes of each episode of a file, in their order."""
    with h5py.File(path) as file:
        root = file.get("data", file)
        found = []
        for name in sorted((name for name in root if name[-1].isdecimal()), key=lambda name: int(name.split("_")[1])):
            arrays: dict[str, Any] = {f"@{key}": value for key, value in root[name].attrs.items() if key != "gym_trace"}
            root[name].visititems(
                lambda key, item, arrays=arrays: arrays.update({key: item[()]} if hasattr(item, "shape") else {})
            )
            found.append(arrays)
        return found


def is_same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    def plain(value: Any) -> Any:
        return (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value

    return [{k: plain(v) for k, v in e.items()} for e in one] == [{k: plain(v) for k, v in e.items()} for e in other]


def imported(path: Path, tmp_path: Path) -> tuple[gym_trace.Trace, list[str]]:
    warnings = gym_trace.import_trace(path, tmp_path / "in").warnings
    return gym_trace.open_trace(tmp_path / "in"), warnings


def test_a_file_of_robomimic_comes_in_and_goes_out_as_it_was(tmp_path: Path) -> None:
    trace, warnings = imported(of_robomimic(tmp_path / "file.hdf5"), tmp_path)
    assert len(warnings) == 1
    assert "no truncation" in warnings[0]
    first, *_, last = trace
    stored = arrays_of(tmp_path / "file.hdf5")
    assert (
        first.observations["joints"].tobytes()
        == np.append(stored[0]["obs/joints"], stored[0]["next_obs/joints"][-1:], 0).tobytes()
    )
    assert [e.outcome for e in trace] == ["cut", "terminated", "cut"]
    assert first.terminations.tolist() == [False, True, False]
    assert first.reset_info["model_file"].startswith("<mujoco model='8'/>")
    assert [bool(e.annotations["mask/train"].all()) for e in trace] == [True, False, True]
    assert unpack(last.states["environment"][4]["state"]).tobytes() == stored[2]["states"][4].tobytes()
    report = gym_trace.export(trace, tmp_path / "out.hdf5", "robomimic")
    assert [loss.what for loss in report.lost] == ["outcome"]
    assert is_same(arrays_of(tmp_path / "out.hdf5"), stored)
    with h5py.File(tmp_path / "out.hdf5") as file:
        assert dict(file["data"].attrs) == {"env_args": ENV_ARGS, "total": 12}
        assert {key: names[()].tolist() for key, names in file["mask"].items()} == {
            "train": [b"demo_0", b"demo_2"],
            "valid": [],
        }
    gym_trace.import_trace(tmp_path / "out.hdf5", tmp_path / "again")
    assert all(one.difference is None for one in gym_trace.diff_traces(trace, tmp_path / "again"))


def test_trajectories_of_maniskill_come_in_and_go_out_as_they_were(tmp_path: Path) -> None:
    trace, _ = imported(of_maniskill(tmp_path / "file.h5"), tmp_path)
    first, stored = trace[0], arrays_of(tmp_path / "file.h5")
    assert (first.seed, first.options, first.outcome, first.has_final_observation) == (
        2,
        {"level": 2},
        "terminated",
        True,
    )
    assert first.infos[1] == {"success": False, "fail": False}
    states = [*first.states["environment"], first.states["final"][-1]]
    cubes = np.concatenate([unpack(state["state"])["actors"]["cube"] for state in states])
    assert cubes.tobytes() == stored[0]["env_states/actors/cube"].tobytes()
    assert not gym_trace.export(trace, tmp_path / "out", "maniskill").lost
    assert is_same(arrays_of(tmp_path / "out" / "trajectory.h5"), stored)
    was, now = (json.loads(p.read_text()) for p in (tmp_path / "file.json", tmp_path / "out" / "trajectory.json"))
    assert {**now, "episodes": [], "gym_trace": ""} == {**was, "episodes": [], "gym_trace": ""}
    assert [{**e, "episode_id": 0, "gym_trace": 0} for e in now["episodes"]] == [
        {**e, "episode_id": 0, "gym_trace": 0} for e in was["episodes"]
    ]
    gym_trace.import_trace(tmp_path / "out", tmp_path / "again")
    assert all(one.difference is None for one in gym_trace.diff_traces(trace, tmp_path / "again"))


def test_demonstrations_without_observations_are_states_and_actions(tmp_path: Path) -> None:
    info = {"env": "Lift", "env_info": json.dumps({"env_name": "Lift", "robots": "Panda"}), "repository_version": "1.5"}
    trace, warnings = imported(of_robomimic(tmp_path / "file.hdf5", ["actions", "states"], **info), tmp_path)
    assert ["no observations" in " ".join(warnings), "no rewards" in " ".join(warnings)] == [True, True]
    assert trace[0].observations.shape == (4, 0)
    assert not trace[0].has_final_observation
    with pytest.raises(EnvironmentUnavailable, match=r"needs trust.*RobosuiteEnv\(env_name='Lift', robots='Panda'\)"):
        gym_trace.env_at(trace, 0, 1, start="states")
    gym_trace.export(trace, tmp_path / "out.hdf5", "robomimic")
    assert is_same(
        [{k: v for k, v in e.items() if k != "dones"} for e in arrays_of(tmp_path / "out.hdf5")],
        arrays_of(tmp_path / "file.hdf5"),
    )


def test_a_file_of_isaac_lab_keeps_what_the_layout_does_not_name(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "file.hdf5", "w") as file:
        demo = file.create_group("data/demo_0")
        demo["actions"], demo["obs/policy/joint_pos"] = np.ones((3, 2), np.float32), np.zeros((3, 9), np.float32)
        demo["states/articulation/robot/root_pose"], demo["initial_state/robot"] = np.ones((3, 7)), np.ones((1, 7))
        demo.attrs["seed"], demo.attrs["success"], demo.attrs["num_samples"] = 5, True, 3
        file["data"].attrs["env_args"] = json.dumps({"env_name": "Isaac-Stack-Cube-v0", "type": 2})
    trace, _ = imported(tmp_path / "file.hdf5", tmp_path)
    episode = trace[0]
    assert (episode.seed, episode.reset_info["success"], episode.has_final_observation) == (5, True, False)
    assert episode.observations["policy"]["joint_pos"].shape == (4, 9)
    assert [*episode.annotations] == ["states/articulation/robot/root_pose"]
    assert episode.reset_info["arrays"]["initial_state/robot"].shape == (1, 7)
    report = gym_trace.export(trace, tmp_path / "out.hdf5", "robomimic")
    assert "final_observation" in {loss.what for loss in report.lost}
    (out,) = arrays_of(tmp_path / "out.hdf5")
    assert [*out] == [
        "@num_samples",
        "@seed",
        "@success",
        "actions",
        "dones",
        "initial_state/robot",
        "obs/policy/joint_pos",
        "states/articulation/robot/root_pose",
    ]


# -- the contract -----------------------------------------------------------------------------------------------------


def load_robomimic(path: Path) -> Iterator[Loaded]:
    for arrays, identity in zip(arrays_of(path), identities(path), strict=True):
        observations = {k: nested(arrays, k) for k in ("obs", "next_obs")}
        before, after = (rows.get("flat", rows) for rows in observations.values())
        ends = arrays["dones"] != 0
        cuts = ~ends & (np.arange(len(ends)) == len(ends) - 1)
        yield Loaded(joined(before, after), arrays["actions"], arrays["rewards"], ends, cuts,
                     infos=infos_in(arrays), annotations=arrays, identity=identity)  # fmt: skip


def load_maniskill(path: Path) -> Iterator[Loaded]:
    entries = json.loads((path / "trajectory.json").read_text())["episodes"]
    for arrays, entry in zip(arrays_of(path / "trajectory.h5"), entries, strict=True):
        observations = arrays["obs"] if "obs" in arrays else nested(arrays, "obs")
        yield Loaded(observations, arrays["actions"], arrays["rewards"], arrays["terminated"], arrays["truncated"],
                     infos=infos_in(arrays), annotations=arrays, identity=entry["gym_trace"])  # fmt: skip


def identities(path: Path) -> list[str]:
    with h5py.File(path) as file:
        return [file["data"][f"demo_{number}"].attrs["gym_trace"] for number in range(len(file["data"]))]


def nested(arrays: dict[str, Any], root: str) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, rows in arrays.items():
        first, *path = name.split("/")
        if first == root and path:
            inner = tree
            for part in path[:-1]:
                inner = inner.setdefault(part, {})
            inner[path[-1]] = rows.astype(str).tolist() if rows.dtype == object else rows
    return tree


def joined(before: Any, after: Any) -> Any:
    if isinstance(before, dict):
        return {key: joined(before[key], after.get(key) if isinstance(after, dict) else None) for key in before}
    return before if not isinstance(after, np.ndarray) else np.append(before, after[-1:], 0)


def infos_in(arrays: dict[str, Any]) -> list[Any] | None:
    infos = nested(arrays, "infos")
    return [{key: rows[i] for key, rows in infos.items()} for i in range(len(arrays["actions"]))] if infos else None


@pytest.mark.parametrize(
    ("exporter", "importer", "load", "suffix"),
    [
        (RobomimicExporter(), RobomimicImporter(), load_robomimic, ".hdf5"),
        (ManiSkillExporter(), ManiSkillImporter(), load_maniskill, ""),
    ],
)
def test_traces_of_all_kinds_come_back(tmp_path: Path, exporter: Any, importer: Any, load: Any, suffix: str) -> None:
    some = ["tuple", "ends", "infos"]  # all of them in tests/interop/test_simulators_hdf5.py
    assert not check_exporter(exporter, load, tmp_path / "out", suffix=suffix, only=some, run_how_to_load=False)
    assert not check_importer(exporter, importer, tmp_path / "in", suffix=suffix, only=some)


# -- states -----------------------------------------------------------------------------------------------------------


class Counter(ToyEnv):
    """Counts; its states are arrays, and belong to a model."""

    observation_space, action_space = spaces.Box(0, 1, (7,)), spaces.Discrete(2)
    model = count = 0

    def begin_episode(self, info: dict[str, Any]) -> None:
        self.model = len(info["model_file"])

    def result(self, action: Any) -> Result:
        self.count += 1
        return Result(np.zeros(7, np.float32), terminated=self.t == 3)

    def get_state(self) -> bytes:
        return pack(np.full(32, self.count, np.float64))

    def set_state(self, state: bytes) -> None:
        self.count = (self.model, *unpack(state)[:1].tolist())  # type: ignore[assignment]


def test_an_environment_gets_the_model_of_an_episode_before_its_states(tmp_path: Path) -> None:
    trace, _ = imported(of_robomimic(tmp_path / "file.hdf5"), tmp_path)
    env = gym_trace.env_at(trace, 1, 2, make_env=Counter, start="states", trust=True)
    state = unpack(trace[1].states["environment"][2]["state"])
    assert env.unwrapped.count == (len(trace[1].reset_info["model_file"]), state[0])


def test_states_that_only_some_steps_have_are_reported_as_lost(tmp_path: Path) -> None:
    with gym_trace.TraceRecordingWrapper(Counter(), tmp_path / "trace", states=2) as env:
        env.reset()
        for _ in range(3):
            env.step(0)
    lost = gym_trace.export(tmp_path / "trace", tmp_path / "out.hdf5", "robomimic").lost
    assert "states that some steps lack" in " ".join(map(str, lost))
    report = gym_trace.export(tmp_path / "trace", tmp_path / "steps.jsonl")
    assert [str(loss) for loss in report.lost] == ["states of the environment are not kept"]


# -- files that lead astray -------------------------------------------------------------------------------------------


def spoilt(change: Callable[[Any], Any]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        with h5py.File(of_robomimic(folder / "file.hdf5"), "a") as file:
            change(file)
        return folder / "file.hdf5"

    return make


def replaced(name: str, rows: Any) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        del file["data/demo_9"][name]
        file["data/demo_9"][name] = rows

    return change


def many_names(file: Any) -> None:
    file["data/demo_8"].attrs["model_file"] = "x" * (8 << 20)
    for number in range(40):
        file[f"data/demo_{number + 20}"] = file["data/demo_8"]


def with_pipe(folder: Path) -> Path:
    of_maniskill(folder / "file.h5").with_suffix(".json").unlink()
    os.mkfifo(folder / "file.json")
    return folder / "file.h5"


def with_json(text: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        of_maniskill(folder / "file.h5").with_suffix(".json").write_text(text)
        return folder / "file.h5"

    return make


@pytest.mark.parametrize(
    ("make", "form", "told"),
    [
        (spoilt(replaced("actions", h5py.ExternalLink("/etc/passwd", "/"))), "robomimic", "links are not followed"),
        (spoilt(replaced("rewards", np.zeros((4, 5)))), "robomimic", "one number per step"),
        (spoilt(replaced("obs/joints", np.zeros((9, 7)))), "robomimic", "of 4 steps should be"),
        (spoilt(replaced("states", np.zeros((2, 32)))), "robomimic", "of 4 steps should be"),
        (spoilt(replaced("obs/joints", np.array(["text"] * 4, "S"))), "robomimic", "of 4 steps should be"),
        (spoilt(lambda file: file["data/demo_9"].pop("actions")), "robomimic", "has no actions"),
        (spoilt(many_names), "robomimic", "named too many times"),
        (with_pipe, "maniskill", "not a regular file"),
        (with_json("[]"), "maniskill", "not a JSON object"),
        (with_json('{"episodes": 3}'), "maniskill", "no list of episodes"),
    ],
)  # fmt: skip
def test_files_that_lead_astray_are_refused(tmp_path: Path, make: Callable[[Path], Path], form: str, told: str) -> None:
    path = make(tmp_path)
    with pytest.raises(UnreadableRecording, match=told) as caught:
        gym_trace.import_trace(path, tmp_path / "refused", form)
    assert str(caught.value).isprintable()
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("env_args", ["", "[" * 5000, '{"env_name": 3, "type": [], "env_kwargs": "x"}', '{"type": 1}'])
def test_a_malformed_environment_is_noted_as_unknown(tmp_path: Path, env_args: str) -> None:
    trace, _ = imported(of_robomimic(tmp_path / "file.hdf5", env_args=env_args), tmp_path)
    assert "names no environment" in writer_agreed_on(trace, "observation_space").schema["environment"]["note"]
