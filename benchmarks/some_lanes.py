"""Measure what recording some lanes of a large vector environment of PyTorch costs, against the bare environment.

    python benchmarks/some_lanes.py [--lanes 40] [--hidden 0] [--turns 40]

4,096 lanes of 64 floats on the CPU, stepped by both in turns of 32 steps. --hidden is the width of the network that
stands for the dynamics; 0: a sum and a tanh. Prints the CPU time of a step, of all threads: median and 10th percentile.
With glibc, set MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ to 1073741824; page faults of large tensors hide the
difference otherwise.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import numpy as np
import torch
from device_torch import Batched

from gym_trace import TraceRecordingVectorWrapper

_LANES, _STEPS = 4096, 32


def cpu_of_a_step(envs: Any, actions: list[Any]) -> float:
    """Return microseconds."""
    begun = time.process_time()
    for action in actions:
        envs.step(action)
    return (time.process_time() - begun) / len(actions) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lanes", type=int, default=40)
    parser.add_argument("--hidden", type=int, default=0)
    parser.add_argument("--turns", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    actions = [torch.rand(_LANES, 8) * 2 - 1 for _ in range(_STEPS)]
    network = {"layers": 1, "width": options.hidden} if options.hidden else {}
    with tempfile.TemporaryDirectory() as directory:
        recorded = TraceRecordingVectorWrapper(Batched(_LANES, **network), f"{directory}/trace", lanes=options.lanes)
        both = {"bare": Batched(_LANES, **network), "recorded": recorded}
        found: dict[str, list[float]] = {name: [] for name in both}
        for envs in both.values():
            envs.reset()
            cpu_of_a_step(envs, actions)
        for _ in range(options.turns):
            for name, envs in both.items():
                found[name].append(cpu_of_a_step(envs, actions))
        recorded.close()
    for name, costs in found.items():
        print(f"{name:9} {np.median(costs):6.0f} us a step; 10th percentile {np.percentile(costs, 10):6.0f}")
    print(f"ratio     {np.median(np.divide(found['recorded'], found['bare'])):6.3f}, median of the turns")


if __name__ == "__main__":
    main()
