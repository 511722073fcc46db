"""Mean, variance, minimum and maximum of many rows, block by block."""

from __future__ import annotations

import numpy as np

from gym_trace.data.values import Array

_BLOCK = 1 << 18  # elements summed at a time
_WIDE = 512  # columns; wider rows are summed along axis 0
_BYTE_VALUES = np.arange(256.0)


class RunningMoments:
    """Moments of each column of the added rows.

    Each block of rows is summed about its own mean and merged with the update of Chan, Golub and LeVeque, "Updating
    Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979). Precision is independent of the number of
    rows and of their distance from zero.

    Args:
        width: number of columns.
        finite_only: count NaN and infinities, but ignore them. False: a column with such values has moments that are
            not finite.

    Attributes:
        rows: number of added rows.
        count, nan, infinite: (width,) int64, numbers of counted values, and of ignored NaN and infinities.
        mean, squared_deviations, least, largest: (width,) float64; squared_deviations: their sum over the rows.
    """

    def __init__(self, width: int, finite_only: bool = True):
        self._finite_only = finite_only
        self.rows = 0
        self.count = np.zeros(width, np.int64)
        self.nan = np.zeros(width, np.int64)
        self.infinite = np.zeros(width, np.int64)
        self.mean = np.zeros(width)
        self.squared_deviations = np.zeros(width)
        self.least = np.full(width, np.inf)
        self.largest = np.full(width, -np.inf)

    @property
    def std(self) -> Array:
        """(width,) float64, standard deviation; NaN without rows."""
        with np.errstate(all="ignore"):
            std: Array = np.sqrt(self.squared_deviations / self.count)
        return std

    def add(self, rows: Array) -> None:
        """Add rows of numbers, (rows, width)."""
        width = rows.shape[1]
        if rows.dtype == np.uint8 and width == 1:
            return self._add_bytes(rows.reshape(-1))
        step = max(1, _BLOCK // max(1, width))
        for start in range(0, len(rows), step):
            self._add(rows[start : start + step])

    def _add(self, rows: Array) -> None:
        block = RunningMoments(rows.shape[1])
        block.rows = len(rows)
        # Transpose narrow rows: NumPy sums the last axis pairwise, which is faster and more exact.
        axis = 0 if rows.shape[1] > _WIDE else 1
        values = np.array(rows.T if axis else rows, np.float64, order="C")
        with np.errstate(all="ignore"):
            good = np.isfinite(values) if self._finite_only else None
            if good is None or good.all():
                block.count[:] = len(rows)
                block.least, block.largest = values.min(axis), values.max(axis)
                block.mean = values.mean(axis)
                values -= np.expand_dims(block.mean, axis)
            else:
                block.count = good.sum(axis)
                block.nan = np.isnan(values).sum(axis)
                block.infinite = len(rows) - block.count - block.nan
                block.least = np.where(good, values, np.inf).min(axis)
                block.largest = np.where(good, values, -np.inf).max(axis)
                block.mean = np.where(good, values, 0.0).sum(axis) / np.maximum(block.count, 1)
                values = np.where(good, values - np.expand_dims(block.mean, axis), 0.0)
            block.squared_deviations = np.einsum("ij,ij->i" if axis else "ij,ij->j", values, values)
        self.merge(block)

    def _add_bytes(self, values: Array) -> None:
        """Add pixels: counting 256 values is several times faster than summing."""
        counts = np.zeros(256)
        for start in range(0, len(values), _BLOCK):
            counts += np.bincount(values[start : start + _BLOCK], minlength=256)
        seen = np.flatnonzero(counts)
        if not len(seen):
            return
        block = RunningMoments(1)
        block.rows = len(values)
        block.count[0] = len(values)
        block.mean[0] = counts @ _BYTE_VALUES / len(values)
        block.squared_deviations[0] = counts @ (_BYTE_VALUES - block.mean[0]) ** 2
        block.least[0], block.largest[0] = seen[0], seen[-1]
        self.merge(block)

    def merge(self, other: RunningMoments) -> None:
        """Add the rows behind other moments."""
        count = self.count + other.count
        with np.errstate(all="ignore"):
            share = other.count / np.maximum(count, 1)
            distance = np.where(other.count > 0, other.mean - self.mean, 0.0)
            self.mean = self.mean + distance * share
            self.squared_deviations = (
                self.squared_deviations + other.squared_deviations + distance * distance * self.count * share
            )
            self.least = np.minimum(self.least, other.least)
            self.largest = np.maximum(self.largest, other.largest)
        self.rows += other.rows
        self.count = count
        self.nan = self.nan + other.nan
        self.infinite = self.infinite + other.infinite
