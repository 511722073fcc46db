"""Train d3rlpy's CQL or DiscreteCQL on a trace: python examples/train_d3rlpy.py TRACE [STEPS]

Needs d3rlpy. Prints the size of the dataset, and the loss before and after.
"""

from __future__ import annotations

import logging
import sys

import d3rlpy
import numpy as np
import structlog

import gym_trace


def train(trace: str, steps: int = 60) -> tuple[float, float]:
    """Return the mean (critic) loss of the first and of the last tenth of the steps."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    d3rlpy.seed(0)
    dataset = gym_trace.adapters.d3rlpy.replay_buffer(trace)
    info = dataset.dataset_info
    print(f"{dataset.size()} episodes, {dataset.transition_count} transitions of {info.observation_signature.shape}")
    is_discrete = info.action_space == d3rlpy.ActionSpace.DISCRETE
    made = d3rlpy.algos.DiscreteCQLConfig if is_discrete else d3rlpy.algos.CQLConfig
    algorithm = made(batch_size=64).create(device="cpu")
    algorithm.build_with_dataset(dataset)
    key = "loss" if is_discrete else "critic_loss"
    losses = [algorithm.update(dataset.sample_transition_batch(64))[key] for _ in range(steps)]
    tenth = max(1, steps // 10)
    return float(np.mean(losses[:tenth])), float(np.mean(losses[-tenth:]))


if __name__ == "__main__":
    before, after = train(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 60)
    print(f"loss {before:.4g} -> {after:.4g}")
