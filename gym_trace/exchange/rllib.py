"""Episodes for RLlib's new API stack: episodes(trace), of one agent or of many."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

from gym_trace.data.episode import Episode, infos_of
from gym_trace.errors import EnvironmentUnavailable, MissingExtra
from gym_trace.exchange.episodes import finished, scanned
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.trace import Trace

try:
    from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode
except ImportError as missing:
    raise MissingExtra(f"RLlib episodes need Ray ({missing}): pip install 'ray[rllib]'") from missing

__all__ = ["episodes"]


def episodes(
    trace: Trace | str | os.PathLike[str], *, normalize_actions: bool = True
) -> Iterator[SingleAgentEpisode | MultiAgentEpisode]:
    """Yield the finished episodes as RLlib's SingleAgentEpisode, or MultiAgentEpisode for many agents, in NumPy form.

    Values keep their dtype and structure; only actions may be scaled. Numeric annotations become extra model outputs;
    an annotation "states/actor/h" is nested, as extra_model_outputs of dicts. RLlib rejects episodes that are not done,
    so an episode that was cut, closed or lost is truncated.

    Episodes of many agents are as from RLlib's wrappers of PettingZoo: a turn and the dead steps after it are one step.
    An action after which its agent had no turn is left out.

    Args:
        normalize_actions: scale float actions of a bounded Box to [-1, 1], as RLlib's episodes have them (see
            config.environment() of RLlib). False: as in the trace; pass it for traces that were imported from RLlib.

    Examples:
        >>> len(next(gym_trace.exchange.rllib.episodes("traces/cartpole")))
        12
    """
    chosen = finished(trace, many_agents=True)
    if index_of(chosen).readers[0].about.agents:
        yield from _multi_agent_episodes(chosen, normalize_actions)
        return
    scaled = chosen.action_space if normalize_actions else None
    for episode, observations in scanned(chosen):
        terminated, infos = bool(episode.terminations[-1]), infos_of(episode)
        converted = SingleAgentEpisode(
            f"{episode.writer}-{episode.episode_id}-{episode.first_step}",
            observations=_rows(observations, len(episode) + 1),
            observation_space=chosen.observation_space,
            actions=_rows(_normalized(episode.actions, scaled), len(episode)),
            action_space=chosen.action_space,
            rewards=list(episode.rewards),
            infos=None if infos is None else [episode.reset_info or {}, *infos],
            extra_model_outputs=_outputs(episode.annotations),
            terminated=terminated,
            truncated=bool(episode.truncations[-1]) or not terminated,
            len_lookback_buffer=0,
        )
        yield converted.to_numpy()


def _normalized(actions: Any, space: Any) -> Any:
    """Scale actions as normalize_action() of RLlib does. space: None: return them unchanged."""
    if isinstance(actions, dict) and isinstance(space, spaces.Dict):
        return {key: _normalized(part, space[key]) for key, part in actions.items()}
    if isinstance(actions, tuple) and isinstance(space, spaces.Tuple):
        return tuple(map(_normalized, actions, space))
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f" or not space.is_bounded():
        return actions
    if ((space.low == -1) & (space.high == 1)).all():
        return actions  # scaling would change bits
    return (actions - space.low) * 2 / (space.high - space.low) - 1


def _multi_agent_episodes(chosen: Trace, normalize_actions: bool) -> Iterator[MultiAgentEpisode]:
    observed: dict[Any, Any] = {}
    acted: dict[Any, Any] = {}
    with contextlib.suppress(EnvironmentUnavailable):  # the space of an agent is unknown
        observed, acted = (dict(space.spaces) for space in (chosen.observation_space, chosen.action_space))
    for episode in chosen.scan():
        converted = _multi_agent_episode(episode, observed, acted, acted if normalize_actions else {})
        if converted is not None:
            yield converted.to_numpy()


def _multi_agent_episode(
    episode: Episode, observed: Any, acted: Any, scaled: dict[Any, Any]
) -> MultiAgentEpisode | None:
    """Return an episode of many agents; None if no agent's action has a result. scaled: spaces of scaled actions."""
    agents = [episode[name] for name in episode.agents]
    counts = [len(agent) - (not agent.has_final_observation) for agent in agents]
    times = sorted(
        {int(time) for agent, count in zip(agents, counts) for time in agent.times[:count] - episode.first_step}
    )
    if not times:
        return None
    steps: list[dict[str, dict[Any, Any]]] = [
        {name: {} for name in ("observations", "actions", "rewards", "infos", "terminateds", "truncateds")}
        for _ in range(len(times) + 1)
    ]  # the reset, then each step
    has_infos = infos_of(episode) is not None
    for agent, count in zip(agents, counts):
        if not count:
            continue
        rows, name = _rows(agent.observations, len(agent) + 1), agent.name
        infos = [agent.first_info, *agent.infos] if has_infos else [{}] * len(rows)
        step_of_turn = np.searchsorted(times, agent.rows[: count + 1], side="left").tolist()
        for turn, step in enumerate(step_of_turn):
            steps[step]["observations"][name], steps[step]["infos"][name] = rows[turn], infos[turn]
        for turn, step in enumerate(step_of_turn[1:]):
            steps[step]["rewards"][name] = float(agent.rewards[turn])
            steps[step]["terminateds"][name] = bool(agent.terminations[turn])
            steps[step]["truncateds"][name] = bool(agent.truncations[turn])
        actions = _rows(_normalized(agent.actions, scaled.get(name)), len(agent))
        for time, action in zip((agent.times[:count] - episode.first_step).tolist(), actions):
            steps[times.index(time) + 1]["actions"][name] = action
    terminated = bool(episode.terminations[-1])
    steps[-1]["terminateds" if terminated else "truncateds"]["__all__"] = True
    converted = MultiAgentEpisode(
        f"{episode.writer}-{episode.episode_id}-{episode.first_step}",
        observation_space=observed,
        action_space=acted,
        len_lookback_buffer=0,
    )
    converted.add_env_reset(observations=steps[0]["observations"], infos=steps[0]["infos"])
    for arguments in steps[1:]:
        converted.add_env_step(**arguments)
    for agent_episode in converted.agent_episodes.values():
        if not agent_episode.is_done:  # its last action was left out
            agent_episode.is_truncated = True
    return converted


def _rows(tree: Any, count: int) -> list[Any]:
    """Return a list of rows, each with the structure of the space."""
    if isinstance(tree, dict):
        parts = {key: _rows(part, count) for key, part in tree.items()}
        return [{key: rows[i] for key, rows in parts.items()} for i in range(count)]
    if isinstance(tree, tuple):
        return list(zip(*(_rows(part, count) for part in tree)))
    return list(tree)


def _outputs(annotations: dict[str, Any]) -> dict[str, Any] | None:
    """Return numeric annotations as lists, nested by the parts of their names; None without any."""
    outputs: dict[str, Any] = {}
    for name, rows in annotations.items():
        if isinstance(rows, np.ndarray) and rows.dtype.kind in "biufc":
            *path, last = name.split("/")
            nested = outputs
            for key in path:
                nested = nested.setdefault(key, {})
            nested[last] = list(rows)
    return outputs or None
