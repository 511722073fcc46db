"""MiniGrid, bare and under its own wrappers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import pytest
from independent_log import record_single, record_vector, verify

minigrid = pytest.importorskip("minigrid")

from minigrid import wrappers  # noqa: E402

ENVIRONMENTS = [
    "MiniGrid-Empty-5x5-v0", "MiniGrid-DoorKey-6x6-v0", "MiniGrid-FourRooms-v0", "MiniGrid-Fetch-5x5-N2-v0",
    "MiniGrid-GoToDoor-5x5-v0", "MiniGrid-Dynamic-Obstacles-5x5-v0", "MiniGrid-MemoryS7-v0",
    "MiniGrid-LavaCrossingS9N1-v0", "BabyAI-GoToRedBall-v0", "BabyAI-BossLevel-v0",
]  # fmt: skip


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_single(tmp_path: Path, name: str) -> None:
    record_single(lambda: gymnasium.make(name), tmp_path)
    verify(tmp_path, None)


@pytest.mark.parametrize("way", ["sync", "async"])
def test_vector(tmp_path: Path, way: str) -> None:
    """Gymnasium cannot batch missions, so the lanes have none."""
    kind = gymnasium.vector.SyncVectorEnv if way == "sync" else gymnasium.vector.AsyncVectorEnv

    def make() -> Any:
        return wrappers.ImgObsWrapper(gymnasium.make("MiniGrid-DoorKey-5x5-v0"))

    record_vector(lambda: kind([make] * 3), tmp_path)
    verify(tmp_path, make)


WRAPPERS = [
    "ReseedWrapper", "ActionBonus", "PositionBonus", "ImgObsWrapper", "OneHotPartialObsWrapper", "RGBImgObsWrapper",
    "RGBImgPartialObsWrapper", "FullyObsWrapper", "DictObservationSpaceWrapper", "FlatObsWrapper", "ViewSizeWrapper",
    "DirectionObsWrapper", "SymbolicObsWrapper", "StochasticActionWrapper", "NoDeath",
]  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {"NoDeath": {"no_death_types": ("lava",), "death_cost": -1.0}}
REMEMBERS = {"ActionBonus", "PositionBonus", "ReseedWrapper"}  # counts and seeds span episodes


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapper(tmp_path: Path, name: str) -> None:
    def make() -> Any:
        return getattr(wrappers, name)(gymnasium.make("MiniGrid-DoorKey-5x5-v0"), **OPTIONS.get(name, {}))

    record_single(make, tmp_path)
    if name not in REMEMBERS:
        verify(tmp_path, make)


@pytest.mark.parametrize("name", ["ImgObsWrapper", "FullyObsWrapper"])
def test_wrappers_without_stored_arguments_verify_or_are_unavailable(tmp_path: Path, name: str) -> None:
    from gym_trace import verify_trace
    from gym_trace.errors import EnvironmentUnavailable

    record_single(lambda: getattr(wrappers, name)(gymnasium.make("MiniGrid-DoorKey-5x5-v0")), tmp_path)
    try:
        verdicts = {verdict.verdict for verdict in verify_trace(tmp_path)}
    except EnvironmentUnavailable:
        return
    assert verdicts <= {"identical", "unverifiable"}
