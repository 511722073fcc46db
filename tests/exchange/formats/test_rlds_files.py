"""RLDS without TensorFlow: what is written comes back bit for bit, and what is malformed is said to be."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from camera_env import assert_same, record
from click.testing import CliRunner
from gym_trace_cli.main import cli
from scripted_env import CountingEnv, small_windows

import gym_trace
from gym_trace.errors import InvalidOption, UnreadableRecording

pytest.importorskip("google_crc32c")
pytest.importorskip("google.protobuf")
pytest.importorskip("PIL")

import foreign_rlds

from gym_trace.exchange.formats.rlds import examples
from gym_trace.exchange.formats.rlds.examples import (
    ExampleWriter,
    ListReader,
    MalformedExample,
    RecordWriter,
    lists_in,
    records_in,
)


@pytest.mark.parametrize("images", ["png", "raw"])
def test_a_trace_comes_back_as_it_was(tmp_path: Path, images: str) -> None:
    trace = record(tmp_path / "trace", record_infos=True)
    report = gym_trace.export(trace, tmp_path / "out", "rlds", images=images, strict=True)
    assert (report.episodes, report.steps, report.lost) == (4, 12, [])
    gym_trace.import_trace(tmp_path / "out", tmp_path / "back")
    back = gym_trace.open_trace(tmp_path / "back")
    assert_same(back, trace)


def test_an_annotation_of_none_at_every_step_differs_from_a_missing_one(tmp_path: Path) -> None:
    with gym_trace.TraceRecordingWrapper(CountingEnv(), tmp_path / "trace") as env:
        for note in ({"value": None}, {}, {"value": 1}):
            env.reset()
            for _ in range(3):
                env.annotate(**note)
                env.step(1)
    gym_trace.export(tmp_path / "trace", tmp_path / "out", "rlds")
    gym_trace.import_trace(tmp_path / "out", tmp_path / "back")
    found, were = (
        [{name: list(rows) for name, rows in episode.annotations.items()} for episode in gym_trace.open_trace(trace)]
        for trace in (tmp_path / "back", tmp_path / "trace")
    )
    assert found == were
    assert found[0] == {"value": [None] * 3}


def test_long_episodes_are_read_and_written_in_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_windows(monkeypatch, 7)
    monkeypatch.setattr("gym_trace.exchange.formats.rlds.importer._MOST_ROWS", 5)
    monkeypatch.setattr("gym_trace.exchange.formats.rlds.exporter._SHARD_BYTES", 1000)
    trace = record(tmp_path / "trace", length=35)
    gym_trace.export(trace, tmp_path / "out", "rlds")
    assert len(list((tmp_path / "out").glob("*.tfrecord-*"))) == 4
    gym_trace.import_trace(tmp_path / "out", tmp_path / "back")
    assert_same(gym_trace.open_trace(tmp_path / "back"), trace)


def test_each_split_is_one_of_the_data_set(tmp_path: Path) -> None:
    record(tmp_path / "trace", split="train")
    record(tmp_path / "trace", split="my eval", on_exist="append")
    gym_trace.export(tmp_path / "trace", tmp_path / "out", "rlds")
    said = json.loads((tmp_path / "out" / "dataset_info.json").read_text())
    assert [split["name"] for split in said["splits"]] == ["train", "my_eval"]
    gym_trace.import_trace(tmp_path / "out", tmp_path / "back", "rlds")
    back = gym_trace.open_trace(tmp_path / "back")
    assert [episode.split for episode in back] == ["train"] * 4 + ["my eval"] * 4


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def in_shard(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(out: Path) -> None:
        shard = next(out.glob("*.tfrecord-*"))
        shard.write_bytes(change(shard.read_bytes()))

    return damage


def in_text(file: str, before: str, after: str) -> Callable[[Path], None]:
    def damage(out: Path) -> None:
        text = (out / file).read_text()
        assert before in text
        (out / file).write_text(text.replace(before, after))

    return damage


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (in_shard(lambda data: data[:-10]), "up to byte|checksum"),
        (in_shard(flipped), "checksum differs"),
        (in_text("dataset_info.json", '"4"', '"3"'), "4 episodes, but dataset_info.json declares 3"),
        (in_text("features.json", '"float64"', '"float32"'), "not all values have"),
        (in_text("dataset_info.json", "{", "[" * 100_000), "dataset_info.json: not a JSON object"),
        (in_text("dataset_info.json", '"tfrecord"', '"array_record"'), "array_record"),
        (in_text("dataset_info.json", '"train"', '"../train"'), "invalid name of a split"),
    ],
)
def test_malformed_files_raise_with_their_path(tmp_path: Path, damage: Callable[[Path], None], told: str) -> None:
    record(tmp_path / "trace")
    gym_trace.export(tmp_path / "trace", tmp_path / "out", "rlds")
    damage(tmp_path / "out")
    with pytest.raises(UnreadableRecording, match=told) as caught:
        gym_trace.import_trace(tmp_path / "out", tmp_path / "back", "rlds")
    assert str(tmp_path / "out") in str(caught.value)
    assert not (tmp_path / "back").exists()


def test_an_option_that_there_is_not_is_refused(tmp_path: Path) -> None:
    record(tmp_path / "trace")
    with pytest.raises(InvalidOption, match="png, raw"):
        gym_trace.export(tmp_path / "trace", tmp_path / "out", "rlds", images="jpeg")


def test_lists_are_encoded_as_protobuf_has_them(tmp_path: Path) -> None:
    example, records = ExampleWriter(), RecordWriter(tmp_path / "file")
    example.integers("i", np.array([300, -1]))
    example.floats("f", np.array([1.5], np.float32))
    example.bytes_of("b", [b"x"])
    example.finish(records)
    records.close()
    data = (tmp_path / "file").read_bytes()[12:-4]
    entries = (
        b"\x0a\x0a\x0a\x01b\x12\x05\x0a\x03\x0a\x01x",
        b"\x0a\x0d\x0a\x01f\x12\x08\x12\x06\x0a\x04\x00\x00\xc0\x3f",
    )
    integers = b"\x0a\x15\x0a\x01i\x12\x10\x1a\x0e\x0a\x0c\xac\x02" + b"\xff" * 9 + b"\x01"
    assert data == b"\x0a\x32" + b"".join(entries) + integers


def test_examples_over_the_limit_are_neither_written_nor_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = record(tmp_path / "trace")
    gym_trace.export(trace, tmp_path / "out", "rlds")
    monkeypatch.setattr(examples, "LARGEST", 1000)
    with pytest.raises(UnreadableRecording, match="more than the limit of 1,000"):
        gym_trace.import_trace(tmp_path / "out", tmp_path / "back")
    with pytest.raises(InvalidOption, match="an episode takes more than 1,000 bytes"):
        gym_trace.export(trace, tmp_path / "again", "rlds")
    assert not (tmp_path / "again").exists()


def test_random_damage_below_the_checksums_is_never_another_error(tmp_path: Path) -> None:
    example, records = ExampleWriter(), RecordWriter(tmp_path / "file")
    example.bytes_of("texts", [b"a", b"bc", b""])
    example.floats("floats", np.arange(3.0))
    example.integers("integers", np.array([1, 1000, -5]))
    example.raw("raw", np.arange(6.0).reshape(3, 2))
    example.finish(records)
    records.close()
    with (tmp_path / "file").open("rb") as file:
        inner = next(records_in(file, (tmp_path / "file").stat().st_size))
    random = np.random.default_rng(0)
    for _ in range(2000):
        data = bytearray(inner)
        for place in random.integers(0, len(data), 3):
            data[place] = random.integers(256)
        try:
            lists = lists_in(bytes(data))
            for name, read in (("floats", "floats"), ("integers", "integers"), ("texts", "values")):
                if name in lists:
                    assert len(getattr(ListReader(lists[name]), read)(3)) == 3
            if "raw" in lists:
                assert len(ListReader(lists["raw"]).raw(3, 16)) == 48
        except MalformedExample:
            pass


def robot_data(tmp_path: Path, last: float) -> Path:
    """Three episodes of four rows; the last row of each has this as action and reward."""
    rows = np.append(np.ones(3), last)
    return foreign_rlds.write(tmp_path / "robot", [np.stack([rows, rows], 1)] * 3, [rows] * 3)


SEQUENTIAL = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_INDEX}"  # TFDS's SequentialWriter, which envlogger uses


@pytest.mark.parametrize(
    ("template", "shard"),
    [
        (SEQUENTIAL, "robot-train.tfrecord-00000"),
        ("{SPLIT}_{SHARD_INDEX}_of_{NUM_SHARDS}.{FILEFORMAT}", "train_00000_of_00001.tfrecord"),
    ],
)
def test_shards_have_the_names_of_their_template(tmp_path: Path, template: str, shard: str) -> None:
    rows = np.append(np.ones(3), 0)
    made = {"template": template, "shard": shard}
    path = foreign_rlds.write(tmp_path / "robot", [np.stack([rows, rows], 1)] * 3, [rows] * 3, **made)
    report = gym_trace.import_trace(path, tmp_path / "trace")
    assert (report.episodes, report.steps) == (3, 9)
    assert not any("does not list" in text for text in report.warnings)
    if template == SEQUENTIAL:
        (path / "robot-train.tfrecord-00001").touch()
        report = gym_trace.import_trace(path, tmp_path / "again")
        assert any(text.startswith("robot-train.tfrecord-00001 skipped") for text in report.warnings)


@pytest.mark.parametrize("template", ["../{SHARD_INDEX}", "{OTHER}", "{SHARD_INDEX:>99}", ".", 3])
def test_templates_of_other_names_are_refused(tmp_path: Path, template: Any) -> None:
    rows = np.ones(4)
    path = foreign_rlds.write(tmp_path / "robot", [np.stack([rows, rows], 1)], [rows], template=template)
    with pytest.raises(UnreadableRecording, match="unsupported names of shards"):
        gym_trace.import_trace(path, tmp_path / "trace", "rlds")


def test_a_shard_of_several_splits_is_refused(tmp_path: Path) -> None:
    path = robot_data(tmp_path, 0)
    said = json.loads((path / "dataset_info.json").read_text())
    (path / "dataset_info.json").write_text(json.dumps(said | {"splits": said["splits"] * 2}))
    with pytest.raises(UnreadableRecording, match="several splits have the same shards"):
        gym_trace.import_trace(path, tmp_path / "trace", "rlds")


def test_a_recorded_discount_is_the_discount_of_rlds(tmp_path: Path) -> None:
    rows = np.append(np.ones(3), 0)
    path = foreign_rlds.write(tmp_path / "robot", [np.stack([rows, rows], 1)] * 2, [rows] * 2, discount=0.5)
    gym_trace.import_trace(path, tmp_path / "trace")
    gym_trace.export(tmp_path / "trace", tmp_path / "out", "rlds")
    [shard] = (tmp_path / "out").glob("*.tfrecord-*")
    with shard.open("rb") as file:
        found = [
            ListReader(lists_in(record)["steps/discount"]).floats(4).tolist()
            for record in records_in(file, shard.stat().st_size)
        ]
    assert found == [[0.5, 0.5, 0.5, 0]] * 2
    gym_trace.import_trace(tmp_path / "out", tmp_path / "again")
    assert_same(gym_trace.open_trace(tmp_path / "again"), gym_trace.open_trace(tmp_path / "trace"))


def test_last_steps_with_an_action_and_a_reward_are_steps(tmp_path: Path) -> None:
    report = gym_trace.import_trace(robot_data(tmp_path, 7), tmp_path / "trace")
    trace = gym_trace.open_trace(tmp_path / "trace")
    assert [episode.actions[:, 0].tolist() for episode in trace] == [[1, 1, 1, 7]] * 3
    assert [episode.rewards.tolist() for episode in trace] == [[1, 1, 1, 7]] * 3
    assert [(episode.outcome, episode.has_final_observation) for episode in trace] == [("terminated", False)] * 3
    assert [
        text for text in report.warnings if "in 3 of the first 3 episodes" in text and "last_step=observation" in text
    ]


def test_last_steps_of_zeros_are_final_observations(tmp_path: Path) -> None:
    report = gym_trace.import_trace(robot_data(tmp_path, 0), tmp_path / "trace")
    trace = gym_trace.open_trace(tmp_path / "trace")
    assert [(len(episode), episode.has_final_observation) for episode in trace] == [(3, True)] * 3
    assert not any("last step" in text for text in report.warnings)


@pytest.mark.parametrize(("chosen", "steps"), [("step", 4), ("observation", 3)])
def test_the_user_can_define_last_steps(tmp_path: Path, chosen: str, steps: int) -> None:
    report = gym_trace.import_trace(robot_data(tmp_path, 7), tmp_path / "trace", last_step=chosen)
    trace = gym_trace.open_trace(tmp_path / "trace")
    assert [(len(episode), episode.has_final_observation) for episode in trace] == [(steps, steps == 3)] * 3
    assert any("last_step=step" in text for text in report.warnings) == (chosen == "observation")
    with pytest.raises(InvalidOption, match="auto, observation, step"):
        gym_trace.import_trace(tmp_path / "robot", tmp_path / "no", last_step="none")
    with pytest.raises(InvalidOption, match="rlds has no option 'last'; choose from last_step"):
        gym_trace.import_trace(tmp_path / "robot", tmp_path / "no", last="step")


def test_import_takes_options_of_the_format(tmp_path: Path) -> None:
    command = ["import", str(robot_data(tmp_path, 7)), "-o", str(tmp_path / "trace"), "--set", "last_step=observation"]
    told = CliRunner().invoke(cli, command)
    assert told.exit_code == 0, told.output
    assert "3 episodes, 9 steps" in told.output
