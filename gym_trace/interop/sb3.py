"""Replay buffers of Stable-Baselines3, filled with what ``gym-trace export --to sb3`` has written."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np

from gym_trace.envs.spaces import restore
from gym_trace.errors import InvalidOption, MissingExtra, TraceError, UnreadableRecording
from gym_trace.format.manifest import json_of
from gym_trace.interop.learners.sb3 import ABOUT, member
from gym_trace.interop.steps.untagged import untagged
from gym_trace.model.values import Array
from gym_trace.printable import printable

try:
    from gymnasium import spaces
    from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
    from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
    from stable_baselines3.common.preprocessing import is_image_space, is_image_space_channels_first
    from stable_baselines3.common.vec_env import VecTransposeImage
    from stable_baselines3.her.her_replay_buffer import HerReplayBuffer
except ImportError as missing:
    raise MissingExtra("replay buffers take Stable-Baselines3: pip install 'gym-trace[sb3]'") from missing

_BLOCK = 4 << 20  # bytes that are read at a time
_MOST_TEXT = 64 << 20

Arranged = Callable[[Array], Array]


def load_replay_buffer(path: str | os.PathLike[str], model: OffPolicyAlgorithm | None = None) -> ReplayBuffer:
    """A buffer with all the transitions, as Stable-Baselines3 would have collected them itself.

    Images have their channels first, actions of Box spaces are scaled from their bounds to -1 … 1, float64 becomes the
    dtype of the space, ``timeouts`` is set where an episode ended without being terminated. Nothing is unpickled.

    Args:
        path: what ``gym-trace export --to sb3`` has written.
        model: DQN, SAC, TD3, DDPG or another off-policy algorithm, which has the buffer from then on, as after
            ``model.load_replay_buffer``. The buffer is of its class and size (larger, if the transitions are more), for
            its number of environments, and on its device. None: a buffer with just these transitions.

    Returns:
        ReplayBuffer; DictReplayBuffer for observations that are dicts. Arrays of (steps, environments, …).

    Raises:
        UnreadableRecording: the file is something else, or damaged.
        InvalidOption: the transitions do not fit the spaces of the model, or its kind of buffer cannot be filled.
    """
    if model is not None and not isinstance(model, OffPolicyAlgorithm):
        raise InvalidOption(f"{type(model).__name__} has no replay buffer; give a DQN, SAC, TD3 or DDPG")
    try:
        with zipfile.ZipFile(path) as archive:
            buffer = _filled(_Arrays(archive, path), model)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, NotImplementedError) as error:
        if isinstance(error, TraceError):
            raise
        raise UnreadableRecording(f"{os.fspath(path)}: is not what export --to sb3 writes: {error}") from error
    if model is not None:
        model.replay_buffer = buffer
    return buffer


def _filled(arrays: _Arrays, model: OffPolicyAlgorithm | None) -> ReplayBuffer:
    observed, acted = arrays.spaces() if model is None else (model.observation_space, model.action_space)
    steps, lanes = arrays.steps(), 1 if model is None else model.n_envs
    rows = steps // lanes
    if not rows:
        raise InvalidOption(f"{arrays.path}: there are {steps} steps, too few for {lanes} environments")
    if rows * lanes < steps:
        warnings.warn(
            f"{arrays.path}: the last {steps - rows * lanes} of {steps} steps are left out, so that each of {lanes} "
            "environments has as many",
            stacklevel=3,
        )
    buffer = _empty(observed, acted, rows, lanes, model)
    for key in observed.spaces if isinstance(observed, spaces.Dict) else [""]:
        for column in ("observations", "next_observations"):
            name, into = member(column, key), getattr(buffer, column)
            into = into[key] if key else into
            arrays.read(name, into, rows, _observed(arrays, name, into.shape[2:]))
    arrays.read("actions", buffer.actions, rows, _acted(arrays, acted, buffer.action_dim))
    for name in ("rewards", "dones", "timeouts"):
        arrays.read(name, getattr(buffer, name), rows, lambda block: block)
    buffer.pos, buffer.full = rows % buffer.buffer_size, rows == buffer.buffer_size
    return buffer


def _empty(observed: Any, acted: Any, rows: int, lanes: int, model: OffPolicyAlgorithm | None) -> ReplayBuffer:
    if model is None:
        made = DictReplayBuffer if isinstance(observed, spaces.Dict) else ReplayBuffer
        return made(rows, observed, acted, device="cpu")
    kind = model.replay_buffer_class
    if model.optimize_memory_usage or kind is None or issubclass(kind, HerReplayBuffer):
        what = "with optimize_memory_usage=True" if model.optimize_memory_usage else "for hindsight"
        raise InvalidOption(f"a replay buffer {what} cannot be filled; make the model with a plain one")
    size = max(rows, model.buffer_size // lanes) * lanes
    return kind(size, observed, acted, device=model.device, n_envs=lanes, **model.replay_buffer_kwargs)


def _observed(arrays: _Arrays, name: str, wanted: tuple[int, ...]) -> Arranged:
    """Observations as a buffer has them that wants each of this shape."""
    shape = arrays.shape(name)[1:]
    if len(shape) == 3 and shape != wanted == (shape[2], *shape[:2]):
        return lambda block: np.moveaxis(block, -1, 1)
    if shape not in (wanted, wanted[1:] if wanted == (1,) else wanted):
        raise InvalidOption(f"{arrays.path}: {name} are of shape {shape}, and {wanted} in the model")
    return lambda block: block.reshape(len(block), *wanted)


def _acted(arrays: _Arrays, space: Any, width: int) -> Arranged:
    """Actions as a buffer has them; those of a Box scaled, as Stable-Baselines3's policies do it."""
    shape, is_box = arrays.shape("actions")[1:], isinstance(space, spaces.Box)
    if int(np.prod(shape)) != width or (arrays.dtype("actions").kind == "f" and not is_box):
        told = f"{arrays.dtype('actions')} of shape {shape}, which do not fit {printable(space)}"
        raise InvalidOption(f"{arrays.path}: actions are {told}")
    if not is_box or (np.all(space.low == -1) and np.all(space.high == 1)):
        return lambda block: block.reshape(-1, width)
    low, high = space.low.reshape(width), space.high.reshape(width)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise InvalidOption(f"{arrays.path}: actions have no bounds to be scaled by, which Stable-Baselines3 wants")
    return lambda block: 2.0 * ((block.reshape(-1, width) - low) / (high - low)) - 1.0


class _Arrays:
    """The arrays of an .npz file."""

    def __init__(self, archive: zipfile.ZipFile, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        self._archive = archive

    def spaces(self) -> tuple[Any, Any]:
        """Of the observations and actions, as Stable-Baselines3 makes them of the environment's."""
        if self._archive.getinfo(ABOUT).file_size > _MOST_TEXT:
            raise UnreadableRecording(f"{self.path}: what is said of its spaces is too long")
        said = untagged(json_of(self._archive.read(ABOUT)))
        if not isinstance(said, dict):
            raise UnreadableRecording(f"{self.path}: what is said of its spaces is malformed")
        observed, acted = (restore(said[f"{name}_space"]) for name in ("observation", "action"))
        if isinstance(observed, spaces.Dict):
            return spaces.Dict({key: _transposed(space) for key, space in observed.spaces.items()}), acted
        return _transposed(observed), acted

    def steps(self) -> int:
        """How many there are, of all arrays. Raises ValueError: they differ."""
        names = [name.removesuffix(".npy") for name in self._archive.namelist() if name.endswith(".npy")]
        lengths = {self.shape(name)[0] for name in names}
        if len(lengths) != 1:
            raise ValueError(f"its arrays have {sorted(lengths)} steps")
        return lengths.pop()

    def shape(self, name: str) -> tuple[int, ...]:
        with self._opened(name) as (_, shape, _):
            return shape

    def dtype(self, name: str) -> np.dtype[Any]:
        with self._opened(name) as (_, _, dtype):
            return dtype

    def read(self, name: str, into: Array, rows: int, arranged: Arranged) -> None:
        """Fills (rows, environments, …) of an array: each environment has steps that follow each other."""
        with self._opened(name) as (stream, shape, dtype):
            row = max(1, dtype.itemsize * math.prod(shape[1:]))
            for lane in range(into.shape[1]):
                for start in range(0, rows, most := max(1, _BLOCK // row)):
                    stop = min(rows, start + most)
                    raw = stream.read((stop - start) * row)
                    with np.errstate(over="ignore"):  # of float64 that becomes float32
                        into[start:stop, lane] = arranged(np.frombuffer(raw, dtype).reshape(stop - start, *shape[1:]))

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[tuple[IO[bytes], tuple[int, ...], np.dtype[Any]]]:
        """A member, where its rows begin, and what they are. Raises ValueError, KeyError."""
        info = self._archive.getinfo(f"{name}.npy")
        with self._archive.open(info) as stream:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, by_column, dtype = read(stream)
            if by_column or dtype.hasobject or not shape or math.prod(shape) * dtype.itemsize > info.file_size:
                raise ValueError(f"{printable(name)} is malformed")
            yield stream, shape, dtype


def _transposed(space: Any) -> Any:
    """The space with its channels first, where Stable-Baselines3 wraps an environment in VecTransposeImage."""
    if is_image_space(space) and not is_image_space_channels_first(space):
        return VecTransposeImage.transpose_space(space)
    return space
