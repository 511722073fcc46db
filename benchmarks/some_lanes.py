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
from gymnasium import spaces, vector

from gym_trace import TraceRecordingVectorWrapper

_LANES, _FLOATS, _ACTIONS, _STEPS = 4096, 64, 8, 32


class Batched(vector.VectorEnv[Any, Any, Any]):
    """Steps all lanes as tensors."""

    metadata = {"autoreset_mode": vector.AutoresetMode.NEXT_STEP}  # noqa: RUF012 - as VectorEnv has it

    def __init__(self, hidden: int):
        self.num_envs = _LANES
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (_FLOATS,), np.float32)
        self.single_action_space = spaces.Box(-1, 1, (_ACTIONS,), np.float32)
        self.observation_space = vector.utils.batch_space(self.single_observation_space, _LANES)
        self.action_space = vector.utils.batch_space(self.single_action_space, _LANES)
        self._force = torch.randn(_ACTIONS, _FLOATS) / 8
        self._layers = [torch.randn(_FLOATS, hidden) / 8, torch.randn(hidden, _FLOATS) / 16] if hidden else []

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._state, self._times = torch.randn(_LANES, _FLOATS), torch.zeros(_LANES, dtype=torch.int32)
        return self._state, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        state = self._state
        for layer in self._layers:
            state = torch.relu(state @ layer)
        self._state = torch.tanh(state * 0.99 + actions @ self._force)
        self._times += 1
        terminated, truncated = self._state[:, 1].abs() > 0.9999, self._times >= 500
        self._times *= ~(terminated | truncated)
        return self._state, self._state[:, 0] - 0.1 * (actions * actions).sum(1), terminated, truncated, {}


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
    actions = [torch.rand(_LANES, _ACTIONS) * 2 - 1 for _ in range(_STEPS)]
    with tempfile.TemporaryDirectory() as directory:
        recorded = TraceRecordingVectorWrapper(Batched(options.hidden), f"{directory}/trace", lanes=options.lanes)
        both = {"bare": Batched(options.hidden), "recorded": recorded}
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
