"""Episodes for RLlib's new API stack: episodes(trace), of one agent or of many."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from gym_trace.adapters.episodes import finished, scanned
from gym_trace.errors import EnvironmentUnavailable, MissingExtra
from gym_trace.model.episode import Episode, infos_of
from gym_trace.playback.trace import Trace

try:
    from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode
except ImportError as missing:
    raise MissingExtra(f"RLlib episodes need Ray ({missing}): pip install 'ray[rllib]'") from missing

__all__ = ["episodes"]


def episodes(trace: Trace | str | os.PathLike[str]) -> Iterator[SingleAgentEpisode | MultiAgentEpisode]:
    """Yield the finished episodes as RLlib's SingleAgentEpisode, or MultiAgentEpisode for many agents, in NumPy form.

    Values keep their dtype and structure. Numeric annotations become extra model outputs; an annotation
    "states/actor/h" is nested, as extra_model_outputs of dicts. RLlib rejects episodes that are not done, so
    an episode that was cut, closed or lost is truncated.

    Many agents are as RLlib's wrappers of PettingZoo give them: a turn is a step, and the dead steps that follow belong
    to it. An action after which its agent had no turn is left out.
    """
    chosen = finished(trace, many=True)
    if chosen.readers[0].about.agents:
        yield from _of_many(chosen)
        return
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


def _of_many(chosen: Trace) -> Iterator[MultiAgentEpisode]:
    spaces: list[dict[Any, Any]] = [{}, {}]
    with contextlib.suppress(EnvironmentUnavailable):  # where agents had none that were known
        spaces = [dict(space.spaces) for space in (chosen.observation_space, chosen.action_space)]
    for episode in chosen.scan():
        made = _multi_agent_episode(episode, *spaces)
        if made is not None:
            yield made.to_numpy()


def _multi_agent_episode(episode: Episode, observed: Any, acted: Any) -> MultiAgentEpisode | None:
    """Return an episode of many agents; None if no agent's action has a result."""
    agents = [episode[name] for name in episode.agents]
    kept = [len(agent) - (not agent.has_final_observation) for agent in agents]
    steps = sorted(
        {int(time) for agent, count in zip(agents, kept) for time in agent.times[:count] - episode.first_step}
    )
    if not steps:
        return None
    told: list[dict[str, dict[Any, Any]]] = [
        {name: {} for name in ("observations", "actions", "rewards", "infos", "terminateds", "truncateds")}
        for _ in range(len(steps) + 1)
    ]  # the reset, then each step
    has_infos = infos_of(episode) is not None
    for agent, count in zip(agents, kept):
        if not count:
            continue
        rows, name = _rows(agent.observations, len(agent) + 1), agent.name
        infos = [agent.first_info, *agent.infos] if has_infos else [{}] * len(rows)
        at = np.searchsorted(steps, agent.rows[: count + 1], side="left").tolist()
        for number, place in enumerate(at):
            told[place]["observations"][name], told[place]["infos"][name] = rows[number], infos[number]
        for number, place in enumerate(at[1:]):
            told[place]["rewards"][name] = float(agent.rewards[number])
            told[place]["terminateds"][name] = bool(agent.terminations[number])
            told[place]["truncateds"][name] = bool(agent.truncations[number])
        for time, action in zip((agent.times[:count] - episode.first_step).tolist(), _rows(agent.actions, len(agent))):
            told[steps.index(time) + 1]["actions"][name] = action
    terminated = bool(episode.terminations[-1])
    told[-1]["terminateds" if terminated else "truncateds"]["__all__"] = True
    made = MultiAgentEpisode(
        f"{episode.writer}-{episode.episode_id}-{episode.first_step}",
        observation_space=observed,
        action_space=acted,
        len_lookback_buffer=0,
    )
    made.add_env_reset(observations=told[0]["observations"], infos=told[0]["infos"])
    for step in told[1:]:
        made.add_env_step(**step)
    for own in made.agent_episodes.values():
        if not own.is_done:  # its last action was left out
            own.is_truncated = True
    return made


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
