"""Slabs and episodes of a vector environment, and its filters."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from gym_trace.data.layout import Layout
from gym_trace.data.values import Array
from gym_trace.errors import UnstorableValue, raise_if_of_signal
from gym_trace.format import wire
from gym_trace.format.ring.lanes.autoreset import SAME_STEP, after_step
from gym_trace.format.ring.lanes.decoder import LazySegment, decoded, pending_of
from gym_trace.format.ring.lanes.entries import LANE, End, LaneState, Observed, Reset
from gym_trace.format.ring.lanes.events import LaneEvents
from gym_trace.format.ring.lanes.layout import LaneLayout, row_bytes
from gym_trace.format.ring.lanes.writer import LaneWriter, OutputBuffers, Step, buffers_of_no_slab, log_bytes_for
from gym_trace.format.ring.log import LogFull
from gym_trace.format.ring.memory import LANES, MOST_SLAB_BYTES, Ring
from gym_trace.format.ring.segment import ColumnRows
from gym_trace.recording.core import LANE_LOOPS, LaneSlab
from gym_trace.recording.filters import Filters
from gym_trace.recording.recorder import Recorder, State, largest_row
from gym_trace.storage.interrupts import held_back

_ROWS = 128  # rows of each lane in a slab, if that is not too large
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 16 << 20
_LEAST_LOG, _INFO = 64 << 10, 64  # min bytes of a log; bytes of the log per info of a lane
_AHEAD = 2  # slabs that may wait for the thread, which runs while large arrays are copied
_SLABS = 3  # full slabs, and the one being filled
_left_to_parents: list[Any] = []  # freeing memory of a device in a forked child may end the child


class LaneSlabs:
    """Fills slabs with steps of all lanes, and records the episodes in them.

    .slab records usual steps. It returns False for a step if an action is due, and for values with another dtype or
    shape than its columns. Then, and before each reset, the caller calls ready() and begin_event(); add() ends the
    event. If the next step or reset finds an event begun, or actions without a result, the last one was interrupted,
    such as by Ctrl-C. The state of the lanes is then unknown: their episodes are cut, and each lane is recorded again
    from its next episode on.

    Args:
        recorder: opens the ring, writes the slabs, and issues the warnings.
        mode: autoreset mode.
        observation, action: layouts of one lane.
        infos: True if steps have infos.
        numbers: see LaneLayout.

    Attributes:
        slab: the slab being filled.
        state: IDLE, WAITING, or TAKEN_OVER: a copy in which neither a step nor a reset has begun.
        unrecorded: steps that have returned, while their rows are on their way from a device.
        chunk_bytes, largest_value: see Recorder.
    """

    def __init__(
        self,
        recorder: Recorder,
        count: int,
        mode: str,
        observation: Layout,
        action: Layout,
        filters: Filters,
        infos: bool,
        numbers: Array | None,
    ):
        self.recorder = recorder
        self._count = count
        leaves = list(observation.leaves()), list(action.leaves())
        self._trees = observation, action
        self.filters = LaneFilters(filters, mode, count) if filters.is_active else None
        largest_row(itertools.chain(*leaves))
        row_size = row_bytes([*leaves[0], *leaves[1]])
        capacity = min(_MOST_BYTES, max(_LEAST_BYTES, _ROWS * count * row_size))
        times = max(1, capacity // (count * row_size))
        self._layout = LaneLayout(count, times, mode, filters.by_step, *leaves, numbers)
        self._log_bytes = max(_LEAST_LOG, capacity // 8) + (LANE.itemsize + row_size * filters.by_step) * count
        if infos:
            self._log_bytes += min(_MOST_BYTES, times * count * _INFO)
        _demand_room(self._layout.log + self._log_bytes + count * row_size)  # a reset, or last observations, in the log
        self.largest_value = wire.MAX_VALUES // 2 // count
        self.chunk_bytes = 2 * (self._layout.log + self._log_bytes)  # a slab is one chunk, whatever is in it

    def reset(self) -> None:
        """Set the state of a new writer."""
        self.slab = LaneSlab(*self._trees, self._layout.times, self._layout.mode == SAME_STEP)
        self._writer: LaneWriter | None = None  # writer of the slab
        self._first_state: LaneState | None = None  # state of the lanes at the start of the slab
        self._next_state: LaneState | None = None  # state of the lanes at the start of the next slab
        self.state = State.IDLE
        self.unrecorded: deque[Any] = deque()
        self._earlier_steps = 0  # steps in earlier slabs
        if self.filters is not None:
            self.filters.forget()

    # -- slabs --------------------------------------------------------------------------------------------------------

    def new_ring(self, slab_bytes: int) -> Ring:
        size = max(slab_bytes, self._layout.log + self._log_bytes)
        _demand_room(size)
        return self.recorder.new_ring(LANES, self._layout.described(), _SLABS, size)

    def submit(self) -> None:
        writer, recorder = self._writer, self.recorder
        self.slab.disable_fast_path()
        if writer is None or recorder.failed or writer.sequence <= recorder.out.submitted:
            return
        try:
            segments, state = self._decoded(writer)
        except Exception as error:  # any error; reported like a write error
            raise_if_of_signal(error)
            recorder.out.fail(error)
            return
        lanes = np.arange(self._count)
        if (
            self._first_state is not None
            and self._first_state.recent
            and state.recent[0] is self._first_state.recent[0]
        ):
            # Copied before the memory of an earlier slab is used again.
            state = state._replace(recent=(Observed(lanes, state.observed(lanes)),))
        self._next_state = state
        pending = pending_of(self.pending_actions(), state.lanes, self._layout.numbers)
        recorder.out.submit(writer.sequence, lambda: [make() for make in segments], pending)

    def _decoded(self, writer: LaneWriter) -> tuple[list[LazySegment], LaneState]:
        """Return the segments of a slab, and the state of the lanes after it."""
        with held_back():  # libraries replace the exception of a signal handler by their own
            contents = LaneEvents(self._layout, writer.sequence, writer.memory, loops=LANE_LOOPS)
            return decoded(self._layout, contents, self._first_state or LaneState.initial(self._count))

    def switch_slab(self) -> None:
        if self._writer is not None and not self._writer.is_empty:
            self.submit()
            self._begin(0)

    def _begin(self, log_bytes: int) -> None:
        """Continue in the next slab, whose log has room for an entry of log_bytes."""
        before, state = self._writer, self._next_state
        packed = b"" if state is None else state.packed(self._layout.filtered)
        if before is not None:
            log_bytes += before.pending_bytes
        size = self._layout.log + log_bytes_for(packed) + log_bytes
        recorder = self.recorder
        ring = recorder.open_ring(size)
        if ring is None:
            return
        done = 0 if before is None else before.sequence
        recorder.out.wait(min(recorder.out.submitted, done - _AHEAD))
        with held_back():  # close() in a signal handler takes the slabs away
            if recorder.failed:
                return
            if (slab_bytes := len(ring.slabs[0])) < size or ring.shortage is not None:
                recorder.out.wait()  # for all content of the ring that is replaced
                if not recorder.failed:
                    larger = max(size, min(size + size // 4, MOST_SLAB_BYTES))
                    recorder.make_ring(larger if slab_bytes < size else slab_bytes)
            ring = recorder.ring
            if recorder.failed or ring is None:
                return
            ring.sequence = done  # an interrupted call may have incremented it
            payloads, pending = (0, 0) if before is None else before.payloads, self.pending_actions()
            slab = LaneSlab(*self._trees, self._layout.times, self._layout.mode == SAME_STEP)
            writer = LaneWriter(self._layout, slab, *ring.next_slab(), packed, payloads)
            if pending is not None:
                writer.record_actions(pending)
            recorder.clock.start(recorder.flush_seconds)
            self._earlier_steps += self.slab.steps
            self.slab, self._writer, self._first_state = slab, writer, state

    def _put(self, put: Callable[[LaneWriter, Any], None], what: Any) -> None:
        """Write an event, or actions, to the slab, or to the next one if it is full.

        Writing may have failed in the thread since the step began. The result still goes into an open slab.
        """
        writer, out = self._writer, self.recorder.out
        if writer is None or writer.sequence <= out.submitted:
            self._begin(0)
            writer = self._writer
        while writer is not None and writer.sequence > out.submitted:
            try:
                put(writer, what)
                return
            except LogFull as full:
                if self.recorder.failed:
                    return
                self.submit()
                self._begin(full.args[0])
                writer = self._writer

    # -- steps and resets ----------------------------------------------------------------------------------------------

    def ready(self, is_next: bool = True) -> bool:
        """Make room for an event; return False if it would not be recorded. Raises RecordingError, once.

        is_next: False for a step that has returned already; then the fast path stays disabled, and errors and warnings
            wait for the next step, or for close().
        """
        recorder = self.recorder
        if is_next and recorder.needs_attention:
            recorder.attend()
            recorder.report()
        if recorder.is_closed or recorder.failed:
            return False
        if self.state is State.WAITING or self.slab.is_waiting:
            self._put(LaneWriter.end, End(None, time.time_ns(), time.monotonic_ns()))
            if self.filters is not None:
                self.filters.mark_unknown()
        self.state = State.IDLE
        writer = self._writer
        if writer is None or writer.sequence <= recorder.out.submitted:
            self._begin(0)
        elif writer.is_full or recorder.clock.is_requested:
            self.switch_slab()
        if recorder.failed:
            if is_next:
                recorder.report()
            return False
        if is_next:
            self.slab.enable_fast_path(recorder.clock.due)
        if recorder.needs_attention:  # checked last: another thread may have set it
            self.slab.disable_fast_path()
        return True

    def begin_event(self) -> None:
        """Note that a step or reset begins that only add() ends."""
        self.state = State.WAITING
        self.slab.disable_fast_path()  # the next step must look at it

    def record_actions(self, actions: list[ColumnRows]) -> None:
        """Record the actions of the next step. The slab owns them from now on."""
        self._put(LaneWriter.record_actions, actions)
        self.state = State.IDLE  # the slab is waiting

    def pending_actions(self) -> list[ColumnRows] | None:
        """Return the actions of a step that has not returned, one per leaf; None without one."""
        return None if self._writer is None else self._writer.pending_actions()

    def add(self, event: Reset | Step) -> None:
        """Record an event. The slab owns its arrays from now on."""
        if self.recorder.is_closed or self.state is not State.WAITING:  # closed or forked while the event happened
            return
        self._put(LaneWriter.step if isinstance(event, Step) else LaneWriter.reset, event)
        self.state = State.IDLE
        if event.monotonic > self.recorder.clock.due:
            self.switch_slab()

    def output_buffers(self) -> OutputBuffers:
        """Return the output arrays for the next step; the same ones on each call."""
        buffers = None if self._writer is None else self._writer.output_buffers()
        return buffers or buffers_of_no_slab(self._layout)

    def reward_buffer(self, dtype: np.dtype[Any]) -> Array:
        """Return the output array for rewards of this type."""
        buffer = None if self._writer is None else self._writer.reward_buffer(dtype)
        return np.empty(self._count, dtype) if buffer is None else buffer

    @property
    def steps(self) -> int:
        """The number of steps in all slabs so far."""
        return self._earlier_steps + self.slab.steps

    @property
    def has_steps(self) -> bool:
        return self._writer is not None

    def end(self, outcome: int) -> None:
        if self._writer is not None and not self.recorder.failed:
            self._put(LaneWriter.end, End(outcome, time.time_ns(), time.monotonic_ns()))

    # -- forks and copies ---------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self.state is State.TAKEN_OVER or (self._writer is not None and not self.recorder.is_closed)

    def take_over(self) -> None:
        self.state = State.TAKEN_OVER

    def detach(self) -> None:
        _left_to_parents.append(self.unrecorded)
        self.reset()


def _demand_room(slab_bytes: int) -> None:
    if slab_bytes > MOST_SLAB_BYTES:  # readers reject it
        raise UnstorableValue(f"a step of all lanes takes {slab_bytes} bytes; at most {MOST_SLAB_BYTES} can be kept")


class LaneFilters:
    """Calls filters in the caller's thread, so that their exceptions reach the caller.

    An episode gets its id when its filter is called. After an exception, the id is not reused.
    """

    def __init__(self, filters: Filters, mode: str, count: int):
        self._filters, self._mode, self._count = filters, mode, count
        self.forget()

    def forget(self) -> None:
        """Reset the state: no lane is known, and no episode has begun."""
        self._lanes, self._episodes = np.zeros(self._count, LANE), 0

    def mark_unknown(self) -> None:
        """Mark all lanes as unknown until an episode begins."""
        self._lanes["open"] = self._lanes["pending"] = False

    def reset(self, lanes: Array) -> Array:
        """Return the ids of the episodes that begin in lanes; -1 for episodes that are not recorded."""
        new = np.zeros(len(lanes), LANE)
        ids = self._ids(len(lanes))
        new["open"], new["skipped"] = True, ids < 0
        self._lanes[lanes] = new
        return ids

    def step(self, rewards: Any, ended: Array) -> tuple[Array, Array]:
        """Return the id of the recorded episode that begins with a step, or -1, by lane; and True for recorded steps.

        ended: True for lanes whose step reports the end of an episode.
        """
        lanes = self._lanes
        known, resets, open_, pending = after_step(self._mode, lanes["open"], lanes["pending"], ended)
        steps = known & ~resets
        kept, ids = np.zeros(self._count, np.bool_), np.full(self._count, -1)
        for lane in np.flatnonzero(steps & ~lanes["skipped"]).tolist():
            kept[lane] = self._filters.keeps_step(int(lanes["steps"][lane]), rewards[lane])
        begun = resets | (steps & ended & open_)  # a lane open after an end has a new episode
        ids[begun] = self._ids(int(begun.sum()))
        lanes["steps"] += steps
        lanes["steps"][begun], lanes["skipped"][begun] = 0, ids[begun] < 0
        lanes["open"], lanes["pending"] = open_, pending
        return ids, kept

    def _ids(self, count: int) -> Array:
        ids = []
        for _ in range(count):
            episode = self._episodes
            self._episodes += 1
            ids.append(episode if self._filters.keeps_episode(episode) else -1)
        return np.array(ids, np.int64)
