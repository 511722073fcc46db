"""Encodes events of all lanes to fragments and columns that are ordered by lane."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gym_trace.envs.autoreset import SAME_STEP, after_steps
from gym_trace.format import wire
from gym_trace.format.columns import Path
from gym_trace.model.layout import Leaf
from gym_trace.model.values import Array
from gym_trace.model.vocabulary import Outcome
from gym_trace.recording.chunk_builder import PACKED_ABSENT, joined_rows
from gym_trace.recording.reset_record import NOTHING, packed_start
from gym_trace.recording.segment import Columns, Rows, Segment, size_of
from gym_trace.recording.vector.block import by_lane, inserted, taken
from gym_trace.recording.vector.events import (
    LANE,
    End,
    Event,
    EventBlock,
    Interrupted,
    OpenEpisodes,
    Reset,
    Step,
    last_observations,
)
from gym_trace.recording.vector.filters import ChosenRows


class LaneProgress(NamedTuple):
    """How far events are encoded, and the state of the lanes there."""

    block: EventBlock
    events: int  # of the block
    lanes: Array  # of dtype LANE
    starts: Array  # of dtype object, one for each lane: the row of the column "starts"
    episodes: int
    recent: tuple[Reset | Step | OpenEpisodes, ...]  # see last_observations


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

    def begun(self, block: EventBlock) -> LaneProgress:
        """The progress at the start of the first block."""
        return LaneProgress(block, 0, np.zeros(self.count, LANE), np.full(self.count, NOTHING, object), 0, ())

    def encoded(
        self, progress: LaneProgress, blocks: list[EventBlock], partly: bool
    ) -> tuple[LaneProgress, list[Segment]]:
        """What was added to blocks since progress, and the progress after it. partly: including the last block."""
        encoding = _Encoding(self, progress)
        segments: list[Segment] = []
        done = progress.events
        for block in blocks:
            if block is not progress.block:
                done = 0
            if partly or block is not blocks[-1]:
                events = block.events[done:]
                segments += encoding.segments(events, block.columns.copy())  # which its owner may add to meanwhile
                done += len(events)
        if blocks == [progress.block] and done == progress.events:
            return progress, []
        return encoding.progress(blocks[-1], done), segments

    def open_run(self, progress: LaneProgress) -> OpenEpisodes:
        """What another recorder needs to continue the open episodes."""
        known = progress.lanes.copy()
        known["deferred"] = known["open"] & ~known["skipped"]
        lanes = np.flatnonzero(known["deferred"])
        known["episode"][lanes] = np.arange(len(lanes))
        return OpenEpisodes(known, progress.starts, lanes, last_observations(progress.recent, lanes, self.count))


class _Encoding:
    """The encoding of some events, on a copy of the state that they begin with."""

    def __init__(self, encoder: LaneEncoder, progress: LaneProgress):
        self._encoder, self._count, self._mode = encoder, encoder.count, encoder.mode
        self.lanes, self.starts = progress.lanes.copy(), progress.starts.copy()
        self.episodes, self.recent = progress.episodes, progress.recent

    def progress(self, block: EventBlock, events: int) -> LaneProgress:
        """The progress after that many events of a block."""
        return LaneProgress(block, events, self.lanes, self.starts, self.episodes, self.recent)

    def segments(self, events: list[Event], columns: dict[Path, Array]) -> list[Segment]:
        """The segments of consecutive events of a block. columns: of the block."""
        segments: list[Segment] = []
        steps: list[Step] = []
        for event in [*events, None]:
            if isinstance(event, Step):
                steps.append(event)
                continue
            if steps:
                segments += [
                    self._continued(),
                    self._steps(steps, {path: rows[:, _times(steps)] for path, rows in columns.items()}),
                ]
                self.recent = (steps[-1],)
                steps = []
            if isinstance(event, Reset):
                segments += self._reset(event)
                self.recent = (event,) if len(event.lanes) == self._count else (*self.recent, event)
            elif isinstance(event, OpenEpisodes):
                self.lanes, self.starts, self.episodes = event.known.copy(), event.starts.copy(), len(event.lanes)
                self.recent = (event,) if len(event.lanes) else ()
            elif event is not None:
                segments.append(self._end(event))
        return [segment for segment in segments if len(segment.fragments)]

    # -- resets and ends ----------------------------------------------------------------------------------------------

    def _reset(self, event: Reset) -> list[Segment]:
        cut = self._ends(event.lanes, Outcome.CUT, event.utc, event.monotonic)
        new = np.zeros(len(event.lanes), LANE)
        new["open"], new["utc"], new["monotonic"] = True, event.utc, event.monotonic
        new["seed"] = [start.seed for start in event.starts]
        self.starts[event.lanes] = [start.kept for start in event.starts]
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

    def _continued(self) -> Segment:
        """The starts of episodes that another recorder began, now that a step continues them."""
        lanes = np.flatnonzero(self.lanes["deferred"])
        self.lanes["deferred"] = False
        if not len(lanes):
            return _segment(np.zeros(0, wire.FRAGMENT), {})
        running = lanes[self.lanes["running"][lanes]]
        return self._starts(lanes, last_observations(self.recent, running, self._count))

    def _starts(self, lanes: Array, observations: list[Rows]) -> Segment:
        """The starts of episodes. observations: of those lanes whose run of steps begins with them."""
        known, fragments = self.lanes[lanes], np.zeros(len(lanes), wire.FRAGMENT)
        fragments["lane"], fragments["episode"], fragments["first_step"] = lanes, known["episode"], known["steps"]
        fragments["flags"] = wire.STARTS | wire.LEADS * known["running"].astype(np.uint32)
        fragments["seed"], fragments["start_time"] = known["seed"], known["utc"]
        fragments["clock_offset"] = known["utc"] - known["monotonic"]
        columns: Columns = {("starts",): self.starts[lanes].tolist()}
        if known["running"].any():
            columns.update(zip((leaf.path for leaf in self._encoder.observation_leaves), observations))
        return _segment(fragments, columns)

    def _end(self, event: End | Interrupted) -> Segment:
        outcome = Outcome.CUT if isinstance(event, Interrupted) else event.outcome
        fragments = self._ends(np.arange(self._count), outcome, event.utc, event.monotonic)
        self.lanes["open"] = self.lanes["pending"] = self.lanes["deferred"] = False
        return _segment(fragments, {})

    def _ends(self, lanes: Array, outcome: int, utc: int, monotonic: int) -> Array:
        """Fragments without steps that end the open episodes of lanes."""
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
        """One segment of consecutive steps. All arrays of rows are ordered by lane, then by time.

        rows: of the columns of the block, those of these steps, of shape (lanes, times, ...).
        """
        times, encoder = len(events), self._encoder
        said = rows["terminations",].T * np.uint8(wire.TERMINATED)
        said |= rows["truncations",].T * np.uint8(wire.TRUNCATED)
        ended = said != 0
        valid, leads = self._which(ended)
        if events[0].kept is not None:
            same_step, filtered = self._mode == SAME_STEP, encoder.filtered
            return self._chosen(events, rows, ChosenRows(events, valid, leads, ended, same_step, filtered))
        places = None if valid.all() else np.flatnonzero(valid.T)  # lane * times + time of each row; None: of all
        said *= ended & ~leads
        lead = _in_place(leads, places)
        observations = [
            by_lane([event.observations[i] for event in events], places, rows.get(leaf.path))
            for i, leaf in enumerate(encoder.observation_leaves)
        ]
        steps = _without(places, lead)
        if self._mode == SAME_STEP and said.any():
            at = np.flatnonzero(_in_place(said, places))
            places = np.arange(len(lead)) if places is None else places
            ends = np.divmod(places[at], times)
            observations = [
                inserted(column, at, self._finals(events, i, *ends)) for i, column in enumerate(observations)
            ]
            places, lead = np.insert(places, at, places[at]), np.insert(lead, at, False)
            lead[at + np.arange(len(at)) + 1] = True  # the first observations of new episodes follow the last ones
        columns: Columns = {}
        begun = np.flatnonzero(lead)
        if len(begun):
            columns["starts",] = self._autoreset_starts(events, *_lane_and_time(begun, places, times))
        columns.update(zip((leaf.path for leaf in encoder.observation_leaves), observations))
        if steps is None or len(steps):
            self._add_step_columns(columns, events, rows, steps)
        return _segment(self._fragments(events, said, places, lead), columns)

    def _chosen(self, events: list[Step], rows: dict[Path, Array], chosen: ChosenRows) -> Segment:
        """The segment of the steps that filters keep."""
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
        for i, leaf in enumerate(self._encoder.observation_leaves):
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
        """Adds the columns of steps: all but observations. steps: places, by lane, then by time; None for all."""
        for i, leaf in enumerate(self._encoder.action_leaves):
            columns[leaf.path] = by_lane([event.actions[i] for event in events], steps, rows.get(leaf.path))
        columns["rewards",] = by_lane([event.rewards for event in events], steps, rows.get(("rewards",)))
        if events[0].infos is not None:
            columns["infos",] = by_lane([event.infos or [] for event in events], steps)
        for name in dict.fromkeys(name for event in events for name in event.notes):
            missing = [PACKED_ABSENT] * self._count
            columns["annotations", name] = by_lane([event.notes.get(name, missing) for event in events], steps)

    def _which(self, ended: Array) -> tuple[Array, Array]:
        """Of each (time, lane): whether its state is known, and whether it is a reset."""
        lanes = self.lanes
        valid, leads, open_, pending = after_steps(self._mode, lanes["open"], lanes["pending"], ended)
        ended &= valid
        lanes["open"], lanes["pending"] = open_, pending
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
        self.starts[lanes] = starts  # of several in one lane the last one counts
        return starts

    def _fragments(self, events: list[Step], said: Array, places: Array | None, lead: Array) -> Array:
        """The fragments of rows that are ordered by lane, then by time.

        Args:
            said: of each (time, lane), the flags of an episode that ends there.
            places: lane * times + time of each row; None for all there are.
            lead: of each row, whether it is the first observation of an episode.
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
        said = said[final, lane] * ~lead[after - 1]
        ends = said != 0

        goes_on, started = np.flatnonzero(~starts), np.flatnonzero(starts)
        of_start = {"utc": utc[first], "monotonic": monotonic[first], "episode": np.empty(len(begin), np.int64)}
        for name, values in of_start.items():
            values[goes_on] = self.lanes[name][lane[goes_on]]
        narrow = first[started].astype(np.min_scalar_type(times))  # for which NumPy has a faster way to sort
        in_turn = started[np.argsort(narrow, kind="stable")]  # ids in the order of the starts, then of the lanes
        of_start["episode"][in_turn] = self.episodes + np.arange(len(started))
        self.episodes += len(started)

        fragments = np.zeros(len(begin), wire.FRAGMENT)
        fragments["lane"], fragments["episode"] = lane, of_start["episode"]
        fragments["steps"] = after - begin - starts
        fragments["first_step"][goes_on] = self.lanes["steps"][lane[goes_on]]
        fragments["start_time"] = of_start["utc"] * starts
        fragments["clock_offset"] = (of_start["utc"] - of_start["monotonic"]) * starts
        fragments["seed"] = wire.NO_SEED * starts
        fragments["flags"] = (wire.STARTS | wire.LEADS) * starts + (wire.STOPS | wire.ENDS) * ends + said
        fragments["outcome"] = np.where(said & wire.TERMINATED, Outcome.TERMINATED, Outcome.TRUNCATED * ends)
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


def _times(events: list[Step]) -> slice:
    return slice(events[0].time, events[-1].time + 1)


def _in_place(flags: Array, places: Array | None) -> Array:
    """Flags, a row a time, in the order of rows."""
    by_lane = flags.T.reshape(-1)
    return by_lane if places is None else by_lane[places]


def _without(places: Array | None, lead: Array) -> Array | None:
    """The places of the rows that are steps; None for all there are."""
    if not lead.any():
        return places
    return np.flatnonzero(~lead) if places is None else places[~lead]


def _lane_and_time(rows: Array, places: Array | None, times: int) -> tuple[Array, Array]:
    return np.divmod(rows if places is None else places[rows], times)


def _segment(fragments: Array, columns: Columns) -> Segment:
    return Segment(fragments, columns, fragments.nbytes + sum(map(size_of, columns.values())))
