"""The statistics of episodes and of all of them, as lerobot.datasets.compute_stats has them.

The quantiles of an episode are values that occur in it (LeRobot's are off by up to a 5,000th of the range), those of
all episodes are the means of theirs, by length. What is not finite, or huge, is left out; LeRobot fails there.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gym_trace.data.values import Array

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
Statistics = dict[str, Array]  # min, max, mean, std and quantiles: (episodes, D); count: (episodes, 1)
_LARGE = 300  # pixels from which on LeRobot looks at some of them only
_TARGET = 150
_HUGE = 1e150  # whose square is a number still


def of_rows(rows: Array, starts: Array) -> Statistics:
    """Return statistics of runs of rows, which begin at starts; none is empty. rows: (steps, ...) of numbers.

    Arrays of several dimensions are looked at along the last one, as LeRobot does.
    """
    lead = math.prod(rows.shape[1:-1])
    values = np.asarray(rows, np.float64).reshape(len(rows) * lead, rows.shape[-1] if rows.ndim > 1 else 1)
    counts = np.diff(np.append(starts, len(rows)))[:, None]
    begins, sizes = starts * lead, counts * lead
    finite = np.abs(values) < _HUGE  # NaN is not
    whole = bool(finite.all())
    known = sizes if whole else np.maximum(np.add.reduceat(finite, begins, dtype=np.int64), 1)
    low, high, middle = (values if whole else np.where(finite, values, other) for other in (np.inf, -np.inf, 0.0))
    run = np.repeat(np.arange(len(begins)), sizes[:, 0])
    mean = np.add.reduceat(middle, begins) / known
    away = (middle - mean[run]) ** 2
    deviation = np.sqrt(np.add.reduceat(away if whole else np.where(finite, away, 0.0), begins) / known)
    found = {"min": np.minimum.reduceat(low, begins), "max": np.maximum.reduceat(high, begins)}
    found |= {"mean": mean, "std": deviation, "count": counts}
    ordered = _sorted_in_runs(low, run)
    for name, share in QUANTILES.items():
        place = np.maximum(np.ceil(share * known).astype(np.int64) - 1, 0) + begins[:, None]
        found[name] = np.take_along_axis(ordered, place, axis=0)
    return found if whole else {name: np.nan_to_num(value, posinf=0.0, neginf=0.0) for name, value in found.items()}


def _sorted_in_runs(values: Array, run: Array) -> Array:
    same = np.diff(run) == 0
    ordered = np.empty_like(values)
    for place, column in enumerate(values.T):
        if (column[1:] >= column[:-1])[same].all():
            ordered[:, place] = column
        else:
            ordered[:, place] = column[np.lexsort((column, run))]
    return ordered


def of_pictures(histogram: Array, pictures: int) -> Statistics:
    """Return statistics of one episode, from the histogram (C, 256) of the sampled images; in [0, 1]."""
    values = np.arange(256) / 255
    total = histogram.sum(axis=1)
    mean = histogram @ values / total
    spread = np.sqrt((histogram * (values - mean[:, None]) ** 2).sum(axis=1) / total)
    reached = np.cumsum(histogram, axis=1)
    found = {"min": values[(reached > 0).argmax(axis=1)], "max": values[255 - (histogram[:, ::-1] > 0).argmax(axis=1)]}
    found |= {"mean": mean, "std": spread, "count": np.array([pictures])}
    found |= {name: values[(reached >= share * total[:, None]).argmax(axis=1)] for name, share in QUANTILES.items()}
    return {name: value[None] for name, value in found.items()}


def counted(pictures: Array) -> Array:
    """Return the histogram (C, 256) of (images, H, W, C) of uint8, or of a sample of the pixels of large ones."""
    _, height, width, channels = pictures.shape
    if max(height, width) >= _LARGE:
        factor = max(1, int((width if width > height else height) / _TARGET))
        pictures = pictures[:, ::factor, ::factor]
    return np.stack([np.bincount(pictures[..., channel].reshape(-1), minlength=256) for channel in range(channels)])


def sampled(steps: int) -> Array:
    """Return the indices of the sampled images of an episode."""
    many = max(min(100, steps), min(int(steps**0.75), 10_000))
    found: Array = np.unique(np.round(np.linspace(0, steps - 1, many)).astype(np.int64))
    return found


def joined(found: list[Statistics]) -> Statistics:
    """Combine the statistics of several episodes."""
    return {name: np.concatenate([part[name] for part in found]) for name in found[0]}


def merged(parts: Statistics, starts: Array) -> Statistics:
    """Return one result per run of parts. starts: where runs begin."""
    if len(starts) == len(parts["count"]):
        return parts
    counts = parts["count"]
    run = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(counts))))
    total = np.add.reduceat(counts, starts)
    mean = np.add.reduceat(parts["mean"] * counts, starts) / total
    spread = np.add.reduceat((parts["std"] ** 2 + (parts["mean"] - mean[run]) ** 2) * counts, starts) / total
    found = {"min": np.minimum.reduceat(parts["min"], starts), "max": np.maximum.reduceat(parts["max"], starts)}
    found |= {"mean": mean, "std": np.sqrt(spread), "count": total}
    return found | {name: np.add.reduceat(parts[name] * counts, starts) / total for name in QUANTILES}


def told(found: Statistics, of_picture: bool) -> dict[str, Any]:
    """Return the statistics of one run as stats.json has them."""
    return {name: _nested(value, of_picture and name != "count")[0] for name, value in found.items()}


def _nested(values: Array, of_picture: bool) -> Any:
    return (values[:, :, None, None] if of_picture else values).tolist()
