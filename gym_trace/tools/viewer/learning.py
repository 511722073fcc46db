"""The learning curve of a trace for the page: complete episodes as points, and their mean with a band."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from gym_trace.data.values import Array
from gym_trace.playback.scan import Scan
from gym_trace.playback.trace import Trace
from gym_trace.tools.statistics.comparison import AXES, episodes_by_end, positions_on, window_of
from gym_trace.tools.statistics.summary import UNKNOWN_TIME
from gym_trace.tools.viewer.container import packed

_MOST_POINTS = 1500  # selected ones, and as many others: the lowest and the highest of each of half as many bins
_MEANS = 300
_BAND = 10, 90  # percent
_VERSION = ("annotations", "version")  # policy version of each step, as gym-trace train stores it


class History:
    """The complete episodes of a trace with a finite return, in the order of their ends."""

    def __init__(self, trace: Trace):
        episodes, rows = episodes_by_end(trace)
        steps = np.cumsum(episodes.lengths - episodes.repeated)
        counted = np.flatnonzero(episodes.complete & np.isfinite(episodes.returns))
        positions = {x: positions_on(x, episodes, steps)[counted] for x in AXES}
        self.trace = trace
        self._rows, self._returns = rows[counted], episodes.returns[counted]
        self._x = {x: values for x, values in positions.items() if not len(values) or np.isfinite(values).any()}
        # In this column, the episodes of a part of the curve are a range.
        index, ends = trace.chosen[self._rows], episodes.end[counted]
        is_known = bool((ends != UNKNOWN_TIME).all())
        self._term = "index" if not is_known or bool((np.diff(index) > 0).all()) else "end_time"
        self._at = index.astype(np.float64) if self._term == "index" else ends / 1e6

    @cached_property
    def _versions(self) -> Array:
        """The policy version at the end of each episode; NaN if unknown. Reads this column of all steps."""
        found = np.full(len(self.trace), np.nan)
        for block in Scan(self.trace.content, {_VERSION}, on_damage=lambda damage: None):
            has_steps = block.lengths > 0
            if _VERSION in block.columns:
                values = block.columns[_VERSION][block.step_offsets[1:][has_steps] - 1].tolist()
                known = [value if isinstance(value, (int, float)) else np.nan for value in values]
                found[block.episode[has_steps]] = known
        return found[self._rows]

    def packed(self, selected: Array, with_versions: bool) -> bytes:
        """Return the curve as a container. selected: (len(trace),) bool, episodes to mark.

        Arrays of points: episode (number in the whole trace), return, selected, at, and one for each axis. Arrays of
        means: mean, low, high, and `mean_` with each axis. Head: axes; window, number of episodes that a mean is over;
        term, the column of --where that `at` has: "index", or "end_time" in milliseconds since 1970.
        """
        x, returns = dict(self._x), self._returns
        if with_versions:
            x["version"] = self._versions
        is_selected = selected[self._rows]
        shown = np.sort(np.concatenate([_few(np.flatnonzero(part), returns) for part in (is_selected, ~is_selected)]))
        window = window_of([len(returns)])
        last = np.unique(np.linspace(window - 1, len(returns) - 1, min(_MEANS, len(returns))).astype(np.int64))
        windows = returns[last[:, None] - np.arange(window)]
        with np.errstate(over="ignore", invalid="ignore"):
            low, high = np.percentile(windows, _BAND, axis=1) if len(last) else (np.empty(0), np.empty(0))
            arrays = {"return": returns[shown], "mean": windows.mean(axis=1), "low": low, "high": high}
        arrays |= {"episode": self.trace.chosen[self._rows[shown]], "selected": is_selected[shown]}
        arrays |= {"at": self._at[shown]} | {axis: values[shown] for axis, values in x.items()}
        arrays |= {f"mean_{axis}": values[last] for axis, values in x.items()}
        batches = (batch for reader in self.trace.readers for batch in reader.read_batches)
        versions = ["version"] if any(_VERSION in batch.totals for batch in batches) else []
        return packed(
            {"axes": [*self._x, *versions], "window": window, "term": self._term, "episodes": len(returns)},
            arrays.items(),
        )


def _few(points: Array, returns: Array) -> Array:
    """Return points, or if there are too many, those with the lowest and the highest return of each bin."""
    if len(points) <= _MOST_POINTS:
        return points
    bins = np.arange(len(points)) * (_MOST_POINTS // 2) // len(points)
    order = np.lexsort((returns[points], bins))
    first = np.searchsorted(bins, np.arange(_MOST_POINTS // 2))
    last = np.append(first[1:], len(points)) - 1
    few: Array = points[np.unique(np.concatenate([order[first], order[last]]))]
    return few
