"""TorchRL's GymWrapper around recorded environments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import pytest
from independent_log import LoggingVectorWrapper, LoggingWrapper, compare, verify

torchrl = pytest.importorskip("torchrl")
torch = pytest.importorskip("torch")

from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: E402
from torchrl.collectors import Collector  # noqa: E402
from torchrl.envs import GymWrapper, StepCounter, TransformedEnv, check_env_specs  # noqa: E402

from gym_trace import TraceRecordingVectorWrapper, TraceRecordingWrapper, open_trace  # noqa: E402


def recorded(name: str, directory: Path) -> LoggingWrapper:
    return LoggingWrapper(TraceRecordingWrapper(gymnasium.make(name), directory, record_infos=True))


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "HalfCheetah-v5"])
def test_rollout(tmp_path: Path, name: str) -> None:
    inner = recorded(name, tmp_path)
    env = GymWrapper(inner)
    env.set_seed(3)
    rollouts = [env.rollout(30) for _ in range(3)]
    env.close()
    assert compare(inner.log, tmp_path).steps == sum(len(rollout) for rollout in rollouts)
    played = [episode for episode in open_trace(tmp_path) if len(episode)]
    for episode, rollout in zip(played, rollouts, strict=True):
        seen = rollout["next", "observation"].numpy()
        assert episode.observations[1:].tobytes() == seen.astype(episode.observations.dtype).tobytes()
    verify(tmp_path, None)


def test_specs_are_checked(tmp_path: Path) -> None:
    inner = recorded("CartPole-v1", tmp_path)
    env = GymWrapper(inner)
    check_env_specs(env)
    env.close()
    compare(inner.log, tmp_path)


def test_transforms_and_a_collector(tmp_path: Path) -> None:
    inner = recorded("CartPole-v1", tmp_path)
    env = TransformedEnv(GymWrapper(inner), StepCounter(20))
    collector = Collector(env, None, frames_per_batch=50, total_frames=200)
    collected = sum(batch.numel() for batch in collector)
    collector.shutdown()
    assert collected == 200
    assert compare(inner.log, tmp_path).steps >= 200


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_vector(tmp_path: Path, mode: Any) -> None:
    envs = LoggingVectorWrapper(SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 3, autoreset_mode=mode))
    env = GymWrapper(TraceRecordingVectorWrapper(envs, tmp_path, record_infos=True))
    env.set_seed(3)
    rollout = env.rollout(60, break_when_any_done=False)
    env.close()
    assert rollout.shape == (3, 60)
    assert compare(envs.log, tmp_path).steps >= 180
