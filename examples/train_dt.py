"""A decision transformer (Chen et al., 2021) on CartPole-v1, conditioned on the return to reach.

    python examples/train_dt.py [traces/cartpole-various]

Records scripted policies from good to bad (or uses an existing trace), learns from windows of 20 steps, and evaluates
with a high and a low target return. Needs torch, and train_bc.py in the same directory. Each step is one token: the
return-to-go, the observation and the previous action. 1,500 updates took 43 s of CPU time. The recorded episodes have a
mean return of 200; the model reached 374 with target 500, and 127 with target 50.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from torch import nn
from train_bc import Balancing, evaluated, options, recorded, timed

import gym_trace
from gym_trace.exchange.torch import tensors

LENGTH, WIDTH = 20, 64


def returns_to_go(trace: gym_trace.Trace) -> tuple[np.ndarray, np.ndarray]:
    """Return the returns-to-go of all steps, episodes concatenated, and the first position of each episode."""
    parts = [np.cumsum(episode.rewards[::-1])[::-1] for episode in trace.scan(columns="rewards")]
    return np.concatenate(parts), np.cumsum([0, *map(len, parts)])


class DecisionTransformer(nn.Module):
    def __init__(self, trace: gym_trace.Trace):
        super().__init__()
        norm, self.actions = trace.normalization()["observations"], int(trace.action_space.n)
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(getattr(norm, name), dtype=torch.float32))
        self.most = float(trace.episodes["return"].max())
        self.token = nn.Linear(1 + len(norm.mean), WIDTH)
        self.before = nn.Embedding(self.actions + 1, WIDTH)  # one extra index: no previous action
        self.place = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, self.actions)

    def forward(self, togo: torch.Tensor, observations: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """togo: (n, steps). observations: (n, steps, …). before: (n, steps), actions. Returns logits."""
        told = torch.cat([togo[..., None] / self.most, (observations - self.mean) / self.std], -1)
        steps = togo.shape[1]
        tokens = self.token(told) + self.before(before) + self.place(torch.arange(steps))
        mask = nn.Transformer.generate_square_subsequent_mask(steps)
        return self.head(self.layers(tokens, mask=mask, is_causal=True))


def trained(trace: gym_trace.Trace, updates: int) -> DecisionTransformer:
    togo, first = returns_to_go(trace)
    model = DecisionTransformer(trace)
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3)
    windows = trace.windows(LENGTH, 64, seed=0, strict_length=False, columns=("observations", "actions"))
    for update, batch in zip(range(updates), windows):
        steps = (first[batch["episode"]] + batch["first_step"])[:, None] + np.arange(LENGTH)
        data = tensors(batch | {"togo": togo[np.minimum(steps, len(togo) - 1)]}, dtype=torch.float32)
        actions, mask = data["actions"], data["mask"]
        # The action before a window is unknown: treat its first step like the first step of an episode.
        before = torch.cat([torch.full_like(actions[:, :1], model.actions), actions[:, :-1]], 1)
        logits = model(data["togo"], data["observations"][:, :-1], before)
        loss = nn.functional.cross_entropy(logits[mask], actions[mask])
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if (update + 1) % 500 == 0:
            print(f"update {update + 1}: loss {loss.item():.3f}")
    return model


class Player:
    """Act on the latest steps."""

    def __init__(self, model: DecisionTransformer, wanted: float):
        self.model, self.wanted = model, wanted
        self.begin()

    def begin(self) -> None:
        self.seen: deque[torch.Tensor] = deque(maxlen=LENGTH)
        self.togo: deque[float] = deque(maxlen=LENGTH)
        self.done: deque[int] = deque([self.model.actions], maxlen=LENGTH)
        self.left = self.wanted

    def __call__(self, observation: torch.Tensor) -> int:
        self.seen.append(observation)
        self.togo.append(self.left)
        self.left -= 1.0  # each step of CartPole has this reward
        before = [self.model.actions, *list(self.done)[1:]]
        logits = self.model(torch.tensor([[*self.togo]]), torch.stack([*self.seen])[None], torch.tensor([before]))
        # Sample: the most likely action is good for every target return.
        action = int(torch.multinomial(logits[0, -1].softmax(-1), 1))
        self.done.append(action)
        return action


def main() -> None:
    args = options(str(__doc__), "traces/cartpole-various", updates=1500)
    policies = [Balancing(noise) for noise in (0.1, 0.5, 0.7, 0.9)]
    trace = recorded(args.directory, "CartPole-v1", policies, episodes=50)
    model = timed(lambda: trained(trace, args.updates)).eval()
    for wanted in (500.0, 50.0):
        print(f"target return {wanted:g}:", end=" ")
        evaluated("CartPole-v1", Player(model, wanted), args.episodes)


if __name__ == "__main__":
    main()
