"""Where nothing can be mapped that outlives the process: steps are in ordinary memory, and written every second."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from zoo import CountingEnv

from gym_trace import TraceRecordingWrapper, open_trace


def test_without_a_mapping_all_is_recorded_and_it_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gym_trace.storage.local._SAFE_TO_MAP", frozenset())
    with caplog.at_level(logging.WARNING, "gym_trace"):
        env = TraceRecordingWrapper(CountingEnv(), tmp_path)
        for _ in range(3):
            env.reset()
            env.step(env.action_space.sample())
            env.flush()
    assert len(caplog.records) == 1
    assert "can lose the last second" in caplog.text
    assert not list(tmp_path.glob("*.ring"))
    assert [len(episode) for episode in open_trace(tmp_path)] == [1, 1, 1]
    assert env._recorder.flush_seconds == 1.0
    env.close()
    assert [episode.outcome for episode in open_trace(tmp_path)] == ["cut", "cut", "closed"]
