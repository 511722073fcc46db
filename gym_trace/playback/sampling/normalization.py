"""Statistics for normalization: mean, std, min and max of each element of each column."""

from __future__ import annotations

import hashlib
import json
import math
import os
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from gym_trace.data.layout import Path
from gym_trace.data.moments import RunningMoments
from gym_trace.data.schema import Layouts
from gym_trace.data.values import Array
from gym_trace.playback.episode_index import EpisodeIndex, RecordedEpisodes, index_of, whole_of
from gym_trace.playback.row_types import RowType, row_types
from gym_trace.playback.sampling.rows import agreed_layouts, chosen_row_types
from gym_trace.playback.sampling.store import CACHE_KEY, Known, identified
from gym_trace.playback.scan import OMITTED, Scan
from gym_trace.storage.local import cache_root
from gym_trace.storage.staging import replaced_file

_VERSION = 3
_FILE = "moments.npz"


@dataclass(frozen=True, eq=False)
class Moments:
    """Statistics of the rows of a column, element by element.

    Attributes:
        count: number of rows.
        mean, std, min, max: float64 arrays of the shape of a row; std divides by count, not by count - 1.
    """

    count: int
    mean: Array
    std: Array
    min: Array
    max: Array


def moments_of(trace: RecordedEpisodes, roots: frozenset[str]) -> dict[str, Any]:
    """Return moments, with the structure of the spaces. The moments of a whole trace are cached.

    Raises CorruptTrace, and TraceError if the writers have different spaces.
    """
    layouts, content = agreed_layouts(trace), index_of(trace)
    row_type_of = chosen_row_types(row_types(trace), roots)
    numeric = {
        path: row_type
        for path, row_type in row_type_of.items()
        if row_type is not None and row_type.dtype.kind in "biuf"
    }
    described = json.dumps(
        [_VERSION, str(trace.directory), [[[*path], *row_type[:2]] for path, row_type in numeric.items()]], default=str
    )
    file = cache_root() / hashlib.sha256(described.encode()).hexdigest()[:32] / _FILE
    episodes = identified(content, index_of(trace).readers, content["steps"])
    is_finished = content["outcome"] != "running"
    known, sums = Known(np.zeros(0, CACHE_KEY)), {path: _empty(row_type) for path, row_type in numeric.items()}
    is_whole = whole_of(trace) is trace
    if is_whole:
        known, sums = _found(file, episodes[is_finished], known, sums)
    is_new = known.positions(episodes) < 0
    _add(content, is_new & is_finished, sums)
    if is_whole and (is_new & is_finished).any():
        _keep(file, episodes[is_finished], sums)
    _add(content, is_new & ~is_finished, sums)
    return _structured(layouts, roots, {path: _result(moments, numeric[path]) for path, moments in sums.items()})


def _empty(row_type: RowType) -> RunningMoments:
    return RunningMoments(math.prod(row_type.shape), finite_only=False)


def _result(moments: RunningMoments, row_type: RowType) -> Moments | None:
    """Return moments with the shape of a row; None without rows."""
    columns = (moments.mean, moments.std, moments.least, moments.largest)
    return Moments(moments.rows, *(column.reshape(row_type.shape) for column in columns)) if moments.rows else None


def _add(content: EpisodeIndex, chosen: Array, sums: dict[Path, RunningMoments]) -> None:
    """Add the rows of chosen episodes; an episode that a view has twice is added twice."""
    whole, episodes = content.whole_indices, np.flatnonzero(chosen & (content["steps"] > 0))
    while len(episodes):
        _, firsts = np.unique(whole[episodes], return_index=True)
        for block in Scan(content, sums, episodes[firsts], finals=OMITTED, prefix=False):
            for path in sums.keys() & block.columns:
                rows = block.columns[path]
                sums[path].add(rows.reshape(len(rows), math.prod(rows.shape[1:])))
        episodes = np.delete(episodes, firsts)


def _structured(layouts: Layouts, roots: frozenset[str], found: dict[Path, Moments | None]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for root, layout in (("observations", layouts.observations), ("actions", layouts.actions)):
        if root in roots:
            result[root] = layout.join(iter([found.get(leaf.path) for leaf in layout.leaves()]))
    result |= {str(path[0]): moments for path, moments in found.items() if len(path) == 1 and path[0] not in result}
    annotations = {str(path[1]): moments for path, moments in found.items() if path[0] == "annotations"}
    return result | ({"annotations": annotations} if annotations else {})


# -- cached -----------------------------------------------------------------------------------------------------------


def _found(
    file: FilePath, episodes: Array, known: Known, sums: dict[Path, RunningMoments]
) -> tuple[Known, dict[Path, RunningMoments]]:
    """Return the cached episodes and sums if they are of these episodes; otherwise known and sums."""
    with suppress(OSError, ValueError, KeyError, zipfile.BadZipFile), np.load(file) as cached:
        table = cached["episodes"]
        wanted = Known(episodes)
        if table.dtype == CACHE_KEY and (wanted.positions(table) >= 0).all():
            found = {}
            for number, (path, empty) in enumerate(sums.items()):
                found[path] = moments = RunningMoments(len(empty.mean), finite_only=False)
                moments.rows = int(cached["counts"][number])
                moments.count[:] = moments.rows
                for name in _NAMES:
                    setattr(moments, name, cached[f"{name}{number}"])
            if all(moments.mean.shape == sums[path].mean.shape for path, moments in found.items()):
                return Known(table), found
    return known, sums


_NAMES = ("mean", "squared_deviations", "least", "largest")


def _keep(file: FilePath, episodes: Array, sums: dict[Path, RunningMoments]) -> None:
    """Cache moments. Ignores errors, as moments can be computed again."""
    arrays = {f"{name}{number}": getattr(one, name) for number, one in enumerate(sums.values()) for name in _NAMES}
    counts = np.array([one.rows for one in sums.values()], np.int64)
    with suppress(OSError):
        os.makedirs(file.parent, exist_ok=True)
        with replaced_file(file) as staged, open(staged, "wb") as out:
            np.savez(out, episodes=episodes, counts=counts, **arrays)
