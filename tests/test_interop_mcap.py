"""MCAP: what is written comes back bit for bit, and the package's own reader reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cameras import assert_same, record

import gym_trace
from gym_trace.errors import InvalidOption, UnreadableRecording

mcap_reader = pytest.importorskip("mcap.reader")
mcap_writer = pytest.importorskip("mcap.writer")


@pytest.mark.parametrize("infos", [True, False])
def test_a_trace_comes_back_as_it_was(tmp_path: Path, infos: bool) -> None:
    trace = record(tmp_path / "trace", record_infos=infos)
    report = gym_trace.export(trace, tmp_path / "out.mcap", "mcap", strict=True)
    assert (report.episodes, report.steps, report.lost) == (4, 12, [])
    gym_trace.import_trace(tmp_path / "out.mcap", tmp_path / "back")
    assert_same(gym_trace.open_trace(tmp_path / "back"), trace)


def test_long_episodes_are_read_and_written_in_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.interop.steps.windows._MOST_ROWS", 7)
    monkeypatch.setattr("gym_trace.interop.viewing.leaves._MOST_ROWS", 5)
    trace = record(tmp_path / "trace", length=35)
    gym_trace.export(trace, tmp_path / "out.mcap", "mcap")
    gym_trace.import_trace(tmp_path / "out.mcap", tmp_path / "back", "mcap")
    assert_same(gym_trace.open_trace(tmp_path / "back"), trace)


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


def of_others(out: Path) -> None:
    with out.open("wb") as file:
        writer = mcap_writer.Writer(file)
        writer.start()
        writer.add_message(writer.register_channel("/joints", "json", 0), 0, b"{}", 0)
        writer.finish()


def cut_off(out: Path) -> None:
    out.write_bytes(out.read_bytes()[:-3000])


def flipped(out: Path) -> None:
    data = bytearray(out.read_bytes())
    data[len(data) // 2] ^= 1
    out.write_bytes(data)


def a_channel_less(out: Path) -> None:
    with out.open("rb") as file:
        reader = mcap_reader.make_reader(file)
        messages, told = list(reader.iter_messages()), list(reader.iter_metadata())
    with out.open("wb") as file:
        writer = mcap_writer.Writer(file)
        writer.start()
        for one in told:
            writer.add_metadata(one.name, one.metadata)
        channels: dict[str, int] = {}
        for _, channel, message in messages:
            if channel.topic != "/action/0":
                if channel.topic not in channels:
                    channels[channel.topic] = writer.register_channel(channel.topic, "json", 0, channel.metadata)
                writer.add_message(channels[channel.topic], message.log_time, message.data, message.publish_time)
        writer.finish()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (of_others, "was not exported by gym-trace"),
        (cut_off, "damaged|fewer messages"),
        (flipped, "damaged"),
        (a_channel_less, "fewer messages"),
    ],
)
def test_what_is_malformed_is_said_with_the_file(tmp_path: Path, damage: Callable[[Path], None], told: str) -> None:
    record(tmp_path / "trace")
    gym_trace.export(tmp_path / "trace", tmp_path / "out.mcap", "mcap")
    damage(tmp_path / "out.mcap")
    with pytest.raises(UnreadableRecording, match=told) as caught:
        gym_trace.import_trace(tmp_path / "out.mcap", tmp_path / "back", "mcap")
    assert str(tmp_path / "out.mcap") in str(caught.value)


@pytest.mark.parametrize("fps", [0, -1, float("nan"), "fast", True])
def test_a_rate_that_is_none_is_refused(tmp_path: Path, fps: object) -> None:
    record(tmp_path / "trace")
    with pytest.raises(InvalidOption, match="steps a second"):
        gym_trace.export(tmp_path / "trace", tmp_path / "out.mcap", "mcap", fps=fps)
