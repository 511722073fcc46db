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
from gym_trace.data.values import Array
from gym_trace.playback.content import Recorded
from gym_trace.playback.sampling.rows import Pieces, Plan, Rows, in_memory
from gym_trace.playback.sampling.store import KEPT, Known, default_root, identified
from gym_trace.storage.staging import replaced_file

_VERSION = 2
_FILE = "moments.npz"
_BLOCK_BYTES = 1 << 24  # that are decoded at a time
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


def moments_of(trace: Recorded, roots: frozenset[str]) -> dict[str, Any]:
    """Moments, with the structure of the spaces. Of a whole trace they are kept among the caches.

    Raises CorruptTrace, and TraceError if the writers have different spaces.
    """
    plan = Plan(trace, roots, to_the_end=True)
    forms = {path: form for path, form in plan.forms.items() if form is not None and form.dtype.kind in "biuf"}
    said = json.dumps(
        [_VERSION, str(trace.directory), [[[*path], *form[:2]] for path, form in forms.items()]], default=str
    )
    file = default_root() / hashlib.sha256(said.encode()).hexdigest()[:32] / _FILE
    episodes, over = identified(plan), plan.table["outcome"] != "running"
    known, sums = Known(np.zeros(0, KEPT)), {path: _Sums.of_none(form.shape) for path, form in forms.items()}
    is_whole = trace.whole is trace
    if is_whole:
        known, sums = _found(file, episodes[over], known, sums)
    is_new = known.places(episodes) < 0
    _add(plan, is_new & over, sums)
    if is_whole and (is_new & over).any():
        _keep(file, episodes[over], sums)
    _add(plan, is_new & ~over, sums)
    found = {path: one.moments() if one.count else None for path, one in sums.items()}
    return _structured(plan, roots, found)


def _add(plan: Plan, chosen: Array, sums: dict[Path, _Sums]) -> None:
    """Adds the rows of chosen episodes, each once, in memory that is bounded."""
    if not chosen.any():
        return
    block = max(1, _BLOCK_BYTES // max(1, plan.step_bytes))
    for block_of in plan.blocks(block, 0, 0):
        pieces = block_of()
        mine = chosen[pieces.episode]
        if mine.any():
            some = Pieces(*(column[mine] for column in pieces))
            _add_rows(plan.decode([some], in_memory), plan.repeated[some.episode] - some.offset, sums)


def _add_rows(rows: Rows, repeated: Array, sums: dict[Path, _Sums]) -> None:
    """Add rows. repeated: how many steps of each piece repeat another episode, which are not counted."""
    for path, one in sums.items():
        array, is_seen = rows.columns[path], path[0] == "observations"
        counts = np.clip(repeated, 0, rows.lengths + is_seen)
        not_counted = [np.repeat((rows.seen if is_seen else rows.steps) - np.cumsum(counts) + counts, counts)]
        not_counted[0] += np.arange(len(not_counted[0]))
        if is_seen:  # whose first ones are the last ones of a block before
            not_counted.append(rows.seen[rows.offset > 0])
            if rows.known is not None:
                not_counted.append((rows.seen + rows.lengths)[~rows.known])
        if any(map(len, not_counted)):
            array = np.delete(array, np.concatenate(not_counted), axis=0)
        one.add(array)


def _structured(plan: Plan, roots: frozenset[str], found: dict[Path, Moments | None]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for root, layout in (("observations", plan.layouts.observations), ("actions", plan.layouts.actions)):
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
        if table.dtype == KEPT and (there.places(table) >= 0).all():
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
