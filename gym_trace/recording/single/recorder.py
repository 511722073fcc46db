"""The recorder of a single environment: episodes and runs of steps, slabs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.layout import Leaf
from gym_trace.data.packing import pack
from gym_trace.data.values import Packed
from gym_trace.data.vocabulary import Outcome
from gym_trace.errors import UnstorableValue
from gym_trace.format.ring import log, memory
from gym_trace.format.ring.chunk_builder import LARGE_CHUNK
from gym_trace.format.ring.log import (
    CHANGES,
    CONTINUE,
    END,
    FLAG,
    HAS_LEAD,
    LEAD,
    REWARD_TYPE,
    START,
    STOP,
    VALUE,
    WHOLE,
)
from gym_trace.format.ring.row_layout import RowLayout
from gym_trace.format.ring.row_slab import EXACT_INTEGERS
from gym_trace.format.ring.rows import RowDecoder
from gym_trace.format.ring.segment import ATOMS
from gym_trace.recording.core import RowSlab
from gym_trace.recording.options import RecordingOptions
from gym_trace.recording.recorder import Recorder
from gym_trace.recording.reset_record import Start
from gym_trace.recording.single.packing import Packer, RowPackers, chunk_bytes_of
from gym_trace.storage.interrupts import held_back
from gym_trace.storage.protocol import Storage

LEAD_BYTES = 4 << 10  # log bytes of a typical episode start
LOG_BYTES = 128 << 10  # log bytes of a slab if all values are in its rows
VALUES_BYTES = 2 << 20  # log bytes of a slab if values are in the log
MOST_ROWS = 1 << 16
_CHECKS = 16  # checks of the clock per flush_seconds
_MOST_STRIDE = 1 << 14  # most rows between two checks
_FLAG_BYTES = 2 * log.size_of(0)
_SPARE_BYTES = 1 << 10
_PLAIN_REWARDS = frozenset({bool, int, float, np.float64})

Entries = dict[int, tuple[int, bytes]]  # log entries of a row, by column: kind and payload


class Observed(NamedTuple):
    """A packed observation or action: its values in the row, and its entries in the log."""

    row: bytes
    log: Entries


class _NextSlab(NamedTuple):
    """The first content of the next slab."""

    entries: list[tuple[Any, ...]]  # arguments of RowSlab.append()
    asked: bytes | None
    ended: bool
    base: int  # rows in the slabs before
    last_row: Observed  # of these
    columns: set[int]  # columns of deltas whose value is among the entries
    needed: int  # bytes


class RowRecorder(Recorder):
    """One writer of a trace, fed step by step from one thread.

    .slab.record_action() returns False while no run of steps is open, or if anything is due before the next step.

    Args:
        infos: True if steps have infos.
        is_filtered: True if every step is a special one.

    Attributes:
        episode: the start of the open episode, or None.
        running: True while a run of steps is open; slab.ended is True if its episode has ended.
        is_taken_over: True in a copy, if the open episode is recorded by the original.
    """

    slab: RowSlab

    def __init__(
        self,
        storage: Storage,
        schema: dict[str, Any],
        layout: RowLayout,
        infos: bool,
        is_filtered: bool,
        options: RecordingOptions,
        summary: Callable[[], dict[str, Any]],
        lazy: bool,
    ):
        self.layout = layout
        self._asks, self._answers = not is_filtered, not (infos or is_filtered)
        self._logs = layout.fixed_leaf(layout.observation) is None  # usual observations may need the log
        chunk_bytes = chunk_bytes_of(layout)
        row_bytes = 8 + sum(max(1, leaf.row_size) for leaf in layout.leaves)
        self._most_rows = max(1, min(MOST_ROWS, chunk_bytes // row_bytes))
        large = sum(leaf.row_size for leaf in layout.delta_leaves)
        large = max(large + large // 4, min(4 * large, LARGE_CHUNK))
        has_values = infos or any(leaf.dtype is None for leaf in layout.leaves)
        log_bytes = max(VALUES_BYTES if has_values or large else LOG_BYTES, large)
        # Turning a slab detects a full disk, so no slab is turned between a step and its result.
        observed = [leaf for leaf in layout.observation_leaves if leaf in layout.delta_leaves]
        room = _SPARE_BYTES + sum(log.size_of(leaf.row_size) for leaf in observed) + has_values * VALUES_BYTES // 4
        # Readers reject slabs with more values than bytes, such as those of arrays without elements.
        self._slab_bytes = memory.SLAB_HEADER + self._most_rows * max(layout.size, len(layout.leaves)) + log_bytes
        self._answer_bytes = min(room, memory.MOST_SLAB_BYTES - self._slab_bytes)
        self._slab_bytes += max(0, self._answer_bytes)
        if self._answer_bytes < 0:
            raise UnstorableValue(
                f"a step takes {row_bytes} bytes; at most {memory.MOST_SLAB_BYTES // 2} can be recorded"
            )
        self._decoder = RowDecoder(layout.form.described())
        self.packers = RowPackers(layout, self)
        super().__init__(storage, schema, chunk_bytes, options, summary, lazy)

    def _reset_state(self) -> None:
        super()._reset_state()
        # Slabs.
        self.slab = RowSlab(self.layout, self._asks, self._answers, self._answer_bytes)
        self._base = 0  # rows in the slabs before
        self._last_row = Observed(b"", {})  # in the slabs before; without the values of log_value()
        self._reward_type: Any = np.float64
        self._apart: Entries | None = None  # entries that are not in the log yet
        self._values: tuple[int, Entries] = (-1, {})  # the last row whose observation has values in the log, and these
        self._next: _NextSlab | None = None  # while a slab is turned
        self._is_open = False  # the slab is begun, and not being turned
        self._due = self._checked = 0.0  # time.monotonic() at which the slab is due, and of the last check
        self._stride = 1  # rows until the next check of the clock
        self._look_at = 1  # rows of the slab at the next check
        self.packers.forget()
        for column, packer in self.packers.deltas.items():
            self.slab.follow(column, packer.before, packer.ready, packer.limit)
        # Episodes.
        self.episode: Start | None = None
        self.running = False
        self._run = (0, 0)  # the row of the leading observation, over all slabs, and the index of the step after it
        self.is_taken_over = False
        self._early_notes: dict[str, Any] = {}  # annotations of the next step

    # -- episodes and runs of steps -----------------------------------------------------------------------------------

    def skip_episode(self) -> None:
        """Count an episode that is not recorded."""
        self._episodes += 1

    def try_begin_fast(self, start: Start, observation: Any) -> bool:
        """Begin an episode whose reset observation fits its space exactly; return False if begin() must do it."""
        slab, (episode, _, seed, kept, utc, monotonic) = self.slab, start
        if not (self._answers and self._is_open and self.limit) or self._closed:
            return False
        if self._logs and not (slab.rows < self._most_rows and slab.has_room(LEAD_BYTES)):
            return False
        # Before slab.start(): if Ctrl-C comes after that, the next reset ends the episode.
        self._episodes += 1
        self.episode, self._run = start, (self._base + slab.rows, 0)
        self._thread = threading.get_ident()
        if not slab.start(episode, seed, utc, monotonic, kept, observation):
            self.episode = None
            self._episodes -= 1
            return False
        self.running = True
        self._release()
        return True

    def begin(self, start: Start, lead: bytes | None) -> None:
        """Begin an episode. lead: the reset observation, packed; None if the run of steps begins later."""
        self._episodes += 1
        self._stop_running()
        if self._closed or self.failed:
            return
        self._thread = threading.get_ident()
        clocks = start.utc, start.monotonic
        self.log(START, start.kept, HAS_LEAD * (lead is not None), 0, start.episode, start.seed, *clocks)
        if self.failed:
            return
        self.episode, self.slab.ended = start, False
        self._run = (self.next_row(), 0)
        if lead is not None:
            self._open_run(lead)

    def lead(self, first_step: int, observation: Observed) -> None:
        """Begin a run of steps in the middle of the episode with its leading observation."""
        if self._closed:
            return
        self.running = False
        self.prepare_lead()
        packed = self.put(observation)
        self.log(LEAD, b"", 0, 0, first_step)
        if not self._is_open:
            return
        self._run = (self.next_row(), first_step)
        self._open_run(packed)

    def _open_run(self, observation: bytes) -> None:
        self.slab.lead(observation)
        self.running = True
        self._release()

    def prepare_lead(self) -> None:
        """Make room for a leading observation, before it is packed."""
        self._room(LEAD_BYTES)

    def _release(self) -> None:
        """Let the slab accept steps until the clock must be checked."""
        if self.running and not self.slab.ended and not self._early_notes and not self.failed:
            self.slab.enable_fast_path(self._look_at)
            if not self.limit:  # checked last: another thread may have set it
                self.slab.disable_fast_path()

    def _stop_running(self) -> None:
        self.running = False
        self._early_notes = {}
        self.slab.disable_fast_path()

    def record_action(self, action: bytes) -> bool:
        """Record a packed action before the environment is stepped with it; return False if that fails."""
        if not self._room(self._answer_bytes):
            return False
        self.slab.record_packed_action(action)
        return True

    def record_result(self, observation: Observed | bytes, reward: Any, terminated: Any, truncated: Any) -> None:
        """Record the result of a step: the packed observation, and a reward of any type.

        Writing may have failed during the step, in the thread. Its result still belongs into the slab, if that is open.
        """
        slab, kind = self.slab, type(reward)
        if (
            (kind is float or kind is np.float64 or (kind is int and -EXACT_INTEGERS <= reward <= EXACT_INTEGERS))
            and (self._is_open and self.running and self._reward_type is np.float64)
            and (type(observation) is bytes and slab.has_room(_FLAG_BYTES))
        ):
            slab.record_packed_result(observation, reward, terminated, truncated)
            return
        if self._sealed or not self.running:
            return
        number = self._number_of(reward)
        if not self._room(_FLAG_BYTES):
            return
        packed = self.put(observation) if isinstance(observation, Observed) else observation
        if self._is_open:
            self.slab.record_packed_result(packed, number, terminated, truncated)
            self._release()

    def stop(self) -> None:
        """End the run of steps, but not the episode, after the last row."""
        self._stop_running()
        self._drop_incomplete_row()
        self.log(STOP)

    def break_off(self, is_executed: bool = False) -> bool:
        """End the run of steps at a step that raised; return True if its row is incomplete, so that it is lost.

        is_executed: the environment has taken the step, even if nothing of it is recorded.
        """
        self._apart = None
        if self.episode is None:  # closed, or forked, within the step
            return False
        if (
            not is_executed
            and self.running
            and self.slab.pending_action() is None
            and self.slab.logged < self.slab.rows
        ):
            return False
        self.stop()
        self.skip_step()
        return True

    def skip_step(self) -> None:
        """Count a step that is not recorded, while no run of steps is open."""
        lead, first_step = self._run
        self._run = (lead, first_step + 1)
        self._early_notes = {}

    def end(self, outcome: Outcome = Outcome.CUT) -> None:
        """End the episode after the last row, if it has not ended."""
        self._stop_running()
        slab = self.slab
        if slab.sequence and (slab.logged >= slab.rows or slab.pending_action() is not None):
            self._drop_incomplete_row()
        if not slab.ended and not self.failed:  # how an episode ended of which steps are missing is unknown
            self.end_without_row(outcome)
        slab.ended = self.is_taken_over = False
        self.episode = None

    def _drop_incomplete_row(self) -> None:
        """Remove the log entries of a row that an exception, such as Ctrl-C, has prevented."""
        slab = self.slab
        if not slab.sequence or self.failed:
            return
        if not self._is_open:
            self.switch_slab()
        entries = slab.entries()
        left = len(entries)
        while left and is_carried(entries[left - 1], slab.rows):
            left -= 1
        for entry in entries[left:]:
            if entry.kind == FLAG:
                slab.ended = False
            elif entry.kind == START:
                self.episode = None
        slab.drop(left)
        slab.disable_fast_path()
        self.packers.forget()

    def end_without_row(self, outcome: int) -> None:
        """End the episode at a step that is skipped. Later steps belong to the same episode."""
        if self.episode is not None and not self.slab.ended:
            self.log(END, b"", 0, 0, outcome, 0, time.time_ns(), time.monotonic_ns())
        self.slab.ended = True
        self._stop_running()

    def end_at_lead(self, outcome: int) -> None:
        """End the episode with the leading observation. Later steps are another run."""
        self.end_without_row(outcome)
        self.running = True

    def annotate(self, values: dict[str, Any]) -> None:
        """Add snapshots of values to the next row."""
        if self.episode is not None:
            self.slab.disable_fast_path()  # first: if Ctrl-C comes after, they do not go to a later step
            self._early_notes.update(values)

    def log_annotations(self) -> None:
        """Append the annotations of the next row to the log, if there are any."""
        if self._early_notes:
            notes, self._early_notes = self._early_notes, {}
            self.log_value(self.layout.notes_column, _packed_notes(notes))

    def forget_annotations(self) -> None:
        """Drop the annotations of a step that is skipped."""
        self._early_notes = {}

    @property
    def has_steps(self) -> bool:
        return self._episodes > 1 or self.steps_taken() > 0

    def steps_taken(self) -> int:
        """Return the number of steps of the episode so far, including lost ones."""
        lead, first_step = self._run
        return first_step + max(0, self.next_row() - 1 - lead)  # the leading observation may not be there yet

    # -- slabs --------------------------------------------------------------------------------------------------------

    def make_ready(self) -> None:
        """Turn the slab if that is due, before a step that is recorded afterwards. Raises RecordingError, once."""
        slab, room = self.slab, self.layout.size + LEAD_BYTES + self._answer_bytes  # for a lead and a row
        is_full = slab.rows + 2 > self._most_rows or not slab.has_room(room)
        if self._is_open and slab.rows and (is_full or self._is_due or time.monotonic() >= self._due):
            self._is_due = False
            self.switch_slab()
        self.report()

    def make_room(self, turns: bool = True) -> bool:
        """Do what is due before a step; return True if the step can be recorded. Raises RecordingError, once.

        turns: True if the slab may be turned because of the time, not only because it is full. False within a step: a
            failure to write is reported at the next one.
        """
        if self.failed and (turns or not self._is_open):
            self._stop_running()
            if turns:
                self.report()
            return False
        self.limit = 1
        self._complain()
        if not self.running:
            return False
        if self.slab.ended:
            self.lead(self.steps_taken(), self.last_observation())
        now = time.monotonic()
        is_soon = now - self._checked < self.flush_seconds / _CHECKS
        self._stride = min(2 * self._stride, _MOST_STRIDE) if is_soon else max(1, self._stride // 2)
        self._checked = now
        if (
            self._room(self._answer_bytes)
            and turns
            and (self._is_due or now >= self._due or self.slab.rows >= self._most_rows)
        ):
            self._is_due = False
            self.switch_slab()
        if self.failed and (turns or not self._is_open):
            return self.make_room(turns)
        self.log_annotations()
        self._look_at = min(self._most_rows, self.slab.rows + self._stride)
        self._release()
        return True

    def _room(self, log_bytes: int = 0) -> bool:
        """Make room for a row and log_bytes of log; return False if recording has ended."""
        if self._is_open and self.slab.rows < self._most_rows and self.slab.has_room(log_bytes):
            return True
        if self._open_ring() is None:
            return False
        self.switch_slab(log_bytes)
        return not self.failed

    def _new_ring(self, slab_bytes: int) -> memory.Ring:
        size = max(self._slab_bytes, slab_bytes)
        ring = memory.Ring(self._storage, self.writer_id, memory.ROWS, self.layout.form.described(), 1, size)
        if self._ring is not None:
            ring.sequence = self._ring.sequence
            self._ring.abandon()
        return ring

    def _notice(self) -> None:
        super()._notice()
        self.slab.disable_fast_path()

    def _submit(self) -> None:
        slab = self.slab
        slab.disable_fast_path()
        self._is_open = False
        if slab.sequence > self._out.submitted:
            with held_back():  # libraries turn the exception of a signal handler into one of theirs
                try:
                    segments, pending = self._decoder.decode(slab.sequence, slab.memory)
                except Exception as error:  # any error: reported at the next step
                    self._out.fail(error)
                    return
            for column, complaint in self._decoder.complaints.items():
                self.complain(column, complaint)
            self._out.submit(slab.sequence, lambda: segments, pending)

    def switch_slab(self, log_bytes: int = 0) -> None:
        if self._next is None:
            self._submit()
            self._out.wait()
            if self.failed:
                return
            self._next = self._next_slab(log_bytes)
        if self.failed:  # or closed, by a signal handler in between
            return
        following = self._next
        if self._ring is not None and (following.needed > (size := len(self._ring.slabs[0])) or self._ring.shortage):
            self._make_ring(2 * following.needed if following.needed > size else size)
            if self.failed:
                return
        slab, ring = self.slab, self._ring
        assert ring is not None
        slab.begin(*ring.next_slab())
        for entry in following.entries:
            slab.append(*entry)
        if following.asked is not None:
            slab.record_packed_action(following.asked)
        slab.ended, self._base, self._last_row = following.ended, following.base, following.last_row
        slab.only_floats(self._reward_type is np.float64)
        for number, packer in self.packers.deltas.items():
            if number not in following.columns:
                packer.forget()
        self._checked = time.monotonic()
        self._due = self._checked + self.flush_seconds
        self._look_at = min(self._most_rows, self._stride)
        self._next, self._is_open = None, True

    def _next_slab(self, log_bytes: int) -> _NextSlab:
        """Return the first content of the next slab: the open episode, and the entries of an incomplete row."""
        slab = self.slab
        carried = []
        if slab.sequence and slab.logged >= slab.rows:
            carried = [entry for entry in slab.entries() if is_carried(entry, slab.rows)]
        entries: list[tuple[Any, ...]] = []
        if self.episode is not None and not any(entry.kind == START for entry in carried):
            flags, start = log.RUNNING * self.running | log.ENDED * slab.ended, self.episode
            entries.append((CONTINUE, b"", flags, 0, start.episode, self.steps_taken(), start.utc, start.monotonic))
        if self._reward_type is not np.float64:
            entries.append((REWARD_TYPE, np.dtype(self._reward_type).str.encode()))
        for entry in carried:
            if entry.kind == CHANGES:  # changes of a value in the previous slab
                entries.append((WHOLE, self.packers.deltas[entry.column].last(), 0, entry.column))
            else:
                numbers = entry.a, entry.b, entry.c, entry.d
                entries.append((entry.kind, bytes(entry.payload), entry.flags, entry.column, *numbers))
        needed = log_bytes + sum(log.size_of(len(entry[1])) for entry in entries) + 2 * self.layout.size + _SPARE_BYTES
        return _NextSlab(
            entries,
            slab.pending_action() if slab.sequence else None,
            slab.ended,
            self._base + slab.rows,
            self._last(),
            {entry.column for entry in carried if entry.kind in (CHANGES, WHOLE)},
            needed + sum(leaf.row_size for leaf in self.layout.delta_leaves),
        )

    # -- values -------------------------------------------------------------------------------------------------------

    def log(self, kind: int, payload: bytes = b"", *numbers: int) -> None:
        """Append an entry for the next row to the log; do nothing if recording has ended."""
        if self._is_open or self._room():
            try:
                self.slab.append(kind, payload, *numbers)
            except log.LogFull:
                self.switch_slab(log.size_of(len(payload)))
                if not self.failed:
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
        if self._apart is not None or not self._is_open or not slab.has_room(log.size_of(len(changes))):
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

    def put(self, packed: Observed) -> bytes:
        """Append the entries of a value from packed_apart() to the log; return its bytes in the row."""
        for column, (kind, payload) in packed.log.items():
            self.log_value(column, payload, kind)
        return packed.row

    def _number_of(self, reward: Any) -> float:
        """Return the number in the row for a reward; append to the log what the number cannot hold."""
        kind = type(reward)
        if kind not in ATOMS:
            reward = self.plain("rewards", reward)
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
        kept = self.snapshot("rewards", reward)
        self.log_value(self.layout.reward_column, kept if type(kept) is Packed else pack(kept))
        return 0.0

    def _set_reward_type(self, kind: Any) -> None:
        self.log(REWARD_TYPE, np.dtype(kind).str.encode())
        self._reward_type = kind
        self.slab.only_floats(kind is np.float64)

    def complain_of(self, leaf: Leaf, value: Any) -> None:
        """Warn that a value is outside its space."""
        kind = type(value)
        got = f"{value.dtype} of shape {value.shape}" if hasattr(value, "dtype") else f"a {kind.__name__}"
        complaint = f"got {got}, but the space has {leaf.dtype} of shape {leaf.shape}; recorded exactly"
        self.complain(leaf.column, complaint)

    def next_row(self) -> int:
        """Return the index of the next row, over all slabs."""
        return self._base + self.slab.rows

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

    # -- forks and copies ---------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self.is_taken_over or self.episode is not None

    def take_over(self) -> None:
        self.is_taken_over = True

    def _detach(self) -> None:
        self.slab.detach()


def observed_in(slab: RowSlab) -> Observed:
    """Return the observation in the last row of a slab, without the values of log_value()."""
    return Observed(slab.last_row(), {column: (VALUE, text) for column, text in slab.last_texts().items()})


def is_carried(entry: log.Entry, rows: int) -> bool:
    """Return True if an entry belongs to the row after the first `rows` rows."""
    if entry.row < rows or entry.kind in (STOP, END, CONTINUE, REWARD_TYPE):
        return False
    return entry.kind != START or bool(entry.flags & HAS_LEAD)


def _packed_notes(notes: dict[str, Any]) -> bytes:
    """Pack annotations, which are snapshots, as a map."""
    head = bytes([0x80 | len(notes)]) if len(notes) < 16 else b"\xdf" + len(notes).to_bytes(4, "big")
    parts = [pack(name) + (value if type(value) is Packed else pack(value)) for name, value in notes.items()]
    return head + b"".join(parts)
