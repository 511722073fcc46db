"""Clone a policy with Minari: python examples/train_minari.py TRACE

Exports the trace as a Minari dataset, loads it with minari.load_dataset, and trains a small PyTorch network, as in
Minari's tutorial on behavioural cloning. Needs minari, torch and gym-trace[minari].
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import minari
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

import gym_trace

_STEPS, _BATCH = 300, 256


def main(trace: str) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as place:
        report = gym_trace.export(trace, Path(place) / "clone-v0", "minari")
        os.environ["MINARI_DATASETS_PATH"] = place
        dataset = minari.load_dataset("clone-v0")
        told = [*map(str, report.lost)] or "nothing"
        print(f"{dataset.total_episodes} episodes, {dataset.total_steps} steps; lost: {told}")
        clone(dataset)


def clone(dataset: minari.MinariDataset) -> None:
    space, actions = dataset.observation_space, dataset.action_space
    assert isinstance(space, (spaces.Box, spaces.Discrete)), (
        "observation space: pass a trace with Box or Discrete observations"
    )
    episodes = list(dataset.iterate_episodes())
    seen = np.concatenate([episode.observations[:-1] for episode in episodes]).astype(np.float32)
    inputs = torch.as_tensor(seen.reshape(len(seen), -1))
    done = torch.as_tensor(np.concatenate([episode.actions for episode in episodes]))
    is_discrete = isinstance(actions, spaces.Discrete)
    outputs = int(actions.n) if is_discrete else int(np.prod(actions.shape))
    wanted = (done - int(actions.start)).long() if is_discrete else done.float().reshape(len(done), -1)
    policy = nn.Sequential(nn.Linear(inputs.shape[1], 64), nn.ReLU(), nn.Linear(64, outputs))
    loss_of = nn.CrossEntropyLoss() if is_discrete else nn.MSELoss()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    with torch.no_grad():
        before = float(loss_of(policy(inputs), wanted))
    for _ in range(_STEPS):
        chosen = torch.randint(len(inputs), (min(_BATCH, len(inputs)),))
        optimizer.zero_grad()
        loss_of(policy(inputs[chosen]), wanted[chosen]).backward()
        optimizer.step()
    with torch.no_grad():
        after = float(loss_of(policy(inputs), wanted))
    print(f"loss before {before:.4f}, after {_STEPS} steps {after:.4f}")


if __name__ == "__main__":
    main(sys.argv[1])
