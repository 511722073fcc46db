"""Write and read the episodes of a Minari dataset in one HDF5 file: one group per episode, one dataset per leaf.

In addition to Minari's data, an episode has an attribute gym_trace, its identity, and for infos a group gym_trace with
the output of packed().
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from typing import Any

import h5py
import numpy as np

from gym_trace.data.episode import Episode
from gym_trace.data.layout import PlainSpace
from gym_trace.exchange.formats.foreign import widest
from gym_trace.exchange.formats.hdf5.reading import H5File, H5Group, H5Rows, columns_in
from gym_trace.exchange.formats.hdf5.writing import Arrays, Datasets, Group, attribute, new_group
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.imported import NewEpisode
from gym_trace.exchange.formats.infos import PackedInfos, packed
from gym_trace.exchange.formats.minari.plan import MinariPlan, attributes_of
from gym_trace.exchange.formats.minari.reading import InfoRows, KnownSpaces, episode_of, spaces_in
from gym_trace.exchange.formats.minari.spaces import Name, index_in_hdf5
from gym_trace.exchange.formats.rows import custom, step_ranges
from gym_trace.exchange.formats.steps.windows import Window
from gym_trace.playback.row_types import RowType

HDF5_FILE = "main_data.hdf5"
_BYTES = RowType(np.dtype(np.uint8), ())
_MOST_GROUPS = 200


class HDF5Episodes:
    """Writes episodes to the file. count: episodes so far."""

    def __init__(self, file: h5py.File, check: Callable[[], None], plan: MinariPlan):
        """file, check: see new_file()."""
        self.count = 0
        self._file, self._check, self._infos = file, check, plan.infos
        self._datasets = Datasets(plan.columns, ["infos", *plan.groups])

    def begin(self, episode: Episode, identity: str) -> None:
        """Write the metadata of an episode, before its steps."""
        group: Group = new_group(self._file.id, f"episode_{self.count}")
        attribute(group, "id", self.count)
        attribute(group, "total_steps", len(episode))
        if episode.seed is not None and episode.seed < 1 << 64:
            attribute(group, "seed", episode.seed)
        for name, value in attributes_of(episode.options or {}, "options"):
            attribute(group, name, value)
        attribute(group, KEY, identity)
        if self._infos.need_packing and len(episode):
            self._packed_infos = new_group(group, KEY)
        self._datasets.create(group, len(episode))
        self.count += 1

    def add(self, window: Window) -> None:
        """Write steps of the current episode."""
        self._check()
        self._datasets.write(window, window.start)
        if self._infos.need_packing and window.steps:
            for first, data in packed(window.columns, window.start, window.steps, self._infos):
                blob = Arrays(str(first), _BYTES)
                blob.write(blob.new(self._packed_infos, len(data)), 0, np.frombuffer(data, np.uint8))


class HDF5Reader:
    """Reads the file. known: its spaces. has_jpeg: images are JPEG."""

    def __init__(self, path: FilePath, known: KnownSpaces, has_jpeg: bool):
        self._file = H5File(path)
        names = [name for name in self._file.root.names() if name.startswith("episode_") and _is_number(name[8:])]
        self._names = sorted(names, key=lambda name: int(name[8:]))
        if not self._names:
            raise self._file.fault("", "no episodes")
        self.spaces, self._columns = spaces_in(_HDF5Episode(self._file.root.group(self._names[0])), known, has_jpeg)

    def __len__(self) -> int:
        return len(self._names)

    def episodes(self) -> Iterator[NewEpisode]:
        """Yield the episodes. Raises UnreadableRecording."""
        with self._file:
            for name in self._names:
                yield episode_of(_HDF5Episode(self._file.root.group(name)), *self._columns)


def _is_number(name: str) -> bool:
    return name.isdecimal() and len(name) < 20


class _HDF5Episode:
    """An episode; see StoredEpisode."""

    def __init__(self, group: H5Group):
        rewards = group.rows("rewards")
        self._group, self.steps = group, len(rewards)
        self._arrays: dict[Name, H5Rows] = {("rewards",): rewards}
        self._seen: set[int] = set()  # addresses of groups
        self.part_of_tuple: Callable[[int], str] = index_in_hdf5
        self.fault = group.fault
        self.attributes = group.attributes(KEY, "options", "seed")
        options = {name[8:]: value for name, value in self.attributes.items() if name.startswith("options/")}
        if options:
            self.attributes["options"] = _nested(options)
        self._packed_infos = group.group(KEY) if isinstance(self.attributes.get(KEY), str) and KEY in group else None

    def _parent(self, name: Name) -> H5Group:
        group = self._group
        for part in name[:-1]:
            group = group.group(part)
        return group

    def parts(self, name: Name) -> list[str] | None:
        parent = self._parent(name)
        if not parent.is_group(name[-1]):
            return None
        group = parent.group(name[-1])
        group.add_to(self._seen)
        if len(self._seen) > _MOST_GROUPS:
            raise group.fault("too many groups")
        return group.names()

    def widest(self, name: Name) -> PlainSpace:
        rows = self._rows(name)
        if rows.is_text or rows.is_bytes:
            return custom("text" if rows.is_text else "bytes")
        return widest(rows.dtype, rows.shape[1:])

    def info_names(self) -> list[Name]:
        has_infos = "infos" in self._group and self._group.is_group("infos")
        columns = columns_in(self._group.group("infos")) if has_infos else {}
        columns = {path: rows for path, rows in columns.items() if rows.shape and len(rows) == self.steps + 1}
        self._arrays |= {("infos", *path): rows for path, rows in columns.items()}
        return [*columns]

    def _rows(self, name: Name) -> H5Rows:
        if name not in self._arrays:
            self._arrays[name] = rows = self._parent(name).rows(name[-1])
            count = self.steps + (name[0] == "observations")
            if not rows.shape or len(rows) != count:
                raise rows.fault(f"has {len(rows)} rows instead of {count}")
        return self._arrays[name]

    def row_size(self, name: Name) -> int:
        return self._rows(name).row_size

    def has_files(self, name: Name) -> bool:
        rows = self._rows(name)
        return rows.is_bytes or len(rows.shape) == 2

    def ranges(self, row_size: int) -> Iterator[tuple[int, int]]:
        if self._packed_infos is None:
            yield from step_ranges(self.steps, row_size)
            return
        begins = sorted(int(name) for name in self._packed_infos.names() if _is_number(name))
        if begins[:1] != [0] or begins[-1] >= self.steps:
            raise self._packed_infos.fault("is malformed")
        yield from zip(begins, [*begins[1:], self.steps])

    def read(self, name: Name, begin: int, end: int, shape: tuple[int, ...] | None = None) -> Any:
        return self._rows(name).read(begin, end)

    def packed(self, begin: int, end: int) -> InfoRows | None:
        if self._packed_infos is None:
            return None
        unpacked = PackedInfos()
        unpacked.add(0, np.asarray(self._packed_infos.rows(str(begin)).read(), np.uint8).tobytes())
        return unpacked.take(end - begin)


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
