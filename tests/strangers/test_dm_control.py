"""Tasks of dm_control, recorded by the example of the documents."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("dm_control")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from record_dm_control import main, make

from gym_trace import open_trace, verify_trace

TASKS = [("cartpole", "swingup"), ("cheetah", "run"), ("humanoid", "walk"), ("finger", "turn_easy"), ("dog", "run")]


@pytest.mark.parametrize(("domain", "task"), TASKS)
def test_the_trace_has_every_time_step_and_verifies(tmp_path: Path, domain: str, task: str) -> None:
    timesteps = iter(main(domain, task, str(tmp_path / "trace"), episodes=3))
    trace = open_trace(tmp_path / "trace")
    for episode in trace:
        first, *others = [next(timesteps) for _ in range(len(episode) + 1)]
        assert first.first()
        for name, rows in episode.observations.items():
            seen = np.array([step.observation[name] for step in (first, *others)])
            assert rows.dtype == seen.dtype
            assert rows.tobytes() == seen.tobytes()
        assert episode.rewards.tolist() == [step.reward for step in others]
        assert episode.annotations["discount"].tolist() == [step.discount for step in others]
        assert episode.outcome == "truncated"
    assert next(timesteps, None) is None
    verdicts = list(verify_trace(tmp_path / "trace", make_env=lambda: make(domain, task)))
    assert {verdict.verdict for verdict in verdicts} == {"identical"}
