"""ViZDoom: dicts of images, game variables, audio and text."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import pytest
from independent_log import record_single, record_vector, verify

pytest.importorskip("vizdoom")
pytest.importorskip("vizdoom.gymnasium_wrapper")


@pytest.fixture(autouse=True)
def _where_it_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # ViZDoom writes its settings where it runs


ENVIRONMENTS = ["Basic", "DeadlyCorridor", "DefendCenter", "HealthGathering", "MyWayHome", "BasicNotifications"]


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_single(tmp_path: Path, name: str) -> None:
    identifier = f"Vizdoom{name}-v1"
    if identifier not in gymnasium.registry:
        pytest.skip(f"{identifier} is not registered")
    record_single(lambda: gymnasium.make(identifier, frame_skip=8), tmp_path / "trace", steps=40)


def test_single_is_verified(tmp_path: Path) -> None:
    record_single(lambda: gymnasium.make("VizdoomBasic-v1", frame_skip=8), tmp_path / "trace", steps=60)
    verify(tmp_path / "trace", None, episodes=[0])


@pytest.mark.parametrize("way", ["sync", "async"])
def test_vector(tmp_path: Path, way: str) -> None:
    record_vector(lambda: gymnasium.make_vec("VizdoomBasic-v1", 2, way, frame_skip=8), tmp_path / "trace", steps=50)
