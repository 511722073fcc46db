"""What vector environments give, a batch for all lanes at a time, as fragments of single lanes and their columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gym_trace.format import wire
from gym_trace.format.buffers import Buffers
from gym_trace.lanes.events import (
    DISABLED,
    LANE,
    NEXT_STEP,
    SAME_STEP,
    End,
    Event,
    GoOn,
    LaneBlock,
    Lost,
    Reset,
    Rows,
    Step,
    advanced,
    by_lane_already,
    in_order,
    last_observations,
    taken,
)
from gym_trace.lanes.filters import ChosenRows
from gym_trace.layout import Leaf
from gym_trace.rows.blocks import CUT, TERMINATED, TRUNCATED
from gym_trace.rows.chunks import PACKED_ABSENT, joined_rows
from gym_trace.rows.encoder import Columns, Segment, size_of
from gym_trace.rows.starts import NOTHING, packed_start
from gym_trace.values import Array, pack


class LaneProgress(NamedTuple):
    """How far events are encoded."""

    block: LaneBlock
    events: int  # of the block
    lanes: Array  # of dtype LANE
    episodes: int
    recent: tuple[Reset | Step | GoOn, ...]  # see last_observations


class LaneEncoder:
    """Turns events into segments whose rows are ordered by lane.

    Args:
        filtered: whether single steps are left out.
    """

    def __init__(
        self, count: int, mode: str, observation_leaves: list[Leaf], action_leaves: list[Leaf], filtered: bool
    ):
        self.complaints: dict[str, str] = {}
        self.count, self.mode, self.filtered = count, mode, filtered
        self.observation_leaves, self.action_leaves = observation_leaves, action_leaves
        self.room = Buffers().take

    def begun(self, block: LaneBlock) -> LaneProgress:
        """Where it begins."""
        return LaneProgress(block, 0, np.zeros(self.count, LANE), 0, ())

    def encoded(
        self, progress: LaneProgress, blocks: list[LaneBlock], partly: bool
    ) -> tuple[LaneProgress, list[Segment]]:
        """What was added to blocks since progress, and the progress after it. partly: whether the last one counts."""
        encoding = _Encoding(self, progress)
        segments: list[Segment] = []
        done = progress.events
        for block in blocks:
            if block is not progress.block:
                done = 0
            if partly or block is not blocks[-1]:
                events = block.events[done:]
                segments += encoding.segments(events)
                done += len(events)
        if blocks == [progress.block] and done == progress.events:
            return progress, []
        return LaneProgress(blocks[-1], done, encoding.lanes, encoding.episodes, encoding.recent), segments

    def open_run(self, progress: LaneProgress) -> GoOn:
        """What another encoder needs to go on where this one is."""
        known = progress.lanes.copy()
        known["deferred"] = known["open"] & ~known["skipped"]
        lanes = np.flatnonzero(known["deferred"])
        known["episode"][lanes] = np.arange(len(lanes))
        return GoOn(known, lanes, last_observations(progress.recent, lanes, self.count))


class _Encoding:
    """Events being encoded, which changes nothing of what was known before."""

    def __init__(self, encoder: LaneEncoder, progress: LaneProgress):
        self._encoder, self._count, self._mode = encoder, encoder.count, encoder.mode
        self.lanes, self.episodes, self.recent = progress.lanes.copy(), progress.episodes, progress.recent

    def segments(self, events: list[Event]) -> list[Segment]:
        """What consecutive events are."""
        segments: list[Segment] = []
        steps: list[Step] = []
        for event in [*events, None]:
            if isinstance(event, Step):
                steps.append(event)
                continue
            if steps:
                segments += [self._goes_on(), self._steps(steps)]
                self.recent = (steps[-1],)
                steps = []
            if isinstance(event, Reset):
                segments += self._reset(event)
                self.recent = (event,) if len(event.lanes) == self._count else (*self.recent, event)
            elif isinstance(event, GoOn):
                self.lanes, self.episodes = event.known.copy(), len(event.lanes)
                self.recent = (event,) if len(event.lanes) else ()
            elif event is not None:
                segments.append(self._end(event))
        return [segment for segment in segments if len(segment.fragments)]

    # -- resets and ends ----------------------------------------------------------------------------------------------

    def _reset(self, event: Reset) -> list[Segment]:
        cut = self._ends(event.lanes, CUT, event.utc, event.monotonic)
        new = np.zeros(len(event.lanes), LANE)
        new["open"], new["utc"], new["monotonic"] = True, event.utc, event.monotonic
        new["start"], new["seed"] = [start.kept for start in event.starts], [start.seed for start in event.starts]
        if event.ids is None:
            new["episode"] = self.episodes + np.arange(len(new))
            self.episodes += len(new)
        else:
            new["episode"], new["skipped"] = event.ids, event.ids < 0
        new["running"] = not self._encoder.filtered
        self.lanes[event.lanes] = new
        places = np.flatnonzero(~new["skipped"])
        starts = self._starts(event.lanes[places], [taken(rows, places) for rows in event.observations])
        return [_segment(cut, {}), starts]

    def _goes_on(self) -> Segment:
        """What another recorder has begun, when it is certain that there is more of it."""
        lanes = np.flatnonzero(self.lanes["deferred"])
        self.lanes["deferred"] = False
        if not len(lanes):
            return _segment(np.zeros(0, wire.FRAGMENT), {})
        running = lanes[self.lanes["running"][lanes]]
        return self._starts(lanes, last_observations(self.recent, running, self._count))

    def _starts(self, lanes: Array, observations: list[Rows]) -> Segment:
        """The starts of episodes. observations: of those lanes whose next step goes on with them."""
        known, fragments = self.lanes[lanes], np.zeros(len(lanes), wire.FRAGMENT)
        fragments["lane"], fragments["episode"], fragments["first_step"] = lanes, known["episode"], known["steps"]
        fragments["flags"] = wire.STARTS | wire.LEADS * known["running"].astype(np.uint32)
        fragments["seed"], fragments["start_time"] = known["seed"], known["utc"]
        fragments["clock_offset"] = known["utc"] - known["monotonic"]
        columns: Columns = {("starts",): known["start"].tolist()}
        if known["running"].any():
            columns.update(zip((leaf.path for leaf in self._encoder.observation_leaves), observations))
        return _segment(fragments, columns)

    def _end(self, event: End | Lost) -> Segment:
        outcome = CUT if isinstance(event, Lost) else event.outcome
        fragments = self._ends(np.arange(self._count), outcome, event.utc, event.monotonic)
        self.lanes["open"] = self.lanes["pending"] = self.lanes["deferred"] = False
        return _segment(fragments, {})

    def _ends(self, lanes: Array, outcome: int, utc: int, monotonic: int) -> Array:
        """Fragments without steps that end what the lanes have open."""
        known = self.lanes[lanes]
        begun = known["open"] & ~known["skipped"] & ~known["deferred"]
        lanes, known = lanes[begun], known[begun]
        fragments = np.zeros(len(lanes), wire.FRAGMENT)
        fragments["lane"], fragments["episode"], fragments["first_step"] = lanes, known["episode"], known["steps"]
        fragments["flags"], fragments["outcome"] = wire.STOPS | wire.ENDS, outcome
        fragments["duration"] = monotonic - known["monotonic"]
        fragments["clock_drift"] = utc - known["utc"] - fragments["duration"]
        return fragments

    # -- steps --------------------------------------------------------------------------------------------------------

    def _steps(self, events: list[Step]) -> Segment:
        """One segment of consecutive steps. All arrays of rows are ordered by lane, then by time."""
        times, encoder = len(events), self._encoder
        flags = _by_time([event.terminations for event in events]), _by_time([event.truncations for event in events])
        ended = flags[0] | flags[1]
        valid, leads = self._which(ended)
        if events[0].kept is not None:
            same_step, filtered = self._mode == SAME_STEP, encoder.filtered
            return self._chosen(events, ChosenRows(events, valid, leads, ended, same_step, filtered))
        whole = valid.all()
        rows = np.flatnonzero(valid.T)  # of all (lane, time) pairs, those that are anything
        if whole:
            lane, time = np.repeat(np.arange(self._count), times), np.tile(np.arange(times), self._count)
        else:
            lane, time = rows // times, rows % times
        done, lead = (ended & ~leads).T.reshape(-1)[rows], leads.T.reshape(-1)[rows]
        observations = [
            _by_lane([event.observations[i] for event in events], None if whole else rows, encoder.room)
            for i in range(len(encoder.observation_leaves))
        ]
        steps = None if whole and not lead.any() else rows[~lead]  # those that are steps
        if self._mode == SAME_STEP and done.any():
            at = np.flatnonzero(done)
            observations = [
                _inserted(column, at, self._finals(events, i, lane[at], time[at]))
                for i, column in enumerate(observations)
            ]
            lane, time, lead = np.insert(lane, at, lane[at]), np.insert(time, at, time[at]), np.insert(lead, at, False)
            places = at + np.arange(len(at))  # of the last observations; the first of the new episodes follow them
            done = np.zeros(len(lane), np.bool_)
            done[places], lead[places + 1] = True, True
        columns: Columns = {}
        begun = np.flatnonzero(lead)
        if len(begun):
            columns["starts",] = self._autoreset_starts(events, lane[begun], time[begun])
        columns.update(zip((leaf.path for leaf in encoder.observation_leaves), observations))
        if steps is None or len(steps):
            self._add_step_columns(columns, events, steps)
        return _segment(self._fragments(events, flags, lane, time, lead, done), columns)

    def _chosen(self, events: list[Step], chosen: ChosenRows) -> Segment:
        """The segment of what filters have left."""
        names, times = LANE.names or (), len(events)
        for lane, state in enumerate(self.lanes.tolist()):
            known = dict(zip(names, state))
            chosen.add(lane, known)
            self.lanes[lane] = tuple(known.values())
        columns: Columns = {}
        if chosen.starts:
            columns["starts",] = self._autoreset_starts(events, *np.array(chosen.starts).T)
        first = last_observations(self.recent, np.arange(self._count), self._count) or events[0].observations
        rows = np.array([lane * (times + 1) + time + 1 for lane, time in chosen.observations], np.int64)
        for i, leaf in enumerate(self._encoder.observation_leaves):
            column = _by_lane([first[i], *(event.observations[i] for event in events)], rows, self._encoder.room)
            if chosen.finals:
                at, lanes, ends = np.array(chosen.finals).T
                column = _inserted(column, at, self._finals(events, i, lanes, ends))
            if len(column):
                columns[leaf.path] = column
        if chosen.steps:
            steps = np.array([lane * times + time for lane, time in chosen.steps])
            self._add_step_columns(columns, events, steps)
        return _segment(chosen.fragments(), columns)

    def _add_step_columns(self, columns: Columns, events: list[Step], steps: Array | None) -> None:
        """Adds what steps have beside observations. steps: places, by lane, then by time; None for all."""
        room = self._encoder.room
        for i, leaf in enumerate(self._encoder.action_leaves):
            columns[leaf.path] = _by_lane([event.actions[i] for event in events], steps, room)
        columns["rewards",] = _by_lane([event.rewards for event in events], steps, room)
        if events[0].infos is not None:
            columns["infos",] = _by_lane([event.infos or [] for event in events], steps, room)
        for name in dict.fromkeys(name for event in events for name in event.notes):
            missing = [PACKED_ABSENT] * self._count
            columns["annotations", name] = _by_lane([event.notes.get(name, missing) for event in events], steps, room)

    def _which(self, ended: Array) -> tuple[Array, Array]:
        """Of each (time, lane): whether it is anything, and whether it is a reset."""
        valid, leads = np.ones(ended.shape, np.bool_), np.zeros(ended.shape, np.bool_)
        open_, pending = self.lanes["open"].copy(), self.lanes["pending"].copy()
        if self._mode == NEXT_STEP:
            leads[0], leads[1:] = pending, ended[:-1]
        regular = self._mode != DISABLED and (open_ | pending).all() and not (ended & leads).any()
        for t, now in enumerate(() if regular else ended):  # lanes without an episode, ends in a reset: seldom
            valid[t], leads[t], open_, pending = advanced(self._mode, open_, pending, now)
        ended &= valid
        if regular and self._mode == NEXT_STEP:
            open_, pending = ~ended[-1], ended[-1]
        self.lanes["open"], self.lanes["pending"] = open_, pending
        return valid, leads

    def _finals(self, events: list[Step], leaf: int, lanes: Array, times: Array) -> Rows:
        """The last observations of the episodes that ended in these lanes at these times."""
        kept = [event.finals for event in events]
        offsets = np.cumsum([0] + [0 if finals is None else len(finals[0]) for finals in kept])
        rows = joined_rows([finals[1][leaf] for finals in kept if finals is not None])
        places = np.empty((len(events), self._count), np.int64)
        for t, finals in enumerate(kept):
            if finals is not None:
                places[t, finals[0]] = offsets[t] + np.arange(len(finals[0]))
        return taken(rows, places[times, lanes])

    def _autoreset_starts(self, events: list[Step], lanes: Array, times: Array) -> list[bytes]:
        starts = [NOTHING] * len(lanes)
        if events[0].reset_infos is not None:
            infos = [(events[time].reset_infos or [])[lane] for lane, time in zip(lanes.tolist(), times.tolist())]
            starts = [packed_start(None, None, None, info)[0] for info in infos]
        self.lanes["start"][lanes] = starts  # the last one of a lane stays
        return starts

    def _fragments(
        self, events: list[Step], flags: tuple[Array, Array], lane: Array, time: Array, lead: Array, done: Array
    ) -> Array:
        """The fragments of rows that are ordered by lane, then by time."""
        if not len(lane):
            return np.zeros(0, wire.FRAGMENT)
        changes = lane[1:] != lane[:-1]
        begin = np.flatnonzero(np.concatenate([[True], changes | lead[1:]]))
        last = np.append(begin[1:], len(lane)) - 1
        starts, ends = lead[begin], done[last]
        utc, monotonic = np.array([(event.utc, event.monotonic) for event in events], np.int64).T
        started = np.flatnonzero(starts)
        first, final = time[begin[started]], time[last]
        begun = {name: self.lanes[name][lane[begin]] for name in ("utc", "monotonic", "episode", "seed")}
        begun["utc"][started], begun["monotonic"][started] = utc[first], monotonic[first]
        begun["seed"][started] = wire.NO_SEED
        order = np.argsort(first, kind="stable")  # ids in the order of the starts, then of the lanes
        begun["episode"][started[order]] = self.episodes + np.arange(len(started))
        self.episodes += len(started)

        fragments = np.zeros(len(begin), wire.FRAGMENT)
        fragments["lane"], fragments["episode"] = lane[begin], begun["episode"]
        fragments["steps"] = last + 1 - begin - starts
        fragments["first_step"] = np.where(starts, 0, self.lanes["steps"][lane[begin]])
        at = final[ends], lane[last[ends]]
        terminated, truncated = flags[0][at], flags[1][at]
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
        for name in ("utc", "monotonic", "episode", "seed"):
            self.lanes[name][lanes] = begun[name][latest]
        self.lanes["running"][lanes] = True
        self.lanes["steps"][lanes] = (fragments["first_step"] + fragments["steps"])[latest]
        return fragments


def _segment(fragments: Array, columns: Columns) -> Segment:
    return Segment(fragments, columns, fragments.nbytes + sum(map(size_of, columns.values())))


def _by_lane(batches: Sequence[Rows], chosen: Array | None, room: Callable[[int], Array]) -> Rows:
    """Rows of batches for all lanes, by lane, then by time; the chosen ones, None for all. room: as of in_order."""
    flat: Rows
    stacked = by_lane_already(batches)
    if stacked is None and _alike(batches):
        stacked = np.stack(batches, axis=1)
    if stacked is not None:
        flat = in_order(stacked, room).reshape(len(stacked) * stacked.shape[1], *stacked.shape[2:])
    else:
        flat = [row for lane in zip(*map(_packed, batches)) for row in lane]
    return flat if chosen is None else taken(flat, chosen)


def _by_time(flags: list[Array]) -> Array:
    """One flag a lane from each step, as an array of shape (times, lanes)."""
    stacked = by_lane_already(flags)
    return np.array(flags) if stacked is None else stacked.T


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
