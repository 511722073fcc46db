"""Rows of a trace that is being recorded, or of its newest episodes: what is there already is not decoded again."""

from __future__ import annotations

import numpy as np

from gym_trace.model.layout import Path
from gym_trace.model.values import Array
from gym_trace.reading.forms import Form
from gym_trace.reading.recorded import Recorded
from gym_trace.sampling.rows import Plan, Rows, in_memory
from gym_trace.sampling.store import KEPT, Known, identified


class Growing:
    """A store in memory, of which episodes can be dropped and to which others are added.

    most_steps: keep the episodes that started last, up to this number of steps; at least one. None: all.
    """

    def __init__(self, most_steps: int | None):
        self._most_steps = most_steps
        self._columns: dict[Path, Array] = {}  # with room behind the rows that are there
        self._forms: dict[Path, Form | None] = {}
        self._known = Known(np.zeros(0, KEPT))

    def rows(self, trace: Recorded, plan: Plan) -> Rows:
        episodes = identified(plan)
        places = self._newest(plan.table)
        if plan.forms != self._forms:
            self._columns, self._forms, self._known = {}, plan.forms, Known(np.zeros(0, KEPT))
        missing = places[self._known.places(episodes[places]) < 0]
        if len(missing):
            self._add(plan, episodes, places, missing)
        return self._known.rows(plan, places, episodes, self._columns)

    def check(self, plan: Plan) -> None:
        """Everything can be kept."""

    def _newest(self, table: Array) -> Array:
        """The places of the episodes that count."""
        if self._most_steps is None:
            return np.arange(len(table))
        order = np.argsort(table["start_time"].astype(np.int64), kind="stable")[::-1]
        count = int(np.cumsum(table["steps"][order]).searchsorted(self._most_steps, side="right"))
        return np.sort(order[: max(1, count)])

    def _add(self, plan: Plan, episodes: Array, places: Array, missing: Array) -> None:
        more = int(episodes["steps"][missing].sum())
        if self._room() < more + len(missing):
            self._move(plan, episodes[places], more, len(missing))
        new = self._known.following(episodes[missing])
        at, seen = self._known.ends()

        def taken(path: Path, rows: int, form: Form | None) -> Array:
            begin = seen if path[0] == "observations" else at
            part: Array = self._columns[path][begin : begin + rows]
            part[...] = in_memory(path, 1, form)[0] if form is None or part.dtype == np.bool_ else part
            return part

        plan.decode([plan.episodes(missing)], taken)
        self._known = Known(np.append(self._known.table, new))

    def _room(self) -> int:
        """Return the number of rows that fit, of observations and of others."""
        at, seen = self._known.ends()
        room = (len(array) - (seen if path[0] == "observations" else at) for path, array in self._columns.items())
        return min(room, default=-1)

    def _move(self, plan: Plan, wanted: Array, more: int, episodes: int) -> None:
        """Into twice the room that is needed, without what is not wanted any more."""
        here = self._known.places(wanted)
        kept = self._known.table[here[here >= 0]]
        moved = Known(np.zeros(0, KEPT)).following(kept)
        rows = 2 * (int(kept["steps"].sum()) + more + len(kept) + episodes)
        columns = {path: in_memory(path, rows, form) for path, form in plan.forms.items()}
        for path, array in columns.items():
            name, extra = ("seen", 1) if path[0] == "observations" else ("at", 0)
            for before, after, count in zip(
                kept[name].tolist(), moved[name].tolist(), (kept["steps"] + extra).tolist()
            ):
                array[after : after + count] = self._columns[path][before : before + count]
        self._columns, self._known = columns, Known(moved)
