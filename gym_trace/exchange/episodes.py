"""Episodes for the libraries of this package: numbers only, one array per leaf."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from gym_trace.data.episode import Episode
from gym_trace.data.values import Array
from gym_trace.errors import InvalidOption
from gym_trace.exchange.formats.source import ExportSource
from gym_trace.playback.episode_columns import repeated_steps
from gym_trace.playback.episode_index import index_of, writer_agreed_on
from gym_trace.playback.scan import LEFT_OUT
from gym_trace.playback.trace import Trace, as_trace
from gym_trace.printable import printable


def finished(trace: Trace | str | os.PathLike[str], many_agents: bool = False) -> Trace:
    """Return the episodes that have ended and have steps.

    Raises InvalidOption without such episodes, and for episodes of many agents unless `many_agents`; TraceError if
    writers recorded different spaces.
    """
    opened = as_trace(trace)
    if not many_agents and any(reader.about_or_empty.agents for reader in index_of(opened).readers):
        raise InvalidOption(
            f"{opened.directory}: holds many agents, and this library takes one; use gym_trace.exchange.rllib, or the "
            'arrays of episode["NAME"]'
        )
    new = opened.episodes["steps"] - repeated_steps(index_of(opened), index_of(opened).readers)
    has_ended: Array = (opened.episodes["outcome"] != "running") & (new > 0)
    chosen = opened[has_ended]
    if not len(chosen):
        raise InvalidOption(f"{opened.directory}: no finished episodes with steps; record or select some")
    if not many_agents:
        for name in ("observation_space", "action_space"):
            writer_agreed_on(chosen, name)
    return chosen


def lengths(episodes: Trace) -> Array:
    """Return the number of steps that scanned() yields of each episode, (episodes,) int64."""
    steps: Array = ExportSource(episodes, finals=LEFT_OUT).episodes["steps"].astype(np.int64)
    return steps


def scanned(episodes: Trace) -> Iterator[tuple[Episode, Any]]:
    """Yield episodes of N steps with their observations, N + 1 known rows each.

    A branched episode lacks the steps that repeat the episode it branches from.
    An imported episode without a final observation lacks its last step. If that step terminated the episode, it
    stays, and the observation before it is repeated: targets do not use the observation after a termination.
    """
    return ((episode, rows) for episode, rows in ExportSource(episodes, finals=LEFT_OUT).scan() if len(episode))


def arrays(rows: Any, what: str = "observations") -> Any:
    """Return rows whose leaves are all numeric arrays; Dict and Tuple structure stays. Raises InvalidOption."""
    if isinstance(rows, dict):
        return {key: arrays(part, f"{what}[{key!r}]") for key, part in rows.items()}
    if isinstance(rows, tuple):
        return tuple(arrays(part, f"{what}[{number}]") for number, part in enumerate(rows))
    if rows.dtype.kind not in "biuf":
        raise InvalidOption(
            f"{printable(what)}: not numbers of one dtype and shape; choose a numeric part of the space"
        )
    return rows


def array(rows: Any, what: str) -> Array:
    """Return rows that are one numeric array. Raises InvalidOption for Dict, Tuple, text and objects."""
    found = arrays(rows, what)
    if not isinstance(found, np.ndarray):
        raise InvalidOption(f"{what}: has several parts; this library takes one array")
    return found


def rewards_of(episode: Episode) -> Array:
    """Return rewards of shape (steps,). Raises InvalidOption if they are not one number per step."""
    found = array(episode.rewards, "rewards")
    if found.size != len(found):
        raise InvalidOption(f"rewards: shape {found.shape[1:]} per step; this library takes one number per step")
    return found.reshape(-1)


def part_of(rows: Any, key: str | None) -> Any:
    """Return one leaf of Dict observations ("state/image"), or all of them for None. Raises InvalidOption."""
    for name in key.split("/") if key else ():
        if not isinstance(rows, dict) or name not in rows:
            keys = ", ".join(map(str, rows)) if isinstance(rows, dict) else "no keys"
            raise InvalidOption(f"observation={key!r}: not in the observations; they have {printable(keys)}")
        rows = rows[name]
    return rows
