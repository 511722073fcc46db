"""Episodes of a Minari dataset in one HDF5 file: one group per episode, one dataset per leaf.

Beside what Minari reads an episode has the attribute gym_trace, which is its identity, and where infos were recorded a
group gym_trace, in which they are whole.
"""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import Any

import numpy as np

from gym_trace.data.episode import Episode
from gym_trace.data.layout import Layout, Leaf
from gym_trace.data.schema import Layouts
from gym_trace.exchange.formats.hdf5.writing import Arrays, Group, attribute, new_file, new_group
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.infos import packed
from gym_trace.exchange.formats.minari.plan import MinariPlan, attributes_of
from gym_trace.exchange.formats.source import flags
from gym_trace.exchange.formats.steps.windows import Window

FILE = "main_data.hdf5"
_BOOL = np.dtype(np.bool_)


class HDF5Episodes:
    """Writer of the episodes to the file. count: episodes so far."""

    def __init__(self, data: FilePath, plan: MinariPlan, layouts: Layouts):
        self.count = 0
        self._plan = plan
        self._opening = new_file(data / FILE)
        groups, names = map(
            list.__add__, _names(layouts.observations, "observations"), _names(layouts.actions, "actions")
        )
        self._leaves = {path: _arrays(name, form) for name, (path, form) in zip(names, plan.forms.items(), strict=True)}
        self._rewards = _arrays("rewards", plan.rewards)
        self._flags = [Arrays(name, _BOOL) for name in ("terminations", "truncations")]
        self._infos = [
            (column, Arrays("/".join(("infos", *column.path)), column.dtype, column.shape))
            for column in plan.infos.columns
        ]
        inner = {
            "/".join(("infos", *column.path[:end])) for column in plan.infos.columns for end in range(len(column.path))
        }
        self._groups = [*groups, *sorted({"infos", *inner})]

    def __enter__(self) -> HDF5Episodes:
        self._file, self._check = self._opening.__enter__()
        return self

    def __exit__(self, *what: Any) -> None:
        self._opening.__exit__(*what)

    def begin(self, episode: Episode, identity: str) -> None:
        """Write the metadata of an episode, before its steps."""
        steps = len(episode)
        self._group: Group = new_group(self._file.id, f"episode_{self.count}")
        attribute(self._group, "id", self.count)
        attribute(self._group, "total_steps", steps)
        seed = episode.seed
        if seed is not None and seed < 1 << 64:
            attribute(self._group, "seed", seed)
        for name, value in attributes_of(episode.options or {}, "options"):
            attribute(self._group, name, value)
        attribute(self._group, KEY, identity)
        for name in self._groups:
            new_group(self._group, name)
        if self._plan.infos.are_kept_whole and steps:
            self._kept = new_group(self._group, KEY)
        self.count += 1
        self._data = {
            path: arrays.new(self._group, steps + (path[0] == "observations")) for path, arrays in self._leaves.items()
        }
        self._of_steps = [arrays.new(self._group, steps) for arrays in (self._rewards, *self._flags)]
        self._of_infos = [arrays.new(self._group, steps + 1) for _, arrays in self._infos]
        for (column, arrays), data in zip(self._infos, self._of_infos):
            first = column.of_reset(episode.reset_info)
            arrays.write(data, 0, column.blank if first is None else first)

    def add(self, window: Window) -> None:
        """Steps of the episode that was begun."""
        self._check()
        columns, start, lead = window.columns, window.start, 0 if window.opens else 1
        for path, arrays in self._leaves.items():
            if path[0] == "observations":
                arrays.write(self._data[path], start + lead, columns[path][lead:])
            elif window.steps:
                arrays.write(self._data[path], start, columns[path])
        if not window.steps:
            return
        for arrays, data, rows in zip(
            (self._rewards, *self._flags), self._of_steps, (columns[("rewards",)], *flags(window)), strict=True
        ):
            arrays.write(data, start, rows)
        for (column, arrays), data in zip(self._infos, self._of_infos):
            arrays.write(data, start + 1, column.rows(window))
        if self._plan.infos.are_kept_whole:
            for place, kept in packed(window, self._plan.infos):
                bare = Arrays(str(place), np.dtype(np.uint8))
                bare.write(bare.new(self._kept, len(kept)), 0, np.frombuffer(kept, np.uint8))


def _arrays(name: str, form: Any) -> Arrays:
    return Arrays(name, None) if form is None else Arrays(name, form.dtype, form.shape)


def _names(layout: Layout, name: str) -> tuple[list[str], list[str]]:
    """Return Minari's names for the groups of a space, outer ones first, and for its leaves, in their order."""
    if isinstance(layout, Leaf):
        return [], [name]
    groups, leaves = [name], []
    for key, child in layout.parts():
        inner = _names(child, f"{name}/{key if layout.keys is not None else f'_index_{key}'}")
        groups += inner[0]
        leaves += inner[1]
    return groups, leaves
