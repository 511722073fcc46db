"""Behavioural cloning on CartPole-v1: record a scripted policy, clone it from the trace, evaluate the clone.

    python examples/train_bc.py [traces/cartpole-expert]

Uses an existing trace without recording. Needs torch. 2,000 updates took 7 s of CPU time and reached a return of 500,
the maximum. The scripted policy, with 10 % random actions, also reaches 500.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn

import gym_trace
from gym_trace.exchange.torch import tensors


class Balancing:
    """Push the cart towards the falling pole, sometimes at random."""

    def __init__(self, noise: float):
        self._noise = noise

    def reset(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def __call__(self, observation: np.ndarray) -> int:
        if self._random.random() < self._noise:
            return int(self._random.integers(2))
        position, velocity, angle, spin = observation.tolist()
        return int(0.1 * position + 0.3 * velocity + 3 * angle + spin > 0)


class Network(nn.Module):
    """Two hidden layers of `width` units on normalized observations."""

    def __init__(self, trace: gym_trace.Trace, outputs: int, further_inputs: int = 0, width: int = 64):
        super().__init__()
        norm = trace.normalization()["observations"]
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(getattr(norm, name), dtype=torch.float32))
        self.layers = nn.Sequential(
            nn.Linear(len(norm.mean) + further_inputs, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, outputs),
        )

    def forward(self, observations: torch.Tensor, *further: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat([(observations - self.mean) / self.std, *further], -1))


def options(description: str, directory: str, updates: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=Path(directory))
    parser.add_argument("--updates", type=int, default=updates)
    parser.add_argument("--episodes", type=int, default=20, help="evaluation episodes")
    return parser.parse_args()


def recorded(directory: Path, name: str, policies: list[Any], episodes: int) -> gym_trace.Trace:
    """Return the trace in a directory; record `episodes` episodes of each policy if it does not exist."""
    if not directory.exists():
        env = gym_trace.TraceRecordingWrapper(gymnasium.make(name), directory)
        for number, policy in enumerate(policies):
            gym_trace.record_episodes(env, policy=policy, episodes=episodes, seed=1000 * number)
        env.close()
    trace = gym_trace.open_trace(directory)
    print(trace)
    return trace


@torch.no_grad()
def evaluated(name: str, act: Callable[[torch.Tensor], Any], episodes: int) -> None:
    """Print the returns of new episodes, which are not recorded. act: from an observation (n,) to an action."""
    env, returns = gymnasium.make(name), np.zeros(episodes)
    for episode in range(episodes):
        observation, _ = env.reset(seed=1_000_000 + episode)
        getattr(act, "begin", lambda: None)()
        done = False
        while not done:
            observation, reward, terminated, truncated, _ = env.step(act(torch.as_tensor(observation)))
            returns[episode] += float(reward)
            done = terminated or truncated
    print(
        f"learned: return {returns.mean():.1f} (from {returns.min():.1f} to {returns.max():.1f}), {episodes} episodes"
    )


def timed(train: Callable[[], Any]) -> Any:
    """Return the result of train(); print its duration."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    begin, computing = time.perf_counter(), time.process_time()
    result = train()
    print(f"trained for {time.perf_counter() - begin:.1f} s, {time.process_time() - computing:.1f} s of CPU time")
    return result


def trained(trace: gym_trace.Trace, updates: int) -> Network:
    """Train a policy that outputs logits of the actions."""
    policy = Network(trace, int(trace.action_space.n))
    optimiser = torch.optim.Adam(policy.parameters(), 1e-3)
    batches = trace.transitions(256, seed=0, columns=("observations", "actions"))
    for update in range(updates):
        batch = tensors(next(batches))
        loss = nn.functional.cross_entropy(policy(batch["observations"]), batch["actions"])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if (update + 1) % 500 == 0:
            print(f"update {update + 1}: loss {loss.item():.3f}")
    return policy


def main() -> None:
    args = options(str(__doc__), "traces/cartpole-expert", updates=2000)
    trace = recorded(args.directory, "CartPole-v1", [Balancing(noise=0.1)], episodes=20)
    policy = timed(lambda: trained(trace, args.updates))
    evaluated("CartPole-v1", lambda observation: int(policy(observation).argmax()), args.episodes)


if __name__ == "__main__":
    main()
