"""Rewards of several numbers: returns of each of them, the objectives."""

from __future__ import annotations

import numpy as np

from gym_trace.model.values import Array
from gym_trace.playback.trace import Trace

MOST_OBJECTIVES = 64  # of a reward; of a larger one there is no return


def objective_returns(trace: Trace) -> Array | None:
    """The sums of the rewards of each part of an episode, (parts, objectives); None if rewards are single numbers.

    Reads the rewards of those alone whose index says that they have no return, where a first one of a writer shows
    that its rewards are several numbers. NaN for all others.
    """
    table = trace.episodes
    unknown = np.isnan(table["return"]) & (table["steps"] > 0)
    returns: Array | None = None
    for writer in np.unique(table["writer"][unknown]).tolist():
        width = 0
        for episode in trace.scan(
            columns=("rewards",), episodes=unknown & (table["writer"] == writer), on_damage="skip"
        ):
            total = _sums(episode.rewards)
            if not (width := width or len(total)):
                break
            if returns is None or returns.shape[1] < width:
                wider = np.full((len(table), width), np.nan)
                wider[:, : 0 if returns is None else returns.shape[1]] = np.nan if returns is None else returns
                returns = wider
            if len(total) == width:
                returns[episode.index, :width] = total
    return returns


def _sums(rewards: Array) -> Array:
    """Of each objective; nothing where there are none."""
    if rewards.ndim < 2 or rewards.dtype.kind not in "biuf" or rewards[0].size > MOST_OBJECTIVES:
        return np.empty(0)
    with np.errstate(all="ignore"):  # rewards may be infinite
        sums: Array = rewards.reshape(len(rewards), -1).sum(axis=0, dtype=np.float64)
    return sums
