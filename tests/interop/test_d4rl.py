"""D4RL's layout: what D4RL's own functions, which CORL and IQL call, make of an export. They are written out here, as
D4RL 1.1 has them (Apache 2.0), because D4RL itself cannot be installed beside anything of today.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import numpy as np
import pytest
from planted_defects import check_exporter
from traces import run_example

import gym_trace
from gym_trace.errors import InvalidOption
from gym_trace.exchange.formats.conformance import (
    Loaded,
    check_export,
    check_importer,
    check_round_trip,
)
from gym_trace.exchange.formats.hdf5.d4rl import D4RLExporter, D4RLImporter

FLAT = ("CartPole", "Pendulum", "continuing", "HalfCheetah", "Taxi", "Pong")


def get_dataset(path: Path, env: Any = None) -> dict[str, Any]:
    """d4rl.offline_env.OfflineEnv.get_dataset(h5path)"""
    data: dict[str, Any] = {}
    with h5py.File(path) as file:
        keys: list[str] = []
        file.visititems(lambda name, item: keys.append(name) if isinstance(item, h5py.Dataset) else None)
        for key in keys:
            try:  # first try loading as an array
                data[key] = file[key][:]
            except ValueError:  # try loading as a scalar
                data[key] = file[key][()]
    for key in ("observations", "actions", "rewards", "terminals"):
        assert key in data
    count = data["observations"].shape[0]
    if env is not None:
        assert data["observations"].shape[1:] == env.observation_space.shape
        assert data["actions"].shape[1:] == env.action_space.shape
    assert data["rewards"].shape == (count,)
    assert data["terminals"].shape == (count,)
    return data


def qlearning_dataset(dataset: dict[str, Any], terminate_on_end: bool = False) -> dict[str, Any]:
    """d4rl.qlearning_dataset(env, dataset, terminate_on_end)"""
    count = dataset["rewards"].shape[0]
    obs_, next_obs_, action_, reward_, done_ = [], [], [], [], []
    for i in range(count - 1):
        obs = dataset["observations"][i].astype(np.float32)
        new_obs = dataset["observations"][i + 1].astype(np.float32)
        action = dataset["actions"][i].astype(np.float32)
        reward = dataset["rewards"][i].astype(np.float32)
        done_bool = bool(dataset["terminals"][i])
        final_timestep = dataset["timeouts"][i]
        if (not terminate_on_end) and final_timestep:
            continue  # Skip this transition and don't apply terminals on the last step of an episode
        obs_.append(obs)
        next_obs_.append(new_obs)
        action_.append(action)
        reward_.append(reward)
        done_.append(done_bool)
    names = ("observations", "next_observations", "actions", "rewards", "terminals")
    return dict(zip(names, map(np.array, (obs_, next_obs_, action_, reward_, done_)), strict=True))


def sequence_dataset(dataset: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """d4rl.sequence_dataset(env, dataset)"""
    data: dict[str, list[Any]] = {}
    for i in range(dataset["rewards"].shape[0]):
        for key in dataset:
            if "metadata" not in key:
                data.setdefault(key, []).append(dataset[key][i])
        if bool(dataset["terminals"][i]) or dataset["timeouts"][i]:
            yield {key: np.array(rows) for key, rows in data.items()}
            data = {}
    assert not data, "an episode without an end"


def load(path: Path) -> Iterator[Loaded]:
    """The episodes as D4RL's functions give them."""
    dataset = get_dataset(path)
    identities = dataset["metadata/gym_trace/episodes"]
    for episode, identity in zip(sequence_dataset(dataset), identities, strict=True):
        observations = np.concatenate([episode["observations"], episode["next_observations"][-1:]])
        assert np.array_equal(_bits(observations[1:]), _bits(episode["next_observations"]))
        rows = {key.removeprefix("infos/"): values for key, values in episode.items() if key.startswith("infos/")}
        notes = {key.removeprefix("annotations/"): rows.pop(key) for key in [*rows] if key.startswith("annotations/")}
        yield Loaded(
            observations,
            episode["actions"],
            episode["rewards"],
            episode["terminals"],
            episode["timeouts"],
            infos=[{key: values[i] for key, values in rows.items()} for i in range(len(episode["rewards"]))],
            annotations=notes,
            identity=identity.decode(),
        )


def _bits(array: Any) -> Any:
    return np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)


def test_d4rl_reads_what_was_recorded(tmp_path: Path) -> None:
    refused = check_exporter(D4RLExporter(), load, tmp_path, suffix=".hdf5")
    assert set(refused) == {"dict", "tuple", "text", "several-rewards"}


def test_an_export_comes_back_bit_for_bit(tmp_path: Path) -> None:
    check_importer(D4RLExporter(), D4RLImporter(), tmp_path, suffix=".hdf5")


@pytest.mark.parametrize("name", FLAT)
def test_traces_of_real_environments_go_out_and_come_back(
    name: str, record: Callable[[str], Path], tmp_path: Path
) -> None:  # fmt: skip
    trace = gym_trace.open_trace(record(name))
    check_export(D4RLExporter(), load, trace, tmp_path / "out.hdf5")
    check_round_trip(D4RLExporter(), D4RLImporter(), trace, tmp_path / "other.hdf5", tmp_path / "back")
    back = gym_trace.open_trace(tmp_path / "back")
    verdicts = [[v.verdict for v in gym_trace.verify_trace(one)] for one in (trace, back)]
    assert verdicts[0] == verdicts[1]


@pytest.mark.parametrize("name", ["MiniGrid", "Blackjack", "nested"])
def test_nested_observations_raise_before_anything_is_written(
    name: str, record: Callable[[str], Path], tmp_path: Path
) -> None:  # fmt: skip
    with pytest.raises(InvalidOption, match="observations: not one array of numbers"):
        gym_trace.export(record(name), tmp_path / "out.hdf5", "d4rl")
    assert not any(tmp_path.iterdir())


def test_transitions_are_those_of_the_steps(record: Callable[[str], Path], tmp_path: Path) -> None:
    trace = gym_trace.open_trace(record("HalfCheetah"))
    gym_trace.export(trace, tmp_path / "out.hdf5", "d4rl")
    dataset = get_dataset(tmp_path / "out.hdf5", gymnasium.make("HalfCheetah-v5"))
    assert dataset["observations"].dtype == np.float64
    found = qlearning_dataset(dataset)
    wanted = [(e.observations[t], e.actions[t], e.rewards[t], e.observations[t + 1])
              for e in trace for t in range(len(e) - 1)]  # fmt: skip
    assert len(wanted) == len(found["rewards"])
    assert not found["terminals"].any()
    for i, (observation, action, reward, after) in enumerate(wanted):
        assert np.array_equal(found["observations"][i], observation.astype(np.float32))
        assert np.array_equal(found["next_observations"][i], after.astype(np.float32))
        assert np.array_equal(found["actions"][i], action)
        assert found["rewards"][i] == np.float32(reward)


def test_terminal_steps_are_transitions_and_truncated_ones_are_not(
    record: Callable[[str], Path], tmp_path: Path
) -> None:  # fmt: skip
    trace = gym_trace.open_trace(record("CartPole"))
    gym_trace.export(trace, tmp_path / "out.hdf5", "d4rl")
    found = qlearning_dataset(get_dataset(tmp_path / "out.hdf5"))
    over = [episode.outcome == "terminated" for episode in trace]
    assert not all(over)  # an episode is cut, and another closed
    assert found["terminals"].sum() == sum(over)
    assert len(found["rewards"]) == sum(len(e) - (not ended) for e, ended in zip(trace, over))


def test_a_file_of_d4rl_is_a_trace(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    observations, actions = rng.normal(size=(10, 3)).astype("f4"), rng.normal(size=(10, 2)).astype("f4")
    with h5py.File(tmp_path / "hopper.hdf5", "w") as file:
        file["observations"], file["actions"] = observations, actions
        file["rewards"], file["terminals"] = np.arange(10, dtype="f4")[:, None], np.eye(10, dtype="u1")[3][:, None]
        file["timeouts"] = np.arange(10) == 6
        file["infos/qpos"] = rng.normal(size=(10, 4))
        file["metadata/algorithm"] = "SAC"
        file["metadata/policy/weight"] = np.zeros((5, 5))
    report = gym_trace.import_trace(tmp_path / "hopper.hdf5", tmp_path / "trace")
    assert report.format == "d4rl"
    trace = gym_trace.open_trace(tmp_path / "trace")
    assert [(len(e), e.outcome, e.seed) for e in trace] == [
        (4, "terminated", None),
        (3, "truncated", None),
        (3, "cut", None),
    ]
    assert trace.facts == {"algorithm": "SAC"}
    for episode, rows in zip(trace, (slice(0, 4), slice(4, 7), slice(7, 10))):
        assert np.array_equal(episode.observations[:-1], observations[rows])
        assert np.isnan(episode.observations[-1]).all()
        assert episode.rewards.tolist() == list(range(10))[rows]
        assert all(info["qpos"].shape == (4,) for info in episode.infos)
    assert any("final observation" in text for text in report.warnings)


def test_an_offline_agent_trains(record: Callable[[str], Path]) -> None:
    assert "critic loss" in run_example("train_d4rl", record("HalfCheetah"))
