"""Decode the slabs of a single environment into segments of fragments and columns."""

from __future__ import annotations

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
    HAS_LEAD,
    LEAD,
    REWARD_TYPE,
    RUNNING,
    START,
    STOP,
    VALUE,
    WHOLE,
    Entry,
    entry_at,
    headers,
    places,
)
from gym_trace.format.ring.memory import SLAB_HEADER
from gym_trace.format.ring.pending import Pending
from gym_trace.format.ring.row_layout import RowField, RowForm
from gym_trace.format.ring.segment import ATOMS, AnyRows, Segment, Start, packed_fragment, size_of, typed_or_values
from gym_trace.format.wire import ENDS, LEADS, STARTS, STOPS

_Value = tuple[int, int, bytes]  # an entry that is a value: kind, a, payload


class RowDecoder:
    """Decodes slabs of rows.

    Args:
        layout: the row layout of the ring file (docs/FORMAT.md, section 8). Raises CorruptTrace if malformed.

    Attributes:
        complaints: warnings about values that cannot be stored, by column.
    """

    def __init__(self, layout: dict[str, Any]):
        self.complaints: dict[str, str] = {}
        form = RowForm.of(layout)
        self._size, self._asked, self._reward, self._done = form.size, form.asked, form.reward, form.done
        self._columns, self._observations, self._lane = form.columns, form.observations, form.lane
        self._decoded = sum(column.row_size for column in form.columns)  # bytes of a row's columns

    def complete(self, sequence: int, slab: bytes | memoryview) -> tuple[int, int]:
        """Return the numbers of complete rows and of complete log entries in a slab."""
        return self._count(sequence, self._rows(slab)), len(places(slab, SLAB_HEADER, len(slab), sequence))

    def decode(
        self, sequence: int, slab: bytes | memoryview, most: tuple[int, int] | None = None
    ) -> tuple[list[Segment], list[Pending]]:
        """Return the segment of a slab, if any, and its pending action, if any.

        most: decode at most this many rows and entries; the slab may be changing.
        """
        rows = self._rows(slab)
        count = self._count(sequence, rows)
        slab = memoryview(slab)
        log = places(slab, SLAB_HEADER, len(slab), sequence)
        if most is not None:
            count, log = min(count, most[0]), log[: most[1]]
        # Limit the expansion of malicious slabs: valid content fits in the slab and in one chunk.
        if len(self._columns) * count > len(slab) or (count > 1 and self._decoded * count > wire.CHUNK_BYTES):
            raise CorruptTrace("a ring slab declares more rows than it can hold")
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
        """Return all rows that fit in the slab, in order, complete or not."""
        most = (len(slab) - SLAB_HEADER) // self._size
        raw = np.frombuffer(slab, np.uint8, most * self._size, len(slab) - most * self._size)
        return raw.reshape(most, self._size)[::-1]

    def _count(self, sequence: int, rows: Array) -> int:
        """Return the number of complete rows. It stops at the first incomplete one: the rest is mostly log."""
        count, some = 0, 1024
        while count < len(rows):
            marks = rows[count : count + some, self._done : self._done + 8].copy().view("<u8")[:, 0]
            right = marks == (np.uint64(sequence << 32 | count + 1) + np.arange(len(marks), dtype=np.uint64))
            if not right.all():
                return count + int(right.argmin())
            count, some = count + len(marks), 2 * some
        return count


@dataclass
class _Logged:
    """The values of a column that are in the log: the row, kind, a and payload of each entry."""

    rows: Array
    kinds: Array
    counts: Array
    payloads: list[bytes]

    @cached_property
    def by_row(self) -> dict[int, _Value]:
        """The last value of each row."""
        return dict(zip(self.rows.tolist(), zip(self.kinds.tolist(), self.counts.tolist(), self.payloads)))

    def are_of(self, rows: Array) -> bool:
        """Return True if the first values are those of rows, which ascend: one each, in order."""
        count = len(rows)
        return np.array_equal(self.rows[:count], rows) and bool((self.rows[count:] > rows[-1]).all())


class _DecodedSlab:
    """The fragments and columns of a slab.

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
        self._leads: Sequence[int] = []
        self._start, self.running, self._next_step = Start(0, wire.NO_SEED, 0, 0), False, 0
        self._values: dict[int, _Logged] = {}  # by column
        self._reward_types: list[tuple[int, np.dtype[Any]]] = []
        table = headers(slab, log)
        is_value = (table["kind"] >= VALUE) & (table["kind"] <= WHOLE)
        if is_value.any():
            self._take_values(slab, table[is_value], log[is_value])
            table, log = table[~is_value], log[~is_value]
        if (fragments := self._whole_episodes(slab, log, table)) is not None:
            self.fragments = fragments
            return
        marks: list[Entry] = []
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
            elif kind in (START, LEAD, FLAG, STOP, END):
                marks.append(entry)
        marks = [mark for mark in marks if mark.row < end or (mark.row == end and not _needs_row(mark))]
        self.fragments = self._fragments(marks)

    def _take_values(self, slab: memoryview, table: Array, at: Array) -> None:
        """Collect the values in the log. table: their entries. at: offsets of the entries."""
        begins = at + ENTRY.size
        ends = begins + table["length"]
        for column in sorted(set(table["column"].tolist())):  # np.unique would import numpy.ma within a step
            of = np.flatnonzero(table["column"] == column)
            rows, kinds, counts = (table[name][of] for name in ("row", "kind", "a"))
            self._values[column] = _Logged(rows, kinds, counts, kernels.slices(slab, begins[of], ends[of]))

    def _whole_episodes(self, slab: memoryview, log: Array, marks: Array) -> Array | None:
        """Vectorized _fragments() for logs of alternating starts and ends; None for other logs.

        marks: the log entries, without payloads.
        """
        end = self._end
        goes_on = len(marks) > 0 and marks["kind"][0] == CONTINUE
        before = marks[:1] if goes_on and marks["flags"][0] == RUNNING else marks[:0]
        marks = marks[int(goes_on) :]
        if len(marks) and marks["row"][-1] == end and _needs_row(entry_at(slab, int(log[-1]))):
            marks = marks[:-1]  # its row is incomplete
        first = len(before)
        starts, ends = marks[first::2], marks[1 - first :: 2]
        is_flag = ends["kind"] == FLAG
        begin = np.concatenate([np.zeros(first, np.int64), starts["row"].astype(np.int64)])
        stop = ends["row"].astype(np.int64) + is_flag
        if len(stop) < len(begin):
            stop = np.append(stop, end)
        is_regular = (
            (len(before) == goes_on and len(begin) == len(stop) and len(begin) > 0)
            and ((starts["kind"] == START) & (starts["flags"] == HAS_LEAD)).all()
            and (is_flag | ((ends["kind"] == END) & (ends["flags"] == 0))).all()
            and (begin[0] == 0 and stop[-1] == end and (begin[1:] == stop[:-1]).all() and (begin < stop).all())
        )
        if not is_regular:
            return None
        of = np.concatenate([before, starts])
        table = np.zeros(len(of), wire.FRAGMENT)
        table["flags"][first:], table["seed"][first:] = STARTS | LEADS, starts["b"]
        table["episode"], table["steps"] = of["a"], stop - begin
        table["steps"][first:] -= 1
        table["first_step"][:first] = before["b"]
        table["start_time"][first:], table["clock_offset"][first:] = starts["c"], starts["c"] - starts["d"]
        over = table[: len(ends)]
        over["flags"] |= ends["flags"] | np.uint32(STOPS | ENDS)
        over["outcome"], over["duration"] = ends["a"], ends["d"] - of["d"][: len(ends)]
        over["clock_drift"] = ends["c"] - ends["d"] - (of["c"] - of["d"])[: len(ends)]
        self.starts = [
            bytes(entry_at(slab, at).payload) for at in log[int(goes_on) + first :: 2][: len(starts)].tolist()
        ]
        self._leads, last = starts["row"].tolist(), of[-1]
        self._start = Start(int(last["a"]), wire.NO_SEED, int(last["c"]), int(last["d"]))
        self.running = len(ends) < len(of)
        self._next_step = int(table["first_step"][-1]) + int(table["steps"][-1])
        return table

    def _fragments(self, marks: list[Entry]) -> Array:
        table: list[bytes] = []
        leads: list[int] = []
        self._leads = leads
        start, first_step, cursor, flags = self._start, self._next_step, 0, 0
        ends_of_marks = [mark.row for mark in marks[1:]] + [self._end]
        if not self.running:  # only malicious slabs have rows outside episodes
            cursor = marks[0].row if marks else self._end
            if cursor and any(mark.row < self._end for mark in marks[:1]):
                raise CorruptTrace("ring rows without an episode")
        for mark, following in zip(marks, ends_of_marks):
            row, kind = mark.row, mark.kind
            if following < row or row < cursor:
                raise CorruptTrace("ring log out of order")
            if kind in (START, LEAD) and cursor < row:  # a new run without a stop of the old one
                steps = row - cursor - (flags & LEADS != 0)
                table.append(packed_fragment(start, first_step, steps, flags | STOPS, 0, 0, 0))
                cursor = row
            if kind == START:
                start = Start(mark.a, mark.b, mark.c, mark.d)
                self.starts.append(bytes(mark.payload))
                flags, first_step, self.running = STARTS, 0, bool(mark.flags & HAS_LEAD)
                if self.running:
                    flags |= LEADS
                    leads.append(row)
                else:
                    table.append(packed_fragment(start, 0, 0, flags, 0, 0, 0))
                    flags = 0
            elif kind == LEAD:
                flags, first_step, self.running = LEADS, mark.a, True
                leads.append(row)
            else:
                stop = row + 1 if kind == FLAG else row
                ends = ENDS | mark.flags if kind == FLAG else ENDS * (kind == END)
                steps = stop - cursor - (flags & LEADS != 0)
                table.append(packed_fragment(start, first_step, steps, flags | ends | STOPS, mark.a, mark.c, mark.d))
                first_step += steps
                cursor, flags, self.running = stop, 0, False
        if cursor < self._end:
            steps = self._end - cursor - (flags & LEADS != 0)
            table.append(packed_fragment(start, first_step, steps, flags, 0, 0, 0))
            first_step += steps
        self._start, self._next_step = start, first_step
        return np.frombuffer(b"".join(table), wire.FRAGMENT).copy()

    def columns(self, rows: Array, reward: int) -> dict[Path, AnyRows]:
        """Return the columns of the slab's rows. reward: offset of the reward in a row."""
        columns: dict[Path, AnyRows] = {}
        if self.starts:
            columns["starts",] = list(self.starts)
        if not len(rows):
            return columns
        leads = np.zeros(len(rows), np.bool_)
        leads[self._leads] = True
        steps = np.flatnonzero(~leads)
        everything = np.arange(len(rows))
        for number, column in enumerate(self._columns):
            of = everything if number < self._observations else steps
            if len(of):
                columns[column.path] = self._column(number, column, rows, of)
        if len(steps):
            rewards = len(self._columns)
            columns["rewards",] = self._rewards(rewards, rows, reward, steps)
            if rewards + 1 in self._values:
                columns["infos",] = self._packed_values(rewards + 1, steps, pack({}))
            self._add_annotations(columns, self._by_row(rewards + 2), steps)
        return columns

    def pending(self, row: Array) -> Pending:
        """Return the pending action, in the row after the last complete one."""
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
                known = sorted(self._by_row(number))
                value = self._deltas(number, column, np.array(known)) if known else None
                arrays = list(value.arrays(1)) if isinstance(value, DeltaRows) else []
                leaves.append(arrays[-1].view(column.dtype).reshape(column.shape) if arrays else None)
        return Pending(self._start.episode, 0, self._next_step, leaves)

    def _column(self, number: int, column: RowField, rows: Array, of: Array) -> AnyRows:
        if column.dtype is None:
            return self._packed_values(number, of, _NIL)
        if column.offset is None:
            return self._deltas(number, column, of)
        odd = self._by_row(number)
        width = column.row_size
        raw = rows[:, column.offset : column.offset + width]
        raw = np.ascontiguousarray(raw if len(of) == len(rows) else raw[of])
        array: Array = raw.reshape(-1).view(column.dtype).reshape(len(of), *column.shape)
        if not odd:
            return array
        values = [_value(odd[row]) if row in odd else value for row, value in zip(of.tolist(), array)]
        return typed_or_values(column.path, values, self._complaints)

    def _deltas(self, number: int, column: RowField, of: Array) -> AnyRows:
        dtype, size, word = column.dtype, column.row_size, word_of(column.row_size).itemsize
        assert dtype is not None
        entries_of, odd = self._by_row(number), False
        slots: list[Slot] = []
        for row in of.tolist():
            entry = entries_of.get(row)
            if entry is None or (not slots and entry[0] == CHANGES):
                raise CorruptTrace("ring value missing")
            kind, count, payload = entry
            if kind == VALUE:
                odd = True
            elif len(payload) != (size if kind == WHOLE else count * (4 + word)) or count < 0:
                raise CorruptTrace("ring value of the wrong size")
            else:
                slots.append(payload if kind == WHOLE else (payload[: 4 * count], payload[4 * count :]))
        changes = [slot for slot in slots if isinstance(slot, tuple)]
        if int(joined_changes(changes, word_of(size))[0].max(initial=0)) * word >= size:
            raise CorruptTrace("ring value changes out of range")
        fitting = DeltaRows(dtype, column.shape, slots, None)
        if not odd:
            return fitting
        arrays = (array.view(dtype).reshape(column.shape) for array in fitting.arrays(1))
        found = [entries_of[row] for row in of.tolist()]
        values = [_value(entry) if entry[0] == VALUE else next(arrays) for entry in found]
        return typed_or_values(column.path, values, self._complaints)

    def _rewards(self, number: int, rows: Array, offset: int, steps: Array) -> AnyRows:
        odd = self._by_row(number)
        types = [(row, dtype) for row, dtype in self._reward_types if row <= steps[-1]]
        raw = rows[steps, offset : offset + 8]
        if not odd and len(types) == 1 and types[0][0] <= steps[0]:
            dtype = types[0][1]
            return np.ascontiguousarray(raw[:, : dtype.itemsize]).view(dtype)[:, 0]
        numbers: Array = np.ascontiguousarray(raw).view("<f8")[:, 0]
        if not odd and not types:
            return numbers
        values: list[Any] = []
        for i, row in enumerate(steps.tolist()):
            of_row = [dtype for at, dtype in types if at <= row][-1:]
            if row in odd:
                values.append(_value(odd[row]))
            elif of_row and of_row[0] != np.float64:
                values.append(np.frombuffer(raw[i].tobytes(), of_row[0], 1)[0])
            else:
                values.append(float(numbers[i]))
        return typed_or_values(("rewards",), values, self._complaints)

    def _packed_values(self, number: int, of: Array, missing: bytes) -> list[bytes]:
        logged = self._values.get(number)
        if logged is not None and logged.are_of(of):
            return logged.payloads[: len(of)]
        values, none = self._by_row(number), (VALUE, 0, missing)
        return [values.get(row, none)[2] for row in of.tolist()]

    def _by_row(self, number: int) -> dict[int, _Value]:
        logged = self._values.get(number)
        return {} if logged is None else logged.by_row

    def _add_annotations(self, columns: dict[Path, AnyRows], notes: dict[int, _Value], steps: Array) -> None:
        unpacked = {row: as_map(unpack(entry[2])) for row, entry in notes.items() if row < self._end}
        names = dict.fromkeys(name for values in unpacked.values() for name in values)
        for name in names:
            rows = [unpacked[row].get(name, ABSENT) if row in unpacked else ABSENT for row in steps.tolist()]
            path = annotation_path(name)
            columns[path] = typed_or_values(path, [_plain(value) for value in rows], self._complaints)


def _value(entry: _Value) -> Any:
    return _plain(unpack(entry[2]), Packed(entry[2]))


def _plain(value: Any, packed: Packed | None = None) -> Any:
    """Return numbers and numeric arrays unchanged, any other value as MessagePack."""
    kind = type(value)
    if kind in ATOMS or (kind is np.ndarray and value.dtype.kind in "biufc"):
        return value
    return Packed(pack(value)) if packed is None else packed


def _needs_row(mark: Entry) -> bool:
    """Return True if a mark counts only once the next row is complete."""
    return mark.kind in (LEAD, FLAG) or (mark.kind == START and bool(mark.flags & HAS_LEAD))


_NIL = pack(None)
