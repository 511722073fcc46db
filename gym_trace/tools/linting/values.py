"""Find invalid values: NaN, infinities, values outside their space, values of another type."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from gym_trace.data.layout import Leaf, Path, PlainSpace, from_array_map
from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace
from gym_trace.playback.scan import StepRuns
from gym_trace.playback.trace import Trace
from gym_trace.tools.linting.findings import ERROR, WARNING, Kind, Sighting, column_name

_NAN = Kind("T101", ERROR, "NaN in observations, actions or rewards")
_INFINITE = Kind("T102", ERROR, "infinite observations, actions or rewards")
_ANNOTATIONS = Kind("T103", WARNING, "NaN or infinite annotations")
_OBSERVATIONS = Kind("T104", WARNING, "observations outside their space")
_ACTIONS = Kind("T105", ERROR, "actions outside their space")
_MISFITS = Kind("T106", WARNING, "values without the dtype or shape of their space")
_REDUCED_TOGETHER = 512  # numbers of short rows that are reduced as one row


class Limits(NamedTuple):
    """Smallest and largest values of a space, with the shape of one value."""

    low: Array
    high: Array

    @classmethod
    def of(cls, leaf: Leaf, space: PlainSpace) -> Limits | None:
        """Return the limits; None for a space without any. Raises CorruptTrace if they are malformed."""
        if leaf.dtype is None:
            return None
        try:
            return cls._of(leaf, space)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise CorruptTrace(f"malformed description of a space: {error!r:.100}") from error

    @classmethod
    def _of(cls, leaf: Leaf, space: PlainSpace) -> Limits:
        kind = space["type"]
        if kind == "Box":
            low, high = (from_array_map(space[name], leaf.shape) for name in ("low", "high"))
            return cls(low, high)
        if kind == "Discrete":
            first, n = (int(space[name]) for name in ("start", "n"))
            return cls(np.asarray(first, np.int64), np.asarray(first + n - 1, np.int64))
        if kind == "MultiDiscrete":
            start, nvec = (from_array_map(space[name], leaf.shape) for name in ("start", "nvec"))
            return cls(start, start + nvec - 1)
        return cls(np.zeros(leaf.shape), np.ones(leaf.shape))

    @property
    def are_of_dtype(self) -> bool:
        """Return True if no value of the dtype can be outside."""
        if self.low.dtype.kind == "f":
            return bool(np.isneginf(self.low).all() and np.isposinf(self.high).all())
        if self.low.dtype.kind not in "iu":
            return False
        info = np.iinfo(self.low.dtype)
        return bool((self.low == info.min).all() and (self.high == info.max).all())


class _Count:
    """Invalid rows of one kind and column: their number, the first episode and step, and the invalid dimensions."""

    def __init__(self) -> None:
        self.rows = 0
        self.first: tuple[int, int] | None = None
        self.dimensions: set[int] = set()


class ValuesRule:
    """Checks the min and max of each block, and its single numbers only if these are invalid."""

    kinds: ClassVar[Sequence[Kind]] = (_NAN, _INFINITE, _ANNOTATIONS, _OBSERVATIONS, _ACTIONS, _MISFITS)
    columns: ClassVar[Collection[str]] = frozenset(("observations", "actions", "rewards", "annotations"))
    thresholds: ClassVar[Mapping[str, float]] = {}

    def __init__(self, trace: Trace, thresholds: Mapping[str, float]):
        self._found: dict[tuple[Kind, Path, tuple[int, ...]], _Count] = {}
        self._limits: dict[tuple[int, Path], Limits | None] = {}

    def add(self, block: StepRuns) -> None:
        leaves = block.reader.about.leaves
        for path, rows in block.columns.items():
            if path[0] not in self.columns:
                continue
            leaf, space = leaves.get(path, (None, None))
            if leaf is not None and leaf.dtype is not None and (rows.dtype, rows.shape[1:]) != (leaf.dtype, leaf.shape):
                self._count(_MISFITS, block, path, _misfits(rows, leaf), ())
            if rows.dtype == object and (leaf is None or leaf.dtype is not None):
                self._count_non_finite(block, path, np.array(list(map(_non_finite, rows)), np.int8))
            if rows.dtype.kind not in "biufc" or not rows.size:
                continue
            min_, max_ = (rows.min(), rows.max()) if rows.dtype.kind != "c" else (rows.sum(), rows.sum())
            if rows.dtype.kind in "fc" and not (np.isfinite(min_) and np.isfinite(max_)):
                self._count_non_finite(block, path, np.isnan(rows) + 2 * np.isinf(rows))
            if leaf is not None and space is not None and rows.shape[1:] == leaf.shape and rows.dtype.kind != "c":
                self._count_outside(block, path, rows, leaf, space, min_, max_)

    def _count_non_finite(self, block: StepRuns, path: Path, codes: Array) -> None:
        """codes: see _non_finite()."""
        shape = codes.shape[1:]
        if path[0] == "annotations":
            self._count(_ANNOTATIONS, block, path, codes > 0, shape)
            return
        self._count(_NAN, block, path, codes & 1 > 0, shape)
        self._count(_INFINITE, block, path, codes & 2 > 0, shape)

    def _count_outside(
        self, block: StepRuns, path: Path, rows: Array, leaf: Leaf, space: PlainSpace, min_: Array, max_: Array
    ) -> None:
        key = block.writer, path
        if key not in self._limits:
            limits = Limits.of(leaf, space)
            self._limits[key] = None if limits is None or limits.are_of_dtype else limits
        bounds = self._limits[key]
        if bounds is None or (min_ >= bounds.low.max() and max_ <= bounds.high.min()):
            return
        with np.errstate(invalid="ignore"):  # NaN does not count as outside; T101 reports it
            lows, highs = _by_dimension(np.minimum, rows), _by_dimension(np.maximum, rows)
            if not np.isnan(min_) and (lows >= bounds.low).all() and (highs <= bounds.high).all():
                return
            outside = ((rows < bounds.low) | (rows > bounds.high)) & ~np.isinf(rows)
        self._count(_OBSERVATIONS if path[0] == "observations" else _ACTIONS, block, path, outside, leaf.shape)

    def _count(self, kind: Kind, block: StepRuns, path: Path, is_invalid: Array, shape: tuple[int, ...]) -> None:
        """is_invalid: (rows, *shape), True for invalid numbers."""
        flat = is_invalid.reshape(len(is_invalid), -1)
        rows = np.flatnonzero(flat.any(axis=1))
        if not len(rows):
            return
        count = self._found.setdefault((kind, path, shape), _Count())
        count.rows += len(rows)
        count.first = count.first or block.place(path, int(rows[0]))
        if shape:
            count.dimensions.update(np.flatnonzero(flat.any(axis=0)).tolist())

    def findings(self) -> Iterator[Sighting]:
        for (kind, path, shape), count in self._found.items():
            assert count.first is not None
            episode, step = count.first
            dimensions = np.array(sorted(count.dimensions)) if len(count.dimensions) < np.prod(shape) else None
            column = column_name(path, dimensions, shape)
            yield Sighting(kind, kind.what, count.rows, "step", episode, step, column)


def _misfits(rows: Array, leaf: Leaf) -> Array:
    """Return True for values without the dtype or shape of their space; rows of other arrays are all misfits."""
    if rows.dtype != object:
        return np.ones(len(rows), bool)
    return np.array([not leaf.fits(value) for value in rows], bool)


def _non_finite(value: object) -> int:
    """Return 1 for NaN, 2 for an infinity, 3 for an array with both, 0 for all other values."""
    if not isinstance(value, (float, np.floating, np.ndarray)) or np.asarray(value).dtype.kind not in "fc":
        return 0
    return int(np.isnan(value).any()) + 2 * int(np.isinf(value).any())


def _by_dimension(ufunc: np.ufunc, rows: Array) -> Array:
    """Return ufunc.reduce(rows), but several times faster for short rows."""
    flat = rows.reshape(len(rows), -1)
    together = _REDUCED_TOGETHER // max(1, flat.shape[1])
    if together > 1 and len(flat) > together:
        whole = len(flat) - len(flat) % together
        wide = ufunc.reduce(flat[:whole].reshape(-1, together * flat.shape[1]), axis=0)
        flat = np.concatenate([wide.reshape(together, -1), flat[whole:]])
    reduced: Array = ufunc.reduce(flat, axis=0).reshape(rows.shape[1:])
    return reduced
