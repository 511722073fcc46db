"""Several wrappers of one run record into one directory; a trace of an earlier run is still protected."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import forked_python
import gymnasium
import pytest
from forked_python import HELPERS
from runs import play, recorded
from scripted_env import CountingEnv

from gym_trace import TraceRecordingWrapper, check_trace, open_trace
from gym_trace.errors import TraceExists

COUNT, STEPS = 3, 20


class Make:
    """Makes an environment that records into a directory, as the functions that vector environments are given do."""

    def __init__(self, directory: Path, **options: Any):
        self.directory, self.options = directory, options

    def __call__(self) -> TraceRecordingWrapper:
        return TraceRecordingWrapper(gymnasium.make("CartPole-v1"), self.directory, **self.options)


def step_all(envs: gymnasium.vector.VectorEnv[Any, Any, Any], directory: Path) -> None:
    envs.reset(seed=5)
    for _ in range(STEPS):
        envs.step(envs.action_space.sample())
    envs.close()
    trace = open_trace(directory)
    resets = sum(outcome == "terminated" for outcome in trace.episodes["outcome"].tolist())
    assert COUNT * STEPS - resets <= trace.episodes["steps"].sum() <= COUNT * STEPS
    assert {episode.seed for episode in trace} >= {5, 6, 7}
    assert check_trace(directory).damages == []
    assert len({*trace.episodes["writer"].tolist()}) == COUNT


def test_the_environments_of_a_sync_vector_env_share_a_directory(tmp_path: Path) -> None:
    step_all(gymnasium.vector.SyncVectorEnv([Make(tmp_path)] * COUNT), tmp_path)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_the_environments_of_an_async_vector_env_share_a_directory(tmp_path: Path, context: str) -> None:
    step_all(gymnasium.vector.AsyncVectorEnv([Make(tmp_path)] * COUNT, context=context), tmp_path)


@pytest.mark.parametrize("kind", ["SyncVectorEnv", "AsyncVectorEnv"])
def test_environments_of_one_run_do_not_replace_each_other(tmp_path: Path, kind: str) -> None:
    recorded(tmp_path, 2, uid="earlier")
    options = {"context": "fork"} if kind == "AsyncVectorEnv" else {}
    envs = getattr(gymnasium.vector, kind)([Make(tmp_path, on_exist="replace")] * COUNT, **options)
    step_all(envs, tmp_path)
    assert "earlier" not in open_trace(tmp_path).writers


@pytest.mark.parametrize("kind", ["SyncVectorEnv", "AsyncVectorEnv"])
def test_vector_environments_do_not_join_the_trace_of_an_earlier_run(tmp_path: Path, kind: str) -> None:
    recorded(tmp_path, 2)
    with pytest.raises(TraceExists):
        getattr(gymnasium.vector, kind)([Make(tmp_path)] * COUNT)


def test_an_environment_that_was_only_reset_is_still_joined(tmp_path: Path) -> None:
    first = Make(tmp_path)()
    first.reset(seed=1)
    second = Make(tmp_path)()
    for env in (first, second):
        play(env, 1)
        env.close()
    assert len(open_trace(tmp_path).writers) == 2


def test_a_recording_of_this_process_that_has_steps_is_not_joined(tmp_path: Path) -> None:
    env = Make(tmp_path)()
    env.reset()
    env.step(0)
    with pytest.raises(TraceExists, match="already holds a trace"):
        Make(tmp_path)()
    env.close()
    with pytest.raises(TraceExists, match="already holds a trace"):
        Make(tmp_path)()


def test_a_recording_closed_before_its_first_step_leaves_no_trace(tmp_path: Path) -> None:
    Make(tmp_path)().close()
    recorded(tmp_path, 2)
    assert len(open_trace(tmp_path)) == 2


def test_threads_that_begin_at_the_same_time_share_a_directory(tmp_path: Path) -> None:
    barrier, made = threading.Barrier(8), []

    def begin() -> None:
        barrier.wait()
        made.append(TraceRecordingWrapper(CountingEnv(), tmp_path))

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    for env in made:
        play(env, 1)
        env.close()
    assert len(open_trace(tmp_path)) == 8


@pytest.mark.skipif(sys.platform == "win32", reason="no locks here by which a recording is known to be alive")
@pytest.mark.parametrize("session", [False, True])
def test_a_worker_joins_a_recording_that_its_own_run_makes_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session: bool
) -> None:
    script = f"""
import os, sys
sys.path.insert(0, {HELPERS!r})
from scripted_env import CountingEnv
from gym_trace import TraceRecordingWrapper
os.{"setsid()" if session else f"setpgid(0, os.getpgid({multiprocessing.current_process().pid}))"}
env = TraceRecordingWrapper(CountingEnv(), {str(tmp_path)!r})
env.reset()
env.step(0)
print(flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", script]
    with forked_python.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(TraceExists):  # this process is not a worker
            TraceRecordingWrapper(CountingEnv(), tmp_path)
        monkeypatch.setattr(multiprocessing, "parent_process", multiprocessing.current_process)
        if session:
            with pytest.raises(TraceExists, match="other processes of this run have closed their traces"):
                TraceRecordingWrapper(CountingEnv(), tmp_path)
        else:
            recorded(tmp_path)
        other.communicate()
    assert len(open_trace(tmp_path)) == 2 - session
