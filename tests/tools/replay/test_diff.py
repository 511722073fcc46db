"""Two traces side by side."""

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import forked_python
import gymnasium
import numbered_env
import numpy as np
import pytest
from batch_forgery import taken_apart
from shell import ok, run
from test_verification import Inner, record

from gym_trace import TraceRecordingWrapper, diff_traces, open_trace, verify_trace
from gym_trace.errors import InvalidOption
from gym_trace.format.columns import decode, parse_column


def differences(a: Path, b: Path, **options: Any) -> list[tuple[int, int | None, str]]:
    found = [(episode.index, episode.difference) for episode in diff_traces(a, b, **options)]
    return [(index, difference.step, difference.column) for index, difference in found if difference is not None]


def test_the_same_run_recorded_twice_is_the_same(tmp_path: Path) -> None:
    a, b = (record(gymnasium.make("Blackjack-v1"), tmp_path / name, 6, record_infos=True, seeded=1) for name in "ab")
    assert differences(a, b) == []


def test_the_first_difference_is_found_by_step_and_leaf(tmp_path: Path) -> None:
    a = record(gymnasium.make("Pendulum-v1"), tmp_path / "a", 3, seeded=1)
    env = Inner(gymnasium.make("Pendulum-v1"), 1, 9, reward=lambda reward: float(np.nextafter(reward, 1)))
    b = record(env, tmp_path / "b", 3, seeded=1)
    assert differences(a, b) == [(1, 9, "rewards")]
    assert differences(a, b, ignore=["rewards"]) == []
    assert differences(a, b, atol=1e-9) == []
    assert ok("diff", a, b, "--tolerance", "atol=1e-9").stdout == "3 episodes, the same within the tolerance\n"


def test_other_actions_are_found_before_what_they_lead_to(tmp_path: Path) -> None:
    traces = []
    for name, first_action in (("a", 0), ("b", 1)):
        env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path / name)
        env.reset(seed=0)
        env.step(0)
        env.step(first_action)
        env.annotate(value=2.0 if name == "a" else 3.0)
        env.step(0)
        env.close()
        traces.append(tmp_path / name)
    assert differences(*traces) == [(0, 1, "actions")]
    assert differences(*traces, ignore=["actions"]) == [(0, 1, "observations")]
    assert differences(*traces, ignore=["actions", "observations"]) == [(0, 2, "annotations/value")]


def test_a_longer_episode_differs_where_the_shorter_one_ends(tmp_path: Path) -> None:
    for name, steps in (("a", 5), ("b", 7)):
        record(gymnasium.make("Pendulum-v1"), tmp_path / name, 1, steps=steps)
    assert differences(tmp_path / "a", tmp_path / "b") == [(0, 5, "steps")]


def test_unknown_columns_to_ignore_are_refused(tmp_path: Path) -> None:
    record(gymnasium.make("CartPole-v1"), tmp_path, 1)
    with pytest.raises(InvalidOption, match="unknown column 'reward'"):
        diff_traces(tmp_path, tmp_path, ignore=["reward"])


def test_a_replayed_trace_recorded_again_is_identical_on_the_command_line(tmp_path: Path) -> None:
    for name in "ab":
        ok("record", "CartPole-v1", "-o", tmp_path / name, "--episodes", 5, "--seed", 3, "--quiet")
    done = run("diff", tmp_path / "a", tmp_path / "b")
    assert done.exit_code == 0
    assert done.stdout == "5 episodes, identical\n"


def test_different_runs_are_shown_side_by_side_and_exit_with_3(tmp_path: Path) -> None:
    for name in "ab":
        ok("record", "CartPole-v1", "-o", tmp_path / name, "--episodes", 5, "--seed", ord(name), "--quiet")
    done = run("diff", tmp_path / "a", tmp_path / "b")
    assert done.exit_code == 3
    assert "A has" in done.stdout
    assert "mean return" in done.stdout
    plain = json.loads(run("diff", tmp_path / "a", tmp_path / "b", "--json").stdout)
    assert plain["identical"] is False
    assert plain["same"] == 0


def test_verify_on_the_command_line_says_what_came_out(tmp_path: Path) -> None:
    record(gymnasium.make("Pendulum-v1", g=10.0), tmp_path / "a", 3)
    done = run("verify", tmp_path / "a")
    assert (done.exit_code, done.stdout) == (0, "3 episodes replayed: 3 identical, bit for bit\n")
    done = run("verify", tmp_path / "a", "--env-arg", "g=9.8")
    assert done.exit_code == 3
    assert "episode 0 differs at step 0, observations[" in done.stdout
    done = run("verify", tmp_path / "a", "--json", "--env", "CartPole-v1", "--episodes", "1")
    assert done.exit_code == 3
    assert json.loads(done.stdout)["verdict"] == "differs"
    done = run("replay", tmp_path / "a", "--tolerance", "atol=1")
    assert done.exit_code == 2
    assert "--tolerance needs a terminal or --human" in done.stderr


def test_a_replay_recorded_again_is_the_same_trace(tmp_path: Path) -> None:
    from gym_trace.tools.replay.compare import Comparison
    from gym_trace.tools.replay.lanes import lanes_of
    from gym_trace.tools.replay.resimulate import LaneReplay

    trace = open_trace(record(gymnasium.make("CartPole-v1"), tmp_path / "a", 6))
    recorder = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path / "b")
    (lane,) = lanes_of(trace)
    replay = LaneReplay(trace, lane, partial(gymnasium.make, "CartPole-v1"), Comparison())
    for position in range(6):
        generator = replay.generator_before(position)
        assert replay.play_in(recorder, position, len(trace[position]), generator)[0].verdict == "identical"
    recorder.close()
    assert len(open_trace(tmp_path / "b")) == 6
    assert differences(tmp_path / "a", tmp_path / "b") == []
    assert {verdict.verdict for verdict in verify_trace(tmp_path / "b")} == {"identical"}


def record_seeds(directory: Path, *seeds: int, whole: bool = True) -> None:
    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), directory, on_exist="append")
    for seed in seeds:
        env.reset(seed=seed)
        while not any(env.step(seed % 2)[2:4]) and whole:
            pass
    env.close()


def test_episodes_in_another_order_are_paired_by_their_seeds(tmp_path: Path) -> None:
    record_seeds(tmp_path / "a", 3, 4, 5, 6)
    record_seeds(tmp_path / "b", 5, 3, 6, 4)
    assert [episode.difference for episode in diff_traces(tmp_path / "a", tmp_path / "b")] == [None] * 4


def test_a_column_that_only_one_has_and_another_dtype_are_differences(tmp_path: Path) -> None:
    plain = record(gymnasium.make("CartPole-v1"), tmp_path / "a", 2, seeded=1)
    infos = record(gymnasium.make("CartPole-v1"), tmp_path / "b", 2, seeded=1, record_infos=True)
    assert [column for _, _, column in differences(plain, infos)] == ["infos", "infos"]
    assert [column for _, _, column in differences(infos, plain)] == ["infos", "infos"]
    narrow = gymnasium.wrappers.TransformReward(gymnasium.make("CartPole-v1"), np.float32)
    other = record(narrow, tmp_path / "c", 2, seeded=1)
    assert [column for _, _, column in differences(plain, other)] == ["rewards", "rewards"]
    assert [column for _, _, column in differences(other, plain)] == ["rewards", "rewards"]


def record_writers(directory: Path, *lengths: int, forged: tuple[int, int] | None = None) -> Path:
    """Record episodes of writers, each with its first one seeded. forged: writer and episode with other actions.

    Episodes are of the same length, as those of many environments are.
    """
    for writer, episodes in enumerate(lengths):
        env = TraceRecordingWrapper(
            gymnasium.make("Pendulum-v1", max_episode_steps=3), directory, uid=f"w{writer}", on_exist="append"
        )
        for number in range(episodes):
            env.reset(seed=None if number else writer)
            for step in range(3):
                env.step(np.full(1, step + ((writer, number) == forged), np.float32))
        env.close()
    return directory


def test_a_longer_writer_does_not_shift_the_episodes_of_the_others(tmp_path: Path) -> None:
    a, b = record_writers(tmp_path / "a", 13, 21, 21), record_writers(tmp_path / "b", 9, 21, 21)
    for one, other in ((a, b), (b, a)):
        assert [found.difference for found in diff_traces(one, other)] == [None] * 51
    told = run("diff", a, b).stdout
    assert "A has 55 episodes, B has 51" in told
    assert "55 episodes, of which 51 are the same" in told


def test_an_episode_that_differs_is_compared_with_the_one_of_its_writer(tmp_path: Path) -> None:
    a, b = record_writers(tmp_path / "a", 5, 4, forged=(1, 2)), record_writers(tmp_path / "b", 3, 4)
    assert differences(a, b) == [(7, 0, "actions")]
    assert differences(a, b, ignore=["actions"]) == [(7, 0, "observations")]
    assert len(list(diff_traces(a, b))) == 7


KILLED = """
import os, sys
import gymnasium
from gym_trace import TraceRecordingWrapper

env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), sys.argv[1])
env.reset(seed=3)
env.step(0)
env.flush()
os._exit(1)
"""


def test_episodes_left_by_a_killed_process_do_not_hide_equal_ones(tmp_path: Path) -> None:
    forked_python.run([sys.executable, "-c", KILLED, tmp_path / "a"], check=False)
    record_seeds(tmp_path / "a", 3, 4, 5)
    record_seeds(tmp_path / "b", 4, 5, 3)
    assert len(open_trace(tmp_path / "a")) == 4
    assert [episode.difference for episode in diff_traces(tmp_path / "a", tmp_path / "b")] == [None] * 3


def test_episodes_left_by_an_interrupted_process_do_not_hide_equal_ones(tmp_path: Path) -> None:
    record_seeds(tmp_path / "a", 3, whole=False)
    record_seeds(tmp_path / "a", 3, 4, 5)
    record_seeds(tmp_path / "b", 4, 5, 3)
    assert open_trace(tmp_path / "a").episodes["outcome"].tolist().count("closed") == 1
    assert [episode.difference for episode in diff_traces(tmp_path / "a", tmp_path / "b")] == [None] * 3
    assert [episode.difference for episode in diff_traces(tmp_path / "b", tmp_path / "a")] == [None] * 3


def test_a_copy_of_a_trace_is_compared_without_decoding_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbered_env.record(tmp_path / "a", record_infos=True)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    a, b = open_trace(tmp_path / "a"), open_trace(tmp_path / "b")
    monkeypatch.setattr("gym_trace.format.batch_reader.decode", None)
    found = list(diff_traces(a, b))
    assert [(episode.steps, episode.difference) for episode in found] == [(n, None) for n in a.episodes["steps"]]


def test_only_what_is_not_the_same_bytes_is_looked_at_closely(tmp_path: Path) -> None:
    numbered_env.record(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    forged = taken_apart(tmp_path / "b" / "w.000000.gtb")
    chunk = next(chunk for chunk in forged.chunks if ("rewards",) in chunk.columns)
    place = chunk.columns["rewards",]
    rewards = decode(parse_column(chunk.metadata["columns"][place]), chunk.blobs[place])
    chunk.store(("rewards",), (rewards + 1).tobytes(), encoding=0, raw=rewards.nbytes)
    (tmp_path / "b" / "w.000000.gtb").write_bytes(forged.data())
    assert [(index, column) for index, _, column in differences(tmp_path / "a", tmp_path / "b")] == [(0, "rewards")]
