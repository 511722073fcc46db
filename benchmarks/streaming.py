"""Check that streaming takes constant memory: record gigabytes of decoded data, and stream them.

    python benchmarks/streaming.py [--steps 5000000] [--budget 256]

prints the peak MB above the open trace in each tenth of an epoch, for windows and for transitions.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

import gym_trace
from gym_trace import TraceRecordingWrapper

WIDTH, LENGTH = 1024, 500  # numbers per observation, steps per episode


class Wide(gymnasium.Env[Any, Any]):
    """Observations of 4 KiB that change little per step, so that the trace is small."""

    observation_space = spaces.Box(-np.inf, np.inf, (WIDTH,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        self.seen = (np.arange(WIDTH) * self.np_random.integers(1, 9)).astype(np.float32)
        return self.seen, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.seen = self.seen.copy()
        self.seen[self.steps] = -self.steps
        return self.seen, 1.0, False, self.steps == LENGTH, {}


def record(directory: Path, steps: int) -> None:
    env = TraceRecordingWrapper(Wide(), directory)
    env.reset(seed=0)
    for step in range(steps):
        if env.step(step % 2)[3]:
            env.reset()
    env.close()


def megabytes() -> float:
    """Return the memory of this process, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def tenths(batches: Any, before: float) -> list[int]:
    """Return the peak MB in each tenth of an epoch."""
    taken = [megabytes() - before for _ in batches]
    return [round(float(part.max())) for part in np.array_split(np.array(taken), 10)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5_000_000)
    parser.add_argument("--budget", type=int, default=256, help="memory limit of a stream, in MiB")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        record(Path(scratch, "t"), given.steps)
        trace = gym_trace.open_trace(Path(scratch, "t"))
        before = megabytes()
        print(f"{given.steps * WIDTH * 4 / 1e9:.1f} GB of decoded observations; the open trace takes {before:.0f} MB")
        stream: dict[str, Any] = {"cache": None, "cache_bytes": given.budget << 20, "replacement": False}
        for name, begun in (
            ("windows of 16, 256 at a time", lambda: trace.windows(16, batch_size=256, stride=16, **stream)),
            ("transitions, 256 at a time", lambda: trace.transitions(256, **stream)),
        ):
            begin = time.perf_counter()
            print(f"{name}: {tenths(begun(), before)} MB more; {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
