"""What happens to the lanes of a vector environment, as its recorder is told, and what is known of each lane."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gym_trace.model.values import Array
from gym_trace.recording.chunk_builder import joined_rows
from gym_trace.recording.reset_record import Start
from gym_trace.recording.segment import Rows
from gym_trace.recording.vector.block import taken

NEXT_STEP, SAME_STEP, DISABLED = "NextStep", "SameStep", "Disabled"  # autoreset modes, as Gymnasium spells them

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


class Interrupted(NamedTuple):
    """A step or reset that an exception has interrupted: nobody knows what the lanes have done."""

    utc: int
    monotonic: int


class End(NamedTuple):
    """The end of all episodes that are open."""

    outcome: int
    utc: int
    monotonic: int


class OpenEpisodes(NamedTuple):
    """The episodes that another recorder has begun."""

    known: Array  # of dtype LANE, of all lanes
    starts: Array  # likewise, of objects: what the column "starts" has of their episodes
    lanes: Array  # whose episodes are recorded
    observations: list[Rows]  # their last ones, one a leaf, a row for each of the lanes


Event = Reset | Step | Interrupted | End | OpenEpisodes


class EventBlock:
    """Events in their order; whatever is there is complete, so another thread may take it at any time."""

    def __init__(self, before: EventBlock | None = None):
        self.before = before  # until that is encoded
        self.created = time.monotonic()
        self.events: list[Event] = []
        self.steps = 0


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


def last_observations(recent: Sequence[Reset | Step | OpenEpisodes], lanes: Array, count: int) -> list[Rows]:
    """The last observations of lanes. recent: a step of all lanes, or where they came from, and resets since then."""
    places, total = np.zeros(count, np.int64), 0
    for event in recent:
        own = np.arange(count) if isinstance(event, Step) else event.lanes
        places[own] = total + np.arange(len(own))
        total += len(own)
    columns = zip(*[event.observations for event in recent])
    return [taken(joined_rows(column) if len(column) > 1 else column[0], places[lanes]) for column in columns]
