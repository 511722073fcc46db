"""Decode slabs of lanes to segments, and to pending actions."""

from __future__ import annotations

from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from gym_trace.errors import CorruptTrace
from gym_trace.model.packing import unpack
from gym_trace.model.values import Array, dtype_from
from gym_trace.ring.lanes.encoder import encoded, no_lanes
from gym_trace.ring.lanes.entries import (
    NOTHING,
    OddRows,
    UnpackedStep,
    unpacked_reset,
    unpacked_rows,
    unpacked_state,
)
from gym_trace.ring.lanes.events import End, Event, Interrupted, LaneState, Step
from gym_trace.ring.lanes.layout import REWARD_BYTES, REWARDS, TERMINATIONS, TRUNCATIONS, LaneLayout, lane_layout
from gym_trace.ring.log import ASK, END_ALL, INTERRUPTED, RESET, STATE, STEP, Entry, entries
from gym_trace.ring.memory import MOST_SLAB_BYTES
from gym_trace.ring.pending import Pending
from gym_trace.ring.segment import Rows, Segment


class Decoded(NamedTuple):
    """Contents of a slab."""

    segments: list[Segment]
    state: LaneState  # after the slab
    asked: list[Rows] | None  # actions without an answer, one entry per leaf, with one row per lane


class LaneDecoder:
    """Decodes slabs of lanes for readers.

    Args:
        layout: layout of the slabs in the ring file (docs/FORMAT.md, section 8).

    Raises CorruptTrace if the layout is malformed.
    """

    def __init__(self, layout: dict[str, Any]):
        self._layout = lane_layout(layout, MOST_SLAB_BYTES)

    def complete(self, sequence: int, slab: bytes | memoryview) -> tuple[int, int]:
        """Return the number of complete steps in a slab, and of complete entries in its log."""
        log = [entry.kind for entry in entries(slab, self._layout.log, len(slab), sequence)]
        return log.count(STEP), len(log)

    def decode(
        self, sequence: int, slab: bytes | memoryview, most: tuple[int, int] | None = None
    ) -> tuple[list[Segment], list[Pending]]:
        """Decode a slab; return its segments, and the pending action of each open episode.

        Args:
            most: numbers of steps and entries to decode of a slab that is still written; pending actions are omitted
                then.

        Raises CorruptTrace.
        """
        try:
            found = decoded(self._layout, sequence, memoryview(slab), None, None if most is None else most[1])
            return found.segments, [] if most else pending_of(found.asked, found.state.lanes)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise CorruptTrace(f"malformed ring slab: {error!r:.100}") from error


def decoded(
    layout: LaneLayout, sequence: int, slab: memoryview, state: LaneState | None = None, most: int | None = None
) -> Decoded:
    """Decode a slab. The arrays may be views of the slab.

    Args:
        state: state of the lanes at the start of the slab; None: as stored in the slab.
        most: number of log entries to read; None: all.
    """
    reading = _Reading(layout, slab)
    for entry in islice(entries(slab, layout.log, len(slab), sequence), most):
        if entry.kind != STATE or state is None:
            reading.add(entry)
    state = state or reading.state or no_lanes(layout.lanes)
    segments, state = encoded(layout, state, reading.events, reading.columns)
    return Decoded(segments, state, reading.asked())


class _Reading:
    """Reads the events of a slab.

    Attributes:
        events: events so far.
        columns: columns of the slab: flags, and all columns that hold the rows of all steps.
        state: state of the lanes at the start of the slab, if stored.
    """

    def __init__(self, layout: LaneLayout, slab: memoryview):
        self._layout, self._slab = layout, slab
        self.columns = layout.arrays(slab)
        for path in (TERMINATIONS, TRUNCATIONS):  # any byte except 0 is true
            self.columns[path] = self.columns[path].view(np.uint8) != 0
        # Time first, because indexing the first axis is faster than slicing.
        by_time = {path: column.swapaxes(0, 1) for path, column in self.columns.items()}
        self._observations = [by_time.get(leaf.path) for leaf in layout.observation_leaves]
        self._actions = [by_time.get(leaf.path) for leaf in layout.action_leaves]
        self._terminations, self._truncations = by_time[TERMINATIONS], by_time[TRUNCATIONS]
        self._nothing = UnpackedStep(NOTHING, layout)
        self._rewards: dict[int, Array] = {}
        self._reward_type: int | None = None
        self.events: list[Event] = []
        self.state: LaneState | None = None
        self._steps = 0
        self._asked: OddRows | None = None

    def add(self, entry: Entry) -> None:
        """Add a log entry. Raises CorruptTrace."""
        kind, utc, monotonic = entry.kind, entry.c, entry.d
        if kind == ASK:
            self._asked = unpacked_rows(entry.payload, self._layout.lanes)
        elif kind == STEP:
            self._add_step(entry, utc, monotonic)
        elif kind == STATE:
            self.state = unpacked_state(entry.payload, self._layout)
        elif kind == RESET:
            self.events.append(unpacked_reset(entry.payload, self._layout, utc, monotonic))
        elif kind == INTERRUPTED:
            self.events.append(Interrupted(utc, monotonic))
        elif kind == END_ALL:
            self.events.append(End(entry.a, utc, monotonic))
        if kind != ASK:
            self._asked = None

    def asked(self) -> list[Rows] | None:
        """Return the actions without an answer, if any."""
        if self._asked is None or self._steps >= self._layout.times:
            return None
        return _rows(self._actions, self._asked, self._steps)

    def _add_step(self, entry: Entry, utc: int, monotonic: int) -> None:
        time = self._steps
        if self._asked is None or entry.row != time or time >= self._layout.times:
            raise CorruptTrace("ring log entries out of order")
        more = UnpackedStep(entry.payload, self._layout) if len(entry.payload) else self._nothing
        rewards: Rows | None = more.rewards
        if entry.column:
            rewards = self._reward_column(entry.column)[time]
        if rewards is None:
            raise CorruptTrace("ring step without rewards")
        self._remove_incomplete(entry.column, more.observations, self._asked)
        self._steps += 1
        self.events.append(
            Step(
                utc,
                monotonic,
                _rows(self._observations, more.observations, time),
                _rows(self._actions, self._asked, time),
                rewards,
                self._terminations[time],
                self._truncations[time],
                more.finals,
                more.infos,
                more.reset_infos,
                more.notes,
                more.ids,
                more.kept,
            )
        )

    def _remove_incomplete(self, reward_type: int, observations: OddRows, actions: OddRows) -> None:
        """Remove columns that do not hold the rows of a step."""
        if reward_type != self._reward_type:
            self.columns.pop(REWARDS, None)
            if reward_type and self._reward_type is None:
                self.columns[REWARDS] = self._reward_column(reward_type).swapaxes(0, 1)
            self._reward_type = reward_type
        for odd, leaves in ((observations, self._layout.observation_leaves), (actions, self._layout.action_leaves)):
            for number in odd:
                if number < len(leaves):
                    self.columns.pop(leaves[number].path, None)

    def _reward_column(self, code: int) -> Array:
        column = self._rewards.get(code)
        if column is None:
            dtype = dtype_from(np.dtype(f"{chr(code & 0xFF)}{code >> 8}").str)
            if dtype.kind not in "biuf" or dtype.itemsize > REWARD_BYTES:
                raise CorruptTrace("invalid reward type in a ring")
            column = self._rewards[code] = self._layout.rewards(self._slab, dtype).swapaxes(0, 1)
        return column


def _rows(columns: list[Array | None], odd: OddRows, time: int) -> list[Rows]:
    """Return the rows of all leaves at a step. columns: (time, lane, ...)."""
    if not odd:
        return [column[time] for column in columns]  # type: ignore[index]
    return [odd[number] if number in odd else column[time] for number, column in enumerate(columns)]  # type: ignore[index]


def pending_of(asked: list[Rows] | None, lanes: Array) -> list[Pending]:
    """Return the pending actions of lanes with an open episode. lanes: state of the lanes."""
    if asked is None:
        return []
    steps = lanes["open"] & ~lanes["skipped"] & ~lanes["deferred"] & ~lanes["pending"]
    return [
        Pending(int(lanes["episode"][lane]), lane, int(lanes["steps"][lane]), [_value(rows, lane) for rows in asked])
        for lane in np.flatnonzero(steps).tolist()
    ]


def _value(rows: Rows, lane: int) -> Any:
    return np.array(rows[lane])[()] if isinstance(rows, np.ndarray) else unpack(rows[lane])
