"""PPO trainers: gym-trace and its peers, one module each, with a function train(job, progress)."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

BURNT_SECONDS = 50e-6


class Burning(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Adds 50 microseconds of CPU time to each step."""

    def step(self, action: Any) -> Any:
        until = time.perf_counter() + BURNT_SECONDS
        while time.perf_counter() < until:
            pass
        return self.env.step(action)


def make(name: str) -> gymnasium.Env[Any, Any]:
    """Make an environment by its id; "burning:ID" adds 50 microseconds per step, "pong" is that of pong.py."""
    if name == "pong":
        made: gymnasium.Env[Any, Any] = import_module("trainers.pong").make_env()
        return made
    name, burns = name.removeprefix("burning:"), name.startswith("burning:")
    env = gymnasium.make(name)
    return Burning(env) if burns else env


def cpu_seconds() -> float:
    """Return the CPU seconds of all processes of this session."""
    ticks, session = 0, os.getsid(0)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Job:
    """A training job, the same for all trainers: actor and critic of two layers of 64, tanh."""

    environment: str
    directory: str
    seed: int = 0
    steps: int = 500_000
    workers: int = 1
    lanes: int = 4  # in all workers
    rollout: int = 128
    minibatches: int = 4
    epochs: int = 4
    learning_rate: float = 2.5e-4
    anneal: bool = True
    gamma: float = 0.99
    lam: float = 0.95
    clip: float = 0.2
    entropy: float = 0.01
    until: float | None = None  # mean return of the last 100 episodes

    @property
    def make_env(self) -> Callable[[], gymnasium.Env[Any, Any]]:
        return partial(make, self.environment)


class Progress:
    """Returns of episodes while a job runs."""

    def __init__(self, job: Job):
        self._until, self._lanes = job.until, np.zeros(job.lanes)
        self._last: deque[float] = deque(maxlen=100)
        self.curve: list[tuple[int, float]] = []  # steps, mean return of the last 100 episodes
        self.marks: list[tuple[int, float, float]] = []  # steps, seconds, CPU seconds of all processes
        self.reached: int | None = None

    def add(self, rewards: Any, ends: Any) -> None:
        """Add a step of all lanes."""
        self._lanes += rewards
        self._last.extend(self._lanes[ends].tolist())
        self._lanes[ends] = 0.0

    def updated(self, steps: int) -> bool:
        """Record progress; return True if the job reached its target."""
        return self.record(steps, sum(self._last) / 100 if len(self._last) == 100 else None)

    def record(self, steps: int, mean: float | None, marks: bool = True) -> bool:
        if marks and (not self.marks or steps > self.marks[-1][0]):
            self.marks.append((steps, time.monotonic(), cpu_seconds()))
        if mean is not None:
            self.curve.append((steps, mean))
            if self._until is not None and self.reached is None and mean >= self._until:
                self.reached = steps
        return self.reached is not None
