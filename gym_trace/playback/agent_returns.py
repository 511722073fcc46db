"""Returns of single agents, where environments have many: the sum of the rewards that each was given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.agents import PLACE, REWARDS, JointColumns, Name, agents_key
from gym_trace.data.episode import Episode
from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace, TraceError
from gym_trace.format import wire
from gym_trace.playback.content import Content
from gym_trace.playback.writer_reader import WriterReader

_MOST = 1 << 26  # returns in memory

Scan = Callable[..., Iterator[Episode]]


class AgentReturns(NamedTuple):
    """Returns by agent. values: (episodes, agents), NaN where the agent was not there, or rewards are not numbers."""

    names: list[Name]
    values: Array


def agent_returns(content: Content, scan: Scan) -> AgentReturns:
    """Return the sum of the rewards of each agent in each episode; no names if all are of single agents.

    It reads two columns. Damaged chunks are passed over. For more than 2^26 returns it returns no names.
    scan: Trace.scan, for agents without columns of their own.
    """
    names: dict[Name, int] = {}
    found: list[tuple[list[Name], Array, Array]] = []  # names, rows of content, values
    wanted = np.arange(len(content)) if content.chosen is None else content.chosen
    place = np.full(int(content.bounds[-1]), -1)
    place[wanted] = np.arange(len(wanted))
    for number, writer in enumerate(content.writers):
        episodes = place[int(content.bounds[number]) : int(content.bounds[number + 1])]
        rows = episodes[episodes >= 0]
        if not len(rows) or not writer.about_or_empty.agents:
            continue
        told = _of_columns(writer, episodes >= 0)
        if told is None:
            for own, row, values in _of_episodes(scan, rows):
                found.append((own, row, values))
        else:
            found.append((told[0], rows, told[1][episodes >= 0]))
    for own, _, _ in found:
        for name in own:
            names.setdefault(name, len(names))
    if len(content) * len(names) > _MOST:
        return AgentReturns([], np.empty((len(content), 0)))
    values = np.full((len(content), len(names)), np.nan)
    for own, rows, returns in found:
        values[np.ix_(rows, np.array([names[name] for name in own], np.int64))] = returns
    return AgentReturns(list(names), values)


def _of_columns(writer: WriterReader, wanted: Array) -> tuple[list[Name], Array] | None:
    """Return the names, and the returns of the writer's episodes; None if rows have a structure of their own."""
    names = writer.about_or_empty.agents.get("names")
    if not isinstance(names, list) or not all(type(name) in (str, int) for name in names):
        return None
    if len(wanted) * len(names) > _MOST or len(set(names)) < len(names):
        return None
    key = agents_key(names)
    paths = tuple(("observations", key, column) for column in (REWARDS, PLACE))
    sums, was_there = np.zeros((len(wanted), len(names))), np.zeros((len(wanted), len(names)), bool)
    for block in writer.blocks(wanted):
        try:
            chunk = writer.chunk(block.number, frozenset(paths))
            rewards, there = (chunk.array(path) for path in paths)
        except (CorruptTrace, LookupError):
            continue
        shape = len(rewards), len(names)
        if "O" in (rewards.dtype.kind, there.dtype.kind) or not rewards.shape == there.shape == shape:
            return None
        begins, counts = block.offsets[0][:-1], np.diff(block.offsets[0])
        episode = np.repeat(block.rows, counts)
        is_step = np.ones(len(episode), bool)  # the observation that leads a run has the reward of a step before it
        is_step[begins[(block.table["flags"] & wire.LEADS > 0) & (counts > 0)]] = False
        np.add.at(sums, episode[(episode >= 0) & is_step], rewards[(episode >= 0) & is_step])
        np.logical_or.at(was_there, episode[episode >= 0], there[episode >= 0] >= 0)
    return names, np.where(was_there, sums, np.nan)


def _of_episodes(scan: Scan, rows: Array) -> Iterator[tuple[list[Name], Array, Array]]:
    for episode in scan(columns=("observations",), episodes=rows, on_damage="skip"):
        try:
            columns = JointColumns(episode.observations)
        except TraceError:
            continue
        values: Any = np.full((1, len(columns.names)), np.nan)
        for number in np.flatnonzero((columns.place >= 0).any(axis=0)).tolist():
            values[0, number] = _sum(columns.rewards[1:, number])
        yield columns.names, np.array([episode.index]), values


def _sum(rewards: Array) -> float:
    try:
        return float(sum(rewards.tolist(), 0.0))
    except (TypeError, ValueError):  # several numbers each
        return np.nan
