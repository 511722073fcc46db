"""Updates: weights, optimizer, statistics and generator as a function of rollouts. Needs PyTorch.

PPO (Schulman et al., 2017) on targets of V-trace (Espeholt et al., 2018), which on policy are those of GAE.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gym_trace.data.values import Array
from gym_trace.errors import CorruptRun, CorruptTrace, InvalidOption, RecordingError, TrainingFailed
from gym_trace.format.manifest import json_of
from gym_trace.playback.sampling.targets import vtrace
from gym_trace.storage.local import open_regular, size_on_disk
from gym_trace.training.network.forms import ActionForm, leaves_of
from gym_trace.training.network.model import ActorCritic, tensors, weights_of
from gym_trace.training.rollouts import Rollout, Shape, joined
from gym_trace.training.settings import CONSTANT, Settings, settings_from

_KEY = "gym_trace"
_FIXED_SETTINGS = (
    *("workers", "splits", "num_envs", "rollout", "batch", "lag", "hidden", "activation", "share", "rnn", "rnn_size"),
    *("model", "initial_std", "adaptive_std", "normalize_returns", "normalize_observations", "learner_threads"),
)
REMOVE = "remove it; later versions are relearned from the previous checkpoint"
_PUT_BACK = "restore a copy: the run took it over and stores it nowhere else"
_ROWS_AT_ONCE = 8192
_LOG_RATIO = math.log(20.0)
_RATE_STEP, _RATE_BOUNDS = 1.5, (1e-6, 1e-2)  # factor and limits for adaptive_kl


class Learner:
    """Makes updates: equal rollouts give equal weights, bit for bit, on the same machine with the same PyTorch.

    Attributes:
        version: number of updates. spaces: of observations and actions.
    """

    def __init__(self, observation_space: Any, action_space: Any, settings: Settings, seed: int, total: int | None):
        """total: updates of the whole run, for the schedules; None: no limit."""
        torch.set_num_threads(settings.learner_threads)
        self.settings, self.version, self._learned, self._total = settings, 0, 0, total
        self.spaces = observation_space, action_space
        self._rate = settings.learning_rate
        self._device = settings.device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = ActorCritic(leaves_of(observation_space), ActionForm(action_space), settings)
        try:
            self.model = made.to(settings.device)
        except (AssertionError, RuntimeError) as error:  # PyTorch without CUDA, or an unknown device
            raise InvalidOption(f"device={settings.device!r}: {str(error).partition(chr(10))[0]}") from error
        self._generator = torch.Generator().manual_seed(seed)
        betas = settings.adam_beta1, settings.adam_beta2
        self._optimizer = torch.optim.Adam(made.parameters(), self._rate, betas, settings.adam_eps, fused=True)

    # -- an update ----------------------------------------------------------------------------------------------------

    def learn(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Make an update; return losses and other facts. Raises TrainingFailed if one is not finite."""
        settings, batch = self.settings, joined(rollouts)
        observations = tensors(batch.observations, self._device)
        logprob, values, next_values = self._evaluated(batch, observations)
        targets, advantages = self._targets(batch, logprob, values, next_values)
        if not (np.isfinite(targets).all() and np.isfinite(advantages).all()):
            found = batch.not_finite()
            raise TrainingFailed("returns or values are not finite" if found is None else f"{found[0]} is not finite")
        returns = torch.from_numpy(targets.ravel())
        self.model.see_returns(returns.to(self._device))
        data = {
            "advantages": self._flat(_normalized(advantages) if settings.normalize_advantages else advantages),
            "targets": self.model.normalized_returns(returns.to(self._device)),
            "old_values": self.model.normalized_returns(torch.from_numpy(values[:-1].ravel()).to(self._device)),
            "logprob": self._flat(batch.logprob),
            "actions": torch.from_numpy(batch.actions.reshape(values[:-1].size, -1)).to(self._device),
        }
        losses = self._epochs(data, observations, batch)
        self._update_moments(observations)
        if not all(torch.isfinite(tensor).all() for tensor in self.model.state_dict().values()):
            raise TrainingFailed("a weight, or a statistic of the observations, is not finite")
        self.version, self._learned = self.version + 1, self._learned + 1
        self._set_rate(losses["kl"])
        spread = float(np.var(targets))
        explained = 1.0 - float(np.var(targets - values[:-1])) / spread if spread else 0.0
        return {**losses, "learning_rate": self._rate, "explained_variance": explained}

    @torch.no_grad()
    def _evaluated(self, batch: Rollout, observations: list[Tensor]) -> tuple[Array, Array, Array]:
        """Return log-probabilities of the actions, values, and values after each step, by the current weights."""
        model = self.model
        steps, lanes = batch.rewards.shape
        flat = [rows.flatten(0, 1) for rows in observations]
        begins = range(0, len(flat[0]), _ROWS_AT_ONCE)
        features = torch.cat([model.encoder([rows[i : i + _ROWS_AT_ONCE] for rows in flat]) for i in begins])
        memory, states = self._unroll(features.view(steps + 1, lanes, -1), batch, slice(None))
        distribution, normalized = model.policy_and_value(memory.flatten(0, 1), flat)
        padding = np.zeros((1, *batch.actions.shape[1:]), np.float32)
        actions = torch.from_numpy(np.concatenate([batch.actions, padding]).reshape(len(normalized), -1))
        logprob = distribution.log_prob(actions.to(self._device)).view(steps + 1, lanes)[:-1]
        values = _doubles(model.value(normalized)).reshape(steps + 1, lanes)
        next_values = values[1:].copy()
        where, finals = batch.bootstrapped()
        if where.any():
            last = tensors(finals, self._device)
            states_before = states[:-1][torch.from_numpy(where).to(self._device)]
            memory, _ = model.recur(model.encoder(last), states_before)
            next_values[where] = _doubles(model.value(model.policy_and_value(memory, last)[1]))
        return _doubles(logprob), values, next_values

    def _unroll(self, features: Tensor, batch: Rollout, lanes: Any) -> tuple[Tensor, Tensor]:
        """Return the output of a recurrent network for features (steps, lanes, ...), and its states after each step."""
        state = torch.from_numpy(batch.state[lanes].copy()).to(self._device)
        if self.model.rnn is None:
            return features, state.expand(len(features), *state.shape)
        ends = (batch.terminations | batch.truncations)[:, lanes]
        continues = torch.from_numpy(~ends).to(self._device)[..., None]
        memory, states = [], []
        for step in range(len(features)):
            if step:
                state = state * continues[step - 1]
            inner, state = self.model.recur(features[step], state)
            memory.append(inner)
            states.append(state)
        return torch.stack(memory), torch.stack(states)

    def _targets(self, batch: Rollout, logprob: Array, values: Array, next_values: Array) -> tuple[Array, Array]:
        """Return targets of the values, and advantages, (steps, lanes) each."""
        settings = self.settings
        rewards = batch.rewards * settings.reward_scale
        if settings.reward_clip is not None:
            rewards = rewards.clip(-settings.reward_clip, settings.reward_clip)
        ratios = logprob - batch.logprob if settings.off_policy == "vtrace" else np.zeros_like(logprob)
        targets, advantages = vtrace(
            rewards.T,
            values.T,
            ratios.T.clip(-_LOG_RATIO, _LOG_RATIO),
            batch.terminations.T,
            batch.truncations.T,
            settings.gamma,
            settings.lam,
            settings.rho,
            settings.c,
            next_values=next_values.T,
        )
        return np.ascontiguousarray(targets.T), np.ascontiguousarray(advantages.T)

    def _flat(self, array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.float32).ravel()).to(self._device)

    # -- gradients ----------------------------------------------------------------------------------------------------

    def _epochs(self, data: dict[str, Tensor], observations: list[Tensor], batch: Rollout) -> dict[str, float]:
        settings = self.settings
        recurrent = self.model.rnn is not None
        steps, lanes = batch.rewards.shape
        flat = [rows[:-1].flatten(0, 1) for rows in observations]
        sums: dict[str, float] = {}
        done = 0
        for _ in range(settings.epochs):
            divergence = 0.0
            order = torch.randperm(lanes if recurrent else steps * lanes, generator=self._generator)
            for part in order.tensor_split(settings.minibatches):
                part = part.to(self._device)
                rows = part
                if recurrent:
                    rows = (torch.arange(steps, device=part.device)[:, None] * lanes + part).flatten()
                observed = [leaf[rows] for leaf in flat]
                features = self.model.encoder(observed)
                if recurrent:
                    unrolled = features.view(steps, len(part), -1)
                    features = self._unroll(unrolled, batch, part.cpu().numpy())[0].flatten(0, 1)
                distribution, values = self.model.policy_and_value(features, observed)
                inputs: dict[str, Any] = {name: column[rows] for name, column in data.items()}
                inputs |= {"observations": observed, "features": features, "values": values}
                losses = self._step(distribution, inputs)
                divergence += losses["kl"] / settings.minibatches
                done += 1
                for name, value in losses.items():
                    sums[name] = sums.get(name, 0.0) + value
            if settings.target_kl is not None and divergence > settings.target_kl:
                break
        return {name: value / done for name, value in sums.items()}

    def _step(self, distribution: Any, data: dict[str, Any]) -> dict[str, float]:
        settings, advantages, targets, values = self.settings, data["advantages"], data["targets"], data["values"]
        log_ratio = (distribution.log_prob(data["actions"]) - data["logprob"]).clamp(-_LOG_RATIO, _LOG_RATIO)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 / (1 + settings.clip), 1 + settings.clip)
        policy_loss = -torch.min(advantages * ratio, advantages * clipped).mean()
        errors = (values - targets).square()
        if settings.value_clip is not None:
            change = (values - data["old_values"]).clamp(-settings.value_clip, settings.value_clip)
            errors = torch.max(errors, (data["old_values"] + change - targets).square())
        value_loss = 0.5 * errors.mean()
        entropy = distribution.entropy().mean()
        explored = entropy if settings.exploration == "entropy" else distribution.symmetric_kl().mean()
        exploration_loss = -settings.exploration_coefficient * self._factor(settings.exploration_schedule) * explored
        loss = policy_loss + settings.value_coefficient * value_loss + exploration_loss
        names = ["policy_loss", "value_loss", "entropy", "kl", "clipped", "gradient_norm"]
        if (own_loss := getattr(self.model.encoder, "loss", None)) is not None:
            loss, names = own_loss(loss, {**data, "distribution": distribution}), [*names, "loss"]
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.max_grad_norm or math.inf)
        with torch.no_grad():
            clipped_fraction = (ratio - clipped).ne(0).float().mean()
            kl = (ratio - 1 - log_ratio).mean()
            losses = torch.stack([policy_loss, value_loss, entropy, kl, clipped_fraction, norm, loss]).tolist()
        if not all(map(math.isfinite, losses)):
            raise TrainingFailed("a loss or a gradient is not finite")
        self._optimizer.step()
        return dict(zip(names, losses))

    @torch.no_grad()
    def _update_moments(self, observations: list[Tensor]) -> None:
        """Add observations to the moments of the next version's encoder."""
        running = getattr(self.model.encoder, "running", None)
        if running is not None:
            running.add(self.model.encoder.vectors([rows[:-1].flatten(0, 1) for rows in observations]))

    def _factor(self, schedule: str) -> float:
        """Return the factor of a schedule for the next update."""
        if schedule == CONSTANT or not self._total:
            return 1.0
        done = min(1.0, self._learned / self._total)
        return 1.0 - done if schedule == "linear" else 0.5 + 0.5 * math.cos(math.pi * done)

    def _set_rate(self, kl: float) -> None:
        """Set the learning rate of the next update. kl: of the last one."""
        settings = self.settings
        if settings.adaptive_kl is not None:
            if kl > 2 * settings.adaptive_kl:
                self._rate *= 1 / _RATE_STEP
            elif kl < settings.adaptive_kl / 2:
                self._rate *= _RATE_STEP
            self._rate = min(max(self._rate, _RATE_BOUNDS[0]), _RATE_BOUNDS[1])
        elif settings.learning_rate_schedule != CONSTANT:
            self._rate = settings.learning_rate * self._factor(settings.learning_rate_schedule)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate

    def change(self, settings: Settings) -> None:
        """Continue with other settings of the same network. Raises InvalidOption for another network."""
        for name in _FIXED_SETTINGS:
            if getattr(settings, name) != getattr(self.settings, name):
                raise InvalidOption(f"{name}={getattr(settings, name)!r}: the run has {getattr(self.settings, name)!r}")
        self.settings, self._rate = settings, settings.learning_rate
        for group in self._optimizer.param_groups:
            group.update(lr=self._rate, betas=(settings.adam_beta1, settings.adam_beta2), eps=settings.adam_eps)

    def adopt(self, changed: Mapping[str, Any], checkpoints: FilePath) -> None:
        """Make a version that takes over weights and optimizer of a checkpoint, other settings, or another limit.

        changed: "checkpoint", the name of a file in checkpoints; "settings", complete; "steps", limit of the run.
        Raises CorruptTrace.
        """
        if "checkpoint" in changed:
            path = checkpoints / FilePath(str(changed["checkpoint"])).name
            about, found = read_checkpoint(path, _PUT_BACK)
            with self._located(path, _PUT_BACK):
                self._load_model(found)
                self._load_optimizer(found)
                self._rate = float(about["rate"])
        if "settings" in changed:
            if not isinstance(changed["settings"], dict):
                raise CorruptTrace(f"{checkpoints.parent}: version {self.version + 1} took over invalid settings")
            try:
                self.change(replace(settings_from(changed["settings"]), device=self._device))
            except InvalidOption as error:
                raise CorruptTrace(f"{checkpoints.parent}: version {self.version + 1} took over {error}") from error
        if "steps" in changed:
            self._total = self.settings.updates_of(changed["steps"])
            self._set_rate(kl=self.settings.adaptive_kl or 0.0)  # the wanted KL leaves the rate unchanged
        self.version += 1

    def take_over(self, other: Learner) -> None:
        """Take over the weights of another learner. Raises InvalidOption if its network differs."""
        try:
            self.model.load_state_dict(other.model.state_dict())
        except RuntimeError as error:
            lines = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
            raise InvalidOption(f"weights of another network: {lines[0]}") from error

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> Shape:
        return Shape.of(*self.spaces, self.settings.rollout, self.settings.num_envs, self.model.state_size)

    def weights(self) -> Array:
        """Return all weights as bytes, see model.set_weights()."""
        return weights_of(self.model)

    def digest(self) -> str:
        """Return a hash of weights, statistics, optimizer and generator."""
        found = hashlib.blake2b(digest_size=16)
        for _, tensor in sorted(self.tensors().items()):
            found.update(np.ascontiguousarray(tensor.cpu().numpy()).view(np.uint8).data)
        return found.hexdigest()

    def tensors(self) -> dict[str, Tensor]:
        """Return the whole state by name."""
        found = {f"model.{name}": tensor.detach().contiguous() for name, tensor in self.model.state_dict().items()}
        for number, parts in self._optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{name}": tensor.contiguous() for name, tensor in parts.items()}
        return {**found, "generator": self._generator.get_state()}

    def facts(self) -> dict[str, Any]:
        """Return the other contents of a checkpoint, as JSON restores them."""
        about = {"version": self.version, "rate": self._rate, "settings": self.settings.plain()}
        return {**about, "updates": [self._learned, self._total]}

    def save(self, path: FilePath, **facts: Any) -> None:
        """Write a checkpoint: tensors, and facts as JSON. Raises RecordingError."""
        try:
            path.write_bytes(save(self.tensors(), {_KEY: json.dumps({**self.facts(), **facts})}))
        except OSError as error:
            path.unlink(missing_ok=True)
            raise RecordingError(f"a checkpoint cannot be written to {path.parent}: {error.strerror}") from error

    def load(self, path: FilePath, version: int | None = None) -> dict[str, Any]:
        """Restore a checkpoint; return its other facts. Raises CorruptTrace, also for another version."""
        about, found = read_checkpoint(path)
        with self._located(path, REMOVE):
            self._load_model(found)
            self.change(replace(settings_from(about["settings"]), device=self._device))
            self._rate, self.version = float(about["rate"]), int(about["version"])
            learned, total = about["updates"]
            self._learned, self._total = int(learned), None if total is None else int(total)
            if version is not None and self.version != version:
                raise ValueError(f"it is of version {self.version}")
            self._load_optimizer(found)
            self._generator.set_state(found["generator"])
        return about

    @contextlib.contextmanager
    def _located(self, path: FilePath, next_step: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, LookupError, TypeError, ValueError) as error:
            raise CorruptRun(f"not a checkpoint of this network: {error}", path, next_step) from error

    def _load_model(self, found: dict[str, Tensor]) -> None:
        model = {name.removeprefix("model."): t for name, t in found.items() if name.startswith("model.")}
        self.model.load_state_dict(model)

    def _load_optimizer(self, found: dict[str, Tensor]) -> None:
        state: dict[int, dict[str, Tensor]] = {}
        parameters = list(self.model.parameters())
        for name, tensor in found.items():
            if name.startswith("optimizer."):
                _, number, part = name.split(".")
                if part != "step" and tensor.shape != parameters[int(number)].shape:
                    raise ValueError(f"{name} is of another shape")
                state.setdefault(int(number), {})[part] = tensor
        groups = self._optimizer.state_dict()["param_groups"]
        groups[0]["lr"] = self._rate
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})


def read_checkpoint(path: FilePath, next_step: str = REMOVE) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the facts and the tensors of a checkpoint, an untrusted file. Raises CorruptRun with the next step."""
    try:
        fd = open_regular(path, os.O_RDONLY)
        try:
            size_on_disk(fd, path)
        finally:
            os.close(fd)
        with safe_open(path, "pt") as file:
            about = json_of((file.metadata() or {}).get(_KEY, ""))
            found = {name: file.get_tensor(name) for name in file.offset_keys()}
    except CorruptTrace as error:
        raise CorruptRun(f"invalid checkpoint: {error.problem}", path, next_step) from error
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise CorruptRun(f"invalid checkpoint: {error}", path, next_step) from error
    if not isinstance(about, dict):
        raise CorruptRun("invalid checkpoint: its metadata is not an object", path, next_step)
    return about, found


def _doubles(tensor: Tensor) -> Array:
    return np.asarray(tensor.double().cpu().numpy())


def _normalized(array: Array) -> Array:
    return np.asarray((array - array.mean()) / (array.std() + 1e-8))
