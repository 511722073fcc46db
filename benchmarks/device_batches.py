"""Batches on a device: rows cached there, rows sent from memory, and TorchRL's LazyTensorStorage, in turns.

    python benchmarks/device_batches.py [--device cuda] [--size 256] [--length 16] [--width 64] [--seconds 5]

Windows of --length steps, and transitions, of 200,000 recorded steps of --width floats, all columns. Prints the median
of blocks in batches per second, in GB/s of all tensors, and as a ratio to TorchRL in the same turn.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from torchrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler

import gym_trace
from gym_trace.exchange.torch import BatchStream, tensors
from gym_trace.exchange.torchrl import TraceStorage

LANES, STEPS = 200, 1000
BLOCK = 20  # batches
Draw = Callable[[], Any]


def recorded(directory: str, width: int) -> gym_trace.Trace:
    """Record random rows as episodes of 100 steps."""
    box = gymnasium.spaces.Box(-np.inf, np.inf, (width,), np.float32)
    random = np.random.default_rng(0)
    rows = random.standard_normal((STEPS + 1, LANES, width), np.float32)
    ends = np.zeros((STEPS, LANES), bool)
    ends[99::100] = True
    actions, rewards = random.integers(0, 4, (STEPS, LANES)), random.standard_normal((STEPS, LANES))
    space = gymnasium.spaces.Discrete(4)
    with gym_trace.TraceWriter(directory, observation_space=box, action_space=space) as writer:
        finals = rows[1:]
        writer.rollouts(rows, actions, rewards, ends, ends & False, final_observations=finals, autoreset="SameStep")
    return gym_trace.open_trace(directory)


def contestants(trace: gym_trace.Trace, device: str, size: int, length: int) -> dict[str, dict[str, Draw]]:
    def torchrl(sampler: Any, count: int) -> Draw:
        buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=count)
        return buffer.sample

    def alone(batches: Any) -> Draw:
        return lambda: tensors(next(batches), device)

    source = TraceStorage(trace.transitions())
    storage = LazyTensorStorage(len(source), device=device)
    for start in range(0, len(source), 10_000):
        ReplayBuffer(storage=storage).extend(source[start : start + 10_000])
    slices = SliceSampler(slice_len=length, traj_key="episode", cache_values=True)
    makers: dict[str, Callable[..., Any]] = {
        "windows": lambda **options: trace.windows(length, size, **options),
        "transitions": lambda **options: trace.transitions(size, **options),
    }
    found: dict[str, dict[str, Draw]] = {}
    for kind, made in makers.items():
        found[kind] = {
            "TorchRL, LazyTensorStorage": torchrl(*((slices, size * length) if kind == "windows" else (None, size))),
            f'cache="{device}"': made(cache=device).__next__,
            f'BatchStream(device="{device}"), from memory': iter(
                BatchStream(made(cache="memory"), device=device)
            ).__next__,
            "batch by batch, from memory": alone(made(cache="memory")),
        }
    return found


def measured(draws: dict[str, Draw], device: str, seconds: float) -> dict[str, list[float]]:
    """Return wall seconds per batch, one number per block."""
    times: dict[str, list[float]] = {name: [] for name in draws}
    for draw in draws.values():
        _ = [draw() for _ in range(5)]
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, draw in draws.items():
            wait()
            begin = time.perf_counter()
            for _ in range(BLOCK):
                draw()
            wait()
            times[name].append((time.perf_counter() - begin) / BLOCK)
    return times


def bytes_of(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return batch.numel() * batch.element_size()
    return sum(map(bytes_of, batch.values())) if hasattr(batch, "values") else 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", type=int, default=256, help="batch size")
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5)
    options = parser.parse_args()
    is_gpu = options.device.startswith("cuda")
    print(torch.cuda.get_device_name() if is_gpu else f"CPU, {os.cpu_count()} cores", f"PyTorch {torch.__version__}")
    with tempfile.TemporaryDirectory() as directory:
        trace = recorded(directory, options.width)
        for kind, draws in contestants(trace, options.device, options.size, options.length).items():
            times = measured(draws, options.device, options.seconds)
            [base, *_] = times.values()
            print(f"{kind:<46} {'batches/s':>10} {'GB/s':>7} {'to TorchRL':>11}")
            for name, blocks in times.items():
                seconds = float(np.median(blocks))
                ratio = float(np.median(np.array(base) / np.array(blocks)))
                rate = bytes_of(draws[name]()) / seconds / 1e9
                print(f"{name:<46} {1 / seconds:>10,.0f} {rate:>7.2f} {ratio:>11.2f}")


if __name__ == "__main__":
    main()
