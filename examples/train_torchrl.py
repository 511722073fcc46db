"""Train TorchRL's DQN (discrete actions) or CQL (Box actions) on a trace, for 200 updates.

    python examples/train_torchrl.py traces/cartpole

Needs torchrl. The observation must be one array of numbers.
"""

from __future__ import annotations

import sys

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import Bounded, ReplayBuffer
from torchrl.modules import ProbabilisticActor, QValueActor, TanhNormal, ValueOperator
from torchrl.objectives import CQLLoss, DQNLoss, LossModule, SoftUpdate

import gym_trace
from gym_trace.exchange.torchrl import TraceStorage

UPDATES = 200


def network(inputs: int, outputs: int) -> nn.Sequential:
    """Return a network with two hidden layers of 64 units."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def loss_for(trace: gym_trace.Trace) -> LossModule:
    """Return the loss of DQN for discrete actions, of CQL for Box actions."""
    space = trace.action_space
    inputs = trace.observation_space.shape[0]
    if hasattr(space, "n"):
        values = QValueActor(network(inputs, int(space.n)), in_keys=["observation"], action_space="categorical")
        return DQNLoss(values, action_space="categorical", delay_value=True)
    size = space.shape[0]
    parameters = nn.Sequential(network(inputs, 2 * size), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(parameters, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": torch.as_tensor(space.low), "high": torch.as_tensor(space.high)},
        return_log_prob=True,
    )
    values = ValueOperator(Concatenated(network(inputs + size, 1)), in_keys=["observation", "action"])
    return CQLLoss(actor, values, action_spec=Bounded(space.low, space.high, space.shape), num_random=4)


class Concatenated(nn.Module):
    """A network with several inputs."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.cat(inputs, -1))


def main(directory: str) -> None:
    torch.manual_seed(0)
    trace = gym_trace.open_trace(directory)
    storage = TraceStorage(trace.transitions(), dtype=torch.float32)
    buffer = ReplayBuffer(storage=storage, batch_size=256, collate_fn=torch.nn.Identity())
    print(f"loaded {len(buffer)} steps of {len(trace)} episodes")
    loss = loss_for(trace)
    loss.make_value_estimator(gamma=0.99)
    history: list[float] = []
    target = SoftUpdate(loss, tau=0.01)
    optimiser = torch.optim.Adam(loss.parameters(), 1e-3)
    for _ in range(UPDATES):
        losses = loss(buffer.sample())
        total = sum(value for key, value in losses.items() if key.startswith("loss"))
        optimiser.zero_grad()
        total.backward()
        optimiser.step()
        target.step()
        history.append(total.item())
    print(f"{type(loss).__name__}: {history[0]:.4f} before, {history[-1]:.4f} after {UPDATES} updates")


if __name__ == "__main__":
    main(*sys.argv[1:])
