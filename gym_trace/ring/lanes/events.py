"""What happens to the lanes of a vector environment, and the state of each lane."""

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
        ("running", "?"),  # the next step, if it is kept, continues the run of steps before it
        ("deferred", "?"),  # another recorder began the episode; nothing is written before a step comes
        ("episode", "<i8"),
        ("steps", "<i8"),  # of the episode so far, including those that are not kept
        ("utc", "<i8"),  # of the start
        ("monotonic", "<i8"),
        ("seed", "<i8"),  # as the fragment table has it
    ]
)


class Reset(NamedTuple):
    """A reset of some lanes, or of all."""

    lanes: Array
    observations: list[Rows]  # one for each leaf, with a row for each of the lanes
    seeds: Array  # as the fragment table has them, one for each of the lanes
    starts: list[bytes]  # rows of the column "starts", likewise
    ids: Array | None  # with filters: episode ids, one for each of the lanes, -1 for those not recorded
    utc: int
    monotonic: int


_IN_COLUMNS: list[Any] = []
_NO_FLAGS = np.zeros(0, np.bool_)


class Step(NamedTuple):
    """A step of all lanes; of a usual one, the columns of the slab have all that there is to say but when it was."""

    utc: int
    monotonic: int
    observations: list[Rows] = _IN_COLUMNS  # one for each leaf, with a row for each lane
    actions: list[Rows] = _IN_COLUMNS
    rewards: Rows = _IN_COLUMNS
    terminations: Array = _NO_FLAGS
    truncations: Array = _NO_FLAGS
    finals: tuple[Array, list[Rows]] | None = None  # lanes reset in the same step, and their last observations
    infos: list[bytes] | None = None  # of the steps, one for each lane
    reset_infos: list[bytes] | None = None  # of the episodes that began, one for each lane
    notes: Mapping[str, Rows] = MappingProxyType({})  # annotations
    ids: Array | None = None  # with filters: ids of the episodes that begin, one for each lane, or -1
    kept: Array | None = None  # with filters: the lanes whose step is kept

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
    observations: list[Rows]  # one for each leaf, with a row for each of the lanes


class LaneState(NamedTuple):
    """The lanes between two events."""

    lanes: Array  # of dtype LANE
    starts: Array  # of dtype object, one for each lane: the row of the column "starts"
    episodes: int  # how many have begun
    recent: tuple[Reset | Step | Observed, ...]  # the last event of all lanes, and resets since then

    def observed(self, lanes: Array) -> list[Rows]:
        """The last observations of lanes."""
        return last_observations(self.recent, lanes, len(self.lanes))


def last_observations(recent: Sequence[Reset | Step | Observed], lanes: Array, count: int) -> list[Rows]:
    """The last observations of lanes. recent: see LaneState. count: of all lanes."""
    places, total = np.zeros(count, np.int64), 0
    for event in recent:
        own = np.arange(count) if isinstance(event, Step) else event.lanes
        places[own] = total + np.arange(len(own))
        total += len(own)
    columns = zip(*[event.observations for event in recent])
    return [taken(joined_rows(column) if len(column) > 1 else column[0], places[lanes]) for column in columns]
