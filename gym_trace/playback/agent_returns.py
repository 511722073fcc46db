"""Return of each agent in multi-agent episodes: the sum of its rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.agents import PLACE, REWARDS, JointColumns, Name, agents_key
from gym_trace.data.episode import Episode
from gym_trace.data.values import Array
from gym_trace.errors import TraceError
from gym_trace.playback.episode_index import EpisodeIndex
from gym_trace.playback.scan import Scan
from gym_trace.playback.writer_reader import WriterReader

_MOST_RETURNS = 1 << 26  # returns in memory

ScanEpisodes = Callable[..., Iterator[Episode]]


class AgentReturns(NamedTuple):
    """Returns by agent. values: (episodes, agents), NaN if the agent is absent or its rewards are not numbers."""

    names: list[Name]
    values: Array


def agent_returns(content: EpisodeIndex, scan: ScanEpisodes) -> AgentReturns:
    """Return the sum of the rewards of each agent in each episode; no names if all environments have one agent.

    Reads two columns and skips damaged chunks. More than 2^26 returns would need too much memory: no names.
    scan: Trace.scan, for writers that do not store agents in columns.
    """
    names: dict[Name, int] = {}
    found: list[tuple[list[Name], Array, Array]] = []  # names, indices in content, values
    writers, rows_of = content["writer"], content.rows
    for number, writer in enumerate(content.readers):
        mine = np.flatnonzero(writers == number)
        if len(mine) and writer.about_or_empty.agents:
            mine = mine[np.argsort(rows_of[mine], kind="stable")]
            found += _returns_in_columns(content, writer, mine) or _returns_in_episodes(scan, mine)
    for own, _, _ in found:
        for name in own:
            names.setdefault(name, len(names))
    if len(content) * len(names) > _MOST_RETURNS:
        return AgentReturns([], np.empty((len(content), 0)))
    values = np.full((len(content), len(names)), np.nan)
    for own, rows, returns in found:
        values[np.ix_(rows, np.array([names[name] for name in own], np.int64))] = returns
    return AgentReturns(list(names), values)


def _returns_in_columns(
    content: EpisodeIndex, writer: WriterReader, episodes: Array
) -> list[tuple[list[Name], Array, Array]]:
    """Return the agents, episodes and returns of one writer; an empty list if it does not store agents in columns."""
    names = writer.about_or_empty.agents.get("names")
    if not isinstance(names, list) or not all(type(name) in (str, int) for name in names):
        return []
    if len(episodes) * len(names) > _MOST_RETURNS or len(set(names)) < len(names):
        return []
    key = agents_key(names)
    paths = tuple(("observations", key, column) for column in (REWARDS, PLACE))
    sums, was_present = np.zeros((len(content), len(names))), np.zeros((len(content), len(names)), bool)
    for block in Scan(content, paths, episodes, on_damage=lambda damage: None):
        if not all(path in block.columns for path in paths):
            continue
        rewards, positions = (block.columns[path] for path in paths)
        shape = len(rewards), len(names)
        if "O" in (rewards.dtype.kind, positions.dtype.kind) or not rewards.shape == positions.shape == shape:
            return []
        counts = np.diff(block.observation_offsets)
        episode = np.repeat(block.episode, counts)
        is_step = np.ones(len(episode), bool)  # an initial observation has the rewards of the step before the run
        is_step[block.observation_offsets[:-1][block.has_initial & (counts > 0)]] = False
        np.add.at(sums, episode[is_step], rewards[is_step])
        np.logical_or.at(was_present, episode, positions >= 0)
    return [(names, episodes, np.where(was_present, sums, np.nan)[episodes])]


def _returns_in_episodes(scan: ScanEpisodes, rows: Array) -> list[tuple[list[Name], Array, Array]]:
    found = []
    for episode in scan(columns=("observations",), episodes=rows, on_damage="skip"):
        try:
            columns = JointColumns(episode.observations)
        except TraceError:
            continue
        values: Any = np.full((1, len(columns.names)), np.nan)
        for number in np.flatnonzero((columns.place >= 0).any(axis=0)).tolist():
            values[0, number] = _sum(columns.rewards[1:, number])
        found.append((columns.names, np.array([episode.index]), values))
    return found


def _sum(rewards: Array) -> float:
    try:
        return float(sum(rewards.tolist(), 0.0))
    except (TypeError, ValueError):  # each reward has several numbers
        return np.nan
