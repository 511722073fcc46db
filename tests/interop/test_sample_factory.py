"""Sample Factory trains, and its environments are recorded in its own workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from traces import EXAMPLES

from gym_trace import check_trace, open_trace
from gym_trace.errors import InvalidOption, TraceExists

context = pytest.importorskip("sample_factory.algo.utils.context")
env_utils = pytest.importorskip("sample_factory.envs.env_utils")
adapter = pytest.importorskip("gym_trace.exchange.sample_factory")


def test_a_run_in_spawned_workers_has_the_episodes_that_are_reported(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(EXAMPLES) / "train_sample_factory.py"), str(tmp_path / "t"), "--steps", "8000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["missing"] == 0
    assert told["recorded"] >= told["reported"] > 100
    assert told["writers"] == 16
    assert told["steps"] >= 8000
    assert not check_trace(tmp_path / "t").damages
    trace = open_trace(tmp_path / "t")
    episode = trace.select("outcome == 'terminated'")[0]
    assert len(episode.observations) == len(episode) + 1
    assert episode.rewards.tolist() == [1.0] * len(episode)
    assert np.abs(episode.observations[-1]).max() > 0.2  # the one at which it fell, not that of the next reset


@pytest.fixture
def registry() -> Any:
    context.reset_global_context()
    yield context.global_env_registry()
    context.reset_global_context()


def make(name: str, cfg: Any = None, env_config: Any = None, render_mode: str | None = None) -> Any:
    return gymnasium.make("CartPole-v1")


def test_only_environments_of_workers_are_recorded(tmp_path: Path, registry: Any) -> None:
    env_utils.register_env("pole", make)
    env_utils.register_env("other", make)
    adapter.record(tmp_path, ["pole"], metadata={"run": 1})
    assert registry["other"] is make
    registry["pole"]("pole", None, None).close()  # which Sample Factory makes to look at its spaces
    env = registry["pole"]("pole", None, {"env_id": 0})
    env.reset(seed=1)
    env.step(0)
    env.close()
    trace = open_trace(tmp_path)
    assert len(trace.writers) == 1
    assert trace.metadata == {"run": 1}
    with pytest.raises(TraceExists):
        adapter.record(tmp_path)


def test_unknown_environments_and_several_agents_raise(tmp_path: Path, registry: Any) -> None:
    with pytest.raises(InvalidOption, match="no environments are registered"):
        adapter.record(tmp_path)
    with pytest.raises(InvalidOption, match="nothing: not registered"):
        adapter.record(tmp_path, ["nothing"])

    def several(*_: Any) -> Any:
        env = make("pole")
        env.num_agents = 2
        return env

    env_utils.register_env("several", several)
    with pytest.raises(InvalidOption, match="uid: not supported"):
        adapter.record(tmp_path, uid="x")
    adapter.record(tmp_path)
    with pytest.raises(InvalidOption, match="has 2 agents"):
        registry["several"]("several", None, {"env_id": 0})
