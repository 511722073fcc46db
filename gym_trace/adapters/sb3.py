"""Stable-Baselines3: replay_buffer(trace), and UpdateLogCallback, which proves training."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from gym_trace.adapters.episodes import array, arrays, finished, lengths, rewards_of, scanned
from gym_trace.errors import InvalidOption, MissingExtra
from gym_trace.model.episode import infos_of
from gym_trace.model.trees import mapped
from gym_trace.playback.trace import Trace

try:
    from gymnasium import spaces
    from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
    from stable_baselines3.common.preprocessing import is_image_space, is_image_space_channels_first
    from stable_baselines3.common.vec_env import VecTransposeImage
except ImportError as missing:
    raise MissingExtra(f"replay buffers need Stable-Baselines3 ({missing}): pip install 'gym-trace[sb3]'") from missing

if TYPE_CHECKING:
    from gym_trace.adapters.sb3_updates import UpdateLogCallback, update_parts

__all__ = ["UpdateLogCallback", "replay_buffer", "update_parts"]


def __getattr__(name: str) -> Any:
    if name not in ("UpdateLogCallback", "update_parts"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gym_trace.adapters import sb3_updates  # which needs safetensors

    return getattr(sb3_updates, name)


def replay_buffer(trace: Trace | str | os.PathLike[str], model: Any = None) -> ReplayBuffer:
    """Return the transitions of the finished episodes as Stable-Baselines3 would have collected them.

    Images get their channels first, actions of Box spaces are scaled to [-1, 1], rewards are float32. An episode that
    was not terminated ends with a timeout. Recorded infos go along, for buffers that keep them.

    Args:
        model: DQN, SAC, TD3 or another off-policy algorithm. Its empty replay buffer is filled and returned, also a
            HerReplayBuffer. None: a new buffer that holds just these transitions.

    Raises:
        InvalidOption: the spaces do not fit, or the buffer of the model is too small or not empty.
    """
    episodes = finished(trace)
    steps = int(lengths(episodes).sum())
    if model is None:
        observed, acted = _channels_first(episodes.observation_space), episodes.action_space
        if type(acted).__name__ == "Discrete" and acted.start:
            raise InvalidOption(
                "action space Discrete: Stable-Baselines3 numbers actions from 0; these start elsewhere"
            )
        made = DictReplayBuffer if isinstance(observed, spaces.Dict) else ReplayBuffer
        try:
            buffer = made(steps, observed, acted, device="cpu")
        except (NotImplementedError, AssertionError) as error:
            raise InvalidOption(f"trace: spaces not supported by Stable-Baselines3: {error}") from error
    else:
        buffer = _empty_buffer(model, steps)
    if steps < buffer.n_envs:
        raise InvalidOption(f"trace: {steps} steps do not fill {buffer.n_envs} environments; use fewer")
    rows = steps // buffer.n_envs
    if left := steps - rows * buffer.n_envs:
        warnings.warn(f"skipped the last {left} steps: {steps} do not divide by {buffer.n_envs}", stacklevel=2)
    lanes = [_transitions(episodes, lane * rows, (lane + 1) * rows) for lane in range(buffer.n_envs)]
    try:
        for observations, after, actions, rewards, dones, infos in (
            zip(*steps_of_lanes) for steps_of_lanes in zip(*lanes)
        ):
            buffer.add(
                _stacked(observations, buffer.observation_space),
                _stacked(after, buffer.observation_space),
                _scaled(np.stack(actions), buffer.action_space),
                np.array(rewards),
                np.array(dones),
                list(infos),
            )
    except (ValueError, KeyError) as error:
        raise InvalidOption(f"trace: does not fit the spaces of the model: {error}") from error
    return buffer


def _transitions(episodes: Trace, start: int, stop: int) -> Iterator[tuple[Any, Any, Any, float, bool, dict[str, Any]]]:
    """Yield the steps from start to stop of all episodes, counted one after the other."""
    counts = lengths(episodes)
    ends = np.cumsum(counts)
    first, last = np.searchsorted(ends, [start, stop - 1], "right").tolist()
    place = int(ends[first] - counts[first])
    for episode, rows in scanned(episodes[first : last + 1]):
        observations, actions = arrays(rows), array(episode.actions, "actions")
        rewards, infos = rewards_of(episode), infos_of(episode)
        for step in range(max(0, start - place), min(len(episode), stop - place)):
            done = step == len(episode) - 1
            info = {} if infos is None else dict(infos[step])
            info["TimeLimit.truncated"] = done and not episode.terminations[step]
            before, after = (mapped(itemgetter(at), observations) for at in (step, step + 1))
            yield before, after, actions[step], rewards[step], done, info
        place += len(episode)


def _stacked(rows: Any, space: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _stacked([row[key] for row in rows], part) for key, part in space.spaces.items()}
    found = np.stack(rows)
    return np.moveaxis(found, -1, 1) if found.ndim == 4 and found.shape[1:] != space.shape else found


def _scaled(actions: Any, space: Any) -> Any:
    """Scale actions as the policies of Stable-Baselines3 do."""
    if not isinstance(space, spaces.Box) or not space.is_bounded() or ((space.low == -1) & (space.high == 1)).all():
        return actions
    return 2.0 * ((actions - space.low) / (space.high - space.low)) - 1.0


def _channels_first(space: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _channels_first(part) for key, part in space.spaces.items()})
    is_last = is_image_space(space) and not is_image_space_channels_first(space)
    return VecTransposeImage.transpose_space(space) if is_last else space


def _empty_buffer(model: Any, steps: int) -> ReplayBuffer:
    buffer = getattr(model, "replay_buffer", None)
    if not isinstance(buffer, ReplayBuffer):
        raise InvalidOption(f"model: {type(model).__name__} has no replay buffer; pass DQN, SAC, TD3 or DDPG")
    if buffer.size():
        raise InvalidOption("model: its replay buffer is not empty; fill it before learning")
    if buffer.buffer_size * buffer.n_envs < steps:
        raise InvalidOption(
            f"model: its replay buffer holds {buffer.buffer_size * buffer.n_envs} of {steps} steps; "
            f"create the model with buffer_size={steps}"
        )
    return buffer
