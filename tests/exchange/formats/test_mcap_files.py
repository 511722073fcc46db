"""MCAP: the package's own reader reads what was exported."""

import json
from pathlib import Path

import pytest
from camera_env import record
from scripted_env import small_windows

import gym_trace
from gym_trace.errors import InvalidOption

mcap_reader = pytest.importorskip("mcap.reader")


def test_long_episodes_are_written_in_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_windows(monkeypatch, 7)
    trace = record(tmp_path / "trace", length=35)
    report = gym_trace.export(trace, tmp_path / "out.mcap", "mcap", strict=True)
    assert (report.steps, report.lost) == (trace.episodes["steps"].sum(), [])
    with (tmp_path / "out.mcap").open("rb") as file:
        messages = list(mcap_reader.make_reader(file).iter_messages(topics=["/reward"]))
    rewards = [json.loads(message.data)["value"] for _, _, message in messages]
    assert rewards == [reward for episode in trace for reward in episode.rewards.tolist()]


def test_messages_are_in_the_order_of_their_times_and_episodes_apart(tmp_path: Path) -> None:
    trace = record(tmp_path / "trace", record_infos=True)
    gym_trace.export(trace, tmp_path / "out.mcap", "mcap", fps=10)
    with (tmp_path / "out.mcap").open("rb") as file:
        reader = mcap_reader.make_reader(file, validate_crcs=True)
        found = [
            (channel.topic, message.log_time, json.loads(message.data))
            for _, channel, message in reader.iter_messages(log_time_order=False)
        ]
        told = [one.metadata for one in reader.iter_metadata() if one.name == "gym_trace.episode"]
    times = [time for _, time, _ in found]
    assert times == sorted(times)
    rewards = [
        (said["episode"], said["step"], said["value"], time) for topic, time, said in found if topic == "/reward"
    ]
    begin = int(told[0]["begin"])
    assert begin == trace[0].start_time
    assert rewards[0] == (0, 0, trace[0].rewards[0], begin + 100_000_000)
    assert [step for episode, step, _, _ in rewards if episode == 1] == list(range(5))
    assert int(told[1]["begin"]) == int(told[0]["end"]) + 1_000_000_000
    assert [one["outcome"] for one in told] == ["terminated", "truncated", "cut", "closed"]
    assert told[0]["seed"] == str(2**64 + 5)
    states = [said["value"] for topic, _, said in found if topic == "/observation/state"]
    assert len(states) == 12 + 4
    assert states[0][0] == "NaN"
    assert {topic for topic, _, _ in found} >= {"/observation/a%2Fb", "/observation/pair/0", "/action/1", "/terminated"}


def test_frames_are_what_foxglove_takes_for_images(tmp_path: Path) -> None:
    record(tmp_path / "trace")
    gym_trace.export(tmp_path / "trace", tmp_path / "out.mcap", "mcap")
    with (tmp_path / "out.mcap").open("rb") as file:
        schema, channel, message = next(mcap_reader.make_reader(file).iter_messages(topics=["/observation/camera"]))
    assert (schema.name, schema.encoding, channel.message_encoding) == (
        "foxglove.CompressedImage",
        "jsonschema",
        "json",
    )
    said = json.loads(message.data)
    assert said["format"] == "png"
    assert said["timestamp"]["sec"] * 10**9 + said["timestamp"]["nsec"] == message.log_time


@pytest.mark.parametrize("fps", [0, -1, float("nan"), "fast", True])
def test_an_invalid_frame_rate_raises(tmp_path: Path, fps: object) -> None:
    record(tmp_path / "trace")
    with pytest.raises(InvalidOption, match="steps per second"):
        gym_trace.export(tmp_path / "trace", tmp_path / "out.mcap", "mcap", fps=fps)
