"""The layout of a row in the slabs of a single environment (docs/FORMAT.md, section 8)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.layout import Layout, Leaf, Path
from gym_trace.data.values import dtype_from
from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.format.columns import is_path
from gym_trace.format.ring.memory import MOST_SLAB_BYTES

DELTA_BYTES = wire.LARGE_ROW  # values of at least this size are deltas in the log; smaller ones are in the row
_NUMBER_BYTES = 8  # size of a mark, and of a reward


class RowField(NamedTuple):
    """A leaf of the observation or action. offset is None if its values are in the log; dtype, if their size varies."""

    path: Path
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    offset: int | None

    @property
    def row_size(self) -> int:
        """Bytes of a value; 0 if the size varies."""
        return 0 if self.dtype is None else self.dtype.itemsize * math.prod(self.shape)


class RowOffsets(NamedTuple):
    """Offsets of the parts of a row, as a ring file describes them.

    A row holds the fixed-size action values, the mark `asked`, the reward, the fixed-size observation values, and the
    mark `done`. Values of varying size, or outside their space, are in the log. Columns are numbered: leaves of the
    observation, leaves of the action, then reward, info, annotations.
    """

    size: int
    asked: int
    reward: int
    done: int
    observations: int  # number of leaves of the observation
    columns: list[RowField]
    lane: int = 0  # lane of all episodes

    def described(self) -> dict[str, Any]:
        """Return the layout for the ring file."""
        columns = [
            [list(path), None if dtype is None else dtype.str, list(shape), offset]
            for path, dtype, shape, offset in self.columns
        ]
        numbers = {name: getattr(self, name) for name in ("asked", "reward", "done", "observations")}
        lane = {"lane": self.lane} if self.lane else {}
        return {"row": self.size, **numbers, "columns": columns, **lane}

    @classmethod
    def of(cls, layout: dict[str, Any]) -> RowOffsets:
        """Parse the untrusted layout of a ring file. Raises CorruptTrace if it is malformed."""
        try:
            numbers = {name: _number(layout[name]) for name in ("asked", "reward", "done", "observations")}
            columns = [_column(*column) for column in layout["columns"]]
            offsets = cls(_number(layout["row"]), **numbers, columns=columns, lane=_number(layout.get("lane", 0)))
        except (LookupError, TypeError, ValueError) as error:
            raise CorruptTrace(f"invalid ring layout: {error!r:.100}") from error
        roots = ["observations" if i < offsets.observations else "actions" for i in range(len(offsets.columns))]
        if [column.path[0] for column in offsets.columns] != roots:
            raise CorruptTrace("invalid ring layout: a column belongs to neither observations nor actions")
        fixed = [(column.offset, column.row_size) for column in offsets.columns if column.offset is not None]
        numbers_at = (offsets.asked, offsets.reward, offsets.done)
        ends = [*(offset + _NUMBER_BYTES for offset in numbers_at), *map(sum, fixed)]
        if max(ends) > offsets.size or sum(size for _, size in fixed) + 3 * _NUMBER_BYTES > offsets.size:
            raise CorruptTrace("invalid ring layout: columns exceed the row")
        return offsets


class RowLayout:
    """Layout of the rows of an observation and an action; see RowOffsets.

    Attributes:
        offsets: the layout as the ring file describes it.
        size, asked, reward, done: see RowOffsets.
        action_bytes, observation_bytes: sizes of the fixed-size values, aligned.
        delta_leaves: leaves with large values, stored as changes in the log.
    """

    def __init__(self, observation: Layout, action: Layout, use_deltas: bool = True, lane: int = 0):
        self.observation, self.action = observation, action
        self.observation_leaves, self.action_leaves = list(observation.leaves()), list(action.leaves())
        leaves = self.leaves = [*self.observation_leaves, *self.action_leaves]
        self.action_column, self.reward_column = len(self.observation_leaves), len(leaves)
        self.info_column, self.annotations_column = self.reward_column + 1, self.reward_column + 2
        self.delta_leaves = [leaf for leaf in leaves if use_deltas and leaf.row_size >= DELTA_BYTES]
        actions, self.asked = self._columns(self.action_leaves, 0)
        self.reward = self.asked + _NUMBER_BYTES
        observations, self.done = self._columns(self.observation_leaves, self.reward + _NUMBER_BYTES)
        self.size = self.done + _NUMBER_BYTES
        self.action_bytes, self.observation_bytes = self.asked, self.done - self.reward - _NUMBER_BYTES
        self.offsets = RowOffsets(
            self.size, self.asked, self.reward, self.done, self.action_column, [*observations, *actions], lane
        )

    def _columns(self, leaves: list[Leaf], offset: int) -> tuple[list[RowField], int]:
        """Return the columns of these leaves, and the aligned end of their fixed-size values, which begin at offset."""
        columns = []
        for leaf in leaves:
            is_fixed = self.fixed_leaf(leaf) is not None
            columns.append(RowField(leaf.path, leaf.dtype, leaf.shape, offset if is_fixed else None))
            offset += leaf.row_size * is_fixed
        return columns, wire.aligned(offset)

    def fixed_leaf(self, tree: Layout) -> Leaf | None:
        """Return tree if it is a leaf whose values are in the row; otherwise None."""
        is_fixed = isinstance(tree, Leaf) and tree.dtype is not None and tree not in self.delta_leaves
        return tree if is_fixed and isinstance(tree, Leaf) else None


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST_SLAB_BYTES:
        raise ValueError(f"{value!r:.40} is not a size")
    return value


def _column(path: Any, dtype: Any, shape: Any, offset: Any) -> RowField:
    found = RowField(tuple(path), None if dtype is None else dtype_from(dtype), tuple(map(_number, shape)), offset)
    if offset is not None:
        _number(offset)
    if not is_path(found.path):
        raise ValueError("invalid path")
    if math.prod(found.shape) > MOST_SLAB_BYTES or len(found.shape) > wire.MAX_DIMENSIONS:
        raise ValueError("invalid shape")
    return found
