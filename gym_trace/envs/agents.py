"""A PettingZoo environment as one Gymnasium environment, whose rows hold all agents.

So it is recorded, replayed, compared and rendered like any other. docs/FORMAT.md, section 4, describes a row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from gym_trace.data.agents import (
    ACTED,
    GIVEN,
    INFORMED,
    NAMES,
    NO_ACTION,
    NONE,
    OBSERVED,
    PLACE,
    REWARD,
    REWARDED,
    REWARDS,
    STATE,
    TERMINATION,
    TERMINATIONS,
    TRUNCATION,
    TRUNCATIONS,
    TURN,
    Name,
    agents_key,
)
from gym_trace.data.layout import Branch, Layout, layout_of
from gym_trace.data.schema import as_map
from gym_trace.data.values import copied
from gym_trace.envs.spaces import describe
from gym_trace.errors import raise_if_of_signal

AEC, PARALLEL = "aec", "parallel"
_MOST_PLACES = np.iinfo(np.int16).max


class Agents(gymnasium.Space[Any]):
    """The space of rows whose agents are unknown before they appear: it contains any map."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def contains(self, x: Any) -> bool:
        return isinstance(x, Mapping)

    def __repr__(self) -> str:
        return "Agents()"


class JointEnv(gymnasium.Env[Any, Any]):
    """All agents of a PettingZoo environment as one.

    A step is a step of a parallel environment, or one turn of an AEC environment. The reward is the sum of the rewards
    of all agents. The episode ends when all agents have ended; it is terminated or truncated like its last agents. The
    observation holds the agents, with their rewards and flags.

    Args:
        env: an AEC or parallel environment.
        state: also observe env.state().

    Attributes:
        inner: the PettingZoo environment.
        kind: "aec" or "parallel".
        answer: the last result of inner.reset() or inner.step(); AEC: of inner.last(), or None
            when no agent is left.
        names: the agents, which have their own columns; None if they are unknown before they appear.
        has_state: True if env.state() is observed.
    """

    def __init__(self, env: Any, *, state: bool = False):
        self.inner, self.kind, self.has_state = env, kind_of(env), state
        self.metadata = {**(getattr(env, "metadata", None) or {})}
        self.metadata.setdefault("render_modes", self.metadata.get("render.modes", []))
        self.render_mode = getattr(env, "render_mode", None)
        self.answer: Any = None
        self._turn_of: Any = None  # AEC: the agent to act
        self._actual: tuple[Any] | None = None  # the action for the next step, instead of a decoded one
        self._flags = False, False  # terminated and truncated of the last agents
        known = _known_spaces(env)
        self.names: list[Name] | None = None if known is None else list(known[0])
        self._number = _numbered(self.names or ())
        self._key = agents_key(self._number)
        self._fillers: dict[Name, Any] = {}
        self._action_fillers: dict[Name, Any] = {}
        if known is None:
            self.observation_space, self.action_space = Agents(), Agents()
            return
        observed, acted = known
        make: Any = spaces.Dict  # its signature allows only text keys
        for name in observed:
            self._fillers[name] = _filler(layout_of(describe(observed[name]), ()))
            self._action_fillers[name] = _filler(layout_of(describe(acted[name]), ()))
        count = len(observed)
        flags = spaces.Box(0, NONE, (count,), np.uint8)
        self.observation_space = make([*observed.items(), (self._key, self._space_of_agents(count))])
        self.action_space = make([*acted.items(), (self._key, flags)])

    def _space_of_agents(self, count: int) -> spaces.Dict:
        entry: list[tuple[str, spaces.Space[Any]]] = [
            (PLACE, spaces.Box(-1, _MOST_PLACES, (count,), np.int16)),
            (GIVEN, spaces.Box(0, 31, (count,), np.uint8)),
            (REWARDS, spaces.Box(-np.inf, np.inf, (count,), np.float64)),
            (TERMINATIONS, spaces.MultiBinary(count)),
            (TRUNCATIONS, spaces.MultiBinary(count)),
        ]
        if self.kind == AEC:
            entry += [(TURN, spaces.Discrete(count + 1, start=-1))]
            entry += [(REWARD, spaces.Box(-np.inf, np.inf, (), np.float64))]
        if self.has_state:
            space = getattr(self.inner, "state_space", None)
            entry += [(STATE, space if isinstance(space, spaces.Space) else Agents())]
        return spaces.Dict(entry)

    # -- the environment's methods ------------------------------------------------------------------------------------

    @property
    def np_random(self) -> np.random.Generator:
        """The random generator of the environment. Raises AttributeError if none is found."""
        base = self.inner.unwrapped
        for owner in (base, getattr(base, "env", None)):  # SISL environments have it in .env
            found = getattr(owner, "np_random", None)
            if isinstance(found, np.random.Generator):
                return found
        raise AttributeError("np_random")

    @np_random.setter
    def np_random(self, value: np.random.Generator) -> None:
        raise AttributeError("np_random: set the generator's state instead")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[Any, Any]]:
        """Reset the environment; return the row of all agents, and their infos."""
        self._flags = False, False
        self._held = dict(self._fillers)
        answer = self.inner.reset(seed=seed, options=options)
        if self.kind == PARALLEL:
            self.answer = answer
            observations, infos = answer
            return self._row(self.inner.agents, observations, {}, {}, {}, infos)[0], _by_name(infos)
        row, _, infos, _ = self._turn()
        return row, infos

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[Any, Any]]:
        """Take a step of a parallel environment, or a turn of an AEC environment."""
        actual, self._actual = self._actual, None
        given = self.decoded(action) if actual is None else actual[0]
        answer = self.inner.step(given)
        if self.kind == PARALLEL:
            self.answer = answer
            observations, rewards, terminations, truncations, infos = answer
            agents = self.inner.agents
            row, _ = self._row(agents, observations, rewards, terminations, truncations, infos)
            dead = all(terminations.get(agent) or truncations.get(agent) for agent in agents)
            terminated, truncated = any(terminations.values()), any(truncations.values())
            return row, _sum(rewards), dead and terminated, dead and truncated, _by_name(infos)
        row, reward, infos, is_over = self._turn()
        terminated, truncated = self._flags if is_over else (False, False)
        return row, reward, terminated, truncated, infos

    def render(self) -> Any:
        return self.inner.render()

    def close(self) -> None:
        self.inner.close()

    @property
    def all_dead(self) -> tuple[bool, bool] | None:
        """(terminated, truncated) of an AEC environment if all of its remaining agents have ended; else None."""
        if self.answer is None:
            return None
        inner = self.inner
        over = all(inner.terminations[agent] or inner.truncations[agent] for agent in inner.agents)
        return self._flags if over else None

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _turn(self) -> tuple[dict[Any, Any], Any, dict[Any, Any], bool]:
        """Return the row of an AEC environment, the sum of the rewards, the infos, and True if no agent is left.

        The row has the result of last() and the data of all agents. Each attribute is read once: wrappers are slow.
        """
        inner = self.inner
        agents, rewards, infos = inner.agents, inner.rewards, inner.infos
        terminations, truncations = inner.terminations, inner.truncations
        self._turn_of, self.answer = (inner.agent_selection, inner.last()) if agents else (None, None)
        observed = {} if self.answer is None else {self._turn_of: self.answer[0]}
        row, entry = self._row(agents, observed, rewards, terminations, truncations, infos)
        if self.answer is None:
            entry |= {TURN: -1, REWARD: np.float64(0)}
        else:
            self._flags = any(terminations.values()), any(truncations.values())
            names: Any = entry.get(NAMES, self.names)
            entry |= {TURN: names.index(name_of(self._turn_of)), REWARD: _number(self.answer[1])}
        return row, _sum(rewards), _by_name(infos), not agents

    def _row(
        self,
        agents: Iterable[Any],
        observations: Mapping[Any, Any],
        rewards: Mapping[Any, Any],
        terminations: Mapping[Any, Any],
        truncations: Mapping[Any, Any],
        infos: Mapping[Any, Any],
    ) -> tuple[dict[Any, Any], dict[str, Any]]:
        """Return a row, and the map under its key AGENTS."""
        given = ((OBSERVED, observations), (REWARDED, rewards), (TERMINATION, terminations), (TRUNCATION, truncations),
                 (INFORMED, infos))  # fmt: skip
        names, number = [name_of(agent) for agent in agents], self._number
        bits: dict[Name, int] = dict.fromkeys(names, 0)
        for bit, mapping in given:
            for agent in mapping:
                name = name_of(agent)
                bits[name] = bits.get(name, 0) | bit
        is_free = not (number and bits.keys() <= number.keys())
        if is_free:
            number = _numbered(bits)
        place, bit_of = np.full(len(number), -1, np.int16), np.zeros(len(number), np.uint8)
        for i, name in enumerate(names):
            place[number[name]] = i
        for name, bit in bits.items():
            bit_of[number[name]] = bit
        entry: dict[str, Any] = {
            PLACE: place,
            GIVEN: bit_of,
            REWARDS: _rewards(rewards, number),
            TERMINATIONS: _flagged(terminations, number),
            TRUNCATIONS: _flagged(truncations, number),
            **({STATE: self.inner.state()} if self.has_state else {}),
            **({NAMES: list(number)} if is_free else {}),
        }
        row = self._observed({name_of(agent): value for agent, value in observations.items()}, is_free)
        row[agents_key(bits) if is_free else self._key] = entry
        return row, entry

    def _observed(self, observations: dict[Name, Any], is_free: bool) -> dict[Any, Any]:
        if is_free:
            return dict(observations)
        if self.kind == PARALLEL:
            return {**self._fillers, **observations}
        # An unobserved agent of an AEC environment keeps its last value, so that rows compress well.
        row = {**self._held, **observations}
        self._held.update((name, copied(value)) for name, value in observations.items())
        return row

    # -- actions ------------------------------------------------------------------------------------------------------

    def encoded(self, action: Any, agent: Any = None) -> dict[Any, Any]:
        """Return the row for an argument of inner.step(). agent: the agent to act in an AEC environment, if any."""
        if self.kind == PARALLEL:
            given = {name_of(agent): value for agent, value in action.items()}
        else:
            given = {} if agent is None else {name_of(agent): action}
        if not (self._number and given.keys() <= self._number.keys()):
            return given
        row = dict(self._action_fillers)
        acted = np.full(len(row), NO_ACTION, np.uint8)
        for name, value in given.items():
            acted[self._number[name]] = NONE if value is None else ACTED
            if value is not None:
                row[name] = value
        row[self._key] = acted
        return row

    def decoded(self, row: Any) -> Any:
        """Return the argument of inner.step() for a row of actions."""
        if self.names is not None and self._key in row:
            acted = row[self._key]
            chosen = [(name, code) for name, code in zip(self.names, np.asarray(acted).tolist()) if code != NO_ACTION]
            given = {name: row[name] if code == ACTED else None for name, code in chosen}
        else:
            given = dict(row)
        if self.kind == AEC:
            return next(iter(given.values()), None)
        agents = {name_of(agent): agent for agent in (*getattr(self.inner, "possible_agents", ()), *self.inner.agents)}
        present = [name for name in map(name_of, self.inner.agents) if name in given]
        return {agents.get(name, name): given[name] for name in dict.fromkeys([*present, *given])}

    def pass_on(self, action: Any) -> dict[Any, Any]:
        """Return the row of an action; the next step() passes the action itself to inner.step()."""
        self._actual = (action,)
        return self.encoded(action, self._turn_of)


def kind_of(env: Any) -> str:
    """Return AEC or PARALLEL."""
    return AEC if hasattr(type(env), "agent_iter") else PARALLEL


def is_of_agents(env: Any) -> bool:
    """Return True for an AEC or parallel environment of PettingZoo."""
    library: Any = sys.modules.get("pettingzoo")
    return library is not None and isinstance(env, (library.AECEnv, library.ParallelEnv))


def jointly(env: Any, description: Mapping[str, Any]) -> Any:
    """Return a PettingZoo environment as a JointEnv, and any other environment unchanged.

    description: the recorded environment; it has a flag for a recorded state.
    """
    if not is_of_agents(env):
        return env
    return JointEnv(env, state=as_map(description.get("agents")).get("state") is True)


def name_of(agent: Any) -> Name:
    """Return the name of an agent in a trace: text and integers unchanged, others as text."""
    return agent if type(agent) in (str, int) else str(agent)


def _numbered(names: Iterable[Name]) -> dict[Name, int]:
    return {name: number for number, name in enumerate(names)}


def _known_spaces(env: Any) -> tuple[dict[Name, Any], dict[Name, Any]] | None:
    """Return the spaces of observations and actions of all agents; None if they are unknown before a reset."""
    try:
        agents = list(env.possible_agents)
        observed = {name_of(agent): env.observation_space(agent) for agent in agents}
        acted = {name_of(agent): env.action_space(agent) for agent in agents}
    except Exception as error:  # user code may raise anything for an unknown agent
        raise_if_of_signal(error)
        return None
    every = [*observed.values(), *acted.values()]
    if not agents or len(observed) < len(agents) or not all(isinstance(space, spaces.Space) for space in every):
        return None
    return observed, acted


def _filler(layout: Layout) -> Any:
    """Return zeros, and None in untyped columns, in the structure of a space."""
    if isinstance(layout, Branch):
        parts = [_filler(part) for part in layout.children]
        return tuple(parts) if layout.keys is None else dict(zip(layout.keys, parts))
    return None if layout.dtype is None else np.zeros(layout.shape, layout.dtype)[()]


def _by_name(infos: Mapping[Any, Any]) -> dict[Any, Any]:
    return {name_of(agent): info for agent, info in infos.items()}


def _number(reward: Any) -> Any:
    """Return a reward as float64 if that is exact, else unchanged."""
    try:
        number = np.float64(reward)
        return number if isinstance(number, np.float64) and (number == reward or reward != reward) else reward
    except (TypeError, ValueError, OverflowError):
        return reward


def _rewards(rewards: Mapping[Any, Any], number: Mapping[Name, int]) -> Any:
    values: list[Any] = [np.float64(0)] * len(number)
    for agent, reward in rewards.items():
        values[number[name_of(agent)]] = _number(reward)
    return np.array(values) if all(type(value) is np.float64 for value in values) else values


def _flagged(flags: Mapping[Any, Any], number: Mapping[Name, int]) -> Any:
    found = np.zeros(len(number), np.int8)
    for agent, flag in flags.items():
        found[number[name_of(agent)]] = bool(flag)
    return found


def _sum(rewards: Mapping[Any, Any]) -> Any:
    total: Any = sum(rewards.values())
    return float(total) if isinstance(total, (bool, int, float, np.number)) else total
