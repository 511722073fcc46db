"""Decode slabs of lanes to segments, ordered by lane, and to pending actions. Writers and readers both use this."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from gym_trace.data.packing import pack, unpack
from gym_trace.data.values import Array, placeholder
from gym_trace.data.vocabulary import Outcome, annotation_path
from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.format.ring.chunk_builder import PACKED_ABSENT, joined_rows
from gym_trace.format.ring.lanes.autoreset import MODES, SAME_STEP, after_steps
from gym_trace.format.ring.lanes.entries import LANE, NOTHING, End, LaneState, Observed, Reset, rows_at, start_with_info
from gym_trace.format.ring.lanes.events import AllExcept, LaneEvents, Steps, by_lane, inserted
from gym_trace.format.ring.lanes.layout import REWARDS, TERMINATIONS, TRUNCATIONS, LaneLayout, lane_layout
from gym_trace.format.ring.log import STEP, entry_offsets, headers
from gym_trace.format.ring.memory import MOST_SLAB_BYTES
from gym_trace.format.ring.pending import Pending
from gym_trace.format.ring.segment import ColumnRows, Columns, Segment, size_of


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
        log = headers(memoryview(slab), entry_offsets(slab, self._layout.log, len(slab), sequence))
        return int((log["kind"] == STEP).sum()), len(log)

    def decode(
        self, sequence: int, slab: bytes | memoryview, most: tuple[int, int] | None = None
    ) -> tuple[list[Segment], list[Pending]]:
        """Decode a slab; return its segments, and the pending action of each open episode.

        Args:
            most: maximum numbers of steps and of log entries, for a slab that is being written; pending actions are
                then omitted.

        Raises CorruptTrace.
        """
        with _malformed_is_corrupt("slab"):
            events = LaneEvents(self._layout, sequence, memoryview(slab), None if most is None else most[1])
            segments, state = decoded(self._layout, events, events.state())
            pending = [] if most else pending_of(events.pending_actions, state.lanes, self._layout.numbers)
            return [segment() for segment in segments], pending


@contextlib.contextmanager
def _malformed_is_corrupt(what: str) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CorruptTrace(f"malformed ring {what}: {error!r:.100}") from error


def pending_of(actions: list[ColumnRows] | None, lanes: Array, numbers: Array | None) -> list[Pending]:
    """Return the pending actions of lanes with an open episode.

    Args:
        actions: one entry per leaf, with one row per lane; None: no actions are pending.
        lanes: state of the lanes.
        numbers: see LaneLayout.
    """
    if actions is None:
        return []
    stepped = np.flatnonzero(lanes["open"] & ~lanes["skipped"] & ~lanes["pending"])
    return [
        Pending(
            int(lanes["episode"][lane]), number, int(lanes["steps"][lane]), [_value(rows, lane) for rows in actions]
        )
        for lane, number in zip(stepped.tolist(), (stepped if numbers is None else numbers[stepped]).tolist())
    ]


def _value(rows: ColumnRows, lane: int) -> Any:
    return np.array(rows[lane])[()] if isinstance(rows, np.ndarray) else unpack(rows[lane])


LazySegment = Callable[[], Segment]


def decoded(layout: LaneLayout, events: LaneEvents, state: LaneState) -> tuple[list[LazySegment], LaneState]:
    """Return a function for each segment of a slab, and the state of the lanes after it.

    Fragments are decoded immediately. The functions decode the columns, which takes most of the time; any thread may
    call them while the slab is unchanged. Arrays may be views of the slab.

    Args:
        state: state of the lanes at the start of the slab.
    """
    decoding = _Decoding(layout, state)
    parts = [part for event in events.events for part in decoding.parts(event)]
    segments = [segment for fragments, segment in parts if len(fragments)]
    if layout.numbers is not None:
        segments = [partial(_numbered, segment, layout.numbers) for segment in segments]
    return segments, decoding.state()


def _numbered(segment: LazySegment, numbers: Array) -> Segment:
    """Return a segment whose lanes have their numbers in the environment."""
    decoded_segment = segment()
    fragments = decoded_segment.fragments.copy()
    fragments["lane"] = numbers[fragments["lane"]]
    return decoded_segment._replace(fragments=fragments)


_DecodedPart = tuple[Array, LazySegment]  # the fragments of a segment, and the function that returns the segment


class _Decoding:
    """Converts events to segments, and follows the state of the lanes in a copy of it."""

    def __init__(self, layout: LaneLayout, state: LaneState):
        self._layout, self._count, self._mode = layout, layout.lanes, layout.mode
        self._all = np.arange(layout.lanes)
        self.lanes, self.episodes, self.recent = state.lanes.copy(), state.episodes, state.recent

    def state(self) -> LaneState:
        """Return the state after the events so far."""
        return LaneState(self.lanes, self.episodes, self.recent)

    def parts(self, event: Reset | End | Steps) -> list[_DecodedPart]:
        if isinstance(event, End):
            return [self._end(event)]
        if isinstance(event, Reset):
            parts = self._reset(event)
            observed = Observed(event.lanes, event.observations)
            self.recent = (observed,) if len(event.lanes) == self._count else (*self.recent, observed)
        else:
            parts = [self._steps(event)]
            last = [event.batch(leaf.path, len(event.utc) - 1) for leaf in self._layout.observation_leaves]
            self.recent = (Observed(self._all, last),)
        return parts

    # -- resets and ends ----------------------------------------------------------------------------------------------

    def _reset(self, event: Reset) -> list[_DecodedPart]:
        cut = self._ending_fragments(event.lanes, Outcome.CUT, event.utc, event.monotonic)
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
        recorded = np.flatnonzero(~new["skipped"])
        columns: Columns = {("starts",): [event.starts[i] for i in recorded.tolist()]}
        if len(recorded) and not self._layout.filtered:
            rows = [rows_at(rows, recorded) for rows in event.observations]
            columns.update(zip((leaf.path for leaf in self._layout.observation_leaves), rows))
        return [_decoded_part(cut, {}), _decoded_part(self._starting_fragments(event.lanes[recorded]), columns)]

    def _starting_fragments(self, lanes: Array) -> Array:
        """Return the fragments of episodes that a reset begins."""
        known, fragments = self.lanes[lanes], np.zeros(len(lanes), wire.FRAGMENT)
        fragments["lane"], fragments["episode"], fragments["first_step"] = lanes, known["episode"], known["steps"]
        fragments["flags"] = wire.STARTS | wire.HAS_INITIAL * known["running"].astype(np.uint32)
        fragments["seed"], fragments["start_time"] = known["seed"], known["utc"]
        fragments["clock_offset"] = known["utc"] - known["monotonic"]
        return fragments

    def _end(self, event: End) -> _DecodedPart:
        outcome = Outcome.CUT if event.outcome is None else event.outcome
        fragments = self._ending_fragments(self._all, outcome, event.utc, event.monotonic)
        self.lanes["open"] = self.lanes["pending"] = False
        return _decoded_part(fragments, {})

    def _ending_fragments(self, lanes: Array, outcome: int, utc: int, monotonic: int) -> Array:
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

    def _steps(self, event: Steps) -> _DecodedPart:
        """Return consecutive steps as one segment. All arrays of rows are ordered by lane, then by time."""
        usual = self._usual_fragments(event)
        if usual is not None:
            return self._lazy_part(event, *usual)
        times = len(event.utc)
        flags = (event.columns[TERMINATIONS].T != 0) * np.uint8(wire.TERMINATED)
        flags |= (event.columns[TRUNCATIONS].T != 0) * np.uint8(wire.TRUNCATED)
        ended = flags != 0
        valid, resets, open_, pending = after_steps(self._mode, self.lanes["open"], self.lanes["pending"], ended)
        ended &= valid
        self.lanes["open"], self.lanes["pending"] = open_, pending
        has_finals = self._mode == SAME_STEP and bool((flags * ended).any())
        if has_finals:
            flags |= np.uint8(wire.PLACEHOLDER) * (_without_finals(event) & ended)
        if event.extras[0].keep_mask is not None:
            filtered_rows = _FilteredRows(event, valid, resets, flags, self._mode, self._layout.filtered)
            return self._filtered_steps(event, filtered_rows)
        positions = None if valid.all() else np.flatnonzero(valid.T)  # lane * times + time of each row; None: all
        flags *= ended & ~resets
        is_initial = _in_row_order(resets, positions)
        if positions is None and not has_finals:
            fragments = self._fragments(event, flags, positions, is_initial)
            return self._lazy_part(event, fragments, np.flatnonzero(is_initial))
        rows: Array | AllExcept = AllExcept(_NO_ROWS, len(is_initial)) if positions is None else positions
        observations = [event.rows(leaf.path, rows) for leaf in self._layout.observation_leaves]
        steps = _step_positions(positions, is_initial)
        if has_finals:
            at = np.flatnonzero(_in_row_order(flags, positions))
            positions = np.arange(len(is_initial)) if positions is None else positions
            ends = np.divmod(positions[at], times)
            observations = [
                inserted(column, at, self._finals(event, i, *ends)) for i, column in enumerate(observations)
            ]
            positions, is_initial = np.insert(positions, at, positions[at]), np.insert(is_initial, at, False)
            is_initial[at + np.arange(len(at)) + 1] = True  # the next observation is the first of a new episode
        columns: Columns = {}
        begun = np.flatnonzero(is_initial)
        if len(begun):
            columns["starts",] = self._autoreset_starts(event, *_lane_and_time(begun, positions, times))
        columns.update(zip((leaf.path for leaf in self._layout.observation_leaves), observations))
        if isinstance(steps, AllExcept) or len(steps):
            self._add_step_columns(columns, event, steps)
        return _decoded_part(self._fragments(event, flags, positions, is_initial), columns)

    def _usual_fragments(self, event: Steps) -> tuple[Array, Array] | None:
        """Return the fragments of usual steps, and the indices of initial observations; None for other steps."""
        find, extra = event.loops.fragments, event.extras[0]
        if find is None or extra.keep_mask is not None:
            return None
        flags = (np.ascontiguousarray(event.columns[path].T) for path in (TERMINATIONS, TRUNCATIONS))
        clocks = (np.ascontiguousarray(clock) for clock in (event.utc, event.monotonic))
        found = find(self.lanes, *flags, *clocks, MODES.index(self._mode), self.episodes)
        if found is None:
            return None
        fragments, initial_rows, self.episodes = found
        return np.frombuffer(fragments, wire.FRAGMENT), np.frombuffer(initial_rows, np.int64)

    def _lazy_part(self, event: Steps, fragments: Array, initial_rows: Array) -> _DecodedPart:
        """Return the segment of steps that are all in episodes. initial_rows: indices of initial observations."""
        times, columns = len(event.utc), Columns()
        everything, steps = (AllExcept(rows, self._count * times) for rows in (_NO_ROWS, initial_rows))
        if len(initial_rows):
            columns["starts",] = self._autoreset_starts(event, *np.divmod(initial_rows, times))

        def segment() -> Segment:
            for leaf in self._layout.observation_leaves:
                columns[leaf.path] = event.rows(leaf.path, everything)
            if steps.remaining:
                self._add_step_columns(columns, event, steps)
            return _segment(fragments, columns)

        return fragments, segment

    def _filtered_steps(self, event: Steps, filtered: _FilteredRows) -> _DecodedPart:
        """Return the segment of the steps that filters keep."""
        names, times = LANE.names or (), len(event.utc)
        for lane, values in enumerate(self.lanes.tolist()):
            state = dict(zip(names, values))
            filtered.add(lane, state)
            self.lanes[lane] = tuple(state.values())
        columns: Columns = {}
        if filtered.starts:
            columns["starts",] = self._autoreset_starts(event, *np.array(filtered.starts).T)
        before = self.state().observed(self._all)
        positions = np.array([lane * (times + 1) + time + 1 for lane, time in filtered.observations], np.int64)
        for i, leaf in enumerate(self._layout.observation_leaves):
            batches = event.batches(leaf.path)
            column = by_lane([before[i] if before else batches[0], *batches], positions)
            if filtered.finals:
                at, lanes, ends = np.array(filtered.finals).T
                column = inserted(column, at, self._finals(event, i, lanes, ends))
            if len(column):
                columns[leaf.path] = column
        if filtered.steps:
            self._add_step_columns(columns, event, np.array([lane * times + time for lane, time in filtered.steps]))
        return _decoded_part(filtered.fragments(), columns)

    def _add_step_columns(self, columns: Columns, event: Steps, steps: Array | AllExcept) -> None:
        """Add the columns of steps, except observations. steps: indices, by lane, then by time."""
        for path in (*(leaf.path for leaf in self._layout.action_leaves), REWARDS):
            columns[path] = event.rows(path, steps)
        if event.extras[0].infos is not None:
            columns["infos",] = by_lane([extra.infos or [] for extra in event.extras], steps)
        for name in dict.fromkeys(name for extra in event.extras for name in extra.annotations):
            missing = [PACKED_ABSENT] * self._count
            batches = [extra.annotations.get(name, missing) for extra in event.extras]
            columns[annotation_path(name)] = by_lane(batches, steps)

    def _finals(self, event: Steps, leaf: int, lanes: Array, times: Array) -> ColumnRows:
        """Return the last observations of the episodes that ended in these lanes at these times."""
        column = self._layout.observation_leaves[leaf]
        found: list[ColumnRows] = [placeholder(column.dtype, column.shape) if column.dtype else [pack("")]]
        indices, count = np.zeros((len(event.extras), self._count), np.int64), 1
        for extra, indices_of_step in zip(event.extras, indices):
            if extra.finals is not None:
                indices_of_step[extra.finals[0]] = count + np.arange(len(extra.finals[0]))
                found.append(extra.finals[1][leaf])
                count += len(extra.finals[0])
        rows = indices[times, lanes]
        if rows.all():  # all are known
            found, rows = found[1:], rows - 1
        return rows_at(joined_rows(found), rows)

    def _autoreset_starts(self, event: Steps, lanes: Array, times: Array) -> list[bytes]:
        if event.extras[0].reset_infos is None:
            return [NOTHING] * len(lanes)
        infos = [(event.extras[time].reset_infos or [])[lane] for lane, time in zip(lanes.tolist(), times.tolist())]
        return list(map(start_with_info, infos))

    def _fragments(self, event: Steps, flags: Array, positions: Array | None, is_initial: Array) -> Array:
        """Return the fragments of rows that are ordered by lane, then by time.

        Args:
            flags: (time, lane), TERMINATED, TRUNCATED, and PLACEHOLDER for unknown last observations.
            positions: lane * times + time of each row; None: all rows.
            is_initial: True for rows that are the first observation of an episode.
        """
        utc, monotonic = event.utc, event.monotonic
        times, opens = len(utc), is_initial.copy()
        of_lanes = self._all * times
        firsts = of_lanes if positions is None else np.searchsorted(positions, of_lanes)
        opens[firsts[firsts < len(is_initial)]] = True
        begin = np.flatnonzero(opens)
        if not len(begin):
            return np.zeros(0, wire.FRAGMENT)
        after = np.append(begin[1:], len(is_initial))
        starts = is_initial[begin]
        lane, first = _lane_and_time(begin, positions, times)
        _, final = _lane_and_time(after - 1, positions, times)
        flags = flags[final, lane] * ~is_initial[after - 1]
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
        fragments["flags"] = (wire.STARTS | wire.HAS_INITIAL) * starts + (wire.STOPS | wire.ENDS) * ends + flags
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


class _FilteredRows:
    """Builds the fragments of the steps that filters keep, and collects the positions of their rows.

    Args:
        known, resets: (time, lane), see autoreset.after_step.
        flags: (time, lane), TERMINATED and TRUNCATED.
        filtered: True if filters may skip single steps. The first observation of an episode is then stored only if its
            first step is.
    """

    def __init__(self, steps: Steps, known: Array, resets: Array, flags: Array, mode: str, filtered: bool):
        self._known, self._resets, self._flags = known, resets, flags
        self._utc, self._monotonic = steps.utc.tolist(), steps.monotonic.tolist()
        self._keep_mask = np.array([extra.keep_mask for extra in steps.extras])
        self._ids = np.array([extra.ids for extra in steps.extras])
        self._same_step, self._filtered = mode == SAME_STEP, filtered
        self.starts: list[tuple[int, int]] = []  # (lane, time)
        self.steps: list[tuple[int, int]] = []  # (lane, time)
        self.observations: list[tuple[int, int]] = []  # (lane, time); time -1: before all steps
        self.finals: list[tuple[int, int, int]] = []  # (index into observations to insert at, lane, time)
        self._table: list[dict[str, int]] = []
        self._open: dict[str, int] | None = None  # the last fragment of the table, if it accepts extra steps

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
        if self._keep_mask[time, lane]:
            if not state["running"]:
                self._fragment(lane, state, wire.HAS_INITIAL)
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
        fragment["flags"] |= wire.STOPS | wire.ENDS | (flags if self._keep_mask[time, lane] else 0)
        fragment["outcome"] = Outcome.TERMINATED if flags & wire.TERMINATED else Outcome.TRUNCATED
        fragment["duration"] = self._monotonic[time] - state["monotonic"]
        fragment["clock_drift"] = self._utc[time] - state["utc"] - fragment["duration"]
        state["running"], self._open = False, None

    def _add_start(self, lane: int, time: int, state: dict[str, Any]) -> None:
        utc, monotonic, episode = self._utc[time], self._monotonic[time], int(self._ids[time, lane])
        state.update(episode=episode, steps=0, utc=utc, monotonic=monotonic, seed=wire.NO_SEED)
        state["skipped"], state["running"] = episode < 0, not self._filtered
        if not state["skipped"]:
            fragment = self._fragment(lane, state, wire.STARTS if self._filtered else wire.STARTS | wire.HAS_INITIAL)
            fragment["seed"], fragment["start_time"], fragment["clock_offset"] = wire.NO_SEED, utc, utc - monotonic
            self.starts.append((lane, time))
            if self._filtered:
                self._open = None
            else:
                self.observations.append((lane, time))

    def _fragment(self, lane: int, state: dict[str, Any], flags: int = 0) -> dict[str, int]:
        fragment = {"lane": lane, "episode": state["episode"], "first_step": state["steps"], "steps": 0, "flags": flags}
        self._table.append(fragment)
        self._open = fragment
        return fragment


def _without_finals(event: Steps) -> Array:
    """Return True, (time, lane), where the last observation of an episode that ended is unknown."""
    unknown = np.ones((len(event.utc), event.columns[TERMINATIONS].shape[0]), np.bool_)
    for extra, lanes in zip(event.extras, unknown):
        if extra.finals is not None:
            lanes[extra.finals[0]] = False
    return unknown


def _in_row_order(flags: Array, positions: Array | None) -> Array:
    """Return flags, (time, lane), in the order of rows: by lane, then by time."""
    by_lane = flags.T.reshape(-1)
    return by_lane if positions is None else by_lane[positions]


def _step_positions(positions: Array | None, is_initial: Array) -> Array | AllExcept:
    """Return the positions of the rows that are steps."""
    if positions is None:
        return AllExcept(np.flatnonzero(is_initial), len(is_initial))
    return positions[~is_initial] if is_initial.any() else positions


def _lane_and_time(rows: Array, positions: Array | None, times: int) -> tuple[Array, Array]:
    return np.divmod(rows if positions is None else positions[rows], times)


def _segment(fragments: Array, columns: Columns) -> Segment:
    return Segment(fragments, columns, fragments.nbytes + sum(map(size_of, columns.values())))


def _decoded_part(fragments: Array, columns: Columns) -> _DecodedPart:
    segment = _segment(fragments, columns)
    return fragments, lambda: segment


_NO_ROWS = np.empty(0, np.int64)
