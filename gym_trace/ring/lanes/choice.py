"""Fragments of the steps that filters keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gym_trace.format import wire
from gym_trace.model.values import Array
from gym_trace.model.vocabulary import Outcome
from gym_trace.ring.lanes.events import Step


class ChosenRows:
    """Builds the fragments of kept steps, and collects the positions of their rows.

    Args:
        known, resets, ended: (time, lane), see autoreset.after_step.
        same_step: an end and the reset after it are one event.
        filtered: single steps may be skipped. Then the first observation of an episode is stored with its first step,
            if that step is kept.
    """

    def __init__(
        self, events: Sequence[Step], known: Array, resets: Array, ended: Array, same_step: bool, filtered: bool
    ):
        self._events, self._known, self._resets, self._ended = events, known, resets, ended
        self._kept = np.array([event.kept for event in events])
        self._ids = np.array([event.ids for event in events])
        self._same_step, self._filtered = same_step, filtered
        self.starts: list[tuple[int, int]] = []  # (lane, time)
        self.steps: list[tuple[int, int]] = []  # (lane, time)
        self.observations: list[tuple[int, int]] = []  # (lane, time); time -1: before all events
        self.finals: list[tuple[int, int, int]] = []  # (index into observations to insert at, lane, time)
        self._table: list[dict[str, int]] = []
        self._open: dict[str, int] | None = None  # the last fragment of the table, if it accepts more steps

    def fragments(self) -> Array:
        """Return the fragment table."""
        table = np.zeros(len(self._table), wire.FRAGMENT)
        for name in wire.FRAGMENT.names or ():
            table[name] = [fragment.get(name, 0) for fragment in self._table]
        return table

    def add(self, lane: int, state: dict[str, Any]) -> None:
        """Add the steps of a lane. state: state of the lane (LANE), updated in place."""
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
