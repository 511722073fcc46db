"""Behavioural cloning from Parquet: python examples/train_parquet.py TRACE

The trace must have vector observations and discrete actions. Needs: pip install 'gym-trace[parquet]' polars torch
"""

import sys
import tempfile
from pathlib import Path

import polars as pl
import torch

import gym_trace

with tempfile.TemporaryDirectory() as place:
    report = gym_trace.export(sys.argv[1], Path(place) / "tables", "parquet")
    steps = pl.scan_parquet(report.path / "steps/*.parquet")
    episodes = pl.scan_parquet(report.path / "episodes/*.parquet")
    best = episodes.filter(pl.col("return") >= pl.col("return").median()).select("episode")
    rows = steps.join(best, on="episode").select("observation", "action").collect()

observations, actions = (
    torch.from_numpy(rows["observation"].to_numpy().copy()),
    torch.from_numpy(rows["action"].to_numpy().copy()),
)
print(f"{len(rows)} steps of the better half of {report.episodes} episodes, observations {tuple(observations.shape)}")

torch.manual_seed(0)
policy = torch.nn.Sequential(
    torch.nn.Linear(observations.shape[1], 64), torch.nn.Tanh(), torch.nn.Linear(64, int(actions.max()) + 1)
)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
for step in range(101):
    loss = torch.nn.functional.cross_entropy(policy(observations), actions)
    if step in (0, 100):
        print(f"loss {'before' if step == 0 else 'after'}: {loss.item():.4f}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
