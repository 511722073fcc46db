"""Decode the slabs of a single environment into segments of fragments and columns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gym_trace.data.deltas import DeltaRows, Slot, joined_changes, word_of
from gym_trace.data.layout import Path
from gym_trace.data.packing import pack, unpack
from gym_trace.data.schema import as_map
from gym_trace.data.values import ABSENT, Array, Packed, dtype_from
from gym_trace.data.vocabulary import annotation_path
from gym_trace.errors import CorruptTrace
from gym_trace.format import kernels, wire
from gym_trace.format.ring.log import (
    CHANGES,
    CONTINUE,
    END,
    ENTRY,
    FLAG,
    INITIAL,
    REWARD_TYPE,
    RUNNING,
    START,
    START_HAS_INITIAL,
    STOP,
    VALUE,
    WHOLE,
    LogEntry,
    entry_at,
    entry_offsets,
    headers,
)
from gym_trace.format.ring.memory import SLAB_HEADER
from gym_trace.format.ring.pending import Pending
from gym_trace.format.ring.row_layout import RowField, RowOffsets
from gym_trace.format.ring.segment import ATOMS, AnyRows, Segment, Start, packed_fragment, size_of, typed_or_values
from gym_trace.format.wire import ENDS, HAS_INITIAL, STARTS, STOPS

_Value = tuple[int, int, bytes]  # `kind`, `a` and payload of a log entry that holds a value
_NIL = pack(None)
_WORDS = {2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}  # by size: NumPy copies a number faster than its bytes


class RowDecoder:
    """Decodes slabs of rows.

    Args:
        layout: the row layout of the ring file (docs/FORMAT.md, section 8). Raises CorruptTrace if malformed.

    Attributes:
        complaints: warnings about values that cannot be stored, one per column.
    """

    def __init__(self, layout: dict[str, Any]):
        self.complaints: dict[str, str] = {}
        offsets = RowOffsets.of(layout)
        self._size, self._asked, self._reward, self._done = offsets.size, offsets.asked, offsets.reward, offsets.done
        self._columns, self._observations, self._lane = offsets.columns, offsets.observations, offsets.lane
        self._decoded_size = sum(column.row_size for column in offsets.columns)  # bytes of a row's columns

    def complete(self, sequence: int, slab: bytes | memoryview) -> tuple[int, int]:
        """Return the numbers of complete rows and of complete log entries in a slab."""
        return self._count(sequence, self._rows(slab)), len(entry_offsets(slab, SLAB_HEADER, len(slab), sequence))

    def decode(
        self, sequence: int, slab: bytes | memoryview, most: tuple[int, int] | None = None
    ) -> tuple[list[Segment], list[Pending]]:
        """Return the segment of a slab, if any, and its pending action, if any.

        most: maximum numbers of rows and entries, if the slab may be changing; pending actions are then omitted.
        """
        rows = self._rows(slab)
        count = self._count(sequence, rows)
        slab = memoryview(slab)
        log = entry_offsets(slab, SLAB_HEADER, len(slab), sequence)
        if most is not None:
            count, log = min(count, most[0]), log[: most[1]]
        # Small malicious slabs must not expand into large columns: valid ones fit in the slab and in one chunk.
        if len(self._columns) * count > len(slab) or (count > 1 and self._decoded_size * count > wire.CHUNK_BYTES):
            raise CorruptTrace("ring slab declares more rows than it can hold")
        content = _DecodedSlab(self._columns, self._observations, slab, log, count, self.complaints)
        pending: list[Pending] = []
        if most is None and content.running and count < len(rows):
            mark = int(rows[count, self._asked : self._asked + 8].view("<u8")[0])
            if mark == sequence << 32 | (count + 1):
                pending.append(content.pending(rows[count])._replace(lane=self._lane))
        if not len(content.fragments):
            return [], pending
        columns = content.columns(rows[:count], self._reward)
        table = content.fragments
        if self._lane:
            table["lane"] = self._lane
        return [Segment(table, columns, table.nbytes + sum(map(size_of, columns.values())))], pending

    def _rows(self, slab: bytes | memoryview) -> Array:
        """Return all rows that fit in the slab, complete or not. Row 0 is at the end of the slab, row 1 before it."""
        most = (len(slab) - SLAB_HEADER) // self._size
        raw = np.frombuffer(slab, np.uint8, most * self._size, len(slab) - most * self._size)
        return raw.reshape(most, self._size)[::-1]

    def _count(self, sequence: int, rows: Array) -> int:
        """Return the number of complete rows. Blocks of marks grow, as the rest of the slab may be log."""
        count, block = 0, 1024
        while count < len(rows):
            marks = rows[count : count + block, self._done : self._done + 8].view("<u8")[:, 0]
            complete = marks == (np.uint64(sequence << 32 | count + 1) + np.arange(len(marks), dtype=np.uint64))
            if not complete.all():
                return count + int(complete.argmin())
            count, block = count + len(marks), 2 * block
        return count


@dataclass
class _LoggedValues:
    """The values of a column that are in the log: row, kind, count of changes (`a`) and payload of each entry."""

    rows: Array
    kinds: Array
    counts: Array
    payloads: list[bytes]

    @cached_property
    def by_row(self) -> dict[int, _Value]:
        """The last value of each row."""
        return dict(zip(self.rows.tolist(), zip(self.kinds.tolist(), self.counts.tolist(), self.payloads)))

    def has_one_for_each(self, rows: Array) -> bool:
        """Return True if each of these rows, which ascend, has one value, and all other values are of later rows."""
        count = len(rows)
        return np.array_equal(self.rows[:count], rows) and bool((self.rows[count:] > rows[-1]).all())


class _DecodedSlab:
    """The fragments and columns of a slab.

    Args:
        observations: number of columns of the observation.
        log: offsets of the log entries.
        end: number of complete rows.

    Attributes:
        fragments: the fragment table.
        running: True if a run of steps is open at the end.
    """

    def __init__(
        self,
        columns: list[RowField],
        observations: int,
        slab: memoryview,
        log: Array,
        end: int,
        complaints: dict[str, str],
    ):
        self._columns, self._observations, self._end, self._complaints = columns, observations, end, complaints
        self.starts: list[bytes] = []
        self._initial_rows: Sequence[int] = []
        self._start, self.running, self._next_step = Start(0, wire.NO_SEED, 0, 0), False, 0
        self._values: dict[int, _LoggedValues] = {}  # by column
        self._reward_types: list[tuple[int, np.dtype[Any]]] = []
        table = headers(slab, log)
        is_value = (table["kind"] >= VALUE) & (table["kind"] <= WHOLE)
        if is_value.any():
            self._collect_values(slab, table[is_value], log[is_value])
            table, log = table[~is_value], log[~is_value]
        if (fragments := self._whole_episodes(slab, log, table)) is not None:
            self.fragments = fragments
            return
        events: list[LogEntry] = []
        for entry in (entry_at(slab, at) for at in log.tolist()):
            kind = entry.kind
            if kind == REWARD_TYPE:
                dtype = dtype_from(bytes(entry.payload).decode("ascii", "replace"))
                if dtype.itemsize > 8:
                    raise CorruptTrace("ring reward type larger than 8 bytes")
                self._reward_types.append((entry.row, dtype))
            elif kind == CONTINUE:
                self._start = Start(entry.a, wire.NO_SEED, entry.c, entry.d)
                self._next_step, self.running = entry.b, bool(entry.flags & RUNNING)
            elif kind in (START, INITIAL, FLAG, STOP, END):
                events.append(entry)
        events = [event for event in events if event.row < end or (event.row == end and not _needs_row(event))]
        self.fragments = self._fragments(events)

    def _collect_values(self, slab: memoryview, table: Array, at: Array) -> None:
        """Collect the values in the log. table, at: the entries that hold values, and their offsets."""
        begins = at + ENTRY.size
        ends = begins + table["length"]
        for column in sorted(set(table["column"].tolist())):  # np.unique would import numpy.ma within a step
            own = np.flatnonzero(table["column"] == column)
            rows, kinds, counts = (table[name][own] for name in ("row", "kind", "a"))
            self._values[column] = _LoggedValues(rows, kinds, counts, kernels.slices(slab, begins[own], ends[own]))

    def _whole_episodes(self, slab: memoryview, log: Array, events: Array) -> Array | None:
        """Return the fragments, like _fragments(), if starts and ends of episodes alternate in the log; otherwise None.

        events: the log entries, without payloads.
        """
        end = self._end
        continues = len(events) > 0 and events["kind"][0] == CONTINUE
        open_before = events[:1] if continues and events["flags"][0] == RUNNING else events[:0]
        events = events[int(continues) :]
        if len(events) and events["row"][-1] == end and _needs_row(entry_at(slab, int(log[-1]))):
            events = events[:-1]  # its row is incomplete
        first = len(open_before)  # 1 if the slab begins within an episode, otherwise 0
        starts, ends = events[first::2], events[1 - first :: 2]
        is_flag = ends["kind"] == FLAG
        begin_rows = np.concatenate([np.zeros(first, np.int64), starts["row"].astype(np.int64)])
        stop_rows = ends["row"].astype(np.int64) + is_flag
        if len(stop_rows) < len(begin_rows):
            stop_rows = np.append(stop_rows, end)
        is_regular = (
            (len(open_before) == continues and len(begin_rows) == len(stop_rows) and len(begin_rows) > 0)
            and ((starts["kind"] == START) & (starts["flags"] == START_HAS_INITIAL)).all()
            and (is_flag | ((ends["kind"] == END) & (ends["flags"] == 0))).all()
            and (begin_rows[0] == 0 and stop_rows[-1] == end)
            and ((begin_rows[1:] == stop_rows[:-1]).all() and (begin_rows < stop_rows).all())
        )
        if not is_regular:
            return None
        openings = np.concatenate([open_before, starts])
        table = np.zeros(len(openings), wire.FRAGMENT)
        table["flags"][first:], table["seed"][first:] = STARTS | HAS_INITIAL, starts["b"]
        table["episode"], table["steps"] = openings["a"], stop_rows - begin_rows
        table["steps"][first:] -= 1
        table["first_step"][:first] = open_before["b"]
        table["start_time"][first:], table["clock_offset"][first:] = starts["c"], starts["c"] - starts["d"]
        ended = table[: len(ends)]
        ended["flags"] |= ends["flags"] | np.uint32(STOPS | ENDS)
        ended["outcome"], ended["duration"] = ends["a"], ends["d"] - openings["d"][: len(ends)]
        ended["clock_drift"] = ends["c"] - ends["d"] - (openings["c"] - openings["d"])[: len(ends)]
        payloads = log[int(continues) + first :: 2][: len(starts)] + ENTRY.size
        self.starts = kernels.slices(slab, payloads, payloads + starts["length"])
        self._initial_rows, last = starts["row"].tolist(), openings[-1]
        self._start = Start(int(last["a"]), wire.NO_SEED, int(last["c"]), int(last["d"]))
        self.running = len(ends) < len(openings)
        self._next_step = int(table["first_step"][-1]) + int(table["steps"][-1])
        return table

    def _fragments(self, events: list[LogEntry]) -> Array:
        """Return the fragments of the rows. events: the log entries that begin or end runs of steps, in order."""
        table: list[bytes] = []
        initial_rows: list[int] = []
        self._initial_rows = initial_rows
        start, first_step, cursor, flags = self._start, self._next_step, 0, 0
        next_rows = [event.row for event in events[1:]] + [self._end]
        if not self.running:  # only malicious slabs have rows outside episodes
            cursor = events[0].row if events else self._end
            if cursor and any(event.row < self._end for event in events[:1]):
                raise CorruptTrace("ring rows without an episode")
        for event, next_row in zip(events, next_rows):
            row, kind = event.row, event.kind
            if next_row < row or row < cursor:
                raise CorruptTrace("ring log out of order")
            if kind in (START, INITIAL) and cursor < row:  # a new run without a stop of the old one
                steps = row - cursor - (flags & HAS_INITIAL != 0)
                table.append(packed_fragment(start, first_step, steps, flags | STOPS, 0, 0, 0))
                cursor = row
            if kind == START:
                start = Start(event.a, event.b, event.c, event.d)
                self.starts.append(bytes(event.payload))
                flags, first_step, self.running = STARTS, 0, bool(event.flags & START_HAS_INITIAL)
                if self.running:
                    flags |= HAS_INITIAL
                    initial_rows.append(row)
                else:
                    table.append(packed_fragment(start, 0, 0, flags, 0, 0, 0))
                    flags = 0
            elif kind == INITIAL:
                flags, first_step, self.running = HAS_INITIAL, event.a, True
                initial_rows.append(row)
            else:
                stop = row + 1 if kind == FLAG else row
                ends = ENDS | event.flags if kind == FLAG else ENDS * (kind == END)
                steps = stop - cursor - (flags & HAS_INITIAL != 0)
                table.append(packed_fragment(start, first_step, steps, flags | ends | STOPS, event.a, event.c, event.d))
                first_step += steps
                cursor, flags, self.running = stop, 0, False
        if cursor < self._end:
            steps = self._end - cursor - (flags & HAS_INITIAL != 0)
            table.append(packed_fragment(start, first_step, steps, flags, 0, 0, 0))
            first_step += steps
        self._start, self._next_step = start, first_step
        return np.frombuffer(b"".join(table), wire.FRAGMENT).copy()

    def columns(self, rows: Array, reward_offset: int) -> dict[Path, AnyRows]:
        """Return the columns of the slab's rows. reward_offset: of the reward in a row."""
        columns: dict[Path, AnyRows] = {}
        if self.starts:
            columns["starts",] = list(self.starts)
        if not len(rows):
            return columns
        is_step = np.ones(len(rows), np.bool_)
        is_step[self._initial_rows] = False
        steps = np.flatnonzero(is_step)
        everything = np.arange(len(rows))
        for number, column in enumerate(self._columns):
            indices = everything if number < self._observations else steps
            if len(indices):
                columns[column.path] = self._column(number, column, rows, indices)
        if len(steps):
            reward_column = len(self._columns)
            columns["rewards",] = self._rewards(reward_column, rows, reward_offset, steps)
            if reward_column + 1 in self._values:
                columns["infos",] = self._packed_values(reward_column + 1, steps, pack({}))
            self._add_annotations(columns, self._values.get(reward_column + 2), steps)
        return columns

    def pending(self, row: Array) -> Pending:
        """Return the pending action. row: the row after the last complete one, which holds it."""
        leaves: list[Any] = []
        for number, column in enumerate(self._columns[self._observations :], self._observations):
            entry = self._by_row(number).get(self._end)
            if entry is not None and entry[0] == VALUE:
                leaves.append(unpack(entry[2]))
            elif column.dtype is None:
                leaves.append(None)
            elif column.offset is not None:
                raw = row[column.offset : column.offset + column.row_size]
                leaves.append(np.frombuffer(raw.tobytes(), column.dtype).reshape(column.shape)[()])
            else:
                logged_rows = sorted(self._by_row(number))
                value = self._deltas(number, column, np.array(logged_rows)) if logged_rows else None
                arrays = list(value.arrays(1)) if isinstance(value, DeltaRows) else []
                leaves.append(arrays[-1].view(column.dtype).reshape(column.shape) if arrays else None)
        return Pending(self._start.episode, 0, self._next_step, leaves)

    def _column(self, number: int, column: RowField, rows: Array, indices: Array) -> AnyRows:
        """Return a column of these rows. number: of the column."""
        if column.dtype is None:
            return self._packed_values(number, indices, _NIL)
        if column.offset is None:
            return self._deltas(number, column, indices)
        logged = self._by_row(number)
        raw = _bytes_at(rows, column.offset, column.row_size, indices)
        array: Array = raw.view(column.dtype).reshape(len(indices), *column.shape)
        if not logged:
            return array
        values = [_value(logged[row]) if row in logged else value for row, value in zip(indices.tolist(), array)]
        return typed_or_values(column.path, values, self._complaints)

    def _deltas(self, number: int, column: RowField, indices: Array) -> AnyRows:
        """Return a column of large values."""
        dtype, size, word = column.dtype, column.row_size, word_of(column.row_size).itemsize
        assert dtype is not None
        by_row, has_values = self._by_row(number), False
        slots: list[Slot] = []
        for row in indices.tolist():
            entry = by_row.get(row)
            if entry is None or (not slots and entry[0] == CHANGES):
                raise CorruptTrace("ring value missing")
            kind, count, payload = entry
            if kind == VALUE:
                has_values = True
            elif len(payload) != (size if kind == WHOLE else count * (4 + word)) or count < 0:
                raise CorruptTrace("ring value of the wrong size")
            else:
                slots.append(payload if kind == WHOLE else (payload[: 4 * count], payload[4 * count :]))
        changes = [slot for slot in slots if isinstance(slot, tuple)]
        if int(joined_changes(changes, word_of(size))[0].max(initial=0)) * word >= size:
            raise CorruptTrace("ring value changes out of range")
        delta_rows = DeltaRows(dtype, column.shape, slots, None)
        if not has_values:
            return delta_rows
        arrays = (array.view(dtype).reshape(column.shape) for array in delta_rows.arrays(1))
        entries = (by_row[row] for row in indices.tolist())
        values = [_value(entry) if entry[0] == VALUE else next(arrays) for entry in entries]
        return typed_or_values(column.path, values, self._complaints)

    def _rewards(self, number: int, rows: Array, offset: int, steps: Array) -> AnyRows:
        """Return the rewards of steps. offset: of the reward in a row."""
        logged = self._by_row(number)
        types = [(row, dtype) for row, dtype in self._reward_types if row <= steps[-1]]
        raw = _bytes_at(rows, offset, 8, steps).reshape(-1, 8)
        if not logged and len(types) == 1 and types[0][0] <= steps[0]:
            dtype = types[0][1]
            return np.ascontiguousarray(raw[:, : dtype.itemsize]).view(dtype)[:, 0]
        numbers: Array = np.ascontiguousarray(raw).view("<f8")[:, 0]
        if not logged and not types:
            return numbers
        values: list[Any] = []
        for i, row in enumerate(steps.tolist()):
            last_type = [dtype for begin, dtype in types if begin <= row][-1:]
            if row in logged:
                values.append(_value(logged[row]))
            elif last_type and last_type[0] != np.float64:
                values.append(np.frombuffer(raw[i].tobytes(), last_type[0], 1)[0])
            else:
                values.append(float(numbers[i]))
        return typed_or_values(("rewards",), values, self._complaints)

    def _packed_values(self, number: int, indices: Array, missing: bytes) -> list[bytes]:
        logged = self._values.get(number)
        if logged is not None and logged.has_one_for_each(indices):
            return logged.payloads[: len(indices)]
        values, default = self._by_row(number), (VALUE, 0, missing)
        return [values.get(row, default)[2] for row in indices.tolist()]

    def _by_row(self, number: int) -> dict[int, _Value]:
        logged = self._values.get(number)
        return {} if logged is None else logged.by_row

    def _add_annotations(self, columns: dict[Path, AnyRows], logged: _LoggedValues | None, steps: Array) -> None:
        unpacked: dict[int, dict[Any, Any]] = defaultdict(dict)  # by row; some are known only after the step
        for row, payload in () if logged is None else zip(logged.rows.tolist(), logged.payloads):
            if row < self._end:
                unpacked[row].update(as_map(unpack(payload)))
        names = dict.fromkeys(name for values in unpacked.values() for name in values)
        for name in names:
            rows = [unpacked[row].get(name, ABSENT) if row in unpacked else ABSENT for row in steps.tolist()]
            path = annotation_path(name)
            columns[path] = typed_or_values(path, [_plain(value) for value in rows], self._complaints)


def _bytes_at(rows: Array, offset: int, width: int, indices: Array) -> Array:
    """Return `width` bytes at an offset of each of these rows, one after the other."""
    fields = rows[:, offset : offset + width]
    if (word := _WORDS.get(width)) is not None:
        fields = fields.view(word)
    return np.ascontiguousarray(fields if len(indices) == len(rows) else fields[indices]).reshape(-1).view(np.uint8)


def _value(entry: _Value) -> Any:
    return _plain(unpack(entry[2]), Packed(entry[2]))


def _plain(value: Any, packed: Packed | None = None) -> Any:
    """Return numbers and numeric arrays unchanged, any other value as MessagePack."""
    kind = type(value)
    if kind in ATOMS or (kind is np.ndarray and value.dtype.kind in "biufc"):
        return value
    return Packed(pack(value)) if packed is None else packed


def _needs_row(event: LogEntry) -> bool:
    """Return True if an event counts only when its row is complete."""
    return event.kind in (INITIAL, FLAG) or (event.kind == START and bool(event.flags & START_HAS_INITIAL))
