"""Environments and values that test a recorder: reused buffers, odd values, and comparisons bit for bit."""

import array
import collections
import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import GraphInstance

from gym_trace.data.tensors import RawArray


class Result(NamedTuple):
    """Result of one scripted step."""

    observation: Any
    reward: Any = 1.0
    terminated: Any = False
    truncated: Any = False
    info: Any = None


class ToyEnv(gymnasium.Env[Any, Any]):
    """Calls result(action) in each step, and result(None) in each reset, which uses its observation and info.

    Attributes:
        episode: index of the episode, from 0.
        t: steps since the reset.
        options: options of the reset.
    """

    episode, t = -1, 0

    def __init__(self, observation_space: Any = None, action_space: Any = None, result: Any = None):
        given = {"observation_space": observation_space, "action_space": action_space, "result": result}
        vars(self).update({name: value for name, value in given.items() if value is not None})

    def result(self, action: Any) -> Result:
        raise NotImplementedError

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.t, self.options = self.episode + 1, 0, options or {}
        first = self.result(None)
        return first.observation, first.info or {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.t += 1
        *result, info = self.result(action)
        return (*result, info or {})


class ScriptedEnv(gymnasium.Env[Any, Any]):
    """Plays a script: a list of episodes, each a reset observation and a list of results.

    It returns copies and overwrites them at the next call, like environments that reuse buffers.
    """

    def __init__(self, observation_space: Any, action_space: Any, episodes: list[tuple[Any, list[Result]]]):
        self.observation_space = observation_space
        self.action_space = action_space
        self._episodes = iter(episodes)
        self._steps: Iterator[Result] = iter(())
        self._handed_out: list[Any] = []
        self.calls: list[Any] = []

    def _hand_out(self, value: Any) -> Any:
        value = duplicate(value)
        self._handed_out.append(value)
        return value

    def spoil(self) -> None:
        for value in self._handed_out:
            spoil(value)
        self._handed_out.clear()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.calls.append(("reset", seed, options))
        self.spoil()
        first, steps = next(self._episodes)
        self._steps = iter(steps)
        return self._hand_out(first), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.calls.append("step")
        self.spoil()
        told = next(self._steps)
        info = {} if told.info is None else told.info
        return (
            self._hand_out(told.observation),
            self._hand_out(told.reward),
            told.terminated,
            told.truncated,
            self._hand_out(info),
        )

    def close(self) -> None:
        self.calls.append("close")


def scripted(steps: list[Result], space: Any = None, first: Any = None) -> ScriptedEnv:
    """Return an environment with one episode and two actions. Its observations are 0 or 1 by default."""
    return ScriptedEnv(
        space or spaces.Discrete(2), spaces.Discrete(2), [(np.int64(0) if first is None else first, steps)]
    )


class CountingEnv(gymnasium.Env[Any, Any]):
    """Observes the number of steps since the reset, in a reused buffer. Ends after `length` steps."""

    metadata = {"render_modes": ["rgb_array_list"]}  # noqa: RUF012

    def __init__(self, length: int = 5, shape: tuple[int, ...] = (2,), render_mode: str | None = None):
        self.observation_space = spaces.Box(0, 2**31, shape, np.int64)
        self.action_space = spaces.Discrete(4)
        self.render_mode = render_mode
        self.length = length
        self.calls: list[str] = []
        self._buffer = np.zeros(shape, np.int64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.calls.append("reset")
        self._buffer[...] = 0
        return self._buffer, {"reset": True}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.calls.append("step")
        self._buffer += 1
        count = int(self._buffer.flat[0])
        return self._buffer, float(count), count >= self.length, False, {"count": count, "action": action}

    def close(self) -> None:
        self.calls.append("close")


class ImageEnv(CountingEnv):
    """Like CountingEnv, with images of 64 x 80 x 3 whose first pixels are noise."""

    def __init__(self, length: int = 5):
        super().__init__(length)
        self.observation_space = spaces.Box(0, 255, (64, 80, 3), np.uint8)
        self._image = np.zeros((64, 80, 3), np.uint8)
        self._count = 0

    def _paint(self) -> Any:
        self._image[...] = self._count % 251
        self._image[:4] = np.random.default_rng(self._count).integers(0, 256, (4, 80, 3))
        return self._image

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._count = 0
        return self._paint(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._count += 1
        return self._paint(), float(self._count), self._count >= self.length, False, {}


def images(count: int) -> list[np.ndarray]:
    """Return the first observations of an ImageEnv."""
    env = ImageEnv(count)
    return [env.reset()[0].copy(), *(env.step(0)[0].copy() for _ in range(count - 1))]


class OddSpace(spaces.Space[Any]):
    """A custom space."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        random = self.np_random
        return {"cells": [int(n) for n in random.integers(0, 9, 3)], ("a", 1): random.normal(size=2), "none": None}

    def contains(self, x: Any) -> bool:
        return isinstance(x, dict)


class Lazy:
    """An array that is computed on access, like stacked frames of gymnasium 0.29 and many tensors."""

    def __init__(self, array: Any):
        self.array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.array(self.array, dtype)


_IMMUTABLE = {int, float, bool, str, bytes, type(None), np.int64, np.float32, np.float64}
_SPOILT = bytes(byte ^ 0x55 for byte in range(256))


def duplicate(value: Any) -> Any:
    """Return a copy that shares no memory and keeps byte order, memory layout, and signs and payloads of NaN."""
    if type(value) in _IMMUTABLE:
        return value
    if isinstance(value, np.ma.MaskedArray):
        return value if value is np.ma.masked else value.copy()
    if isinstance(value, (bytearray, array.array, collections.deque)):
        return copy.copy(value)
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            items = np.empty(value.shape, object)
            for place in np.ndindex(value.shape):
                items[place] = duplicate(value[place])
            return items
        again = np.copy(value, order="K")
        if not (value.flags.c_contiguous or value.flags.f_contiguous):  # a view with gaps stays one
            wide = np.empty((*value.shape[:-1], value.shape[-1] * 2), value.dtype)
            view = wide[..., ::2]
            view[...] = value
            return view
        return again
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(duplicate, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(duplicate, value))
    if isinstance(value, Mapping):
        return {key: duplicate(item) for key, item in value.items()}
    return value


def spoil(value: Any) -> None:
    """Overwrite all mutable parts of value."""
    if type(value) in _IMMUTABLE or value is np.ma.masked:
        return
    if isinstance(value, np.ma.MaskedArray):
        spoil(value.data)
        value.mask = ~np.ma.getmaskarray(value)
        return
    if isinstance(value, (bytearray, array.array)):
        for i in range(len(value)):
            value[i] ^= 0x55
        return
    if isinstance(value, collections.deque):
        value.clear()
        return
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            for item in value.flat:
                spoil(item)
            value[...] = "spoilt"
        elif value.flags.writeable and value.size:
            value[...] = np.frombuffer(value.tobytes().translate(_SPOILT), value.dtype).reshape(value.shape)
    elif isinstance(value, dict):
        for item in value.values():
            spoil(item)
        value.clear()
    elif isinstance(value, (list, tuple)):
        for item in value:
            spoil(item)
        if isinstance(value, list):
            value.clear()


def bits(value: Any) -> Any:
    """Return a form that is equal only for values of equal types, dtypes, shapes and bits."""
    if isinstance(value, np.ma.MaskedArray):
        fill_value = np.asarray(value._fill_value)
        kept = bits(fill_value) if fill_value.dtype == value.dtype else None
        return "masked", bits(value.data), bits(np.ma.getmaskarray(value)), kept
    if isinstance(value, RawArray):
        return "raw", value.dtype, bits(value.data)
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return "objects", value.shape, tuple(bits(value[place]) for place in np.ndindex(value.shape))
        return "array", value.dtype.str, value.shape, number_bytes(value)
    if isinstance(value, np.generic):
        return "scalar", value.dtype.str, number_bytes(value)
    if type(value) is float:
        return "float", np.float64(value).tobytes()
    if type(value) is complex:
        return "complex", np.complex128(value).tobytes()
    if isinstance(value, GraphInstance):
        return "graph", tuple(map(bits, value))
    if type(value) in (list, tuple):
        return type(value).__name__, tuple(map(bits, value))
    if isinstance(value, Mapping):
        return "map", frozenset((bits(key), bits(item)) for key, item in value.items())
    return type(value).__name__, value


def number_bytes(value: Any) -> bytes:
    """Return the bytes of an array or scalar, without padding of extended precision, which copies do not keep."""
    data = np.asarray(value)
    if data.dtype.kind in "fc" and np.finfo(data.dtype).nmant == 63:  # ten bytes of sixteen, or of twelve
        part = data.dtype.itemsize // (1 + (data.dtype.kind == "c"))
        return np.frombuffer(data.tobytes(), np.uint8).reshape(-1, part)[:, :10].tobytes()
    return data.tobytes()


def row_bits(value: Any) -> Any:
    """Like bits(), but NumPy scalars, 0-d arrays and Python numbers compare equal."""
    if type(value) in (bool, float) or (type(value) is int and -(1 << 63) <= value < 1 << 63):
        value = np.asarray(value)
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
        return "array", value.dtype.str, value.shape, value.tobytes()
    return bits(value)


@contextmanager
def small_blocks(rows: int = 4, chunk: int = 300, frame: int = 4096, values: int = 200) -> Iterator[None]:
    """Make recorders use small slabs and chunks, so that short runs cross all their boundaries.

    Args:
        rows: rows per slab.
        chunk: raw bytes per chunk.
        frame: bytes from which on a value is stored as changes.
        values: bytes of the log of a slab, at least a page.
    """
    sizes = {"MOST_ROWS": rows, "LOG_BYTES": values, "VALUES_BYTES": values}
    with (
        mock.patch.multiple("gym_trace.recording.single.slabs", **sizes),
        mock.patch.multiple("gym_trace.recording.single.packing", SMALL_CHUNK=chunk, LARGE_CHUNK=chunk),
        mock.patch("gym_trace.format.ring.row_layout.DELTA_BYTES", frame),
    ):
        yield


def small_windows(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Make scans in the order of episodes give windows of this number of steps, also of short episodes."""
    monkeypatch.setattr("gym_trace.playback.ordered_scan._MOST_STEPS", steps)
    monkeypatch.setattr("gym_trace.playback.ordered_scan._FEWEST", 1 << 30)
