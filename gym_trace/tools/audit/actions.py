"""Random actions for a single environment, or for many agents."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np

from gym_trace.envs.agents import PARALLEL, JointEnv


class RandomActions:
    """Samples actions; for many agents, a valid one of each agent that is to act.

    It samples from copies of the spaces: an environment may sample from its own.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]):
        self._joint = env.unwrapped if isinstance(env.unwrapped, JointEnv) else None
        self._space = deepcopy(env.action_space)
        self.seed(0)

    def seed(self, episode: int) -> None:
        self._random = np.random.default_rng(episode)
        self._space.seed(episode)

    def __call__(self) -> Any:
        """Return an action for the state that the environment is in."""
        if self._joint is None:
            return self._space.sample()
        inner, answer = self._joint.inner, self._joint.answer
        if self._joint.kind == PARALLEL:
            given = {agent: self._sample(agent, answer[0].get(agent), answer[-1].get(agent)) for agent in inner.agents}
            return self._joint.encoded(given)
        observation, _, terminated, truncated, info = answer
        agent = inner.agent_selection
        action = None if terminated or truncated else self._sample(agent, observation, info)
        return self._joint.encoded(action, agent)

    def _sample(self, agent: Any, observation: Any, info: Any) -> Any:
        space = deepcopy(self._joint.inner.action_space(agent))  # type: ignore[union-attr]
        space.seed(int(self._random.integers(2**31)))
        source = observation if isinstance(observation, dict) and "action_mask" in observation else info
        mask = source.get("action_mask") if isinstance(source, dict) else None
        return space.sample() if mask is None else space.sample(np.asarray(mask, np.int8))
