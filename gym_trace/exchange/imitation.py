"""Demonstrations for imitation: trajectories(trace)."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from gym_trace.data.episode import infos_of
from gym_trace.errors import InvalidOption, MissingExtra
from gym_trace.exchange.episodes import array, arrays, finished, part_of, rewards_of, scanned
from gym_trace.playback.trace import Trace

try:
    from imitation.data.types import DictObs, TrajectoryWithRew
except ImportError as missing:
    raise MissingExtra(f"trajectories need imitation ({missing}): pip install imitation") from missing

__all__ = ["trajectories"]


def trajectories(trace: Trace | str | os.PathLike[str], *, observation: str | None = None) -> list[TrajectoryWithRew]:
    """Return the finished episodes as imitation's TrajectoryWithRew: N + 1 observations, N actions, rewards and infos.

    Arrays keep their dtype; integer rewards become float64. Observations of a flat Dict space become a DictObs.
    terminal is True if the episode was terminated or truncated.

    Args:
        observation: use only this key of Dict observations, such as "image" or "state/position".

    Raises:
        InvalidOption: an observation, action or reward is not numeric, or observations are nested.

    Examples:
        >>> trajectories = gym_trace.exchange.imitation.trajectories("traces/cartpole")
        >>> len(trajectories), trajectories[0].obs.shape
        (20, (13, 4))
    """
    converted: list[TrajectoryWithRew] = []
    for episode, rows in scanned(finished(trace)):
        observations = arrays(part_of(rows, observation))
        if isinstance(observations, dict) and all(isinstance(rows, np.ndarray) for rows in observations.values()):
            observations = DictObs(observations)
        elif not isinstance(observations, np.ndarray):
            raise InvalidOption("observations: nested parts are not supported by imitation; pass observation=KEY")
        rewards, infos = rewards_of(episode), infos_of(episode)
        ended: Any = episode.terminations[-1] or episode.truncations[-1]
        converted.append(
            TrajectoryWithRew(
                obs=observations,
                acts=array(episode.actions, "actions"),
                infos=None if infos is None else np.array(infos, object),
                terminal=bool(ended),
                rews=rewards if rewards.dtype.kind == "f" else rewards.astype(np.float64),
            )
        )
    return converted
