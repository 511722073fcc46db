"""Proof of training with Stable-Baselines3: UpdateLogCallback logs what each call of train() learns from."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import configure
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from gym_trace.errors import InvalidOption
from gym_trace.training.proof.update_log import UpdateLog


class UpdateLogCallback(BaseCallback):
    """Logs every update so that it can be learned again: model.learn(..., callback=UpdateLogCallback(DIR)).

    For on-policy algorithms it copies rollouts, with values and advantages. For off-policy ones it copies each
    transition once, after it has come into the replay buffer; sampling is repeated from NumPy's generator.

    To prove the log: ``gym_trace.proof.verify(DIR, *update_parts(model))`` with a new model of the same arguments.

    Args:
        directory: new, or of a log to continue. overhead: see UpdateLog.

    Raises InvalidOption for an algorithm, buffer or wrapper that is not supported.

    Examples:
        >>> model.learn(100_000, callback=gym_trace.exchange.sb3.UpdateLogCallback())  # doctest: +SKIP
    """

    def __init__(self, directory: str | os.PathLike[str], *, overhead: float = 0.025, verbose: int = 0):
        super().__init__(verbose)
        self.directory, self._overhead = directory, overhead
        self.log: UpdateLog | None = None

    def _on_training_start(self) -> None:
        model: Any = self.model
        parts, learn = update_parts(model)
        inputs = _OnPolicy(model).inputs if isinstance(model, OnPolicyAlgorithm) else _OffPolicy(model).inputs
        self.log = log = UpdateLog(self.directory, parts, learn, overhead=self._overhead)
        model.train = lambda *args, **named: log.update(**inputs(*args, **named))

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        if self.log is not None:
            model: Any = self.model
            del model.train  # restores the method of the class
            self.log.close()
            self.log = None


def update_parts(model: BaseAlgorithm) -> tuple[dict[str, Any], Callable[..., Any]]:
    """Return the parts that learning changes, and the function that learns: arguments of gym_trace.proof.verify().

    Raises InvalidOption.

    Examples:
        >>> parts = gym_trace.exchange.sb3.update_parts(model)  # doctest: +SKIP
        >>> gym_trace.proof.verify("traces/ppo", parts, learn)  # doctest: +SKIP
    """
    if not isinstance(model, (OnPolicyAlgorithm, OffPolicyAlgorithm)):
        raise InvalidOption(f"{type(model).__name__}: is neither an on-policy nor an off-policy algorithm")
    names, variables = model._get_torch_save_params()
    parts = {name: _attribute(model, name) for name in names}
    parts |= {name: _Variable(_attribute(model, name)) for name in variables}
    if getattr(model, "_logger", None) is None:
        model.set_logger(configure(None, []))
    learner = _OnPolicy(model) if isinstance(model, OnPolicyAlgorithm) else _OffPolicy(model)
    return parts, learner.learn


class _Variable:
    """A tensor that is learned outside of modules."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": self._tensor}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            self._tensor.copy_(state["value"])


class _OnPolicy:
    """Rollout buffer as arguments of an update."""

    def __init__(self, model: Any):
        self._model, self._train = model, model.train

    def inputs(self) -> dict[str, Any]:
        return {"rollout": _arrays(self._model.rollout_buffer), "counters": _counters(self._model)}

    def learn(self, *, rollout: dict[str, Any], counters: dict[str, Any], **_: Any) -> dict[str, float]:
        buffer = self._model.rollout_buffer
        vars(buffer).update(rollout)
        buffer.generator_ready, buffer.full = False, True
        _set_counters(self._model, counters)
        self._train()
        return _losses(self._model)


class _OffPolicy:
    """Transitions that have come into the replay buffer, as arguments of an update."""

    def __init__(self, model: Any):
        self._model, self._train = model, model.train
        self._buffer = buffer = model.replay_buffer
        if buffer is None or getattr(buffer, "optimize_memory_usage", False):
            raise InvalidOption("replay_buffer: optimize_memory_usage is not supported by UpdateLogCallback")
        if model.get_vec_normalize_env() is not None:
            raise InvalidOption("VecNormalize: changes what an off-policy algorithm samples; not supported")
        self._logged_to = 0  # position in the buffer

    def inputs(self, gradient_steps: int, batch_size: int = 100) -> dict[str, Any]:
        buffer, begin = self._buffer, self._logged_to
        self._logged_to = buffer.pos
        count = (buffer.pos - begin) % buffer.buffer_size
        rows = (begin + np.arange(count)) % buffer.buffer_size
        added = {name: _rows(array, rows) for name, array in _arrays(buffer).items()}
        place = {"first": begin, "position": int(buffer.pos), "full": bool(buffer.full)}
        sizes = {"gradient_steps": gradient_steps, "batch_size": batch_size}
        return {"added": added, "place": place, "counters": _counters(self._model), "sizes": sizes}

    def learn(
        self, *, added: dict[str, Any], place: dict[str, Any], counters: dict[str, Any], sizes: dict[str, int], **_: Any
    ) -> dict[str, float]:
        buffer = self._buffer
        count = (place["position"] - place["first"]) % buffer.buffer_size
        rows = (place["first"] + np.arange(count)) % buffer.buffer_size
        for name, array in _arrays(buffer).items():
            _assign(array, rows, added[name])
        buffer.pos, buffer.full = place["position"], place["full"]
        _set_counters(self._model, counters)
        self._train(**sizes)
        return _losses(self._model)


def _arrays(buffer: Any) -> dict[str, Any]:
    """Return the arrays of a buffer, and its dicts of arrays, by attribute."""
    return {
        name: value
        for name, value in vars(buffer).items()
        if isinstance(value, np.ndarray) or (isinstance(value, dict) and value and _has_arrays(value))
    }


def _has_arrays(value: dict[str, Any]) -> bool:
    return all(isinstance(inner, np.ndarray) for inner in value.values())


def _rows(array: Any, rows: Any) -> Any:
    return {name: inner[rows] for name, inner in array.items()} if isinstance(array, dict) else array[rows]


def _assign(array: Any, rows: Any, values: Any) -> None:
    if isinstance(array, dict):
        for name, inner in array.items():
            inner[rows] = values[name]
    else:
        array[rows] = values


def _counters(model: Any) -> dict[str, Any]:
    progress = float(model._current_progress_remaining)
    return {"progress": progress, "updates": int(model._n_updates), "timesteps": int(model.num_timesteps)}


def _set_counters(model: Any, counters: Mapping[str, Any]) -> None:
    model._current_progress_remaining = counters["progress"]
    model._n_updates, model.num_timesteps = counters["updates"], counters["timesteps"]


def _losses(model: Any) -> dict[str, float]:
    """Return what train() has logged."""
    logged = model.logger.name_to_value
    return {name: float(value) for name, value in logged.items() if name.startswith("train/")}


def _attribute(model: Any, name: str) -> Any:
    for part in name.split("."):
        model = getattr(model, part)
    return model
