"""Curves of many rows in few points: the min and max of each bin of rows.

Bins of long columns are cached, so that zooming does not read these columns again. A heat map counts pairs of values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.values import Array
from gym_trace.tools.statistics.summary import histogram

BASE = 64  # rows of the narrowest cached bins
_MOST_COLUMN_BYTES = 8 << 20  # limit of the cached bins
_BIN_BYTES = 40  # per bin and item
_OVERHEAD = 1 << 10  # further bytes per column


class Bins(NamedTuple):
    """Bins of consecutive rows of a column with k numbers per row.

    Attributes:
        low, high: (n, k), min and max of the finite values; NaN for a bin without finite values.
        nan, infinite, missing: (n, k) int64, numbers of values that are NaN, infinite, or missing.
    """

    low: Array
    high: Array
    nan: Array
    infinite: Array
    missing: Array

    def __len__(self) -> int:
        return len(self.low)

    def merged(self, count: int) -> Bins:
        """Return wider bins, each joined from `count` bins; the last one may be narrower."""
        ufuncs = (np.fmin, np.fmax, np.add, np.add, np.add)
        return Bins(*(_reduced(ufunc, array, count) for ufunc, array in zip(ufuncs, self)))

    @staticmethod
    def joined(runs: Sequence[Bins]) -> Bins:
        """Concatenate runs of bins."""
        return runs[0] if len(runs) == 1 else Bins(*(np.concatenate(arrays) for arrays in zip(*runs)))

    def cut(self, begin: int, end: int) -> Bins:
        return Bins(*(array[begin:end] for array in self))

    def of_items(self, items: slice) -> Bins:
        return Bins(*(array[:, items] for array in self))


def binned(rows: Array, missing: Array | None, width: int) -> Bins:
    """Return bins of `width` rows; the last one may be narrower.

    rows: (rows, k) numbers. missing: (rows, k) bool, True for missing values, which are NaN in rows; None: none.
    """
    bins = -(-len(rows) // width)
    zeros = np.zeros((bins, rows.shape[1]), np.int64)
    finite = np.isfinite(rows)
    if finite.all():
        return Bins(_reduced(np.minimum, rows, width), _reduced(np.maximum, rows, width), zeros, zeros, zeros)
    known = np.where(finite, rows, np.nan)
    is_nan = np.isnan(rows)
    is_missing = np.zeros(rows.shape, bool) if missing is None else missing
    return Bins(
        _reduced(np.fmin, known, width),
        _reduced(np.fmax, known, width),
        _reduced(np.add, (is_nan & ~is_missing).astype(np.int64), width),
        _reduced(np.add, (~finite & ~is_nan).astype(np.int64), width),
        _reduced(np.add, is_missing.astype(np.int64), width),
    )


def _reduced(function: np.ufunc, rows: Array, width: int) -> Array:
    """Reduce each run of `width` rows to one."""
    if width == 1:
        return rows
    whole = len(rows) // width * width
    parts = [function.reduce(rows[:whole].reshape(-1, width, rows.shape[1]), axis=1)] if whole else []
    parts += [function.reduce(rows[whole:], axis=0)[None]] if whole < len(rows) else []
    return np.concatenate(parts) if parts else rows


def heat(blocks: Iterable[list[Array]], every: int) -> dict[str, Any]:
    """Count pairs of numbers in a grid.

    Args:
        blocks: x and y of consecutive steps.
        every: count only every n-th of them, to bound the memory.

    Returns: x and y, the edges of the bins; counts, (bins of y, bins of x); steps, how many pairs are counted; and
        missing, those without two finite numbers. No edges without a pair.
    """
    parts, seen, missing = [np.empty((2, 0))], 0, 0
    for block in blocks:
        some = np.array(block)[:, -seen % every :: every]
        seen += len(block[0])
        finite = np.isfinite(some).all(axis=0)
        missing += int(np.count_nonzero(~finite))
        parts.append(some[:, finite])
    pairs = np.concatenate(parts, axis=1)
    found = [histogram(values) for values in pairs] if pairs.size else [None, None]
    if None in found:
        return {"x": [], "y": [], "counts": [], "steps": 0, "missing": missing}
    edges = [one["edges"] for one in found if one is not None]
    bins = [np.clip(np.searchsorted(of, values, "right") - 1, 0, len(of) - 2) for of, values in zip(edges, pairs)]
    shape = len(edges[1]) - 1, len(edges[0]) - 1
    counts = np.bincount(bins[1] * shape[1] + bins[0], minlength=shape[0] * shape[1]).reshape(shape)
    return {"x": edges[0], "y": edges[1], "counts": counts.tolist(), "steps": pairs.shape[1], "missing": missing}


class CurveStore:
    """Cache of the bins of recently plotted columns of a trace, limited in bytes; thread-safe.

    If an episode grows, its bins are extended.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._cached: OrderedDict[Hashable, tuple[int, Bins]] = OrderedDict()  # by column: number of rows, bins
        self._reading: dict[Hashable, Lock] = {}
        self._lock = Lock()

    def base(self, rows: int, items: int) -> int:
        """Return the width of the cached bins of a column, a power of two of rows."""
        base = BASE
        while rows // base * items * _BIN_BYTES > _MOST_COLUMN_BYTES:
            base *= 2
        return base

    def bins(self, key: Hashable, rows: int, base: int, read: Callable[[int, int], Bins]) -> Bins:
        """Return the bins of the first rows of a column. read: returns the bins from one row to another."""
        key = key, base
        with self._lock:
            reading = self._reading.setdefault(key, Lock())
        with reading:  # one thread reads a column, others wait for it
            with self._lock:
                done, bins = self._cached.pop(key, (0, None))
            if bins is None or done > rows:
                bins = read(0, rows)
            elif done < rows:  # the last bin may have had fewer rows
                whole = done // base
                bins = Bins.joined([bins.cut(0, whole), read(whole * base, rows)])
            with self._lock:
                self._cached[key] = rows, bins
                while len(self._cached) > 1 and self._bytes() > self._limit:
                    self._reading.pop(self._cached.popitem(last=False)[0], None)
        return bins

    def _bytes(self) -> int:
        return sum(_OVERHEAD + sum(int(array.nbytes) for array in bins) for _, bins in self._cached.values())
