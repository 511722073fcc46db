"""Statistics of column values, read chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gym_trace.data.layout import Leaf, Path, PlainSpace
from gym_trace.data.moments import RunningMoments
from gym_trace.data.values import Array
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.scan import OMITTED, Scan
from gym_trace.playback.trace import Trace
from gym_trace.tools.statistics.accumulators import Curve, Tally, Variety, moments_as_json

DISTINCT_VALUES = 64  # distinct rewards counted individually; more become a histogram
DISTINCT_CATEGORIES = 4096  # discrete actions and observations counted individually
MOST_ROW_DIMENSIONS = 512  # longer flat arrays are described as a whole
MOST_GRID_DIMENSIONS = 64  # larger arrays of several axes, such as images, are described as a whole
_VALUES = frozenset(("observations", "actions", "rewards"))


class ColumnValues:
    """Statistics of the rewards, actions and observations of one group of episodes."""

    def __init__(self) -> None:
        self._rewards = Rewards()
        self._leaves: dict[Any, LeafValues] = {}

    def add(self, leaves: Mapping[Path, tuple[Leaf, PlainSpace]], columns: Mapping[Path, Array]) -> None:
        """Add rows of columns. leaves: leaves of the spaces of these columns, by path."""
        for path, (leaf, space) in leaves.items():
            if path in columns:
                self._values_like(LeafValues(leaf, space)).add(columns[path])
        if ("rewards",) in columns:
            self._rewards.add(columns["rewards",])

    def merge(self, other: ColumnValues) -> None:
        self._rewards.merge(other._rewards)
        for values in other._leaves.values():
            self._values_like(LeafValues(values.leaf, values.space)).merge(values)

    def _values_like(self, empty: LeafValues) -> LeafValues:
        """Return the values of this leaf so far. Other environments may use the same name for another kind of leaf."""
        return self._leaves.setdefault(empty.key, empty)

    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = {"rewards": self._rewards.result(), "actions": [], "observations": []}
        for values in self._leaves.values():
            result[str(values.leaf.path[0])].append(values.result())
        return result


class StepValues:
    """Statistics of any columns, without their spaces, for example of the steps found by a condition."""

    def __init__(self) -> None:
        self._leaves: dict[Any, LeafValues] = {}

    def add(self, path: Path, rows: Array) -> None:
        """Add rows of a column: numbers of one shape, or objects."""
        dtype = rows.dtype if rows.dtype.kind in "biuf" else None
        key = path, None if dtype is None else rows.shape[1:]
        if key not in self._leaves:
            self._leaves[key] = LeafValues(Leaf(path, dtype, rows.shape[1:]), {"type": None})
        self._leaves[key].add(rows)

    def result(self) -> list[dict[str, Any]]:
        """Return the statistics of each column, in the order in which columns were added; see LeafValues.result."""
        return [values.result() for values in self._leaves.values()]


def describe_columns(
    trace: Trace, groups: int, group_of_episode: Array, on_progress: Callable[[int, int], None] | None
) -> list[ColumnValues]:
    """Return statistics of the values of each group. Raises CorruptTrace.

    Reads by chunks, not by episodes, because an episode of images may exceed the memory.

    Args:
        group_of_episode: (episodes,) int, the group of each episode of the trace.
        on_progress: called with the number of steps done and the total.
    """
    values = [ColumnValues() for _ in range(groups)]
    done, total = 0, sum(int(reader.fragments.steps.sum(dtype=np.int64)) for reader in index_of(trace).readers)
    for block in Scan(index_of(trace), _VALUES, finals=OMITTED, prefix=False):
        group_of_run = group_of_episode[block.episode]
        present = np.unique(group_of_run).tolist() if groups > 1 else [0]
        for group in present:
            columns = block.columns
            if len(present) > 1:
                is_of_group = group_of_run == group
                columns = {
                    path: rows[np.repeat(is_of_group, np.diff(block.offsets(path)))]
                    for path, rows in block.columns.items()
                }
            values[group].add(block.reader.about.leaves, columns)
        done += block.size
        if on_progress is not None:
            on_progress(done, total)
    return values


class LeafValues:
    """Statistics of the values of one leaf of a space; the kind of space decides which."""

    def __init__(self, leaf: Leaf, space: PlainSpace):
        self.leaf = leaf
        self.space = space
        self.kind = str(space.get("type"))
        self.rows = 0
        self.misfits = 0  # rows that are not numbers with the shape of the space
        size = math.prod(leaf.shape)
        self._is_whole = size > (MOST_ROW_DIMENSIONS if len(leaf.shape) <= 1 else MOST_GRID_DIMENSIONS)
        self._width = 1 if self._is_whole else size
        self._is_discrete = not self._is_whole and self.kind in ("Discrete", "MultiDiscrete", "MultiBinary")
        self._tallies = [Tally(DISTINCT_CATEGORIES) for _ in range(size if self._is_discrete else 0)]
        self._moments, self._curve, self._variety = RunningMoments(self._width), Curve(self._width), Variety()

    @property
    def key(self) -> tuple[Any, ...]:
        """Key of the leaf; values with equal keys can be merged."""
        return self.leaf.path, self.kind, self.leaf.shape

    def add(self, rows: Array) -> None:
        """Add rows of the column of this leaf from a chunk."""
        self.rows += len(rows)
        if self.leaf.dtype is None:
            return self._variety.add(list(rows))
        numbers = numbers_in(rows, self.leaf.shape)
        self.misfits += len(rows) - sum(map(len, numbers))
        for array in numbers:
            rows = array.reshape(-1, self._width) if array.size else np.empty((0, self._width))
            self._curve.add(rows)
            if not self._is_discrete:
                self._moments.add(rows)
            for tally, column in zip(self._tallies, rows.T):
                tally.add(column)

    def merge(self, other: LeafValues) -> None:
        self.rows += other.rows
        self.misfits += other.misfits
        for tally, other_tally in zip(self._tallies, other._tallies):
            tally.merge(other_tally)
        self._moments.merge(other._moments)
        self._curve.merge(other._curve)
        self._variety.merge(other._variety)

    def result(self) -> dict[str, Any]:
        """Return the statistics as plain data.

        Keys: path, space, shape, rows, misfits, and one of: dimensions (one entry per element of a row), all (one entry
        for all elements of all rows), or the keys of Variety.result(). Each entry has a curve; see accumulators.Curve.
        """
        common = {"path": list(self.leaf.path), "space": self.kind, "shape": list(self.leaf.shape), "rows": self.rows}
        common["misfits"] = self.misfits
        if self.leaf.dtype is None:
            return {**common, **self._variety.result()}
        values = [tally.result() for tally in self._tallies] if self._is_discrete else moments_as_json(self._moments)
        columns = [{**column, "curve": curve} for column, curve in zip(values, self._curve.result())]
        if self._is_whole:
            return {**common, "all": columns[0]}
        indices = np.ndindex(self.leaf.shape)
        return {**common, "dimensions": [{"index": list(i), **column} for i, column in zip(indices, columns)]}


def numbers_in(rows: Array, shape: tuple[int, ...]) -> list[Array]:
    """Return the rows that are numbers of this shape, as one array per dtype."""
    if rows.dtype != object:
        return [rows] if rows.dtype.kind in "biuf" and rows.shape[1:] == shape else []
    by_dtype: dict[np.dtype[Any], list[Array]] = {}
    for value in rows:
        if isinstance(value, (np.ndarray, np.generic, bool, int, float)) and np.shape(value) == shape:
            array = np.asarray(value)
            if array.dtype.kind in "biuf":
                by_dtype.setdefault(array.dtype, []).append(array)
    return [np.array(arrays, dtype) for dtype, arrays in by_dtype.items()]


class Rewards:
    """Statistics of rewards: moments, and counts of values or a histogram."""

    def __init__(self) -> None:
        self.misfits = 0  # rewards that are neither a number nor an array of numbers
        self._tally = Tally(DISTINCT_VALUES)
        # by number of objectives; 0: rewards that are single numbers
        self._numbers: dict[int, tuple[RunningMoments, Curve]] = {0: (RunningMoments(1), Curve(1))}

    def add(self, rows: Array) -> None:
        if rows.ndim > 1 and rows.dtype.kind in "biuf" and rows[:1].size <= MOST_ROW_DIMENSIONS:
            objectives = rows.reshape(len(rows), -1)
            return self._add(objectives.shape[1], objectives)
        numbers = numbers_in(rows, ())
        self.misfits += len(rows) - sum(map(len, numbers))
        for array in numbers:
            self._add(0, array.reshape(-1, 1))
            self._tally.add(array)

    def merge(self, other: Rewards) -> None:
        self.misfits += other.misfits
        self._tally.merge(other._tally)
        for objectives, (moments, curve) in other._numbers.items():
            own_moments, own_curve = self._accumulators(objectives)
            own_moments.merge(moments)
            own_curve.merge(curve)

    def _add(self, objectives: int, rows: Array) -> None:
        for accumulator in self._accumulators(objectives):
            accumulator.add(rows)

    def _accumulators(self, objectives: int) -> tuple[RunningMoments, Curve]:
        return self._numbers.setdefault(objectives, (RunningMoments(objectives), Curve(objectives)))

    def result(self) -> dict[str, Any]:
        """Return the statistics. objectives: moments of each objective, grouped by the number of objectives."""
        single, *objectives = [
            {"index": [i], **column, "curve": points}
            for _, (moments, curve) in sorted(self._numbers.items())
            for i, (column, points) in enumerate(zip(moments_as_json(moments), curve.result()))
        ]
        del single["index"]
        counts = self._tally.as_histogram_if_continuous().result()
        return {**single, "misfits": self.misfits, **counts, "objectives": objectives}
