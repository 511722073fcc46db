"""Events of the lanes of a vector environment, and the state of each lane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from gym_trace.model.values import Array
from gym_trace.ring.chunk_builder import joined_rows
from gym_trace.ring.lanes.order import taken
from gym_trace.ring.segment import Rows

# The state of a lane; see docs/FORMAT.md, section 8.
LANE = np.dtype(
    [
        ("open", "?"),  # an episode is open
        ("pending", "?"),  # the next step is a reset
        ("skipped", "?"),  # the episode is not recorded
        ("running", "?"),  # the next kept step continues the current run of steps
        ("deferred", "?"),  # started by another recorder; nothing is written before the next step
        ("episode", "<i8"),
        ("steps", "<i8"),  # steps of the episode so far, including skipped ones
        ("utc", "<i8"),  # time of the start
        ("monotonic", "<i8"),
        ("seed", "<i8"),  # as in the fragment table
    ]
)


class Reset(NamedTuple):
    """A reset of some or all lanes. Arrays and lists have one entry per reset lane."""

    lanes: Array
    observations: list[Rows]  # one entry per leaf
    seeds: Array  # as in the fragment table
    starts: list[bytes]  # rows of the column "starts"
    ids: Array | None  # with filters: episode ids; -1: not recorded
    utc: int
    monotonic: int


_IN_COLUMNS: list[Any] = []
_NO_FLAGS = np.zeros(0, np.bool_)


class Step(NamedTuple):
    """A step of all lanes. For a usual step, the columns of the slab hold everything except its time."""

    utc: int
    monotonic: int
    observations: list[Rows] = _IN_COLUMNS  # one entry per leaf, with one row per lane
    actions: list[Rows] = _IN_COLUMNS
    rewards: Rows = _IN_COLUMNS
    terminations: Array = _NO_FLAGS
    truncations: Array = _NO_FLAGS
    finals: tuple[Array, list[Rows]] | None = None  # lanes reset in this step, and their last observations
    infos: list[bytes] | None = None  # infos of the steps, one per lane
    reset_infos: list[bytes] | None = None  # infos of the resets, one per lane
    notes: Mapping[str, Rows] = MappingProxyType({})  # annotations
    ids: Array | None = None  # with filters: id of the starting episode of each lane, or -1
    kept: Array | None = None  # with filters: True for lanes whose step is kept

    @property
    def is_usual(self) -> bool:
        return self.observations is _IN_COLUMNS


class Interrupted(NamedTuple):
    """A step or reset that raised: the state of the lanes is unknown."""

    utc: int
    monotonic: int


class End(NamedTuple):
    """The end of all open episodes."""

    outcome: int
    utc: int
    monotonic: int


Event = Reset | Step | Interrupted | End


class Observed(NamedTuple):
    """Last observations of lanes."""

    lanes: Array
    observations: list[Rows]  # one entry per leaf, with one row per lane in lanes


class LaneState(NamedTuple):
    """State of the lanes between two events."""

    lanes: Array  # dtype LANE
    starts: Array  # dtype object: for each lane, its row of the column "starts"
    episodes: int  # episodes started so far
    recent: tuple[Reset | Step | Observed, ...]  # the last event of all lanes, and later resets

    def observed(self, lanes: Array) -> list[Rows]:
        """Return the last observations of lanes."""
        return last_observations(self.recent, lanes, len(self.lanes))


def last_observations(recent: Sequence[Reset | Step | Observed], lanes: Array, count: int) -> list[Rows]:
    """Return the last observations of lanes. recent: see LaneState. count: number of all lanes."""
    places, total = np.zeros(count, np.int64), 0
    for event in recent:
        own = np.arange(count) if isinstance(event, Step) else event.lanes
        places[own] = total + np.arange(len(own))
        total += len(own)
    columns = zip(*[event.observations for event in recent])
    return [taken(joined_rows(column) if len(column) > 1 else column[0], places[lanes]) for column in columns]
