"""The slabs of a single environment: what is put into them, and how they are turned."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gym_trace.errors import UnstorableValue, raise_if_of_signal
from gym_trace.model.layout import Leaf
from gym_trace.model.packing import pack
from gym_trace.model.values import Packed
from gym_trace.recording.core import RowSlab
from gym_trace.recording.options import RecordingOptions
from gym_trace.recording.recorder import Recorder, not_to_be_interrupted
from gym_trace.recording.reset_record import Start
from gym_trace.recording.single.packing import Packer, RowPackers, chunk_bytes_of
from gym_trace.ring import memory, row_slab
from gym_trace.ring.chunk_builder import LARGE_CHUNK
from gym_trace.ring.log import (
    CHANGES,
    CONTINUE,
    END,
    ENDED,
    HAS_LEAD,
    REWARD_TYPE,
    RUNNING,
    START,
    STOP,
    VALUE,
    WHOLE,
    Entry,
    LogFull,
    size_of,
)
from gym_trace.ring.row_layout import RowLayout
from gym_trace.ring.rows import RowDecoder
from gym_trace.ring.segment import ATOMS
from gym_trace.storage.interrupts import held_back
from gym_trace.storage.protocol import Storage

LEAD_BYTES = 4 << 10  # of the log that the start of an episode may take, as a rule
LOG_BYTES = 128 << 10  # of a slab, for what is not in its rows: many times that where values are in the log
VALUES_BYTES = 2 << 20
MOST_ROWS = 1 << 16
_PLAIN_REWARDS = frozenset({bool, int, float, np.float64})
EXACT_INTEGERS = 1 << 53
_SPARE_BYTES = 1 << 10

Entries = dict[int, tuple[int, bytes]]  # of a row, by column: kind and payload


class Observed(NamedTuple):
    """An observation, or an action, packed: its values in the row, and its entries in the log."""

    row: bytes
    log: Entries


class _NextSlab(NamedTuple):
    """What a slab begins with."""

    entries: list[tuple[Any, ...]]  # arguments of RowSlab.append()
    asked: bytes | None
    ended: bool
    base: int  # rows in the slabs before
    last_row: Observed  # of these
    columns: set[int]  # of deltas whose value is among the entries
    needed: int  # bytes


class SlabFiller(Recorder):
    """The part of a recorder of rows that puts them into slabs; see RowRecorder for what they are."""

    episode: Start | None  # the open episode
    running: bool  # a run of steps is open; slab.ended: its episode is over

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
        """infos: whether steps have one. is_filtered: whether every step is a special one."""
        self.layout = layout
        self._asks, self._answers = not is_filtered, not (infos or is_filtered)
        only = layout.observation
        is_fixed = isinstance(only, Leaf) and only.dtype is not None and only not in layout.delta_leaves
        self._logs = not is_fixed  # whether of an observation that is as the space says something goes into the log
        chunk_bytes = chunk_bytes_of(layout)
        row_bytes = 8 + sum(max(1, leaf.row_size) for leaf in layout.leaves)
        self._most_rows = max(1, min(MOST_ROWS, chunk_bytes // row_bytes))
        large = sum(leaf.row_size for leaf in layout.delta_leaves)
        large = max(large + large // 4, min(4 * large, LARGE_CHUNK))
        has_values = infos or any(leaf.dtype is None for leaf in layout.leaves)
        log = max(VALUES_BYTES if has_values or large else LOG_BYTES, large)
        # A full disk is found out by a slab that is turned, so no slab is turned between a step and what it led to.
        observed = [leaf for leaf in layout.observation_leaves if leaf in layout.delta_leaves]
        room = _SPARE_BYTES + sum(size_of(leaf.row_size) for leaf in observed) + has_values * VALUES_BYTES // 4
        # Readers refuse slabs with more values than bytes, such as those of arrays without elements.
        self._slab_bytes = memory.SLAB_HEADER + self._most_rows * max(layout.size, len(layout.leaves)) + log
        self._answer_bytes = min(room, memory.MOST_SLAB_BYTES - self._slab_bytes)
        self._slab_bytes += max(0, self._answer_bytes)
        if self._answer_bytes < 0:
            raise UnstorableValue(
                f"a step takes {row_bytes} bytes; at most {memory.MOST_SLAB_BYTES // 2} can be recorded"
            )
        self._decoder = RowDecoder(layout.described())
        self.packers = RowPackers(layout, self)
        super().__init__(storage, schema, chunk_bytes, options, summary, lazy)

    def _reset_state(self) -> None:
        super()._reset_state()
        self.slab = RowSlab(self.layout, self._asks, self._answers, self._answer_bytes)
        self._base = 0  # rows in the slabs before
        self._last_row = Observed(b"", {})  # in the slabs before: of the observation, what the slab puts down by itself
        self._reward_type: Any = np.float64
        self._apart: Entries | None = None  # entries that do not go into the log yet
        self._values: list[tuple[int, Entries]] = [(-1, {}), (-1, {})]  # of the last two rows that had any
        self._next: _NextSlab | None = None  # while a slab is turned
        self._is_open = False  # the slab is begun, and not being turned
        self._due = self._checked = 0.0  # time.monotonic() when the slab is to be written, when that was looked at
        self._stride = 1  # rows until the clock is looked at again
        self._look_at = 1  # rows of the slab at which it is
        self.packers.forget()
        for column, packer in self.packers.deltas.items():
            self.slab.follow(column, packer.before, packer.ready, packer.limit)

    @abstractmethod
    def steps_taken(self) -> int:
        """The number of steps of the episode so far, lost ones included."""

    # -- slabs --------------------------------------------------------------------------------------------------------

    def _new_ring(self, slab_bytes: int) -> memory.Ring:
        size = max(self._slab_bytes, slab_bytes)
        ring = memory.Ring(self._storage, self.writer_id, memory.ROWS, self.layout.described(), 1, size)
        if self._ring is not None:
            ring.sequence = self._ring.sequence
            self._ring.abandon()
        return ring

    def _notice(self) -> None:
        super()._notice()
        self.slab.hold()

    def _room(self, log_bytes: int = 0) -> bool:
        """Makes sure that there is room for a row and so much in the log; False if nothing is recorded any more."""
        if self._is_open and self.slab.rows < self._most_rows and self.slab.has_room(log_bytes):
            return True
        if self._open_ring() is None:
            return False
        self._turn(log_bytes)
        return not self.failed

    def _submit(self) -> None:
        slab = self.slab
        slab.hold()
        self._is_open = False
        if slab.sequence > self._out.submitted:
            try:
                with held_back():  # libraries turn the exception of a signal handler into one of theirs
                    segments, pending = self._decoder.decode(slab.sequence, slab.memory)
            except Exception as error:  # of any kind: reported at the next step
                raise_if_of_signal(error)
                self._out.fail(error)
                return
            for column, complaint in self._decoder.complaints.items():
                self.complain(column, complaint)
            self._out.submit(slab.sequence, segments, pending)

    def _turn(self, log_bytes: int = 0) -> None:
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
            with held_back():
                try:
                    self._ring = self._ring_of(2 * following.needed if following.needed > size else size)
                except OSError as error:
                    self._out.fail(error)
            if self.failed:
                return
        slab, ring = self.slab, self._ring
        assert ring is not None
        slab.begin(*ring.next_slab())
        for entry in following.entries:
            slab.append(*entry)
        if following.asked is not None:
            slab.ask_packed(following.asked)
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
        """What the slab after this one begins with, which is written: the open episode, and what belongs to a row that
        is still to come."""
        slab = self.slab
        carried = []
        if slab.sequence and slab.logged >= slab.rows:
            carried = [entry for entry in slab.entries() if is_carried(entry, slab.rows)]
        entries: list[tuple[Any, ...]] = []
        if self.episode is not None and not any(entry.kind == START for entry in carried):
            flags, start = RUNNING * self.running | ENDED * slab.ended, self.episode
            entries.append((CONTINUE, b"", flags, 0, start.episode, self.steps_taken(), start.utc, start.monotonic))
        if self._reward_type is not np.float64:
            entries.append((REWARD_TYPE, np.dtype(self._reward_type).str.encode()))
        for kind, flags, column, numbers, payload in ((e.kind, e.flags, e.column, e[5:9], e.payload) for e in carried):
            if kind == CHANGES:  # of a value in the slab before
                entries.append((WHOLE, self.packers.deltas[column].last(), 0, column))
            else:
                entries.append((kind, bytes(payload), flags, column, *numbers))
        needed = log_bytes + sum(size_of(len(entry[1])) for entry in entries) + 2 * self.layout.size + _SPARE_BYTES
        return _NextSlab(
            entries,
            slab.asked() if slab.sequence else None,
            slab.ended,
            self._base + slab.rows,
            self._last(),
            {entry.column for entry in carried if entry.kind in (CHANGES, WHOLE)},
            needed + sum(leaf.row_size for leaf in self.layout.delta_leaves),
        )

    # -- what is put into them ----------------------------------------------------------------------------------------

    def log(self, kind: int, payload: bytes = b"", *numbers: int) -> None:
        """Appends an entry for the next row to the log; does nothing once nothing is recorded any more."""
        if self._is_open or self._room():
            try:
                self.slab.append(kind, payload, *numbers)
            except LogFull:
                self._turn(size_of(len(payload)))
                if not self.failed:
                    self.slab.append(kind, payload, *numbers)

    def log_value(self, column: int, packed: bytes, kind: int = VALUE) -> None:
        """Puts down the value of a column in the next row, as MessagePack."""
        if self._apart is not None:
            self._apart[column] = kind, packed
            return
        row, before = self._base + self.slab.rows, self._values[0]
        if row == before[0]:
            before[1][column] = kind, packed
        else:
            self._values = [(row, {column: (kind, packed)}), before]
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
        if self._apart is not None or not self._is_open:
            return False
        if not slab.has_room(size_of(len(changes))):
            return False
        slab.append(CHANGES, changes, 0, column, count)
        return True

    def packed_apart(self, packer: Packer, value: Any) -> Observed:
        """A value packed, of which nothing goes into the log yet."""
        self._apart = {}
        try:
            return Observed(packer(value), self._apart)
        finally:
            self._apart = None

    def put(self, packed: Observed) -> bytes:
        """Puts the entries of a value that was packed apart into the log; returns its bytes in the row."""
        for column, (kind, payload) in packed.log.items():
            self.log_value(column, payload, kind)
        return packed.row

    def ask(self, action: bytes) -> bool:
        """Puts down an action, packed, with which the environment is about to be stepped; False if that fails."""
        if self.failed or not self._room(self._answer_bytes):
            return False
        self.slab.ask_packed(action)
        return True

    def _number_of(self, reward: Any) -> float:
        """What the row has of a reward; what that cannot say goes into the log."""
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

    def log_info(self, packed: bytes) -> None:
        """Puts down the info of the next row."""
        self.log_value(self.layout.info_column, packed)

    def complain_of(self, leaf: Leaf, value: Any) -> None:
        """Says that a value is not as its space says."""
        kind = type(value)
        got = f"{value.dtype} of shape {value.shape}" if hasattr(value, "dtype") else f"a {kind.__name__}"
        complaint = f"got {got} where the space says {leaf.dtype} of shape {leaf.shape}; recorded exactly as it is"
        self.complain(leaf.column, complaint)

    # -- the last row -------------------------------------------------------------------------------------------------

    def next_row(self) -> int:
        """The index of the next row, counted over all slabs."""
        return self._base + self.slab.rows

    def last_observation(self) -> Observed:
        """That of the last row."""
        return Observed(self._last().row, self._observed(self.next_row() - 1))

    def _last(self) -> Observed:
        """The same without what went through log_value()."""
        slab = self.slab
        return observed_in(slab) if slab.rows else self._last_row

    def _observed(self, row: int) -> dict[int, tuple[int, bytes]]:
        """What the log has of the observation in a row, the last one or that which is to come."""
        columns, deltas = range(len(self.layout.observation_leaves)), self.packers.deltas
        log = {number: (WHOLE, deltas[number].last()) for number in deltas if number in columns}
        if row == self.next_row() - 1:
            log.update(self._last().log)
        for at, values in self._values:
            if at == row:
                log.update((column, entry) for column, entry in values.items() if column in columns)
        return log


def observed_in(slab: RowSlab) -> Observed:
    """The observation in the last row of a slab, as far as the slab has put it down by itself."""
    return Observed(slab.last_row(), {column: (VALUE, text) for column, text in slab.last_texts().items()})


def is_carried(entry: Entry, rows: int) -> bool:
    """Whether an entry is for a row that is still to come."""
    if entry.row < rows or entry.kind in (STOP, END, CONTINUE, REWARD_TYPE):
        return False
    return entry.kind != START or bool(entry.flags & HAS_LEAD)


not_to_be_interrupted(__file__)
not_to_be_interrupted(row_slab.__file__)
