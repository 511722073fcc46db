"""TorchRL: what load_memmap, a ReplayBuffer and SliceSampler give of an export, and that its losses train on it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import (
    LazyMemmapStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorStorage,
)
from torchrl.envs import GymEnv

import gym_trace
from gym_trace.errors import InvalidOption
from gym_trace.interop.conformance import Loaded, check_export, check_exporter
from gym_trace.interop.torchrl.exporting import EPISODES, TorchRLExporter
from gym_trace.torchrl import TraceStorage

EXAMPLES = Path(__file__).parents[2] / "examples"
NOT_OBSERVED = {"action", "annotations", "done", "episode", "next", "reward", "terminated", "truncated"}


def load(path: Path) -> Iterator[Loaded]:
    """Each episode by its number; what was observed last is under "next"."""
    data = TensorDict.load_memmap(path)
    counts = torch.bincount(data["episode"]).tolist()
    assert not data["done"].any()
    for episode, identity in zip(data.split(counts), (path / EPISODES).read_text().splitlines(), strict=True):
        assert (episode["episode"] == episode["episode"][0]).all()
        after = episode["next"]
        assert torch.equal(after["done"], after["terminated"] | after["truncated"])
        names = sorted(set(episode.keys()) - NOT_OBSERVED)
        first, then = ({name: values(part[name]) for name in names} for part in (episode, after))
        check_next(first, then)
        rewards = after["reward"].numpy()
        yield Loaded(
            alone(joined(first, then)),
            values(episode["action"]),
            rewards[:, 0] if rewards.shape[1] == 1 else rewards,
            after["terminated"].numpy()[:, 0],
            after["truncated"].numpy()[:, 0],
            annotations=values(episode["annotations"]) if "annotations" in episode.keys() else None,  # noqa: SIM118
            identity=identity,
        )


def values(found: Any) -> Any:
    if isinstance(found, TensorDictBase):
        return {name: values(found[name]) for name in sorted(found.keys())}
    return found.numpy()


def alone(tree: dict[str, Any]) -> Any:
    return tree["observation"] if set(tree) == {"observation"} else tree


def check_next(first: Any, then: Any) -> None:
    """What came after a step is what was there before the one after it."""
    if isinstance(first, dict):
        for name in first:
            check_next(first[name], then[name])
    else:
        assert first[1:].tobytes() == then[:-1].tobytes()


def joined(first: Any, then: Any) -> Any:
    if isinstance(first, dict):
        return {name: joined(first[name], then[name]) for name in first}
    return np.concatenate([first, then[-1:]])


def test_torchrl_reads_what_was_recorded_and_finds_what_is_wrong(tmp_path: Path) -> None:
    assert not check_exporter(TorchRLExporter(), load, tmp_path)


def test_torchrl_reads_what_real_environments_said(real: Path, tmp_path: Path) -> None:
    check_export(TorchRLExporter(), load, real, tmp_path / "out")


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


@pytest.mark.parametrize("kind", [TensorStorage, LazyMemmapStorage])
def test_slices_are_of_one_episode_each_and_follow_one_another(cartpole: Path, kind: Any, tmp_path: Path) -> None:
    report = gym_trace.export(cartpole, tmp_path / "ted", "torchrl")
    data = TensorDict.load_memmap(report.path)
    sampler = SliceSampler(slice_len=5, traj_key="episode", strict_length=True)
    if kind is TensorStorage:
        buffer = ReplayBuffer(storage=TensorStorage(data), sampler=sampler, batch_size=50)
    else:
        buffer = ReplayBuffer(storage=LazyMemmapStorage(len(data)), sampler=sampler, batch_size=50)
        buffer.extend(data)
    assert len(buffer) == report.steps
    trace = gym_trace.open_trace(cartpole)
    for part in buffer.sample().split(5):
        (number,) = set(part["episode"].tolist())
        assert torch.equal(part["observation"][1:], part["next", "observation"][:-1])
        rows = trace[number].observations
        assert part["observation"][0].numpy().tobytes() in [row.tobytes() for row in rows]


def test_slices_end_at_the_flags_too(cartpole: Path, tmp_path: Path) -> None:
    gym_trace.export(cartpole, tmp_path / "ted", "torchrl")
    data = TensorDict.load_memmap(tmp_path / "ted")
    sampler = SliceSampler(slice_len=5, end_key=("next", "done"), strict_length=True)
    buffer = ReplayBuffer(storage=TensorStorage(data), sampler=sampler, batch_size=200)
    for part in buffer.sample().split(5):
        assert len(set(part["episode"].tolist())) == 1


def test_a_step_has_the_keys_that_one_of_gym_env_has(cartpole: Path, tmp_path: Path) -> None:
    gym_trace.export(cartpole, tmp_path / "ted", "torchrl")
    data = TensorDict.load_memmap(tmp_path / "ted")
    rollout = GymEnv("CartPole-v1", categorical_action_encoding=True).rollout(3)
    ours, theirs = data[:3].exclude("episode"), rollout
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    for key in theirs.keys(True, True):
        assert ours[key].shape == theirs[key].shape, key


@pytest.mark.parametrize(("name", "loss"), [("CartPole-v1", "DQNLoss"), ("Pendulum-v1", "CQLLoss")])
def test_its_losses_train(name: str, loss: str, tmp_path: Path) -> None:
    directory = recorded(name, 4, tmp_path / "trace")
    command = [sys.executable, str(EXAMPLES / "train_torchrl.py"), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert loss in done.stdout


def test_a_trace_is_a_storage_of_a_replay_buffer(tmp_path: Path) -> None:
    trace = gym_trace.open_trace(recorded("Pendulum-v1", 3, tmp_path / "trace"))
    buffer = ReplayBuffer(
        storage=TraceStorage(trace.transitions()),
        sampler=SamplerWithoutReplacement(),
        batch_size=50,
        collate_fn=torch.nn.Identity(),
    )
    rollout = GymEnv("Pendulum-v1").rollout(3)
    drawn = []
    for _ in range(12):
        batch = buffer.sample()
        assert set(rollout.keys(True, True)) <= set(batch.keys(True, True))
        for key in rollout.keys(True, True):
            assert batch[key].shape[1:] == rollout[key].shape[1:], key
        for step in batch:
            episode, at = trace[int(step["episode"])], int(step["first_step"])
            drawn.append((int(step["episode"]), at))
            assert step["observation"].numpy().tobytes() == episode.observations[at].tobytes()
            assert step["next", "observation"].numpy().tobytes() == episode.observations[at + 1].tobytes()
            assert step["next", "reward"].item() == episode.rewards[at]
            assert step["next", "truncated"].item() == step["next", "done"].item() == (at == 199)
    assert sorted(drawn) == [(episode, step) for episode in range(3) for step in range(200)]


def test_windows_are_items_of_a_storage(cartpole: Path) -> None:
    trace = gym_trace.open_trace(cartpole)
    storage = TraceStorage(trace.windows(5), dtype=torch.float32)
    buffer = ReplayBuffer(storage=storage, batch_size=64, collate_fn=torch.nn.Identity())
    batch = buffer.sample()
    assert batch.shape == (64, 5)
    assert torch.equal(batch["observation"][:, 1:], batch["next", "observation"][:, :-1])
    assert batch["next", "reward"].shape == (64, 5, 1)
    assert batch["next", "reward"].dtype == torch.float32
    assert storage[3].shape == (5,)
    assert storage[torch.tensor([[1, 2, 3]])].shape == (1, 3, 5)
    assert torch.equal(storage[3]["observation"], storage[:4]["observation"][3])
    with pytest.raises(IndexError):
        storage[torch.tensor([len(storage)])]


def test_what_is_no_storage_is_refused(cartpole: Path) -> None:
    trace = gym_trace.open_trace(cartpole)
    with pytest.raises(InvalidOption, match="rewards"):
        TraceStorage(trace.transitions(columns=("observations", "actions", "terminations", "truncations")))
    with pytest.raises(InvalidOption, match='cache="disk"'):
        TraceStorage(trace.transitions(cache=None))
    with pytest.raises(InvalidOption, match="cannot be changed"):
        TraceStorage(trace.transitions()).set(0, None)
