"""Memory layout of a slab of lanes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.layout import Leaf
from gym_trace.data.values import Array, dtype_from
from gym_trace.errors import CorruptTrace
from gym_trace.format.columns import Path
from gym_trace.format.ring.lanes.autoreset import DISABLED, NEXT_STEP, SAME_STEP
from gym_trace.format.ring.memory import SLAB_HEADER
from gym_trace.format.wire import aligned

REWARDS, TERMINATIONS, TRUNCATIONS = ("rewards",), ("terminations",), ("truncations",)
REWARD_BYTES = 8  # reserved per reward; types other than float64 may use less
_NARROW = 16  # bytes; rows up to this size are ordered by time first
_STEP_BYTES = REWARD_BYTES + 2  # per lane and step, without observation and action
_MOST_LEAVES, _MOST_DIMENSIONS = 1 << 16, 32
_MOST_NUMBER = 1 << 32  # limit of the number of a lane


class _LaneField(NamedTuple):
    """A column of the slab: a typed leaf, rewards, or flags."""

    leaf: Leaf
    offset: int
    by_time: bool  # True: ordered by time, then by lane; False: by lane, then by time


class LaneLayout:
    """The columns of a slab, and the offset of its log.

    A column is ordered by lane, then by time, or the reverse. Narrow rows are ordered by time first, because writing
    each row to a cache line of its own at every step takes longer than reordering many rows later.

    Attributes:
        lanes: number of lanes.
        times: maximum number of steps in a slab.
        mode: autoreset mode.
        filtered: True if single steps may be skipped.
        numbers: the lanes' numbers in the environment, if only some are recorded; None: 0, 1, 2 …
        observation_leaves, action_leaves: leaves of one lane.
        log: offset of the log, which extends to the end of the slab.
    """

    def __init__(
        self,
        lanes: int,
        times: int,
        mode: str,
        filtered: bool,
        observation_leaves: list[Leaf],
        action_leaves: list[Leaf],
        numbers: Array | None = None,
    ):
        self.lanes, self.times, self.mode, self.filtered = lanes, times, mode, filtered
        self.observation_leaves, self.action_leaves, self.numbers = observation_leaves, action_leaves, numbers
        self.columns: dict[Path, _LaneField] = {}
        self.log = SLAB_HEADER
        flags = [Leaf(path, np.dtype(np.bool_), ()) for path in (TERMINATIONS, TRUNCATIONS)]
        for leaf in (*observation_leaves, *action_leaves, Leaf(REWARDS, np.dtype("<f8"), ()), *flags):
            if leaf.dtype is not None:
                self.columns[leaf.path] = _LaneField(leaf, self.log, leaf.row_size <= _NARROW)
                self.log += aligned(leaf.row_size * lanes * times)

    def described(self) -> dict[str, Any]:
        """Return the layout as stored in the ring file."""
        fixed = [self.columns[path].leaf for path in (REWARDS, TERMINATIONS, TRUNCATIONS)]
        numbers = {} if self.numbers is None else {"numbers": self.numbers.tolist()}
        return numbers | {
            "lanes": self.lanes,
            "times": self.times,
            "mode": self.mode,
            "filtered": self.filtered,
            "columns": [self._described(leaf) for leaf in (*self.observation_leaves, *self.action_leaves, *fixed)],
            "log": self.log,
        }

    def _described(self, leaf: Leaf) -> list[Any]:
        if leaf.dtype is None:
            return [list(leaf.path), None, [], None, False]
        _, offset, by_time = self.columns[leaf.path]
        return [list(leaf.path), leaf.dtype.str, list(leaf.shape), offset, by_time]

    def arrays(self, memory: memoryview) -> dict[Path, Array]:
        """Return the columns in the memory of a slab, (lanes, times, ...)."""
        return {path: self._array(column, memory) for path, column in self.columns.items()}

    def _array(self, column: _LaneField, memory: memoryview) -> Array:
        leaf, offset, by_time = column
        shape = (self.times, self.lanes) if by_time else (self.lanes, self.times)
        array = np.ndarray((*shape, *leaf.shape), leaf.dtype, memory, offset)
        return array.swapaxes(0, 1) if by_time else array[:]

    def rewards(self, memory: memoryview, dtype: np.dtype[Any]) -> Array:
        """Return the column of rewards with this dtype, of at most REWARD_BYTES."""
        _, offset, _ = self.columns[REWARDS]
        strides = (REWARD_BYTES * self.lanes, dtype.itemsize)
        array: Array = np.ndarray((self.times, self.lanes), dtype, memory, offset, strides)
        return array.swapaxes(0, 1)


def type_code(dtype: np.dtype[Any]) -> int:
    """Return the number that stands for a type of rewards in the log."""
    return ord(dtype.kind) | dtype.itemsize << 8


def dtype_of(code: int) -> np.dtype[Any]:
    """Return the type of rewards that a number stands for. Raises TypeError, ValueError, CorruptTrace."""
    dtype = dtype_from(np.dtype(f"{chr(code & 0xFF)}{code >> 8}").str)
    if dtype.kind not in "biuf" or dtype.itemsize > REWARD_BYTES:
        raise CorruptTrace("invalid reward type in a ring")
    return dtype


def row_bytes(leaves: list[Leaf]) -> int:
    """Return the bytes that one step of one lane takes in the columns. leaves: those of observation and action."""
    return _STEP_BYTES + sum(leaf.row_size for leaf in leaves)


def lane_layout(plain: dict[str, Any], slab_bytes: int) -> LaneLayout:
    """Parse the layout stored in a ring file. Raises like gym_trace.format.ring.lanes.entries if it is malformed."""
    lanes, times, log = (plain[name] for name in ("lanes", "times", "log"))
    if not all(type(number) is int and 0 < number <= slab_bytes for number in (lanes, times, log)):
        raise CorruptTrace("number out of range in a ring layout")
    if plain["mode"] not in (NEXT_STEP, SAME_STEP, DISABLED) or len(plain["columns"]) > _MOST_LEAVES:
        raise CorruptTrace("invalid ring layout")
    numbers = _numbers(plain["numbers"], lanes) if "numbers" in plain else None
    layout = LaneLayout(lanes, times, plain["mode"], bool(plain["filtered"]), [], [], numbers)
    layout.log, layout.columns = log, {}
    for path, dtype, shape, offset, by_time in plain["columns"]:
        path, shape = tuple(path), tuple(shape)
        leaf = Leaf(path, None if dtype is None else dtype_from(dtype), shape)
        if path[0] in ("observations", "actions"):
            (layout.observation_leaves if path[0] == "observations" else layout.action_leaves).append(leaf)
        if leaf.dtype is None:
            continue
        if len(shape) > _MOST_DIMENSIONS or not all(type(number) is int and number >= 0 for number in shape):
            raise CorruptTrace("invalid shape of a ring column")
        if type(offset) is not int or not SLAB_HEADER <= offset <= offset + leaf.row_size * lanes * times <= log:
            raise CorruptTrace("ring column outside of its slab")
        layout.columns[path] = _LaneField(leaf, offset, bool(by_time))
    for path, dtype in ((REWARDS, "<f8"), (TERMINATIONS, "|b1"), (TRUNCATIONS, "|b1")):
        leaf = layout.columns[path].leaf
        if leaf.dtype != dtype or leaf.shape or not layout.columns[path].by_time:
            raise CorruptTrace("invalid type of ring rewards or flags")
    if math.prod((lanes, times)) > slab_bytes:
        raise CorruptTrace("ring declares more steps than fit")
    return layout


def _numbers(plain: list[Any], lanes: int) -> Array:
    """Parse the lanes' numbers in the environment. Raises TypeError, CorruptTrace."""
    if len(plain) != lanes or not all(type(number) is int and 0 <= number < _MOST_NUMBER for number in plain):
        raise CorruptTrace("invalid numbers of lanes in a ring layout")
    numbers = np.array(plain, np.int64)
    if (np.diff(numbers) <= 0).any():
        raise CorruptTrace("numbers of lanes in a ring layout do not ascend")
    return numbers
