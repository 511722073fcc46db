"""Train Stable-Baselines3's DQN or SAC on a trace: python examples/train_sb3.py TRACE [STEPS]

Needs gym-trace[sb3]. Prints the size of the dataset, and the loss before and after. It collects no new steps.
"""

from __future__ import annotations

import sys

import gymnasium
import numpy as np
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.logger import configure
from stable_baselines3.common.utils import polyak_update

import gym_trace

AT_A_TIME = 20  # gradient steps per call of train()


def train(trace: str, steps: int = 60) -> tuple[float, float]:
    """Return the mean (critic) loss of the first and of the last steps."""
    recorded = gym_trace.open_trace(trace)
    env, steps_recorded = recorded.make_env(), int(recorded.episodes["steps"].sum())
    is_discrete = isinstance(env.action_space, gymnasium.spaces.Discrete)
    policy = "MultiInputPolicy" if isinstance(env.observation_space, gymnasium.spaces.Dict) else "MlpPolicy"
    model = (DQN if is_discrete else SAC)(policy, env, buffer_size=steps_recorded, seed=0, device="cpu")
    model.set_logger(configure(None, []))  # learn() would do this
    buffer = gym_trace.adapters.sb3.replay_buffer(recorded, model)
    print(f"{len(recorded)} episodes, {buffer.size()} transitions, of which {int(buffer.timeouts.sum())} timed out")
    losses = []
    for _ in range(max(2, steps // AT_A_TIME)):
        model.train(gradient_steps=AT_A_TIME, batch_size=64)
        if is_discrete:  # DQN does this while collecting, SAC in train()
            polyak_update(model.q_net.parameters(), model.q_net_target.parameters(), 1.0)
        losses.append(model.logger.name_to_value["train/loss" if is_discrete else "train/critic_loss"])
    env.close()
    return float(np.mean(losses[:1])), float(np.mean(losses[-1:]))


if __name__ == "__main__":
    before, after = train(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 60)
    print(f"loss {before:.4g} -> {after:.4g}")
