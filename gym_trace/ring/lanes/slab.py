"""Write steps of all lanes to a slab as they happen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gym_trace.model.layout import Leaf
from gym_trace.model.values import Array
from gym_trace.ring.lanes.autoreset import SAME_STEP
from gym_trace.ring.lanes.entries import NO_MORE, End, More, OddRows, Reset, packed_actions
from gym_trace.ring.lanes.layout import (
    REWARD_BYTES,
    REWARDS,
    TERMINATIONS,
    TRUNCATIONS,
    LaneLayout,
    dtype_of,
    type_code,
)
from gym_trace.ring.log import ASK, END_ALL, ENTRY, INTERRUPTED, RESET, STATE, STEP, LaneLog, LogFull, size_of
from gym_trace.ring.memory import begin
from gym_trace.ring.segment import Rows

_RESERVE = 8 * ENTRY.size  # log bytes reserved for entries without a payload
_FLOAT = np.dtype("<f8")


class Step(NamedTuple):
    """A step of all lanes."""

    utc: int
    monotonic: int
    observations: list[Rows]  # one entry per leaf, with one row per lane
    actions: list[Rows]
    rewards: Rows
    terminations: Array
    truncations: Array
    more: More = NO_MORE  # without observations and rewards


class Rooms(NamedTuple):
    """Output arrays for a step, with one row per lane: views of the slab if the step fits."""

    time: int  # index of the step in its slab; -1: not in a slab
    observations: list[Array | None]  # one per leaf; None for MessagePack values
    actions: list[Array | None]
    rewards: Array  # for float64 rewards
    terminations: Array
    truncations: Array


_NO_ROOMS = Rooms(-1, [], [], np.empty(0), np.empty(0, np.bool_), np.empty(0, np.bool_))


PutBatches = Callable[[Sequence[Any], int, Sequence[Any]], bool]


def put_batches(columns: Sequence[Any], time: int, batches: Sequence[Any]) -> bool:
    """Copy batches to columns[time]; return False without copying if an array does not match its column exactly."""
    for column, batch in zip(columns, batches):
        if type(batch) is not np.ndarray or batch.dtype != column.dtype or batch.shape != column.shape[1:]:
            return False
    for column, batch in zip(columns, batches):
        column[time] = batch
    return True


class LaneSlab:
    """Writes steps of all lanes to a slab. Raises LogFull(bytes) for data that does not fit.

    ask_usual() and step_usual() are ten times as fast as ask() and step(). They accept only steps that consist of
    arrays with the form of the columns, and return False for all others.

    Args:
        state: packed state of the lanes; empty if unknown.
        put: put_batches(), or its C version.
        payloads: payloads of the slab before.

    Attributes:
        is_empty: True if no event was written.
        asked_bytes: log bytes of the last actions.
        payloads: the most log bytes of actions and of their results so far. The slab counts as full if these would not
            fit: turning a slab between an action and its result may meet a full disk.
        sequence, memory: of the slab.
    """

    def __init__(
        self,
        layout: LaneLayout,
        memory: memoryview,
        sequence: int,
        state: bytes,
        put: PutBatches = put_batches,
        payloads: tuple[int, int] = (0, 0),
    ):
        self._layout, self.memory, self.sequence = layout, memory, sequence
        begin(memory, sequence)
        self._log = LaneLog(memory, layout.log, len(memory), sequence)
        self._foresee(payloads)
        # Time first, because indexing the first axis is faster than slicing.
        by_time = {path: column.swapaxes(0, 1) for path, column in layout.arrays(memory).items()}
        self._observations = [by_time.get(leaf.path) for leaf in layout.observation_leaves]
        self._actions = [by_time.get(leaf.path) for leaf in layout.action_leaves]
        self._flags = by_time[TERMINATIONS], by_time[TRUNCATIONS]
        self._rewards: dict[np.dtype[Any], Array] = {_FLOAT: by_time[REWARDS]}
        self._rooms = _NO_ROOMS  # of the current step
        self._put_batches = put
        self._usual_actions: tuple[Any, ...] = tuple(self._actions)
        self._expect_rewards(type_code(_FLOAT))
        self._is_usual = not any(column is None for column in (*self._observations, *self._actions))
        self.is_empty, self._asked, self.asked_bytes = True, False, 0
        if state:
            self._append(STATE, state)

    @property
    def is_full(self) -> bool:
        """True if there is no space for another step."""
        log = self._log
        return log.steps >= self._layout.times or log.position > self._last_start

    @property
    def position(self) -> int:
        """The end of the log."""
        return self._log.position

    def rooms(self) -> Rooms | None:
        """Return the output arrays for the next step; None if it does not fit."""
        time, rooms = self._log.steps, self._rooms
        if rooms.time == time:
            return rooms
        if time >= self._layout.times:
            return None
        self._rooms = rooms = Rooms(
            time,
            [None if column is None else column[time] for column in self._observations],
            [None if column is None else column[time] for column in self._actions],
            self._rewards[_FLOAT][time],
            self._flags[0][time],
            self._flags[1][time],
        )
        return rooms

    def reward_room(self, dtype: np.dtype[Any]) -> Array | None:
        """Return the output array for rewards of this type in the next step; None if they do not fit."""
        column = self._reward_column(dtype)
        return None if column is None or self._log.steps >= self._layout.times else column[self._log.steps]

    def ask_usual(self, actions: Sequence[Any]) -> bool:
        """Do ask() if all actions, one per leaf, have the form of the columns; otherwise return False."""
        log = self._log
        if not self._is_usual or not self._put_batches(self._usual_actions, log.steps, actions):
            return False
        log.append(ASK)
        self.is_empty, self._asked, self.asked_bytes = False, True, ENTRY.size
        return True

    def asked_usual(self) -> list[Rows]:
        """Return the actions of the last ask_usual()."""
        return [column[self._log.steps] for column in self._usual_actions]

    def step_usual(self, batches: Sequence[Any], utc: int, monotonic: int) -> bool:
        """Do step() if all arrays have the form of the columns; otherwise return False.

        Args:
            batches: observations, one per leaf, rewards, terminations, truncations.
        """
        log = self._log
        if not self._is_usual or not self._put_batches(self._usual_answers, log.steps, batches):
            return False
        if self._layout.mode == SAME_STEP and (batches[-2].tobytes() + batches[-1].tobytes()).strip(b"\0"):
            return False  # last observations must be stored, too
        log.append(STEP, b"", self._usual_code, 0, utc, monotonic)
        self._asked = False
        return True

    def ask(self, actions: list[Any]) -> None:
        """Record the actions before the environment is stepped."""
        self.is_empty = False
        odd = {}
        if actions is not self._rooms.actions:
            odd = self._put(self._layout.action_leaves, self._actions, actions)
        payload = packed_actions(odd)
        self.asked_bytes = size_of(len(payload))
        if len(payload) > self.payloads[0]:
            self._foresee((len(payload), self.payloads[1]))
        self._append(ASK, payload)
        self._asked = True

    def step(self, step: Step) -> None:
        """Record the results of the step."""
        if not self._asked:
            self.ask(step.actions)
        odd: OddRows = {}
        rooms, log, code = self._rooms, self._log, type_code(_FLOAT)
        if step.observations is not rooms.observations:
            odd = self._put(self._layout.observation_leaves, self._observations, step.observations)
        if step.rewards is not rooms.rewards:
            code = self._put_rewards(step.rewards)
        if step.terminations is not rooms.terminations or step.truncations is not rooms.truncations:
            self._flags[0][log.steps], self._flags[1][log.steps] = step.terminations, step.truncations
        if code and code != self._usual_code:
            self._expect_rewards(code)
        payload = step.more._replace(observations=odd, rewards=None if code else step.rewards).packed()
        if len(payload) > self.payloads[1]:
            self._foresee((self.payloads[0], len(payload)))
        self._append(STEP, payload, step.utc, step.monotonic, column=code)
        self._asked = False

    def reset(self, reset: Reset) -> None:
        """Record a reset of some or all lanes."""
        self.is_empty = False
        self._append(RESET, reset.packed(self._layout.lanes), reset.utc, reset.monotonic)
        self._asked = False

    def end(self, end: End) -> None:
        """Record that all episodes end."""
        self.is_empty = False
        kind = INTERRUPTED if end.outcome is None else END_ALL
        self._log.append(kind, b"", 0, end.outcome or 0, end.utc, end.monotonic)
        self._asked = False

    def _append(self, kind: int, payload: bytes, utc: int = 0, monotonic: int = 0, column: int = 0) -> None:
        """Append an entry, unless it leaves no room for the reserve."""
        if payload and self._log.left() < len(payload) + _RESERVE:
            raise LogFull(size_of(len(payload)))
        self._log.append(kind, payload, column, 0, utc, monotonic)

    def _foresee(self, payloads: tuple[int, int]) -> None:
        """Count the slab as full without room for such payloads; half of the log is used in any case."""
        self.payloads = payloads
        room = min(sum(size_of(payload) for payload in payloads if payload), (self._log.end - self._layout.log) // 2)
        self._last_start = self._log.end - 2 * _RESERVE - ENTRY.size - room

    def _put(self, leaves: list[Leaf], columns: list[Array | None], rows: list[Rows]) -> dict[int, Rows]:
        """Copy rows of leaves to their columns, unless they already are views of them; return rows that do not fit."""
        odd = {}
        for number, (leaf, column, values) in enumerate(zip(leaves, columns, rows)):
            if column is not None and isinstance(values, np.ndarray):
                if values.base is column.base:
                    continue
                if values.dtype == column.dtype and values.shape[1:] == leaf.shape:
                    column[self._log.steps] = values
                    continue
            odd[number] = values
        return odd

    def _put_rewards(self, rewards: Rows) -> int:
        """Copy rewards to their column; return the code of their type, or 0 if they do not fit."""
        if not isinstance(rewards, np.ndarray) or rewards.shape != (self._layout.lanes,):
            return 0
        column = self._reward_column(rewards.dtype)
        if column is None:
            return 0
        if rewards.base is not column.base:
            column[self._log.steps] = rewards
        return type_code(rewards.dtype)

    def _expect_rewards(self, code: int) -> None:
        """Take rewards of this type as the usual ones."""
        self._usual_code = code
        self._usual_answers: tuple[Any, ...] = (*self._observations, self._rewards[dtype_of(code)], *self._flags)

    def _reward_column(self, dtype: np.dtype[Any]) -> Array | None:
        column = self._rewards.get(dtype)
        if column is None and dtype.kind in "biuf" and dtype.itemsize <= REWARD_BYTES and dtype.str[0] in "<|":
            column = self._rewards[dtype] = self._layout.rewards(self.memory, dtype).swapaxes(0, 1)
        return column


def log_bytes_for(state: bytes) -> int:
    """Return the log bytes that a slab needs for its initial state and its reserve."""
    return size_of(len(state)) + 3 * _RESERVE


def rooms_of_no_slab(layout: LaneLayout) -> Rooms:
    """Return output arrays outside of a slab, for a step that is not recorded."""
    count = layout.lanes
    observations, actions = (
        [None if leaf.dtype is None else np.empty((count, *leaf.shape), leaf.dtype) for leaf in leaves]
        for leaves in (layout.observation_leaves, layout.action_leaves)
    )
    return Rooms(-1, observations, actions, np.empty(count), np.empty(count, np.bool_), np.empty(count, np.bool_))
