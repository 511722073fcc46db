"""Batches as a storage of TorchRL's ReplayBuffer.

buffer = ReplayBuffer(storage=TraceStorage(trace.transitions()), batch_size=256, collate_fn=torch.nn.Identity())
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gym_trace.data.trees import mapped
from gym_trace.errors import InvalidOption, MissingExtra
from gym_trace.exchange.torch import tensors
from gym_trace.playback.sampling.batches import Batches

try:
    import torch
    from tensordict import TensorDict
    from torchrl.data.replay_buffers.storages import Storage
except ImportError as missing:
    raise MissingExtra(f"a storage of TorchRL needs it ({missing}): pip install torchrl") from missing

__all__ = ["TraceStorage"]

_ENDS = ("terminated", "truncated")


class TraceStorage(Storage):
    """Read-only storage whose items are transitions, windows or episodes of a trace; any sampler may draw them.

    An item is a TensorDict as from TorchRL's collectors; those of windows have a dimension for steps. It has the
    observation (or the leaves of a Dict space) and action, their results under "next" (observation, reward, done,
    terminated, truncated), and all other columns of the batches.

    Examples:
        >>> import torch
        >>> from torchrl.data import ReplayBuffer
        >>> transitions = gym_trace.open_trace("traces/cartpole").transitions()
        >>> storage = gym_trace.exchange.torchrl.TraceStorage(transitions)
        >>> buffer = ReplayBuffer(storage=storage, batch_size=32, collate_fn=torch.nn.Identity())
        >>> buffer.sample()["next", "reward"].shape
        torch.Size([32, 1])
    """

    def __init__(self, batches: Batches, *, device: Any = None, dtype: Any = None):
        """device: of the tensors. dtype: of floats; None: as recorded.

        Raises InvalidOption if batches are streamed, lack a column, or have tuples.
        """
        self._batches, self._device, self._dtype = batches, device, dtype
        super().__init__(batches.items)
        wanted = {"observations", "actions", "rewards", "terminations", "truncations"}
        first = batches.take(np.arange(1))
        if missing := wanted - first.keys():
            raise InvalidOption(f"columns: TorchRL needs {', '.join(sorted(missing))} as well")
        if any(isinstance(first[name], tuple) for name in ("observations", "actions")):
            raise InvalidOption(
                "spaces of this trace have tuples, and a TensorDict cannot; use gym_trace.exchange.torch"
            )

    def __len__(self) -> int:
        return self._batches.items

    def get(self, index: Any) -> Any:
        """Return the item at an index, or the items at several. Raises IndexError."""
        if isinstance(index, tuple):
            [index] = index
        if isinstance(index, slice):
            index = range(*index.indices(len(self)))
        items = np.asarray(index.cpu() if isinstance(index, torch.Tensor) else index, np.int64)
        found = self._tensordict(self._batches.take(items.reshape(-1)))
        return found.reshape(*items.shape, *found.shape[1:]) if items.ndim else found[0]

    def _tensordict(self, arrays: Any) -> Any:
        steps = arrays["rewards"].shape[:2] if "mask" in arrays else arrays["rewards"].shape[:1]
        batch = tensors(arrays, self._device, self._dtype)
        before, after = batch.pop("observations"), batch.pop("next_observations", None)
        if after is None:  # windows have one observation more than steps
            before, after = mapped(lambda rows: rows[:, :-1], before), mapped(lambda rows: rows[:, 1:], before)
        reward = batch.pop("rewards")
        ends = [batch.pop(name).unsqueeze(-1) for name in ("terminations", "truncations")]
        flags = dict(zip(_ENDS, ends)) | {"done": ends[0] | ends[1]}
        result = _named(after) | flags | {"reward": reward.unsqueeze(-1) if reward.ndim == len(steps) else reward}
        fields = _named(before) | {name: torch.zeros_like(flag) for name, flag in flags.items()}
        fields |= {"action": batch.pop("actions"), "next": result}
        for name, values in batch.items():
            is_per_window = isinstance(values, torch.Tensor) and values.ndim < len(steps)
            fields[name] = values.unsqueeze(-1).expand(steps) if is_per_window else values
        return TensorDict(fields, steps)

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        raise InvalidOption("a recorded trace cannot be changed; record the additions")

    def _empty(self) -> None:
        raise InvalidOption("a recorded trace cannot be emptied")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: the trace holds all data."""


def _named(observations: Any) -> dict[str, Any]:
    """Return observations by key: those of a Dict space, or "observation"."""
    return observations if isinstance(observations, dict) else {"observation": observations}
