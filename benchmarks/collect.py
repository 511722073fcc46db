"""Throughput of recording with several processes, beside AsyncVectorEnv without recording.

    python benchmarks/collect.py [--seconds 8] [--repeats 3]

Steps per second, from the first report of a running worker to the end of the run; medians of interleaved runs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv

import gym_trace


class Busy(gymnasium.Env):
    """Takes `micros` µs of CPU time per step."""

    observation_space = gymnasium.spaces.Box(-1, 1, (8,), np.float32)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, micros: float = 50.0):
        self.micros = micros

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = 200
        return self.np_random.random(8, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        until = time.perf_counter() + self.micros * 1e-6
        self.left -= 1
        observation = self.np_random.random(8, np.float32)
        while time.perf_counter() < until:
            pass
        return observation, 1.0, self.left == 0, False, {}


def make_busy() -> gymnasium.Env:
    return Busy()


def make_cartpole() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1")


def collected(make: Any, workers: int, seconds: float) -> float:
    """Return the steps per second of a recorded run after the workers have started."""
    marks: list[tuple[float, int]] = []

    def look(progress: Any) -> bool:
        if progress.steps:
            marks.append((progress.seconds, progress.steps))
        return bool(marks) and progress.seconds - marks[0][0] >= seconds

    with tempfile.TemporaryDirectory() as folder:
        gym_trace.collect(
            make, directory=folder + "/t", seconds=10 * seconds, workers=workers, seed=0, on_progress=look
        )
    (begin, before), (end, after) = marks[0], marks[-2]
    return (after - before) / (end - begin)


def stepped(make: Any, workers: int, seconds: float) -> float:
    """Return the steps per second of AsyncVectorEnv without recording."""
    envs = AsyncVectorEnv([make] * workers)
    envs.reset(seed=0)
    actions = envs.action_space.sample()
    begin, steps = time.perf_counter(), 0
    while time.perf_counter() < begin + seconds:
        envs.step(actions)
        steps += workers
    taken = time.perf_counter() - begin
    envs.close()
    return steps / taken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    print("| environment | collect, 1 worker | 2 workers | gain | AsyncVectorEnv, 2 processes, unrecorded | ratio |")
    print("|---|---|---|---|---|---|")
    for name, make in (("50 µs per step", make_busy), ("CartPole-v1", make_cartpole)):
        figures: dict[str, list[float]] = {"one": [], "two": [], "async": []}
        for _ in range(given.repeats):
            figures["one"].append(collected(make, 1, given.seconds))
            figures["two"].append(collected(make, 2, given.seconds))
            figures["async"].append(stepped(make, 2, given.seconds))
        one, two, other = (statistics.median(values) for values in figures.values())
        print(f"| {name} | {one:,.0f} | {two:,.0f} | {two / one:.2f} | {other:,.0f} | {two / other:.2f} |", flush=True)


if __name__ == "__main__":
    main()
