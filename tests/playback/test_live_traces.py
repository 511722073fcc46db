"""Traces are readable while they are written, and after their writer has died."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import forked_python
import gymnasium
import pytest
from forked_python import HELPERS
from gymnasium.vector import SyncVectorEnv
from runs import check_counts, counts_of, play, record_lengths
from scripted_env import CountingEnv, small_blocks
from shell import run, wait_for
from vector_wrapper import TraceRecordingVectorWrapper

from gym_trace import (
    ReplayEnv,
    TraceRecordingWrapper,
    check_trace,
    diff_traces,
    edit,
    load_results,
    open_trace,
    scan_recorded_traces,
    summarize,
    verify_trace,
)
from gym_trace.errors import TraceError
from gym_trace.format.batch_reader import BatchReader
from gym_trace.format.directory import find_writers
from gym_trace.format.fragments import Fragments
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.episode_table import episode_runs
from gym_trace.storage.protocol import Storage
from gym_trace.tools.statistics.describe import describe


def told(trace: Any) -> list[tuple[str, int]]:
    return [(str(row["outcome"]), int(row["steps"])) for row in trace.episodes]


def test_an_episode_is_readable_from_its_reset_and_grows_until_it_ends(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=3), tmp_path, flush_seconds=100)
    trace = open_trace(tmp_path)
    assert len(trace) == 0
    env.reset(seed=7)
    env.flush()
    assert trace.refresh() == 1
    assert told(trace) == [("running", 0)]
    env.step(0)
    env.flush()
    assert trace.refresh() == 0
    assert told(trace) == [("running", 1)]
    check_counts(trace, [1])
    assert (trace[0].outcome, trace[0].seed, trace[0].end_time) == ("running", 7, None)
    env.step(0)
    env.step(0)
    env.flush()
    assert trace.refresh() == 0
    assert told(trace) == [("terminated", 3)]
    check_counts(trace, [3])
    env.reset()
    env.step(0)
    env.flush()
    assert trace.refresh() == 1
    env.reset()
    env.flush()
    assert trace.refresh() == 1
    assert told(trace) == [("terminated", 3), ("cut", 1), ("running", 0)]
    env.close()
    assert trace.refresh() == 0
    assert told(trace) == [("terminated", 3), ("cut", 1), ("closed", 0)]
    check_counts(trace, [3, 1, 0])


def test_every_reader_reads_a_running_episode(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path, record_infos=True)
    env.action_space.seed(1)
    env.reset(seed=3)
    for _ in range(9):
        env.step(env.action_space.sample())
    env.flush()
    trace = open_trace(tmp_path)
    assert told(trace) == [("running", 9)]
    assert [len(episode) for episode in trace] == [9]
    handed_over: list[int] = []
    assert scan_recorded_traces(tmp_path, lambda _, actions, __: handed_over.append(len(actions))) == 1
    assert handed_over == [9]
    assert [verdict.verdict for verdict in verify_trace(tmp_path)] == ["identical"]
    assert [found.difference for found in diff_traces(trace, tmp_path)] == [None]
    summary = summarize(trace, by="outcome", columns=True)
    assert (summary["episodes"], summary["steps"], summary["outcomes"]) == (1, 9, {"running": 1})
    assert summary["rewards"]["count"] == 9
    assert list(summary["groups"]) == ["running"]
    assert describe(trace)["episodes"] == 1
    assert check_trace(tmp_path).damages == []
    assert load_results(tmp_path)["episode_lengths"] == []  # complete episodes only
    player = ReplayEnv(trace)
    player.reset()
    ends = [player.step(0)[2:4] for _ in range(9)]
    assert ends == [(False, False)] * 8 + [(False, True)]
    assert len(trace[trace.episodes["outcome"] != "running"]) == 0
    for words in (["info"], ["stats"], ["replay"], ["verify"], ["check"]):
        done = run(words[0], tmp_path, *words[1:])
        assert done.exit_code == 0, done.output
        assert "running" in done.output or words[0] in ("info", "check", "verify")
    env.close()


def test_episodes_of_lanes_are_running_until_they_end(tmp_path: Path) -> None:
    envs = TraceRecordingVectorWrapper(SyncVectorEnv([partial(CountingEnv, n) for n in (3, 5, 100)]), tmp_path)
    trace = open_trace(tmp_path)
    envs.reset(seed=1)
    seen = []
    for _ in range(4):
        envs.step(envs.action_space.sample())
        envs.flush()
        trace.refresh()
        firsts = trace.episodes[trace.episodes["episode_id"] < 3]
        seen.append({int(row["lane"]): (str(row["outcome"]), int(row["steps"])) for row in firsts})
    assert seen[0] == {0: ("running", 1), 1: ("running", 1), 2: ("running", 1)}
    assert seen[3] == {0: ("terminated", 3), 1: ("running", 4), 2: ("running", 4)}
    envs.close()
    trace.refresh()
    assert "running" not in trace.episodes["outcome"]


def test_a_follower_keeps_no_table_of_earlier_looks(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=2), tmp_path)
    trace, tables, batches = open_trace(tmp_path), [], []
    for look in range(8):
        play(env, 3)
        assert trace.refresh() == 3
        assert trace[-1].observations[:, 0].tolist() == [0, 1, 2]
        (reader,) = index_of(trace).readers
        tables.append(weakref.ref(reader.fragments))
        batches += [weakref.ref(batch) for batch in reader.read_batches if batch is reader.tail.batch]
        del reader
        gc.collect()
        assert [table() is not None for table in tables] == [False] * look + [True]
        assert sum(batch() is not None for batch in batches) == 1
        assert len(trace._opened.cache) <= 2
    assert len(batches) == 8
    env.close()


def test_a_follower_of_lanes_keeps_no_batch_of_a_ring(tmp_path: Path) -> None:
    envs = TraceRecordingVectorWrapper(SyncVectorEnv([partial(CountingEnv, 3)] * 8), tmp_path, record_infos=True)
    trace, batches = open_trace(tmp_path), []
    envs.reset(seed=1)
    for _ in range(8):
        for _ in range(4):
            envs.step(envs.action_space.sample())
        trace.refresh()
        for episode in trace[-8:]:
            assert len(episode.observations) == len(episode) + 1
        for column in ("observations", "actions", "rewards", "infos", "annotations"):
            assert getattr(trace[-1], column) is not None
        batches += [
            weakref.ref(reader.tail.batch) for reader in index_of(trace).readers if reader.tail.batch is not None
        ]
        gc.collect()
        assert sum(batch() is not None for batch in batches) == 1
        assert len(trace._opened.cache) <= 2 * 5
    assert len(batches) == 8
    envs.close()


def test_a_file_cannot_declare_an_episode_running(tmp_path: Path) -> None:
    record_lengths(tmp_path, [2])
    table = index_of(open_trace(tmp_path)).readers[0].fragments[:].copy()
    table["outcome"] = 5
    assert episode_runs(Fragments([table]), alive=False)["outcome"].tolist() == ["closed"]


def test_an_episode_opened_earlier_can_be_read_after_the_trace_has_grown(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=3), tmp_path)
    trace = None
    for number in range(3):
        env.reset()
        for _ in range(3):
            env.step(number)
        env.flush()
        if trace is None:
            trace = open_trace(tmp_path)
            first = trace[0]
    env.close()
    assert trace is not None
    trace.refresh()
    assert first.actions.tolist() == [0, 0, 0]
    assert [episode.actions[0] for episode in trace] == [0, 1, 2]


def test_steps_that_follow_a_full_chunk_are_written_in_time(tmp_path: Path) -> None:
    with small_blocks(chunk=2000):
        env = TraceRecordingWrapper(CountingEnv(length=10**6), tmp_path, flush_seconds=0.4)
    env.reset()
    steps, deadline = 0, time.monotonic() + 1.0
    while time.monotonic() < deadline:  # each chunk delays the timed flush
        env.step(0)
        steps += 1
    wait_for(lambda: index_of(open_trace(tmp_path)).readers[0].fragments["steps"].sum() == steps)
    env.close()


def test_a_new_writer_appears_at_refresh(tmp_path: Path) -> None:
    record_lengths(tmp_path, [1, 2], uid="b")
    trace = open_trace(tmp_path)
    record_lengths(tmp_path, [3], uid="a", on_exist="append")
    assert trace.refresh() == 1
    assert trace.writers == ["b", "a"]  # sorted by start
    assert [len(episode) for episode in trace] == [1, 2, 3]
    assert trace.episodes["writer"].tolist() == [0, 0, 1]
    assert trace.episodes["index"].tolist() == [0, 1, 2]


def test_a_trace_is_read_while_it_is_written(tmp_path: Path) -> None:
    episodes = 300
    env = TraceRecordingWrapper(CountingEnv(length=17), tmp_path, flush_seconds=0.01)

    def run() -> None:
        for _ in range(episodes):
            env.reset()
            for step in range(17):
                env.step(step % 4)
            threading.Event().wait(0.001)
        env.close()

    thread = threading.Thread(target=run)
    thread.start()
    trace = open_trace(tmp_path)
    seen = len(trace)
    try:
        while thread.is_alive():
            seen += trace.refresh()
            for i in range(max(0, len(trace) - 3), len(trace)):
                assert counts_of(trace[i]) == list(range(len(trace[i]) + 1))
                assert len(trace[i]) == 17 or trace[i].outcome in ("running", "closed")
    finally:
        thread.join()
    seen += trace.refresh()
    assert seen == len(trace) == episodes
    assert trace.damage == []
    check_counts(trace, [17] * episodes)


def test_a_batch_begun_while_being_opened_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_lengths(tmp_path, [3])
    (batch,) = tmp_path.glob("*.gtb")
    begun = tmp_path / batch.name.replace(".000000.gtb", ".000001.gtb.part")
    begun.touch()
    read = BatchReader

    def overtaken(storage: Storage, name: str, *rest: Any, **options: Any) -> BatchReader:
        try:
            return read(storage, name)
        finally:
            if name == begun.name:
                begun.write_bytes(batch.read_bytes()[:64])

    monkeypatch.setattr("gym_trace.playback.writer_reader.BatchReader", overtaken)
    assert open_trace(tmp_path).damage == []


def test_a_batch_sealed_before_being_opened_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=3), tmp_path)
    env.reset()
    for _ in range(3):
        env.step(0)
    env.flush()
    found = find_writers

    def overtaken(storage: Storage) -> Any:
        writers = found(storage)
        env.close()
        return writers

    monkeypatch.setattr("gym_trace.playback.opened.find_writers", overtaken)
    check_counts(open_trace(tmp_path), [3])


def test_the_open_episode_of_a_dead_writer_is_lost_but_readable(tmp_path: Path) -> None:
    script = f"""
import os, sys
sys.path.insert(0, {HELPERS!r})
from shell import run
from scripted_env import CountingEnv, small_blocks
from gym_trace import TraceRecordingWrapper
env = TraceRecordingWrapper(CountingEnv(length=4), {str(tmp_path)!r})
for length in (4, 2):
    env.reset(seed=length)
    for _ in range(length):
        env.step(3)
env.flush()
print("ready", flush=True)
sys.stdin.readline()
os._exit(9)
"""
    with forked_python.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        trace = open_trace(tmp_path)
        assert told(trace) == [("terminated", 4), ("running", 2)]
        process.stdin.close()
        process.wait(30)
    assert trace.refresh() == 0
    check_counts(trace, [4, 2])
    lost = trace[1]
    assert (lost.outcome, lost.seed, lost.end_time, lost.actions.tolist()) == ("lost", 2, None, [3, 3])
    assert not lost.terminations.any()
    assert scan_recorded_traces(tmp_path) == 2


def test_flushing_from_another_thread_returns_during_a_fast_run(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=10**9), tmp_path, flush_seconds=0.01)
    env.reset()
    flushed = threading.Event()
    steps = 0

    def flush() -> None:
        for _ in range(30):
            env.flush()
        flushed.set()

    thread = threading.Thread(target=flush)
    thread.start()
    until = time.monotonic() + 60
    while not flushed.is_set() and time.monotonic() < until:
        env.step(0)
        steps += 1
    assert flushed.is_set()
    thread.join()
    env.close()
    check_counts(open_trace(tmp_path), [steps])


@pytest.mark.parametrize("is_live", [True, False], ids=["opened while it was recorded", "opened when it was complete"])
def test_a_refresh_reads_what_an_edit_in_place_has_left(tmp_path: Path, is_live: bool) -> None:
    env, opened = TraceRecordingWrapper(CountingEnv(length=10**6), tmp_path, flush_seconds=100), []
    for number, length in enumerate((3, 5, 8, 4)):
        env.reset(seed=number)
        for step in range(length):
            env.step(step % 4)
        env.flush()
        if is_live and number == 2:
            opened.append(open_trace(tmp_path))
    env.close()
    trace = opened[0] if is_live else open_trace(tmp_path)
    old = trace[0]
    edit.filter(tmp_path, episodes=[1, 3], in_place=True)
    trace.refresh()
    assert trace.episodes["seed"].tolist() == [1, 3]
    assert trace.damage == []
    check_counts(trace, [5, 4])
    with pytest.raises(TraceError, match="changed or removed; look it up again"):
        _ = old.rewards
    assert trace.refresh() == 0
