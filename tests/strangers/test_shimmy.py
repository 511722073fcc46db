"""dm_control through shimmy."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import pytest
from independent_log import record_single, record_vector, verify

shimmy = pytest.importorskip("shimmy")
pytest.importorskip("dm_control")
gymnasium.register_envs(shimmy)

ENVIRONMENTS = ["acrobot-swingup", "cartpole-balance", "cheetah-run", "finger-spin", "humanoid-walk", "dog-run"]


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_single(tmp_path: Path, name: str) -> None:
    record_single(lambda: gymnasium.make(f"dm_control/{name}-v0", max_episode_steps=20), tmp_path, steps=50)
    verify(tmp_path, None)


@pytest.mark.parametrize("way", ["sync", "async"])
def test_vector(tmp_path: Path, way: str) -> None:
    record_vector(
        lambda: gymnasium.make_vec("dm_control/cartpole-balance-v0", 2, way, max_episode_steps=15), tmp_path, steps=40
    )
    verify(tmp_path, None)
