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

    Many agents are as RLlib's wrappers of PettingZoo give them: a turn is a step, and the dead steps that follow belong
    to it. An action after which its agent had no turn is left out.

    Args:
        normalize_actions: as in RLlib's config.environment(), and by default True as there: float actions of a bounded
            Box are scaled to [-1, 1], as RLlib's episodes have them. False: as in the trace; pass it for traces
            that were imported from RLlib.
    """
    chosen = finished(trace, many=True)
    if chosen.readers[0].about.agents:
        yield from _of_many(chosen, normalize_actions)
        return
    scaled = chosen.action_space if normalize_actions else None
    for episode, observations in scanned(chosen):
        terminated, infos = bool(episode.terminations[-1]), infos_of(episode)
        made = SingleAgentEpisode(
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
        yield made.to_numpy()


def _normalized(actions: Any, space: Any) -> Any:
    """Scale actions as normalize_action() of RLlib does. space: None: leave them as they are."""
    if isinstance(actions, dict) and isinstance(space, spaces.Dict):
        return {key: _normalized(part, space[key]) for key, part in actions.items()}
    if isinstance(actions, tuple) and isinstance(space, spaces.Tuple):
        return tuple(map(_normalized, actions, space))
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f" or not space.is_bounded():
        return actions
    if ((space.low == -1) & (space.high == 1)).all():
        return actions  # bit for bit
    return (actions - space.low) * 2 / (space.high - space.low) - 1


def _of_many(chosen: Trace, normalize_actions: bool) -> Iterator[MultiAgentEpisode]:
    observed: dict[Any, Any] = {}
    acted: dict[Any, Any] = {}
    with contextlib.suppress(EnvironmentUnavailable):  # agents without known observations
        observed, acted = (dict(space.spaces) for space in (chosen.observation_space, chosen.action_space))
    for episode in chosen.scan():
        made = _multi_agent_episode(episode, observed, acted, acted if normalize_actions else {})
        if made is not None:
            yield made.to_numpy()


def _multi_agent_episode(
    episode: Episode, observed: Any, acted: Any, scaled: dict[Any, Any]
) -> MultiAgentEpisode | None:
    """Return an episode of many agents; None if no agent's action has a result. scaled: spaces of scaled actions."""
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
        actions = _rows(_normalized(agent.actions, scaled.get(name)), len(agent))
        for time, action in zip((agent.times[:count] - episode.first_step).tolist(), actions):
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
