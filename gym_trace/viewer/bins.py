"""Curves of many rows in few points: the smallest and the largest value of each bin of rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gym_trace.model.values import Array


class Bins(NamedTuple):
    """Bins of consecutive rows of a column with k numbers per row.

    Attributes:
        low, high: (n, k), of the finite values; NaN for a bin without any.
        nan, infinite: (n, k) int64, how many values are NaN, and how many infinite.
    """

    low: Array
    high: Array
    nan: Array
    infinite: Array

    def __len__(self) -> int:
        return len(self.low)

    def merged(self, count: int) -> Bins:
        """Return wider bins, each of this number of bins; the last one may have fewer."""
        return Bins(
            _reduced(np.fmin, self.low, count),
            _reduced(np.fmax, self.high, count),
            _reduced(np.add, self.nan, count),
            _reduced(np.add, self.infinite, count),
        )

    def followed_by(self, others: Bins) -> Bins:
        """Return these bins and others after them."""
        return Bins(*(np.concatenate(pair) for pair in zip(self, others)))

    def cut(self, begin: int, end: int) -> Bins:
        """Return the bins from begin to end."""
        return Bins(*(part[begin:end] for part in self))


def binned(rows: Array, width: int) -> Bins:
    """Return bins of this number of rows, (rows, k) of numbers; the last one may have fewer."""
    bins = -(-len(rows) // width)
    none = np.zeros((bins, rows.shape[1]), np.int64)
    if rows.dtype.kind != "f":
        return Bins(_reduced(np.minimum, rows, width), _reduced(np.maximum, rows, width), none, none)
    finite = np.isfinite(rows)
    if finite.all():
        return Bins(_reduced(np.minimum, rows, width), _reduced(np.maximum, rows, width), none, none)
    known = np.where(finite, rows, np.nan)
    is_nan = np.isnan(rows)
    return Bins(
        _reduced(np.fmin, known, width),
        _reduced(np.fmax, known, width),
        _reduced(np.add, is_nan.astype(np.int64), width),
        _reduced(np.add, (~finite & ~is_nan).astype(np.int64), width),
    )


def _reduced(function: np.ufunc, rows: Array, width: int) -> Array:
    """Reduce each run of `width` rows to one."""
    if width == 1:
        return rows
    whole = len(rows) // width * width
    parts = [function.reduce(rows[:whole].reshape(-1, width, rows.shape[1]), axis=1)] if whole else []
    parts += [function.reduce(rows[whole:], axis=0)[None]] if whole < len(rows) else []
    return np.concatenate(parts) if parts else rows
