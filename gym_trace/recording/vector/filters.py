"""Filters of vector environments, called lane by lane, and the fragments of the steps that they keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gym_trace.envs.autoreset import after_step
from gym_trace.format import wire
from gym_trace.model.values import Array
from gym_trace.model.vocabulary import Outcome
from gym_trace.recording.filters import Filters
from gym_trace.recording.vector.events import LANE, OpenEpisodes, Step


class LaneFilters:
    """Calls filters in the caller's thread, so that their exceptions reach the caller.

    An episode gets its id when its filter is called. If that raises, or anything after it, the id is not used again.
    """

    def __init__(self, filters: Filters, mode: str, count: int):
        self._filters, self._mode, self._count = filters, mode, count
        self.forget()

    def forget(self) -> None:
        """Resets the state: no lane is known, and no episode has begun."""
        self._lanes, self._episodes = np.zeros(self._count, LANE), 0

    def continue_run(self, run: OpenEpisodes) -> None:
        """Takes over the state of another recorder."""
        self._lanes, self._episodes = run.known.copy(), len(run.lanes)

    def lose_track(self) -> None:
        """Marks all lanes as unknown until an episode begins."""
        self._lanes["open"] = self._lanes["pending"] = False

    def reset(self, lanes: Array) -> Array:
        """The ids of the episodes that begin in lanes; -1 for those that are not to be recorded."""
        new = np.zeros(len(lanes), LANE)
        ids = self._ids(len(lanes))
        new["open"], new["skipped"] = True, ids < 0
        self._lanes[lanes] = new
        return ids

    def step(self, rewards: Any, ended: Array) -> tuple[Array, Array]:
        """For each lane, the id of the recorded episode that begins with a step, or -1; and whether the step is kept.

        rewards: of the lanes. ended: whether they say that an episode is over.
        """
        lanes = self._lanes
        known, resets, open_, pending = after_step(self._mode, lanes["open"], lanes["pending"], ended)
        steps = known & ~resets
        kept, ids = np.zeros(self._count, np.bool_), np.full(self._count, -1)
        for lane in np.flatnonzero(steps & ~lanes["skipped"]).tolist():
            kept[lane] = self._filters.keeps_step(int(lanes["steps"][lane]), rewards[lane])
        begun = resets | (steps & ended & open_)  # what is open after an end is another episode
        ids[begun] = self._ids(int(begun.sum()))
        lanes["steps"] += steps
        lanes["steps"][begun], lanes["skipped"][begun] = 0, ids[begun] < 0
        lanes["open"], lanes["pending"] = open_, pending
        return ids, kept

    def _ids(self, count: int) -> Array:
        ids = []
        for _ in range(count):
            episode = self._episodes
            self._episodes += 1
            ids.append(episode if self._filters.keeps_episode(episode) else -1)
        return np.array(ids, np.int64)


class ChosenRows:
    """Fragments of the steps that are kept out of consecutive ones, and where their rows are to be taken from.

    Args:
        known, resets, ended: of each (time, lane), see autoreset.after_step.
        same_step: whether an end and the reset after it are one event.
        filtered: whether single steps are left out. If so, the first observation of an episode comes with its first
            step, if that is kept.
    """

    def __init__(
        self, events: Sequence[Step], known: Array, resets: Array, ended: Array, same_step: bool, filtered: bool
    ):
        self._events, self._known, self._resets, self._ended = events, known, resets, ended
        self._kept = np.array([event.kept for event in events])
        self._ids = np.array([event.ids for event in events])
        self._same_step, self._filtered = same_step, filtered
        self.starts: list[tuple[int, int]] = []  # lane, time
        self.steps: list[tuple[int, int]] = []  # likewise
        self.observations: list[tuple[int, int]] = []  # likewise; the time is -1 for those before all events
        self.finals: list[tuple[int, int, int]] = []  # last observations: before which of those above, lane, time
        self._table: list[dict[str, int]] = []
        self._open: dict[str, int] | None = None  # the last fragment of the table, if steps may be added to it

    def fragments(self) -> Array:
        """The fragment table."""
        table = np.zeros(len(self._table), wire.FRAGMENT)
        for name in wire.FRAGMENT.names or ():
            table[name] = [fragment.get(name, 0) for fragment in self._table]
        return table

    def add(self, lane: int, state: dict[str, Any]) -> None:
        """Adds the steps of a lane. state: of the lane (LANE), which is updated."""
        self._open = None
        for time in np.flatnonzero(self._known[:, lane]).tolist():
            reset, ended = self._resets[time, lane], self._ended[time, lane]
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
            if self._same_step and self._ended[time, lane]:
                self.finals.append((len(self.observations), lane, time))
            else:
                self.observations.append((lane, time))
            state["running"] = True
        elif state["running"]:
            fragment = self._open or self._fragment(lane, state)
            fragment["flags"] |= wire.STOPS
            state["running"], self._open = False, None

    def _add_end(self, lane: int, time: int, state: dict[str, Any]) -> None:
        event, fragment = self._events[time], self._open or self._fragment(lane, state)
        terminated, truncated = event.terminations[lane], event.truncations[lane]
        fragment["flags"] |= wire.STOPS | wire.ENDS
        if self._kept[time, lane]:
            fragment["flags"] |= wire.TERMINATED * int(terminated) | wire.TRUNCATED * int(truncated)
        fragment["outcome"] = Outcome.TERMINATED if terminated else Outcome.TRUNCATED
        fragment["duration"] = event.monotonic - state["monotonic"]
        fragment["clock_drift"] = event.utc - state["utc"] - fragment["duration"]
        state["running"], self._open = False, None

    def _add_start(self, lane: int, time: int, state: dict[str, Any]) -> None:
        event, episode = self._events[time], int(self._ids[time, lane])
        state.update(episode=episode, steps=0, utc=event.utc, monotonic=event.monotonic, seed=wire.NO_SEED)
        state["skipped"], state["running"] = episode < 0, not self._filtered
        if not state["skipped"]:
            fragment = self._fragment(lane, state, wire.STARTS if self._filtered else wire.STARTS | wire.LEADS)
            fragment["seed"], fragment["start_time"] = wire.NO_SEED, event.utc
            fragment["clock_offset"] = event.utc - event.monotonic
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
