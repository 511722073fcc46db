"""highway-env: kinematic, grid, image and goal observations, one and several agents.

The reset info holds an action sampled without a seed, so infos are not verified.
"""

from __future__ import annotations

from pathlib import Path

import gymnasium
import pytest
from independent_log import record_single, record_vector, verify

pytest.importorskip("highway_env")

from highway_env.vehicle.behavior import IDMVehicle


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore class attributes that intersections change for all cars of the process."""
    for name in ("DISTANCE_WANTED", "COMFORT_ACC_MAX", "COMFORT_ACC_MIN"):
        monkeypatch.setattr(IDMVehicle, name, getattr(IDMVehicle, name))


ENVIRONMENTS = ["highway-fast-v0", "merge-v0", "roundabout-v0", "parking-v0", "intersection-v0", "racetrack-v0"]
OBSERVATIONS = ["Kinematics", "OccupancyGrid", "TimeToCollision", "LidarObservation", "GrayscaleObservation"]


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_single(tmp_path: Path, name: str) -> None:
    record_single(lambda: gymnasium.make(name), tmp_path, steps=40)
    verify(tmp_path, None, ignore=["infos"])


@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_observation(tmp_path: Path, kind: str) -> None:
    observation = {"type": kind}
    if kind == "GrayscaleObservation":
        observation |= {"observation_shape": (64, 32), "stack_size": 4, "weights": [0.3, 0.6, 0.1], "scaling": 1.75}  # type: ignore[dict-item]
    record_single(lambda: gymnasium.make("highway-fast-v0", config={"observation": observation}), tmp_path, steps=30)
    verify(tmp_path, None, ignore=["infos"])


def test_several_agents(tmp_path: Path) -> None:
    record_single(lambda: gymnasium.make("intersection-multi-agent-v0"), tmp_path, steps=30)


@pytest.mark.parametrize("way", ["sync", "async"])
def test_vector(tmp_path: Path, way: str) -> None:
    record_vector(lambda: gymnasium.make_vec("highway-fast-v0", 2, way), tmp_path, steps=30)
    verify(tmp_path, None, ignore=["infos"])
