"""Implicit Q-learning (Kostrikov et al., 2022) with Box actions on Pendulum-v1: better than the recorded policy.

    python examples/train_iql.py [traces/pendulum-mixed]

Records a scripted swing-up with strong noise and random actions (or uses an existing trace), learns and evaluates the
result. Needs torch, and train_bc.py in the same directory. 6,000 updates took 57 s of CPU time. The recorded episodes
have a mean return of -578; the trained policy reached -155.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from train_bc import Network, evaluated, options, recorded, timed

import gym_trace
from gym_trace.exchange.torch import tensors

GAMMA, EXPECTILE, SHARPNESS, MOVED = 0.98, 0.8, 3.0, 0.005


class Swinging:
    """Swing the pendulum up and hold it, with noise on the torque."""

    def __init__(self, noise: float):
        self._noise = noise

    def reset(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def __call__(self, observation: np.ndarray) -> np.ndarray:
        cos, sin, speed = observation.tolist()
        if cos > 0.8:
            torque = -(12 * np.arctan2(sin, cos) + 3 * speed)
        else:
            lacking = 10 * (1 - cos) / 2 - speed * speed / 6  # approximate missing energy
            torque = 2 * np.sign(speed or 1) * np.sign(lacking)
        return np.clip([torque + self._noise * self._random.normal()], -2, 2).astype(np.float32)


def trained(trace: gym_trace.Trace, updates: int) -> Network:
    """Train a policy that imitates the best recorded actions, with values learned from recorded actions only."""
    size, scale = trace.action_space.shape[0], torch.tensor(trace.action_space.high)
    rewards = trace.normalization("rewards")["rewards"]
    policy, value = Network(trace, size), Network(trace, 1)
    both = torch.nn.ModuleList([Network(trace, 1, size) for _ in range(2)])
    target = copy.deepcopy(both)
    optimisers = [torch.optim.Adam(part.parameters(), 1e-3) for part in (policy, value, both)]
    for update, batch in zip(range(updates), trace.transitions(256, seed=0)):
        data = tensors(batch, dtype=torch.float32)
        observations, actions = data["observations"], data["actions"] / scale
        with torch.no_grad():
            known = torch.minimum(*(one(observations, actions) for one in target))[:, 0]
            later = value(data["next_observations"])[:, 0]
            gained = (data["rewards"] - float(rewards.mean)) / float(rewards.std)
            wanted = gained + GAMMA * ~data["terminations"] * later
        better = known - value(observations)[:, 0]
        weight = torch.where(better > 0, EXPECTILE, 1 - EXPECTILE)
        losses = [
            (
                (SHARPNESS * better.detach()).exp().clamp(max=100)
                * (policy(observations).tanh() - actions).square().sum(-1)
            ),
            weight * better.square(),
            sum((one(observations, actions)[:, 0] - wanted).square() for one in both),
        ]
        for optimiser, loss in zip(optimisers, losses):
            optimiser.zero_grad()
            loss.mean().backward()
            optimiser.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), both.parameters()):
                slow.lerp_(fast, MOVED)
        if (update + 1) % 1000 == 0:
            told = ", ".join(f"{name} {loss.mean().item():.3f}" for name, loss in zip(("policy", "value", "Q"), losses))
            print(f"update {update + 1}: {told}")
    return policy


def main() -> None:
    args = options(str(__doc__), "traces/pendulum-mixed", updates=6000)
    trace = recorded(args.directory, "Pendulum-v1", [Swinging(1.0), Swinging(3.0), Swinging(30.0)], episodes=60)
    policy = timed(lambda: trained(trace, args.updates))
    scale = torch.tensor(trace.action_space.high)
    evaluated("Pendulum-v1", lambda observation: (policy(observation).tanh() * scale).numpy(), args.episodes)


if __name__ == "__main__":
    main()
