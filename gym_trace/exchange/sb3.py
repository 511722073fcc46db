"""Stable-Baselines3: replay_buffer(trace), and UpdateLogCallback, which proves training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from gym_trace.data.episode import infos_of
from gym_trace.data.trees import mapped
from gym_trace.errors import InvalidOption, MissingExtra, warn
from gym_trace.exchange.episodes import array, arrays, finished, lengths, rewards_of, scanned
from gym_trace.on_first_use import on_first_use
from gym_trace.playback.trace import Trace
from gym_trace.printable import printable

try:
    from gymnasium import spaces
    from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
    from stable_baselines3.common.preprocessing import is_image_space, is_image_space_channels_first
    from stable_baselines3.common.vec_env import VecTransposeImage
except ImportError as missing:
    raise MissingExtra(f"replay buffers need Stable-Baselines3 ({missing}): pip install 'gym-trace[sb3]'") from missing

if TYPE_CHECKING:
    from gym_trace.exchange.sb3_updates import UpdateLogCallback, update_parts

_UPDATES = "gym_trace.exchange.sb3_updates"

__all__ = ["UpdateLogCallback", "replay_buffer", "update_parts"]

if not TYPE_CHECKING:  # only these need safetensors
    __getattr__ = on_first_use(__name__, dict.fromkeys(("UpdateLogCallback", "update_parts"), _UPDATES))


def replay_buffer(trace: Trace | str | os.PathLike[str], model: Any = None) -> ReplayBuffer:
    """Return the transitions of the finished episodes as Stable-Baselines3 would have collected them.

    Images get their channels first, actions of Box spaces are scaled to [-1, 1], rewards are float32. An episode that
    was not terminated ends with a timeout. Recorded infos are passed on, for buffers that store them.

    The model must have the recorded spaces. If its actions are in [-1, 1], as RescaleAction makes them, actions are
    scaled by the recorded bounds. Where an import left bounds unknown, those of the model count.

    Args:
        model: DQN, SAC, TD3 or another off-policy algorithm. Its empty replay buffer is filled and returned, also a
            HerReplayBuffer. None: a new buffer that holds just these transitions.

    Raises:
        InvalidOption: the spaces do not fit, or the buffer of the model is too small or not empty.

    Examples:
        >>> buffer = gym_trace.exchange.sb3.replay_buffer("traces/cartpole")
        >>> buffer.sample(32).observations.shape
        torch.Size([32, 4])
    """
    episodes = finished(trace)
    steps = int(lengths(episodes).sum())
    observed, acted = _channels_first(episodes.observation_space), episodes.action_space
    if isinstance(acted, spaces.Discrete) and acted.start:
        raise InvalidOption(
            f"action space {acted}: Stable-Baselines3 numbers actions from 0; these start at {acted.start}"
        )
    if model is None:
        buffer_class = DictReplayBuffer if isinstance(observed, spaces.Dict) else ReplayBuffer
        try:
            buffer = buffer_class(steps, observed, acted, device="cpu")
        except (NotImplementedError, AssertionError) as error:
            raise InvalidOption(f"trace: spaces not supported by Stable-Baselines3: {error}") from error
    else:
        buffer = _empty_buffer(model, steps)
    if steps < buffer.n_envs:
        raise InvalidOption(f"trace: {steps} steps do not fill {buffer.n_envs} environments; use fewer")
    rows = steps // buffer.n_envs
    if skipped := steps - rows * buffer.n_envs:
        warn(f"skipped the last {skipped} steps: {steps} do not divide by {buffer.n_envs}")
    _check_space("observation space", observed, buffer.observation_space)
    _check_space("action space", acted, buffer.action_space)
    scale = acted if _is_normalized(buffer.action_space) and not _is_widest(acted) else buffer.action_space
    lanes = [_transitions(episodes, lane * rows, (lane + 1) * rows, buffer) for lane in range(buffer.n_envs)]
    try:
        for observations, after, actions, rewards, dones, infos in (
            zip(*steps_of_lanes) for steps_of_lanes in zip(*lanes)
        ):
            buffer.add(
                _stacked(observations, buffer.observation_space),
                _stacked(after, buffer.observation_space),
                _scaled(np.stack(actions), scale),
                np.array(rewards),
                np.array(dones),
                list(infos),
            )
    except (ValueError, KeyError) as error:
        raise InvalidOption(f"trace: does not fit the spaces of the model: {error}") from error
    return buffer


def _transitions(
    episodes: Trace, start: int, stop: int, buffer: ReplayBuffer
) -> Iterator[tuple[Any, Any, Any, float, bool, dict[str, Any]]]:
    """Yield (observation, next observation, action, reward, done, info) of steps start to stop of all episodes."""
    observed, acted = episodes.observation_space, episodes.action_space
    counts = lengths(episodes)
    ends = np.cumsum(counts)
    first, last = np.searchsorted(ends, [start, stop - 1], "right").tolist()
    offset = int(ends[first] - counts[first])
    for episode, rows in scanned(episodes[first : last + 1]):
        observations, actions = arrays(rows), array(episode.actions, "actions")
        rewards, infos = rewards_of(episode), infos_of(episode)
        _check_bounds("observations", observations, observed, buffer.observation_space)
        _check_bounds("actions", actions, acted, buffer.action_space)
        for step in range(max(0, start - offset), min(len(episode), stop - offset)):
            done = step == len(episode) - 1
            info = {} if infos is None else dict(infos[step])
            info["TimeLimit.truncated"] = done and not episode.terminations[step]
            before, after = (mapped(itemgetter(row), observations) for row in (step, step + 1))
            yield before, after, actions[step], rewards[step], done, info
        offset += len(episode)


def _stacked(rows: Any, space: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _stacked([row[key] for row in rows], part) for key, part in space.spaces.items()}
    return _in_axis_order(np.stack(rows), space)


def _in_axis_order(rows: Any, space: Any) -> Any:
    """Return rows with images in the axis order of the space."""
    return np.moveaxis(rows, -1, 1) if rows.ndim == 4 and rows.shape[1:] != space.shape else rows


def _scaled(actions: Any, space: Any) -> Any:
    """Scale actions as the policies of Stable-Baselines3 do."""
    if not isinstance(space, spaces.Box) or not space.is_bounded() or _is_normalized(space):
        return actions
    return 2.0 * ((actions - space.low) / (space.high - space.low)) - 1.0


def _check_space(what: str, recorded: Any, wanted: Any) -> None:
    """Raise InvalidOption if a recorded space does not fit that of the model."""
    if not _fits(recorded, wanted) and not (what == "action space" and _is_rescaled(recorded, wanted)):
        raise InvalidOption(
            f"{what}: {printable(str(recorded))[:200]} of the trace does not fit {printable(str(wanted))[:200]} of the "
            "model; create the model with an environment of the recorded spaces"
        )


def _fits(recorded: Any, wanted: Any) -> bool:
    """Compare two spaces, except for unknown bounds and those infinite in either space."""
    if isinstance(recorded, spaces.Dict) and isinstance(wanted, spaces.Dict):
        return recorded.spaces.keys() == wanted.spaces.keys() and all(
            _fits(part, wanted[key]) for key, part in recorded.spaces.items()
        )
    if isinstance(recorded, spaces.Box) and isinstance(wanted, spaces.Box):
        same_form = recorded.shape == wanted.shape and np.can_cast(recorded.dtype, wanted.dtype, "same_kind")
        return same_form and (_is_widest(recorded) or _same_bounds(recorded, wanted))
    if _is_widest(recorded):
        return recorded.dtype.kind in "biu" and recorded.shape == wanted.shape
    if isinstance(recorded, spaces.Discrete) and isinstance(wanted, spaces.Discrete):
        return bool(recorded.n == wanted.n and recorded.start == wanted.start)
    return bool(recorded == wanted)


def _same_bounds(recorded: spaces.Box, wanted: spaces.Box) -> bool:
    pairs = (recorded.low, wanted.low), (recorded.high, wanted.high)
    return all(bool((~np.isfinite(a) | ~np.isfinite(b) | np.isclose(a, b, 1e-6, 0)).all()) for a, b in pairs)


def _is_rescaled(recorded: Any, wanted: Any) -> bool:
    """Return True if RescaleAction to [-1, 1] turns the recorded space into the wanted one."""
    are_boxes = isinstance(recorded, spaces.Box) and _is_normalized(wanted) and recorded.shape == wanted.shape
    return are_boxes and recorded.is_bounded() and recorded.dtype.kind == "f"


def _is_normalized(space: Any) -> bool:
    return isinstance(space, spaces.Box) and bool(((space.low == -1) & (space.high == 1)).all())


def _is_widest(space: Any) -> bool:
    """Return True for a Box of all values of its dtype: an import uses it where bounds are unknown."""
    if not isinstance(space, spaces.Box):
        return False
    info = np.iinfo(space.dtype) if space.dtype.kind in "iu" else None
    low, high = (-np.inf, np.inf) if info is None else (info.min, info.max)
    return space.dtype.kind == "b" or bool(((space.low == low) & (space.high == high)).all())


def _check_bounds(what: str, rows: Any, recorded: Any, wanted: Any) -> None:
    """Raise InvalidOption if the recorded bounds are unknown, and rows are outside of the wanted ones."""
    if isinstance(recorded, spaces.Dict):
        for key, part in recorded.spaces.items():
            _check_bounds(f"{what}[{key!r}]", rows[key], part, wanted[key])
    elif _is_widest(recorded) and not _is_widest(wanted):
        if isinstance(wanted, spaces.Box):
            low, high = wanted.low, wanted.high
        elif isinstance(wanted, spaces.MultiBinary):
            low, high = np.zeros(wanted.shape), np.ones(wanted.shape)
        else:
            low = np.asarray(wanted.start)
            high = low + (wanted.n if isinstance(wanted, spaces.Discrete) else wanted.nvec) - 1
        rows = _in_axis_order(rows, wanted)
        if outside := int(np.count_nonzero((rows < low) | (rows > high))):
            raise InvalidOption(
                f"{printable(what)}: {outside} numbers of an episode lie outside of {printable(str(wanted))[:200]} of "
                "the model; create the model with the environment of the data"
            )


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
