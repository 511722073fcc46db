"""What recording costs and how fast playback is, side by side with the unwrapped loop in one run.

    python benchmarks/core.py [--pairs 7] [--only cartpole,pong]

Each figure of the recording table is the median over pairs of runs, unwrapped and wrapped in turn, with the same seed
and actions. The time to close the trace counts, and so does what the encoder thread takes from the loop.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import gymnasium
import numpy as np

import gym_trace

CASES = {
    "cartpole": ("CartPole-v1", 500_000),
    "halfcheetah": ("HalfCheetah-v5", 60_000),
    "pong": ("ALE/Pong-v5", 20_000),
}


def make(env_id: str) -> gymnasium.Env:
    if env_id.startswith("ALE/"):
        import ale_py

        gymnasium.register_envs(ale_py)
    return gymnasium.make(env_id)


def actions_for(env: gymnasium.Env, count: int) -> list:
    env.action_space.seed(0)
    return [env.action_space.sample() for _ in range(count)]


def run(env: gymnasium.Env, actions: list) -> tuple[float, float]:
    """Seconds of wall clock and of CPU for stepping through actions and closing."""
    wall, cpu = time.perf_counter(), time.process_time()
    env.reset(seed=0)
    for action in actions:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
    env.close()
    return time.perf_counter() - wall, time.process_time() - cpu


def recording(env_id: str, steps: int, pairs: int, directory: Path) -> tuple[list[str], Path]:
    actions = actions_for(make(env_id), steps)
    run(make(env_id), actions[: steps // 10])
    plain, added, added_cpu, trace = [], [], [], directory
    for number in range(pairs):
        base = run(make(env_id), actions)
        trace = directory / str(number)
        wrapped = run(gym_trace.TraceRecordingWrapper(make(env_id), trace), actions)
        plain.append(base[0])
        added.append(wrapped[0] - base[0])
        added_cpu.append(wrapped[1] - base[1])
        if number:
            shutil.rmtree(directory / str(number - 1))
    size = sum(file.stat().st_size for file in trace.iterdir())
    per_step = 1e6 / steps
    base_us = statistics.median(plain) * per_step
    cost = statistics.median(added) * per_step
    cells = [
        env_id,
        f"{base_us:.2f}",
        f"{cost:.2f}",
        f"{100 * cost / base_us:.1f} %",
        f"{statistics.median(added_cpu) * per_step:.2f}",
        f"{size / steps:.1f}",
    ]
    return cells, trace


def playback(trace: Path, repeats: int) -> list[str]:
    steps = decoded = 0

    def count(observations: np.ndarray, actions: np.ndarray, rewards: np.ndarray) -> None:
        nonlocal steps, decoded
        steps += len(rewards)
        decoded += observations.nbytes

    best = []
    for _ in range(repeats):
        steps = decoded = 0
        begin = time.perf_counter()
        gym_trace.scan_recorded_traces(trace, count)
        best.append(time.perf_counter() - begin)
    seconds = statistics.median(best)
    opened = gym_trace.open_trace(trace)
    picks = np.random.default_rng(0).integers(0, len(opened), 100).tolist()
    times = []
    for pick in picks:
        begin = time.perf_counter()
        _ = opened[pick].observations
        times.append(time.perf_counter() - begin)
    p50 = 1e3 * statistics.median(times)
    return [f"{steps / seconds / 1e6:.2f}", f"{decoded / seconds / 1e9:.2f}", f"{p50:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", default=",".join(CASES))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    versions = f"Python {platform.python_version()}, NumPy {np.__version__}, Gymnasium {gymnasium.__version__}"
    print(f"gym-trace {gym_trace.__version__}, {versions}, {platform.machine()}\n")
    print("| environment | loop, µs a step | added, µs | added | added CPU, µs | bytes a step "
          "| playback, million steps/s | observations decoded, GB/s | random episode, ms |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for name in arguments.only.split(","):
        env_id, steps = CASES[name]
        with tempfile.TemporaryDirectory() as directory:
            cells, trace = recording(env_id, steps, arguments.pairs, Path(directory))
            print("| " + " | ".join(cells + playback(trace, 5)) + " |", flush=True)


if __name__ == "__main__":
    main()
