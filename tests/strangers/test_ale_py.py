"""The Arcade Learning Environment: single, under Gymnasium's preprocessing, and its own vector environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from independent_log import record_single, record_vector, verify

ale_py = pytest.importorskip("ale_py")
gymnasium.register_envs(ale_py)


@pytest.mark.parametrize("kind", ["rgb", "grayscale", "ram"])
def test_single(tmp_path: Path, kind: str) -> None:
    record_single(lambda: gymnasium.make("ALE/Breakout-v5", obs_type=kind), tmp_path, steps=200)
    verify(tmp_path, None)


def test_preprocessed(tmp_path: Path) -> None:
    def make() -> Any:
        return FrameStackObservation(AtariPreprocessing(gymnasium.make("ALE/Pong-v5", frameskip=1), noop_max=10), 4)

    record_single(make, tmp_path, steps=80)
    verify(tmp_path, make)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_vector_of_its_own(tmp_path: Path, mode: str) -> None:
    vector_env = pytest.importorskip("ale_py.vector_env")
    mode = gymnasium.vector.AutoresetMode(mode)
    record_vector(
        lambda: vector_env.AtariVectorEnv(
            "breakout", 3, autoreset_mode=mode, max_num_frames_per_episode=120, reward_clipping=False
        ),
        tmp_path,
        steps=90,
    )
