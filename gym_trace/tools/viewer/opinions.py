"""Opinions of a policy: what it does at each recorded observation of an episode, without acting."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector.utils import batch_space, iterate

from gym_trace.data.values import Array
from gym_trace.errors import EnvironmentUnavailable
from gym_trace.playback.trace import Trace
from gym_trace.recording.collecting.policies import policy_maker
from gym_trace.recording.collecting.rollout import reset_policy
from gym_trace.tools.viewer.rendering import Recipe

_BLOCK = 1024  # steps that are read at once
_SEED = 0  # policies that sample start from it


class Question(NamedTuple):
    """A policy to ask, and about which episode.

    Attributes:
        episode: index in the trace of the job. key: see ViewedEpisode.key.
        label: name of the policy on the page.
        policy, needs: see whatif.Plan.
    """

    episode: int
    key: tuple[str, int, int]
    label: str
    policy: str | Callable[..., Any]
    needs: str


def trusted(policy: str | Callable[..., Any], needs: str, recipe: Recipe) -> str | Callable[..., Any]:
    """Return a policy as branch() takes it, in the process of a job. Raises EnvironmentUnavailable without consent."""
    for module in recipe.imports:
        import_module(module)
    trust = recipe.making.trust
    if needs and not trust:
        raise EnvironmentUnavailable(needs)
    if trust and isinstance(policy, str) and policy.startswith("run:"):
        return policy + ("&trust" if "?" in policy else "?trust")
    return policy


def ask(trace: Trace, recipe: Recipe, question: Question, on_progress: Callable[[int, int], Any]) -> dict[str, Array]:
    """Return the actions of a policy and its annotations, (steps, ...) each: those that are numbers.

    on_progress: called with the steps so far, and in all.

    Raises EnvironmentUnavailable, InvalidOption, CorruptTrace.
    """
    episode, space = trace[question.episode], trace.observation_space
    policy = policy_maker(trusted(question.policy, question.needs, recipe))(space, trace.action_space)
    reset_policy(policy, _SEED)
    found: dict[str, list[Any]] = {}
    for start in range(0, steps := len(episode), _BLOCK):
        part = episode[start : start + _BLOCK]
        rows = iterate(batch_space(space, len(part) + 1), part.observations)
        for observation, _ in zip(rows, range(len(part))):
            action, annotations = policy.act(observation)
            for name, value in {"actions": action, **annotations}.items():
                found.setdefault(name, []).append(value)
        on_progress(start + len(part), steps)
    arrays = {name: _array(values) for name, values in found.items() if len(values) == steps}
    return {name: array for name, array in arrays.items() if array.dtype.kind in "biuf"}


def _array(values: list[Any]) -> Array:
    try:
        return np.asarray(values)
    except ValueError:  # the values differ in shape
        return np.asarray([None])
