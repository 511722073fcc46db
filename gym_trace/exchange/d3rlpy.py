"""Datasets for d3rlpy: replay_buffer(trace)."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from gym_trace.data.trees import leaves_of
from gym_trace.data.values import Array
from gym_trace.errors import InvalidOption, MissingExtra
from gym_trace.exchange.episodes import array, arrays, finished, part_of, rewards_of
from gym_trace.playback.trace import Trace

try:
    import d3rlpy
except ImportError as missing:
    raise MissingExtra(f"d3rlpy datasets need d3rlpy ({missing}): pip install d3rlpy") from missing

__all__ = ["replay_buffer"]


def replay_buffer(trace: Trace | str | os.PathLike[str], *, observation: str | None = None) -> Any:
    """Return the finished episodes as a d3rlpy.dataset.ReplayBuffer.

    Rewards become float32 of shape (steps, 1). Images get their channels first. Dict and Tuple observations become a
    list of arrays, in the order of the space; d3rlpy needs an encoder for these. Actions of a Box are as recorded; for
    bounds other than [-1, 1] d3rlpy's algorithms need an action_scaler. d3rlpy has no final observation, and
    makes no transition of the last step of an episode that was not terminated.

    Args:
        observation: use only this key of Dict observations, such as "image" or "state/position".

    Raises:
        InvalidOption: an observation or action is not numeric, or an action space has no equivalent in d3rlpy.

    Examples:
        >>> len(gym_trace.exchange.d3rlpy.replay_buffer("traces/cartpole").episodes)
        20
    """
    episodes = finished(trace)
    space = episodes.action_space
    kind = type(space).__name__
    if kind not in ("Box", "Discrete"):
        raise InvalidOption(f"action space {kind}: not supported by d3rlpy")
    if kind == "Discrete" and space.start:
        raise InvalidOption(f"action space {space}: d3rlpy numbers actions from 0; these start at {space.start}")
    episodes_of_d3rlpy = [
        d3rlpy.dataset.Episode(
            _observations(arrays(part_of(episode.observations, observation))),
            array(episode.actions, "actions").reshape(len(episode), -1),
            rewards_of(episode).astype(np.float32)[:, None],
            bool(episode.terminations[-1]),
        )
        for whole in episodes.scan(columns=("observations", "actions", "rewards", "terminations"))
        for episode in (whole[whole.prefix :] if whole.prefix else whole,)
    ]
    is_discrete = kind == "Discrete"
    return d3rlpy.dataset.ReplayBuffer(
        d3rlpy.dataset.InfiniteBuffer(),
        episodes=episodes_of_d3rlpy,
        action_space=d3rlpy.ActionSpace.DISCRETE if is_discrete else d3rlpy.ActionSpace.CONTINUOUS,
        action_size=int(space.n) if is_discrete else episodes_of_d3rlpy[0].actions.shape[1],
    )


def _observations(rows: Any) -> Any:
    """Return all rows but the final one, one array per leaf."""
    if isinstance(rows, np.ndarray):
        return _channels_first(rows[:-1])
    return [_channels_first(leaf[:-1]) for leaf in leaves_of(rows)]


def _channels_first(rows: Array) -> Array:
    """Return rows with a feature axis, and images with their channels first."""
    if rows.ndim == 1:
        return rows[:, None]
    if rows.ndim == 3 and rows.dtype == np.uint8:
        return rows[:, None]  # grey
    return np.moveaxis(rows, -1, 1) if rows.ndim == 4 and rows.shape[3] < min(rows.shape[1:3]) else rows
