"""Rows as the wrappers append them, before the encoder turns them into fragments and columns.

A block is filled by one thread, and what is there may be taken by another without a lock: the filling thread only ever
appends, a mark or a kind of reward is put down before the row that it belongs to, and the taking thread looks at the
number of rows first.
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

DELTA_BYTES = wire.LARGE_ROW  # of values this large rows keep what has changed, of smaller ones all bytes
SMALL_BLOCK = 1024  # rows; what they take stays in the processor's nearest cache until they are joined
BLOCKS_AT_ONCE = 16  # are encoded, which runs through much code, that is then not in the cache
VALUES_BYTES = 8 << 20  # MessagePack values that a block takes before it counts as full

FLOATS = frozenset({float, np.float64})

BEGIN, LEAD, FLAG, STOP, END = range(5)  # kinds of marks


class OpenRun(NamedTuple):
    """A run of steps that another recorder began: slots of the last observation, None between filtered runs."""

    start: Start
    steps: int
    slots: tuple[Any, ...] | None


class Joined(NamedTuple):
    """Rows of a full block, joined to a column for each slot of a row."""

    rows: int
    columns: list[Any]  # bytes, or a list of slots

    def since(self, begin: int) -> Joined:
        """The rows from begin on."""
        if not begin:
            return self
        begins = [begin * (len(column) // self.rows) for column in self.columns]
        return Joined(self.rows - begin, [column[at:] for column, at in zip(self.columns, begins)])


class RowBlock:
    """A run of rows: a flat list with as many slots a row as there are leaves, plus marks and notes.

    When it is full, .joined is set, and then .rows emptied.

    Args:
        before: the block before it, until that is encoded.
        base: how many rows there were before it.
        last_row: the observation slots of the row before it; of frames, all bytes.
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
    """How many of the marks, the first ones, can be dealt with when end rows are there."""
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
        # What follows the observation in the row of a leading observation, which is no step: such that what steps have
        # there can be joined as quickly as if it were not there.
        sizes = [leaf.row_size * plain for leaf, plain in zip(leaves, self._is_plain)][len(self.observation_leaves) :]
        self.filler: tuple[Any, ...] = (*map(bytes, sizes), 0.0, *[b""] * infos)
        if max((leaf.row_size for leaf in leaves), default=0) > wire.MAX_COLUMN // 4:
            raise UnstorableValue(f"one observation or action takes more than {wire.MAX_COLUMN // 4} bytes")

    def joined(self, rows: list[Any], reward_kinds: set[type], begin: int, end: int) -> Joined:
        """Some of the rows of a block."""
        columns: list[Any] = []
        slots = [rows[slot + begin * self.width : end * self.width : self.width] for slot in range(self.width)]
        for values, plain in zip(slots, self._is_plain):
            columns.append(values)
            if plain:
                with contextlib.suppress(TypeError):  # unless there is an Nonconforming among them, or a plain integer
                    columns[-1] = b"".join(values)
        for values in slots[len(columns) :]:  # rewards, infos
            columns.append(values)
        rewards = len(self._is_plain)
        if reward_kinds <= FLOATS:
            columns[rewards] = wire.pack_floats(slots[rewards])
        return Joined(end - begin, columns)

    def packer(self, leaf: Leaf, room: Any) -> Callable[[Any], Any]:
        """A function that takes the value of a leaf to what a row keeps of it, copied. room: the recorder."""
        dtype, shape, ndarray, column = leaf.dtype, leaf.shape, np.ndarray, leaf.column
        if dtype is None:

            def pack_value(value: Any) -> bytes:
                packed: bytes = room.packed(column, value)
                room.count_values(len(packed))
                return packed

            return pack_value

        if leaf in self.delta_leaves:
            packer: DeltaPacker = room.delta_packer(leaf)
            return packer

        def pack_nonconforming(value: Any) -> Any:
            value = room.plain(column, value)
            if type(value) is ndarray and value.dtype == dtype and value.shape == shape:
                return value[()] if shape == () else value.tobytes()
            return Nonconforming(room.snapshot(column, value))

        if shape == ():
            kind = dtype.type
            return lambda value: value if type(value) is kind or type(value) is int else pack_nonconforming(value)

        def pack_array(value: Any) -> Any:
            if type(value) is ndarray and value.dtype is dtype and value.shape == shape:
                return value.tobytes()
            return pack_nonconforming(value)

        size = leaf.row_size

        def pack_vector(value: Any) -> Any:
            # Compares no shapes, which are made anew each time.
            is_vector = type(value) is ndarray and value.dtype is dtype and value.ndim == 1
            return packed if is_vector and len(packed := value.tobytes()) == size else pack_nonconforming(value)

        return pack_vector if len(shape) == 1 else pack_array

    def tree_packer(self, layout: Layout, room: Any) -> Callable[[Any], tuple[Any, ...]]:
        """A function that takes a whole observation or action to the slots of its leaves."""
        packers = [self.packer(leaf, room) for leaf in layout.leaves()]
        if len(packers) == 1 and isinstance(layout, Leaf):
            (only,) = packers
            return lambda value: (only(value),)
        return lambda value: tuple([p(v) for p, v in zip(packers, taken_apart(layout, value))])
