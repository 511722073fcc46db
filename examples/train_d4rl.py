"""Train an offline agent from D4RL's layout: python examples/train_d4rl.py TRACE

Exports the trace as a D4RL HDF5 file, builds transitions like d4rl.qlearning_dataset, and takes gradient steps of
TD3+BC, as in CORL. The trace must have continuous actions. Needs torch and gym-trace[hdf5].
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import nn

import gym_trace

_STEPS, _BATCH = 200, 256
_DISCOUNT, _TAU, _ALPHA, _NOISE, _CLIP = 0.99, 0.005, 2.5, 0.2, 0.5


def transitions(path: Path) -> dict[str, torch.Tensor]:
    """Do the same as d4rl.qlearning_dataset, vectorized: skip rows that timed out, and the last row."""
    with h5py.File(path) as file:
        names = ("observations", "actions", "next_observations", "rewards", "terminals")
        kept = ~file["timeouts"][:-1]
        return {name: torch.as_tensor(file[name][:-1][kept].astype(np.float32)) for name in names}


def network(inputs: int, outputs: int, *last: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, outputs), *last)


def main(trace: str) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "trace.hdf5"
        report = gym_trace.export(trace, path, "d4rl")
        data = transitions(path)
    told = [*map(str, report.lost)] or "nothing"
    print(f"{report.episodes} episodes, {len(data['rewards'])} transitions; lost: {told}")
    train(data)


def train(data: dict[str, torch.Tensor]) -> None:
    size, actions = data["observations"].shape[1], data["actions"].shape[1]
    limit = float(data["actions"].abs().max())
    actor, later_actor = (network(size, actions, nn.Tanh()) for _ in range(2))
    critics, later_critics = (nn.ModuleList(network(size + actions, 1) for _ in range(2)) for _ in range(2))
    later_actor.load_state_dict(actor.state_dict())
    later_critics.load_state_dict(critics.state_dict())
    optimizers: Any = [torch.optim.Adam(part.parameters(), lr=3e-4) for part in (actor, critics)]
    losses = []
    for step in range(_STEPS):
        chosen = torch.randint(len(data["rewards"]), (_BATCH,))
        seen, done, after, reward, over = (values[chosen] for values in data.values())
        with torch.no_grad():
            noise = (torch.randn_like(done) * _NOISE).clamp(-_CLIP, _CLIP)
            following = torch.cat([after, (later_actor(after) * limit + noise).clamp(-limit, limit)], 1)
            worth = torch.minimum(*(critic(following) for critic in later_critics)).squeeze(1)
            target = reward + (1 - over) * _DISCOUNT * worth
        both = torch.cat([seen, done], 1)
        loss = sum(nn.functional.mse_loss(critic(both).squeeze(1), target) for critic in critics)
        losses.append(float(loss))
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        if step % 2 == 0:
            chosen_action = actor(seen) * limit
            value = critics[0](torch.cat([seen, chosen_action], 1))
            optimizers[0].zero_grad()
            cloning = nn.functional.mse_loss(chosen_action, done)
            (cloning - _ALPHA / value.abs().mean().detach() * value.mean()).backward()
            optimizers[0].step()
            for mine, later in ((actor, later_actor), (critics, later_critics)):
                for parameter, slow in zip(mine.parameters(), later.parameters()):
                    slow.data.lerp_(parameter.data, _TAU)
    print(f"critic loss: first ten steps {np.mean(losses[:10]):.4f}, last ten {np.mean(losses[-10:]):.4f}")


if __name__ == "__main__":
    main(sys.argv[1])
