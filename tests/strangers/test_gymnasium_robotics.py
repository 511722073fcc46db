"""gymnasium-robotics: goal environments, hands, mazes, kitchens."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import pytest
from independent_log import record_single, record_vector, verify

gymnasium_robotics = pytest.importorskip("gymnasium_robotics")
gymnasium.register_envs(gymnasium_robotics)


def newest(name: str) -> str:
    """Return the id of the newest registered version of an environment."""
    found = [spec for spec in gymnasium.registry.values() if spec.name == name and spec.version is not None]
    if not found:
        pytest.skip(f"{name} is not registered")
    return max(found, key=lambda spec: spec.version or 0).id


ENVIRONMENTS = [
    "FetchReach", "FetchPush", "FetchPickAndPlace", "HandReach", "HandManipulateBlock_ContinuousTouchSensors",
    "AdroitHandDoor", "AdroitHandPen", "PointMaze_UMaze", "AntMaze_UMaze", "FrankaKitchen",
]  # fmt: skip


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_single(tmp_path: Path, name: str) -> None:
    identifier = newest(name)
    record_single(lambda: gymnasium.make(identifier, max_episode_steps=15), tmp_path, steps=40)
    verify(tmp_path, None)


@pytest.mark.parametrize("way", ["sync", "async"])
def test_vector(tmp_path: Path, way: str) -> None:
    identifier = newest("FetchReach")
    record_vector(lambda: gymnasium.make_vec(identifier, 2, way, max_episode_steps=10), tmp_path, steps=30)
    verify(tmp_path, None)
