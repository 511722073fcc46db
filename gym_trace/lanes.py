"""What vector environments give, a batch for all lanes at a time, as fragments of single lanes and their columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from gym_trace.blocks import CUT, TERMINATED, TRUNCATED, Start
from gym_trace.chunks import PACKED_ABSENT, joined_rows
from gym_trace.encoder import Columns, Segment, size_of
from gym_trace.format import wire
from gym_trace.layout import Leaf
from gym_trace.starts import NOTHING, packed_start, stored_seed
from gym_trace.values import Array, pack

NEXT_STEP, SAME_STEP, DISABLED = "NextStep", "SameStep", "Disabled"  # autoreset modes, as Gymnasium spells them

Rows = Array | list[bytes]  # of a leaf, one a lane: typed, or one MessagePack value each


class Reset(NamedTuple):
    """A reset of some lanes, or of all."""

    lanes: Array
    observations: list[Rows]  # one a leaf, a row for each of the lanes
    starts: list[Start]  # likewise; their episode ids are not known yet
    utc: int
    monotonic: int


class Step(NamedTuple):
    """A step of all lanes."""

    observations: list[Rows]  # one a leaf, a row for each lane
    actions: list[Rows]
    rewards: Rows
    terminations: Array
    truncations: Array
    finals: (
        tuple[Array, list[Rows]] | None
    )  # where lanes were reset in the same step: which, and their last observations
    infos: list[bytes] | None  # of the steps, one a lane
    reset_infos: list[bytes] | None  # of the episodes that began, one a lane
    notes: dict[str, Rows]  # annotations
    utc: int
    monotonic: int


class End(NamedTuple):
    """The end of all episodes that are open."""

    outcome: int
    utc: int
    monotonic: int


class LaneBlock:
    """Events in their order; whatever is there is complete, so another thread may take it at any time."""

    def __init__(self, before: LaneBlock | None = None):
        self.before = before  # until that is encoded
        self.events: list[Reset | Step | End] = []


class LaneProgress(NamedTuple):
    """How far events are encoded."""

    block: LaneBlock
    events: int  # of the block
    lanes: Array  # of dtype _LANE
    episodes: int


class LaneEncoder:
    """Turns events into segments whose rows are ordered by lane. Not for several threads at once."""

    def __init__(self, count: int, mode: str, observation_leaves: list[Leaf], action_leaves: list[Leaf]):
        self.complaints: dict[str, str] = {}
        self._count, self._mode = count, mode
        self._observation_leaves, self._action_leaves = observation_leaves, action_leaves

    def begun(self, block: LaneBlock) -> LaneProgress:
        """Where it begins."""
        return LaneProgress(block, 0, np.zeros(self._count, _LANE), 0)

    def encoded(
        self, progress: LaneProgress, blocks: list[LaneBlock], partly: bool
    ) -> tuple[LaneProgress, list[Segment]]:
        """What was added to blocks since progress, and the progress after it. partly: whether the last one counts."""
        self._lanes, self._episodes = progress.lanes.copy(), progress.episodes
        segments: list[Segment] = []
        taken = progress.events
        for block in blocks:
            if block is not progress.block:
                taken = 0
            if partly or block is not blocks[-1]:
                events = block.events[taken:]
                segments += self._segments(events)
                taken += len(events)
        if blocks == [progress.block] and taken == progress.events:
            return progress, []
        return LaneProgress(blocks[-1], taken, self._lanes, self._episodes), segments

    def _segments(self, events: list[Reset | Step | End]) -> list[Segment]:
        segments, steps = [], []
        for event in [*events, None]:
            if isinstance(event, Step):
                steps.append(event)
                continue
            if steps:
                segments.append(self._steps(steps))
                steps = []
            if event is not None:
                segments.append(self._reset(event) if isinstance(event, Reset) else self._end(event))
        return [segment for segment in segments if len(segment.fragments)]

    # -- resets and ends ----------------------------------------------------------------------------------------------

    def _reset(self, event: Reset) -> Segment:
        state = self._lanes
        cut = self._ends(event.lanes[state["open"][event.lanes]], CUT, event.utc, event.monotonic)
        begun = np.zeros(len(event.lanes), wire.FRAGMENT)
        begun["lane"] = event.lanes
        begun["episode"] = self._episodes + np.arange(len(begun))
        begun["flags"] = wire.STARTS | wire.LEADS
        begun["seed"] = [stored_seed(start.seed) for start in event.starts]
        begun["start_time"], begun["clock_offset"] = event.utc, event.utc - event.monotonic
        self._episodes += len(begun)
        new = np.zeros(len(begun), _LANE)
        new["open"], new["episode"], new["utc"], new["monotonic"] = True, begun["episode"], event.utc, event.monotonic
        state[event.lanes] = new
        starts = self._packed_starts(event.starts)
        columns: Columns = {("starts",): starts}
        for leaf, rows in zip(self._observation_leaves, event.observations):
            columns[leaf.path] = rows
        return _segment(np.concatenate([cut, begun]), columns)

    def _end(self, event: End) -> Segment:
        lanes = np.flatnonzero(self._lanes["open"])
        fragments = self._ends(lanes, event.outcome, event.utc, event.monotonic)
        self._lanes["open"] = False
        return _segment(fragments, {})

    def _ends(self, lanes: Array, outcome: int, utc: int, monotonic: int) -> Array:
        """Fragments without steps that end what the lanes have open."""
        fragments, state = np.zeros(len(lanes), wire.FRAGMENT), self._lanes[lanes]
        fragments["lane"], fragments["episode"], fragments["first_step"] = lanes, state["episode"], state["steps"]
        fragments["flags"], fragments["outcome"] = wire.STOPS | wire.ENDS, outcome
        fragments["duration"] = monotonic - state["monotonic"]
        fragments["clock_drift"] = utc - state["utc"] - fragments["duration"]
        return fragments

    def _packed_starts(self, starts: Iterable[Start]) -> list[bytes]:
        packed = [packed_start(start) for start in starts]
        for _, replaced in packed:
            if replaced:
                self.complaints["reset"] = f"a value of type {replaced[0]} given to reset cannot be stored"
        return [row for row, _ in packed]

    # -- steps --------------------------------------------------------------------------------------------------------

    def _steps(self, events: list[Step]) -> Segment:
        """One segment of consecutive steps. All arrays of rows are ordered by lane, then by time."""
        times, count = len(events), self._count
        ended = np.array([event.terminations | event.truncations for event in events])
        valid, leads = self._which(ended)
        rows = np.flatnonzero(valid.T)  # of all (lane, time) pairs, those that are anything
        lane, time = rows // times, rows % times
        done, lead = (ended & ~leads).T.reshape(-1)[rows], leads.T.reshape(-1)[rows]
        steps = rows[~lead]  # those that are steps
        columns: Columns = {}
        observations = [
            _by_lane([event.observations[i] for event in events], rows, times * count)
            for i in range(len(self._observation_leaves))
        ]
        if self._mode == SAME_STEP and done.any():
            at = np.flatnonzero(done)
            observations = [
                _inserted(column, at, self._finals(events, i, lane[at], time[at]))
                for i, column in enumerate(observations)
            ]
            lane, time = np.insert(lane, at, lane[at]), np.insert(time, at, time[at])
            places = at + np.arange(len(at))  # of the last observations; the first of the new episodes follow them
            done, lead = np.zeros(len(lane), np.bool_), np.zeros(len(lane), np.bool_)
            done[places], lead[places + 1] = True, True
        for leaf, column in zip(self._observation_leaves, observations):
            columns[leaf.path] = column
        if len(steps):
            for i, leaf in enumerate(self._action_leaves):
                columns[leaf.path] = _by_lane([event.actions[i] for event in events], steps, times * count)
            columns["rewards",] = _by_lane([event.rewards for event in events], steps, times * count)
            if events[0].infos is not None:
                columns["infos",] = _by_lane([event.infos or [] for event in events], steps, times * count)
            for name in dict.fromkeys(name for event in events for name in event.notes):
                missing = [PACKED_ABSENT] * count
                notes = [event.notes.get(name, missing) for event in events]
                columns["annotations", name] = _by_lane(notes, steps, times * count)
        fragments = self._fragments(events, lane, time, lead, done)
        begun = np.flatnonzero(lead)
        if len(begun):
            columns = {("starts",): self._autoreset_starts(events, lane[begun], time[begun]), **columns}
        return _segment(fragments, columns)

    def _which(self, ended: Array) -> tuple[Array, Array]:
        """Of each (time, lane): whether it is anything, and whether it is the reset that follows an end."""
        valid, leads = np.ones(ended.shape, np.bool_), np.zeros(ended.shape, np.bool_)
        open_, pending = self._lanes["open"].copy(), self._lanes["pending"].copy()
        if self._mode == NEXT_STEP:
            leads[0], leads[1:] = pending, ended[:-1]
        regular = self._mode != DISABLED and (open_ | pending).all() and not (ended & leads).any()
        for t, now in enumerate(() if regular else ended):  # lanes without an episode, ends in a reset: seldom
            leads[t] = pending
            open_ = open_ | pending
            valid[t] = open_
            over = now & open_ & ~pending
            pending = over & (self._mode == NEXT_STEP)
            open_ = open_ & ~(over & (self._mode != SAME_STEP))
        ended &= valid
        if regular and self._mode == NEXT_STEP:
            open_, pending = ~ended[-1], ended[-1]
        self._lanes["open"], self._lanes["pending"] = open_, pending
        return valid, leads

    def _finals(self, events: list[Step], leaf: int, lanes: Array, times: Array) -> Rows:
        """The last observations of the episodes that ended in these lanes at these times."""
        kept = [event.finals for event in events]
        offsets = np.cumsum([0] + [0 if finals is None else len(finals[0]) for finals in kept])
        found = [finals for finals in kept if finals is not None]
        rows = joined_rows([finals[1][leaf] for finals in found])
        places = np.empty((len(events), self._count), np.int64)
        for t, finals in enumerate(kept):
            if finals is not None:
                places[t, finals[0]] = offsets[t] + np.arange(len(finals[0]))
        order = places[times, lanes]
        return rows[order] if isinstance(rows, np.ndarray) else [rows[i] for i in order]

    def _autoreset_starts(self, events: list[Step], lanes: Array, times: Array) -> list[bytes]:
        if events[0].reset_infos is None:
            return [NOTHING] * len(lanes)
        starts = []
        for lane, time in zip(lanes.tolist(), times.tolist()):
            infos = events[time].reset_infos
            starts.append(Start(0, lane, None, None, None, None if infos is None else infos[lane], 0, 0))
        return self._packed_starts(starts)

    def _fragments(self, events: list[Step], lane: Array, time: Array, lead: Array, done: Array) -> Array:
        """The fragments of rows that are ordered by lane, then by time."""
        if not len(lane):
            return np.zeros(0, wire.FRAGMENT)
        changes = lane[1:] != lane[:-1]
        begin = np.flatnonzero(np.concatenate([[True], changes | lead[1:]]))
        last = np.append(begin[1:], len(lane)) - 1
        starts, ends = lead[begin], done[last]
        state = self._lanes[lane[begin]]
        utc, monotonic = np.array([(event.utc, event.monotonic) for event in events], np.int64).T
        started = np.flatnonzero(starts)
        first, final = time[begin[started]], time[last]
        begun = {"utc": state["utc"].copy(), "monotonic": state["monotonic"].copy(), "episode": state["episode"].copy()}
        begun["utc"][started], begun["monotonic"][started] = utc[first], monotonic[first]
        order = np.lexsort((lane[begin[started]], first))  # ids in the order of the starts, then of the lanes
        begun["episode"][started[order]] = self._episodes + np.arange(len(started))
        self._episodes += len(started)

        fragments = np.zeros(len(begin), wire.FRAGMENT)
        fragments["lane"], fragments["episode"] = lane[begin], begun["episode"]
        fragments["steps"] = last + 1 - begin - starts
        fragments["first_step"] = np.where(starts, 0, state["steps"])
        at = final[ends], lane[last[ends]]
        terminated = np.array([event.terminations for event in events])[at]
        truncated = np.array([event.truncations for event in events])[at]
        fragments["flags"] = (wire.STARTS | wire.LEADS) * starts
        fragments["flags"][ends] |= (
            wire.STOPS | wire.ENDS | wire.TERMINATED * terminated | wire.TRUNCATED * truncated
        ).astype(np.uint32)
        fragments["outcome"][ends] = np.where(terminated, TERMINATED, TRUNCATED)
        fragments["seed"][starts] = wire.NO_SEED
        fragments["start_time"][starts] = begun["utc"][starts]
        fragments["clock_offset"][starts] = (begun["utc"] - begun["monotonic"])[starts]
        fragments["duration"][ends] = (monotonic[final] - begun["monotonic"])[ends]
        fragments["clock_drift"][ends] = (utc[final] - begun["utc"])[ends] - fragments["duration"][ends]

        latest = np.append(begin[1:], len(lane)) == len(lane)
        latest[:-1] = lane[begin[1:]] != lane[begin[:-1]]
        lanes = lane[begin[latest]]
        for name in ("utc", "monotonic", "episode"):
            self._lanes[name][lanes] = begun[name][latest]
        self._lanes["steps"][lanes] = (fragments["first_step"] + fragments["steps"])[latest]
        return fragments


# What is known of each lane: whether an episode is open, whether its reset comes with the next step.
_LANE = np.dtype(
    [("open", "?"), ("pending", "?"), ("episode", "i8"), ("steps", "i8"), ("utc", "i8"), ("monotonic", "i8")]
)


def _segment(fragments: Array, columns: Columns) -> Segment:
    return Segment(fragments, columns, fragments.nbytes + sum(map(size_of, columns.values())))


def _by_lane(batches: Sequence[Rows], chosen: Array, total: int) -> Rows:
    """The chosen rows of batches for all lanes, one batch after the other in time."""
    if _alike(batches):
        stacked = np.stack(batches).swapaxes(0, 1)
        flat = stacked.reshape(total, *stacked.shape[2:])
        return flat if len(chosen) == total else flat[chosen]
    packed = [row for lane in zip(*map(_packed, batches)) for row in lane]
    return [packed[i] for i in chosen.tolist()]


def _inserted(column: Rows, at: Array, rows: Rows) -> Rows:
    """column with rows put in, one before each place."""
    if isinstance(column, np.ndarray) and isinstance(rows, np.ndarray) and _alike([column, rows]):
        return np.insert(column, at, rows, axis=0)
    kept, more = _packed(column), _packed(rows)
    for place, row in zip(reversed(at.tolist()), reversed(more)):
        kept.insert(place, row)
    return kept


def _alike(batches: Sequence[Rows]) -> bool:
    first = batches[0]
    return isinstance(first, np.ndarray) and all(
        isinstance(batch, np.ndarray) and batch.dtype == first.dtype and batch.shape[1:] == first.shape[1:]
        for batch in batches
    )


def _packed(batch: Rows) -> list[bytes]:
    return [pack(row) for row in batch] if isinstance(batch, np.ndarray) else list(batch)
