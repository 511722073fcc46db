"""RLlib: what Ray gives of an export, that BC, MARWIL and CQL train on it, and what is made of what Ray wrote."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import local_ray
import msgpack
import msgpack_numpy
import numpy as np
import pyarrow.parquet as pq
import pytest
import ray
from ray.data.block import BlockAccessor
from ray.rllib.algorithms.bc import BCConfig
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.offline.offline_env_runner import OfflineSingleAgentEnvRunner

import gym_trace
from gym_trace.interop.conformance import Loaded, check_export, check_exporter, check_importer, check_round_trip
from gym_trace.interop.identity import KEY
from gym_trace.interop.rllib.encoding import packed
from gym_trace.interop.rllib.exporting import RLlibExporter
from gym_trace.interop.rllib.importing import RLlibImporter
from gym_trace.interop.rllib.shards import IDENTITIES

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def running() -> None:
    """Ray."""
    local_ray.start()


# -- episodes ---------------------------------------------------------------------------------------------------------


def episodes_in(path: Path) -> list[SingleAgentEpisode]:
    """As OfflinePreLearner makes them of what Ray Data gives."""
    items = pq.read_table(path)["item"].to_pylist()
    return [SingleAgentEpisode.from_state(msgpack.unpackb(item, object_hook=msgpack_numpy.decode)) for item in items]


def load_episodes(path: Path) -> Iterator[Loaded]:
    for episode in episodes_in(path):
        assert episode.is_done
        flags = np.zeros((2, len(episode)), np.bool_)
        flags[:, -1:] = [[episode.is_terminated], [episode.is_truncated]]
        infos = episode.get_infos()
        yield Loaded(
            as_recorded(episode.get_observations()),
            as_recorded(episode.get_actions()),
            episode.get_rewards(),
            *flags,
            infos=infos[1:],
            annotations={name: rows.data for name, rows in episode.extra_model_outputs.items()},
            identity=episode.custom_data[KEY],
        )


def as_recorded(tree: Any) -> Any:
    """Lists, which Tuples become, as tuples."""
    if isinstance(tree, dict):
        return {key: as_recorded(part) for key, part in tree.items()}
    return tuple(map(as_recorded, tree)) if isinstance(tree, list) else tree


def test_rllib_reads_episodes_as_recorded_and_finds_what_is_wrong(tmp_path: Path) -> None:
    assert not check_exporter(RLlibExporter(), load_episodes, tmp_path)


def test_episodes_come_back_bit_for_bit(tmp_path: Path) -> None:
    assert not check_importer(RLlibExporter(), RLlibImporter(), tmp_path)


def test_rllib_reads_what_real_environments_said(real: Path, tmp_path: Path) -> None:
    check_export(RLlibExporter(), load_episodes, real, tmp_path / "out")
    check_round_trip(RLlibExporter(), RLlibImporter(), real, tmp_path / "again", tmp_path / "back")


def test_an_import_is_simulated_again(record: Callable[[str], Path], tmp_path: Path) -> None:
    gym_trace.export(record("CartPole"), tmp_path / "out", "rllib")
    gym_trace.import_trace(tmp_path / "out", tmp_path / "back")
    assert not any(one.difference for one in gym_trace.verify_trace(tmp_path / "back"))


def test_no_two_episodes_have_one_id(cartpole: Path, tmp_path: Path) -> None:
    trace = gym_trace.open_trace(cartpole)
    gym_trace.export(trace[[0, 1, 0, 2, 0]], tmp_path / "out", "rllib")
    names = [episode.id_ for episode in episodes_in(tmp_path / "out")]
    assert len(set(names)) == 5


# -- rows -------------------------------------------------------------------------------------------------------------


def load_rows(path: Path) -> Iterator[Loaded]:
    """As Ray Data makes batches of tables, in this process."""
    return episodes_of(BlockAccessor.for_block(pq.read_table(path)).to_batch_format("numpy"), path)


def load_rows_by_ray(path: Path) -> Iterator[Loaded]:
    """As Ray Data gives batches to OfflinePreLearner."""
    batches = list(ray.data.read_parquet([str(path)]).iter_batches(batch_size=None, batch_format="numpy"))
    return episodes_of({name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}, path)


def episodes_of(columns: dict[str, Any], path: Path) -> Iterator[Loaded]:
    """Of rows, whose last new_obs is what was observed last."""
    identities = []
    for file in sorted(path.iterdir()):
        told = pq.ParquetFile(file).metadata.metadata.get(IDENTITIES.encode(), b"").decode()
        identities += told.splitlines()
    names = list(dict.fromkeys(columns["eps_id"].tolist()))
    for name, identity in zip(names, identities, strict=True):
        mine = columns["eps_id"] == name
        observations, after = columns["obs"][mine], columns["new_obs"][mine]
        assert observations[1:].tobytes() == after[:-1].tobytes()
        assert (np.diff(columns["t"][mine]) == 1).all()
        yield Loaded(
            np.concatenate([observations, after[-1:]]),
            columns["actions"][mine],
            columns["rewards"][mine],
            columns["terminateds"][mine],
            columns["truncateds"][mine],
            identity=identity,
        )


def test_rllib_reads_rows_as_recorded_and_finds_what_is_wrong(tmp_path: Path) -> None:
    refused = check_exporter(RLlibExporter(kind="rows"), load_rows, tmp_path)
    assert set(refused) == {"dict", "tuple", "text"}


@pytest.mark.parametrize("name", ["CartPole", "Pendulum", "continuing", "HalfCheetah", "Taxi", "Pong"])
def test_ray_data_reads_rows_of_real_environments(
    running: None, name: str, record: Callable[[str], Path], tmp_path: Path
) -> None:
    check_export(RLlibExporter(kind="rows"), load_rows_by_ray, record(name), tmp_path / "out")


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cartpole(tmp_path: Path) -> Path:
    return recorded("CartPole-v1", 20, tmp_path / "cartpole")


def recorded(name: str, episodes: int, directory: Path) -> Path:
    env = gym_trace.TraceRecordingWrapper(gymnasium.make(name), directory)
    env.action_space.seed(0)
    for seed in range(episodes):
        env.reset(seed=seed)
        done = False
        while not done:
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            done = terminated or truncated
    env.close()
    return directory


def test_the_example_trains(cartpole: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "train_rllib.py"), str(cartpole)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "BC: " in done.stdout


@pytest.mark.parametrize("kind", ["episodes", "rows"])
def test_the_printed_lines_build_and_train(running: None, cartpole: Path, kind: str, tmp_path: Path) -> None:
    report = gym_trace.export(cartpole, tmp_path / "out", "rllib", kind=kind)
    made: dict[str, Any] = {}
    exec(report.how_to_load.replace("learner=100", "learner=5"), made)
    told = made["algorithm"].train()["learners"]["default_policy"]
    made["algorithm"].stop()
    assert np.isfinite(told["total_loss"])
    assert told["num_module_steps_trained"] > 0


@pytest.mark.parametrize("kind", ["episodes", "rows"])
@pytest.mark.parametrize(
    ("name", "algorithm"), [("CartPole-v1", "BC"), ("CartPole-v1", "MARWIL"), ("Pendulum-v1", "CQL")]
)
def test_its_algorithms_train(
    running: None, name: str, algorithm: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    train_rllib = importlib.import_module("train_rllib")
    monkeypatch.setattr(train_rllib, "UPDATES", 3)
    trace = recorded(name, 8, tmp_path / "trace")
    report = gym_trace.export(trace, tmp_path / "out", "rllib", kind=kind)
    losses, steps = train_rllib.trained(gym_trace.open_trace(trace), algorithm, kind, report.path)
    assert np.isfinite(losses).all()
    assert 0 < steps <= 2 * 3 * 256  # rows end with a batch that is not full


# -- what Ray has written ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
def test_what_ray_has_written_is_imported(running: None, whole: bool, tmp_path: Path) -> None:
    mode = "complete_episodes" if whole else "truncate_episodes"
    config = (
        BCConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0, batch_mode=mode, rollout_fragment_length=25, num_envs_per_env_runner=2)
        .offline_data(output=str(tmp_path / "own"), output_write_episodes=True)
    )
    runner = OfflineSingleAgentEnvRunner(config=config)
    pieces: list[SingleAgentEpisode] = []
    for _ in range(1 if whole else 4):
        given = {"num_episodes": 4} if whole else {"num_timesteps": 50}
        pieces += runner.sample(random_actions=True, **given)
    runner.stop()
    report = gym_trace.import_trace(tmp_path / "own", tmp_path / "trace")
    assert report.format == "rllib"
    steps: dict[str, list[SingleAgentEpisode]] = {}
    for piece in pieces:
        if len(piece):
            steps.setdefault(piece.id_, []).append(piece)
    trace = gym_trace.open_trace(tmp_path / "trace")
    assert report.steps == sum(map(len, pieces))  # though Ray writes those of each sample again with the next one
    assert trace.observation_space == gymnasium.make("CartPole-v1").observation_space
    made = {episode.observations.tobytes(): episode for episode in trace}
    for several in steps.values():
        rows = [several[0].get_observations(0), *(row for piece in several for row in piece.get_observations()[1:])]
        episode = made[np.stack(rows).tobytes()]
        assert episode.actions.tolist() == [action for piece in several for action in piece.get_actions()]
        assert episode.rewards.tolist() == [reward for piece in several for reward in piece.get_rewards()]
        assert bool(episode.terminations[-1]) == bool(several[-1].is_terminated)
        assert episode.outcome == ("terminated" if several[-1].is_terminated else "cut")
        assert episode.seed is None
        assert len(episode.annotations["weights_seq_no"]) == len(episode)


def test_ours_is_msgpack_numpy() -> None:
    values = [np.arange(6.0).reshape(2, 3).T, np.float32(2), np.array(["a", "bé"]), np.bool_(True), {"a": [1, "b"]}]
    found = msgpack.unpackb(packed(values), object_hook=msgpack_numpy.decode)
    theirs = msgpack.unpackb(msgpack.packb(values, default=msgpack_numpy.encode), object_hook=msgpack_numpy.decode)
    for ours, other in zip(found, theirs):
        assert type(ours) is type(other)
        assert np.array_equal(ours, other)
