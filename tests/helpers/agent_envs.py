"""Small environments of many agents, which come and go, have different spaces, and act at once or in turns."""

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.utils import EzPickle, seeding
from pettingzoo import AECEnv, ParallelEnv

WOLF = spaces.Dict({"place": spaces.Box(-1, 1, (3,), np.float32), "seen": spaces.Discrete(9)})
HARE = spaces.Box(0, 255, (40, 40, 3), np.uint8)  # large enough to be kept as changes
PACES, HOPS = spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float32)


class Meadow(ParallelEnv, EzPickle):  # type: ignore[type-arg]
    """A wolf and two hares at once. The second hare comes at step 2; one leaves at step 4; the episode ends at `steps`.

    It hands out the same buffers at each step.
    """

    metadata = {"name": "meadow_v0", "render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, steps: int = 8, render_mode: str | None = None):
        EzPickle.__init__(self, steps, render_mode)
        self.possible_agents = ["wolf", "hare_0", "hare_1"]
        self.steps, self.render_mode = steps, render_mode
        self.np_random, _ = seeding.np_random()
        self._frame = np.zeros(HARE.shape, np.uint8)
        self.state_space = spaces.Box(0, 99, (2,), np.float64)

    def observation_space(self, agent: str) -> Any:
        return WOLF if agent == "wolf" else HARE

    def action_space(self, agent: str) -> Any:
        return PACES if agent == "wolf" else HOPS

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.np_random, _ = seeding.np_random(seed)
        self.time, self.agents = 0, ["wolf", "hare_0"]
        return {agent: self._seen(agent) for agent in self.agents}, {agent: {"time": 0} for agent in self.agents}

    def _seen(self, agent: str) -> Any:
        drawn = self.np_random.random(3)
        if agent == "wolf":
            return {"place": drawn.astype(np.float32), "seen": int(9 * drawn[0])}
        self._frame[self.time % 40, :, 0] += 1
        return self._frame

    def step(self, actions: dict[str, Any]) -> Any:
        self.time += 1
        present = [*self.agents, *(["hare_1"] if self.time == 2 else [])]
        gone = "hare_0" if self.time == 4 else None
        over = self.time == self.steps
        observations = {agent: self._seen(agent) for agent in present}
        rewards = {agent: 1 if agent == "wolf" else -0.25 * self.time for agent in present}
        terminations = {agent: agent == gone for agent in present}
        truncations = dict.fromkeys(present, over)
        self.agents = [] if over else [agent for agent in present if agent != gone]
        return observations, rewards, terminations, truncations, {agent: {"time": self.time} for agent in present}

    def state(self) -> Any:
        return np.array([self.time, len(self.agents)], np.float64)

    def render(self) -> Any:
        return np.full((16, 16, 3), self.time, np.uint8)

    def close(self) -> None:
        pass


class Passing(AECEnv, EzPickle):  # type: ignore[type-arg]
    """Three players in turn; who draws the black card is out. Rewards come to all players at each turn."""

    metadata = {"name": "passing_v0", "render_modes": [], "is_parallelizable": False}  # noqa: RUF012

    def __init__(self, cards: int = 12, render_mode: str | None = None):
        EzPickle.__init__(self, cards=cards, render_mode=render_mode)
        self.possible_agents = ["ann", "bob", "cyd"]
        self.cards, self.render_mode = cards, render_mode
        self.np_random, _ = seeding.np_random()
        self._observation = spaces.Dict(
            {"observation": spaces.Box(0, 99, (4,), np.int8), "action_mask": spaces.MultiBinary(3)}
        )
        self._action = spaces.Discrete(3)

    def observation_space(self, agent: str) -> Any:
        return self._observation

    def action_space(self, agent: str) -> Any:
        return self._action

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        if seed is not None:
            self.np_random, _ = seeding.np_random(seed)
        self.agents = self.possible_agents[:]
        self.rewards = dict.fromkeys(self.agents, 0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}
        self.time, self.agent_selection = 0, self.agents[0]
        self._skip_agent_selection = None

    def observe(self, agent: str) -> Any:
        seen = np.array([self.time, self.possible_agents.index(agent), len(self.agents), 7], np.int8)
        return {"observation": seen, "action_mask": np.array([1, 1, self.time % 2], np.int8)}

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0
        self.time += 1
        black = self.np_random.integers(6) == 0
        for other in self.agents:
            self.rewards[other] = 0.5 * int(action) if other == agent else 1
        self.infos[agent] = {"drawn": bool(black)}
        order = [a for a in self.agents if not self.terminations[a]]
        self.agent_selection = order[(order.index(agent) + 1) % len(order)]
        if black:
            self.terminations[agent] = True
        if self.time == self.cards or all(self.terminations.values()):
            self.truncations = {a: not self.terminations[a] for a in self.agents}
        self._accumulate_rewards()
        self._deads_step_first()


def meadow() -> Meadow:
    return Meadow()


def short_meadow() -> Meadow:
    return Meadow(steps=3)
