"""Measure the time that training waits for data, over a thousand steps of PyTorch.

    python benchmarks/waiting.py TRACE [--steps 1000] [--size 256] [--cache memory|disk|stream] [--workers 0]

Behavioural cloning from transitions, with a network of two hidden layers of --width, or of three convolutions for
frames, and a DataLoader of whole batches.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import gym_trace
from gym_trace.exchange.torch import BatchStream


def network(observations: Any, outputs: int, width: int) -> Any:
    if observations.ndim < 3:
        return nn.Sequential(
            nn.LazyLinear(width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
        )
    layers: list[Any] = []
    for channels, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):  # as in Mnih et al., 2015
        layers += [nn.LazyConv2d(channels, kernel, stride), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(512), nn.ReLU(), nn.Linear(512, outputs))


def prepared(observations: Any) -> Any:
    """Convert observations for networks: floats, frames with channels first."""
    if observations.ndim == 3:
        return observations[:, None].float() / 255
    return observations.permute(0, 3, 1, 2).float() / 255 if observations.ndim == 4 else observations.float()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trace")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--cache", choices=("memory", "disk", "stream"), default="memory")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--width", type=int, default=256, help="width of hidden layers")
    options = parser.parse_args()
    trace = gym_trace.open_trace(options.trace)
    cache = None if options.cache == "stream" else options.cache
    batches = trace.transitions(options.size, columns=("observations", "actions"), cache=cache)
    loader = iter(DataLoader(BatchStream(batches), batch_size=None, num_workers=options.workers))
    batch = next(loader)
    actions = batch["actions"]
    discrete = not actions.is_floating_point()
    model = network(batch["observations"], int(actions.max()) + 8 if discrete else actions[0].numel(), options.width)
    model(prepared(batch["observations"]))
    optimizer = torch.optim.Adam(model.parameters(), 3e-4)
    waited = 0.0
    begin = time.perf_counter()
    for _ in range(options.steps):
        asked = time.perf_counter()
        batch = next(loader)
        waited += time.perf_counter() - asked
        output = model(prepared(batch["observations"]))
        actions = batch["actions"]
        loss = (
            nn.functional.cross_entropy(output, actions.long())
            if discrete
            else nn.functional.mse_loss(output, actions.flatten(1).float())
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    whole = time.perf_counter() - begin
    share = waited / whole
    print(
        f"{options.steps} steps in {whole:.1f} s; waiting for data {waited:.2f} s, {share:.1%}; loss {loss.item():.3f}"
    )


if __name__ == "__main__":
    main()
