"""Statistics for normalization: mean, std, min and max of each element of each column."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from gym_trace.data.layout import Path
from gym_trace.data.schema import Layouts
from gym_trace.data.values import Array
from gym_trace.playback.episode_index import EpisodeIndex, RecordedEpisodes
from gym_trace.playback.row_types import row_types
from gym_trace.playback.sampling.rows import agreed_layouts, chosen_forms
from gym_trace.playback.sampling.store import CACHE_KEY, Known, default_root, identified
from gym_trace.playback.scan import OMITTED, Scan
from gym_trace.storage.staging import replaced_file

_VERSION = 2
_FILE = "moments.npz"
_FLOAT_BYTES = 1 << 24  # that are computed with at a time


@dataclass(frozen=True, eq=False)
class Moments:
    """Statistics of the rows of a column, element by element.

    Attributes:
        count: how many rows.
        mean, std, min, max: float64 arrays of the shape of a row; std is that of the rows, not of a larger population.
    """

    count: int
    mean: Array
    std: Array
    min: Array
    max: Array


@dataclass
class _Sums:
    """Moments to which rows can be added: the squares are those of distances from the mean (Chan et al., 1979)."""

    count: int
    mean: Array
    squares: Array
    low: Array
    high: Array

    @classmethod
    def of_none(cls, shape: tuple[int, ...]) -> _Sums:
        return cls(0, np.zeros(shape), np.zeros(shape), np.full(shape, np.inf), np.full(shape, -np.inf))

    def add(self, rows: Array) -> None:
        at_once = max(1, _FLOAT_BYTES // (8 * max(1, int(np.prod(rows.shape[1:], dtype=np.int64)))))
        with np.errstate(all="ignore"):  # what is not finite has moments that are not
            for begin in range(0, len(rows), at_once):
                self._add(rows[begin : begin + at_once].astype(np.float64))

    def _add(self, rows: Array) -> None:
        count, mean = self.count + len(rows), rows.mean(axis=0)
        further = mean - self.mean
        self.low, self.high = np.minimum(self.low, rows.min(axis=0)), np.maximum(self.high, rows.max(axis=0))
        rows -= mean
        self.squares = self.squares + (rows * rows).sum(axis=0) + further**2 * (self.count * len(rows) / count)
        self.mean = self.mean + further * (len(rows) / count)
        self.count = count

    def moments(self) -> Moments:
        with np.errstate(all="ignore"):
            return Moments(self.count, self.mean, np.sqrt(self.squares / self.count), self.low, self.high)


def moments_of(trace: RecordedEpisodes, roots: frozenset[str]) -> dict[str, Any]:
    """Return moments, with the structure of the spaces. Those of a whole trace are cached.

    Raises CorruptTrace, and TraceError if the writers have different spaces.
    """
    layouts, content = agreed_layouts(trace), trace.content
    known_forms = chosen_forms(row_types(trace), roots)
    forms = {path: form for path, form in known_forms.items() if form is not None and form.dtype.kind in "biuf"}
    described = json.dumps(
        [_VERSION, str(trace.directory), [[[*path], *form[:2]] for path, form in forms.items()]], default=str
    )
    file = default_root() / hashlib.sha256(described.encode()).hexdigest()[:32] / _FILE
    episodes = identified(content, trace.readers, content["steps"])
    over = content["outcome"] != "running"
    known, sums = Known(np.zeros(0, CACHE_KEY)), {path: _Sums.of_none(form.shape) for path, form in forms.items()}
    is_whole = trace.whole is trace
    if is_whole:
        known, sums = _found(file, episodes[over], known, sums)
    is_new = known.places(episodes) < 0
    _add(content, is_new & over, sums)
    if is_whole and (is_new & over).any():
        _keep(file, episodes[over], sums)
    _add(content, is_new & ~over, sums)
    return _structured(layouts, roots, {path: one.moments() if one.count else None for path, one in sums.items()})


def _add(content: EpisodeIndex, chosen: Array, sums: dict[Path, _Sums]) -> None:
    """Add the rows of chosen episodes; those that a view has several times are added as often."""
    whole, episodes = content.whole_places, np.flatnonzero(chosen & (content["steps"] > 0))
    while len(episodes):
        _, firsts = np.unique(whole[episodes], return_index=True)
        for block in Scan(content, sums, episodes[firsts], finals=OMITTED, prefix=False):
            for path in sums.keys() & block.columns:
                sums[path].add(block.columns[path])
        episodes = np.delete(episodes, firsts)


def _structured(layouts: Layouts, roots: frozenset[str], found: dict[Path, Moments | None]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for root, layout in (("observations", layouts.observations), ("actions", layouts.actions)):
        if root in roots:
            result[root] = layout.join(iter([found.get(leaf.path) for leaf in layout.leaves()]))
    result |= {str(path[0]): moments for path, moments in found.items() if len(path) == 1 and path[0] not in result}
    notes = {str(path[1]): moments for path, moments in found.items() if path[0] == "annotations"}
    return result | ({"annotations": notes} if notes else {})


# -- kept -------------------------------------------------------------------------------------------------------------


def _found(file: FilePath, episodes: Array, known: Known, sums: dict[Path, _Sums]) -> tuple[Known, dict[Path, _Sums]]:
    """Return what is cached if it belongs to these episodes; otherwise the arguments."""
    with suppress(OSError, ValueError, KeyError, zipfile.BadZipFile), np.load(file) as kept:
        table = kept["episodes"]
        there = Known(episodes)
        if table.dtype == CACHE_KEY and (there.places(table) >= 0).all():
            found = {
                path: _Sums(int(kept["counts"][number]), *(kept[f"{name}{number}"] for name in _NAMES))
                for number, path in enumerate(sums)
            }
            if all(one.mean.shape == sums[path].mean.shape for path, one in found.items()):
                return Known(table), found
    return known, sums


_NAMES = ("mean", "squares", "low", "high")


def _keep(file: FilePath, episodes: Array, sums: dict[Path, _Sums]) -> None:
    """Keeps them where that can be: they can be had again."""
    arrays = {f"{name}{number}": getattr(one, name) for number, one in enumerate(sums.values()) for name in _NAMES}
    counts = np.array([one.count for one in sums.values()], np.int64)
    with suppress(OSError):
        os.makedirs(file.parent, exist_ok=True)
        with replaced_file(file) as staged, open(staged, "wb") as out:
            np.savez(out, episodes=episodes, counts=counts, **arrays)
