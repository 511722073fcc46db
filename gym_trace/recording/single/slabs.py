"""Slabs of a single environment: rows and log entries as they are recorded, and the switch to the next slab."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.packing import pack
from gym_trace.data.values import Packed
from gym_trace.errors import UnstorableValue
from gym_trace.format import wire
from gym_trace.format.ring import log, memory
from gym_trace.format.ring.chunk_builder import LARGE_CHUNK
from gym_trace.format.ring.log import (
    CHANGES,
    CONTINUE,
    END,
    REWARD_TYPE,
    START,
    START_HAS_INITIAL,
    STOP,
    VALUE,
    WHOLE,
)
from gym_trace.format.ring.row_layout import RowLayout
from gym_trace.format.ring.row_slab import EXACT_INTEGERS
from gym_trace.format.ring.rows import RowDecoder
from gym_trace.format.ring.segment import ATOMS
from gym_trace.recording.core import RowSlab
from gym_trace.recording.recorder import Recorder
from gym_trace.recording.single.packing import Packer, RowPackers, chunk_bytes_of
from gym_trace.storage.interrupts import held_back

START_BYTES = 4 << 10  # log bytes of a typical episode start
LOG_BYTES = 128 << 10  # log bytes of a slab if all values are in its rows
VALUES_BYTES = 2 << 20  # log bytes of a slab if values are in the log
# The first slab is small, because many writers are killed after a few steps. It grows when it is full.
_FIRST_SLAB_BYTES = 48 << 10
_GROW_RETRY_NS = 10**9  # file descriptors may be free again
MOST_ROWS = 1 << 16
FLAG_BYTES = 2 * log.size_of(0)
_SPARE_BYTES = 1 << 10
_PLAIN_REWARDS = frozenset({bool, int, float, np.float64})

Entries = dict[int, tuple[int, bytes]]  # log entries of a row, by column: kind and payload


class Observed(NamedTuple):
    """A packed observation or action: its values in the row, and its entries in the log."""

    row: bytes
    log: Entries


class _NextSlab(NamedTuple):
    """The initial content of the next slab."""

    entries: list[tuple[Any, ...]]  # arguments of RowSlab.append()
    pending_action: bytes | None
    base: int  # number of rows in all previous slabs
    last_row: Observed  # the last of these rows
    columns: set[int]  # columns of deltas whose value is among the entries
    needed: int  # bytes of the content


class RowSlabs:
    """Fills slabs with the rows of one environment, and their logs.

    Args:
        recorder: opens the ring, writes the slabs, and issues the warnings.
        infos: True if steps have infos.
        is_filtered: True if the fast path never records a step.

    Attributes:
        slab: the slab being filled. Its fast path is disabled while no run of steps is open, or if anything is due.
        is_begun: True if the slab is begun, and not being switched.
        carry: returns the entry that continues the open episode in the next slab: arguments of RowSlab.append().
        result_bytes: log bytes reserved for the result of a step.
        most_rows: most rows of a slab.
        base: number of rows in all previous slabs.
    """

    largest_value = wire.MAX_VALUES // 4

    def __init__(
        self,
        recorder: Recorder,
        layout: RowLayout,
        infos: bool,
        is_filtered: bool,
        carry: Callable[[], tuple[Any, ...] | None],
    ):
        self.recorder, self.carry = recorder, carry
        self.chunk_bytes = chunk_bytes_of(layout)
        self.layout = layout
        self._fast_actions, self.fast_results = not is_filtered, not (infos or is_filtered)
        self.logs_observations = layout.fixed_leaf(layout.observation) is None
        row_bytes = 8 + sum(max(1, leaf.row_size) for leaf in layout.leaves)
        self.most_rows = max(1, min(MOST_ROWS, self.chunk_bytes // row_bytes))
        large = sum(leaf.row_size for leaf in layout.delta_leaves)
        large = max(large + large // 4, min(4 * large, LARGE_CHUNK))
        has_values = infos or any(leaf.dtype is None for leaf in layout.leaves)
        log_bytes = max(VALUES_BYTES if has_values or large else LOG_BYTES, large)
        # Switching a slab detects a full disk, so no slab is switched between a step and its result.
        observed = [leaf for leaf in layout.observation_leaves if leaf in layout.delta_leaves]
        result_bytes = (
            _SPARE_BYTES + sum(log.size_of(leaf.row_size) for leaf in observed) + has_values * VALUES_BYTES // 4
        )
        # Readers reject slabs with more values than bytes, such as those of arrays without elements.
        self._slab_bytes = memory.SLAB_HEADER + self.most_rows * max(layout.size, len(layout.leaves)) + log_bytes
        self.result_bytes = min(result_bytes, memory.MOST_SLAB_BYTES - self._slab_bytes)
        self._slab_bytes += max(0, self.result_bytes)
        if self.result_bytes < 0:
            raise UnstorableValue(
                f"a step takes {row_bytes} bytes; at most {memory.MOST_SLAB_BYTES // 2} can be recorded"
            )
        self._first_bytes = min(_FIRST_SLAB_BYTES + self.result_bytes + 4 * layout.size, self._slab_bytes)
        self._decoder = RowDecoder(layout.offsets.described())
        self.packers = RowPackers(layout, self, recorder)

    def reset(self) -> None:
        """Set the state of a new writer."""
        self.slab = RowSlab(self.layout, self._fast_actions, self.fast_results, self.result_bytes)
        self.is_begun = False
        self.base = 0
        self._last_row = Observed(b"", {})  # last row of the previous slabs, without the values of log_value()
        self._reward_type: Any = np.float64
        self._apart: Entries | None = None  # entries that are not in the log yet
        self._values: tuple[int, Entries] = (
            -1,
            {},
        )  # the last row with observation values in the log, and these values
        self._next: _NextSlab | None = None  # while a slab is switched
        self._grow_from = 0  # time before which the slab does not grow
        self.packers.forget()
        for column, packer in self.packers.deltas.items():
            self.slab.follow(column, packer.before, packer.ready, packer.limit)

    def detach(self) -> None:
        self.slab.disable_fast_path()

    # -- slabs --------------------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """True if the slab must be switched before an initial observation and a row."""
        slab, log_bytes = self.slab, self.layout.size + START_BYTES + self.result_bytes
        if not (self.is_begun and slab.rows):
            return False
        is_full = slab.rows + 2 > self.most_rows or not self._has_room(log_bytes)
        return is_full or time.monotonic_ns() >= self.recorder.clock.due

    @property
    def takes_floats(self) -> bool:
        """True if rewards are float64."""
        return self._reward_type is np.float64

    def has_space_for_initial(self) -> bool:
        """Return True if the slab has space for a typical episode start."""
        return self.slab.rows < self.most_rows and self._has_room(START_BYTES)

    def make_space_for_initial(self) -> None:
        """Make space for an initial observation, before it is packed."""
        self.make_room(START_BYTES)

    def enable_fast_path(self) -> None:
        """Let the slab accept steps until the clock must be looked at."""
        recorder, most_rows = self.recorder, self.most_rows
        look_at = recorder.clock.look_at
        self.slab.enable_fast_path(look_at if look_at < most_rows else most_rows)
        if recorder.needs_attention:  # checked last: another thread may have set it
            self.slab.disable_fast_path()

    def make_room(self, log_bytes: int = 0) -> bool:
        """Make room for a row and log_bytes of log; return False if recording has ended."""
        if self.is_begun and self.slab.rows < self.most_rows and self._has_room(log_bytes):
            return True
        if self.recorder.open_ring() is None:
            return False
        self.switch_slab(log_bytes)
        return not self.recorder.failed

    def _has_room(self, log_bytes: int) -> bool:
        """Return True if the slab has space for one more row and log_bytes of log; a small one grows for it."""
        return self.slab.has_room(log_bytes) or (self._grow() and self.slab.has_room(log_bytes))

    def _grow(self) -> bool:
        """Move the slab to a ring of the full size; return False if it has that, or if there is no space for it.

        A killed writer leaves the one ring or the other, each with the whole slab.
        """
        recorder, slab = self.recorder, self.slab
        with held_back():  # close() in a signal handler takes the slabs away
            ring = recorder.ring
            if not self.is_begun or recorder.failed or ring is None or len(slab.memory) >= self._slab_bytes:
                return False
            if time.monotonic_ns() < self._grow_from:
                return False
            rows = slab.rows + (slab.pending_action() is not None)
            cut = len(slab.memory) - rows * self.layout.size
            try:
                larger = self._new_ring(self._slab_bytes, (bytes(slab.memory[:cut]), bytes(slab.memory[cut:])))
            except OSError as error:
                recorder.out.fail(error)
                return False
            if ring.mapped and not larger.mapped:  # no free descriptor: a kill would lose the larger one
                self._grow_from = time.monotonic_ns() + _GROW_RETRY_NS
                return False
            larger.sequence, recorder.ring = ring.sequence, larger
            slab.move(larger.slabs[0])
            ring.abandon()
            return True

    def new_ring(self, slab_bytes: int) -> memory.Ring:
        return self._new_ring(max(self._slab_bytes, slab_bytes) if slab_bytes else self._first_bytes)

    def _new_ring(self, slab_bytes: int, begun: tuple[bytes, bytes] = memory.NOT_BEGUN) -> memory.Ring:
        return self.recorder.new_ring(memory.ROWS, self.layout.offsets.described(), 1, slab_bytes, begun)

    def submit(self) -> None:
        slab, out = self.slab, self.recorder.out
        slab.disable_fast_path()
        self.is_begun = False
        if slab.sequence > out.submitted:
            with held_back():  # libraries replace the exception of a signal handler by their own
                try:
                    segments, pending = self._decoder.decode(slab.sequence, slab.memory)
                except Exception as error:  # any error: reported at the next step
                    out.fail(error)
                    return
            for column, complaint in self._decoder.complaints.items():
                self.recorder.complain(column, complaint)
            out.submit(slab.sequence, lambda: segments, pending)

    def switch_slab(self, log_bytes: int = 0) -> None:
        """Continue in the next slab, with room for log_bytes of log. Safe to repeat after a Ctrl-C."""
        recorder = self.recorder
        if self._next is None:
            self.submit()
            recorder.out.wait()
            if recorder.failed:
                return
            self._next = self._next_slab(log_bytes)
        with held_back():  # close() in a signal handler takes the slabs away
            if recorder.failed:  # or closed, by a signal handler before
                return
            following = self._next
            if (ring := recorder.ring) is not None:
                size = max(len(ring.slabs[0]), self._slab_bytes)
                if following.needed > len(ring.slabs[0]) or ring.shortage:
                    recorder.make_ring(2 * following.needed if following.needed > size else size)
                    if recorder.failed:
                        return
            slab = self.slab
            assert recorder.ring is not None
            slab.begin(*recorder.ring.next_slab())
            for entry in following.entries:
                slab.append(*entry)
            if following.pending_action is not None:
                slab.record_packed_action(following.pending_action)
            self.base, self._last_row = following.base, following.last_row
            slab.only_floats(self._reward_type is np.float64)
            for number, packer in self.packers.deltas.items():
                if number not in following.columns:
                    packer.forget()
            recorder.clock.start(recorder.flush_seconds)
            self._next, self.is_begun = None, True

    def _next_slab(self, log_bytes: int) -> _NextSlab:
        """Return the initial content of the next slab: the open episode, and the entries of an incomplete row."""
        slab = self.slab
        carried = []
        if slab.sequence and slab.logged >= slab.rows:
            carried = [entry for entry in slab.entries() if is_carried(entry, slab.rows)]
        entries: list[tuple[Any, ...]] = []
        continued = self.carry()
        if continued is not None and not any(entry.kind == START for entry in carried):
            entries.append(continued)
        if self._reward_type is not np.float64:
            entries.append((REWARD_TYPE, np.dtype(self._reward_type).str.encode()))
        for entry in carried:
            if entry.kind == CHANGES:  # relative to a value in the slab before
                entries.append((WHOLE, self.packers.deltas[entry.column].last(), 0, entry.column))
            else:
                numbers = entry.a, entry.b, entry.c, entry.d
                entries.append((entry.kind, bytes(entry.payload), entry.flags, entry.column, *numbers))
        needed = log_bytes + sum(log.size_of(len(entry[1])) for entry in entries) + 2 * self.layout.size + _SPARE_BYTES
        return _NextSlab(
            entries,
            slab.pending_action() if slab.sequence else None,
            self.base + slab.rows,
            self._last(),
            {entry.column for entry in carried if entry.kind in (CHANGES, WHOLE)},
            needed + sum(leaf.row_size for leaf in self.layout.delta_leaves),
        )

    @property
    def is_incomplete(self) -> bool:
        """True if an action, or entries of the log, belong to a row that is not complete."""
        slab = self.slab
        return bool(slab.sequence) and (slab.logged >= slab.rows or slab.pending_action() is not None)

    def drop_incomplete_row(self) -> set[int]:
        """Remove the log entries of a row that an exception, such as Ctrl-C, interrupted; return their kinds."""
        slab = self.slab
        if not slab.sequence or self.recorder.failed:
            return set()
        if not self.is_begun:
            self.switch_slab()
        entries = slab.entries()
        left = len(entries)
        while left and is_carried(entries[left - 1], slab.rows):
            left -= 1
        slab.drop(left)
        slab.disable_fast_path()
        self.packers.forget()
        return {entry.kind for entry in entries[left:]}

    # -- values -------------------------------------------------------------------------------------------------------

    def log(self, kind: int, payload: bytes = b"", *numbers: int) -> None:
        """Append an entry for the next row to the log; do nothing if recording has ended."""
        if self.is_begun or self.make_room():
            try:
                self.slab.append(kind, payload, *numbers)
            except log.LogFull:
                size = log.size_of(len(payload))
                if not self._has_room(size):
                    self.switch_slab(size)
                if not self.recorder.failed:
                    self.slab.append(kind, payload, *numbers)

    def log_value(self, column: int, packed: bytes, kind: int = VALUE) -> None:
        """Record the value of a column in the next row, as MessagePack."""
        if self._apart is not None:
            self._apart[column] = kind, packed
            return
        if column < len(self.layout.observation_leaves):
            row = self.next_row()
            if row != self._values[0]:
                self._values = (row, {})
            self._values[1][column] = kind, packed
        self.log(kind, packed, 0, column)

    def log_whole(self, column: int, value: bytes) -> None:
        """See deltas.Log."""
        if self._apart is not None:
            self._apart[column] = WHOLE, value
        else:
            self.log(WHOLE, value, 0, column)

    def log_changes(self, column: int, count: int, changes: bytes) -> bool:
        """See deltas.Log."""
        slab = self.slab
        if self._apart is not None or not self.is_begun or not self._has_room(log.size_of(len(changes))):
            return False
        slab.append(CHANGES, changes, 0, column, count)
        return True

    def packed_apart(self, packer: Packer, value: Any) -> Observed:
        """Pack a value without changing the log."""
        self._apart = {}
        try:
            return Observed(packer(value), self._apart)
        finally:
            self._apart = None

    def forget_value(self) -> None:
        """Call after an exception in packed_apart()."""
        self._apart = None

    def put(self, packed: Observed) -> bytes:
        """Append the entries of a value from packed_apart() to the log; return its bytes in the row."""
        for column, (kind, payload) in packed.log.items():
            self.log_value(column, payload, kind)
        return packed.row

    def number_of(self, reward: Any) -> float:
        """Return the number in the row for a reward; append to the log what the number cannot hold."""
        kind = type(reward)
        if kind not in ATOMS:
            reward = self.recorder.plain("rewards", reward)
            kind = type(reward)
        if kind in _PLAIN_REWARDS and (kind is not int or -EXACT_INTEGERS <= reward <= EXACT_INTEGERS):
            if self._reward_type is not np.float64:
                self._set_reward_type(np.float64)
            return float(reward)
        dtype = reward.dtype if kind in ATOMS and kind is not int else None
        if dtype is not None and dtype.itemsize <= 8 and dtype.kind in "biufc":
            if self._reward_type is not kind:
                self._set_reward_type(kind)
            return float(np.frombuffer(reward.tobytes().ljust(8, b"\0"), np.float64)[0])
        value = self.recorder.snapshot("rewards", reward)
        self.log_value(self.layout.reward_column, value if type(value) is Packed else pack(value))
        return 0.0

    def _set_reward_type(self, kind: Any) -> None:
        self.log(REWARD_TYPE, np.dtype(kind).str.encode())
        self._reward_type = kind
        self.slab.only_floats(kind is np.float64)

    def next_row(self) -> int:
        """Return the index of the next row, over all slabs."""
        return self.base + self.slab.rows

    def last_observation(self) -> Observed:
        """Return the observation of the last row."""
        columns, last = range(len(self.layout.observation_leaves)), self._last()
        found = {number: (WHOLE, packer.last()) for number, packer in self.packers.deltas.items() if number in columns}
        found.update(last.log)
        if self._values[0] == self.next_row() - 1:
            found.update(self._values[1])
        return Observed(last.row, found)

    def _last(self) -> Observed:
        """Return the observation of the last row without the values of log_value()."""
        return observed_in(self.slab) if self.slab.rows else self._last_row


def observed_in(slab: RowSlab) -> Observed:
    """Return the observation in the last row of a slab, without the values of log_value()."""
    return Observed(slab.last_row(), {column: (VALUE, text) for column, text in slab.last_texts().items()})


def is_carried(entry: log.LogEntry, rows: int) -> bool:
    """Return True if an entry belongs to the row after the first `rows` rows."""
    if entry.row < rows or entry.kind in (STOP, END, CONTINUE, REWARD_TYPE):
        return False
    return entry.kind != START or bool(entry.flags & START_HAS_INITIAL)
