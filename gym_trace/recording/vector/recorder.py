"""The recorder of a vector environment, and its filters."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gym_trace.errors import UnstorableValue, raise_if_of_signal
from gym_trace.format import wire
from gym_trace.model.layout import Layout
from gym_trace.model.values import Array
from gym_trace.recording.core import put_batches
from gym_trace.recording.filters import Filters
from gym_trace.recording.options import RecordingOptions
from gym_trace.recording.recorder import Recorder, not_to_be_interrupted
from gym_trace.ring.lanes.autoreset import after_step
from gym_trace.ring.lanes.contents import Contents
from gym_trace.ring.lanes.decoder import decoded, pending_of
from gym_trace.ring.lanes.entries import LANE, End, LaneState, Observed, Reset
from gym_trace.ring.lanes.layout import LaneLayout, row_bytes
from gym_trace.ring.lanes.slab import LaneSlab, Rooms, Step, log_bytes_for, rooms_of_no_slab
from gym_trace.ring.log import LogFull
from gym_trace.ring.memory import LANES, MOST_SLAB_BYTES, Ring
from gym_trace.ring.segment import Rows, Segment
from gym_trace.storage.interrupts import held_back
from gym_trace.storage.protocol import Storage

_ROWS = 128  # of each lane that make a slab, if that is not too large
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 16 << 20
_LEAST_LOG, _INFO = 64 << 10, 64  # bytes of a log, and what an info of a lane may take of it
_AHEAD = 2  # slabs that may wait for the thread: NumPy releases the interpreter lock over such large arrays
_SLABS = 3  # those, and the one that is being filled


class LaneRecorder(Recorder):
    """One writer of a trace, fed with steps of all lanes at a time from one thread.

    Before each step or reset the caller asks whether it is ready(), and sets .expecting; add() ends that. If the next
    one finds it set, an exception such as Ctrl-C fell in between, and the state of the lanes is unknown: their episodes
    are cut, and each lane is recorded again from its next episode on.
    """

    def __init__(
        self,
        storage: Storage,
        schema: dict[str, Any],
        count: int,
        mode: str,
        observation: Layout,
        action: Layout,
        filters: Filters,
        options: RecordingOptions,
        lazy: bool,
    ):
        self._count = count
        leaves = list(observation.leaves()), list(action.leaves())
        self._split_observations, self._split_actions = observation.split, action.split
        self.filters = LaneFilters(filters, mode, count) if filters.any else None
        sizes = [leaf.row_size for leaf in itertools.chain(*leaves)]
        if max(sizes, default=0) > wire.MAX_COLUMN // 4:
            raise UnstorableValue(f"one observation or action takes more than {wire.MAX_COLUMN // 4} bytes")
        row_size = row_bytes([*leaves[0], *leaves[1]])
        capacity = min(_MOST_BYTES, max(_LEAST_BYTES, _ROWS * count * row_size))
        times = max(1, capacity // (count * row_size))
        self._layout = LaneLayout(count, times, mode, filters.steps, *leaves)
        self._log_bytes = max(_LEAST_LOG, capacity // 8) + (LANE.itemsize + row_size * filters.steps) * count
        if options.record_infos:
            self._log_bytes += min(_MOST_BYTES, times * count * _INFO)
        _demand_room(self._layout.log + self._log_bytes + count * row_size)  # a reset, or last observations, in the log
        self.largest_value = wire.MAX_VALUES // 2 // count
        self.expecting = False  # a step or reset has begun that was not told yet
        self._asked: list[Rows] | LaneSlab | None = None  # actions that were not answered yet, or the slab they are in
        chunk_bytes = 2 * (self._layout.log + self._log_bytes)  # a slab is one chunk, whatever is in it
        super().__init__(storage, schema, chunk_bytes, options, filters.summary, lazy)

    def _reset_state(self) -> None:
        super()._reset_state()
        self._slab: LaneSlab | None = None  # the one that is being filled
        self._state: LaneState | None = None  # of the lanes when it was begun
        self._next_state: LaneState | None = None  # that to begin the next one with
        self._until = 0  # when to turn the slab, in nanoseconds of the monotonic clock
        if self.filters is not None:
            self.filters.forget()

    # -- slabs --------------------------------------------------------------------------------------------------------

    def _new_ring(self, slab_bytes: int) -> Ring:
        size = max(slab_bytes, self._layout.log + self._log_bytes)
        _demand_room(size)
        return Ring(self._storage, self.writer_id, LANES, self._layout.described(), _SLABS, size)

    def _submit(self) -> None:
        slab = self._slab
        if slab is None or self.failed or slab.sequence <= self._out.submitted:
            return
        try:
            segments, state = self._decoded(slab)
        except Exception as error:  # of any kind: told like one of writing
            raise_if_of_signal(error)
            self._out.fail(error)
            return
        lanes = np.arange(self._count)
        if self._state is not None and self._state.recent and state.recent[0] is self._state.recent[0]:
            # Copied before the memory of an earlier slab is used again.
            state = state._replace(recent=(Observed(lanes, state.observed(lanes)),))
        self._next_state = state
        self._out.submit(slab.sequence, segments, pending_of(self.asked(), state.lanes))

    def _decoded(self, slab: LaneSlab) -> tuple[list[Segment], LaneState]:
        """Return the segments of a slab, and the state of the lanes after it."""
        with held_back():  # libraries turn the exception of a signal handler into one of theirs
            contents = Contents(self._layout, slab.sequence, slab.memory)
            return decoded(self._layout, contents, self._state or LaneState.initial(self._count))

    def _turn(self) -> None:
        if self._slab is not None and not self._slab.is_empty:
            self._submit()
            self._begin(0)

    def _begin(self, log_bytes: int) -> None:
        """Continue in the next slab, whose log has room for an entry of log_bytes."""
        before, state = self._slab, self._next_state
        packed = b"" if state is None else state.packed(self._layout.filtered)
        if before is not None:
            log_bytes += before.asked_bytes
        size = self._layout.log + log_bytes_for(packed) + log_bytes
        ring = self._open_ring(size)
        if ring is None:
            return
        done = 0 if before is None else before.sequence
        self._out.wait(min(self._out.submitted, done - _AHEAD))
        if len(ring.slabs[0]) < size:
            ring = self._another_ring(ring, max(size, min(size + size // 4, MOST_SLAB_BYTES)))
        elif ring.shortage is not None:
            ring = self._another_ring(ring, len(ring.slabs[0]))
        if self.failed:
            return
        ring.sequence = done  # an interrupt may have come after it was counted
        payloads = (0, 0) if before is None else before.payloads
        slab = LaneSlab(self._layout, *ring.next_slab(), packed, put_batches, payloads)
        asked = self.asked()
        if asked is not None:
            slab.ask(asked)
            self._asked = slab if isinstance(self._asked, LaneSlab) else asked
        self._until = time.monotonic_ns() + int(min(1e9, self.flush_seconds) * 1e9)
        self._slab, self._state = slab, state

    def _another_ring(self, ring: Ring, slab_bytes: int) -> Ring:
        """Replace a ring that is too small, or not mapped, once all its content is written."""
        self._out.wait()
        if not self.failed:
            with held_back():
                try:
                    self._ring = self._ring_of(slab_bytes)
                    ring.abandon()
                except Exception as error:  # of any kind: told at the next step
                    self._out.fail(error)
        return self._ring or ring

    def _put(self, put: Callable[[LaneSlab, Any], None], what: Any) -> None:
        """Write an event, or actions, to the slab, or to the next one if there is no room."""
        slab, out = self._slab, self._out
        if slab is None or slab.sequence <= out.submitted:
            self._begin(0)
            slab = self._slab
        while slab is not None and out.failure is None:
            try:
                put(slab, what)
                return
            except LogFull as full:
                self._submit()
                self._begin(full.args[0])
                slab = self._slab

    # -- steps and resets ----------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Make room for an event; return False if it would not be recorded. Raises RecordingError, once."""
        slab, out, is_usual = self._slab, self._out, self.limit and not self.expecting and not self._closed
        if is_usual and slab and slab.sequence > out.submitted and out.failure is None and not slab.is_full:
            return True
        if not self.limit:
            self.limit = 1
            self._complain()
            self.report()
        if self._closed or self.failed:
            return False
        if self.expecting:
            self._asked = None
            self._put(LaneSlab.end, End(None, time.time_ns(), time.monotonic_ns()))
            if self.filters is not None:
                self.filters.lose_track()
            self.expecting = False
        slab = self._slab
        if slab is None or slab.sequence <= self._out.submitted:
            self._begin(0)
        elif slab.is_full or self._is_due:
            self._is_due = False
            self._turn()
        if self.failed:
            self.report()
        return not self.failed

    def ask(self, actions: list[Rows]) -> None:
        """Record the actions of the next step. The recorder owns them from now on."""
        self._put(LaneSlab.ask, actions)
        self._asked = actions

    def ask_usual(self, actions: Any) -> bool:
        """Do ask() if all actions are arrays exactly as the space says; otherwise return False."""
        slab = self._slab
        try:
            if slab is None or not slab.ask_usual(self._split_actions(actions)):
                return False
        except Exception as error:  # of other people's making, or there is no room
            raise_if_of_signal(error)
            return False
        self._asked = slab
        return True

    def asked(self) -> list[Rows] | None:
        """Return the actions of a step that has not returned, one per leaf; None without one."""
        return self._asked.asked_usual() if isinstance(self._asked, LaneSlab) else self._asked

    def step_usual(
        self, observations: Any, rewards: Any, terminations: Any, truncations: Any, utc: int, monotonic: int
    ) -> bool:
        """Do add() if all results of the step are arrays with the form of the columns; otherwise return False."""
        slab = self._slab
        if slab is None or slab is not self._asked:
            return False
        try:
            batches = [*self._split_observations(observations), rewards, terminations, truncations]
            if not slab.step_usual(batches, utc, monotonic):
                return False
        except Exception as error:  # as above
            raise_if_of_signal(error)
            return False
        self._added(monotonic)
        return True

    def add(self, event: Reset | Step) -> None:
        """Record an event. The recorder owns its arrays from now on."""
        if self._closed:  # while the environment was at it
            return
        self._put(LaneSlab.step if isinstance(event, Step) else LaneSlab.reset, event)
        self._added(event.monotonic)

    def _added(self, monotonic: int) -> None:
        self._asked = None
        self.expecting = False
        if monotonic > self._until:
            self._turn()

    def rooms(self) -> Rooms:
        """Return the output arrays for the next step: the same ones if asked again."""
        slab = self._slab
        if slab is None:  # in a child that was forked within the step
            self._begin(0)
            slab = self._slab
        rooms = None if slab is None else slab.rooms()
        return rooms or rooms_of_no_slab(self._layout)

    def reward_room(self, dtype: np.dtype[Any]) -> Array:
        """Return the output array for rewards of this type."""
        room = None if self._slab is None else self._slab.reward_room(dtype)
        return np.empty(self._count, dtype) if room is None else room

    @property
    def has_steps(self) -> bool:
        return self._slab is not None

    def end(self, outcome: int) -> None:
        self._asked = None
        if self._slab is not None:
            self._put(LaneSlab.end, End(outcome, time.time_ns(), time.monotonic_ns()))

    # -- forks and copies ---------------------------------------------------------------------------------------------

    def _position(self) -> Any:
        return None if self._slab is None else (self._slab.sequence, self._slab.position)

    def _let_go(self) -> None:
        self._slab = None

    def open_run(self) -> LaneState | None:
        """Return the state that another recorder needs to continue the open episodes, or None."""
        if self._closed or self.failed or self.expecting:
            return None
        slab, state = self._slab, self._next_state
        if slab is not None and slab.sequence > self._out.submitted:
            try:
                _, state = self._decoded(slab)
            except Exception as error:  # of any kind: it is met again, and told, when the slab is full
                raise_if_of_signal(error)
                return None
        return None if state is None else state.left_open()

    def continue_run(self, run: LaneState | None) -> None:
        """Continue the episodes of another recorder; write nothing before the first step."""
        if run is not None:
            self._next_state = run
            if self.filters is not None:
                self.filters.continue_run(run)


not_to_be_interrupted(__file__)


def _demand_room(slab_bytes: int) -> None:
    if slab_bytes > MOST_SLAB_BYTES:  # readers reject it
        raise UnstorableValue(f"a step of all lanes takes {slab_bytes} bytes; at most {MOST_SLAB_BYTES} can be kept")


class LaneFilters:
    """Call filters in the caller's thread, so that their exceptions reach the caller.

    An episode gets its id when its filter is called. If that raises, or anything after it, the id is not used again.
    """

    def __init__(self, filters: Filters, mode: str, count: int):
        self._filters, self._mode, self._count = filters, mode, count
        self.forget()

    def forget(self) -> None:
        """Reset the state: no lane is known, and no episode has begun."""
        self._lanes, self._episodes = np.zeros(self._count, LANE), 0

    def continue_run(self, run: LaneState) -> None:
        """Take over the state of another recorder."""
        self._lanes, self._episodes = run.lanes.copy(), run.episodes

    def lose_track(self) -> None:
        """Mark all lanes as unknown until an episode begins."""
        self._lanes["open"] = self._lanes["pending"] = False

    def reset(self, lanes: Array) -> Array:
        """Return the ids of the episodes that begin in lanes; -1 for those that are not recorded."""
        new = np.zeros(len(lanes), LANE)
        ids = self._ids(len(lanes))
        new["open"], new["skipped"] = True, ids < 0
        self._lanes[lanes] = new
        return ids

    def step(self, rewards: Any, ended: Array) -> tuple[Array, Array]:
        """Return for each lane the id of the recorded episode that begins with a step, or -1; and True for kept steps.

        ended: True for lanes whose step reports the end of an episode.
        """
        lanes = self._lanes
        known, resets, open_, pending = after_step(self._mode, lanes["open"], lanes["pending"], ended)
        steps = known & ~resets
        kept, ids = np.zeros(self._count, np.bool_), np.full(self._count, -1)
        for lane in np.flatnonzero(steps & ~lanes["skipped"]).tolist():
            kept[lane] = self._filters.keeps_step(int(lanes["steps"][lane]), rewards[lane])
        begun = resets | (steps & ended & open_)  # what is open after an end is another episode
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
