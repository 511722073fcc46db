"""The curve of a trace for the page: complete episodes as points, and their mean with a band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gym_trace.data.values import Array
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.trace import Trace
from gym_trace.tools.statistics.comparison import AXES, episodes_by_end, positions_on, window_of
from gym_trace.tools.statistics.summary import UNKNOWN_TIME
from gym_trace.tools.viewer.container import packed
from gym_trace.tools.viewer.microscope import VERSION, proved_versions

_MOST_POINTS = 1500  # selected ones, and as many others: the lowest and the highest of each of half as many bins
_MEANS = 300
_BAND = 10, 90  # percent


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
        index, ends = index_of(trace).whole_indices[self._rows], episodes.end[counted]
        is_known = bool((ends != UNKNOWN_TIME).all())
        self._term = "index" if not is_known or bool((np.diff(index) > 0).all()) else "end_time"
        self._at = index.astype(np.float64) if self._term == "index" else ends / 1e6

    def packed(self, selected: Array, y: str, figures: Mapping[str, Array], available: Sequence[str]) -> bytes:
        """Return a curve as a container. selected: (len(trace),) bool, episodes to mark.

        Arrays of points: episode (number in the whole trace), return and each of the figures, selected, at, and one for
        each axis. Arrays of means: mean, low, high, and `mean_` with each axis. Head: axes; ys, what curves can be of;
        y; proved, see proved_versions(), if known; window, number of episodes that a mean is over; term, the column of
        --where that `at` has: "index", or "end_time" in milliseconds since 1970.

        Args:
            y: "return", or one of the figures; episodes without it are left out.
            figures: further numbers of the episodes, (len(trace),) each; "version" is an axis.
            available: names of figures that can be asked for.
        """
        known = {"return": self._returns, **{name: values[self._rows] for name, values in figures.items()}}
        counted = np.flatnonzero(np.isfinite(known[y]))
        known, rows = {name: values[counted] for name, values in known.items()}, self._rows[counted]
        x, values = {axis: at[counted] for axis, at in self._x.items()}, known[y]
        is_selected = selected[rows]
        shown = np.sort(np.concatenate([_few(np.flatnonzero(part), values) for part in (is_selected, ~is_selected)]))
        window = window_of([len(values)])
        last = np.unique(np.linspace(window - 1, len(values) - 1, min(_MEANS, len(values))).astype(np.int64))
        windows = values[last[:, None] - np.arange(window)]
        with np.errstate(over="ignore", invalid="ignore"):
            low, high = np.percentile(windows, _BAND, axis=1) if len(last) else (np.empty(0), np.empty(0))
            arrays = {"mean": windows.mean(axis=1), "low": low, "high": high}
        arrays |= {name: at[shown] for name, at in (known | x).items()}
        arrays |= {"episode": index_of(self.trace).whole_indices[rows[shown]], "selected": is_selected[shown]}
        arrays |= {"at": self._at[counted][shown]}
        x |= {axis: known[axis] for axis in (VERSION,) if axis in known}
        arrays |= {f"mean_{axis}": at[last] for axis, at in x.items()}
        axes = [*self._x, *(name for name in available if name == VERSION)]
        ys = ["return", *(name for name in available if name != VERSION)]
        head: dict[str, Any] = {"axes": axes, "ys": ys, "y": y}
        if VERSION in known and (proved := proved_versions(self.trace)) is not None:
            head["proved"] = proved._asdict()
        return packed({**head, "window": window, "term": self._term, "episodes": len(values)}, arrays.items())


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
