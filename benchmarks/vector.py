"""What recording a vector environment costs, side by side with the unwrapped loop in one run.

    python benchmarks/vector.py [--pairs 7]

Added time is the median over pairs of runs, unwrapped and wrapped in turn, per step of one sub-environment.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces, vector

import gym_trace


class NoiseEnvs(vector.VectorEnv):
    """64 lanes of random frames, the worst that there can be for a compressor."""

    def __init__(self, count: int = 64):
        self.num_envs = count
        self.single_observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)
        self.single_action_space = spaces.Discrete(4)
        self.observation_space = spaces.Box(0, 255, (count, 84, 84, 4), np.uint8)
        self.action_space = spaces.MultiDiscrete([4] * count)
        self.random = np.random.default_rng(0)

    def observation(self) -> np.ndarray:
        return self.random.integers(0, 256, (self.num_envs, 84, 84, 4), np.uint8)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        return self.observation(), {}

    def step(self, actions: Any) -> tuple[Any, ...]:
        no = np.zeros(self.num_envs, np.bool_)
        return self.observation(), np.zeros(self.num_envs), no, no.copy(), {}


CASES = {
    "CartPole-v1 x 1,024": (
        lambda: gymnasium.make_vec("CartPole-v1", num_envs=1024, vectorization_mode="vector_entry_point"), 2000
    ),
    "CartPole-v1 x 16, SyncVectorEnv": (
        lambda: gymnasium.make_vec("CartPole-v1", num_envs=16, vectorization_mode="sync"), 5000
    ),
    "random frames 84 x 84 x 4 x 64": (NoiseEnvs, 150),
}  # fmt: skip


def run(envs: vector.VectorEnv, actions: list[np.ndarray]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    envs.reset(seed=0)
    for action in actions:
        envs.step(action)
    envs.close()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| vector environment | loop, ns a step of one lane | added, ns | added | added CPU, ns | bytes a step |")
    print("|---|---|---|---|---|---|")
    for name, (make, steps) in CASES.items():
        envs = make()
        count = envs.num_envs
        random = np.random.default_rng(0)
        actions = [random.integers(0, 2, count) for _ in range(steps)]
        run(envs, actions[: steps // 10])
        base, added, added_cpu, size = [], [], [], 0
        for _ in range(arguments.pairs):
            plain = run(make(), actions)
            directory = Path(tempfile.mkdtemp())
            wrapped = run(gym_trace.TraceRecordingVectorWrapper(make(), directory), actions)
            size = sum(file.stat().st_size for file in directory.iterdir())
            shutil.rmtree(directory)
            base.append(plain[0])
            added.append(wrapped[0] - plain[0])
            added_cpu.append(wrapped[1] - plain[1])
        unit = 1e9 / (steps * count)
        loop, cost, cpu = (statistics.median(values) * unit for values in (base, added, added_cpu))
        ratio = 100 * cost / loop
        print(
            f"| {name} | {loop:.0f} | {cost:.0f} | {ratio:.0f} % | {cpu:.0f} | {size / steps / count:.1f} |", flush=True
        )


if __name__ == "__main__":
    main()
