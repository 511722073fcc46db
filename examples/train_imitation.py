"""Clone the recorded policy with imitation's BC: python examples/train_imitation.py TRACE [BATCHES]

Needs imitation. Prints the size of the dataset, and the loss before and after.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from imitation.algorithms import bc
from imitation.data import rollout
from imitation.util import logger as imitation_logger

import gym_trace


def train(trace: str, batches: int = 200) -> tuple[float, float]:
    """Return the negative log probability of the recorded actions, before and after."""
    torch.manual_seed(0)
    env = gym_trace.open_trace(trace).make_env()
    trajectories = gym_trace.adapters.imitation.trajectories(trace)
    transitions = rollout.flatten_trajectories(trajectories)
    print(f"{len(trajectories)} episodes, {len(transitions)} transitions of {transitions.obs.shape[1:]}")
    trainer = bc.BC(
        observation_space=env.observation_space,
        action_space=env.action_space,
        demonstrations=transitions,
        rng=np.random.default_rng(0),
        device="cpu",
        custom_logger=imitation_logger.configure(None, []),
    )
    env.close()

    def loss() -> float:
        with torch.no_grad():
            some = torch.as_tensor(transitions.obs[:1000]), torch.as_tensor(transitions.acts[:1000])
            return float(trainer.loss_calculator(trainer.policy, *some).neglogp)

    before = loss()
    trainer.train(n_batches=batches, progress_bar=False, log_interval=10 * batches)
    return before, loss()


if __name__ == "__main__":
    before, after = train(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 200)
    print(f"negative log probability {before:.4g} -> {after:.4g}")
