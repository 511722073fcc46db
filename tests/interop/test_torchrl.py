"""TorchRL: a trace is a storage of its ReplayBuffer, and its losses train on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import GymEnv
from traces import recorded, run_example

import gym_trace
from gym_trace.errors import InvalidOption
from gym_trace.exchange.torchrl import TraceStorage


@pytest.fixture
def cartpole(tmp_path: Path) -> Path:
    return recorded("CartPole-v1", 20, tmp_path / "cartpole")


@pytest.mark.parametrize(("name", "loss"), [("CartPole-v1", "DQNLoss"), ("Pendulum-v1", "CQLLoss")])
def test_its_losses_train(name: str, loss: str, tmp_path: Path) -> None:
    assert loss in run_example("train_torchrl", recorded(name, 4, tmp_path / "trace"))


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


def test_batches_that_cannot_be_a_storage_raise(cartpole: Path) -> None:
    trace = gym_trace.open_trace(cartpole)
    with pytest.raises(InvalidOption, match="rewards"):
        TraceStorage(trace.transitions(columns=("observations", "actions", "terminations", "truncations")))
    with pytest.raises(InvalidOption, match='cache="disk"'):
        TraceStorage(trace.transitions(cache=None))
    with pytest.raises(InvalidOption, match="cannot be changed"):
        TraceStorage(trace.transitions()).set(0, None)
