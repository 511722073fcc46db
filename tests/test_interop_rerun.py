"""Rerun: what is written comes back bit for bit, and Rerun's own tools take it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cameras import assert_same, record

import gym_trace
from gym_trace.errors import UnreadableRecording

rerun = pytest.importorskip("rerun")
chunk = pytest.importorskip("rerun.chunk")


@pytest.mark.parametrize("infos", [True, False])
def test_a_trace_comes_back_as_it_was(tmp_path: Path, infos: bool) -> None:
    trace = record(tmp_path / "trace", record_infos=infos)
    report = gym_trace.export(trace, tmp_path / "out.rrd", "rerun", strict=True)
    assert (report.episodes, report.steps, report.lost) == (4, 12, [])
    gym_trace.import_trace(tmp_path / "out.rrd", tmp_path / "back")
    assert_same(gym_trace.open_trace(tmp_path / "back"), trace)


def test_long_episodes_are_read_and_written_in_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.interop.steps.windows._MOST_ROWS", 7)
    monkeypatch.setattr("gym_trace.interop.viewing.rerun_out._MOST_ROWS", 10)
    monkeypatch.setattr("gym_trace.interop.viewing.leaves._MOST_ROWS", 5)
    trace = record(tmp_path / "trace", length=35)
    gym_trace.export(trace, tmp_path / "out.rrd", "rerun")
    gym_trace.import_trace(tmp_path / "out.rrd", tmp_path / "back", "rerun")
    assert_same(gym_trace.open_trace(tmp_path / "back"), trace)


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


def of_others(out: Path) -> None:
    out.unlink()
    with rerun.RecordingStream("robot") as recording:
        recording.save(out)
        recording.log("joint", rerun.Scalars(1.0))
        recording.flush()


def cut_off(out: Path) -> None:
    out.write_bytes(out.read_bytes()[:-9000])


def nothing(out: Path) -> None:
    out.write_bytes(b"RRF")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("damage", "told"),
    [(of_others, "was not exported by gym-trace"), (cut_off, "damaged|fewer rows"), (nothing, "damaged|not exported")],
)
def test_what_is_malformed_is_said_with_the_file(tmp_path: Path, damage: Callable[[Path], None], told: str) -> None:
    record(tmp_path / "trace")
    gym_trace.export(tmp_path / "trace", tmp_path / "out.rrd", "rerun")
    damage(tmp_path / "out.rrd")
    with pytest.raises(UnreadableRecording, match=told) as caught:
        gym_trace.import_trace(tmp_path / "out.rrd", tmp_path / "back", "rerun")
    assert str(tmp_path / "out.rrd") in str(caught.value)
