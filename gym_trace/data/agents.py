"""Episodes of many agents: the form of their rows (docs/FORMAT.md, section 4), and the steps of one agent.

A row of observations maps each agent to its observation, and AGENTS to a map with the other data of the agents, such as
their rewards. Arrays in this map have one element per agent, in the order of the row's keys, or of NAMES if present.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from gym_trace.data.other_names import OF_EPISODE, KnowsOtherNames
from gym_trace.data.trees import mapped
from gym_trace.data.values import Array, densified, objects, row_of
from gym_trace.errors import CorruptTrace, TraceError
from gym_trace.printable import shown

AGENTS = "agents"  # underscores follow if an agent has this name
PLACE, GIVEN, REWARDS, TERMINATIONS, TRUNCATIONS = "place", "given", "rewards", "terminations", "truncations"
TURN, REWARD, STATE, NAMES = "turn", "reward", "state", "names"
# Bits of GIVEN: the agent was in the dict of the observations, rewards, terminations, truncations or infos.
OBSERVED, REWARDED, TERMINATION, TRUNCATION, INFORMED = 1, 2, 4, 8, 16
NO_ACTION, ACTED, NONE = 0, 1, 2  # codes of an agent in a row of actions: absent, an action, None

Name = str | int


def agents_key(names: Any) -> str:
    """Return AGENTS, with underscores appended until no agent has that name."""
    key = AGENTS
    while key in names:
        key += "_"
    return key


def key_in(row: Mapping[Any, Any]) -> str:
    """Return the key of the map with the other data: AGENTS, with its underscores."""
    keys = [key for key in row if isinstance(key, str) and key.rstrip("_") == AGENTS]
    return max(keys, key=len) if keys else AGENTS


class JointRow:
    """One row of observations of an environment of many agents, agent by agent.

    Attributes:
        agents: the present agents, in order.
        observations, rewards, terminations, truncations, infos: the environment's values, by agent.
        turn, reward: the agent to act and its reward from last(); None if all agents act at once or none is left.
        state: the result of state(); None if it was not recorded.
    """

    def __init__(self, row: Mapping[Any, Any], infos: Mapping[Any, Any]):
        key = key_in(row)
        entry = row[key]
        names: list[Name] = entry.get(NAMES) or [name for name in row if name != key]
        given = entry[GIVEN]

        def selected(bit: int, values: Any) -> dict[Any, Any]:
            return {name: value for name, value, bits in zip(names, values, given) if bits & bit}

        positions = sorted((int(position), i) for i, position in enumerate(entry[PLACE]) if position >= 0)
        self.agents = [names[i] for _, i in positions]
        self.observations = selected(OBSERVED, (row.get(name) for name in names))
        self.rewards = selected(REWARDED, map(_plain, entry[REWARDS]))
        self.terminations = selected(TERMINATION, map(bool, entry[TERMINATIONS]))
        self.truncations = selected(TRUNCATION, map(bool, entry[TRUNCATIONS]))
        self.infos = selected(INFORMED, (infos.get(name, {}) for name in names))
        has_turn = entry.get(TURN, -1) >= 0
        self.turn = names[entry[TURN]] if has_turn else None
        self.reward = _plain(entry[REWARD]) if has_turn else None
        self.state = entry.get(STATE)


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, np.float64) else value


class JointColumns:
    """The columns of an episode of many agents, N + 1 rows each.

    Attributes:
        names: the agents, along the second axis.
        place, given, rewards, terminations, truncations: arrays (N + 1, agents).
        turn, reward: arrays (N + 1,): the agent to act, an index of names or -1, and its reward from last(); None if
            all agents act at once.

    Raises:
        TraceError: the episode is not one of many agents.
    """

    def __init__(self, observations: Any):
        self._observations = observations
        try:
            if isinstance(observations, dict):
                key = key_in(observations)
                self.names: list[Name] = [name for name in observations if name != key]
                entry = {name: column for name, column in observations[key].items() if name != STATE}
            else:
                self.names, entry = _gathered(observations)
            self.place, self.given = np.asarray(entry[PLACE]), np.asarray(entry[GIVEN])
            rewards = entry[REWARDS]
            is_ragged = rewards.dtype == object and rewards.ndim == 1  # rewards that are not numbers
            self.rewards = np.stack([objects(list(row)) for row in rewards]) if is_ragged else rewards
            self.terminations = np.asarray(entry[TERMINATIONS]).astype(bool)
            self.truncations = np.asarray(entry[TRUNCATIONS]).astype(bool)
            shapes = {array.shape for array in (self.place, self.given, self.terminations, self.truncations)}
            if shapes | {self.rewards.shape} != {(len(self.place), len(self.names))}:
                raise ValueError
            self.turn = np.asarray(entry[TURN]).astype(np.int64) if TURN in entry else None
            self.reward = np.asarray(entry[REWARD]) if TURN in entry else None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise TraceError("agents: the episode is of a single agent, or its rows are malformed") from error

    def observed(self, name: Name, rows: Array) -> Any:
        """Return the observations of an agent in these rows."""
        if isinstance(self._observations, dict):
            return mapped(lambda column: column[rows], self._observations[name])
        return _stacked([self._observations[row].get(name) for row in rows.tolist()])

    @property
    def states(self) -> Any:
        """The result of state() in each row. Raises LookupError."""
        if isinstance(self._observations, dict):
            return self._observations[key_in(self._observations)][STATE]
        return _stacked([row[key_in(row)][STATE] for row in self._observations])


def _gathered(rows: Any) -> tuple[list[Name], dict[str, Any]]:
    """Return the names and columns of rows that are separate maps."""
    parts = [(row, row[key_in(row)]) for row in rows]
    names_of_row = [
        list(entry[NAMES]) if NAMES in entry else [n for n in row if n != key_in(row)] for row, entry in parts
    ]
    names: list[Name] = list(dict.fromkeys(name for some in names_of_row for name in some))
    index_of = {name: i for i, name in enumerate(names)}
    entry: dict[str, Any] = {}
    for column, default in ((PLACE, -1), (GIVEN, 0), (REWARDS, 0.0), (TERMINATIONS, 0), (TRUNCATIONS, 0)):
        values = [[default] * len(names) for _ in parts]
        for line, some, (_, given) in zip(values, names_of_row, parts):
            for name, value in zip(some, given[column]):
                line[index_of[name]] = value
        flat = [value for line in values for value in line]
        are_numbers = all(isinstance(value, (bool, int, float, np.number)) for value in flat)
        entry[column] = (np.array(flat) if are_numbers else objects(flat)).reshape(len(values), len(names))
    if all(TURN in given for _, given in parts):
        turns = [(some, int(given[TURN])) for some, (_, given) in zip(names_of_row, parts)]
        entry[TURN] = [index_of[some[turn]] if turn >= 0 else -1 for some, turn in turns]
        entry[REWARD] = [given[REWARD] for _, given in parts]
    return names, entry


class AgentEpisode(KnowsOtherNames):
    """The N steps of one agent in an episode of many, in the form of a single-agent episode.

    In a parallel environment, each environment step before which the agent was present is one of its steps. In an AEC
    environment, each turn of the agent is; env.last() gave its reward and flags at the agent's next turn, and the
    reward sums what came in between. The last, dead step of an agent has no action and does not count. A reward that
    comes with an agent's first observation belongs to no step; only the columns of the episode have it.

    Attributes:
        name: name of the agent.
        episode: the Episode of all agents.
        times: (N,) int64, the environment step of each action.
        rows: (N + 1,) int64, rows of episode.observations with the agent's observations; -1 for an unknown one.
        has_final_observation: False if the observation after the last action is unknown, because the agent had no
            further turn. The last row of observations is then NaN, 0 or None, and the last reward sums the rewards
            up to the end.

    Examples:
        >>> agent = trace[0]["player_0"]  # doctest: +SKIP
        >>> agent.observations.shape, agent.total_reward  # doctest: +SKIP
    """

    _OTHER_NAMES = OF_EPISODE

    def __init__(self, episode: Any, columns: JointColumns, name: Name):
        if name not in columns.names:
            known = ", ".join(map(shown, columns.names[:20]))
            raise KeyError(f"no agent {name!r} in the episode; there are: {known}")
        self.episode, self.name = episode, name
        self._columns, self._number = columns, columns.names.index(name)
        steps, dead = len(episode), columns.terminations[:, self._number] | columns.truncations[:, self._number]
        if columns.turn is None:
            present = columns.place[:steps, self._number] >= 0
            self._at: Array = np.flatnonzero(present | (self._acted() != NO_ACTION))
            after = self._at + 1
            first = np.flatnonzero(columns.given[:, self._number] & OBSERVED)[:1]
        else:
            turns = np.flatnonzero(columns.turn == self._number)
            self._at = turns[~dead[turns] & (turns < steps)]
            following = np.append(turns, -1)[np.searchsorted(turns, self._at, side="right")]
            after, first = following, turns[:1]
        self.times: Array = self._at + episode.first_step
        self._first = self._at[:1] if len(self._at) else first
        self._after = after  # row of observations after each action; -1: the agent had no further turn
        self.rows: Array = np.concatenate([self._first, after])
        known = columns.given[after, self._number] & OBSERVED > 0
        self._known = known & (after >= 0)
        self.has_final_observation = bool(self._known[-1]) if len(after) else True

    def __len__(self) -> int:
        return len(self._at)

    def __repr__(self) -> str:
        return (
            f"<{shown(self.name)} in episode {self.episode.episode_id}: {len(self)} steps, return {self.total_reward}>"
        )

    def _acted(self) -> Array:
        actions = self.episode.actions
        if isinstance(actions, dict):
            return np.asarray(actions[key_in(actions)])[:, self._number]
        codes = [NO_ACTION if self.name not in row else NONE if row[self.name] is None else ACTED for row in actions]
        return np.array(codes, np.uint8)

    @cached_property
    def observations(self) -> Any:
        """N + 1 rows: an array (N + 1, *shape), or dicts and tuples of them. Empty if it was never observed.

        A row is None, in an array of objects, where the environment gave the agent no observation.
        """
        rows = self._columns.observed(self.name, np.concatenate([self._first, np.maximum(self._after, 0)]))
        unknown = np.flatnonzero(~self._known) + 1
        if not len(unknown):
            return rows
        if unknown[0] < len(self):
            rows = objects([row_of(rows, i) for i in range(len(self) + 1)])
        return mapped(lambda column: _without(column, unknown), rows)

    @cached_property
    def actions(self) -> Any:
        """N rows: an array (N, *shape), or dicts and tuples of them; None where the environment got no action."""
        actions, acted = self.episode.actions, self._acted()[self._at]
        if isinstance(actions, dict):
            rows = mapped(lambda column: column[self._at], actions[self.name])
        else:
            rows = _stacked([actions[step].get(self.name) for step in self._at.tolist()])
        if (acted == ACTED).all():
            return rows
        return objects([row_of(rows, i) if code == ACTED else None for i, code in enumerate(acted)])

    @cached_property
    def rewards(self) -> Array:
        """(N,), float64 unless the environment's rewards have another dtype."""
        columns, rewards = self._columns, self._columns.rewards[:, self._number]
        if columns.reward is None:
            return np.asarray(rewards[self._after])
        found = columns.reward[self._after]
        if len(found) and self._after[-1] < 0:
            found = found.copy()
            found[-1] = sum(rewards[self._at[-1] + 1 :].tolist(), 0.0)
        return found

    @property
    def terminations(self) -> Array:
        """(N,) bool."""
        return np.asarray(self._columns.terminations[self._after, self._number])  # row -1: flags at the end

    @property
    def truncations(self) -> Array:
        """(N,) bool."""
        return np.asarray(self._columns.truncations[self._after, self._number])

    @property
    def infos(self) -> list[dict[str, Any]]:
        """N dicts. Raises TraceError if infos were not recorded."""
        infos = self.episode.infos
        return [_info_in(infos[row - 1 if row > 0 else -1], self.name) for row in self._after.tolist()]

    @property
    def first_info(self) -> dict[str, Any] | None:
        """The info with the first observation; None if infos were not recorded."""
        reset_info = self.episode.reset_info
        if reset_info is None or not len(self._first):
            return None
        first = int(self._first[0])
        return _info_in(self.episode.infos[first - 1] if first else reset_info, self.name)

    @property
    def total_reward(self) -> Any:
        """The sum of the rewards: a float, or an array if rewards are several numbers each."""
        return sum(self.rewards.tolist(), 0.0)

    @property
    def pending_action(self) -> Any:
        """The agent's action in a step without a result, because the writer was killed; or None."""
        pending = self.episode.pending_action
        if not isinstance(pending, Mapping) or self.name not in pending:
            return None
        key = key_in(pending)
        acted = np.asarray(pending[key])[self._number] if key in pending else ACTED
        return pending[self.name] if acted == ACTED else None


def appeared(columns: JointColumns) -> list[int]:
    """Return the agents that were ever present, in order of appearance, as indices of names."""
    present = columns.place >= 0
    first = np.where(present.any(axis=0), present.argmax(axis=0), -1)
    found = [number for number in range(len(columns.names)) if first[number] >= 0]
    return sorted(found, key=lambda number: (first[number], columns.place[first[number], number]))


def _info_in(infos: Any, name: Name) -> dict[str, Any]:
    if not isinstance(infos, dict):
        raise CorruptTrace("infos of agents are not a map")
    found = infos.get(name, {})
    return found if isinstance(found, dict) else {"value": found}


def _without(rows: Array, unknown: Array) -> Array:
    """Put NaN, 0 or None into rows that are not known."""
    rows[unknown] = math.nan if rows.dtype.kind in "fc" else None if rows.dtype == object else np.zeros((), rows.dtype)
    return rows


def _stacked(values: list[Any]) -> Any:
    """Return values as one array or a dict of arrays, if they are of one dtype and shape; as objects otherwise."""
    kinds = {type(value) for value in values}
    if kinds == {dict} and len({tuple(value) for value in values}) == 1:
        return {key: _stacked([value[key] for value in values]) for key in values[0]}
    if kinds == {tuple} and len({len(value) for value in values}) == 1:
        return tuple(_stacked(list(part)) for part in zip(*values))
    dense = densified(values)
    return objects(values) if dense is None else dense
