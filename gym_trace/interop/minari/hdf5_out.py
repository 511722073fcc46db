"""The episodes of a data set of Minari in one HDF5 file: a group an episode, a data set a leaf.

Beside what Minari reads an episode has the attribute gym_trace, which is its identity, and where infos were recorded a
group gym_trace, in which they are whole.
"""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import Any

import numpy as np

from gym_trace.interop.hdf5.writing import Arrays, Group, attribute, new_file, new_group
from gym_trace.interop.identity import KEY
from gym_trace.interop.infos import packed
from gym_trace.interop.minari.plan import Plan, are_options
from gym_trace.interop.source import flags, leaves_of
from gym_trace.interop.steps.windows import Window
from gym_trace.model.episode import Episode
from gym_trace.model.layout import Layout, Leaf
from gym_trace.model.schema import Layouts

FILE = "main_data.hdf5"
_BOOL = np.dtype(np.bool_)


def names_in_file(layout: Layout, name: str) -> list[str]:
    """Where Minari has the leaves of a space in the group of an episode, in their order."""
    if isinstance(layout, Leaf):
        return [name]
    keys = [f"_index_{i}" for i in range(len(layout.children))] if layout.keys is None else map(str, layout.keys)
    return [inner for key, child in zip(keys, layout.children) for inner in names_in_file(child, f"{name}/{key}")]


class HDF5Episodes:
    """The file, written an episode after the other. count: how many there are."""

    def __init__(self, data: FilePath, plan: Plan, layouts: Layouts):
        self.count = 0
        self._plan = plan
        self._file = new_file(data / FILE)
        names = names_in_file(layouts.observations, "observations") + names_in_file(layouts.actions, "actions")
        self._leaves = {path: _arrays(name, form) for name, (path, form) in zip(names, plan.forms.items(), strict=True)}
        self._rewards = _arrays("rewards", plan.rewards)
        self._flags = [Arrays(name, _BOOL) for name in ("terminations", "truncations")]
        self._infos = [
            (column, Arrays("/".join(("infos", *column.path)), column.dtype, column.shape))
            for column in plan.infos.columns
        ]
        self._groups = _groups([*names, *(arrays.name for _, arrays in self._infos)])

    def __enter__(self) -> HDF5Episodes:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def begin(self, episode: Episode, identity: str) -> None:
        """What is known of an episode, before its steps."""
        steps = len(episode)
        self._group: Group = new_group(self._file.id, f"episode_{self.count}")
        attribute(self._group, "id", self.count)
        attribute(self._group, "total_steps", steps)
        seed = episode.seed
        if seed is not None and seed < 1 << 64:
            attribute(self._group, "seed", seed)
        if (options := episode.options) and are_options(options, is_hdf5=True):
            _attributes(self._group, "options", options)
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
        layouts, columns, start = window.writer.layouts, window.columns, window.start
        for leaf, rows in leaves_of(layouts.observations, columns["observations"]):
            begin = 0 if window.opens else start + 1
            self._leaves[leaf.path].write(self._data[leaf.path], begin, rows if window.opens else rows[1:])
        if not window.steps:
            return
        for leaf, rows in leaves_of(layouts.actions, columns["actions"]):
            self._leaves[leaf.path].write(self._data[leaf.path], start, rows)
        for arrays, data, rows in zip(
            (self._rewards, *self._flags), self._of_steps, (columns["rewards"], *flags(window)), strict=True
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


def _groups(arrays: list[str]) -> list[str]:
    """The groups that there are in each episode, those that others lie in first; infos always."""
    inner = [name.split("/")[:-1] for name in arrays]
    names = {"/".join(parts[:end]) for parts in inner for end in range(1, len(parts) + 1)}
    return sorted({*names, "infos"})


def _attributes(group: Group, name: str, options: dict[str, Any]) -> None:
    """Options as Minari has them: the attribute "options/goal/x" is options["goal"]["x"]."""
    for key, value in options.items():
        if isinstance(value, dict):
            _attributes(group, f"{name}/{key}", value)
        else:
            attribute(group, f"{name}/{key}", value if type(value) in (int, str) else np.asarray(value))
