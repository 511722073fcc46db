"""What a run has learnt, as a policy that acts in other environments. It takes PyTorch."""

from __future__ import annotations

import re
from typing import Any

import torch
from gymnasium.vector.utils import batch_space, iterate

from gym_trace.envs.clipping import clipped
from gym_trace.errors import InvalidOption
from gym_trace.training.learnt.versions import version_of
from gym_trace.training.network.forms import ActionForm, Leaf, leaves_of, picked
from gym_trace.training.network.model import ActorCritic, set_weights, tensors

_NAMED = re.compile(r"(?P<version>.+?)(?P<options>\?(sample|trust)(&(sample|trust))*)?", re.DOTALL)


class RunPolicies:
    """Makes policies of a version: DIR, DIR@VERSION, DIR@best, and behind it ?sample, ?trust or ?sample&trust.

    sample: actions are drawn, by the seed of the episode; otherwise they are the likeliest. trust: a module may be
    imported that the run names as its model. The weights are loaded, or learnt again, once, and carried to workers.

    Attributes:
        name: what acts, with the version.
    """

    def __init__(self, name: str):
        match = _NAMED.fullmatch(name)
        assert match is not None
        options = (match["options"] or "").lstrip("?").split("&")
        self._sample = "sample" in options
        version = version_of(match["version"], "trust" in options)
        learner = version.learner
        self.name = f"run:{version.name}{'?sample' * self._sample}"
        self._settings, self._weights = learner.settings, learner.weights()
        self._leaves, self._form = learner.shape.leaves, learner.shape.actions
        self._model: ActorCritic | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None}

    def __call__(self, observation_space: Any, action_space: Any) -> RunPolicy:
        """Raises InvalidOption if these are not the spaces that it was trained with."""
        here, form = leaves_of(observation_space), ActionForm(action_space)
        for what, trained, given in (
            ("observations", _shapes(self._leaves), _shapes(here)),
            ("actions", (self._form.choices, self._form.normals), (form.choices, form.normals)),
        ):
            if trained != given:
                raise InvalidOption(f"{self.name}: it was trained with other {what} than this environment has")
        if self._model is None:
            torch.set_num_threads(1)
            self._model = ActorCritic(self._leaves, self._form, self._settings)
            with torch.no_grad():
                set_weights(self._model, self._weights)
        return RunPolicy(self._model, here, form, action_space, self._sample)


def _shapes(leaves: list[Leaf]) -> list[Any]:
    return [(leaf.path, leaf.dtype, leaf.shape, getattr(leaf.space, "n", None)) for leaf in leaves]


class RunPolicy:
    """A policy as policies.Policy has it. A recurrent network begins anew with each episode."""

    def __init__(self, model: ActorCritic, leaves: list[Leaf], form: ActionForm, action_space: Any, sample: bool):
        self._model, self._leaves, self._form, self._space = model, leaves, form, action_space
        self._batched = batch_space(action_space)
        self._generator = torch.Generator() if sample else None
        self._state = torch.zeros(1, model.state_size)

    def reset(self, seed: int) -> None:
        self._state = torch.zeros_like(self._state)
        if self._generator is not None:
            self._generator.manual_seed(seed)

    @torch.inference_mode()
    def act(self, observation: Any) -> tuple[Any, dict[str, Any]]:
        observed = [picked(observation, leaf.path)[None] for leaf in self._leaves]
        distribution, _, self._state = self._model(tensors(observed), self._state)
        drawn = distribution.mode() if self._generator is None else distribution.sample(self._generator)
        action = next(iterate(self._batched, self._form.to_batch(drawn.numpy())))
        return clipped(self._space, action), {}  # as training has it
