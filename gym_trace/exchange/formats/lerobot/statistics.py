"""Statistics of single episodes and of all episodes, as in lerobot.datasets.compute_stats.

The quantiles of an episode are values of it (those of LeRobot are off by up to a 5,000th of the range). The quantiles
of all episodes are the means over episodes, weighted by length, as in LeRobot. Values that are not finite, or huge,
are left out; LeRobot fails on them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gym_trace.data.values import Array

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
Statistics = dict[str, Array]  # min, max, mean, std and quantiles: (episodes, D); count: (episodes, 1)
_LARGE_IMAGE, _SAMPLED_SIZE = 300, 150  # pixels: LeRobot downsamples images from this size on, to this size
_HUGE = 1e150  # larger squares would overflow


def of_rows(rows: Array, starts: Array) -> Statistics:
    """Return statistics of runs of rows. rows: (steps, ...) numbers. starts: first row of each run; none is empty.

    Arrays of several dimensions have statistics along the last one, as in LeRobot.
    """
    vectors = math.prod(rows.shape[1:-1])  # per row
    values = np.asarray(rows, np.float64).reshape(len(rows) * vectors, rows.shape[-1] if rows.ndim > 1 else 1)
    counts = np.diff(np.append(starts, len(rows)))[:, None]
    begins, sizes = starts * vectors, counts * vectors
    is_valid = np.abs(values) < _HUGE  # False for NaN
    all_valid = bool(is_valid.all())
    valid = sizes if all_valid else np.maximum(np.add.reduceat(is_valid, begins, dtype=np.int64), 1)
    for_min, for_max, for_sum = (
        values if all_valid else np.where(is_valid, values, filler) for filler in (np.inf, -np.inf, 0.0)
    )
    run = np.repeat(np.arange(len(begins)), sizes[:, 0])
    mean = np.add.reduceat(for_sum, begins) / valid
    squares = (for_sum - mean[run]) ** 2
    deviation = np.sqrt(np.add.reduceat(squares if all_valid else np.where(is_valid, squares, 0.0), begins) / valid)
    result = {"min": np.minimum.reduceat(for_min, begins), "max": np.maximum.reduceat(for_max, begins)}
    result |= {"mean": mean, "std": deviation, "count": counts}
    ordered = _sorted_in_runs(for_min, run)
    for name, share in QUANTILES.items():
        row = np.maximum(np.ceil(share * valid).astype(np.int64) - 1, 0) + begins[:, None]
        result[name] = np.take_along_axis(ordered, row, axis=0)
    if all_valid:
        return result
    return {name: np.nan_to_num(value, posinf=0.0, neginf=0.0) for name, value in result.items()}


def _sorted_in_runs(values: Array, run: Array) -> Array:
    is_same_run = np.diff(run) == 0
    ordered = np.empty_like(values)
    for i, column in enumerate(values.T):
        if (column[1:] >= column[:-1])[is_same_run].all():
            ordered[:, i] = column
        else:
            ordered[:, i] = column[np.lexsort((column, run))]
    return ordered


def of_pictures(histogram: Array, pictures: int) -> Statistics:
    """Return statistics of one episode, of pixels in [0, 1]. histogram: (C, 256), of the sampled images."""
    values = np.arange(256) / 255
    total = histogram.sum(axis=1)
    mean = histogram @ values / total
    deviation = np.sqrt((histogram * (values - mean[:, None]) ** 2).sum(axis=1) / total)
    cumulative = np.cumsum(histogram, axis=1)
    result = {
        "min": values[(cumulative > 0).argmax(axis=1)],
        "max": values[255 - (histogram[:, ::-1] > 0).argmax(axis=1)],
        "mean": mean,
        "std": deviation,
        "count": np.array([pictures]),
    }
    result |= {name: values[(cumulative >= share * total[:, None]).argmax(axis=1)] for name, share in QUANTILES.items()}
    return {name: value[None] for name, value in result.items()}


def histogram_of(pictures: Array) -> Array:
    """Return the histogram (C, 256) of uint8 images (count, H, W, C); large ones are downsampled."""
    _, height, width, channels = pictures.shape
    if max(height, width) >= _LARGE_IMAGE:
        factor = max(1, int((width if width > height else height) / _SAMPLED_SIZE))
        pictures = pictures[:, ::factor, ::factor]
    return np.stack([np.bincount(pictures[..., channel].reshape(-1), minlength=256) for channel in range(channels)])


def sampled(steps: int) -> Array:
    """Return the indices of the sampled images of an episode."""
    count = max(min(100, steps), min(int(steps**0.75), 10_000))
    indices: Array = np.unique(np.round(np.linspace(0, steps - 1, count)).astype(np.int64))
    return indices


def joined(parts: list[Statistics]) -> Statistics:
    """Concatenate the statistics of several episodes."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def merged(parts: Statistics, starts: Array) -> Statistics:
    """Merge the statistics of each run of parts into one. starts: first part of each run."""
    if len(starts) == len(parts["count"]):
        return parts
    counts = parts["count"]
    run = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(counts))))
    total = np.add.reduceat(counts, starts)
    mean = np.add.reduceat(parts["mean"] * counts, starts) / total
    variance = np.add.reduceat((parts["std"] ** 2 + (parts["mean"] - mean[run]) ** 2) * counts, starts) / total
    result = {"min": np.minimum.reduceat(parts["min"], starts), "max": np.maximum.reduceat(parts["max"], starts)}
    result |= {"mean": mean, "std": np.sqrt(variance), "count": total}
    return result | {name: np.add.reduceat(parts[name] * counts, starts) / total for name in QUANTILES}


def to_json(run: Statistics, is_picture: bool) -> dict[str, Any]:
    """Return the statistics of one run as in stats.json, where those of images have the shape (C, 1, 1)."""
    return {
        name: (value[0, :, None, None] if is_picture and name != "count" else value[0]).tolist()
        for name, value in run.items()
    }
