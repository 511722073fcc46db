"""Bins of long columns, kept so that zooming does not read them again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock

from gym_trace.viewer.bins import Bins

BASE = 64  # rows of the narrowest bins that are kept
_MOST_OF_COLUMN = 8 << 20
_BIN_BYTES = 32  # of one item


class CurveStore:
    """The bins of the columns of a trace that were plotted last, limited by bytes; thread-safe.

    Those of an episode that grows are extended, not made again.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[Hashable, tuple[int, Bins]] = OrderedDict()  # with the rows that are in them
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
                bins = bins.cut(0, whole).followed_by(read(whole * base, rows))
            with self._lock:
                self._kept[key] = rows, bins
                while len(self._kept) > 1 and sum(self._size(kept) for _, kept in self._kept.values()) > self._limit:
                    self._making.pop(self._kept.popitem(last=False)[0], None)
        return bins

    @staticmethod
    def _size(bins: Bins) -> int:
        return sum(int(part.nbytes) for part in bins)
