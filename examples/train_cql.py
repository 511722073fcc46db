"""Conservative Q-learning (Kumar et al., 2020) with discrete actions on CartPole-v1: better than the recorded policy.

    python examples/train_cql.py [traces/cartpole-mixed]

Records a scripted policy with mostly random actions (or uses an existing trace), learns from three-step transitions and
evaluates the result. Needs torch, and train_bc.py in the same directory. 6,000 updates took 32 s of CPU time. The
recorded episodes have a mean return of 74; the trained policy reached 500, the maximum.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from train_bc import Balancing, Network, evaluated, options, recorded, timed

import gym_trace
from gym_trace.exchange.torch import tensors

GAMMA, CONSERVATIVE, MOVED = 0.99, 0.5, 0.01  # CONSERVATIVE: penalty weight; MOVED: target update rate


def trained(trace: gym_trace.Trace, updates: int) -> Network:
    """Train action values by double Q-learning, with a penalty on actions outside the data."""
    values = Network(trace, int(trace.action_space.n), width=128)
    target = copy.deepcopy(values)
    optimiser = torch.optim.Adam(values.parameters(), 1e-3)
    for update, batch in zip(range(updates), trace.transitions(256, seed=0, n_steps=3, gamma=GAMMA)):
        data = tensors(batch, dtype=torch.float32)
        with torch.no_grad():
            chosen = values(data["next_observations"]).argmax(-1, keepdim=True)
            later = target(data["next_observations"]).gather(1, chosen)[:, 0]
            # Bootstrap after a truncation, not after a termination.
            wanted = data["rewards"] + data["discount"] * ~data["terminations"] * later
        of_all = values(data["observations"])
        of_taken = of_all.gather(1, data["actions"][:, None])[:, 0]
        surprise = nn.functional.smooth_l1_loss(of_taken, wanted)
        penalty = (of_all.logsumexp(-1) - of_taken).mean()
        optimiser.zero_grad()
        (surprise + CONSERVATIVE * penalty).backward()
        optimiser.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), values.parameters()):
                slow.lerp_(fast, MOVED)
        if (update + 1) % 1000 == 0:
            mean = of_taken.mean().item()
            print(f"update {update + 1}: TD {surprise.item():.3f}, penalty {penalty.item():.3f}, mean value {mean:.1f}")
    return values


def main() -> None:
    args = options(str(__doc__), "traces/cartpole-mixed", updates=6000)
    trace = recorded(args.directory, "CartPole-v1", [Balancing(0.6), Balancing(0.8)], episodes=100)
    values = timed(lambda: trained(trace, args.updates))
    evaluated("CartPole-v1", lambda observation: int(values(observation).argmax()), args.episodes)


if __name__ == "__main__":
    main()
