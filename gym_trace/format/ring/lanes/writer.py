"""Write events of lanes to a slab: steps with any values, resets and ends."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.layout import Leaf
from gym_trace.data.values import Array
from gym_trace.format.ring.lanes.entries import NO_EXTRAS, End, OddRows, Reset, StepExtras, packed_actions
from gym_trace.format.ring.lanes.layout import (
    REWARD_BYTES,
    REWARDS,
    TERMINATIONS,
    TRUNCATIONS,
    LaneLayout,
    dtype_of,
    type_code,
)
from gym_trace.format.ring.lanes.slab import LaneSlab
from gym_trace.format.ring.log import ACTIONS, END_ALL, ENTRY, INTERRUPTED, RESET, STATE, STEP, LogFull, size_of
from gym_trace.format.ring.segment import ColumnRows

_RESERVE = 8 * ENTRY.size  # log bytes reserved for entries without a payload
_FLOAT = np.dtype("<f8")


class Step(NamedTuple):
    """A step of all lanes."""

    utc: int
    monotonic: int
    observations: list[ColumnRows]  # one entry per leaf, with one row per lane
    actions: list[ColumnRows]
    rewards: ColumnRows
    terminations: Array
    truncations: Array
    extras: StepExtras = NO_EXTRAS  # LaneWriter.step() sets observations and rewards


class OutputBuffers(NamedTuple):
    """Output arrays for a step, with one row per lane: views of the slab, or without a slab arrays of their own."""

    time: int  # index of the step in its slab; -1: not in a slab
    observations: list[Array | None]  # one per leaf; None for MessagePack values
    actions: list[Array | None]
    rewards: Array  # for float64 rewards
    terminations: Array
    truncations: Array


_NO_BUFFERS = OutputBuffers(-1, [], [], np.empty(0), np.empty(0, np.bool_), np.empty(0, np.bool_))


class LaneWriter:
    """Writes any steps of all lanes to a slab. Raises LogFull(bytes) for data that does not fit.

    It also sets the columns that the fast path of the slab fills.

    Args:
        slab: the slab, which the writer begins.
        memory, sequence: memory and sequence number of the slab.
        state: packed state of the lanes; empty if unknown.
        payloads: payloads of the previous writer.

    Attributes:
        slab, sequence, memory: see above.
        payloads: maximum sizes so far of the payload of actions, and of their results. The slab counts as full if these
            would not fit, because the disk may be full when a slab is switched between an action and its result.
    """

    def __init__(
        self,
        layout: LaneLayout,
        slab: LaneSlab,
        memory: memoryview,
        sequence: int,
        state: bytes,
        payloads: tuple[int, int] = (0, 0),
    ):
        self._layout, self.slab, self.memory, self.sequence = layout, slab, memory, sequence
        slab.begin(memory, sequence, layout.log)
        self._reserve(payloads)
        # Time first, because indexing the first axis is faster than slicing.
        by_time = {path: column.swapaxes(0, 1) for path, column in layout.arrays(memory).items()}
        self._observations = [by_time.get(leaf.path) for leaf in layout.observation_leaves]
        self._actions = [by_time.get(leaf.path) for leaf in layout.action_leaves]
        self._flags = by_time[TERMINATIONS], by_time[TRUNCATIONS]
        self._rewards: dict[np.dtype[Any], Array] = {_FLOAT: by_time[REWARDS]}
        self._buffers = _NO_BUFFERS  # for the current step
        # The last actions, if they are not all in columns, and their log bytes.
        self._odd: tuple[list[ColumnRows], int] | None = None
        self._expect_rewards(type_code(_FLOAT))
        if state:
            self._append(STATE, state)
        self._begin = slab.position

    @property
    def is_empty(self) -> bool:
        """True if no event was written."""
        return self.slab.position == self._begin

    @property
    def is_full(self) -> bool:
        """True if there is no space for another step."""
        return self.slab.steps >= self._layout.times or self.slab.position > self.slab.last

    @property
    def pending_bytes(self) -> int:
        """The log bytes of actions without a result; 0 without any."""
        if not self.slab.is_waiting:
            return 0
        return ENTRY.size if self._odd is None else self._odd[1]

    def pending_actions(self) -> list[ColumnRows] | None:
        """Return the actions without a result, one per leaf; None without any."""
        if not self.slab.is_waiting:
            return None
        if self._odd is not None:
            return self._odd[0]
        return [column[self.slab.steps] for column in self._actions if column is not None]

    def output_buffers(self) -> OutputBuffers | None:
        """Return the output arrays for the next step; None if it does not fit."""
        time, buffers = self.slab.steps, self._buffers
        if buffers.time == time:
            return buffers
        if time >= self._layout.times:
            return None
        self._buffers = buffers = OutputBuffers(
            time,
            [None if column is None else column[time] for column in self._observations],
            [None if column is None else column[time] for column in self._actions],
            self._rewards[_FLOAT][time],
            self._flags[0][time],
            self._flags[1][time],
        )
        return buffers

    def reward_buffer(self, dtype: np.dtype[Any]) -> Array | None:
        """Return the output array for rewards of this type in the next step; None if they do not fit."""
        column = self._reward_column(dtype)
        return None if column is None or self.slab.steps >= self._layout.times else column[self.slab.steps]

    def record_actions(self, actions: list[Any]) -> None:
        """Record the actions before the environment is stepped."""
        odd = {}
        if actions is not self._buffers.actions:
            odd = self._put(self._layout.action_leaves, self._actions, actions)
        payload = packed_actions(odd)
        if len(payload) > self.payloads[0]:
            self._reserve((len(payload), self.payloads[1]))
        self._append(ACTIONS, payload)
        self._odd = (actions, size_of(len(payload))) if odd else None

    def step(self, step: Step) -> None:
        """Record the results of the step."""
        if not self.slab.is_waiting:
            self.record_actions(step.actions)
        odd: OddRows = {}
        buffers, code = self._buffers, type_code(_FLOAT)
        if step.observations is not buffers.observations:
            odd = self._put(self._layout.observation_leaves, self._observations, step.observations)
        if step.rewards is not buffers.rewards:
            code = self._put_rewards(step.rewards)
        if step.terminations is not buffers.terminations or step.truncations is not buffers.truncations:
            flags, index = self._flags, self.slab.steps
            flags[0][index], flags[1][index] = step.terminations, step.truncations
        if code and code != self._code:
            self._expect_rewards(code)
        payload = step.extras._replace(observations=odd, rewards=None if code else step.rewards).packed()
        if len(payload) > self.payloads[1]:
            self._reserve((self.payloads[0], len(payload)))
        self._append(STEP, payload, step.utc, step.monotonic, column=code)
        self._odd = None

    def reset(self, reset: Reset) -> None:
        """Record a reset of some or all lanes."""
        self._append(RESET, reset.packed(self._layout.lanes), reset.utc, reset.monotonic)
        self._odd = None

    def end(self, end: End) -> None:
        """Record that all episodes end."""
        kind = INTERRUPTED if end.outcome is None else END_ALL
        self.slab.append(kind, b"", 0, end.outcome or 0, end.utc, end.monotonic)
        self._odd = None

    def _append(self, kind: int, payload: bytes, utc: int = 0, monotonic: int = 0, column: int = 0) -> None:
        """Append an entry. Raises LogFull if it has a payload that leaves less than the reserve."""
        if payload and self.slab.left() < len(payload) + _RESERVE:
            raise LogFull(size_of(len(payload)))
        self.slab.append(kind, payload, column, 0, utc, monotonic)

    def _reserve(self, payloads: tuple[int, int]) -> None:
        """Count the slab as full without space for such payloads, but reserve at most half of the log."""
        self.payloads = payloads
        space = min(sum(size_of(payload) for payload in payloads if payload), (self.slab.end - self._layout.log) // 2)
        self.slab.last = self.slab.end - 2 * _RESERVE - ENTRY.size - space

    def _put(self, leaves: list[Leaf], columns: list[Array | None], rows: list[ColumnRows]) -> dict[int, ColumnRows]:
        """Copy rows to the columns of their leaves, unless they are views of them; return rows that do not fit."""
        odd = {}
        for number, (leaf, column, values) in enumerate(zip(leaves, columns, rows)):
            if column is not None and isinstance(values, np.ndarray):
                if values.base is column.base:
                    continue
                if values.dtype == column.dtype and values.shape[1:] == leaf.shape:
                    column[self.slab.steps] = values
                    continue
            odd[number] = values
        return odd

    def _put_rewards(self, rewards: ColumnRows) -> int:
        """Copy rewards to their column; return the code of their type, or 0 if they do not fit."""
        if not isinstance(rewards, np.ndarray) or rewards.shape != (self._layout.lanes,):
            return 0
        column = self._reward_column(rewards.dtype)
        if column is None:
            return 0
        if rewards.base is not column.base:
            column[self.slab.steps] = rewards
        return type_code(rewards.dtype)

    def _expect_rewards(self, code: int) -> None:
        """Let the fast path accept rewards of this type."""
        self._code, columns = code, (*self._observations, *self._actions)
        if not any(column is None for column in columns):
            results = (*self._observations, self._rewards[dtype_of(code)], *self._flags)
            self.slab.expect(tuple(self._actions), results, code)  # type: ignore[arg-type]

    def _reward_column(self, dtype: np.dtype[Any]) -> Array | None:
        column = self._rewards.get(dtype)
        if column is None and dtype.kind in "biuf" and dtype.itemsize <= REWARD_BYTES and dtype.str[0] in "<|":
            column = self._rewards[dtype] = self._layout.rewards(self.memory, dtype).swapaxes(0, 1)
        return column


def log_bytes_for(state: bytes) -> int:
    """Return the log bytes that a slab needs for its initial state and its reserve."""
    return size_of(len(state)) + 3 * _RESERVE


def buffers_of_no_slab(layout: LaneLayout) -> OutputBuffers:
    """Return output arrays that are not in a slab, for a step that is not recorded."""
    count = layout.lanes
    observations, actions = (
        [None if leaf.dtype is None else np.empty((count, *leaf.shape), leaf.dtype) for leaf in leaves]
        for leaves in (layout.observation_leaves, layout.action_leaves)
    )
    return OutputBuffers(
        -1, observations, actions, np.empty(count), np.empty(count, np.bool_), np.empty(count, np.bool_)
    )
