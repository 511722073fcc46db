"""Every step is saved exactly once, however processes fork and exit."""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import forked_python
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from numbered_env import NumberedEnv
from runs import acted, in_a_child, recorder_of, warned

from gym_trace import TraceRecordingWrapper, check_trace, open_trace

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

# Start of all scripts: an environment whose observations hold process, branch, episode and step.
_PREAMBLE = """
import multiprocessing, os, signal, sys, threading, time, warnings
import gymnasium, numpy as np
from gymnasium import spaces
from gym_trace import TraceRecordingWrapper

class Env(gymnasium.Env):
    observation_space = spaces.Box(-np.inf, np.inf, (4,))
    action_space = spaces.Discrete(9)
    process, branch, episode, t = 0, 0, -1, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self.observation(), {}

    def step(self, action):
        self.t += 1
        return self.observation(), float(self.t), False, False, {}

    def observation(self):
        return np.array([self.process, self.branch, self.episode, self.t], np.float32)

def start(**options):
    return TraceRecordingWrapper(Env(), sys.argv[1], on_exist="append", **options)

def steps(env, count):
    for _ in range(count):
        env.step(0)
"""


def command_of(script: str, directory: Path, *words: object) -> list[str]:
    return [sys.executable, "-W", "error", "-c", _PREAMBLE + script, str(directory), *map(str, words)]


def start_script(script: str, directory: Path, *words: object) -> subprocess.Popen[str]:
    command = command_of(script, directory, *words)
    return forked_python.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_script(script: str, directory: Path) -> str:
    ended = forked_python.run(command_of(script, directory), capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def recorded(directory: Path) -> collections.Counter[tuple[int, ...]]:
    """Count how often each step was recorded, by (process, branch, episode, t) of the observation after it."""
    report = check_trace(directory)
    assert (report.damages, report.remarks) == ([], [])
    found: collections.Counter[tuple[int, ...]] = collections.Counter()
    for episode in open_trace(directory):
        rows = episode.observations.astype(int)
        assert rows[:, 3].tolist() == list(range(episode.first_step, episode.first_step + len(episode) + 1))
        assert episode.rewards.tolist() == rows[1:, 3].tolist()
        found.update(map(tuple, rows[1:].tolist()))
    return found


def expected(*runs: tuple[int, int, int, int, int]) -> collections.Counter[tuple[int, ...]]:
    """Return the steps of runs of (process, branch, episode, first t, last t), each once."""
    return collections.Counter((p, b, e, t) for p, b, e, first, last in runs for t in range(first, last + 1))


def test_four_processes_that_fork_mid_episode_record_everything_once(tmp_path):
    script = """
number = int(sys.argv[2])
env = start()
env.unwrapped.process = number
for _ in range(2):
    env.reset()
    steps(env, 40)
env.reset()
steps(env, 3)
child = os.fork()
env.unwrapped.branch = int(not child)
steps(env, 3 + number)
env.reset()
steps(env, 5)
env.close()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    processes = [start_script(script, tmp_path / "t", number) for number in range(4)]
    for process in processes:
        assert process.communicate(timeout=60)[1] == ""
        assert process.returncode == 0
    runs = []
    for p in range(4):
        runs += [(p, 0, 0, 1, 40), (p, 0, 1, 1, 40), (p, 0, 2, 1, 6 + p), (p, 0, 3, 1, 5)]
        runs += [(p, 1, 2, 4, 6 + p), (p, 1, 3, 1, 5)]
    assert recorded(tmp_path / "t") == expected(*runs)
    assert len(open_trace(tmp_path / "t").writers) == 8


def test_a_step_during_the_preparation_of_a_fork_is_a_gap_in_the_child(tmp_path):
    script = """
env = None
os.register_at_fork(before=lambda: env is None or steps(env, 1))  # runs after the hook of the recorder
from gym_trace.recording import process_safety
env = start()
env.reset()
steps(env, 3)
if not (child := os.fork()):
    env.unwrapped.branch = 1
    steps(env, 3)
    env.close()
    os._exit(0)
os.waitpid(child, 0)
"""
    preamble, rest = _PREAMBLE.replace("from gym_trace import TraceRecordingWrapper\n", ""), script
    rest = rest.replace("env = start()", "from gym_trace import TraceRecordingWrapper\nenv = start()", 1)
    command = [sys.executable, "-W", "error", "-c", preamble + rest, str(tmp_path / "t")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    for episode in open_trace(tmp_path / "t"):
        times = episode.observations[:, 3].astype(int)
        assert (times == episode.first_step + np.arange(len(episode) + 1)).all()


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit()", "env.close()"])
def test_a_child_that_takes_no_step_writes_no_file(tmp_path, end):
    script = f"""
env = start()
env.reset()
steps(env, 5)
if not (child := os.fork()):
    {end}
else:
    os.waitpid(child, 0)
    steps(env, 5)
"""
    run_script(script, tmp_path / "t")
    assert recorded(tmp_path / "t") == expected((0, 0, 0, 1, 10))
    assert len(list((tmp_path / "t").iterdir())) == 2


def test_a_killed_child_harms_neither_the_parent_nor_its_own_steps(tmp_path):
    script = """
env = start(flush_seconds=0.02)
env.reset()
steps(env, 5)
if not (child := os.fork()):
    env.unwrapped.branch = 1
    steps(env, 5)
    env.flush()
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(child, 0)
steps(env, 5)
env.close()
"""
    run_script(script, tmp_path / "t")
    trace = open_trace(tmp_path / "t")
    assert sorted((len(episode), episode.first_step, episode.outcome) for episode in trace) == [
        (5, 5, "lost"), (10, 0, "closed")
    ]  # fmt: skip
    assert check_trace(tmp_path / "t").damages == []


def test_children_of_children_continue_recording(tmp_path):
    script = """
env = start()
env.reset()
for branch in range(4):
    env.unwrapped.branch = branch
    steps(env, 2)
    if child := os.fork():
        os.waitpid(child, 0)
        break
"""
    run_script(script, tmp_path / "t")
    assert recorded(tmp_path / "t") == expected(*((0, b, 0, 2 * b + 1, 2 * b + 2) for b in range(4)))


def test_multiprocessing_workers_save_when_they_end(tmp_path):
    script = """
def work(env, branch):
    if env is None:
        env = start()
        env.reset()
    env.unwrapped.branch = branch
    steps(env, 5)

shared = start()
shared.reset()
fork = multiprocessing.get_context("fork")
workers = [fork.Process(target=work, args=args) for args in ((shared, 1), (shared, 2), (None, 3), (None, 4))]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
    assert worker.exitcode == 0
steps(shared, 5)
"""
    run_script(script, tmp_path / "t")
    assert recorded(tmp_path / "t") == expected(*((0, branch, 0, 1, 5) for branch in range(5)))


def test_spawned_workers_save_when_they_end(tmp_path):
    (tmp_path / "script.py").write_text(
        _PREAMBLE
        + """
def work(env):
    env.unwrapped.branch = 1
    steps(env, 5)

if __name__ == "__main__":
    env = start()
    env.reset()
    steps(env, 2)
    worker = multiprocessing.get_context("spawn").Process(target=work, args=(env,))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    steps(env, 2)
"""
    )
    forked_python.run([sys.executable, tmp_path / "script.py", tmp_path / "t"], check=True, timeout=60)
    assert recorded(tmp_path / "t") == expected((0, 0, 0, 1, 4), (0, 1, 0, 3, 7))


def test_forks_from_another_thread_lose_nothing(tmp_path):
    script = """
warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: this is about them
env = start(flush_seconds=0.01)
env.reset()
done = threading.Event()

def fork_now_and_then():
    for _ in range(25):
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.002)
    done.set()

thread = threading.Thread(target=fork_now_and_then)
thread.start()
count = 0
while not done.is_set() or count < 2000:
    steps(env, 1)
    count += 1
thread.join()
env.close()
print(count)
"""
    count = int(run_script(script, tmp_path / "t"))
    assert recorded(tmp_path / "t") == expected((0, 0, 0, 1, count))


def test_the_parent_continues_flushing_after_a_fork(tmp_path):
    script = """
env = start(flush_seconds=0.02)
env.reset()
steps(env, 5)
if not (child := os.fork()):
    os._exit(0)
os.waitpid(child, 0)
steps(env, 5)
print("stepped", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", _PREAMBLE + script, str(tmp_path / "t")]
    with forked_python.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stepped\n"
        patience = time.monotonic() + 60
        while _steps_on_disk(tmp_path / "t") < 10 and time.monotonic() < patience:
            time.sleep(0.01)
        assert _steps_on_disk(tmp_path / "t") == 10
        process.kill()


def _steps_on_disk(directory: Path) -> int:
    return sum(int(writer.fragments["steps"].sum()) for writer in open_trace(directory).readers)


# -- ends of processes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('of the run')", 1),
        ("del env", 0),
        ("threading.Thread(target=time.sleep, args=(0.1,)).start()", 0),
        ("env.close(); env.close()", 0),
        ("env.loop = env; env = None", 0),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", -signal.SIGINT),
    ],
)
def test_an_orderly_end_saves_everything(tmp_path, end, code):
    script = f"""
env = start(flush_seconds=1000)
env.reset()
steps(env, 5)
{end}
"""
    process = start_script(script, tmp_path / "t")
    complaints = process.communicate(timeout=60)[1]
    assert process.returncode == code
    assert "gym_trace" not in complaints
    assert recorded(tmp_path / "t") == expected((0, 0, 0, 1, 5))
    assert [episode.outcome for episode in open_trace(tmp_path / "t")] == ["closed"]


def test_sigterm_raised_as_an_exception_saves_everything(tmp_path):
    script = """
def stop(*_):
    sys.exit(143)

signal.signal(signal.SIGTERM, stop)
env = start(flush_seconds=1000)
env.reset()
steps(env, 5)
print("stepped", flush=True)
while True:
    steps(env, 1)
"""
    process = start_script(script, tmp_path / "t")
    assert process.stdout is not None
    assert process.stdout.readline() == "stepped\n"
    process.terminate()
    complaints = process.communicate(timeout=60)[1]
    assert (process.returncode, complaints) == (143, "")
    found = recorded(tmp_path / "t")
    assert found == expected((0, 0, 0, 1, len(found)))
    assert len(found) >= 5


@pytest.mark.parametrize("options", [{}, {"frame_filter": lambda step: True}], ids=["all", "filtered"])
@pytest.mark.parametrize("size", [4, 5000])
def test_a_child_forked_within_a_step_joins_no_unrelated_steps(
    tmp_path: Path, options: dict[str, Any], size: int
) -> None:
    class Forking(gymnasium.Env[Any, Any]):
        observation_space = spaces.Box(0, 99, (size,), np.int64)
        action_space = spaces.Discrete(99)
        child, t = -1, 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return np.zeros(size, np.int64), {}

        def step(self, action: Any) -> Any:
            self.t += 1
            if self.t == 3:
                self.child = os.fork()
            return np.full(size, self.t), float(self.t), False, False, {}

    inner = Forking()
    env = TraceRecordingWrapper(inner, tmp_path, **options)
    env.reset()
    try:
        for action in range(1, 6):
            env.step(action)
        env.close()
    finally:
        if not inner.child:
            os._exit(0)
    os.waitpid(inner.child, 0)
    parent, child = sorted(open_trace(tmp_path), key=lambda episode: episode.first_step)  # ids of processes may wrap
    for episode in (parent, child):
        assert episode.observations[1:, 0].tolist() == episode.actions.tolist() == episode.rewards.tolist()
        assert (np.diff(episode.observations[:, 0]) == 1).all()
        assert episode.first_step == episode.observations[0, 0]
    assert len(parent) == 5
    assert child.actions.tolist()[-2:] == [4, 5]


@pytest.mark.parametrize("when", ["before the fork", "after it"])
def test_annotations_of_the_first_step_after_a_fork_are_kept(tmp_path: Path, when: str) -> None:
    env = acted(TraceRecordingWrapper(NumberedEnv(), tmp_path, uid="parent"), "reset", 1)
    note: list[Any] = [{"note": 5}]
    acted(env, *note * (when == "before the fork"))
    in_a_child(lambda: acted(env, *note * (when == "after it"), 2, 3, "close"))
    acted(env, 2, "close")
    trace = open_trace(tmp_path)
    notes = {trace.writer_of(index).writer == "parent": part.annotations for index, part in enumerate(trace)}
    assert notes[False]["note"].tolist() == [5, None]
    assert notes[True].get("note", np.array([])).tolist() == ([None, 5] if when == "before the fork" else [])


class Counting(gymnasium.Env[Any, Any]):
    """Observations hold the step number; the process forks within the step fork_at."""

    action_space = spaces.Discrete(99)

    def __init__(self, kind: str, fork_at: int = -1):
        self.kind, self.fork_at, self.child, self.t = kind, fork_at, -1, 0
        large = spaces.Box(0, 255, (100, 100), np.uint8)
        self.observation_space = {"text": spaces.Text(99), "large": large}.get(kind, spaces.Box(0, 99, (2,)))

    def observation(self) -> Any:
        space = self.observation_space
        return "x" * self.t if self.kind == "text" else np.full(space.shape, self.t, space.dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self.observation(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        if self.t == self.fork_at:
            self.child = os.fork()
        return self.observation(), float(self.t), False, False, {}


def told_by(observation: Any) -> int:
    return len(observation) if isinstance(observation, str) else int(observation.flat[0])


@pytest.mark.parametrize("kind", ["box", "text", "large", "lanes"])
def test_a_child_starts_with_the_observation_at_the_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    env, action = recorder_of(lambda: Counting(kind), tmp_path, 2 * (kind == "lanes"), uid="w")
    told, tell = os.pipe()
    restart = type(env._recorder).restart_in_child
    monkeypatch.setattr(type(env._recorder), "restart_in_child", lambda recorder: (os.read(told, 1), restart(recorder)))
    acted(env, "reset", *[action] * 3)
    child = os.fork()
    if not child:
        try:
            acted(env, action, "close")
        finally:
            os._exit(0)
    acted(env, *["flush", *[action] * 9] * 3)  # the slab turns and is filled beyond its old position
    os.write(tell, b".")
    assert os.waitpid(child, 0)[1] == 0
    env.close()
    os.close(told)
    os.close(tell)
    trace = open_trace(tmp_path)
    found = [e for i, e in enumerate(trace) if trace.writer_of(i).writer != "w"]
    continued = [(e.first_step, [told_by(row) for row in e.observations]) for e in found]
    assert continued == [(3, [3, 4])] * (1 + (kind == "lanes"))


@pytest.mark.parametrize("kind", ["box", "text", "large"])
def test_a_child_forked_within_a_step_can_fork_again(tmp_path: Path, kind: str) -> None:
    inner = Counting(kind, fork_at=3)
    env = TraceRecordingWrapper(inner, tmp_path)
    env.reset()
    grandchild = -1
    try:
        for step in range(5):
            env.step(1)
            if step == 2 and not inner.child:
                grandchild = os.fork()
        env.close()
        if grandchild > 0:
            os.waitpid(grandchild, 0)
    finally:
        if not inner.child:
            os._exit(0)
    os.waitpid(inner.child, 0)
    found = sorted(open_trace(tmp_path), key=lambda episode: episode.first_step)
    assert [episode.first_step for episode in found] == [0, 3, 3]
    for episode in found:
        rows = [told_by(row) for row in episode.observations]
        assert rows == list(range(episode.first_step, 6))


def test_a_fork_during_another_threads_step_continues_no_episode(tmp_path: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Slow(Counting):
        def step(self, action: Any) -> Any:
            result = super().step(action)
            if self.t == 3:
                inside.set()
                go_on.wait(60)
            return result

    env = TraceRecordingWrapper(Slow("box"), tmp_path)

    player = threading.Thread(target=acted, args=(env, "reset", 1, 1, 1, 1))
    player.start()
    assert inside.wait(60)
    warned(lambda: in_a_child(lambda: acted(env, 1, "reset", 1, "close")))  # forks beside threads are deprecated
    go_on.set()
    player.join()
    env.close()
    found = [[told_by(row) for row in e.observations] for e in open_trace(tmp_path)]
    assert sorted(found) == [[0, 1], [0, 1, 2, 3, 4]]
