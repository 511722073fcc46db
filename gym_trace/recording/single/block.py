"""Blocks of rows as the wrapper appends them, and the packers of values into rows.

One thread fills a block, and another may encode it without a lock: the first one only appends, and a mark or a kind of
reward before the row that it belongs to; the other one reads the number of rows first.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gym_trace.errors import UnstorableValue
from gym_trace.format import wire
from gym_trace.model.deltas import DeltaPacker, Nonconforming
from gym_trace.model.layout import Layout, Leaf, taken_apart
from gym_trace.recording.chunk_builder import LARGE_CHUNK, SMALL_CHUNK
from gym_trace.recording.reset_record import Start

DELTA_BYTES = wire.LARGE_ROW  # rows keep values of this size as deltas, smaller ones whole
SMALL_BLOCK = 1024  # rows, few enough to stay in the processor's L1 cache until they are joined
BLOCKS_AT_ONCE = 16  # are encoded, because the encoder displaces the environment from the processor's cache
VALUES_BYTES = 8 << 20  # of MessagePack values that make a block full

FLOATS = frozenset({float, np.float64})

BEGIN, LEAD, FLAG, STOP, END = range(5)  # kinds of marks


class OpenRun(NamedTuple):
    """An episode that another recorder began. slots: of the last observation; None between runs of steps."""

    start: Start
    steps: int
    slots: tuple[Any, ...] | None


class Joined(NamedTuple):
    """Rows of a block, transposed: one column for each slot of a row."""

    rows: int
    columns: list[Any]  # of typed slots one bytes object, of others a list

    def since(self, begin: int) -> Joined:
        """The rows from begin on."""
        if not begin:
            return self
        begins = [begin * (len(column) // self.rows) for column in self.columns]
        return Joined(self.rows - begin, [column[at:] for column, at in zip(self.columns, begins)])


class RowBlock:
    """Rows in one flat list, RowFormat.width slots each, with marks and annotations.

    When it is full, .joined is set, and after that .rows is emptied.

    Args:
        before: the block before it, until that is encoded.
        base: the number of rows in all blocks before it.
        last_row: the observation slots of the row before it; of deltas, all bytes of the value.
        reward_kind: the type that its rewards have, until others are added to .reward_kinds.
    """

    __slots__ = ("base", "before", "created", "joined", "last_row", "marks", "notes", "reward_kinds", "rows")

    def __init__(
        self,
        before: RowBlock | None = None,
        base: int = 0,
        last_row: tuple[Any, ...] = (),
        reward_kind: type = float,
    ):
        self.before, self.base, self.last_row = before, base, last_row
        self.created = time.monotonic()
        self.reward_kinds = {reward_kind}
        self.rows: list[Any] = []
        self.joined: Joined | None = None
        self.marks: list[tuple[int, int, Any]] = []  # row position, kind, data
        self.notes: list[tuple[int, dict[str, Any]]] = []  # row position, annotations


def complete_marks(marks: list[tuple[int, int, Any]], end: int) -> int:
    """How many of the first marks are complete, with their rows, when there are end rows."""
    for i, (position, kind, _) in enumerate(marks):
        if position > end or (position == end and kind in (BEGIN, LEAD, FLAG)):
            return i
    return len(marks)


class RowFormat:
    """The slots of a row: the leaves of the observation, those of the action, the reward, and the info if recorded."""

    def __init__(self, observation: Layout, action: Layout, infos: bool, use_deltas: bool = True):
        self.observation, self.action, self.infos = observation, action, infos
        self.observation_leaves = list(observation.leaves())
        self.action_leaves = list(action.leaves())
        leaves = self.observation_leaves + self.action_leaves
        self.width = len(leaves) + 1 + infos
        large = [leaf for leaf in leaves if leaf.row_size >= DELTA_BYTES]
        self.delta_leaves = large if use_deltas else []
        row_size = 8 + sum(leaf.row_size for leaf in leaves)
        self.chunk_bytes = LARGE_CHUNK if large else SMALL_CHUNK
        self.capacity = max(4, min(SMALL_BLOCK, self.chunk_bytes // row_size))  # rows of a block
        self.blocks_at_once = max(1, min(BLOCKS_AT_ONCE, self.chunk_bytes // (self.capacity * row_size)))
        self._is_plain = [leaf.dtype is not None and leaf not in self.delta_leaves for leaf in leaves]
        # Placeholders for action, reward and info in the row of a leading observation, which is not a step. They have
        # the size of real ones, so that the column can be joined at once, and are taken out after.
        sizes = [leaf.row_size * plain for leaf, plain in zip(leaves, self._is_plain)][len(self.observation_leaves) :]
        self.filler: tuple[Any, ...] = (*map(bytes, sizes), 0.0, *[b""] * infos)
        if max((leaf.row_size for leaf in leaves), default=0) > wire.MAX_COLUMN // 4:
            raise UnstorableValue(f"one observation or action takes more than {wire.MAX_COLUMN // 4} bytes")

    def joined(self, rows: list[Any], reward_kinds: set[type], begin: int, end: int) -> Joined:
        """The rows of a block from begin to end, transposed."""
        columns: list[Any] = []
        slots = [rows[slot + begin * self.width : end * self.width : self.width] for slot in range(self.width)]
        for values, plain in zip(slots, self._is_plain):
            columns.append(values)
            if plain:
                with contextlib.suppress(TypeError):  # a Nonconforming among them, or a plain integer: stays a list
                    columns[-1] = b"".join(values)
        for values in slots[len(columns) :]:  # rewards, infos
            columns.append(values)
        rewards = len(self._is_plain)
        if reward_kinds <= FLOATS:
            columns[rewards] = wire.pack_floats(slots[rewards])
        return Joined(end - begin, columns)

    def packer(self, leaf: Leaf, recorder: Any) -> Callable[[Any], Any]:
        """A function from a value of a leaf to its slot in a row, which shares no memory with the value."""
        dtype, shape, ndarray, column = leaf.dtype, leaf.shape, np.ndarray, leaf.column
        if dtype is None:

            def pack_value(value: Any) -> bytes:
                packed: bytes = recorder.packed(column, value)
                recorder.count_values(len(packed))
                return packed

            return pack_value

        if leaf in self.delta_leaves:
            packer: DeltaPacker = recorder.delta_packer(leaf)
            return packer

        def pack_nonconforming(value: Any) -> Any:
            value = recorder.plain(column, value)
            if type(value) is ndarray and value.dtype == dtype and value.shape == shape:
                return value[()] if shape == () else value.tobytes()
            return Nonconforming(recorder.snapshot(column, value))

        if shape == ():
            kind = dtype.type
            return lambda value: value if type(value) is kind or type(value) is int else pack_nonconforming(value)

        def pack_array(value: Any) -> Any:
            if type(value) is ndarray and value.dtype is dtype and value.shape == shape:
                return value.tobytes()
            return pack_nonconforming(value)

        size = leaf.row_size

        def pack_vector(value: Any) -> Any:
            # Avoids .shape, which builds a tuple at each access.
            is_vector = type(value) is ndarray and value.dtype is dtype and value.ndim == 1
            return packed if is_vector and len(packed := value.tobytes()) == size else pack_nonconforming(value)

        return pack_vector if len(shape) == 1 else pack_array

    def tree_packer(self, layout: Layout, recorder: Any) -> Callable[[Any], tuple[Any, ...]]:
        """A function from an observation or action to the slots of its leaves."""
        packers = [self.packer(leaf, recorder) for leaf in layout.leaves()]
        if len(packers) == 1 and isinstance(layout, Leaf):
            (only,) = packers
            return lambda value: (only(value),)
        return lambda value: tuple([p(v) for p, v in zip(packers, taken_apart(layout, value))])
