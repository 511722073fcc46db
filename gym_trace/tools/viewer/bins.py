"""Curves of many rows in few points: the smallest and the largest value of each bin of rows.

Bins of long columns are kept, so that zooming does not read them again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from threading import Lock
from typing import NamedTuple

import numpy as np

from gym_trace.data.values import Array

BASE = 64  # rows of the narrowest bins that are kept
_MOST_OF_COLUMN = 8 << 20
_BIN_BYTES = 40  # bytes per bin and item
_OVERHEAD = 1 << 10  # bytes that the bins of a column take in addition


class Bins(NamedTuple):
    """Bins of consecutive rows of a column with k numbers per row.

    Attributes:
        low, high: (n, k), of the finite values; NaN for a bin without any.
        nan, infinite, missing: (n, k) int64, how many values are NaN, infinite, or not there.
    """

    low: Array
    high: Array
    nan: Array
    infinite: Array
    missing: Array

    def __len__(self) -> int:
        return len(self.low)

    def merged(self, count: int) -> Bins:
        """Return wider bins, each of this number of bins; the last one may have fewer."""
        return Bins(*(_reduced(f, part, count) for f, part in zip((np.fmin, np.fmax, np.add, np.add, np.add), self)))

    @staticmethod
    def joined(parts: Sequence[Bins]) -> Bins:
        """Return the bins of parts that follow each other."""
        return parts[0] if len(parts) == 1 else Bins(*(np.concatenate(part) for part in zip(*parts)))

    def cut(self, begin: int, end: int) -> Bins:
        return Bins(*(part[begin:end] for part in self))

    def of_items(self, items: slice) -> Bins:
        return Bins(*(part[:, items] for part in self))


def binned(rows: Array, missing: Array | None, width: int) -> Bins:
    """Return bins of this number of rows, (rows, k) of numbers; the last one may have fewer.

    missing: True for the values of rows that are not there, which are NaN; None: all are.
    """
    bins = -(-len(rows) // width)
    none = np.zeros((bins, rows.shape[1]), np.int64)
    finite = np.isfinite(rows)
    if finite.all():
        return Bins(_reduced(np.minimum, rows, width), _reduced(np.maximum, rows, width), none, none, none)
    known = np.where(finite, rows, np.nan)
    is_nan = np.isnan(rows)
    lost = np.zeros(rows.shape, bool) if missing is None else missing
    return Bins(
        _reduced(np.fmin, known, width),
        _reduced(np.fmax, known, width),
        _reduced(np.add, (is_nan & ~lost).astype(np.int64), width),
        _reduced(np.add, (~finite & ~is_nan).astype(np.int64), width),
        _reduced(np.add, lost.astype(np.int64), width),
    )


def _reduced(function: np.ufunc, rows: Array, width: int) -> Array:
    """Reduce each run of `width` rows to one."""
    if width == 1:
        return rows
    whole = len(rows) // width * width
    parts = [function.reduce(rows[:whole].reshape(-1, width, rows.shape[1]), axis=1)] if whole else []
    parts += [function.reduce(rows[whole:], axis=0)[None]] if whole < len(rows) else []
    return np.concatenate(parts) if parts else rows


class CurveStore:
    """The bins of the columns of a trace that were plotted last, limited by bytes; thread-safe.

    Those of an episode that grows are extended, not made again.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[Hashable, tuple[int, Bins]] = OrderedDict()  # each with the number of rows in it
        self._making: dict[Hashable, Lock] = {}
        self._lock = Lock()

    def base(self, rows: int, items: int) -> int:
        """Return how many rows a bin has that is kept of a column: a power of two."""
        base = BASE
        while rows // base * items * _BIN_BYTES > _MOST_OF_COLUMN:
            base *= 2
        return base

    def bins(self, key: Hashable, rows: int, base: int, read: Callable[[int, int], Bins]) -> Bins:
        """Return the bins of the first rows of a column. read: makes those from one row to another."""
        key = key, base
        with self._lock:
            making = self._making.setdefault(key, Lock())
        with making:  # one thread reads a column, others wait for it
            with self._lock:
                done, bins = self._kept.pop(key, (0, None))
            if bins is None or done > rows:
                bins = read(0, rows)
            elif done < rows:  # the last bin may have had fewer rows
                whole = done // base
                bins = Bins.joined([bins.cut(0, whole), read(whole * base, rows)])
            with self._lock:
                self._kept[key] = rows, bins
                while len(self._kept) > 1 and self._bytes() > self._limit:
                    self._making.pop(self._kept.popitem(last=False)[0], None)
        return bins

    def _bytes(self) -> int:
        return sum(_OVERHEAD + sum(int(part.nbytes) for part in bins) for _, bins in self._kept.values())
