"""Every step is saved exactly once, however processes fork and exit."""

import collections
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import forked_python
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from long_tests import LONG
from raising_signals import CallsAt
from runs import acted, recorder_of
from scripted_env import small_blocks

import gym_trace
from gym_trace import check_trace, open_trace
from gym_trace.format.ring.lanes.slab import LaneSlab
from gym_trace.format.ring.row_slab import RowSlab
from gym_trace.playback.episode_index import index_of

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
if child:
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
        runs += [(p, 1, 3, 1, 5)]
    assert recorded(tmp_path / "t") == expected(*runs)
    assert len(open_trace(tmp_path / "t").writers) == 8


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit()", "env.close()"])
def test_a_child_that_is_not_reset_writes_no_file(tmp_path, end):
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
    env.reset()
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
        (5, 0, "lost"), (10, 0, "closed")
    ]  # fmt: skip
    assert check_trace(tmp_path / "t").damages == []


def test_multiprocessing_workers_save_when_they_end(tmp_path):
    script = """
def work(env, branch):
    env = env or start()
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
    assert recorded(tmp_path / "t") == expected(*((0, branch, branch in (1, 2), 1, 5) for branch in range(5)))


def test_spawned_workers_save_when_they_end(tmp_path):
    (tmp_path / "script.py").write_text(
        _PREAMBLE
        + """
def work(env):
    env.unwrapped.branch = 1
    env.reset()
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
    assert recorded(tmp_path / "t") == expected((0, 0, 0, 1, 4), (0, 1, 1, 1, 5))


def test_forks_from_another_thread_lose_nothing(tmp_path):
    script = """
warnings.simplefilter("ignore", DeprecationWarning)  # forks beside threads, which this tests
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
    return sum(int(writer.fragments["steps"].sum()) for writer in index_of(open_trace(directory)).readers)


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


class Forking(gymnasium.Env[Any, Any]):
    """Observations hold the number of steps; the process forks within the third one."""

    observation_space = spaces.Box(0, 99, (1,), np.int64)
    action_space = spaces.Discrete(99)
    child, t = -1, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self.observation(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        if self.t == 3 and self.child < 0:
            self.child = os.fork()
        return self.observation(), float(self.t), False, False, {}

    def observation(self) -> Any:
        return np.full(self.observation_space.shape or (), self.t)


class ForkingWithImages(Forking):
    observation_space = spaces.Box(0, 99, (5000,), np.int64)


@pytest.mark.filterwarnings("ignore:copy")
@pytest.mark.parametrize("options", [{}, {"frame_filter": lambda step: True}, {"record_infos": True}, {"lanes": 1}])
@pytest.mark.parametrize("kind", [Forking, ForkingWithImages])
def test_a_child_forked_within_a_step_leaves_it_to_the_parent(tmp_path: Path, options: Any, kind: Any) -> None:
    inner = kind()
    lanes = options.pop("lanes", 0)
    env, _ = recorder_of(lambda: inner, tmp_path, lanes, uid="parent", **options)
    env.reset()
    try:
        for action in range(1, 6):
            env.step([action] if lanes else action)
        if not inner.child:
            acted(env, "reset", [6] if lanes else 6)
        env.close()
    finally:
        if not inner.child:
            os._exit(0)
    os.waitpid(inner.child, 0)
    found = {part.writer == "parent": part for part in open_trace(tmp_path)}
    assert found[True].actions.tolist() == found[True].rewards.tolist() == [1, 2, 3, 4, 5]
    assert found[True].observations[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert (found[False].first_step, found[False].actions.tolist()) == (0, [6])
    assert check_trace(tmp_path).damages == []


HOUSE = os.path.dirname(gym_trace.__file__)
ROOMS = tuple(os.path.join(HOUSE, *room) for room in (("recording",), ("format", "ring")))


class Counting(gymnasium.Env[Any, Any]):
    """Observations and rewards are the number of steps so far, which resets do not change."""

    observation_space = spaces.Box(0, 9999, (3,), np.float64)
    action_space = spaces.Discrete(9999)
    t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.full(3, self.t, np.float64), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.full(3, self.t, np.float64), float(self.t), False, False, {"t": self.t}


class Forks:
    """Call it to fork. The child, in which .child is 0, waits until the parent calls go_on()."""

    def __init__(self) -> None:
        self.child, self._pipe = -1, os.pipe()

    def __call__(self) -> None:
        self.child = os.fork()
        if not self.child:
            os.close(self._pipe[1])
            os.read(self._pipe[0], 1)

    def go_on(self) -> None:
        for end in self._pipe:
            os.close(end)


@pytest.mark.filterwarnings("ignore:copy")
@pytest.mark.parametrize("is_pure", [False, True])
@pytest.mark.parametrize("lanes", [0, 2])
def test_forks_at_any_line_of_a_step_change_no_byte_of_the_parents_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lanes: int, is_pure: bool
) -> None:
    for name in ("_LEAST_BYTES", "_MOST_BYTES", "_LEAST_LOG"):  # a slab is full after ten steps
        monkeypatch.setattr(f"gym_trace.recording.vector.slabs.{name}", 1500)
    if is_pure:
        monkeypatch.setattr("gym_trace.recording.single.slabs.RowSlab", RowSlab)
        monkeypatch.setattr("gym_trace.recording.vector.slabs.LaneSlab", LaneSlab)
    with small_blocks(rows=10, chunk=500, frame=1000):
        env, action = recorder_of(Counting, tmp_path, lanes, uid="parent", record_infos=True)
        acted(env, "reset", *[action + t for t in range(1, 5)])
        count, line, children = 4, 0 if LONG else 3 * lanes + is_pure, list[int]()
        while True:
            forks = Forks()
            try:
                with CallsAt(line, forks, lambda code: code.co_filename.startswith(ROOMS)):
                    env.step(action + count + 1)
                if forks.child == 0:
                    acted(env, "reset", action + 1000, action + 1000, "close")
            finally:
                if forks.child == 0:
                    os._exit(0)
            acted(env, *[action + t for t in range(count + 2, count + 5)])
            count += 4
            forks.go_on()
            if forks.child < 0:
                break
            children.append(os.waitpid(forks.child, 0)[0])
            line += 1 if LONG else 19 if lanes else 5
        env.close()
    assert check_trace(tmp_path).damages == []
    parts = open_trace(tmp_path)
    own = [part for part in parts if part.writer == "parent"]
    for part in own:
        assert part.actions.tolist() == part.rewards.tolist() == part.observations[1:, 0].tolist()
        assert part.rewards.tolist() == [info["t"] for info in part.infos] == list(range(1, count + 1))
    assert len(own) == max(lanes, 1)
    others = [part.actions.tolist() for part in parts if part.writer != "parent" and len(part)]
    assert others == [[1000, 1000]] * len(children) * max(lanes, 1)
