"""Events of a vector environment, in blocks, and the state of each lane."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gym_trace.format.columns import Path
from gym_trace.model.values import Array
from gym_trace.recording.chunk_builder import joined_rows
from gym_trace.recording.reset_record import Start
from gym_trace.recording.segment import Rows
from gym_trace.recording.vector.block import taken

# The state of a lane.
LANE = np.dtype(
    [
        ("open", "?"),  # an episode is open
        ("pending", "?"),  # the next step is a reset
        ("skipped", "?"),  # the episode is not recorded
        ("running", "?"),  # the next step, if it is kept, continues the run of steps before it
        ("deferred", "?"),  # another recorder began the episode; nothing is written before a step comes
        ("episode", "i8"),
        ("steps", "i8"),  # of the episode so far, including those that are not kept
        ("utc", "i8"),  # of the start
        ("monotonic", "i8"),
        ("seed", "i8"),  # as the fragment table has it
    ]
)


class Reset(NamedTuple):
    """A reset of some lanes, or of all."""

    lanes: Array
    observations: list[Rows]  # one for each leaf, with a row for each of the lanes
    starts: list[Start]  # one for each of the lanes, without episode ids yet
    ids: Array | None  # with filters: episode ids, one for each of the lanes, -1 for those not recorded
    utc: int
    monotonic: int


class Step(NamedTuple):
    """A step of all lanes."""

    observations: list[Rows]  # one for each leaf, with a row for each lane
    actions: list[Rows]
    rewards: Rows
    terminations: Array
    truncations: Array
    finals: tuple[Array, list[Rows]] | None  # lanes reset in the same step, and their last observations
    infos: list[bytes] | None  # of the steps, one for each lane
    reset_infos: list[bytes] | None  # of the episodes that began, one for each lane
    notes: dict[str, Rows]  # annotations
    ids: Array | None  # with filters: ids of the episodes that begin, one for each lane, or -1
    kept: Array | None  # with filters: the lanes whose step is kept
    utc: int
    monotonic: int
    time: int  # where its rows are in the columns of the block


class Interrupted(NamedTuple):
    """A step or reset that raised: the state of the lanes is unknown."""

    utc: int
    monotonic: int


class End(NamedTuple):
    """The end of all open episodes."""

    outcome: int
    utc: int
    monotonic: int


class OpenEpisodes(NamedTuple):
    """The open episodes of another recorder, which this one continues."""

    known: Array  # of dtype LANE, of all lanes
    starts: Array  # of dtype object, of all lanes: the row of the column "starts"
    lanes: Array  # whose episodes are recorded
    observations: list[Rows]  # their last ones, one for each leaf, with a row for each of the lanes


Event = Reset | Step | Interrupted | End | OpenEpisodes


class EventBlock:
    """Events in order, each of them complete, so that another thread may read them at any time."""

    def __init__(self, before: EventBlock | None = None):
        self.before = before  # None once that is encoded
        self.created = time.monotonic()
        self.events: list[Event] = []
        self.steps = 0
        self.columns: dict[Path, Array] = {}  # of shape (lanes, times, ...): flags, and what the rows of steps are in


def last_observations(recent: Sequence[Reset | Step | OpenEpisodes], lanes: Array, count: int) -> list[Rows]:
    """The last observations of lanes. recent: the last event of all lanes, and resets since then."""
    places, total = np.zeros(count, np.int64), 0
    for event in recent:
        own = np.arange(count) if isinstance(event, Step) else event.lanes
        places[own] = total + np.arange(len(own))
        total += len(own)
    columns = zip(*[event.observations for event in recent])
    return [taken(joined_rows(column) if len(column) > 1 else column[0], places[lanes]) for column in columns]
