"""MO-Gymnasium: rewards that are vectors."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np
import pytest
from independent_log import record_single, record_vector, verify

mo_gymnasium = pytest.importorskip("mo_gymnasium")

from gym_trace import open_trace  # noqa: E402

ENVIRONMENTS = [
    "breakable-bottles-v0", "deep-sea-treasure-v0", "fishwood-v0", "four-room-v0", "fruit-tree-v0", "minecart-v0",
    "mo-mountaincar-v0", "mo-mountaincarcontinuous-v0", "mo-halfcheetah-v5", "mo-hopper-v5", "mo-reacher-v5",
    "resource-gathering-v0", "water-reservoir-v0", "mo-highway-fast-v0",
]  # fmt: skip


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_single(tmp_path: Path, name: str) -> None:
    record_single(lambda: mo_gymnasium.make(name), tmp_path, steps=60)
    rewards = open_trace(tmp_path)[0].rewards
    if name != "breakable-bottles-v0":  # its rewards are lists
        assert rewards.ndim == 2
        assert rewards.dtype != object
    verify(tmp_path, None, ignore=["infos"] if "highway" in name else [])  # see test_highway_env.py


def test_linear_reward(tmp_path: Path) -> None:
    def make() -> gymnasium.Env[object, object]:
        return mo_gymnasium.wrappers.LinearReward(mo_gymnasium.make("deep-sea-treasure-v0"), np.array([0.8, 0.2]))

    record_single(make, tmp_path)
    verify(tmp_path, make)


def test_record_episode_statistics(tmp_path: Path) -> None:
    record_single(
        lambda: mo_gymnasium.wrappers.MORecordEpisodeStatistics(mo_gymnasium.make("deep-sea-treasure-v0")), tmp_path
    )


def test_vector(tmp_path: Path) -> None:
    make = mo_gymnasium.wrappers.vector.MOSyncVectorEnv
    record_vector(lambda: make([lambda: mo_gymnasium.make("deep-sea-treasure-v0")] * 3), tmp_path)
    verify(tmp_path, lambda: mo_gymnasium.make("deep-sea-treasure-v0"))
