"""What happens to the lanes of a vector environment, as its recorder is told, and what is known of each lane."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gym_trace.format.buffers import Buffers
from gym_trace.rows.blocks import Start
from gym_trace.rows.chunks import joined_rows
from gym_trace.values import Array

NEXT_STEP, SAME_STEP, DISABLED = "NextStep", "SameStep", "Disabled"  # autoreset modes, as Gymnasium spells them

Rows = Array | list[bytes]  # of a leaf, one a lane: typed, or one MessagePack value each

_NARROW = 16  # bytes
_TIMES_AT_ONCE = 16  # such that what is read and written stays in the processor's nearest cache
_WORDS = {2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}  # by their bytes

# What is known of a lane.
LANE = np.dtype(
    [
        ("open", "?"),  # there is an episode
        ("pending", "?"),  # there is none, but the next step resets the lane
        ("skipped", "?"),  # the episode is not recorded
        ("running", "?"),  # the next step, if it is kept, goes on with the run of steps before it
        ("deferred", "?"),  # another recorder began the episode; nothing of it is written until a step comes
        ("episode", "i8"),
        ("steps", "i8"),  # of the episode so far, also those that are not kept
        ("utc", "i8"),  # of the start
        ("monotonic", "i8"),
        ("seed", "i8"),  # as the fragment table has it
        ("start", "O"),  # as the column "starts" has it
    ]
)


class Reset(NamedTuple):
    """A reset of some lanes, or of all."""

    lanes: Array
    observations: list[Rows]  # one a leaf, a row for each of the lanes
    starts: list[Start]  # likewise; their episode ids are not known yet
    ids: Array | None  # with filters, of the episodes that begin, one a lane; -1 for those that are not recorded
    utc: int
    monotonic: int


class Step(NamedTuple):
    """A step of all lanes."""

    observations: list[Rows]  # one a leaf, a row for each lane
    actions: list[Rows]
    rewards: Rows
    terminations: Array
    truncations: Array
    finals: tuple[Array, list[Rows]] | None  # of lanes reset in the same step: which, and their last observations
    infos: list[bytes] | None  # of the steps, one a lane
    reset_infos: list[bytes] | None  # of the episodes that began, one a lane
    notes: dict[str, Rows]  # annotations
    ids: Array | None  # with filters, of the episodes that begin with this, one a lane, otherwise -1
    kept: Array | None  # with filters, in which lanes this is a step that is kept
    utc: int
    monotonic: int


class Lost(NamedTuple):
    """A step or reset that an exception has interrupted: nobody knows what the lanes have done."""

    utc: int
    monotonic: int


class End(NamedTuple):
    """The end of all episodes that are open."""

    outcome: int
    utc: int
    monotonic: int


class GoOn(NamedTuple):
    """The episodes that another recorder has begun."""

    known: Array  # of dtype LANE, of all lanes
    lanes: Array  # whose episodes are recorded
    observations: list[Rows]  # their last ones, one a leaf, a row for each of the lanes


Event = Reset | Step | Lost | End | GoOn


class LaneBlock:
    """Events in their order; whatever is there is complete, so another thread may take it at any time."""

    def __init__(self, before: LaneBlock | None = None):
        self.before = before  # until that is encoded
        self.born = time.monotonic()
        self.events: list[Event] = []
        self.steps = 0


class StepRooms:
    """Memory for the rows of the steps of a block, ordered by lane, then by time, as they are to be stored.

    Narrow rows are ordered by time first: to put each of them into a cache line of its own, step by step, takes longer
    than to order them later, many at a time.

    Args:
        count: of lanes.
        times: how many steps a block can have.
    """

    def __init__(self, count: int, times: int):
        self.times = times
        self._count = count
        self._buffers = Buffers()
        self._rooms: dict[object, Array] = {}

    def clear(self) -> None:
        """For another block: takes memory that nobody uses any more."""
        self._rooms = {}

    def room(self, key: object, dtype: np.dtype[Any], shape: tuple[int, ...], time: int) -> Array:
        """An array of shape (lanes, *shape) for the rows of a column at a time, the same as before if asked again."""
        rooms = self._rooms.get(key)
        if rooms is None:
            size = self._count * self.times * dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            flat = self._buffers.take(size).view(dtype)
            if size <= _NARROW * self._count * self.times:
                rooms = flat.reshape(self.times, self._count, *shape).swapaxes(0, 1)
            else:
                rooms = flat.reshape(self._count, self.times, *shape)
            self._rooms[key] = rooms
        return rooms[:, time]


def by_lane_already(batches: Sequence[Rows]) -> Array | None:
    """Batches that lie one after the other in one room, as one array of shape (lanes, times, ...); None if not."""
    first, last = batches[0], batches[-1]
    if not isinstance(first, np.ndarray) or not isinstance(last, np.ndarray) or not isinstance(first.base, np.ndarray):
        return None
    base, dtype = first.base, first.dtype
    row = int(np.prod(first.shape[1:], dtype=np.int64)) * dtype.itemsize
    if not row or not all(isinstance(rows, np.ndarray) and rows.base is base for rows in batches):
        return None
    begin = first.ctypes.data - base.ctypes.data
    apart = first.nbytes if first.flags.c_contiguous else row
    if last.ctypes.data - first.ctypes.data != (len(batches) - 1) * apart or last.dtype != dtype:
        return None
    strides = (first.strides[0], apart, *first.strides[1:])
    return np.ndarray((len(first), len(batches), *first.shape[1:]), dtype, base.data, begin, strides)


def in_order(stacked: Array, room: Callable[[int], Array]) -> Array:
    """An array of shape (lanes, times, ...) as it lies in memory in that order. room: gives byte arrays of a size."""
    if stacked.flags.c_contiguous:
        return stacked
    ordered = room(stacked.nbytes).view(stacked.dtype).reshape(stacked.shape)
    words, into = _as_words(stacked), _as_words(ordered)
    for begin in range(0, stacked.shape[1], _TIMES_AT_ONCE):
        into[:, begin : begin + _TIMES_AT_ONCE] = words[:, begin : begin + _TIMES_AT_ONCE]
    return ordered


def _as_words(stacked: Array) -> Array:
    """The same bytes with one number a row, where there are numbers so wide: these are copied far more quickly."""
    word = _WORDS.get(stacked.itemsize * int(np.prod(stacked.shape[2:], dtype=np.int64)))
    if word is None or stacked.ndim != 3:
        return stacked
    return stacked.view(word)[..., 0]


def advanced(mode: str, open_: Array, pending: Array, ended: Array) -> tuple[Array, Array, Array, Array]:
    """What a step is for each lane, given whether it says that an episode ended.

    A lane of whose episode nothing is known has one again after the next end.

    Returns:
        Whether it is anything that is known of, whether that is a reset and not a step; and after it, whether an
        episode is open, and whether the next step is a reset.
    """
    resets, open_ = pending, open_ | pending
    over = ended & ~pending
    if mode == SAME_STEP:
        return open_ | over, over & ~open_, open_ | over, np.zeros_like(over)
    return open_, resets, open_ & ~over, over if mode == NEXT_STEP else np.zeros_like(over)


def last_observations(recent: Sequence[Reset | Step | GoOn], lanes: Array, count: int) -> list[Rows]:
    """The last observations of lanes. recent: a step of all lanes, or where they came from, and resets since then."""
    places, total = np.zeros(count, np.int64), 0
    for event in recent:
        own = np.arange(count) if isinstance(event, Step) else event.lanes
        places[own] = total + np.arange(len(own))
        total += len(own)
    columns = zip(*[event.observations for event in recent])
    return [taken(joined_rows(column) if len(column) > 1 else column[0], places[lanes]) for column in columns]


def taken(rows: Rows, places: Array) -> Rows:
    """Rows at places."""
    return rows[places] if isinstance(rows, np.ndarray) else [rows[place] for place in places.tolist()]
