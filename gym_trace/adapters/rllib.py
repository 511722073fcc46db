"""Episodes for RLlib's new API stack: episodes(trace)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from gym_trace.adapters.episodes import finished, scanned
from gym_trace.errors import MissingExtra
from gym_trace.model.episode import infos_of
from gym_trace.playback.trace import Trace

try:
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode
except ImportError as missing:
    raise MissingExtra(f"RLlib episodes need Ray ({missing}): pip install 'ray[rllib]'") from missing

__all__ = ["episodes"]


def episodes(trace: Trace | str | os.PathLike[str]) -> Iterator[SingleAgentEpisode]:
    """Yield the finished episodes as RLlib's SingleAgentEpisode, in NumPy form.

    Values keep their dtype and structure. Numeric annotations become extra model outputs; an annotation
    "states/actor/h" is nested, as extra_model_outputs of dicts. RLlib rejects episodes that are not done, so
    an episode that was cut, closed or lost is truncated.
    """
    chosen = finished(trace)
    for episode, observations in scanned(chosen):
        terminated, infos = bool(episode.terminations[-1]), infos_of(episode)
        made = SingleAgentEpisode(
            f"{episode.writer}-{episode.episode_id}-{episode.first_step}",
            observations=_rows(observations, len(episode) + 1),
            observation_space=chosen.observation_space,
            actions=_rows(episode.actions, len(episode)),
            action_space=chosen.action_space,
            rewards=list(episode.rewards),
            infos=None if infos is None else [episode.reset_info or {}, *infos],
            extra_model_outputs=_outputs(episode.annotations),
            terminated=terminated,
            truncated=bool(episode.truncations[-1]) or not terminated,
            len_lookback_buffer=0,
        )
        yield made.to_numpy()


def _rows(tree: Any, count: int) -> list[Any]:
    """A list of rows, each with the structure of the space."""
    if isinstance(tree, dict):
        parts = {key: _rows(part, count) for key, part in tree.items()}
        return [{key: rows[at] for key, rows in parts.items()} for at in range(count)]
    if isinstance(tree, tuple):
        return list(zip(*(_rows(part, count) for part in tree)))
    return list(tree)


def _outputs(annotations: dict[str, Any]) -> dict[str, Any] | None:
    found: dict[str, Any] = {}
    for name, rows in annotations.items():
        if isinstance(rows, np.ndarray) and rows.dtype.kind in "biufc":
            *path, last = name.split("/")
            branch = found
            for key in path:
                branch = branch.setdefault(key, {})
            branch[last] = list(rows)
    return found or None
