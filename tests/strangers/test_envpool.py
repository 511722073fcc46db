"""EnvPool: vector environments in C++ that reset a lane in the step after its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from independent_log import LoggingVectorWrapper, compare, record_vector

envpool = pytest.importorskip("envpool")

from gym_trace import TraceRecordingVectorWrapper, open_trace, verify_trace  # noqa: E402
from gym_trace.errors import InvalidOption  # noqa: E402

ENVIRONMENTS = ["CartPole-v1", "Pendulum-v1", "Taxi-v3", "Blackjack-v1", "Pong-v5", "HalfCheetah-v4", "FrozenLake-v1"]


def pool(name: str, **options: Any) -> Any:
    if name not in envpool.list_all_envs():
        pytest.skip(f"this EnvPool has no {name}")
    return envpool.make(name, env_type="gymnasium", num_envs=4, seed=3, **options)


def act(envs: Any) -> Any:
    """Return actions for all lanes, in EnvPool's dtype, which differs from that of its space."""
    actions = np.array([envs.single_action_space.sample() for _ in range(envs.num_envs)])
    return actions.astype(np.int32) if actions.dtype == np.int64 else actions


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_vector(tmp_path: Path, name: str) -> None:
    record_vector(lambda: pool(name), tmp_path, 220 if name == "Pendulum-v1" else 90, act)
    trace = open_trace(tmp_path)
    assert trace.observation_space == pool(name).single_observation_space
    verdicts = list(verify_trace(tmp_path))
    assert {verdict.verdict for verdict in verdicts} == {"unverifiable"}


def test_short_episodes(tmp_path: Path) -> None:
    result = record_vector(lambda: pool("CartPole-v1", max_episode_steps=5), tmp_path, 60, act)
    assert result.episodes >= 40


@pytest.mark.parametrize("name", ["CartPole-v1", "HalfCheetah-v4"])
def test_lanes_are_reset_by_a_mask(tmp_path: Path, name: str) -> None:
    env = LoggingVectorWrapper(
        TraceRecordingVectorWrapper(pool(name, max_episode_steps=7), tmp_path, record_infos=True)
    )
    env.reset()
    random = np.random.default_rng(5)
    for step in range(60):
        env.step(act(env))
        if step % 4 == 3:
            env.reset(options={"reset_mask": random.permutation(4) < 1 + step // 4 % 4})
    env.close()
    assert compare(env.log, tmp_path).episodes >= 40


def test_the_asynchronous_mode_raises(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="batch_size=num_envs"):
        TraceRecordingVectorWrapper(pool("CartPole-v1", batch_size=2), tmp_path / "t")
    assert not (tmp_path / "t").exists()
