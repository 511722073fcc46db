"""Trainers as people write them: PPO in the structure of CleanRL, and DQN with a replay buffer, both with UpdateLog."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn

import gym_trace
from gym_trace.proof import Steps, UpdateLog

LANES, STEPS = 4, 64


class Agent(nn.Module):
    def __init__(self, inputs: int, actions: int):
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
            for outputs in (actions, 1)
        )

    def evaluated(self, obs: Any, action: Any = None) -> Any:
        distribution = torch.distributions.Categorical(logits=self.actor(obs))
        action = distribution.sample() if action is None else action
        return action, distribution.log_prob(action), distribution.entropy(), self.critic(obs)[:, 0]


def ppo_parts(env_id: str = "CartPole-v1", seed: int = 0) -> Any:
    """Return parts and learn, as for gym-trace proof verify --make."""
    torch.manual_seed(seed)
    env = gymnasium.make(env_id)
    agent = Agent(int(np.prod(env.observation_space.shape)), int(env.action_space.n))
    return {"agent": agent, "optimizer": torch.optim.Adam(agent.parameters(), 2.5e-4, eps=1e-5)}, ppo_learn


def ppo_learn(agent: Any, optimizer: Any, steps: Any, advantages: Any, lr: float) -> dict[str, float]:
    optimizer.param_groups[0]["lr"] = lr
    obs, actions, logprobs = (steps[name].flatten(0, 1) for name in ("observations", "actions", "logprob"))
    returns = (advantages + steps["value"]).flatten()
    order = np.arange(len(obs))
    for _ in range(4):
        np.random.shuffle(order)
        for part in np.split(order, 4):
            _, logprob, entropy, value = agent.evaluated(obs[part], actions[part].long())
            ratio = (logprob - logprobs[part]).exp()
            gain = advantages.flatten()[part]
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            policy = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
            loss = policy - 0.01 * entropy.mean() + 0.5 * (value - returns[part]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    return {"loss": loss.item()}


def ppo(directory: Path, env_id: str, updates: int, seed: int = 1, proved: bool = True, overhead: float = 0.025) -> Any:
    """Train; return the log, or the plain learner's parts."""
    np.random.seed(seed)
    parts, learn = ppo_parts(env_id, seed)
    envs: Any = SyncVectorEnv([lambda: gymnasium.make(env_id)] * LANES, autoreset_mode=AutoresetMode.SAME_STEP)
    envs = gym_trace.TraceRecordingVectorWrapper(envs, directory)
    log = UpdateLog(envs, parts, learn, overhead=overhead) if proved else None
    agent = parts["agent"]
    obs = torch.zeros(STEPS, LANES, *envs.single_observation_space.shape)
    actions, logprobs, rewards, dones, values = (torch.zeros(STEPS, LANES) for _ in range(5))
    seen, _ = envs.reset(seed=seed)
    next_done = torch.zeros(LANES)
    for update in range(updates):
        for step in range(STEPS):
            obs[step], dones[step] = torch.as_tensor(seen), next_done
            with torch.no_grad():
                action, logprob, _, value = agent.evaluated(obs[step])
            actions[step], logprobs[step], values[step] = action, logprob, value
            envs.annotate(logprob=logprob.numpy(), value=value.numpy())
            seen, reward, terminated, truncated, _ = envs.step(action.numpy())
            rewards[step], next_done = torch.as_tensor(reward), torch.as_tensor(terminated | truncated).float()
        with torch.no_grad():
            next_value, last, advantages = agent.critic(torch.as_tensor(seen))[:, 0], 0.0, torch.zeros(STEPS, LANES)
            for step in reversed(range(STEPS)):
                goes_on = 1 - (next_done if step == STEPS - 1 else dones[step + 1])
                after = next_value if step == STEPS - 1 else values[step + 1]
                last = rewards[step] + 0.99 * after * goes_on - values[step] + 0.99 * 0.95 * goes_on * last
                advantages[step] = last
        where = range(update * STEPS, (update + 1) * STEPS)
        rollout = Steps(where, observations=obs, actions=actions, logprob=logprobs, value=values)
        lr = 2.5e-4 * (1 - update / updates)
        if log is None:
            learn(**parts, steps=rollout, advantages=advantages, lr=lr)
        else:
            log.update(steps=rollout, advantages=advantages, lr=lr)
    envs.close()
    if log is not None:
        log.close()
    return log or parts


def dqn_parts(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    q, target = (nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2)) for _ in range(2))
    target.load_state_dict(q.state_dict())
    return {"q": q, "target": target, "optimizer": torch.optim.Adam(q.parameters(), 1e-3)}, dqn_learn


def dqn_learn(q: Any, target: Any, optimizer: Any, batch: Any) -> float:
    with torch.no_grad():
        best = target(batch["next_observations"]).max(1).values
        wanted = batch["rewards"] + 0.99 * best * (1 - batch["terminations"])
    loss = (wanted - q(batch["observations"]).gather(1, batch["actions"][:, None])[:, 0]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss)


def dqn(directory: Path, steps: int, seed: int = 1) -> Any:
    """A single environment, a replay buffer, a target network that is copied outside of learn."""
    generator = np.random.default_rng(seed)
    parts, learn = dqn_parts(seed)
    env = gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), directory)
    log = UpdateLog(env, parts, learn)
    names = {"observations": (4,), "next_observations": (4,), "actions": (), "rewards": (), "terminations": ()}
    buffer = {name: torch.zeros(steps, *shape) for name, shape in names.items()}
    buffer["actions"] = buffer["actions"].long()
    seen, _ = env.reset(seed=seed)
    for step in range(steps):
        with torch.no_grad():
            best = int(parts["q"](torch.as_tensor(seen)).argmax())
        action = int(generator.integers(2)) if generator.random() < 0.2 else best
        after, reward, terminated, truncated, _ = env.step(action)
        row = (torch.as_tensor(seen), torch.as_tensor(after), action, reward, terminated)
        for column, value in zip(buffer.values(), row):
            column[step] = value
        seen = env.reset()[0] if terminated or truncated else after
        if step >= 64 and step % 4 == 0:
            indices = generator.integers(step + 1, size=32)
            log.update(batch=Steps(indices, **{name: column[indices] for name, column in buffer.items()}))
        if step % 100 == 99:
            parts["target"].load_state_dict(parts["q"].state_dict())
    env.close()
    log.close()
    return log
