"""What was added to a block, as segments of fragments and columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from gym_trace.blocks import BEGIN, CUT, END, FLAG, LEAD, STOP, Block, RowFormat, Start, settled
from gym_trace.format import wire
from gym_trace.frames import FrameRows, Odd
from gym_trace.layout import Leaf, Path
from gym_trace.starts import packed_start, stored_seed
from gym_trace.values import ABSENT, Array, pack, unpack

_PLAIN_NUMBERS = {bool, int, float, np.float64}
_EXACT_INTEGERS = 2.0**53

Rows = Array | FrameRows | list[bytes]  # of a column: typed, or one MessagePack value a row
Columns = dict[Path, Array | list[bytes]]


class Segment(NamedTuple):
    """A piece of a chunk: a fragment table and the columns of its rows."""

    fragments: Array
    columns: Mapping[Path, Rows]
    size: int  # in bytes, about


class Encoder:
    """Turns the rows of blocks into fragment tables and columns. Remembers the run that is open from call to call."""

    def __init__(self, row_format: RowFormat):
        self._format = row_format
        self._lane = 0
        self._episode = 0
        self._next_step = 0
        self._start: Start | None = None
        self._frames_before: dict[Path, Array] = {}  # of each column of frames, the last one
        self.complaints: dict[str, str] = {}  # by column, what did not fit

    def take(self, block: Block) -> list[Segment]:
        """What was added to block since the last call, as one segment, or none if nothing was."""
        run = self._lane, self._episode, self._next_step, self._start, self._frames_before
        taken = block.taken_marks, block.taken_notes
        try:
            return self._take(block)
        except BaseException:  # Ctrl-C may fall here: whoever asks again must be given the same
            self._lane, self._episode, self._next_step, self._start, self._frames_before = run
            block.taken_marks, block.taken_notes = taken
            raise

    def _take(self, block: Block) -> list[Segment]:
        width = self._format.width
        begin, end = block.taken, len(block.rows) // width
        marks = self._marks(block, end)
        if begin == end and not marks:
            return []
        fragments, starts, leads = self._fragments(marks, begin, end)
        columns: dict[Path, Rows] = {}
        if starts:
            packed = [packed_start(start) for start in starts]
            columns["starts",] = [start for start, _ in packed]
            for _, replaced in packed:
                if replaced:
                    self.complaints["reset"] = f"a value of type {replaced[0]} given to reset cannot be stored"
        self._add_columns(columns, block, begin, end, leads)
        if ("rewards",) in columns:
            rewards = columns["rewards",]
            assert not isinstance(rewards, FrameRows)
            reward_sums(fragments, rewards)
        size = fragments.nbytes + sum(map(size_of, columns.values()))
        segment = Segment(fragments, columns, size)
        block.taken = end
        return [segment]

    def _marks(self, block: Block, end: int) -> list[tuple[int, int, Any]]:
        """The marks that can be dealt with when end rows are there."""
        marks = block.marks[block.taken_marks :]
        marks = marks[: settled(marks, end)]
        block.taken_marks += len(marks)
        return marks

    def _fragments(
        self, marks: list[tuple[int, int, Any]], begin: int, end: int
    ) -> tuple[Array, list[Start], list[int]]:
        table: list[tuple[Any, ...]] = []
        starts: list[Start] = []
        leads: list[int] = []
        cursor, flags, first_step = begin, 0, self._next_step

        def close(position: int, added: int, outcome: int = 0, utc: int = 0, monotonic: int = 0) -> None:
            nonlocal cursor, flags, first_step
            flags |= added
            steps = position - cursor - bool(flags & wire.LEADS)
            start = self._start
            begun = (0, 0, 0)
            if flags & wire.STARTS and start is not None:
                begun = (stored_seed(start.seed), start.utc, start.utc - start.monotonic)
            duration = drift = 0
            if flags & wire.ENDS and start is not None:
                duration = monotonic - start.monotonic
                drift = utc - start.utc - duration
            table.append((self._episode, first_step, steps, self._lane, flags, outcome, 0.0, *begun, duration, drift))
            cursor, flags, first_step = position, 0, first_step + steps

        for i, (position, kind, data) in enumerate(marks):
            # A Ctrl-C can come between a mark and its row: then the next mark is for the same row.
            has_row = i + 1 == len(marks) or marks[i + 1][0] > position
            if kind == FLAG:
                said, outcome, utc, monotonic = data
                if has_row:
                    close(position + 1, said | wire.STOPS | wire.ENDS, outcome, utc, monotonic)
                elif marks[i + 1][1] == BEGIN:
                    close(position, wire.STOPS | wire.ENDS, CUT, utc, monotonic)
                else:
                    close(position, wire.STOPS)
            elif kind == BEGIN:
                self._start, has_lead = data
                self._episode, self._lane = self._start.episode, self._start.lane
                starts.append(self._start)
                cursor, flags, first_step = position, wire.STARTS, 0
                if has_lead and has_row:
                    flags |= wire.LEADS
                    leads.append(position - begin)
                else:
                    close(position, 0)
            elif kind == LEAD and has_row:
                cursor, flags, first_step = position, wire.LEADS, data
                leads.append(position - begin)
            elif kind == STOP:
                close(position, wire.STOPS)
            elif kind == END:
                close(position, wire.STOPS | wire.ENDS, *data)
        if cursor < end:
            close(end, 0)
        self._next_step = first_step
        return np.array(table, wire.FRAGMENT), starts, leads

    def _add_columns(self, columns: dict[Path, Rows], block: Block, begin: int, end: int, leads: list[int]) -> None:
        width, form = self._format.width, self._format
        rows = block.rows[begin * width : end * width]
        step_rows = bytearray(b"\1") * (end - begin)
        for position in leads:
            step_rows[position] = 0
        if rows:
            for slot, leaf in enumerate(form.observation_leaves):
                columns[leaf.path] = self._column(leaf, rows[slot::width])
        if len(leads) < end - begin:
            after = len(form.observation_leaves)
            for slot, leaf in enumerate(form.action_leaves, after):
                columns[leaf.path] = self._column(leaf, _kept(rows[slot::width], step_rows, leads))
            slot = after + len(form.action_leaves)
            columns["rewards",] = self._rewards(_kept(rows[slot::width], step_rows, leads))
            if form.infos:
                columns["infos",] = _kept(rows[slot + 1 :: width], step_rows, leads)
        self._add_annotations(columns, block, begin, end, step_rows, leads)

    def _column(self, leaf: Leaf, slots: list[Any]) -> Rows:
        """The rows of one leaf: typed as the space says, or as the values are."""
        dtype, shape = leaf.dtype, leaf.shape
        if dtype is None:
            return slots
        if leaf in self._format.frame_leaves:
            return self._frames(leaf, slots)
        if shape == ():
            scalars = _typed_scalars(slots, dtype)
            return self._misfits(leaf, slots) if scalars is None else scalars
        try:
            return np.frombuffer(b"".join(slots), dtype).reshape(len(slots), *shape)
        except TypeError:  # an Odd among the bytes
            arrays = [np.frombuffer(s, dtype).reshape(shape) if type(s) is bytes else s for s in slots]
            return self._misfits(leaf, arrays)

    def _frames(self, leaf: Leaf, slots: list[Any]) -> Rows:
        dtype = leaf.dtype
        assert dtype is not None
        fitting = [slot for slot in slots if type(slot) is not Odd]
        rows = FrameRows(dtype, leaf.shape, fitting, self._frames_before.get(leaf.path))
        after = rows.after()
        if after is not None:
            self._frames_before = {**self._frames_before, leaf.path: after}
        if len(fitting) == len(slots):
            return rows
        arrays = (array.view(dtype).reshape(leaf.shape) for array in rows.arrays(1))
        return self._misfits(leaf, [slot if type(slot) is Odd else next(arrays) for slot in slots])

    def _misfits(self, leaf: Leaf, slots: list[Any]) -> Rows:
        values = [slot.value if type(slot) is Odd else slot for slot in slots]
        odd = next(value for value, slot in zip(values, slots) if type(slot) is not np.ndarray or value is not slot)
        self.complaints.setdefault(
            "/".join(map(str, leaf.path)),
            f"got {_kind_of(odd)} where the space says {leaf.dtype} of shape {leaf.shape}; recorded exactly as it is",
        )
        if leaf.shape == () and leaf.dtype is not None:  # plain integers among others: what fits the space has its type
            dtype = leaf.dtype
            values = [dtype.type(v) if type(v) is int and _fits(v, dtype) else v for v in values]
        return _typed_or_values(values)

    def _rewards(self, rewards: list[Any]) -> Array | list[bytes]:
        kinds = set(map(type, rewards))
        if kinds <= _PLAIN_NUMBERS:
            try:
                array = np.array(rewards, np.float64)
            except OverflowError:
                return [pack(reward) for reward in rewards]
            with np.errstate(invalid="ignore"):  # of signalling NaN
                inexact = (np.abs(array) > _EXACT_INTEGERS).any()
            if kinds <= {float, np.float64} or not inexact:
                return array
        values = [reward.value if type(reward) is Odd else reward for reward in rewards]
        return _typed_or_values(values)

    def _add_annotations(
        self,
        columns: dict[Path, Rows],
        block: Block,
        begin: int,
        end: int,
        step_rows: bytearray,
        leads: list[int],
    ) -> None:
        notes = [note for note in block.notes[block.taken_notes :] if note[0] < end]
        block.taken_notes += len(notes)
        for name in dict.fromkeys(name for _, values in notes for name in values):
            rows: list[Any] = [ABSENT] * (end - begin)
            for position, values in notes:
                if name in values:
                    rows[position - begin] = values[name]
            kept = _kept(rows, step_rows, leads)
            if kept:
                columns["annotations", name] = _typed_or_values(kept)


def _typed_scalars(slots: list[Any], dtype: np.dtype[Any]) -> Array | None:
    """Scalars of dtype, and plain integers that fit it, as an array; None if there are others."""
    kinds = set(map(type, slots))
    if kinds == {dtype.type}:
        return np.array(slots, dtype)
    if not (kinds <= {int, dtype.type} and dtype.kind in "iu"):
        return None
    try:
        wide = np.array(slots, np.uint64 if dtype == np.uint64 else np.int64)
    except OverflowError:
        return None
    if wide.dtype == dtype:
        return wide
    limits = np.iinfo(dtype)
    return wide.astype(dtype) if limits.min <= wide.min() and wide.max() <= limits.max else None


def _kept(slots: list[Any], step_rows: bytearray, leads: list[int]) -> list[Any]:
    return list(compress(slots, step_rows)) if leads else slots


def _kind_of(value: Any) -> str:
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{value.dtype} of shape {value.shape}"
    return f"a {type(value).__name__}"


def _fits(value: int, dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "iu" and bool(np.iinfo(dtype).min <= value <= np.iinfo(dtype).max)


def _typed_or_values(values: list[Any]) -> Array | list[bytes]:
    """A typed array where all values have one NumPy dtype and shape, otherwise one MessagePack value a row."""
    kinds = set(map(type, values))
    if len(kinds) == 1:
        kind = kinds.pop()
        if kind is np.ndarray or issubclass(kind, np.generic):
            dtype, shape = values[0].dtype, values[0].shape
            plain = dtype.kind in "biufc" and dtype.str[0] in "<|"
            if plain and all(value.dtype == dtype and value.shape == shape for value in values):
                return np.array(values, dtype)
        elif kind is float:
            return np.array(values, np.float64)
    return [pack(value) for value in values]


def _as_numbers(rewards: Array | list[bytes]) -> Array:
    """Rewards that can be summed up; NaN for each that is no single number."""
    if not isinstance(rewards, np.ndarray):
        return np.array([_as_number(unpack(packed)) for packed in rewards], np.float64)
    if rewards.ndim == 1 and rewards.dtype.kind in "biuf":
        return rewards
    return np.full(len(rewards), np.nan)


def _as_number(reward: Any) -> float:
    if isinstance(reward, (bool, int, float)):
        try:
            return float(reward)
        except OverflowError:
            return math.inf if reward > 0 else -math.inf
    if isinstance(reward, (np.ndarray, np.generic)) and reward.ndim == 0 and reward.dtype.kind in "biuf":
        return float(reward)
    return math.nan


def reward_sums(fragments: Array, rewards: Array | list[bytes]) -> None:
    """Sets the reward sum of each fragment; the rewards are those of their steps, one after the other."""
    filled = np.flatnonzero(fragments["steps"])
    if filled.size:
        steps = fragments["steps"].astype(np.int64)
        begins = (np.cumsum(steps) - steps)[filled]
        with np.errstate(all="ignore"):  # rewards may be anything, and so may their sum
            fragments["reward_sum"][filled] = np.add.reduceat(_as_numbers(rewards).astype(np.float64), begins)


def size_of(rows: Rows) -> int:
    """Bytes that rows take, about."""
    if isinstance(rows, FrameRows):
        return len(rows) * rows.row_size
    return rows.nbytes if isinstance(rows, np.ndarray) else sum(map(len, rows))
