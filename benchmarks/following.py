"""Measure the memory of a process that follows a live trace: refresh, read the newest episode, and again.

    python benchmarks/following.py [--hour] [--only episodes frames lanes]

Another process records short episodes, frames in long episodes, or 256 lanes: 20 seconds each at ten times the pace, or
with --hour 5 million steps, 7 million frames, and 18 million steps of lanes in an hour each. Each line has the memory
of the follower beside that of a new process that opens the trace and reads the same. Ends with 1 if the follower takes
more than the cache of random access and a second table of episodes in addition. Both return freed arrays to the system
at once; by default, glibc holds some tens of MB back.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import workloads
from gymnasium import spaces

import gym_trace

LANES = 256
PACES = {"episodes": 1_400, "frames": 2_000, "lanes": 5_000}  # steps per second
LOOKS = 100  # per line
MOST = 64 + 16  # MB: the cache, and what else a process takes over time
ALLOCATOR = "MALLOC_MMAP_THRESHOLD_", str(128 << 10)
_FRESH = """
import sys
import gym_trace
sys.path.insert(0, sys.argv[1])
from following import look, resident
trace = gym_trace.open_trace(sys.argv[2])
look(trace)
print(resident())
"""


class Short(gymnasium.Env):
    """Episodes of 24 steps."""

    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.row, self.count = np.zeros(4, np.float32), 0
        return self.row, {}

    def step(self, action: Any) -> tuple[Any, ...]:
        self.count += 1
        self.row[self.count % 4] += 0.01
        return self.row, 1.0, self.count == 24, False, {}


class Frames(gymnasium.Env):
    """Frames of 84 x 84 bytes in which a block moves; episodes of 2,000 steps."""

    observation_space = spaces.Box(0, 255, (84, 84), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.frame, self.count = np.zeros((84, 84), np.uint8), 0
        return self.frame, {}

    def step(self, action: Any) -> tuple[Any, ...]:
        self.count += 1
        self.frame[self.count % 80 : self.count % 80 + 4, 40:44] += 1
        return self.frame, 1.0, self.count == 2000, False, {}


def resident() -> float:
    """Return the memory of this process in MB."""
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) / 1e3


def look(trace: Any) -> None:
    """Read the newest episode, and one from the middle."""
    for episode in (trace[-1], trace[len(trace) // 2]) if len(trace) else ():
        part = episode[-64:]
        assert len(part.observations) == len(part.rewards) + 1 == len(part.actions) + 1


def record(kind: str, directory: str, pace: float) -> None:
    """Record at this many steps per second until the process is ended."""
    if kind == "lanes":
        envs: Any = gymnasium.make_vec("CartPole-v1", num_envs=LANES, vectorization_mode="vector_entry_point")
        env: Any = gym_trace.TraceRecordingVectorWrapper(envs, directory)
        actions, once, run = [np.ones(LANES, np.int64)], LANES, workloads.run_lanes
    else:
        env = gym_trace.TraceRecordingWrapper(Frames() if kind == "frames" else Short(), directory)
        actions, once, run = [0], 1, workloads.run
    env.reset(seed=0)
    begin, done = time.monotonic(), 0
    while True:
        behind = (time.monotonic() - begin) * pace - done
        run(env, actions * (rounds := max(1, int(behind / once))))
        done += rounds * once
        if behind < once:
            time.sleep(once / pace)


def follow(kind: str, seconds: float, lines: int, pace: float, say: Callable[[str], None]) -> bool:
    """Follow a recording for some seconds. Return True if the memory stayed within the limit."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, str(Path(__file__)), "--record", kind, directory, str(pace)]
        with subprocess.Popen(command) as recorder:
            try:
                while not any(Path(directory).glob("*.gtb.part")) or not len(gym_trace.open_trace(directory)):
                    time.sleep(0.05)
                return _follow(kind, gym_trace.open_trace(directory), seconds, lines, say)
            finally:
                recorder.kill()


def _follow(kind: str, trace: Any, seconds: float, lines: int, say: Callable[[str], None]) -> bool:
    more, first = 0.0, None
    for line in range(lines):
        end = time.monotonic() + seconds / lines
        looks = 0
        while looks == 0 or time.monotonic() < end:
            trace.refresh()
            look(trace)
            looks += 1
            time.sleep(seconds / lines / LOOKS)
        command = [sys.executable, "-c", _FRESH, str(Path(__file__).parent), str(trace.directory)]
        fresh = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        first = first or fresh
        more = resident() - fresh - (fresh - first)
        steps = int(trace.episodes["steps"].sum())
        say(
            f"{kind}: {(line + 1) * seconds / lines:6,.0f} s, {steps:10,} steps, {len(trace):9,} episodes, "
            f"{looks:4} looks: follower {resident():6.1f} MB, new process {fresh:6.1f} MB"
        )
    say(f"{kind}: {'flat' if more <= MOST else 'NOT FLAT'}: {more:+.1f} MB")
    return more <= MOST


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hour", action="store_true", help="an hour each, not 20 seconds")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each is followed, without --hour")
    parser.add_argument("--lines", type=int, default=10, help="how often the memory is compared")
    parser.add_argument("--only", nargs="*", choices=tuple(PACES), default=tuple(PACES))
    parser.add_argument("--record", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if os.environ.get(ALLOCATOR[0]) != ALLOCATOR[1]:  # which is read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, ALLOCATOR[0]: ALLOCATOR[1]})
    if options.record is not None:
        kind, directory, pace = options.record
        record(kind, directory, float(pace))
    seconds, faster = (3600.0, 1) if options.hour else (options.seconds, 10)
    flat = [
        follow(kind, seconds, options.lines, PACES[kind] * faster, lambda line: print(line, flush=True))
        for kind in options.only
    ]
    return 0 if all(flat) else 1


if __name__ == "__main__":
    sys.exit(main())
