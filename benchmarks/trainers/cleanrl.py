"""PPO like CleanRL's ppo.py (Huang et al., 2022; https://github.com/vwxyzjn/cleanrl, MIT), reimplemented.

The same layers and initialization, optimizer, order of random numbers, losses and settings; it logs nothing, and resets
lanes in the step in which they end, as gymnasium did when that script was written.
"""

from __future__ import annotations

import random
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn
from torch.distributions import Categorical

from trainers import Job, Progress

PACKAGES = ("torch", "gymnasium")


def layer(inner: int, outer: int, gain: float = 2**0.5) -> nn.Linear:
    made = nn.Linear(inner, outer)
    nn.init.orthogonal_(made.weight, gain)
    nn.init.constant_(made.bias, 0.0)
    return made


def network(inner: int, outer: int, gain: float) -> nn.Sequential:
    return nn.Sequential(layer(inner, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, outer, gain))


def train(job: Job, progress: Progress) -> None:
    random.seed(job.seed)
    np.random.seed(job.seed)
    torch.manual_seed(job.seed)
    envs = SyncVectorEnv([job.make_env] * job.lanes, autoreset_mode=AutoresetMode.SAME_STEP)
    space = envs.single_action_space
    assert isinstance(space, gymnasium.spaces.Discrete)
    inner = int(np.prod(envs.single_observation_space.shape or ()))
    critic, actor = network(inner, 1, 1.0), network(inner, int(space.n), 0.01)
    parameters = [*critic.parameters(), *actor.parameters()]
    adam = torch.optim.Adam(parameters, job.learning_rate, eps=1e-5)
    steps, lanes, batch = job.rollout, job.lanes, job.rollout * job.lanes
    store: dict[str, Any] = {name: torch.zeros(steps, lanes) for name in ("logprob", "reward", "over", "value")}
    actions, seen = torch.zeros(steps, lanes), torch.zeros(steps, lanes, inner)
    first, _ = envs.reset(seed=job.seed)
    observation, over = torch.Tensor(first), torch.zeros(lanes)
    updates = job.steps // batch
    for update in range(updates):
        if job.anneal:
            adam.param_groups[0]["lr"] = (1 - update / updates) * job.learning_rate
        for step in range(steps):
            seen[step], store["over"][step] = observation, over
            with torch.no_grad():
                policy = Categorical(logits=actor(observation))
                drawn = policy.sample()
                store["value"][step] = critic(observation).flatten()
                actions[step], store["logprob"][step] = drawn, policy.log_prob(drawn)
            rows, rewards, terminated, truncated, _ = envs.step(drawn.numpy())
            store["reward"][step] = torch.tensor(rewards).view(-1)
            ends = np.logical_or(terminated, truncated)
            observation, over = torch.Tensor(rows), torch.Tensor(ends)
            progress.add(rewards, ends)
        advantages = generalized(store, critic, observation, over, job)
        learn(job, adam, parameters, (actor, critic), seen, actions, store, advantages)
        if progress.updated((update + 1) * batch):
            break
    envs.close()


@torch.no_grad()
def generalized(store: dict[str, Any], critic: nn.Module, observation: Any, over: Any, job: Job) -> Any:
    """Return advantages; truncation counts as an end."""
    after, last = critic(observation).reshape(-1), torch.zeros(job.lanes)
    goes_on = 1.0 - over
    advantages = torch.zeros(job.rollout, job.lanes)
    for step in reversed(range(job.rollout)):
        delta = store["reward"][step] + job.gamma * after * goes_on - store["value"][step]
        advantages[step] = last = delta + job.gamma * job.lam * goes_on * last
        after, goes_on = store["value"][step], 1.0 - store["over"][step]
    return advantages


def learn(
    job: Job, adam: Any, parameters: Any, networks: Any, seen: Any, actions: Any, store: Any, advantages: Any
) -> None:
    actor, critic = networks
    rows, drawn, gains = seen.flatten(0, 1), actions.flatten().long(), advantages.flatten()
    before, known = store["logprob"].flatten(), store["value"].flatten()
    targets = gains + known
    order = np.arange(len(rows))
    for _ in range(job.epochs):
        np.random.shuffle(order)
        for part in np.split(order, job.minibatches):
            policy = Categorical(logits=actor(rows[part]))
            difference = policy.log_prob(drawn[part]) - before[part]
            ratio = difference.exp()
            with torch.no_grad():
                ((ratio - 1) - difference).mean()
                ((ratio - 1.0).abs() > job.clip).float().mean().item()
            gain = gains[part]
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            clipped = torch.clamp(ratio, 1 - job.clip, 1 + job.clip)
            policy_loss = torch.max(-gain * ratio, -gain * clipped).mean()
            value = critic(rows[part]).view(-1)
            near = known[part] + torch.clamp(value - known[part], -job.clip, job.clip)
            value_loss = 0.5 * torch.max((value - targets[part]) ** 2, (near - targets[part]) ** 2).mean()
            loss = policy_loss - job.entropy * policy.entropy().mean() + 0.5 * value_loss
            adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            adam.step()
