"""Summaries of a trace: from its index at once, and from its columns in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from gym_trace.distributions import LeafValues, Rewards, finite
from gym_trace.episode import OUTCOMES
from gym_trace.errors import CorruptTrace, InvalidOption
from gym_trace.format import wire
from gym_trace.format.manifest import SUFFIX
from gym_trace.layout import PlainSpace
from gym_trace.playback import Trace
from gym_trace.stored import StoredWriter
from gym_trace.table import step_offsets
from gym_trace.values import Array

GROUPINGS = ("split", "writer", "outcome")
QUANTILES = (5, 25, 75, 95)  # percent
_BINS = 40  # of the histograms of return and length
_POINTS = 120  # of the curve of returns
_VALUES = frozenset(("observations", "actions", "rewards"))
_BOOKKEEPING = "fragments"  # the column that says where episodes begin and end


def summarize(
    trace: Trace,
    *,
    by: str | None = None,
    columns: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Describes a trace as plain data, fit for JSON: numbers that do not exist are None, none is NaN.

    Without columns only the index is used, so the answer comes at once whatever the size of the trace.

    Args:
        trace: as open_trace gives it.
        by: "split", "writer" or "outcome": the same summary of each group besides, under "groups".
        columns: also read the rewards, actions and observations, in one pass and in bounded memory.
        on_progress: called as ``on_progress(steps done, steps in all)`` while columns are read.

    Returns:
        episodes, parts (runs of steps: more than episodes where frames were filtered out or lost), filtered (whether
        frames were: then length and return count the kept steps only), steps, outcomes (how many episodes of each).

        return, length: of whole episodes: count, mean, std (of the population), min, median, max, quantiles (by
        percent), histogram (edges, counts), nan and inf (how many episodes are left out for having such a return).
        return_curve: mean returns of equally many episodes each, in the order in which the episodes started.

        duration: wall (from the first start to the last end) and episodes (sum over those that ended), in seconds.
        steps_per_second: of those episodes, over the sum of their durations; environments that ran side by side count
        one after the other.

        storage: bytes (of all files), raw_bytes (of all recorded values), compression_ratio (the one over the other),
        and for each column raw_bytes, stored_bytes, compression_ratio. None for groups by outcome, which share files.

        With columns: rewards (count, mean, std, min, max, nan, inf, and the values with their counts while there are
        few, otherwise a histogram), actions and observations (a list, one entry a leaf of the space, see
        distributions.LeafValues): counts of each value for Discrete, MultiDiscrete and MultiBinary, moments for
        Box: of each dimension, or of all elements together where there are very many, as in images; for values that
        are no numbers how many distinct ones there are, and examples.

    Raises:
        InvalidOption: by is something else.
        CorruptTrace: columns are damaged; what the index alone says can be had all the same.
    """
    if by is not None and by not in GROUPINGS:
        raise InvalidOption(f"by={by!r}: pass one of {', '.join(GROUPINGS)}")
    facts = _facts(trace)
    summary = {"directory": str(trace.directory), **_summary(facts, len(trace.episodes), trace.stored)}
    summary["damage"] = [list(damage) for damage in trace.damage]
    names, of_writer, of_outcome = _groups(trace, by)
    group = of_writer[facts.writer] + of_outcome[facts.outcome]
    if by is not None:
        part_group = of_writer[trace.episodes["writer"]] + of_outcome[_outcome_codes(trace.episodes)]
        parts = np.bincount(part_group, minlength=len(names)).tolist()
        order = np.argsort(group, kind="stable")
        bounds = np.searchsorted(group[order], np.arange(len(names) + 1))
        summary["by"], summary["groups"] = by, {}
        for i, name in enumerate(names):
            members = facts.take(order[bounds[i] : bounds[i + 1]])
            if by == "outcome" and not len(members.steps):
                continue
            writers = None if by == "outcome" else [w for w, g in zip(trace.stored, of_writer) if g == i]
            summary["groups"][name] = _summary(members, parts[i], writers)
    if columns:
        described = _describe_columns(trace, len(names), of_writer, of_outcome, on_progress)
        for i, name in enumerate(names):
            if by is not None and name in summary["groups"]:
                summary["groups"][name].update(described[i].result())
        whole = ColumnValues()
        for values in described:
            whole.merge(values)
        summary.update(whole.result())
    return summary


# -- from the index ---------------------------------------------------------------------------------------------------


class Facts(NamedTuple):
    """Arrays with an element an episode; parts of an episode taken together."""

    writer: Array
    outcome: Array  # a place in OUTCOMES
    steps: Array
    returns: Array
    start: Array  # ns, or the least int64 where unknown
    end: Array
    duration: Array

    def take(self, places: Array) -> Facts:
        return Facts(*(array[places] for array in self))


def _facts(trace: Trace) -> Facts:
    table = trace.episodes
    order = np.lexsort((table["episode_id"], table["writer"]))
    writer, episode = table["writer"][order], table["episode_id"][order]
    opens = np.ones(len(table), bool)
    opens[1:] = (writer[1:] != writer[:-1]) | (episode[1:] != episode[:-1])
    begin = np.flatnonzero(opens)
    first = order[begin]
    steps, returns = table["steps"][order], table["return"][order]
    if len(begin) < len(table):
        with np.errstate(invalid="ignore"):
            steps, returns = np.add.reduceat(steps, begin), np.add.reduceat(returns, begin)
    times = (table[name].view(np.int64)[first] for name in ("start_time", "end_time"))
    return Facts(writer[begin], _outcome_codes(table)[first], steps, returns, *times, table["duration"][first])


def _outcome_codes(table: Array) -> Array:
    codes = np.zeros(len(table), np.int64)
    for code, name in enumerate(OUTCOMES[1:], 1):
        codes[table["outcome"] == name] = code
    return codes


def _groups(trace: Trace, by: str | None) -> tuple[list[str], Array, Array]:
    """The names of the groups; the group of an episode is the sum of what the arrays say of its writer and outcome."""
    of_writer, of_outcome = np.zeros(len(trace.stored), np.int64), np.zeros(len(OUTCOMES), np.int64)
    if by == "outcome":
        return list(OUTCOMES), of_writer, np.arange(len(OUTCOMES))
    if by == "writer":
        return trace.writers, np.arange(len(trace.stored)), of_outcome
    if by == "split":
        splits = [writer.split for writer in trace.stored]
        names = list(dict.fromkeys(splits))
        return names, np.array([names.index(split) for split in splits], np.int64), of_outcome
    return ["all"], of_writer, of_outcome


def _summary(facts: Facts, parts: int, writers: list[StoredWriter] | None) -> dict[str, Any]:
    ended = facts.duration > 0
    in_episodes = float(facts.duration[ended].sum(dtype=np.float64)) / 1e9
    outcomes = np.bincount(facts.outcome, minlength=len(OUTCOMES)).tolist()
    by_start = facts.returns[np.argsort(facts.start, kind="stable")]
    return {
        "episodes": len(facts.steps),
        "parts": parts,
        "filtered": parts > len(facts.steps) or any(map(_filters_frames, writers or ())),
        "steps": int(facts.steps.sum()),
        "outcomes": {name: count for name, count in zip(OUTCOMES, outcomes) if count},
        "return": _spread(facts.returns),
        "length": _spread(facts.steps),
        "return_curve": _curve(by_start[np.isfinite(by_start)]),
        "duration": {"wall": _wall_time(facts), "episodes": in_episodes},
        "steps_per_second": float(facts.steps[ended].sum()) / in_episodes if in_episodes else None,
        "storage": None if writers is None else _storage(writers),
    }


def _filters_frames(writer: StoredWriter) -> bool:
    recorder = writer.schema.get("recorder")
    return isinstance(recorder, dict) and bool(recorder.get("frame_filter") or recorder.get("reward_classes"))


def _wall_time(facts: Facts) -> float | None:
    unknown = np.iinfo(np.int64).min
    starts, ends = facts.start[facts.start != unknown], facts.end[facts.end != unknown]
    if not len(starts) or not len(ends):
        return None
    return max(0, int(ends.max()) - int(starts.min())) / 1e9


def _spread(values: Array) -> dict[str, Any]:
    good = values
    nan = infinite = 0
    if values.dtype.kind == "f":
        good = values[np.isfinite(values)]
        nan = int(np.isnan(values).sum())
        infinite = len(values) - len(good) - nan
    spread: dict[str, Any] = {"count": len(good)}
    if len(good):
        with np.errstate(over="ignore", invalid="ignore"):
            levels = np.quantile(good, [level / 100 for level in (*QUANTILES, 50)]).tolist()
            mean, std = finite(good.mean()), finite(good.std())
        *quantiles, median = map(finite, levels)
        least, largest = good.min().item(), good.max().item()
        spread |= {"mean": mean, "std": std, "min": least, "median": median, "max": largest}
        spread["quantiles"] = dict(zip(map(str, QUANTILES), quantiles))
        spread["histogram"] = _histogram(good)
    else:
        spread |= dict.fromkeys(("mean", "std", "min", "median", "max"))
        spread |= {"quantiles": dict.fromkeys(map(str, QUANTILES)), "histogram": None}
    return spread | {"nan": nan, "inf": infinite}


def _histogram(values: Array) -> dict[str, Any] | None:
    """Bins of equal width; where values are whole numbers, of whole width too."""
    least, largest = float(values.min()), float(values.max())
    width = (largest - least) / _BINS
    if not np.isfinite(width):
        return None
    if least == largest:
        width, bins = 0.0, 1
    elif (np.floor(values) == values).all() and largest < 2**53 and least > -(2**53):
        width = np.ceil((largest - least + 1) / _BINS)
        bins = int((largest - least) // width) + 1
    else:
        bins = _BINS
    places = np.zeros(len(values), np.int64) if not width else ((values - least) / width).astype(np.int64)
    counts = np.bincount(np.minimum(places, bins - 1), minlength=bins)
    return {"edges": [float(least + i * width) for i in range(bins + 1)], "counts": counts.tolist()}


def _curve(values: Array) -> list[float | None]:
    if not len(values):
        return []
    bounds = np.linspace(0, len(values), min(_POINTS, len(values)) + 1).astype(np.int64)
    with np.errstate(over="ignore"):
        return [finite(mean) for mean in np.add.reduceat(values, bounds[:-1]) / np.diff(bounds)]


def _storage(writers: list[StoredWriter]) -> dict[str, Any]:
    totals: dict[str, list[int]] = {}
    in_files = raw = 0
    for writer in writers:
        in_files += sum(_size_of_manifest(writer) for _ in range(1))
        for batch in writer.batches:
            in_files += batch.size
            for path, (full, stored) in batch.totals.items():
                name = "/".join(map(str, path))
                total = totals.setdefault(name, [0, 0])
                total[0] += full
                total[1] += stored
                raw += full if name != _BOOKKEEPING else 0
    return {
        "bytes": in_files,
        "raw_bytes": raw,
        "compression_ratio": raw / in_files if in_files else None,
        "columns": {
            name: {"raw_bytes": full, "stored_bytes": stored, "compression_ratio": full / stored if stored else None}
            for name, (full, stored) in totals.items()
        },
    }
