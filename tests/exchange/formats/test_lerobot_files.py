"""LeRobot datasets without LeRobot: what is written comes back bit for bit, and what is malformed is said to be."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from camera_env import assert_same, record
from long_tests import TRACES
from scripted_env import small_windows

import gym_trace
from gym_trace.errors import InvalidOption, UnreadableRecording
from gym_trace.exchange.formats.conformance import check_importer

pytest.importorskip("pyarrow")
pytest.importorskip("PIL")

import pyarrow as pa
import pyarrow.parquet as pq

from gym_trace.exchange.formats.lerobot import statistics, writer
from gym_trace.exchange.formats.lerobot.exporter import LeRobotExporter
from gym_trace.exchange.formats.lerobot.importer import LeRobotImporter


def info_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "meta" / "info.json").read_text())


def rows_in(out: Path, table: str = "data") -> list[dict[str, Any]]:
    return [row for file in sorted((out / table).glob("*/*.parquet")) for row in pq.read_table(file).to_pylist()]


@pytest.mark.parametrize("video", [False, True])
def test_a_trace_comes_back_as_it_was(tmp_path: Path, video: bool) -> None:
    if video:
        pytest.importorskip("av")
    trace = record(tmp_path / "trace", record_infos=True)
    report = gym_trace.export(trace, tmp_path / "out", "lerobot", video=video)
    assert (report.episodes, report.steps) == (3, 12)
    gym_trace.import_trace(tmp_path / "out", tmp_path / "back")
    assert_same(gym_trace.open_trace(tmp_path / "back"), trace)


def test_every_kind_of_trace_comes_back(tmp_path: Path) -> None:
    check_importer(LeRobotExporter(), LeRobotImporter(), tmp_path, only=TRACES)


def test_long_episodes_are_read_and_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av")
    small_windows(monkeypatch, 7)
    monkeypatch.setattr("gym_trace.exchange.formats.lerobot.writer._MOST_ROWS", 20)
    monkeypatch.setattr("gym_trace.exchange.formats.lerobot.writer._MOST_FINALS", 1)
    monkeypatch.setattr("gym_trace.exchange.formats.lerobot.writer._MOST_SECONDS", 1)
    monkeypatch.setattr("gym_trace.exchange.formats.lerobot.writer.DATA_MB", 0)
    monkeypatch.setattr("gym_trace.exchange.formats.lerobot.writer.CHUNK", 2)
    monkeypatch.setattr("gym_trace.exchange.formats.parquet.tables._MOST_ROWS", 5)
    trace = record(tmp_path / "trace", length=35)
    gym_trace.export(trace, tmp_path / "out", "lerobot", video=True)
    folders = tmp_path / "out" / "data", tmp_path / "out" / "meta" / "episodes"
    files = [sorted(str(file.relative_to(folder)) for file in folder.glob("*/*.parquet")) for folder in folders]
    assert files[0] == ["chunk-000/file-000.parquet", "chunk-000/file-001.parquet", "chunk-001/file-000.parquet"]
    assert files[1] == files[0]
    assert len(list((tmp_path / "out" / "videos").glob("*/*/*.mp4"))) == 3
    gym_trace.import_trace(tmp_path / "out", tmp_path / "back")
    assert_same(gym_trace.open_trace(tmp_path / "back"), trace)


def test_episodes_that_alternate_between_videos_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change would decode a video from its beginning."""
    pytest.importorskip("av")
    monkeypatch.setattr("gym_trace.exchange.formats.lerobot.writer.VIDEO_MB", 0)
    monkeypatch.setattr("gym_trace.exchange.formats.lerobot.importer._MOST_OPENINGS", 1)
    gym_trace.export(record(tmp_path / "trace"), tmp_path / "out", "lerobot", video=True)
    gym_trace.import_trace(tmp_path / "out", tmp_path / "back")
    (file,) = (tmp_path / "out" / "meta" / "episodes").glob("*/*.parquet")
    table = pq.read_table(file)
    for name in [name for name in table.schema.names if name.endswith("/file_index") and name.startswith("videos/")]:
        place = table.schema.get_field_index(name)
        assert table.column(name).to_pylist() == [0, 1, 2]
        table = table.set_column(place, table.schema.field(name), pa.array([0, 1, 0], table.schema.field(name).type))
    pq.write_table(table, file)
    with pytest.raises(UnreadableRecording, match="alternate with those of other videos"):
        gym_trace.import_trace(tmp_path / "out", tmp_path / "other")


def test_statistics_of_pieces_are_those_of_the_whole() -> None:
    rows = np.random.default_rng(0).normal(size=(50, 3))
    whole = statistics.of_rows(rows, np.array([0]))
    pieces = statistics.merged(statistics.of_rows(rows, np.array([0, 20, 21])), np.array([0]))
    for name in ("min", "max", "mean", "std", "count"):
        np.testing.assert_allclose(pieces[name], whole[name], rtol=1e-12)
        if name != "count":
            np.testing.assert_allclose(whole[name][0], getattr(rows, name)(axis=0), rtol=1e-12)
    assert (np.sort(rows, axis=0)[24] == whole["q50"][0]).all()


def test_numbers_that_are_not_finite_are_left_out_of_statistics() -> None:
    rows = np.array([[1.0, np.nan], [np.inf, np.nan], [3.0, np.nan], [-np.inf, 5.0]])
    found = statistics.of_rows(rows, np.array([0, 2]))
    assert found["mean"].tolist() == [[1.0, 0.0], [3.0, 5.0]]
    assert found["max"].tolist() == [[1.0, 0.0], [3.0, 5.0]]
    assert found["q99"].tolist() == [[1.0, 0.0], [3.0, 5.0]]
    assert found["std"].tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_the_task_and_the_speed_are_those_of_the_facts_or_as_asked_for(tmp_path: Path) -> None:
    record(tmp_path / "trace")
    gym_trace.export(tmp_path / "trace", tmp_path / "plain", "lerobot")
    assert info_of(tmp_path / "plain")["fps"] == 30
    (tmp_path / "trace" / "facts.json").write_text('{"task": "look around", "fps": 12}')
    gym_trace.export(tmp_path / "trace", tmp_path / "facts", "lerobot")
    gym_trace.export(tmp_path / "trace", tmp_path / "asked", "lerobot", task="look", fps=5)
    assert [info_of(tmp_path / name)["fps"] for name in ("facts", "asked")] == [12, 5]
    assert rows_in(tmp_path / "facts", "meta/episodes")[0]["tasks"] == ["look around"]
    assert rows_in(tmp_path / "asked", "meta/episodes")[0]["tasks"] == ["look"]


@pytest.mark.parametrize("options", [{"fps": 0}, {"fps": 2.5}, {"fps": True}, {"task": ""}, {"video": "yes"}])
def test_options_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        LeRobotExporter(**options)


# -- of other people --------------------------------------------------------------------------------------------------


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A dataset without anything of ours."""
    record(tmp_path / "trace")
    gym_trace.export(tmp_path / "trace", tmp_path / "out", "lerobot")
    shutil.rmtree(tmp_path / "out" / "meta" / "gym_trace")
    return tmp_path / "out"


def test_imports_of_foreign_datasets_invent_nothing(tmp_path: Path, foreign: Path) -> None:
    report = gym_trace.import_trace(foreign, tmp_path / "back")
    back, trace = gym_trace.open_trace(tmp_path / "back"), gym_trace.open_trace(tmp_path / "trace")
    assert [episode.outcome for episode in back] == ["terminated", "truncated", "truncated"]
    assert {episode.seed for episode in back} == {None}
    assert any("no final observations" in text for text in report.warnings)
    for one, other in zip(trace, back):
        observed = other.observations["state"]
        assert observed[:-1].tobytes() == one.observations["state"][:-1].tobytes()
        assert np.isnan(observed[-1]).all()
        assert not other.observations["images.camera"][-1].any()
        assert np.array_equal(other.observations["images.camera"][:-1], one.observations["camera"][:-1])
        assert other.rewards.tobytes() == one.rewards.tobytes()
    assert back.facts == {"fps": 30, "task": "gym-trace"}


def of_two_tasks(out: Path) -> None:
    """A robot dataset with names of elements; even steps are of the second task."""
    writer.write_tasks(out / "meta" / "tasks.parquet", ["open the drawer", "close it"])
    for file in (out / "data").glob("*/*.parquet"):
        table = pq.read_table(file)
        place = table.schema.get_field_index("task_index")
        pq.write_table(table.set_column(place, "task_index", [[1 - i % 2 for i in range(len(table))]]), file)
    with_feature(out, "observation.state", names={"motors": ["a", "b"]})
    with_info(out, robot_type="so100", total_tasks=2)


@pytest.mark.parametrize("tasks", [1, 2])
def test_names_tasks_and_the_robot_go_through_a_trace(tmp_path: Path, foreign: Path, tasks: int) -> None:
    if tasks == 2:
        of_two_tasks(foreign)
    gym_trace.import_trace(foreign, tmp_path / "back")
    gym_trace.export(tmp_path / "back", tmp_path / "again", "lerobot")
    before, after = info_of(foreign), info_of(tmp_path / "again")
    assert after["features"] == before["features"]
    assert (after["robot_type"], after["total_tasks"]) == (before["robot_type"], before["total_tasks"])
    said = [pq.read_table(out / "meta" / "tasks.parquet") for out in (tmp_path / "again", foreign)]
    assert said[0].equals(said[1])
    for name in (name for name, said in after["features"].items() if said["dtype"] != "string"):
        again, were = ([repr(row[name]) for row in rows_in(out)] for out in (tmp_path / "again", foreign))
        assert again == were  # NaN too
    if tasks == 2:
        assert rows_in(tmp_path / "again", "meta/episodes")[0]["tasks"] == ["open the drawer", "close it"]
    gym_trace.import_trace(tmp_path / "again", tmp_path / "thrice")
    assert not any(one.difference for one in gym_trace.diff_traces(tmp_path / "back", tmp_path / "thrice"))


def test_a_task_that_is_asked_for_takes_the_place_of_those_imported(tmp_path: Path, foreign: Path) -> None:
    of_two_tasks(foreign)
    gym_trace.import_trace(foreign, tmp_path / "back")
    gym_trace.export(tmp_path / "back", tmp_path / "again", "lerobot", task="tidy up")
    assert {row["task_index"] for row in rows_in(tmp_path / "again")} == {0}
    assert rows_in(tmp_path / "again", "meta/episodes")[0]["tasks"] == ["tidy up"]
    assert "annotation.task_index" in info_of(tmp_path / "again")["features"]


def test_a_single_picture_keeps_its_name(tmp_path: Path) -> None:
    record(tmp_path / "trace")
    gym_trace.export(tmp_path / "trace", tmp_path / "out", "lerobot")
    shutil.rmtree(tmp_path / "out" / "meta" / "gym_trace")
    features = info_of(tmp_path / "out")["features"]
    alone = {name: said for name, said in features.items() if name != "observation.state"}
    with_info(tmp_path / "out", features=alone)
    gym_trace.import_trace(tmp_path / "out", tmp_path / "back")
    gym_trace.export(tmp_path / "back", tmp_path / "again", "lerobot")
    assert "observation.images.camera" in info_of(tmp_path / "again")["features"]


def test_a_dataset_changed_since_its_export_reads_as_a_foreign_one(tmp_path: Path) -> None:
    record(tmp_path / "trace")
    gym_trace.export(tmp_path / "trace", tmp_path / "out", "lerobot")
    kept = tmp_path / "out" / "meta" / "gym_trace" / "about.json"
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "frames": 99}))
    report = gym_trace.import_trace(tmp_path / "out", tmp_path / "back")
    assert "changed since" in report.warnings[0]


def with_info(out: Path, **changes: Any) -> None:
    (out / "meta" / "info.json").write_text(json.dumps({**info_of(out), **changes}))


def with_feature(out: Path, name: str, **changes: Any) -> None:
    features = info_of(out)["features"]
    with_info(out, features={**features, name: {**features[name], **changes}})


def table_of(out: Path, *parts: str) -> Path:
    return next(out.joinpath(*parts).glob("*/*.parquet"))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "version 2": lambda out: with_info(out, codebase_version="v2.1"),
    "more episodes": lambda out: with_info(out, total_episodes=4),
    "no features": lambda out: with_info(out, features=[]),
    "wider rows": lambda out: with_feature(out, "observation.state", shape=[7]),
    "larger images": lambda out: with_feature(out, "observation.images.camera", shape=[240, 200, 3]),
    "paths elsewhere": lambda out: with_info(out, data_path="../../{chunk_index}/{file_index}.parquet"),
    "paths that ask": lambda out: with_info(out, video_path="{video_key.__class__}"),
    "truncated": lambda out: os.truncate(table_of(out, "data"), table_of(out, "data").stat().st_size - 10),
    "no tables": lambda out: shutil.rmtree(out / "data"),
    "not Parquet": lambda out: table_of(out, "meta", "episodes").write_bytes(os.urandom(100)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_malformed_datasets_raise(tmp_path: Path, foreign: Path, damage: str) -> None:
    DAMAGES[damage](foreign)
    with pytest.raises(UnreadableRecording, match=str(foreign)):
        gym_trace.import_trace(foreign, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_tasks_that_share_a_long_text_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gym_trace.export(record(tmp_path / "trace"), tmp_path / "out", "lerobot")
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * 4096, pa.int32()), pa.array(["x" * 1024]))
    table = pa.table({"task_index": pa.array(range(4096)), "task": shared})
    pq.write_table(table, tmp_path / "out" / "meta" / "tasks.parquet", store_schema=False)
    monkeypatch.setattr("gym_trace.exchange.formats.lerobot.dataset._MOST_TASK_TEXT", 1 << 20)
    with pytest.raises(UnreadableRecording, match="tasks exceed"):
        gym_trace.import_trace(tmp_path / "out", tmp_path / "back")
