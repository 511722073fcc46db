"""The fast path of vector environments: write steps of all lanes to a slab as they happen."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from gym_trace.data.layout import Layout, Leaf
from gym_trace.data.values import Array
from gym_trace.format.ring.log import ACTIONS, ENTRY, STEP, LogFull, clear, in_use, put, size_of
from gym_trace.format.ring.memory import begin


class LaneSlab:
    """The slab that is being filled with steps of all lanes.

    record_action() and record_result() are the fast path, for arrays with the dtype and shape of the columns. They
    return False, without recording, for other steps, which go through LaneWriter and append(). _core.LaneSlab is the
    C twin.

    Args:
        observation, action: layouts of one lane.
        times: maximum number of steps.
        same_step: True: record_result() returns False for steps that end an episode.

    Attributes:
        steps: number of complete steps.
        position, end: offsets of the next log entry, and of the end of the log.
        last: record_action() returns False if the log has grown beyond this offset.
        is_waiting: True if the last entry is an action.
        memory, sequence: memory and sequence number of the slab.

    append() updates position, steps and is_waiting in one statement, so that a signal cannot separate them.
    """

    def __init__(self, observation: Layout, action: Layout, times: int, same_step: bool):
        self._observation, self._action, self._times, self._same_step = observation, action, times, same_step
        self.memory, self.sequence = memoryview(bytearray()), 0
        self.position = self.end = self.last = self.steps = self._mark = 0
        self.is_waiting, self._is_disabled, self._until = False, True, 0
        self._actions: tuple[Array, ...] | None = None
        self._results: tuple[Array, ...] | None = None
        self._code = 0

    def begin(self, memory: memoryview, sequence: int, log: int) -> None:
        """Continue in an empty slab, whose log begins at an offset, with the fast path disabled."""
        begin(memory, sequence)
        clear(memory, log)
        self._actions = self._results = None
        self.memory, self.sequence, self._mark = memory, sequence, sequence << 32
        self.position, self.end, self.last, self.steps = log, len(memory), len(memory), 0
        self.is_waiting, self._is_disabled = False, True

    def expect(self, actions: tuple[Array, ...], results: tuple[Array, ...], code: int) -> None:
        """Set the columns, time first, that the fast path fills. code: type_code() of the rewards."""
        self._actions, self._results, self._code = actions, results, code

    def disable_fast_path(self) -> None:
        """Make record_action() return False until enable_fast_path()."""
        self._is_disabled = True

    def enable_fast_path(self, until: int) -> None:
        """Let record_action() accept steps, and record_result() until a time in nanoseconds of the monotonic clock."""
        self._until, self._is_disabled = until, False

    @in_use
    def record_action(self, actions: Any) -> bool:
        """Record that a step begins; return False, without recording, if the slow path must do it."""
        columns = self._actions
        if self._is_disabled or self.is_waiting or self.position > self.last or columns is None or not self._has_room():
            return False
        batches = _leaves_of(self._action, actions)
        if batches is None or not _put_batches(columns, self.steps, batches):
            return False
        self.append(ACTIONS)
        return True

    @in_use
    def record_result(self, observations: Any, rewards: Any, terminations: Any, truncations: Any) -> bool:
        """Record the results of the step; return False, without recording, if the slow path must do it."""
        columns = self._results
        if not self.is_waiting or columns is None or not self._has_room():
            return False
        utc, monotonic = time.time_ns(), time.monotonic_ns()
        batches = _leaves_of(self._observation, observations) if monotonic <= self._until else None
        if batches is None or not _put_batches(columns, self.steps, [*batches, rewards, terminations, truncations]):
            return False
        if self._same_step and any(column[self.steps].any() for column in columns[-2:]):
            return False  # the slow path also stores the last observations
        self.append(STEP, b"", self._code, 0, utc, monotonic)
        return True

    @in_use
    def record_step(
        self,
        actions: Any,
        observations: Any,
        rewards: Any,
        terminations: Any,
        truncations: Any,
        utc: int,
        monotonic: int,
    ) -> bool:
        """Record a step that has returned; return False, without recording, if the slow path must do it.

        It does not depend on enable_fast_path(). A signal finds all of the step recorded, or nothing of it.
        """
        columns, results = self._actions, self._results
        if self.is_waiting or self.position > self.last or columns is None or results is None or not self._has_room():
            return False
        if self.position + 3 * ENTRY.size > self.end:
            return False
        acted, batches = _leaves_of(self._action, actions), _leaves_of(self._observation, observations)
        if acted is None or batches is None or not _put_batches(columns, self.steps, acted):
            return False
        if not _put_batches(results, self.steps, [*batches, rewards, terminations, truncations]):
            return False
        if self._same_step and any(column[self.steps].any() for column in results[-2:]):
            return False
        self.append(ACTIONS)
        self.append(STEP, b"", self._code, 0, utc, monotonic)
        return True

    def _has_room(self) -> bool:
        return self.steps < self._times and self.position + 2 * ENTRY.size <= self.end

    def left(self) -> int:
        """Return the log bytes left for further entries."""
        return self.end - self.position - ENTRY.size

    def append(self, kind: int, payload: bytes = b"", column: int = 0, a: int = 0, c: int = 0, d: int = 0) -> None:
        """Append an entry to the log. Raises LogFull(bytes)."""
        mark, step = self._mark + 1, self.steps
        if self.position + size_of(len(payload)) + ENTRY.size > self.end:
            raise LogFull(size_of(len(payload)))
        following = put(self.memory, self.position, mark, step, kind, payload, 0, column, a, 0, c, d)
        self.position, self._mark, self.steps, self.is_waiting = following, mark, step + (kind == STEP), kind == ACTIONS


def _leaves_of(layout: Layout, value: Any) -> list[Any] | None:
    """Return the arrays of a batch, one per leaf; None if it has another structure. Runs no user code."""
    if isinstance(layout, Leaf):
        return [value]
    kind, keys, count = type(value), layout.keys, len(layout.children)
    if keys is None:
        if (kind is not tuple and kind is not list) or len(value) != count:
            return None
        parts = value
    else:
        if kind is not dict or len(value) != count or not all(type(key) in (str, int) for key in value):
            return None
        if not all(key in value for key in keys):
            return None
        parts = [value[key] for key in keys]
    found = []
    for child, part in zip(layout.children, parts):
        leaves = _leaves_of(child, part)
        if leaves is None:
            return None
        found += leaves
    return found


def _put_batches(columns: Sequence[Array], step: int, batches: Sequence[Any]) -> bool:
    """Copy batches to columns[step]; return False without copying if one does not match its column exactly."""
    if len(batches) != len(columns):
        return False
    for column, batch in zip(columns, batches):
        if type(batch) is not np.ndarray or batch.dtype != column.dtype or batch.shape != column.shape[1:]:
            return False
        if step >= len(column):
            return False
    for column, batch in zip(columns, batches):
        column[step] = batch
    return True
