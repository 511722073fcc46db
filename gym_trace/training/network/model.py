"""The network: encoders of the leaves of an observation, layers, a policy and a value. Needs PyTorch."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional

from gym_trace.data.values import Array
from gym_trace.errors import InvalidOption
from gym_trace.printable import error_text
from gym_trace.training.network.forms import ActionForm, SpaceLeaf
from gym_trace.training.settings import Settings

_ACTIVATIONS: dict[str, Any] = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU}
_LARGE, _SMALL = 64, 36  # pixels, of the shorter side
_MAX_DEVIATIONS = 10.0  # limit of a normalized observation
_LOG_STD = (-5.0, 2.0)
_FORBIDDEN = -1e9  # logit of an action that is masked out


class RunningMoments(nn.Module):
    """Mean and variance of all rows so far, in float64, merged batch by batch (Chan et al., 1979)."""

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def add(self, rows: Tensor) -> None:
        """Add rows, (n, size)."""
        rows = rows.double()
        count = self.count + len(rows)
        delta = rows.mean(0) - self.mean
        squares = self.variance * self.count + rows.var(0, unbiased=False) * len(rows)
        self.variance.copy_((squares + delta.square() * self.count * len(rows) / count) / count)
        self.mean.add_(delta * len(rows) / count)
        self.count.copy_(count)

    @property
    def std(self) -> Tensor:
        return (self.variance + 1e-8).sqrt()

    def normalized(self, rows: Tensor) -> Tensor:
        if not self.count:
            return rows
        scaled = (rows - self.mean.float()) / self.std.float()
        return scaled.clamp(-_MAX_DEVIATIONS, _MAX_DEVIATIONS)


class Encoder(nn.Module):
    """Turns observations, one tensor per leaf, into rows of features."""

    def __init__(self, leaves: Sequence[SpaceLeaf], settings: Settings):
        super().__init__()
        self._leaves = leaves
        self._pictures = nn.ModuleDict()
        vector = features = 0
        for number, leaf in enumerate(leaves):
            if leaf.is_mask:
                continue
            if is_picture(leaf):
                self._pictures[str(number)] = encoder = _picture_encoder(leaf)
                features += _features(encoder, leaf)
            else:
                size = _vector_size(leaf)
                vector += size if leaf.dtype.kind == "f" else 0
                features += size
        if not features:
            raise InvalidOption("observation: empty except for masks; a network needs at least one number")
        self.running = RunningMoments(vector) if vector and settings.normalize_observations else None
        self.features = features

    def vectors(self, observations: Sequence[Tensor]) -> Tensor | None:
        """Return the leaves of floats side by side, which have running moments; None without such leaves."""
        found = [
            rows.reshape(len(rows), -1).float()
            for leaf, rows in zip(self._leaves, observations)
            if not is_picture(leaf) and not leaf.is_mask and leaf.dtype.kind == "f"
        ]
        return torch.cat(found, 1) if len(found) > 1 else found[0] if found else None

    def forward(self, observations: Sequence[Tensor]) -> Tensor:
        parts = []
        vectors = self.vectors(observations)
        if vectors is not None:
            parts.append(vectors if self.running is None else self.running.normalized(vectors))
        for number, (leaf, rows) in enumerate(zip(self._leaves, observations)):
            if leaf.is_mask:
                continue
            if is_picture(leaf):
                parts.append(self._pictures[str(number)](_channels_first(leaf, rows).float() / 255.0))
            elif leaf.dtype.kind != "f":
                parts.append(_numbers(leaf, rows))
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def is_picture(leaf: SpaceLeaf) -> bool:
    return leaf.dtype == np.uint8 and len(leaf.shape) == 3


def _is_channels_first(leaf: SpaceLeaf) -> bool:
    return leaf.shape[0] < leaf.shape[2]


def _channels_first(leaf: SpaceLeaf, rows: Tensor) -> Tensor:
    return rows if _is_channels_first(leaf) else rows.permute(0, 3, 1, 2)


def _picture_encoder(leaf: SpaceLeaf) -> nn.Module:
    """Return the network of Mnih et al. (2015) for large images, or smaller strides for smaller images."""
    channels, *size = leaf.shape if _is_channels_first(leaf) else (leaf.shape[2], *leaf.shape[:2])
    if min(size) >= _LARGE:
        layers = [(channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)]
    elif min(size) >= _SMALL:
        layers = [(channels, 16, 4, 2), (16, 32, 4, 2), (32, 32, 3, 2)]
    else:
        layers = [(channels, 16, 3, 1), (16, 32, 3, 2)]
    parts: list[nn.Module] = []
    for inner, outer, kernel, stride in layers:
        parts += [nn.Conv2d(inner, outer, kernel, stride, padding=0 if min(size) >= _SMALL else 1), nn.ReLU()]
    return nn.Sequential(*parts, nn.Flatten())


def _features(encoder: nn.Module, leaf: SpaceLeaf) -> int:
    with torch.no_grad():
        return int(encoder(_channels_first(leaf, torch.zeros(1, *leaf.shape))).shape[1])


def _vector_size(leaf: SpaceLeaf) -> int:
    if isinstance(leaf.space, spaces.Discrete):
        return int(leaf.space.n)
    if isinstance(leaf.space, spaces.MultiDiscrete):
        return int(leaf.space.nvec.sum())
    return int(np.prod(leaf.shape))


def _numbers(leaf: SpaceLeaf, rows: Tensor) -> Tensor:
    """Turn integers into rows of features: one-hot for categories, scaled for bytes."""
    space = leaf.space
    if isinstance(space, spaces.Discrete):
        return functional.one_hot(rows.long() - int(space.start), int(space.n)).float()
    if isinstance(space, spaces.MultiDiscrete):
        columns = (rows.reshape(len(rows), -1) - torch.from_numpy(space.start.ravel()).to(rows.device)).long()
        return torch.cat([functional.one_hot(c, int(n)) for c, n in zip(columns.T, space.nvec.ravel())], 1).float()
    flat = rows.reshape(len(rows), -1).float()
    return flat / 255.0 if leaf.dtype == np.uint8 else flat


class Distribution:
    """Distribution of a batch of actions, which are rows of ActionForm."""

    def __init__(self, form: ActionForm, parameters: Tensor, log_std: Tensor | None):
        choices = sum(form.choices)
        self.logs = [functional.log_softmax(part, 1) for part in parameters[:, :choices].split(form.choices, 1)]
        self.mean = parameters[:, choices:]
        self.log_std = log_std

    def sample(self, generator: torch.Generator) -> Tensor:
        columns = []
        for log in self.logs:  # the Gumbel trick samples a category
            noise = torch.rand(log.shape, generator=generator, device=log.device).clamp_min_(1e-20).log_().neg_().log_()
            columns.append((log - noise).argmax(1, keepdim=True).float())
        if self.log_std is not None:
            noise = torch.randn(self.mean.shape, generator=generator, device=self.mean.device)
            columns.append(self.mean + self.log_std.exp() * noise)
        return torch.cat(columns, 1)

    def mode(self) -> Tensor:
        columns = [log.argmax(1, keepdim=True).float() for log in self.logs]
        return torch.cat([*columns, self.mean], 1)

    def log_prob(self, actions: Tensor) -> Tensor:
        count = len(self.logs)
        total = actions.new_zeros(len(actions))
        for log, column in zip(self.logs, actions[:, :count].long().T):
            total = total + log.gather(1, column[:, None])[:, 0]
        if self.log_std is not None:
            scaled = (actions[:, count:] - self.mean) * torch.exp(-self.log_std)
            density = -0.5 * scaled.square() - self.log_std - 0.5 * math.log(2 * math.pi)
            total = total + density.sum(1)
        return total

    def entropy(self) -> Tensor:
        total = sum(-(log.exp() * log).sum(1) for log in self.logs)
        if self.log_std is not None:
            spread = self.log_std + 0.5 * math.log(2 * math.pi * math.e)
            total = total + spread.expand_as(self.mean).sum(1)
        return torch.as_tensor(total)

    def symmetric_kl(self) -> Tensor:
        """Return the mean of both divergences of discrete actions from uniform; for continuous ones, the entropy."""
        total: Any = 0.0
        for log in self.logs:
            uniform = -math.log(log.shape[1])
            forward = (log.exp() * (log - uniform)).sum(1)
            reverse = (math.exp(uniform) * (uniform - log)).sum(1)
            total = total - 0.5 * (forward + reverse)
        if self.log_std is not None:
            total = total + self.log_std.expand_as(self.mean).sum(1)
        return torch.as_tensor(total)


class ActorCritic(nn.Module):
    """Policy and value. Values are in units of the standard deviation of returns, see value()."""

    def __init__(self, leaves: Sequence[SpaceLeaf], form: ActionForm, settings: Settings):
        super().__init__()
        self.form = form
        self._masks = [number for number, leaf in enumerate(leaves) if leaf.is_mask]
        if self._masks and (len(form.choices) != 1 or form.normals):
            raise InvalidOption("action_mask: only supported for one Discrete action")
        for number in self._masks:
            if (shape := leaves[number].shape) != (form.choices[0],):
                raise InvalidOption(f"action_mask: its shape is {shape}, and there are {form.choices[0]} actions")
        self.encoder = _encoder(leaves, form, settings)
        share = settings.share
        if share is None:
            share = settings.rnn is not None or any(map(is_picture, leaves))
        size = self.encoder.features
        self.rnn: Any = None
        if settings.rnn is not None:
            kind = nn.GRUCell if settings.rnn == "gru" else nn.LSTMCell
            self.rnn = kind(size, settings.rnn_size)
            size = settings.rnn_size
        activation = _ACTIVATIONS[settings.activation]
        self.actor = _layers(size, settings.hidden, activation)
        self.critic = None if share else _layers(size, settings.hidden, activation)
        size = settings.hidden[-1] if settings.hidden else size
        means = 2 * form.normals if settings.adaptive_std else form.normals
        has_own = hasattr(self.encoder, "policy")
        self.policy = None if has_own else nn.Linear(size, sum(form.choices) + means)
        self.baseline = nn.Linear(size, 1)
        self.returns = RunningMoments(1) if settings.normalize_returns else None
        self.log_std: Any = None
        self._adaptive, self._initial = settings.adaptive_std, math.log(settings.initial_std)
        if form.normals and not settings.adaptive_std:
            self.log_std = nn.Parameter(torch.full((form.normals,), self._initial))
        self._initialize(settings)

    def _initialize(self, settings: Settings) -> None:
        gain = settings.initial_gain * math.sqrt(2)
        own = set() if settings.model is None else set(self.encoder.modules())
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)) and module not in own:
                if settings.initialization == "orthogonal":
                    nn.init.orthogonal_(module.weight, gain)
                else:
                    nn.init.xavier_uniform_(module.weight, gain)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if self.policy is not None:
            nn.init.orthogonal_(self.policy.weight, 0.01)
        nn.init.orthogonal_(self.baseline.weight, 1.0)

    @property
    def state_size(self) -> int:
        """Return the size of the recurrent state of a lane; 0 without one."""
        if self.rnn is None:
            return 0
        return int(self.rnn.hidden_size) * (2 if isinstance(self.rnn, nn.LSTMCell) else 1)

    def recur(self, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of a recurrent network for the features, and its next state, (rows, ...) each."""
        if self.rnn is None:
            return features, state
        if isinstance(self.rnn, nn.LSTMCell):
            hidden, cell = self.rnn(features, state.chunk(2, 1))
            return hidden, torch.cat([hidden, cell], 1)
        hidden = self.rnn(features, state)
        return hidden, hidden

    def policy_and_value(self, features: Tensor, observations: Sequence[Tensor]) -> tuple[Distribution, Tensor]:
        """Return the distribution of actions, and normalized values, (rows,)."""
        inner = self.actor(features)
        parameters = self.encoder.policy(features) if self.policy is None else self.policy(inner)
        values = self.baseline(inner if self.critic is None else self.critic(features))[:, 0]
        for number in self._masks:
            parameters = parameters.masked_fill(~observations[number].bool(), _FORBIDDEN)
        log_std = self.log_std
        if self._adaptive and self.form.normals:
            parameters, log_std = parameters.split([sum(self.form.choices) + self.form.normals, self.form.normals], 1)
            log_std = (self._initial + log_std).clamp(*_LOG_STD)
        return Distribution(self.form, parameters, log_std), values

    def forward(self, observations: Sequence[Tensor], state: Tensor) -> tuple[Distribution, Tensor, Tensor]:
        features, state = self.recur(self.encoder(observations), state)
        distribution, values = self.policy_and_value(features, observations)
        return distribution, values, state

    def value(self, normalized: Tensor) -> Tensor:
        """Return values in units of rewards."""
        if self.returns is None:
            return normalized
        return normalized * self.returns.std.float() + self.returns.mean.float()

    def see_returns(self, returns: Tensor) -> None:
        """Add returns to the moments, and rescale the baseline to preserve all values (van Hasselt et al., 2016)."""
        if self.returns is None:
            return
        mean, std = self.returns.mean.clone(), self.returns.std
        self.returns.add(returns.reshape(-1, 1))
        new_std = self.returns.std
        with torch.no_grad():
            self.baseline.weight.mul_((std / new_std).float())
            self.baseline.bias.copy_((self.baseline.bias.double() * std + mean - self.returns.mean) / new_std)

    def normalized_returns(self, returns: Tensor) -> Tensor:
        if self.returns is None:
            return returns.float()
        return ((returns - self.returns.mean) / self.returns.std).float()


def _layers(size: int, hidden: Sequence[int], activation: Any) -> nn.Module:
    parts: list[nn.Module] = []
    for width in hidden:
        parts += [nn.Linear(size, width), activation()]
        size = width
    return nn.Sequential(*parts)


def _encoder(leaves: Sequence[SpaceLeaf], form: ActionForm, settings: Settings) -> Any:
    if settings.model is None:
        return Encoder(leaves, settings)
    module, _, name = settings.model.partition(":")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidOption(f"model={settings.model!r}: {error}; pass module:function") from error
    try:
        encoder = make(leaves, form, settings)
    except Exception as error:  # the user's code may raise anything
        hint = "it is called with the leaves of the observations, the actions and the settings"
        raise InvalidOption(f"model={settings.model!r}: {error_text(error)}; {hint}") from error
    if not isinstance(encoder, nn.Module) or not isinstance(getattr(encoder, "features", None), int):
        raise InvalidOption(f"model={settings.model!r}: its result is not a torch.nn.Module with an integer `features`")
    return encoder


def source_of(model: str | None) -> str | None:
    """Return the source of the module that a model names; None if it has none."""
    try:
        return None if model is None else inspect.getsource(importlib.import_module(model.partition(":")[0]))
    except (OSError, TypeError):  # a module in C, or in an archive without source
        return None


def tensors(arrays: Sequence[Array], device: str = "cpu") -> list[Tensor]:
    """Return one tensor per array, in dtypes that PyTorch supports."""
    found = []
    for array in arrays:
        if array.dtype == np.uint16:
            array = array.astype(np.int32)
        elif array.dtype in (np.uint32, np.uint64):
            array = array.astype(np.int64)
        found.append(torch.from_numpy(np.ascontiguousarray(array)).to(device))
    return found


def weights_of(model: nn.Module) -> Array:
    """Return all parameters and statistics as bytes."""
    parts = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in model.state_dict().values()]
    return np.asarray(torch.cat(parts).numpy())


def set_weights(model: nn.Module, weights: Array) -> None:
    """Restore the result of weights_of()."""
    offset = 0
    for tensor in model.state_dict().values():
        size = tensor.numel() * tensor.element_size()
        part = torch.from_numpy(weights[offset : offset + size]).clone().view(tensor.dtype).view(tensor.shape)
        tensor.copy_(part)
        offset += size


def check_device(name: str) -> None:
    """Raise InvalidOption if a device is missing; do not use it."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidOption(f"device={name!r}: {str(error).partition(chr(10))[0]}") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidOption(f"device={name!r}: PyTorch finds {torch.cuda.device_count()} GPUs here; pass cpu")
