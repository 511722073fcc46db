"""Clip continuous actions inside the environment, so that the trace has the sampled, unclipped actions."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Tuple
from gymnasium.wrappers import ClipAction


def clipping(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Return an environment that clips continuous actions, with ClipAction itself if possible."""
    if is_continuous(env.action_space):
        return ClipAction(env)
    return ClipActionParts(env) if isinstance(env.action_space, (Dict, Tuple)) else env


class ClipActionParts(gymnasium.ActionWrapper[Any, Any, Any]):
    """ClipAction for the parts of a Dict or a Tuple."""

    def __init__(self, env: gymnasium.Env[Any, Any]):
        super().__init__(env)
        self.action_space = _unbounded(env.action_space)

    def action(self, action: Any) -> Any:
        return clipped(self.env.action_space, action)


def clipped(space: Any, action: Any) -> Any:
    """Return the action with its continuous parts clipped to their bounds."""
    if isinstance(space, Dict):
        return {name: clipped(inner, action[name]) for name, inner in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(map(clipped, space.spaces, action))
    return np.clip(action, space.low, space.high) if is_continuous(space) else action


def is_continuous(space: Any) -> bool:
    return isinstance(space, Box) and space.dtype.kind == "f"


def _unbounded(space: Any) -> Any:
    if isinstance(space, Dict):
        return Dict({name: _unbounded(inner) for name, inner in space.spaces.items()})
    if isinstance(space, Tuple):
        return Tuple([_unbounded(inner) for inner in space.spaces])
    return Box(-np.inf, np.inf, space.shape, space.dtype) if is_continuous(space) else space
