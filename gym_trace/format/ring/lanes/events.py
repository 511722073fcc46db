"""Read the events of lanes from their slab: resets, steps and ends. Reorder rows by lane, then by time, for chunks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.packing import pack
from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace
from gym_trace.format.columns import Path
from gym_trace.format.ring.lanes.entries import (
    NO_EXTRAS,
    End,
    LaneState,
    OddRows,
    Reset,
    StepExtras,
    rows_at,
    unpacked_actions,
)
from gym_trace.format.ring.lanes.layout import REWARDS, TERMINATIONS, TRUNCATIONS, LaneLayout, dtype_of
from gym_trace.format.ring.log import (
    ACTIONS,
    END_ALL,
    INTERRUPTED,
    RESET,
    STATE,
    STEP,
    LogEntry,
    entry_at,
    entry_offsets,
    headers,
)
from gym_trace.format.ring.segment import ColumnRows

_LEAST_TIMES_AT_ONCE, _ROWS_AT_ONCE = 32, 1 << 15  # sizes of the blocks of _contiguous(), for the processor's caches
_WORDS = {2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}  # dtype by size in bytes


def lane_rows(column: Array, excluded: Array, out: Array) -> None:
    """Copy the rows of a column, (lanes, times, ...), by lane, then by time. excluded: indices to skip, ascending."""
    ordered = _contiguous(column).reshape(column.shape[0] * column.shape[1], *column.shape[2:])
    out[...] = np.delete(ordered, excluded, axis=0) if len(excluded) else ordered


class InnerLoops(NamedTuple):
    """Inner loops over a slab: in C for slabs of this process, in Python for rings read from files.

    Attributes:
        rows: lane_rows().
        fragments: makes the fragments of usual steps, see _Decoding in decoder.py; None: Python makes all fragments.
    """

    rows: Callable[[Array, Array, Array], None] = lane_rows
    fragments: Callable[..., tuple[bytearray, bytearray, int] | None] | None = None


PYTHON_LOOPS = InnerLoops()


class AllExcept(NamedTuple):
    """Selection of all rows except some; rows are ordered by lane, then by time.

    Attributes:
        excluded: indices of the rows that are not selected, ascending.
        total: number of all rows.
    """

    excluded: Array
    total: int

    @property
    def remaining(self) -> int:
        """Number of selected rows."""
        return self.total - len(self.excluded)

    def indices(self) -> Array | None:
        """Return the indices of the selected rows; None: all."""
        if not len(self.excluded):
            return None
        chosen = np.ones(self.total, np.bool_)
        chosen[self.excluded] = False
        return np.flatnonzero(chosen)


class Steps(NamedTuple):
    """Consecutive steps of all lanes.

    Attributes:
        columns: (lanes, times, ...).
        odd: rows that are not in their column, by column and time.
        utc, monotonic, extras: one per step.
        loops: see InnerLoops.
    """

    columns: dict[Path, Array]
    odd: dict[Path, dict[int, ColumnRows]]
    utc: Array
    monotonic: Array
    extras: list[StepExtras]
    loops: InnerLoops

    def batch(self, path: Path, time: int) -> ColumnRows:
        """Return the rows of one step, one per lane."""
        odd = self.odd.get(path, {})
        return odd[time] if time in odd else self.columns[path][:, time]

    def batches(self, path: Path) -> list[ColumnRows]:
        """Return the rows of each step, one per lane."""
        return [self.batch(path, time) for time in range(len(self.utc))]

    def rows(self, path: Path, chosen: Array | AllExcept) -> ColumnRows:
        """Return rows by lane, then by time. Equal rewards are one row with a stride of 0.

        chosen: indices of the rows in that order.
        """
        if path in self.odd:
            return by_lane(self.batches(path), chosen)
        column = self.columns[path]
        if path == REWARDS and isinstance(chosen, AllExcept) and (same := _same_row(column, chosen)) is not None:
            return np.broadcast_to(same, chosen.remaining)
        if isinstance(chosen, AllExcept) and (len(chosen.excluded) or not column.flags.c_contiguous):
            ordered = np.empty((chosen.remaining, *column.shape[2:]), column.dtype)
            (self.loops.rows if ordered.size else lane_rows)(column, chosen.excluded, ordered)
            return ordered
        flat = _contiguous(column).reshape(column.shape[0] * column.shape[1], *column.shape[2:])
        return flat if isinstance(chosen, AllExcept) else rows_at(flat, chosen)


class LaneEvents:
    """The events in a slab. Arrays may be views of the slab. Raises like gym_trace.format.ring.lanes.entries.

    Args:
        most: maximum number of log entries to read; None: all.
        loops: see InnerLoops.

    Attributes:
        events: resets, ends and runs of steps, in order.
        pending_actions: the actions without a result, one entry per leaf, with one row per lane; None without any.
    """

    def __init__(
        self,
        layout: LaneLayout,
        sequence: int,
        slab: memoryview,
        most: int | None = None,
        loops: InnerLoops = PYTHON_LOOPS,
    ):
        self._layout, self._slab, self.loops = layout, slab, loops
        self._offsets = entry_offsets(slab, layout.log, len(slab), sequence)[:most]
        self._log = headers(slab, self._offsets)
        kinds = self._log["kind"]
        self._steps = np.flatnonzero(kinds == STEP)
        count = len(self._steps)
        in_order = (self._log["row"][self._steps] == np.arange(count)).all()
        if not in_order or count > layout.times or not np.append(False, kinds == ACTIONS)[self._steps].all():
            raise CorruptTrace("ring log entries out of order")
        self._columns = layout.arrays(slab)
        for path in (TERMINATIONS, TRUNCATIONS):  # any byte except 0 is true
            self._columns[path] = self._columns[path].view(np.uint8)
        self.events: list[Reset | End | Steps] = []
        begin = 0
        for at in np.flatnonzero((kinds == RESET) | (kinds == INTERRUPTED) | (kinds == END_ALL)).tolist():
            end = int(np.searchsorted(self._steps, at))
            self._add_steps(begin, end)
            self.events.append(self._event(self._entry(at)))
            begin = end
        self._add_steps(begin, count)
        self.pending_actions: list[ColumnRows] | None = None
        if len(kinds) and kinds[-1] == ACTIONS and count < layout.times:
            odd = unpacked_actions(self._entry(-1).payload, layout)
            self.pending_actions = [
                odd[number] if number in odd else self._columns[leaf.path][:, count]
                for number, leaf in enumerate(layout.action_leaves)
            ]

    def state(self) -> LaneState:
        """Return the state of the lanes at the start of the slab."""
        stored = np.flatnonzero(self._log["kind"] == STATE)
        if not len(stored):
            return LaneState.initial(self._layout.lanes)
        return LaneState.unpacked(self._entry(stored[0]).payload, self._layout)

    def _entry(self, number: int) -> LogEntry:
        return entry_at(self._slab, self._offsets[number])

    def _event(self, entry: LogEntry) -> Reset | End:
        if entry.kind == RESET:
            return Reset.unpacked(entry.payload, self._layout, entry.c, entry.d)
        return End(None if entry.kind == INTERRUPTED else entry.a, entry.c, entry.d)

    def _add_steps(self, begin: int, end: int) -> None:
        """Add the steps begin to end, if any, as one event."""
        if begin == end:
            return
        indices, layout = self._steps[begin:end], self._layout
        steps, actions = self._log[indices], self._log[indices - 1]
        columns = {path: column[:, begin:end] for path, column in self._columns.items()}
        odd: dict[Path, dict[int, ColumnRows]] = defaultdict(dict)
        extras = [NO_EXTRAS] * len(steps)
        for leaf in (*layout.observation_leaves, *layout.action_leaves):
            if leaf.dtype is None:
                odd[leaf.path] = {}  # no column

        def add(rows_of: OddRows, leaves: list[Any], time: int) -> None:
            for number, rows in rows_of.items():
                odd[leaves[number].path][time] = rows

        for time in np.flatnonzero(steps["length"]).tolist():
            extras[time] = StepExtras.unpacked(self._entry(indices[time]).payload, layout)
            add(extras[time].observations, layout.observation_leaves, time)
        for time in np.flatnonzero(actions["length"]).tolist():
            add(unpacked_actions(self._entry(indices[time] - 1).payload, layout), layout.action_leaves, time)

        codes = steps["column"]
        rewards = {code: layout.rewards(self._slab, dtype_of(code))[:, begin:end] for code in set(codes.tolist()) - {0}}
        if len(rewards) == 1 and codes.all():
            columns[REWARDS] = rewards[int(codes[0])]
        else:
            for time, code in enumerate(codes.tolist()):
                rows = rewards[code][:, time] if code else extras[time].rewards
                if rows is None:
                    raise CorruptTrace("ring step without rewards")
                odd[REWARDS][time] = rows
        self.events.append(Steps(columns, odd, steps["c"], steps["d"], extras, self.loops))


# -- rows by lane, then by time ---------------------------------------------------------------------------------------


def by_lane(batches: Sequence[ColumnRows], chosen: Array | AllExcept) -> ColumnRows:
    """Return rows of batches by lane, then by time. batches: one per time, with one row per lane."""
    flat: ColumnRows
    positions = chosen.indices() if isinstance(chosen, AllExcept) else chosen
    if _alike(batches):
        stacked = np.ascontiguousarray(np.stack(batches, axis=1))  # np.stack keeps the Fortran order of batches
        flat = stacked.reshape(len(stacked) * stacked.shape[1], *stacked.shape[2:])
    else:
        flat = [row for lane in zip(*map(_packed, batches)) for row in lane]
    return flat if positions is None else rows_at(flat, positions)


def inserted(column: ColumnRows, at: Array, rows: ColumnRows) -> ColumnRows:
    """Return a column with one row inserted before each index in `at`."""
    if isinstance(column, np.ndarray) and isinstance(rows, np.ndarray) and _alike([column, rows]):
        return np.insert(column, at, rows, axis=0)
    packed, more = _packed(column), _packed(rows)
    for i, row in zip(reversed(at.tolist()), reversed(more)):
        packed.insert(i, row)
    return packed


def _same_row(column: Array, chosen: AllExcept) -> Array | None:
    """Return the row, (1,), that all chosen rows of a column, (lanes, times), equal; None if they differ."""
    if chosen.remaining < 2 or column.ndim != 2 or column.itemsize not in (1, 2, 4, 8):
        return None
    excluded = chosen.excluded
    gaps = np.flatnonzero(excluded != np.arange(len(excluded)))
    first_chosen = int(gaps[0]) if len(gaps) else len(excluded)
    lane, time = divmod(first_chosen, column.shape[1])
    bits = column.T.view(f"u{column.itemsize}")  # NaN equals itself, and 0.0 does not equal -0.0
    value = bits[time, lane]
    if 2 * np.count_nonzero(bits[len(bits) // 2] != value) > len(column):  # usually enough, and quick
        return None
    lanes, times = np.divmod(excluded, column.shape[1])
    if np.count_nonzero(bits != value) != np.count_nonzero(bits[times, lanes] != value):
        return None
    return column[lane : lane + 1, time].copy()


def _contiguous(stacked: Array) -> Array:
    """Return an array, (lanes, times, ...), in C order."""
    if stacked.flags.c_contiguous:
        return stacked
    ordered = np.empty(stacked.shape, stacked.dtype)
    source, target = _as_words(stacked), _as_words(ordered)
    block = max(_LEAST_TIMES_AT_ONCE, _ROWS_AT_ONCE // max(1, len(stacked)))
    for begin in range(0, stacked.shape[1], block):
        target[:, begin : begin + block] = source[:, begin : begin + block]
    return ordered


def _as_words(stacked: Array) -> Array:
    """View each row as one number if NumPy has a type of that size: it copies such rows much faster."""
    word = _WORDS.get(stacked.itemsize * math.prod(stacked.shape[2:]))
    if word is None or stacked.ndim != 3:
        return stacked
    return stacked.view(word)[..., 0]


def _alike(batches: Sequence[ColumnRows]) -> bool:
    first = batches[0]
    return isinstance(first, np.ndarray) and all(
        isinstance(batch, np.ndarray) and batch.dtype == first.dtype and batch.shape[1:] == first.shape[1:]
        for batch in batches
    )


def _packed(batch: ColumnRows) -> list[bytes]:
    return [pack(row) for row in batch] if isinstance(batch, np.ndarray) else list(batch)
