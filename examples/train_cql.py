"""Conservative Q-learning (Kumar et al., 2020), for discrete actions, on CartPole-v1: better than what was recorded.

    python examples/train_cql.py [traces/cartpole-mixed]

Records a scripted policy most of whose actions are random, unless the trace is there already; learns from three-step
transitions; and plays what was learned. Takes torch, and examples/train_bc.py beside it. 6,000 updates took 32 s of CPU
time; from episodes of a return of 74 on average they reached 500, as much as there is.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from train_bc import Balancing, Network, evaluated, options, recorded, timed

import gym_trace
from gym_trace.adapters.torch import tensors

GAMMA, CONSERVATIVE, MOVED = 0.99, 0.5, 0.01  # the weight of what is not in the data; how fast the target follows


def trained(trace: gym_trace.Trace, updates: int) -> Network:
    """What each action is worth, double Q-learning with a penalty on actions that nobody took."""
    values = Network(trace, int(trace.action_space.n), width=128)
    target = copy.deepcopy(values)
    optimiser = torch.optim.Adam(values.parameters(), 1e-3)
    for update, batch in zip(range(updates), trace.transitions(256, seed=0, n_steps=3, gamma=GAMMA)):
        data = tensors(batch, dtype=torch.float32)
        with torch.no_grad():
            chosen = values(data["next_observations"]).argmax(-1, keepdim=True)
            later = target(data["next_observations"]).gather(1, chosen)[:, 0]
            # A truncated episode goes on, as far as values are concerned; a terminated one does not.
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
