"""Encode events of all lanes as fragments and columns, ordered by lane."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import numpy as np

from gym_trace.format import wire
from gym_trace.format.columns import Path
from gym_trace.model.values import Array
from gym_trace.model.vocabulary import Outcome
from gym_trace.ring.chunk_builder import PACKED_ABSENT, joined_rows
from gym_trace.ring.lanes.autoreset import SAME_STEP, after_steps
from gym_trace.ring.lanes.choice import ChosenRows
from gym_trace.ring.lanes.entries import NOTHING, start_with_info
from gym_trace.ring.lanes.events import (
    LANE,
    End,
    Event,
    Interrupted,
    LaneState,
    Observed,
    Reset,
    Step,
    last_observations,
)
from gym_trace.ring.lanes.layout import LaneLayout
from gym_trace.ring.lanes.order import by_lane, column_by_lane, inserted, taken
from gym_trace.ring.segment import Columns, Rows, Segment, size_of


def encoded(
    layout: LaneLayout, state: LaneState, events: list[Event], columns: dict[Path, Array]
) -> tuple[list[Segment], LaneState]:
    """Encode consecutive events; return their segments, and the state of the lanes after them.

    Args:
        state: state of the lanes before the events.
        columns: columns of the slab, (lanes, times, ...): flags, and all columns that hold the rows of all steps.
    """
    encoding = _Encoding(layout, state)
    segments = encoding.segments(events, columns)
    return segments, encoding.state()


def no_lanes(count: int) -> LaneState:
    """Return the initial state, with all lanes unknown."""
    return LaneState(np.zeros(count, LANE), np.full(count, NOTHING, object), 0, ())


def left_open(state: LaneState) -> LaneState:
    """Return the initial state of another recorder that continues the open episodes."""
    known = state.lanes.copy()
    known["deferred"] = known["open"] & ~known["skipped"]
    lanes = np.flatnonzero(known["deferred"])
    known["episode"][lanes] = np.arange(len(lanes))
    recent = (Observed(lanes, state.observed(lanes)),) if len(lanes) else ()
    return LaneState(known, state.starts, len(lanes), recent)


class _Encoding:
    """Encodes events, on a copy of the initial state."""

    def __init__(self, layout: LaneLayout, state: LaneState):
        self._layout, self._count, self._mode = layout, layout.lanes, layout.mode
        self.lanes, self.starts = state.lanes.copy(), state.starts.copy()
        self.episodes, self.recent = state.episodes, state.recent

    def state(self) -> LaneState:
        """Return the state after the events encoded so far."""
        return LaneState(self.lanes, self.starts, self.episodes, self.recent)

    def segments(self, events: list[Event], columns: dict[Path, Array]) -> list[Segment]:
        """Encode consecutive events of a slab. columns: of the slab."""
        segments: list[Segment] = []
        time = 0
        for kind, group in groupby(events, type):
            alike: list[Any] = list(group)
            if kind is Step:
                begin, time = time, time + len(alike)
                rows = {path: column[:, begin:time] for path, column in columns.items()}
                segments += [self._continued(), self._steps(alike, rows)]
                self.recent = (self._last(alike[-1], rows),)
                continue
            for event in alike:
                if kind is Reset:
                    segments += self._reset(event)
                    self.recent = (event,) if len(event.lanes) == self._count else (*self.recent, event)
                else:
                    segments.append(self._end(event))
        return [segment for segment in segments if len(segment.fragments)]

    def _last(self, step: Step, rows: dict[Path, Array]) -> Step | Observed:
        """Return the last of consecutive steps, for LaneState.recent. rows: of these steps."""
        if not step.is_usual:
            return step
        leaves = self._layout.observation_leaves
        return Observed(np.arange(self._count), [rows[leaf.path][:, -1] for leaf in leaves])

    # -- resets and ends ----------------------------------------------------------------------------------------------

    def _reset(self, event: Reset) -> list[Segment]:
        cut = self._ends(event.lanes, Outcome.CUT, event.utc, event.monotonic)
        new = np.zeros(len(event.lanes), LANE)
        new["open"], new["utc"], new["monotonic"] = True, event.utc, event.monotonic
        new["seed"] = event.seeds
        self.starts[event.lanes] = event.starts
        if event.ids is None:
            new["episode"] = self.episodes + np.arange(len(new))
            self.episodes += len(new)
        else:
            new["episode"], new["skipped"] = event.ids, event.ids < 0
        new["running"] = not self._layout.filtered
        self.lanes[event.lanes] = new
        places = np.flatnonzero(~new["skipped"])
        starts = self._starts(event.lanes[places], [taken(rows, places) for rows in event.observations])
        return [_segment(cut, {}), starts]

    def _continued(self) -> Segment:
        """Return the starts of deferred episodes, because a step continues them now."""
        lanes = np.flatnonzero(self.lanes["deferred"])
        self.lanes["deferred"] = False
        if not len(lanes):
            return _segment(np.zeros(0, wire.FRAGMENT), {})
        running = lanes[self.lanes["running"][lanes]]
        return self._starts(lanes, last_observations(self.recent, running, self._count))

    def _starts(self, lanes: Array, observations: list[Rows]) -> Segment:
        """Return the starts of episodes. observations: of the lanes whose run of steps starts here."""
        known, fragments = self.lanes[lanes], np.zeros(len(lanes), wire.FRAGMENT)
        fragments["lane"], fragments["episode"], fragments["first_step"] = lanes, known["episode"], known["steps"]
        fragments["flags"] = wire.STARTS | wire.LEADS * known["running"].astype(np.uint32)
        fragments["seed"], fragments["start_time"] = known["seed"], known["utc"]
        fragments["clock_offset"] = known["utc"] - known["monotonic"]
        columns: Columns = {("starts",): self.starts[lanes].tolist()}
        if known["running"].any():
            columns.update(zip((leaf.path for leaf in self._layout.observation_leaves), observations))
        return _segment(fragments, columns)

    def _end(self, event: End | Interrupted) -> Segment:
        outcome = Outcome.CUT if isinstance(event, Interrupted) else event.outcome
        fragments = self._ends(np.arange(self._count), outcome, event.utc, event.monotonic)
        self.lanes["open"] = self.lanes["pending"] = self.lanes["deferred"] = False
        return _segment(fragments, {})

    def _ends(self, lanes: Array, outcome: int, utc: int, monotonic: int) -> Array:
        """Return fragments without steps that end the open episodes of lanes."""
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

    def _steps(self, events: list[Step], rows: dict[Path, Array]) -> Segment:
        """Encode consecutive steps as one segment. All arrays of rows are ordered by lane, then by time.

        Args:
            rows: rows of these steps in the columns of the slab, (lanes, times, ...).
        """
        times, layout = len(events), self._layout
        flags = rows["terminations",].T * np.uint8(wire.TERMINATED)
        flags |= rows["truncations",].T * np.uint8(wire.TRUNCATED)
        ended = flags != 0
        valid, leads = self._which(ended)
        if events[0].kept is not None:
            same_step, filtered = self._mode == SAME_STEP, layout.filtered
            return self._chosen(events, rows, ChosenRows(events, valid, leads, ended, same_step, filtered))
        places = None if valid.all() else np.flatnonzero(valid.T)  # lane * times + time of each row; None: all
        flags *= ended & ~leads
        lead = _in_place(leads, places)
        observations = [
            _column(rows, leaf.path, places, (event.observations[i] for event in events))
            for i, leaf in enumerate(layout.observation_leaves)
        ]
        steps = _without(places, lead)
        if self._mode == SAME_STEP and flags.any():
            at = np.flatnonzero(_in_place(flags, places))
            places = np.arange(len(lead)) if places is None else places
            ends = np.divmod(places[at], times)
            observations = [
                inserted(column, at, self._finals(events, i, *ends)) for i, column in enumerate(observations)
            ]
            places, lead = np.insert(places, at, places[at]), np.insert(lead, at, False)
            lead[at + np.arange(len(at)) + 1] = True  # the next observation is the first of a new episode
        columns: Columns = {}
        begun = np.flatnonzero(lead)
        if len(begun):
            columns["starts",] = self._autoreset_starts(events, *_lane_and_time(begun, places, times))
        columns.update(zip((leaf.path for leaf in layout.observation_leaves), observations))
        if steps is None or len(steps):
            self._add_step_columns(columns, events, rows, steps)
        return _segment(self._fragments(events, flags, places, lead), columns)

    def _chosen(self, events: list[Step], rows: dict[Path, Array], chosen: ChosenRows) -> Segment:
        """Encode the steps that filters keep."""
        names, times = LANE.names or (), len(events)
        for lane, state in enumerate(self.lanes.tolist()):
            known = dict(zip(names, state))
            chosen.add(lane, known)
            self.lanes[lane] = tuple(known.values())
        columns: Columns = {}
        if chosen.starts:
            columns["starts",] = self._autoreset_starts(events, *np.array(chosen.starts).T)
        first = last_observations(self.recent, np.arange(self._count), self._count) or events[0].observations
        places = np.array([lane * (times + 1) + time + 1 for lane, time in chosen.observations], np.int64)
        for i, leaf in enumerate(self._layout.observation_leaves):
            column = by_lane([first[i], *(event.observations[i] for event in events)], places)
            if chosen.finals:
                at, lanes, ends = np.array(chosen.finals).T
                column = inserted(column, at, self._finals(events, i, lanes, ends))
            if len(column):
                columns[leaf.path] = column
        if chosen.steps:
            steps = np.array([lane * times + time for lane, time in chosen.steps])
            self._add_step_columns(columns, events, rows, steps)
        return _segment(chosen.fragments(), columns)

    def _add_step_columns(
        self, columns: Columns, events: list[Step], rows: dict[Path, Array], steps: Array | None
    ) -> None:
        """Add the columns of steps, except observations. steps: indices, by lane, then by time; None: all."""
        for i, leaf in enumerate(self._layout.action_leaves):
            columns[leaf.path] = _column(rows, leaf.path, steps, (event.actions[i] for event in events))
        columns["rewards",] = _column(rows, ("rewards",), steps, (event.rewards for event in events))
        if events[0].infos is not None:
            columns["infos",] = by_lane([event.infos or [] for event in events], steps)
        for name in dict.fromkeys(name for event in events for name in event.notes):
            missing = [PACKED_ABSENT] * self._count
            columns["annotations", name] = by_lane([event.notes.get(name, missing) for event in events], steps)

    def _which(self, ended: Array) -> tuple[Array, Array]:
        """Return two arrays, (time, lane): True if the state is known, and True if the step is a reset."""
        lanes = self.lanes
        valid, leads, open_, pending = after_steps(self._mode, lanes["open"], lanes["pending"], ended)
        ended &= valid
        lanes["open"], lanes["pending"] = open_, pending
        return valid, leads

    def _finals(self, events: list[Step], leaf: int, lanes: Array, times: Array) -> Rows:
        """Return the last observations of the episodes that ended in these lanes at these times."""
        kept = [event.finals for event in events]
        offsets = np.cumsum([0] + [0 if finals is None else len(finals[0]) for finals in kept])
        rows = joined_rows([finals[1][leaf] for finals in kept if finals is not None])
        places = np.empty((len(events), self._count), np.int64)
        for t, finals in enumerate(kept):
            if finals is not None:
                places[t, finals[0]] = offsets[t] + np.arange(len(finals[0]))
        return taken(rows, places[times, lanes])

    def _autoreset_starts(self, events: list[Step], lanes: Array, times: Array) -> list[bytes]:
        if events[0].reset_infos is None:
            self.starts[lanes] = NOTHING
            return [NOTHING] * len(lanes)
        infos = [(events[time].reset_infos or [])[lane] for lane, time in zip(lanes.tolist(), times.tolist())]
        starts = [start_with_info(info) for info in infos]
        self.starts[lanes] = starts  # the last one of a lane wins
        return starts

    def _fragments(self, events: list[Step], flags: Array, places: Array | None, lead: Array) -> Array:
        """Return the fragments of rows that are ordered by lane, then by time.

        Args:
            flags: (time, lane), the end flags of episodes.
            places: lane * times + time of each row; None: all rows.
            lead: True for rows that are the first observation of an episode.
        """
        times, opens = len(events), lead.copy()
        of_lanes = np.arange(self._count) * times
        firsts = of_lanes if places is None else np.searchsorted(places, of_lanes)
        opens[firsts[firsts < len(lead)]] = True
        begin = np.flatnonzero(opens)
        if not len(begin):
            return np.zeros(0, wire.FRAGMENT)
        after = np.append(begin[1:], len(lead))
        starts = lead[begin]
        lane, first = _lane_and_time(begin, places, times)
        _, final = _lane_and_time(after - 1, places, times)
        utc, monotonic = np.array([event.utc for event in events]), np.array([event.monotonic for event in events])
        flags = flags[final, lane] * ~lead[after - 1]
        ends = flags != 0

        goes_on, started = np.flatnonzero(~starts), np.flatnonzero(starts)
        of_start = {"utc": utc[first], "monotonic": monotonic[first], "episode": np.empty(len(begin), np.int64)}
        for name, values in of_start.items():
            values[goes_on] = self.lanes[name][lane[goes_on]]
        narrow = first[started].astype(np.min_scalar_type(times))  # NumPy sorts narrow integers faster
        in_turn = started[np.argsort(narrow, kind="stable")]  # ids ascend by start time, then by lane
        of_start["episode"][in_turn] = self.episodes + np.arange(len(started))
        self.episodes += len(started)

        fragments = np.zeros(len(begin), wire.FRAGMENT)
        fragments["lane"], fragments["episode"] = lane, of_start["episode"]
        fragments["steps"] = after - begin - starts
        fragments["first_step"][goes_on] = self.lanes["steps"][lane[goes_on]]
        fragments["start_time"] = of_start["utc"] * starts
        fragments["clock_offset"] = (of_start["utc"] - of_start["monotonic"]) * starts
        fragments["seed"] = wire.NO_SEED * starts
        fragments["flags"] = (wire.STARTS | wire.LEADS) * starts + (wire.STOPS | wire.ENDS) * ends + flags
        fragments["outcome"] = np.where(flags & wire.TERMINATED, Outcome.TERMINATED, Outcome.TRUNCATED * ends)
        duration = (monotonic[final] - of_start["monotonic"]) * ends
        fragments["duration"] = duration
        fragments["clock_drift"] = (utc[final] - of_start["utc"]) * ends - duration

        latest = np.append(lane[1:] != lane[:-1], True)
        lanes = lane[latest]
        for name, values in of_start.items():
            self.lanes[name][lanes] = values[latest]
        self.lanes["seed"][lane[started]] = wire.NO_SEED
        self.lanes["running"][lanes] = True
        self.lanes["steps"][lanes] = (fragments["first_step"] + fragments["steps"])[latest]
        return fragments


def _column(rows: dict[Path, Array], path: Path, chosen: Array | None, batches: Iterable[Rows]) -> Rows:
    """Return rows of a column by lane, then by time. batches: used if rows lacks the column."""
    column = rows.get(path)
    return by_lane(list(batches), chosen) if column is None else column_by_lane(column, chosen)


def _in_place(flags: Array, places: Array | None) -> Array:
    """Reorder flags, (time, lane), to the order of rows."""
    by_lane = flags.T.reshape(-1)
    return by_lane if places is None else by_lane[places]


def _without(places: Array | None, lead: Array) -> Array | None:
    """Return the positions of the rows that are steps; None: all."""
    if not lead.any():
        return places
    return np.flatnonzero(~lead) if places is None else places[~lead]


def _lane_and_time(rows: Array, places: Array | None, times: int) -> tuple[Array, Array]:
    return np.divmod(rows if places is None else places[rows], times)


def _segment(fragments: Array, columns: Columns) -> Segment:
    return Segment(fragments, columns, fragments.nbytes + sum(map(size_of, columns.values())))
