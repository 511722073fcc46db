"""Write and read the episodes of a Minari dataset in one HDF5 file: one group per episode, one dataset per leaf.

In addition to Minari's data, an episode has an attribute gym_trace, its identity, and for infos a group gym_trace with
the output of packed().
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from typing import Any

import h5py
import numpy as np

from gym_trace.data.episode import Episode
from gym_trace.data.layout import Layout, Leaf, PlainSpace
from gym_trace.data.schema import Layouts
from gym_trace.data.values import placeholder
from gym_trace.exchange.formats.foreign import widest
from gym_trace.exchange.formats.hdf5.reading import H5File, H5Group, H5Rows, columns_in, step_ranges
from gym_trace.exchange.formats.hdf5.writing import Arrays, Group, attribute, info_arrays, new_group
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.imported import NewEpisode, NewSteps
from gym_trace.exchange.formats.infos import ANNOTATIONS, PackedInfos, packed
from gym_trace.exchange.formats.minari.plan import MinariPlan, attributes_of
from gym_trace.exchange.formats.minari.spaces import is_picture, jpeg_pictures
from gym_trace.exchange.formats.rows import custom, infos_of
from gym_trace.exchange.formats.source import flags
from gym_trace.exchange.formats.steps.windows import Window

HDF5_FILE = "main_data.hdf5"
_BOOL = np.dtype(np.bool_)


class HDF5Episodes:
    """Writes episodes to the file. count: episodes so far."""

    def __init__(self, file: h5py.File, check: Callable[[], None], plan: MinariPlan, layouts: Layouts):
        """file, check: see new_file()."""
        self.count = 0
        self._file, self._check, self._plan = file, check, plan
        groups, names = map(
            list.__add__, _names(layouts.observations, "observations"), _names(layouts.actions, "actions")
        )
        self._leaves = {path: _arrays(name, form) for name, (path, form) in zip(names, plan.forms.items(), strict=True)}
        self._rewards = _arrays("rewards", plan.rewards)
        self._flags = [Arrays(name, _BOOL) for name in ("terminations", "truncations")]
        arrays, inner = info_arrays(plan.infos.columns)
        self._infos = list(zip(plan.infos.columns, arrays))
        self._groups = [*groups, *(inner or ["infos"])]

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
        if self._plan.infos.need_packing and steps:
            self._packed_infos = new_group(self._group, KEY)
        self.count += 1
        self._leaf_data = {
            path: arrays.new(self._group, steps + (path[0] == "observations")) for path, arrays in self._leaves.items()
        }
        self._step_data = [arrays.new(self._group, steps) for arrays in (self._rewards, *self._flags)]
        self._info_data = [arrays.new(self._group, steps + 1) for _, arrays in self._infos]
        for (column, arrays), dataset in zip(self._infos, self._info_data):
            value = column.of_reset(episode.reset_info)
            arrays.write(dataset, 0, placeholder(column.dtype, column.shape) if value is None else value)

    def add(self, window: Window) -> None:
        """Write steps of the current episode."""
        self._check()
        columns, start, skipped = window.columns, window.start, 0 if window.opens else 1
        for path, arrays in self._leaves.items():
            if path[0] == "observations":
                arrays.write(self._leaf_data[path], start + skipped, columns[path][skipped:])
            elif window.steps:
                arrays.write(self._leaf_data[path], start, columns[path])
        if not window.steps:
            return
        for arrays, dataset, rows in zip(
            (self._rewards, *self._flags), self._step_data, (columns[("rewards",)], *flags(window)), strict=True
        ):
            arrays.write(dataset, start, rows)
        for (column, arrays), dataset in zip(self._infos, self._info_data):
            arrays.write(dataset, start + 1, column.rows(window))
        if self._plan.infos.need_packing:
            for first, data in packed(window, self._plan.infos):
                blob = Arrays(str(first), np.dtype(np.uint8))
                blob.write(blob.new(self._packed_infos, len(data)), 0, np.frombuffer(data, np.uint8))


def _arrays(name: str, form: Any) -> Arrays:
    return Arrays(name, None) if form is None else Arrays(name, form.dtype, form.shape)


def _names(layout: Layout, name: str) -> tuple[list[str], list[str]]:
    """Return Minari's names of the groups of a space, outer ones first, and of its leaves."""
    if isinstance(layout, Leaf):
        return [], [name]
    groups, leaves = [name], []
    for key, child in layout.parts():
        inner = _names(child, f"{name}/{key if layout.keys is not None else f'_index_{key}'}")
        groups += inner[0]
        leaves += inner[1]
    return groups, leaves


_DEEPEST, _MOST_GROUPS = 32, 200
ReadRows = Callable[[int, int], Any]  # (begin, end)


class HDF5Reader:
    """Reads the file. spaces: None: as wide as the arrays. has_jpeg: images are JPEG."""

    def __init__(self, path: FilePath, spaces: tuple[PlainSpace | None, PlainSpace | None], has_jpeg: bool):
        self._file = H5File(path)
        self._has_jpeg = has_jpeg
        names = [name for name in self._file.root.names() if name.startswith("episode_") and _is_number(name[8:])]
        self._names = sorted(names, key=lambda name: int(name[8:]))
        observations, actions = spaces
        self.spaces = self._space("observations", observations), self._space("actions", actions)

    def __len__(self) -> int:
        return len(self._names)

    def _space(self, root: str, known: PlainSpace | None) -> PlainSpace:
        if known is not None:
            return known
        if not self._names:
            raise self._file.fault("", "no episodes and no spaces")
        return _widest(self._file.root.group(self._names[0]), root, set())

    def episodes(self) -> Iterator[NewEpisode]:
        """Yield the episodes. Raises UnreadableRecording."""
        with self._file:
            for name in self._names:
                yield self._episode(self._file.root.group(name))

    def _episode(self, group: H5Group) -> NewEpisode:
        rewards, terminations, truncations = map(group.rows, ("rewards", "terminations", "truncations"))
        steps = len(rewards)
        observations, observation_size = self._column(group, "observations", self.spaces[0], steps + 1)
        actions, action_size = self._column(group, "actions", self.spaces[1], steps)
        for array in (terminations, truncations):
            _check_length(array, steps)
        attributes = group.attributes(KEY, "options", "seed")
        options = _nested({name[8:]: value for name, value in attributes.items() if name.startswith("options/")})
        identity, seed = attributes.get(KEY), attributes.get("seed")
        infos = _Infos(group, steps, isinstance(identity, str))

        def parts() -> Iterator[NewSteps]:
            for begin, end in infos.step_ranges(observation_size + action_size):
                yield NewSteps(
                    observations(0 if begin == 0 else begin + 1, end + 1),
                    actions(begin, end),
                    rewards.read(begin, end),
                    terminations.read(begin, end).astype(np.bool_),
                    truncations.read(begin, end).astype(np.bool_),
                    *infos.read(begin, end),
                )

        return NewEpisode(
            steps,
            parts(),
            seed=int(seed) if isinstance(seed, (int, np.integer)) and seed >= 0 else None,
            options=options or None,
            reset_info=infos.of_reset(),
            identity=identity if isinstance(identity, str) else None,
        )

    def _column(self, group: H5Group, key: str, space: PlainSpace, rows: int, depth: int = 0) -> tuple[ReadRows, int]:
        """Return a function that reads rows of a space, and the bytes per row."""
        if depth > _DEEPEST:
            raise group.fault("is nested too deep")
        if space["type"] in ("Dict", "Tuple"):
            inner, is_dict = group.group(key), space["type"] == "Dict"
            parts = space["spaces"] if is_dict else [[f"_index_{i}", child] for i, child in enumerate(space["spaces"])]
            columns = {name: self._column(inner, str(name), child, rows, depth + 1) for name, child in parts}

            def tree(begin: int, end: int) -> Any:
                values = {name: read(begin, end) for name, (read, _) in columns.items()}
                return values if is_dict else tuple(values.values())

            return tree, sum(size for _, size in columns.values())
        array = group.rows(key)
        _check_length(array, rows)
        if self._has_jpeg and is_picture(space) and (array.is_bytes or len(array.shape) == 2):
            shape = tuple(space["shape"])

            def pictures(begin: int, end: int) -> Any:
                return jpeg_pictures(array.read(begin, end), shape, array.fault)

            return pictures, math.prod(shape)
        return array.read, array.row_size


def _is_number(name: str) -> bool:
    return name.isdecimal() and len(name) < 20


def _check_length(array: H5Rows, rows: int) -> None:
    if not array.shape or len(array) != rows:
        raise array.fault(f"has {len(array)} rows instead of {rows}")


def _widest(group: H5Group, key: str, seen: set[int]) -> PlainSpace:
    """Return the widest space of the arrays. seen: addresses of groups."""
    if group.is_group(key):
        inner = group.group(key)
        inner.add_to(seen)
        if len(seen) > _MOST_GROUPS:
            raise inner.fault("too many groups")
        names = inner.names()
        if names and all(name.startswith("_index_") for name in names):
            return {"type": "Tuple", "spaces": [_widest(inner, f"_index_{i}", seen) for i in range(len(names))]}
        return {"type": "Dict", "spaces": [[name, _widest(inner, name, seen)] for name in names]}
    rows = group.rows(key)
    if rows.is_text or rows.is_bytes:
        return custom("text" if rows.is_text else "bytes")
    return widest(rows.dtype, rows.shape[1:])


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Return options from attributes: "goal/x" becomes options["goal"]["x"]."""
    options: dict[str, Any] = {}
    for name, value in flat.items():
        *outer, last = name.split("/")
        inner: Any = options
        for key in outer:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                break
        else:
            inner[last] = value.item() if isinstance(value, np.generic) else value
    return options


class _Infos:
    """Infos of an episode: packed by gym-trace, or from the columns of Minari."""

    def __init__(self, group: H5Group, steps: int, is_ours: bool):
        self._steps = steps
        self._packed = group.group(KEY) if is_ours and KEY in group else None
        columns = columns_in(group.group("infos")) if "infos" in group and group.is_group("infos") else {}
        columns = {path: rows for path, rows in columns.items() if rows.shape and len(rows) == steps + 1}
        self._annotations = {path[1]: rows for path, rows in columns.items() if is_ours and path[0] == ANNOTATIONS}
        self._columns = {} if is_ours else columns

    def step_ranges(self, row_size: int) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of the steps to read at a time."""
        if self._packed is None:
            info_size = sum(rows.row_size for rows in (*self._columns.values(), *self._annotations.values()))
            yield from step_ranges(self._steps, row_size + info_size)
            return
        begins = sorted(int(name) for name in self._packed.names() if _is_number(name))
        if begins[:1] != [0] or begins[-1] >= self._steps:
            raise self._packed.fault("is malformed")
        yield from zip(begins, [*begins[1:], self._steps])

    def read(self, begin: int, end: int) -> tuple[list[Any] | None, dict[str, Any]]:
        """Return the infos of steps, and their annotations."""
        columns = {name: rows.read(begin + 1, end + 1) for name, rows in self._annotations.items()}
        if self._packed is not None:
            unpacked = PackedInfos()
            unpacked.add(0, np.asarray(self._packed.rows(str(begin)).read(), np.uint8).tobytes())
            infos, annotations = unpacked.take(end - begin)
            return infos, columns | annotations
        if not self._columns:
            return None, columns
        rows = {path: array.read(begin + 1, end + 1) for path, array in self._columns.items()}
        return infos_of(rows, end - begin), columns

    def of_reset(self) -> dict[str, Any] | None:
        """Return the info of the reset, if Minari stored it."""
        columns = {path: array.read(0, 1) for path, array in self._columns.items()}
        return infos_of(columns, 1)[0] if columns else None
