"""gym-trace replay: options, output and exit codes."""

import json
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from shell import ok, run

import gym_trace
from gym_trace.playback.episode_index import index_of
from gym_trace.recording.collecting.rollout import episode_seed


@pytest.fixture
def recorded(here: Path) -> Path:
    ok("record", "clicks:CliClock-v0", "-o", "t", "--steps", 45, "--seed", 0, "--policy", "clicks:ones")
    return here / "t"


def indices(*args: object) -> list[int]:
    return [json.loads(line)["index"] for line in ok("replay", "t", "--json", *args).stdout.splitlines()]


def test_replay_prints_a_line_an_episode_without_reading_steps(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.playback.writer_reader.WriterReader.chunk", None)
    monkeypatch.setattr("gym_trace.playback.trace.scan_content", None)
    lines = ok("replay", recorded).stdout.splitlines()
    assert lines[0].split() == ["index", "episode_id", "steps", "return", "outcome", "seed", "start_time", "(UTC)"]
    assert lines[1].split()[:6] == ["0", "0", "10", "10", "terminated", str(episode_seed(0, 0))]
    assert lines[5].split()[:5] == ["4", "4", "5", "5", "closed"]
    assert len(lines) == 6


def test_writer_and_split_are_shown_where_there_are_several(recorded: Path) -> None:
    ok("record", "clicks:CliClock-v0", "-o", "t", "--on-exist", "append", "--split", "eval", "--episodes", 1)
    headings, *lines = ok("replay", recorded).stdout.splitlines()
    assert headings.split()[2:4] == ["writer", "split"]
    splits = {writer.writer: writer.split for writer in index_of(gym_trace.open_trace(recorded)).readers}
    assert sorted(splits.values()) == ["eval", "train"]
    assert {tuple(line.split()[2:4]) for line in lines} == set(splits.items())


def test_replay_as_json_is_an_object_a_line(recorded: Path) -> None:
    rows = [json.loads(line) for line in ok("replay", recorded, "--json").stdout.splitlines()]
    for row, episode in zip(rows, gym_trace.open_trace(recorded), strict=True):
        assert (row["index"], row["steps"], row["return"]) == (episode.index, len(episode), episode.total_reward)
        assert (row["writer"], row["outcome"], row["seed"]) == (episode.writer, episode.outcome, episode.seed)
        assert np.datetime64(row["start_time"].rstrip("Z"), "ns").astype(int) // 1000 == episode.start_time // 1000


def test_replay_as_json_has_null_for_what_is_unknown_and_whole_seeds(tmp_path: Path) -> None:
    with gym_trace.TraceRecordingWrapper(gymnasium.make("FrozenLake-v1"), tmp_path) as env:
        for seed in (None, 2**70):
            env.reset(seed=seed)
            env.step(0)
    rows = [json.loads(line) for line in ok("replay", tmp_path, "--json").stdout.splitlines()]
    assert [row["seed"] for row in rows] == [None, 2**70]


def test_replay_takes_the_episodes_asked_for_in_the_order_given(recorded: Path) -> None:
    assert indices("--episodes", "-2:") == [3, 4]
    assert indices("--episodes", "::2") == [0, 2, 4]
    assert indices("--episodes", "3,-5,1") == [3, 0, 1]
    assert indices("--episodes", "10:") == []


def test_an_episode_that_is_not_there_is_a_usage_error(recorded: Path) -> None:
    result = run("replay", recorded, "--episodes", "5")
    assert result.exit_code == 2
    assert "no episode 5; the trace has 5 episodes" in result.stderr


def test_a_random_order_has_each_episode_once_and_is_repeated_by_its_seed(recorded: Path) -> None:
    drawn = indices("--sort", "random:1", "--limit", 3)
    assert drawn == indices("--sort", "random:1")[:3]
    assert sorted(indices("--sort", "random")) == [0, 1, 2, 3, 4]
    assert len({tuple(indices("--sort", f"random:{seed}", "--limit", 2)) for seed in range(8)}) > 1
    assert set(indices("--sort", "random", "--limit", 2, "--episodes", "::2")) < {0, 2, 4}


def test_the_callback_gets_the_arrays_until_it_returns_something_truthy(recorded: Path) -> None:
    result = ok("replay", recorded, "--episodes", "1:", "--callback", "clicks:two_only")
    calls = sys.modules["clicks"].calls
    assert len(calls) == 2
    observations, actions, rewards = calls[0]
    assert observations.tolist() == [[0, 0], *([step, 1] for step in range(1, 11))]
    assert (actions.tolist(), rewards.tolist()) == ([1] * 10, [1.0] * 10)
    assert "played 2 episodes, 20 steps" in result.stderr


@pytest.mark.parametrize("options", [["--seed", "1"], ["--json", "--callback", "clicks:two_only"]], ids=str)
def test_options_of_replay_that_make_no_sense_together_are_refused(recorded: Path, options: list[str]) -> None:
    assert run("replay", recorded, *options).exit_code == 2


def test_versions_that_a_trace_names_cannot_steer_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.envs.identity.versions_of", lambda env: {"gymnasium": "\x1b[2J1"})
    ok("record", "CartPole-v1", "-o", tmp_path / "t", "--episodes", 1)
    output = ok("verify", tmp_path / "t").output
    assert "recorded with gymnasium" in output
    assert "\x1b" not in output
