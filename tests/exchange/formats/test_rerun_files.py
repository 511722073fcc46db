"""Rerun: its own reader reads what was exported."""

from pathlib import Path

import pytest
from camera_env import record

import gym_trace

pytest.importorskip("rerun")
chunk = pytest.importorskip("rerun.chunk")


def test_rows_are_numbered_through_all_episodes(tmp_path: Path) -> None:
    trace = record(tmp_path / "trace")
    gym_trace.export(trace, tmp_path / "out.rrd", "rerun")
    tables = {one.entity_path: one.to_record_batch() for one in chunk.RrdReader(tmp_path / "out.rrd").stream()}
    rewards, states = tables["/reward"], tables["/observation/state"]
    assert rewards.column("row").to_pylist()[:6] == [1, 2, 3, 4, 5, 7]
    assert rewards.column("step").to_pylist()[:6] == [1, 2, 3, 4, 5, 1]
    assert states.column("row").to_pylist() == list(range(16))
    assert states.column("episode").to_pylist() == [0] * 6 + [1] * 6 + [2] * 3 + [3]
    assert rewards.column("Scalars:scalars").to_pylist()[0] == [trace[0].rewards[0]]
    assert "EncodedImage:blob" in tables["/observation/camera"].schema.names
    assert tables["/episode"].column("TextLog:text").to_pylist()[3] == ["episode 3: 0 steps, closed"]
