"""Recordings that die, each in its own process, forked from one that has imported everything.

python crashes.py reads JSON lines, each a list of the fields of a Crash, and writes one line of wait statuses for each.
"""

import contextlib
import dataclasses
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import crash_victims
import gymnasium
import numpy as np
from crash_victims import CallLog, DyingEnv, canonical
from forked_python import HELPERS

MEMORY = Path("/sys/fs/cgroup/memory")  # cgroups version 1
MEMORY_2 = Path("/sys/fs/cgroup")
FAILED = 99 << 8  # status of a victim that failed instead of dying
_NEAR = "/gym_trace/(recording|format/ring/(row_slab|log|memory|lanes/(slab|writer)))"


@dataclasses.dataclass
class Crash:
    """A recording and its end.

    Attributes:
        kind: one of crash_victims.KINDS, lanes-MODE, or robot, which is a loop with a TraceWriter.
        death, where, at: a key of crash_victims.DEATHS, the method that dies, and at which call.
        seconds: time from the first step to a kill from outside.
        line: number of recorder lines executed from the first step to a kill.
        near: count only lines that fill and turn slabs, not those that encode and write them.
        rows: rows of a slab, if slabs must be small.
        cgroup: memory cgroup of the process.
        fork: step of the first episode at which it forks; both processes die.
        alarms: mean seconds between SIGALRM exceptions; each is caught, and the environment is reset.
        most_bytes: file size limit, as on a full disk; the process dies some steps after the error.
        is_short: True if no file descriptors are free at the first reset.
    """

    kind: str
    directory: str
    diary: str
    death: str = "kill"
    where: str = ""
    at: int = 0
    seconds: float | None = None
    line: int | None = None
    near: bool = False
    rows: int | None = None
    cgroup: str | None = None
    fork: int | None = None
    alarms: float | None = None
    most_bytes: int | None = None
    is_short: bool = False
    seed: int = 0
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


# -- the victim -------------------------------------------------------------------------------------------------------


class Victim:
    """An endless recorded run with a diary."""

    def __init__(self, crash: Crash):
        self._crash, self._diary = crash, CallLog(crash.diary)
        self._random = np.random.default_rng(crash.seed)
        self._begun = False

    def live(self) -> None:
        from gym_trace import TraceRecordingWrapper
        from gym_trace.errors import RecordingError

        crash = self._crash
        if crash.kind.startswith("lanes-"):
            self._live_in_lanes(crash.kind.removeprefix("lanes-"))
        if crash.kind == "robot":
            self._live_as_a_robot()
        self._inner = DyingEnv(crash_victims.make_env(crash.kind), self._diary, crash.death, crash.where, crash.at)
        things = crash.kind == "things"
        env = TraceRecordingWrapper(self._inner, crash.directory, record_infos=things, **crash.options)
        env.action_space.seed(crash.seed)
        signal.signal(signal.SIGALRM, _time_out)
        try:
            for episode in count():
                with contextlib.suppress(TimeoutError), self._alarm():
                    self._episode(env, episode, things)
        except RecordingError:
            if crash.most_bytes is None:
                raise
        self._inner.diary = CallLog(os.devnull)  # later steps are not recorded
        env.reset()
        for _ in range(3):
            env.step(env.action_space.sample())
        os.kill(os.getpid(), signal.SIGKILL)

    @contextlib.contextmanager
    def _alarm(self) -> Iterator[None]:
        """Raise SIGALRM at a random time inside the block, if enabled, and note it."""
        if self._crash.alarms is not None:
            signal.setitimer(signal.ITIMER_REAL, self._random.exponential(self._crash.alarms) + 1e-4)
        try:
            yield
            signal.setitimer(signal.ITIMER_REAL, 0)
        except TimeoutError:
            self._diary.note("alarm")
            raise

    def _episode(self, env: Any, episode: int, things: bool) -> None:
        crash = self._crash
        self._diary.note("reset", episode)
        with _no_descriptors() if crash.is_short and not episode else contextlib.nullcontext():
            observation, _ = env.reset(seed=episode)
        self._diary.note("began", canonical(observation))
        if crash.is_short and not episode:
            env.flush()
        over = False
        for step in count():
            if over:
                break
            if step == crash.fork and not episode and self._is_forked():
                break
            if crash.where == "render" and step % 5 == 4:
                env.render()
            observation, over = self._step(env, things and step % 4 != 0)

    def _step(self, env: Any, annotated: bool) -> tuple[Any, bool]:
        action, notes = env.action_space.sample(), None
        if annotated:
            notes = {"logprob": self._random.normal(), "why": "w" * int(self._random.integers(9))}
            env.annotate(**notes)
        self._diary.note("ask", canonical(action), None if notes is None else canonical(notes))
        result = observation, _, terminated, truncated, _ = env.step(action)
        self._diary.note("told", *map(canonical, result))
        self._on_step()
        return observation, terminated or truncated

    def _on_step(self) -> None:
        """After the first step, arm the configured end."""
        if not self._begun and self._crash.line is not None:
            _kill_at_line(self._crash.line, self._crash.near)
        if not self._begun and self._crash.most_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._crash.most_bytes, self._crash.most_bytes))
        self._begun = True

    def _is_forked(self) -> bool:
        """Fork; return True in the child, which begins an episode of its own."""
        if os.fork():
            return False
        self._diary = self._inner.diary = CallLog(self._crash.diary + ".child")
        if self._crash.line is not None:
            _kill_at_line(self._crash.line, self._crash.near)
        return True

    def _live_as_a_robot(self) -> None:
        """Tell a TraceWriter of arms that move at random. Every third action is said by step() alone."""
        from gym_trace import TraceWriter

        crash, random, left = self._crash, self._random, count(1)
        writer = TraceWriter(crash.directory, record_infos=True, **crash.options)

        def sensed(time: float) -> dict[str, Any]:
            return {"joints": random.normal(size=7), "camera": random.integers(0, 9, (8, 8), np.uint8), "time": time}

        for episode in count():
            observation = sensed(0.0)
            self._diary.note("reset", episode)
            writer.begin(observation, {"began": True}, seed=episode)
            self._diary.note("began", canonical(observation))
            length = int(random.integers(1, 60))
            for step in range(length):
                action = {"force": random.normal(size=3).astype(np.float32), "grip": bool(step % 2)}
                notes = {"value": float(random.normal())} if step % 4 else {}
                acts = step % 3 != 2
                self._diary.note("ask", canonical(action), canonical(notes) if notes else None)
                if acts:
                    writer.act(action)
                    self._diary.note("inside")
                    if crash.where == "step" and next(left) == crash.at:
                        crash_victims.DEATHS[crash.death]()
                observation, info = sensed(step / 10 + 0.1), {"step": step}
                told = [observation, step / 8, step == length - 1 and episode % 2 == 0, step == length - 1, info]
                writer.step(action, *told, **notes)
                self._diary.note("told", *map(canonical, told))
                if not acts:
                    self._diary.note("inside")
                self._on_step()

    def _live_in_lanes(self, mode: str) -> None:
        from gymnasium import vector

        from gym_trace import TraceRecordingVectorWrapper

        makers = [lambda lane=lane: crash_victims.LaneEnv(lane) for lane in range(crash_victims.LANES)]
        inner: Any = vector.SyncVectorEnv(makers, autoreset_mode=vector.AutoresetMode(mode))
        crash, original, left = self._crash, inner.step, count(1)

        def step(actions: Any) -> Any:
            self._diary.note("inside")
            if crash.where == "step" and next(left) == crash.at:
                crash_victims.DEATHS[crash.death]()
            return original(actions)

        inner.step = step
        env = TraceRecordingVectorWrapper(inner, crash.directory, **crash.options)
        env.action_space.seed(crash.seed)
        self._diary.note("reset", 1)
        with _no_descriptors() if crash.is_short else contextlib.nullcontext():
            observations, _ = env.reset(seed=1)
        self._diary.note("began", canonical(observations))
        if crash.is_short:
            env.flush()
        while True:
            actions = env.action_space.sample()
            self._diary.note("ask", canonical(actions), None)
            *told, infos = env.step(actions)
            last = infos.get("final_obs")
            rows = None if last is None else [canonical(row) for row in last]
            self._diary.note("lanes", *map(canonical, told), rows)
            self._on_step()
            over = told[2] | told[3]
            if mode == "Disabled" and over.any():
                self._diary.note("mask", np.flatnonzero(over).tolist())
                observations, _ = env.reset(options={"reset_mask": over})
                self._diary.note("masked", canonical(observations))


def _time_out(*_: object) -> None:
    raise TimeoutError


@contextlib.contextmanager
def _no_descriptors() -> Iterator[None]:
    """Prevent the process from opening files inside the block."""
    held = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for fd in held:
            os.close(fd)


def _kill_at_line(line: int, near: bool) -> None:
    """Die after n executed lines of the recorder, in any thread."""
    left = count(1)
    wanted = re.compile(_NEAR if near else "/gym_trace/")

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and next(left) >= line:
            os.kill(os.getpid(), signal.SIGKILL)
        return on_line

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        return on_line if wanted.search(frame.f_code.co_filename) else None

    threading.settrace(on_call)
    sys.settrace(on_call)
    frame: FrameType | None = sys._getframe()
    while frame is not None:  # frames entered earlier
        if wanted.search(frame.f_code.co_filename):
            frame.f_trace = on_line
        frame = frame.f_back


def small_slabs(rows: int) -> contextlib.ExitStack:
    """Limit slabs to this many rows."""
    from scripted_env import small_blocks

    stack = contextlib.ExitStack()
    stack.enter_context(small_blocks(rows))
    stack.enter_context(
        mock.patch.multiple(
            "gym_trace.recording.vector.slabs", _ROWS=rows, _LEAST_BYTES=1, _LEAST_LOG=4096, create=False
        )
    )
    return stack


def _die(crash: Crash) -> None:
    """Run a victim in this process; never returns."""
    try:
        os.setpgid(0, 0)
        if crash.cgroup is not None:
            Path(crash.cgroup, "cgroup.procs").write_text(str(os.getpid()))
        elif crash.death == "memory":
            resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
        with contextlib.nullcontext() if crash.rows is None else small_slabs(crash.rows):
            Victim(crash).live()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(99)


# -- the parent of victims --------------------------------------------------------------------------------------------


def run_crashes(crashes: list[Crash]) -> list[int]:
    """Fork victims that run concurrently, wait for them and their children, and return their wait statuses."""
    pids = [_forked(crash) for crash in crashes]
    return [_wait_for(crash, pid) for crash, pid in zip(crashes, pids)]


def _forked(crash: Crash) -> int:
    pid = os.fork()
    if not pid:
        _die(crash)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    return pid


def _wait_for(crash: Crash, pid: int) -> int:
    if crash.seconds is not None:
        _wait_for_a_step(crash, pid)
        time.sleep(crash.seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    patience = threading.Timer(100, os.killpg, (pid, signal.SIGABRT))
    patience.start()
    _, status = os.waitpid(pid, 0)
    patience.cancel()
    if crash.fork is not None:  # an orphaned child may live a little longer
        time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        while _lives(pid):
            time.sleep(0.002)
    return status


def _lives(group: int) -> bool:
    """Return True if a process of a group has open files."""
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, its_group, *_ = (place / "stat").read_text().rpartition(")")[2].split()
            if int(its_group) == group and (state != "Z" or len(os.listdir(place / "task")) > 1):
                return True
    return False


def _wait_for_a_step(crash: Crash, pid: int) -> None:
    while not any(event[0] in ("told", "lanes") for event in crash_victims.logged_calls(Path(crash.diary))):
        time.sleep(0.002)
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return


def main() -> None:
    import gym_trace
    from gym_trace.recording.core import CORE

    with tempfile.TemporaryDirectory() as place:  # warm up: work done once per process, such as finding versions
        env = gym_trace.TraceRecordingWrapper(crash_victims.make_env("cartpole"), Path(place, "t"))
        env.reset()
        env.close()
    print(CORE, flush=True)
    for line in sys.stdin:
        crashes = [Crash(**fields) for fields in json.loads(line)]
        if any(crash.kind == "cheetah" for crash in crashes):
            with contextlib.suppress(ImportError, gymnasium.error.Error):
                crash_victims.make_env("cheetah")  # import its packages once
        print(json.dumps(run_crashes(crashes)), flush=True)


class CrashServer:
    """A process that makes crashes. pure: without the C core.

    Attributes:
        core: "compiled" or "pure".
    """

    def __init__(self, pure: bool):
        path = os.pathsep.join([HELPERS, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "GYM_TRACE_PURE": str(int(pure)), "PYTHONPATH": path}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.core = self._said()

    def _said(self) -> str:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], 120)
        return self._process.stdout.readline().strip() if ready else ""

    def __call__(self, *crashes: Crash) -> list[int]:
        """Run all crashes concurrently; return their wait statuses."""
        assert self._process.stdin is not None
        print(json.dumps([dataclasses.asdict(crash) for crash in crashes]), file=self._process.stdin, flush=True)
        statuses: list[int] = json.loads(self._said())
        return statuses

    def close(self) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()


@contextlib.contextmanager
def small_memory(megabytes: int) -> Iterator[str | None]:
    """Make a cgroup with a memory limit, whose members the kernel kills; None if impossible."""
    for root, limit in ((MEMORY, "memory.limit_in_bytes"), (MEMORY_2, "memory.max")):
        place = root / f"gym-trace-crash-{os.getpid()}"
        try:
            place.mkdir()
            if not (place / limit).exists():
                place.rmdir()
                continue
            (place / limit).write_text(str(megabytes << 20))
        except OSError:
            continue
        try:
            yield str(place)
        finally:
            place.rmdir()
        return
    yield None


if __name__ == "__main__":
    main()
