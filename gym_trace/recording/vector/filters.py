"""Filters of vector environments, called lane by lane."""

from __future__ import annotations

from typing import Any

import numpy as np

from gym_trace.model.values import Array
from gym_trace.recording.filters import Filters
from gym_trace.ring.lanes.autoreset import after_step
from gym_trace.ring.lanes.entries import LANE, LaneState


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

    def continue_run(self, run: LaneState) -> None:
        """Takes over the state of another recorder."""
        self._lanes, self._episodes = run.lanes.copy(), run.episodes

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
