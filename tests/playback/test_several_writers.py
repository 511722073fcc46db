"""Traces of several writers: each says what it recorded, and the trace says only what they agree on."""

from pathlib import Path

import gymnasium
import pytest
from runs import record_lengths
from scripted_env import CountingEnv, ImageEnv, Result, ToyEnv

from gym_trace import ReplayEnv, TraceRecordingWrapper, open_trace, verify_trace
from gym_trace.errors import InvalidOption, TraceError
from gym_trace.playback.row_types import row_types
from gym_trace.tools.statistics.describe import describe


def two_environments(directory: Path) -> None:
    record_lengths(directory, [], env=CountingEnv(10**6, shape=(7,)), uid="empty", metadata={"run": 0})
    record_lengths(directory, [2], uid="a", on_exist="append", metadata={"run": 1})
    record_lengths(directory, [3, 1], env=ImageEnv(10**6), uid="b", on_exist="append", metadata={"run": 1})


def test_a_view_of_one_episode_has_what_its_writer_recorded(tmp_path: Path) -> None:
    two_environments(tmp_path)
    trace = open_trace(tmp_path)
    assert [trace[[i]].writers for i in (0, 1, -1)] == [["a"], ["b"], ["b"]]
    assert trace[[0]].observation_space == CountingEnv().observation_space
    assert trace[[1]].observation_space == ImageEnv().observation_space
    assert trace[[1]].env_spec["class"].endswith("ImageEnv")


def test_a_writer_without_episodes_adds_no_columns(tmp_path: Path) -> None:
    record_lengths(tmp_path, [], env=ImageEnv(10**6), uid="empty")
    by_trace = row_types(open_trace(tmp_path))
    assert ("observations",) in by_trace  # without any episodes, all spaces count
    hollow = ToyEnv(gymnasium.spaces.Tuple([]), gymnasium.spaces.Discrete(2), lambda action: Result((), 0.0))
    with TraceRecordingWrapper(hollow, tmp_path, on_exist="append") as env:
        env.reset()
        env.step(0)
    assert ("observations",) not in row_types(open_trace(tmp_path))


def test_a_trace_says_what_all_writers_with_episodes_agree_on_and_no_more(tmp_path: Path) -> None:
    two_environments(tmp_path)
    trace = open_trace(tmp_path)
    assert trace.metadata == {"run": 1}
    assert trace.action_space == CountingEnv().action_space
    for name in ("observation_space", "env_spec"):
        with pytest.raises(TraceError, match=r"trace\[\[i\]\]"):
            getattr(trace, name)
    with pytest.raises(TraceError, match=r"trace\[\[i\]\]"):
        trace.make_env()


def test_an_empty_writer_does_not_speak_for_the_others(tmp_path: Path) -> None:
    record_lengths(tmp_path, [], env=ImageEnv(), uid="empty")
    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path, uid="full", on_exist="append")
    env.reset(seed=1)
    env.close()
    trace = open_trace(tmp_path)
    assert trace.env_spec["id"] == "CartPole-v1"
    assert trace.make_env().spec.id == "CartPole-v1"


def test_a_writer_without_a_schema_hides_no_other_until_it_has_one(tmp_path: Path) -> None:
    """It is starting, or was killed before its first line."""
    record_lengths(tmp_path / "t", [2], uid="b")
    (tmp_path / "new").mkdir()
    for directory in (tmp_path / "t", tmp_path / "new"):
        (directory / "a.manifest.jsonl").touch()
    trace, new = open_trace(tmp_path / "t"), open_trace(tmp_path / "new")
    assert (trace.writers, [len(one) for one in trace], list(new)) == (["b"], [2], [])
    assert next(iter(trace.windows(2, batch_size=1)))["rewards"].shape == (1, 2)
    assert len(trace.find_steps("reward > -1")) == 2
    (tmp_path / "t" / "a.manifest.jsonl").write_bytes((tmp_path / "t" / "b.manifest.jsonl").read_bytes())
    trace.refresh()
    assert sorted(trace.writers) == ["a", "b"]


def test_replaying_mixes_no_spaces(tmp_path: Path) -> None:
    two_environments(tmp_path)
    with pytest.raises(InvalidOption, match="episodes="):
        ReplayEnv(tmp_path)
    env = ReplayEnv(tmp_path, episodes=[1, 2])
    assert env.observation_space == ImageEnv().observation_space
    assert env.reset()[0].shape == (64, 80, 3)


def test_info_and_verify_do_not_ask_a_writer_without_episodes(tmp_path: Path) -> None:
    record_lengths(tmp_path, [], env=ImageEnv(), uid="a")
    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path, uid="full", on_exist="append")
    env.reset(seed=1)
    env.step(0)
    env.close()
    (tmp_path / "died-at-once.manifest.jsonl").touch()
    assert describe(open_trace(tmp_path))["environment"]["id"] == "CartPole-v1"
    assert [verdict.verdict for verdict in verify_trace(tmp_path)] == ["identical"]
