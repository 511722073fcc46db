"""Throughput of recording with several processes, beside AsyncVectorEnv and RLlib's env runners without recording.

    python benchmarks/collect.py [--seconds 8] [--repeats 3]

Steps per second with random actions, from the first report of a running worker to the end of the run; medians of
interleaved runs. RLlib takes part if ray[rllib] is installed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
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


def sampled(make: Any, workers: int, seconds: float) -> float:
    """Return the steps per second of RLlib's env runners, one process each, without recording."""
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.tune.registry import register_env

    places = {"PYTHONPATH": str(Path(__file__).parent)}
    ray.init(num_cpus=workers + 1, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": places})
    register_env(make.__name__, lambda _: make())
    runners = PPOConfig().environment(make.__name__).env_runners(num_env_runners=workers).build_algo().env_runner_group

    def sample(runner: Any) -> int:
        return sum(len(episode) for episode in runner.sample(num_timesteps=2000, random_actions=True))

    try:
        runners.foreach_env_runner(sample, local_env_runner=False)  # the first takes longer
        begin, steps = time.perf_counter(), 0
        while time.perf_counter() < begin + seconds:
            steps += sum(runners.foreach_env_runner(sample, local_env_runner=False))
        return steps / (time.perf_counter() - begin)
    finally:
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    contestants = {
        "collect, 1 worker": partial(collected, workers=1),
        "2 workers": partial(collected, workers=2),
        "AsyncVectorEnv, 2 processes, unrecorded": partial(stepped, workers=2),
    }
    if find_spec("ray") and find_spec("ray.rllib"):
        contestants["RLlib, 2 env runners, unrecorded"] = partial(sampled, workers=2)
    print("| environment |", " | ".join(contestants), "|")
    print("|---" * (len(contestants) + 1) + "|")
    for name, make in (("50 µs per step", make_busy), ("CartPole-v1", make_cartpole)):
        figures: dict[str, list[float]] = {contestant: [] for contestant in contestants}
        for _ in range(given.repeats):
            for contestant, run in contestants.items():
                figures[contestant].append(run(make, seconds=given.seconds))
        cells = (f"{statistics.median(values):,.0f}" for values in figures.values())
        print(f"| {name} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
