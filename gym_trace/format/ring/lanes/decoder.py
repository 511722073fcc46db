"""Decode slabs of lanes to segments, ordered by lane, and to pending actions. Writers and readers both do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from gym_trace.data.packing import unpack
from gym_trace.data.values import Array
from gym_trace.data.vocabulary import Outcome, annotation_path
from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.format.ring.chunk_builder import PACKED_ABSENT, joined_rows
from gym_trace.format.ring.lanes.autoreset import MODES, SAME_STEP, after_steps
from gym_trace.format.ring.lanes.contents import Except, LaneEvents, Steps, by_lane, inserted
from gym_trace.format.ring.lanes.entries import LANE, NOTHING, End, LaneState, Observed, Reset, start_with_info, taken
from gym_trace.format.ring.lanes.layout import REWARDS, TERMINATIONS, TRUNCATIONS, LaneLayout, lane_layout
from gym_trace.format.ring.log import STEP, headers, places
from gym_trace.format.ring.memory import MOST_SLAB_BYTES
from gym_trace.format.ring.pending import Pending
from gym_trace.format.ring.segment import Columns, Rows, Segment, size_of


class LaneDecoder:
    """Decodes slabs of lanes for readers.

    Args:
        layout: layout of the slabs in the ring file (docs/FORMAT.md, section 8).

    Raises CorruptTrace if the layout is malformed.
    """

    def __init__(self, layout: dict[str, Any]):
        with _malformed_is_corrupt("layout"):
            self._layout = lane_layout(layout, MOST_SLAB_BYTES)

    def complete(self, sequence: int, slab: bytes | memoryview) -> tuple[int, int]:
        """Return the number of complete steps in a slab, and of complete entries in its log."""
        log = headers(memoryview(slab), places(slab, self._layout.log, len(slab), sequence))
        return int((log["kind"] == STEP).sum()), len(log)

    def decode(
        self, sequence: int, slab: bytes | memoryview, most: tuple[int, int] | None = None
    ) -> tuple[list[Segment], list[Pending]]:
        """Decode a slab; return its segments, and the pending action of each open episode.

        Args:
            most: numbers of steps and entries to decode of a slab that is still written; pending actions are omitted
                then.

        Raises CorruptTrace.
        """
        with _malformed_is_corrupt("slab"):
            contents = LaneEvents(self._layout, sequence, memoryview(slab), None if most is None else most[1])
            segments, state = decoded(self._layout, contents, contents.state())
            pending = [] if most else pending_of(contents.asked, state.lanes, self._layout.numbers)
            return [segment() for segment in segments], pending


@contextlib.contextmanager
def _malformed_is_corrupt(what: str) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CorruptTrace(f"malformed ring {what}: {error!r:.100}") from error


def pending_of(asked: list[Rows] | None, lanes: Array, numbers: Array | None) -> list[Pending]:
    """Return the pending actions of lanes with an open episode.

    Args:
        lanes: state of the lanes.
        numbers: see LaneLayout.
    """
    if asked is None:
        return []
    steps = lanes["open"] & ~lanes["skipped"] & ~lanes["pending"]
    found = np.flatnonzero(steps)
    return [
        Pending(int(lanes["episode"][lane]), number, int(lanes["steps"][lane]), [_value(rows, lane) for rows in asked])
        for lane, number in zip(found.tolist(), (found if numbers is None else numbers[found]).tolist())
    ]


def _value(rows: Rows, lane: int) -> Any:
    return np.array(rows[lane])[()] if isinstance(rows, np.ndarray) else unpack(rows[lane])


LazySegment = Callable[[], Segment]


def decoded(layout: LaneLayout, contents: LaneEvents, state: LaneState) -> tuple[list[LazySegment], LaneState]:
    """Return the segments of a slab, and the state of the lanes after it.

    The fragments are made at once; a function makes each segment, with its columns, which takes most of the time.
    Any thread may call it while the slab is unchanged. Arrays may be views of the slab.

    Args:
        state: state of the lanes at the start of the slab.
    """
    decoding = _Decoding(layout, state)
    segments = [segment for event in contents.events for segment in decoding.segments(event)]
    found = [segment for fragments, segment in segments if len(fragments)]
    if layout.numbers is not None:
        found = [partial(_numbered, segment, layout.numbers) for segment in found]
    return found, decoding.state()


def _numbered(segment: LazySegment, numbers: Array) -> Segment:
    """Return a segment with the lanes' numbers in the environment."""
    made = segment()
    fragments = made.fragments.copy()
    fragments["lane"] = numbers[fragments["lane"]]
    return made._replace(fragments=fragments)


_Piece = tuple[Array, LazySegment]  # fragments, and the segment that they are in


class _Decoding:
    """Turns events into segments, on a copy of the initial state."""

    def __init__(self, layout: LaneLayout, state: LaneState):
        self._layout, self._count, self._mode = layout, layout.lanes, layout.mode
        self._all = np.arange(layout.lanes)
        self.lanes, self.episodes, self.recent = state.lanes.copy(), state.episodes, state.recent

    def state(self) -> LaneState:
        """Return the state after the events so far."""
        return LaneState(self.lanes, self.episodes, self.recent)

    def segments(self, event: Reset | End | Steps) -> list[_Piece]:
        if isinstance(event, End):
            return [self._end(event)]
        if isinstance(event, Reset):
            segments = self._reset(event)
            observed = Observed(event.lanes, event.observations)
            self.recent = (observed,) if len(event.lanes) == self._count else (*self.recent, observed)
        else:
            segments = [self._steps(event)]
            last = [event.batch(leaf.path, len(event.utc) - 1) for leaf in self._layout.observation_leaves]
            self.recent = (Observed(self._all, last),)
        return segments

    # -- resets and ends ----------------------------------------------------------------------------------------------

    def _reset(self, event: Reset) -> list[_Piece]:
        cut = self._ends(event.lanes, Outcome.CUT, event.utc, event.monotonic)
        new = np.zeros(len(event.lanes), LANE)
        new["open"], new["utc"], new["monotonic"] = True, event.utc, event.monotonic
        new["seed"] = event.seeds
        if event.ids is None:
            new["episode"] = self.episodes + np.arange(len(new))
            self.episodes += len(new)
        else:
            new["episode"], new["skipped"] = event.ids, event.ids < 0
        new["running"] = not self._layout.filtered
        self.lanes[event.lanes] = new
        places = np.flatnonzero(~new["skipped"])
        columns: Columns = {("starts",): [event.starts[place] for place in places.tolist()]}
        if len(places) and not self._layout.filtered:
            rows = [taken(rows, places) for rows in event.observations]
            columns.update(zip((leaf.path for leaf in self._layout.observation_leaves), rows))
        return [_piece(cut, {}), _piece(self._begun(event.lanes[places]), columns)]

    def _begun(self, lanes: Array) -> Array:
        """Return the fragments of episodes that a reset begins."""
        known, fragments = self.lanes[lanes], np.zeros(len(lanes), wire.FRAGMENT)
        fragments["lane"], fragments["episode"], fragments["first_step"] = lanes, known["episode"], known["steps"]
        fragments["flags"] = wire.STARTS | wire.LEADS * known["running"].astype(np.uint32)
        fragments["seed"], fragments["start_time"] = known["seed"], known["utc"]
        fragments["clock_offset"] = known["utc"] - known["monotonic"]
        return fragments

    def _end(self, event: End) -> _Piece:
        outcome = Outcome.CUT if event.outcome is None else event.outcome
        fragments = self._ends(self._all, outcome, event.utc, event.monotonic)
        self.lanes["open"] = self.lanes["pending"] = False
        return _piece(fragments, {})

    def _ends(self, lanes: Array, outcome: int, utc: int, monotonic: int) -> Array:
        """Return fragments without steps that end the open episodes of lanes."""
        known = self.lanes[lanes]
        begun = known["open"] & ~known["skipped"]
        lanes, known = lanes[begun], known[begun]
        fragments = np.zeros(len(lanes), wire.FRAGMENT)
        fragments["lane"], fragments["episode"], fragments["first_step"] = lanes, known["episode"], known["steps"]
        fragments["flags"], fragments["outcome"] = wire.STOPS | wire.ENDS, outcome
        fragments["duration"] = monotonic - known["monotonic"]
        fragments["clock_drift"] = utc - known["utc"] - fragments["duration"]
        return fragments

    # -- steps --------------------------------------------------------------------------------------------------------

    def _steps(self, event: Steps) -> _Piece:
        """Return consecutive steps as one segment. All arrays of rows are ordered by lane, then by time."""
        usual = self._usual_fragments(event)
        if usual is not None:
            return self._rows_later(event, *usual)
        times = len(event.utc)
        flags = event.columns[TERMINATIONS].T * np.uint8(wire.TERMINATED)
        flags |= event.columns[TRUNCATIONS].T * np.uint8(wire.TRUNCATED)
        ended = flags != 0
        valid, leads, open_, pending = after_steps(self._mode, self.lanes["open"], self.lanes["pending"], ended)
        ended &= valid
        self.lanes["open"], self.lanes["pending"] = open_, pending
        if event.more[0].kept is not None:
            return self._kept_steps(event, _KeptRows(event, valid, leads, flags, self._mode, self._layout.filtered))
        places = None if valid.all() else np.flatnonzero(valid.T)  # lane * times + time of each row; None: all
        flags *= ended & ~leads
        lead = _in_place(leads, places)
        has_finals = self._mode == SAME_STEP and bool(flags.any())
        if places is None and not has_finals:
            return self._rows_later(event, self._fragments(event, flags, places, lead), np.flatnonzero(lead))
        rows: Array | Except = Except(_NONE, len(lead)) if places is None else places
        observations = [event.rows(leaf.path, rows) for leaf in self._layout.observation_leaves]
        steps = _without(places, lead)
        if has_finals:
            at = np.flatnonzero(_in_place(flags, places))
            places = np.arange(len(lead)) if places is None else places
            ends = np.divmod(places[at], times)
            observations = [
                inserted(column, at, self._finals(event, i, *ends)) for i, column in enumerate(observations)
            ]
            places, lead = np.insert(places, at, places[at]), np.insert(lead, at, False)
            lead[at + np.arange(len(at)) + 1] = True  # the next observation is the first of a new episode
        columns: Columns = {}
        begun = np.flatnonzero(lead)
        if len(begun):
            columns["starts",] = self._autoreset_starts(event, *_lane_and_time(begun, places, times))
        columns.update(zip((leaf.path for leaf in self._layout.observation_leaves), observations))
        if isinstance(steps, Except) or len(steps):
            self._add_step_columns(columns, event, steps)
        return _piece(self._fragments(event, flags, places, lead), columns)

    def _usual_fragments(self, event: Steps) -> tuple[Array, Array] | None:
        """Return the fragments of usual steps, and the rows that lead episodes; None if the slow path must do it."""
        find, more = event.passes.fragments, event.more[0]
        if find is None or more.kept is not None:
            return None
        flags = (np.ascontiguousarray(event.columns[path].T) for path in (TERMINATIONS, TRUNCATIONS))
        clocks = (np.ascontiguousarray(clock) for clock in (event.utc, event.monotonic))
        found = find(self.lanes, *flags, *clocks, MODES.index(self._mode), self.episodes)
        if found is None:
            return None
        fragments, leads, self.episodes = found
        return np.frombuffer(fragments, wire.FRAGMENT), np.frombuffer(leads, np.int64)

    def _rows_later(self, event: Steps, fragments: Array, leads: Array) -> _Piece:
        """Return the segment of steps that all belong to episodes. leads: rows that are their first observations."""
        times, columns = len(event.utc), Columns()
        everything, steps = (Except(rows, self._count * times) for rows in (_NONE, leads))
        if len(leads):
            columns["starts",] = self._autoreset_starts(event, *np.divmod(leads, times))

        def segment() -> Segment:
            for leaf in self._layout.observation_leaves:
                columns[leaf.path] = event.rows(leaf.path, everything)
            if steps.kept:
                self._add_step_columns(columns, event, steps)
            return _segment(fragments, columns)

        return fragments, segment

    def _kept_steps(self, event: Steps, kept: _KeptRows) -> _Piece:
        """Return the steps that filters keep."""
        names, times = LANE.names or (), len(event.utc)
        for lane, state in enumerate(self.lanes.tolist()):
            known = dict(zip(names, state))
            kept.add(lane, known)
            self.lanes[lane] = tuple(known.values())
        columns: Columns = {}
        if kept.starts:
            columns["starts",] = self._autoreset_starts(event, *np.array(kept.starts).T)
        before = self.state().observed(self._all)
        places = np.array([lane * (times + 1) + time + 1 for lane, time in kept.observations], np.int64)
        for i, leaf in enumerate(self._layout.observation_leaves):
            batches = event.batches(leaf.path)
            column = by_lane([before[i] if before else batches[0], *batches], places)
            if kept.finals:
                at, lanes, ends = np.array(kept.finals).T
                column = inserted(column, at, self._finals(event, i, lanes, ends))
            if len(column):
                columns[leaf.path] = column
        if kept.steps:
            self._add_step_columns(columns, event, np.array([lane * times + time for lane, time in kept.steps]))
        return _piece(kept.fragments(), columns)

    def _add_step_columns(self, columns: Columns, event: Steps, steps: Array | Except) -> None:
        """Add the columns of steps, except observations. steps: indices, by lane, then by time."""
        for path in (*(leaf.path for leaf in self._layout.action_leaves), REWARDS):
            columns[path] = event.rows(path, steps)
        if event.more[0].infos is not None:
            columns["infos",] = by_lane([more.infos or [] for more in event.more], steps)
        for name in dict.fromkeys(name for more in event.more for name in more.notes):
            missing = [PACKED_ABSENT] * self._count
            columns[annotation_path(name)] = by_lane([more.notes.get(name, missing) for more in event.more], steps)

    def _finals(self, event: Steps, leaf: int, lanes: Array, times: Array) -> Rows:
        """Return the last observations of the episodes that ended in these lanes at these times."""
        places, found, count = np.empty((len(event.more), self._count), np.int64), [], 0
        for more, of_step in zip(event.more, places):
            if more.finals is not None:
                of_step[more.finals[0]] = count + np.arange(len(more.finals[0]))
                found.append(more.finals[1][leaf])
                count += len(more.finals[0])
        return taken(joined_rows(found), places[times, lanes])

    def _autoreset_starts(self, event: Steps, lanes: Array, times: Array) -> list[bytes]:
        if event.more[0].reset_infos is None:
            return [NOTHING] * len(lanes)
        infos = [(event.more[time].reset_infos or [])[lane] for lane, time in zip(lanes.tolist(), times.tolist())]
        return list(map(start_with_info, infos))

    def _fragments(self, event: Steps, flags: Array, places: Array | None, lead: Array) -> Array:
        """Return the fragments of rows that are ordered by lane, then by time.

        Args:
            flags: (time, lane), the end flags of episodes.
            places: lane * times + time of each row; None: all rows.
            lead: True for rows that are the first observation of an episode.
        """
        utc, monotonic = event.utc, event.monotonic
        times, opens = len(utc), lead.copy()
        of_lanes = self._all * times
        firsts = of_lanes if places is None else np.searchsorted(places, of_lanes)
        opens[firsts[firsts < len(lead)]] = True
        begin = np.flatnonzero(opens)
        if not len(begin):
            return np.zeros(0, wire.FRAGMENT)
        after = np.append(begin[1:], len(lead))
        starts = lead[begin]
        lane, first = _lane_and_time(begin, places, times)
        _, final = _lane_and_time(after - 1, places, times)
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


class _KeptRows:
    """Builds the fragments of the steps that filters keep, and collects the positions of their rows.

    Args:
        known, resets: (time, lane), see autoreset.after_step.
        flags: (time, lane), TERMINATED and TRUNCATED.
        filtered: single steps may be skipped. Then the first observation of an episode is stored with its first step,
            if that step is kept.
    """

    def __init__(self, steps: Steps, known: Array, resets: Array, flags: Array, mode: str, filtered: bool):
        self._known, self._resets, self._flags = known, resets, flags
        self._utc, self._monotonic = steps.utc.tolist(), steps.monotonic.tolist()
        self._kept = np.array([more.kept for more in steps.more])
        self._ids = np.array([more.ids for more in steps.more])
        self._same_step, self._filtered = mode == SAME_STEP, filtered
        self.starts: list[tuple[int, int]] = []  # (lane, time)
        self.steps: list[tuple[int, int]] = []  # (lane, time)
        self.observations: list[tuple[int, int]] = []  # (lane, time); time -1: before all steps
        self.finals: list[tuple[int, int, int]] = []  # (index into observations to insert at, lane, time)
        self._table: list[dict[str, int]] = []
        self._open: dict[str, int] | None = None  # the last fragment of the table, if it accepts more steps

    def fragments(self) -> Array:
        table = np.zeros(len(self._table), wire.FRAGMENT)
        for name in wire.FRAGMENT.names or ():
            table[name] = [fragment.get(name, 0) for fragment in self._table]
        return table

    def add(self, lane: int, state: dict[str, Any]) -> None:
        """Add the steps of a lane. state: state of the lane (LANE), updated in place."""
        self._open = None
        for time in np.flatnonzero(self._known[:, lane]).tolist():
            reset, ended = self._resets[time, lane], self._flags[time, lane] != 0
            if not reset:
                if not state["skipped"]:
                    self._add_step(lane, time, state)
                state["steps"] += 1
                if ended and not state["skipped"]:
                    self._add_end(lane, time, state)
            if reset or (ended and self._same_step):
                self._add_start(lane, time, state)

    def _add_step(self, lane: int, time: int, state: dict[str, Any]) -> None:
        if self._kept[time, lane]:
            if not state["running"]:
                self._fragment(lane, state, wire.LEADS)
                self.observations.append((lane, time - 1))
            fragment = self._open or self._fragment(lane, state)
            fragment["steps"] += 1
            self.steps.append((lane, time))
            if self._same_step and self._flags[time, lane]:
                self.finals.append((len(self.observations), lane, time))
            else:
                self.observations.append((lane, time))
            state["running"] = True
        elif state["running"]:
            fragment = self._open or self._fragment(lane, state)
            fragment["flags"] |= wire.STOPS
            state["running"], self._open = False, None

    def _add_end(self, lane: int, time: int, state: dict[str, Any]) -> None:
        fragment, flags = self._open or self._fragment(lane, state), int(self._flags[time, lane])
        fragment["flags"] |= wire.STOPS | wire.ENDS | (flags if self._kept[time, lane] else 0)
        fragment["outcome"] = Outcome.TERMINATED if flags & wire.TERMINATED else Outcome.TRUNCATED
        fragment["duration"] = self._monotonic[time] - state["monotonic"]
        fragment["clock_drift"] = self._utc[time] - state["utc"] - fragment["duration"]
        state["running"], self._open = False, None

    def _add_start(self, lane: int, time: int, state: dict[str, Any]) -> None:
        utc, monotonic, episode = self._utc[time], self._monotonic[time], int(self._ids[time, lane])
        state.update(episode=episode, steps=0, utc=utc, monotonic=monotonic, seed=wire.NO_SEED)
        state["skipped"], state["running"] = episode < 0, not self._filtered
        if not state["skipped"]:
            fragment = self._fragment(lane, state, wire.STARTS if self._filtered else wire.STARTS | wire.LEADS)
            fragment["seed"], fragment["start_time"], fragment["clock_offset"] = wire.NO_SEED, utc, utc - monotonic
            self.starts.append((lane, time))
            if self._filtered:
                self._open = None
            else:
                self.observations.append((lane, time))

    def _fragment(self, lane: int, state: dict[str, Any], flags: int = 0) -> dict[str, int]:
        first = {"lane": lane, "episode": state["episode"], "first_step": state["steps"], "steps": 0, "flags": flags}
        self._table.append(first)
        self._open = first
        return first


def _in_place(flags: Array, places: Array | None) -> Array:
    """Reorder flags, (time, lane), to the order of rows."""
    by_lane = flags.T.reshape(-1)
    return by_lane if places is None else by_lane[places]


def _without(places: Array | None, lead: Array) -> Array | Except:
    """Return the positions of the rows that are steps."""
    if places is None:
        return Except(np.flatnonzero(lead), len(lead))
    return places[~lead] if lead.any() else places


def _lane_and_time(rows: Array, places: Array | None, times: int) -> tuple[Array, Array]:
    return np.divmod(rows if places is None else places[rows], times)


def _segment(fragments: Array, columns: Columns) -> Segment:
    return Segment(fragments, columns, fragments.nbytes + sum(map(size_of, columns.values())))


def _piece(fragments: Array, columns: Columns) -> _Piece:
    segment = _segment(fragments, columns)
    return fragments, lambda: segment


_NONE = np.empty(0, np.int64)
