"""Streaming statistics in bounded memory: curves, counts, histograms, examples.

All accumulators can be merged: two merged halves give the result of the whole.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np

from gym_trace.data.moments import RunningMoments
from gym_trace.data.packing import pack
from gym_trace.data.values import Array
from gym_trace.errors import UnstorableValue
from gym_trace.printable import shown

FEW_VALUES = 10  # with at most this many distinct values, a tally never becomes a histogram
BINS = 64
KNOWN_VALUES = 10_000  # more distinct non-numeric values are not counted
EXAMPLES = 3
POINTS = 40  # limit per curve in a result
_JOINED_POINTS = 256  # limit per growing curve, after neighbours were joined
_BLOCK_POINTS = 64  # points of one block of rows
_BLOCK = 1 << 18  # elements summed at a time
_LARGEST = np.finfo(np.float64).max


def finite(value: float) -> float | None:
    """Return value for JSON: None for NaN and infinities."""
    return float(value) if math.isfinite(value) else None


def moments_as_json(moments: RunningMoments) -> list[dict[str, Any]]:
    """Return for each column count, nan and inf (counts), mean, std, min and max; None without values."""
    statistics = (moments.mean, moments.std, moments.least, moments.largest)
    columns = []
    for i, count in enumerate(moments.count.tolist()):
        values = [finite(statistic[i]) if count else None for statistic in statistics]
        column = {"count": count, **dict(zip(("mean", "std", "min", "max"), values))}
        columns.append({**column, "nan": int(moments.nan[i]), "inf": int(moments.infinite[i])})
    return columns


class Curve:
    """Means of consecutive, equally large groups of rows, for each column, in the order of the rows.

    NaN and infinities are skipped. If there are more than 2 * _JOINED_POINTS points, neighbours are joined into points
    of about equal numbers of rows. Merging appends the rows of the other curve.
    """

    def __init__(self, width: int):
        self._rows: list[int] = []  # number of rows of each point
        self._counts: list[Array] = []  # numbers of finite values of each point, (width,)
        self._sums: list[Array] = []  # sums of these values, (width,)
        self._width = width

    def add(self, rows: Array) -> None:
        """Add rows of numbers, (rows, width)."""
        step = max(1, _BLOCK // max(1, self._width))
        for start in range(0, len(rows), step):
            block = rows[start : start + step]
            bounds = np.linspace(0, len(block), min(_BLOCK_POINTS, len(block)) + 1).astype(np.int64)
            begins, sizes = bounds[:-1], np.diff(bounds)
            if block.dtype == np.uint8:  # always finite; fast for pixels
                sums = np.add.reduceat(block, begins, axis=0, dtype=np.uint64).astype(np.float64)
                counts = np.broadcast_to(sizes[:, None], sums.shape)
            else:
                values = block.astype(np.float64)
                good = np.isfinite(values)
                with np.errstate(over="ignore", invalid="ignore"):
                    sums = np.add.reduceat(np.where(good, values, 0.0), begins, axis=0)
                counts = np.add.reduceat(good, begins, axis=0, dtype=np.int64)
            self._extend(sizes.tolist(), list(counts), list(sums))

    def merge(self, other: Curve) -> None:
        self._extend(other._rows, other._counts, other._sums)

    def _extend(self, rows: list[int], counts: list[Array], sums: list[Array]) -> None:
        self._rows, self._counts, self._sums = self._rows + rows, self._counts + counts, self._sums + sums
        if len(self._rows) > 2 * _JOINED_POINTS:
            begins, joined_rows, enough = [0], 0, sum(self._rows) / _JOINED_POINTS
            for i, size in enumerate(self._rows):
                if joined_rows >= enough:
                    begins.append(i)
                    joined_rows = 0
                joined_rows += size
            self._rows = np.add.reduceat(self._rows, begins).tolist()
            self._counts = list(np.add.reduceat(self._counts, begins, axis=0))
            with np.errstate(over="ignore", invalid="ignore"):
                self._sums = list(np.add.reduceat(self._sums, begins, axis=0))

    def result(self) -> list[list[float | None]]:
        """Return at most POINTS means for each column; None where no value is finite."""
        if not self._rows:
            return [[] for _ in range(self._width)]
        # A point that a bound divides is divided in proportion.
        point_bounds = np.cumsum([0, *self._rows])
        bounds = np.linspace(0, point_bounds[-1], min(POINTS, len(self._rows)) + 1)
        counts, sums = np.array(self._counts, np.float64).T, np.array(self._sums).T
        result = []
        for count, total in zip(counts, sums):
            with np.errstate(all="ignore"):
                means = _rebinned(total, point_bounds, bounds) / _rebinned(count, point_bounds, bounds)
            result.append([finite(mean) for mean in means])
        return result


def _rebinned(totals: Array, bounds: Array, new_bounds: Array) -> Array:
    """Return the totals of bins with new bounds, interpolated linearly."""
    return np.diff(np.interp(new_bounds, bounds, np.append(0.0, np.cumsum(totals))))


class Tally:
    """Counts of each distinct value; with more than `max_values`, a histogram.

    Bins of the histogram are 2**k wide and start at multiples of 2**k; k grows to fit new values. So the range need not
    be known in advance, counts stay exact, and histograms can be merged.
    """

    def __init__(self, max_values: int):
        self._max_values = max_values
        self._counts: dict[Any, int] = {}  # by value; in a histogram, by index of the bin
        self._exponent: int | None = None  # k of the histogram; None: no histogram

    def add(self, values: Array) -> None:
        """Add numbers, (n,); NaN and infinities are skipped."""
        if values.dtype.kind == "f":
            values = values.astype(np.float64)
            values = values[np.isfinite(values)]
        elif values.dtype.kind == "b":
            values = values.astype(np.uint8)
        if self._exponent is not None:
            return self._add_to_bins(values, np.ones(len(values)))
        distinct, counts = np.unique(values, return_counts=True)
        self._add_distinct(dict(zip(distinct.tolist(), counts.tolist())))

    def merge(self, other: Tally) -> None:
        if other._exponent is None:
            return self._add_distinct(other._counts)
        if self._exponent is None:
            own, self._counts, self._exponent = self._counts, dict(other._counts), other._exponent
            return self._add_distinct(own)
        by = other._exponent - self._exponent
        self._widen(max(0, by))
        for index, count in other._counts.items():
            self._count(index >> max(0, -by), count)
        self._widen(self._excess())

    def as_histogram_if_continuous(self) -> Tally:
        """Return a histogram if most values occurred only once, as in continuous data; otherwise self."""
        if len(self._counts) <= FEW_VALUES or 2 * len(self._counts) <= sum(self._counts.values()):
            return self
        histogram = Tally(0)
        histogram.merge(self)
        return histogram

    def _add_distinct(self, counts: dict[Any, int]) -> None:
        if self._exponent is not None:
            return self._add_to_bins(_as_floats(counts), np.array(list(counts.values())))
        for value, count in counts.items():
            self._count(value, count)
        if len(self._counts) > self._max_values:
            counts, self._counts = self._counts, {}
            values = _as_floats(counts)
            self._exponent = _finest_exponent(values)
            self._add_to_bins(values, np.array(list(counts.values())))

    def _add_to_bins(self, values: Array, counts: Array) -> None:
        if not len(values):
            return
        assert self._exponent is not None
        values = values.astype(np.float64)
        self._widen(max(0, _finest_exponent(values) - self._exponent))
        bins = np.floor(np.ldexp(values, -self._exponent)).astype(np.int64)
        bins[(bins == 0) & (values < 0)] = -1  # tiny negative values underflow to zero when scaled
        indices, inverse = np.unique(bins, return_inverse=True)
        for index, count in zip(indices.tolist(), np.bincount(inverse, counts).tolist()):
            self._count(index, int(count))
        self._widen(self._excess())

    def _count(self, value: Any, count: int) -> None:
        self._counts[value] = self._counts.get(value, 0) + count

    def _excess(self) -> int:
        """Return the power of two by which bins must widen, so that at most BINS span all values."""
        first, last, by = min(self._counts), max(self._counts), 0
        while (last >> by) - (first >> by) >= BINS:
            by += 1
        return by

    def _widen(self, by: int) -> None:
        """Make the bins 2**by times wider."""
        if by and self._exponent is not None:
            counts, self._counts = self._counts, {}
            self._exponent += by
            for index, count in counts.items():
                self._count(index >> by, count)

    def result(self) -> dict[str, Any]:
        """Return {"values": [[value, count], …]} sorted by value, or {"histogram": {"edges": n + 1, "counts": n}}."""
        if self._exponent is None:
            return {"values": [[value, self._counts[value]] for value in sorted(self._counts)]}
        first, last = min(self._counts), max(self._counts)
        with np.errstate(over="ignore"):
            edges = np.ldexp(np.arange(first, last + 2).astype(np.float64), self._exponent)
        edges = np.clip(edges, -_LARGEST, _LARGEST).tolist()
        return {"histogram": {"edges": edges, "counts": [self._counts.get(i, 0) for i in range(first, last + 1)]}}


def _as_floats(values: Iterable[Any]) -> Array:
    return np.array([float(value) for value in values])


def _finest_exponent(values: Array) -> int:
    """Return the smallest k for which the bin indices of these values stay below 2**60."""
    return math.frexp(float(np.abs(values).max()))[1] - 60


class Variety:
    """Number of distinct non-numeric values, and the first few as examples."""

    def __init__(self) -> None:
        self.count = 0
        self._seen: set[bytes] = set()
        self._examples: dict[bytes, str] = {}

    def add(self, values: list[Any]) -> None:
        self.count += len(values)
        for value in values:
            key = _fingerprint(value)
            if key not in self._seen and len(self._seen) < KNOWN_VALUES:
                self._seen.add(key)
                if len(self._examples) < EXAMPLES:
                    self._examples[key] = _shortened(shown(value.item() if isinstance(value, np.generic) else value))

    def merge(self, other: Variety) -> None:
        self.count += other.count
        self._seen.update(islice(other._seen - self._seen, KNOWN_VALUES - len(self._seen)))
        self._examples = dict(islice((self._examples | other._examples).items(), EXAMPLES))

    def result(self) -> dict[str, Any]:
        """Return distinct, distinct_is_exact and examples. Without distinct_is_exact, distinct is a lower bound."""
        return {
            "distinct": len(self._seen),
            "distinct_is_exact": len(self._seen) < KNOWN_VALUES,
            "examples": list(self._examples.values()),
        }


def _fingerprint(value: Any) -> bytes:
    try:
        packed = pack(value)
    except UnstorableValue:  # an unknown extension type
        packed = shown(value, 1 << 20).encode("utf-8", "backslashreplace")
    return hashlib.blake2b(packed, digest_size=16).digest()


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:59]}…"
