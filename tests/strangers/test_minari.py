"""Minari's DataCollector above and below the recorder: both must record the same."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from independent_log import LoggingWrapper, compare, exact, record_single, row

minari = pytest.importorskip("minari")

from gym_trace import TraceRecordingWrapper, open_trace  # noqa: E402


@pytest.mark.parametrize("where", ["above", "below"])
@pytest.mark.parametrize("name", ["CartPole-v1", "Blackjack-v1", "HalfCheetah-v5"])
def test_both_record_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: str) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    env: Any = gymnasium.make(name, **({"max_episode_steps": 20} if name == "HalfCheetah-v5" else {}))
    if where == "below":
        env = collector = minari.DataCollector(env, record_infos=False)
    env = beside = LoggingWrapper(TraceRecordingWrapper(env, tmp_path / "trace", record_infos=True))
    if where == "above":
        env = collector = minari.DataCollector(beside, record_infos=False)
    env.action_space.seed(4)
    for episode in range(4):
        env.reset(seed=episode)
        over = False
        while not over:
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            over = terminated or truncated
    dataset = collector.create_dataset(f"strangers/{name.lower()}-{where}-v0")
    env.close()
    compare(beside.log, tmp_path / "trace")
    recorded = [episode for episode in open_trace(tmp_path / "trace") if len(episode)]
    for theirs, ours in zip(dataset.iterate_episodes(), recorded, strict=True):
        for i in range(len(ours) + 1):
            assert plainly(row(theirs.observations, i)) == plainly(row(ours.observations, i))
        assert exact(np.asarray(theirs.rewards, np.float64)) == exact(np.asarray(ours.rewards))
        assert theirs.terminations.tolist() == ours.terminations.tolist()
        assert theirs.truncations.tolist() == ours.truncations.tolist()


def zoo() -> Any:
    """Return the module with the environments of Minari's tests, from a checkout."""
    file = Path(os.environ.get("SOURCES") or "nowhere") / "Minari" / "tests" / "common.py"
    if not file.exists():
        pytest.skip("Minari's package on PyPI lacks its test environments; set SOURCES=DIR to a checkout")
    spec = importlib.util.spec_from_file_location("minari_tests_common", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_environments_of_minaris_tests(tmp_path: Path) -> None:
    kinds = [kind for name, kind in vars(zoo()).items() if name.startswith("Dummy") and name.endswith("Env")]
    assert kinds
    for kind in kinds:
        record_single(kind, tmp_path / kind.__name__, steps=40)


def plainly(value: Any) -> Any:
    """Drop the dtype of numbers: Minari's storage changes it for some spaces."""
    return [plainly(part) for part in value] if isinstance(value, tuple) else np.asarray(value).tolist()
