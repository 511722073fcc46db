"""Summaries of a trace: fast from its index, and in one pass from its columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.agents import Name
from gym_trace.data.values import Array
from gym_trace.data.vocabulary import OUTCOMES
from gym_trace.errors import InvalidOption
from gym_trace.playback.agent_returns import agent_returns
from gym_trace.playback.episode_columns import complete_rows, objective_returns, repeated_steps
from gym_trace.playback.episode_index import index_of, whole_of
from gym_trace.playback.episode_table import Columns, outcome_codes
from gym_trace.playback.trace import Trace, TraceLike, as_trace
from gym_trace.playback.writer_reader import WriterReader
from gym_trace.tools.statistics.accumulators import finite
from gym_trace.tools.statistics.columns import ColumnValues, describe_columns

GROUPINGS = ("split", "writer", "outcome")
QUANTILES = (5, 25, 75, 95)  # percent
_BINS = 40  # bins in the histograms of return and length
_POINTS = 120  # points of the return curve
UNKNOWN_TIME = np.iinfo(np.int64).min
_FRAGMENTS = ("fragments",)  # the fragment table, which is not recorded data


def summarize(
    trace: TraceLike,
    *,
    by: str | None = None,
    columns: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Summarize a trace as plain data for JSON. Undefined numbers are None; no number is NaN.

    Without columns, only the index is read, so the call is fast for any trace. There are two exceptions: rewards of
    several numbers each (objectives), and rewards of several agents, are read, because the index lacks their returns.

    Args:
        trace: a trace, a view, or a directory.
        by: "split", "writer" or "outcome": add the same summary of each group under "groups".
        columns: also read the rewards, actions and observations, in one pass and in bounded memory.
        on_progress: called as ``on_progress(steps done, total steps)`` while columns are read.

    Returns:
        episodes; parts: number of runs of steps, more than episodes if frames were filtered out or lost; filtered: True
        if frames were filtered out, so that length and return count only the recorded steps; steps; repeated_steps:
        number of steps that branched episodes repeat, counted in length and return, but neither in steps nor in
        columns; outcomes: number of episodes of each outcome.

        complete: number of complete episodes: terminated or truncated, with at least one step. Imported recordings
        rarely store how episodes ended: all of their episodes with a step are complete.

        return, length: statistics over complete episodes (in groups by outcome, over all episodes with a step): count,
        mean, std (of the population), min, median, max, quantiles (by percent), histogram (edges, counts), nan and inf
        (numbers of episodes skipped for such a return). objectives: if rewards are several numbers each, one such entry
        per objective; otherwise empty. agents: one such entry per agent, by its name, over the episodes in which it
        took part; empty for a single agent. return_curve: mean returns of consecutive, equally large groups of complete
        episodes, in the order of their start.

        duration, in seconds: wall (first start to last end), episodes (sum over ended episodes), running (time with at
        least one of these episodes running).
        steps_per_second: steps of ended episodes per second of the running time.

        storage: bytes (of all files), raw_bytes (of all recorded values), compression_ratio (raw_bytes / bytes), and
        for each column raw_bytes, stored_bytes, compression_ratio. None for views and groups by outcome, which share
        files.

        With columns: rewards (count, mean, std, min, max, nan, inf, and counts of each value, or a histogram if there
        are many; objectives: moments of each objective), actions and observations (one entry per leaf of the space, see
        columns.LeafValues): counts of each value for Discrete, MultiDiscrete and MultiBinary; moments for Box, per
        dimension, or over all elements if there are very many, as in images; number of distinct values and examples for
        non-numeric values. Each entry of numbers has a curve: at most 40 means of consecutive, equally large groups of
        rows, in stored order, writer by writer; None where no value of a group is finite.

    Raises:
        TraceNotFound: no trace in the directory.
        InvalidOption: by is invalid.
        CorruptTrace: columns are damaged. Without columns, the call still works.

    Examples:
        >>> summary = gym_trace.summarize("traces/cartpole")
        >>> summary["episodes"], summary["outcomes"], summary["return"]["mean"]
        (20, {'terminated': 20}, 23.05)
    """
    trace = as_trace(trace)
    codes = outcome_codes(index_of(trace))
    names, of_writer, groups = grouping(trace, by, codes)
    agents = agent_returns(index_of(trace), trace.scan)
    episodes = episode_arrays(trace, codes, groups, agents.values)
    writers = index_of(trace).readers if whole_of(trace) is trace else None  # a view shares the files
    summary = {"directory": str(trace.directory), **_summary(episodes, agents.names, len(trace), writers)}
    summary["damage"] = [list(damage) for damage in trace.damage]
    if by is not None:
        parts = np.bincount(groups, minlength=len(names)).tolist()
        order = np.argsort(episodes.group, kind="stable")
        members = np.split(order, np.searchsorted(episodes.group[order], np.arange(1, len(names))))
        have_own_files = writers is not None and all(writer.has_own_files for writer in writers)
        summary |= {"by": by, "groups": {}}
        for i, name in enumerate(names):
            if by == "outcome" and not len(members[i]):
                continue
            own = (
                [writer for writer, group in zip(index_of(trace).readers, of_writer) if group == i]
                if have_own_files
                else None
            )
            summary["groups"][name] = _summary(
                episodes.take(members[i]), agents.names, parts[i], own or None, by == "outcome"
            )
    if columns:
        of_trace = ColumnValues()
        for name, values in zip(names, describe_columns(trace, len(names), groups, on_progress)):
            if by is not None and name in summary["groups"]:
                summary["groups"][name].update(values.result())
            of_trace.merge(values)
        summary |= of_trace.result()
    return summary


def grouping(trace: Trace, by: str | None, codes: Array) -> tuple[list[str], list[int], Array]:
    """Return the names of the groups, the group of each writer, and the group of each row of trace.episodes.

    By outcome, the list of writers is empty. codes: outcome of each row. Raises InvalidOption for an unknown by.
    """
    if by is not None and by not in GROUPINGS:
        raise InvalidOption(f"by={by!r}: invalid; pass one of {', '.join(GROUPINGS)}")
    if by == "outcome":
        return list(OUTCOMES), [], codes
    keys_by = {"split": [writer.about_or_empty.split for writer in index_of(trace).readers], "writer": trace.writers}
    keys = keys_by.get(str(by), [""] * len(index_of(trace).readers))
    names = list(dict.fromkeys(keys))
    of_writer = [names.index(key) for key in keys]
    return names, of_writer, np.array(of_writer, np.int64)[index_of(trace)["writer"]]


# -- from the index ---------------------------------------------------------------------------------------------------


class EpisodeArrays(NamedTuple):
    """Arrays with one element per episode; the parts of an episode are merged.

    Attributes:
        outcome: index into OUTCOMES.
        steps: number of steps without repeated ones; repeated: steps that repeat the episode branched from.
        lengths: length of the whole episode; for recordings with statistics only, the recorded length.
        objectives, agents: (episodes, objectives) and (episodes, agents), their returns.
        complete: see complete_rows().
        start, end, duration: nanoseconds; the smallest int64 for an unknown time.
    """

    group: Array
    outcome: Array
    steps: Array
    repeated: Array
    lengths: Array
    returns: Array
    objectives: Array
    agents: Array
    complete: Array
    start: Array
    end: Array
    duration: Array

    def take(self, indices: Array) -> EpisodeArrays:
        return EpisodeArrays(*(array[indices] for array in self))

    def counted(self, by_outcome: bool) -> Array:
        """Return True for episodes whose return and length count: complete ones; by outcome, all with a step."""
        return self.lengths > 0 if by_outcome else self.complete


def by_episode(table: Columns) -> tuple[Array, Array]:
    """Return an order of the rows of Trace.episodes that joins the parts of episodes, and where each episode begins."""
    writer, episode = table["writer"], table["episode_id"]
    order = np.lexsort((episode, writer))
    writer, episode = writer[order], episode[order]
    opens = np.ones(len(table), bool)
    opens[1:] = (writer[1:] != writer[:-1]) | (episode[1:] != episode[:-1])
    return order, np.flatnonzero(opens)


def episode_arrays(
    trace: Trace, codes: Array, groups: Array, agents: Array | None = None, reads_objectives: bool = True
) -> EpisodeArrays:
    """codes, groups, agents: outcome, group and returns of agents of each row of trace.episodes."""
    table = index_of(trace)
    order, begin = by_episode(table)
    first = order[begin]

    def summed(rows: Array | None) -> Array:
        """Return the sums over the parts of each episode; None gives an array without columns."""
        values = np.empty((len(order), 0)) if rows is None else rows[order]
        with np.errstate(invalid="ignore"):
            return np.add.reduceat(values, begin, axis=0) if len(begin) < len(table) else values

    steps, returns = summed(table["steps"]), summed(table["return"])
    repeated = summed(repeated_steps(table, index_of(trace).readers))
    objectives, of_agents = summed(objective_returns(table, trace.scan) if reads_objectives else None), summed(agents)
    lacks_steps = np.array([writer.about_or_empty.has_only_statistics for writer in index_of(trace).readers], bool)
    lengths = np.where(lacks_steps[table["writer"][first]], table["first_step"][first], steps)
    complete = complete_rows(table, index_of(trace).readers, first, lengths)
    start, end, duration = (table[name][first] for name in ("start_time", "end_time", "duration"))
    start, end = start.view(np.int64), end.view(np.int64)
    group, outcome = groups[first], codes[first]
    steps = steps - repeated
    return EpisodeArrays(
        group, outcome, steps, repeated, lengths, returns, objectives, of_agents, complete, start, end, duration
    )


def _summary(
    episodes: EpisodeArrays,
    agents: list[Name],
    parts: int,
    writers: list[WriterReader] | None,
    by_outcome: bool = False,
) -> dict[str, Any]:
    """writers: writers whose files have these episodes and no others; None: the files are shared."""
    count = len(episodes.steps)
    in_episodes = float(episodes.duration[episodes.duration > 0].sum(dtype=np.float64)) / 1e9
    running, steps_per_second = speed(episodes)
    outcomes = np.bincount(episodes.outcome, minlength=len(OUTCOMES)).tolist()
    counted = episodes.take(np.flatnonzero(episodes.counted(by_outcome)))
    has_objectives = ~np.isnan(counted.objectives).all(axis=1)
    by_start = counted.returns[np.argsort(counted.start, kind="stable")]
    return {
        "episodes": count,
        "parts": parts,
        "filtered": parts > count or any(writer.about_or_empty.filters_frames for writer in writers or ()),
        "steps": int(episodes.steps.sum()),
        "repeated_steps": int(episodes.repeated.sum()),
        "outcomes": {name: number for name, number in zip(OUTCOMES, outcomes) if number},
        "complete": int(np.count_nonzero(episodes.complete)),
        "return": _spread(counted.returns[~has_objectives]),
        "length": _spread(counted.lengths),
        "agents": {str(name): _spread(values[~np.isnan(values)]) for name, values in zip(agents, counted.agents.T)},
        "objectives": [_spread(objective) for objective in counted.objectives[has_objectives].T],
        "return_curve": _curve(by_start[np.isfinite(by_start)]),
        "duration": {"wall": wall_time(episodes), "episodes": in_episodes, "running": running},
        "steps_per_second": steps_per_second,
        "storage": None if writers is None else _storage(writers),
    }


def wall_time(episodes: EpisodeArrays) -> float | None:
    """Return the seconds from the first start to the last end; None if unknown."""
    starts, ends = episodes.start[episodes.start != UNKNOWN_TIME], episodes.end[episodes.end != UNKNOWN_TIME]
    if not len(starts) or not len(ends):
        return None
    return max(0, int(ends.max()) - int(starts.min())) / 1e9


def speed(episodes: EpisodeArrays) -> tuple[float, float | None]:
    """Return the seconds with at least one ended episode running, and their steps per such second; None without."""
    ended = episodes.duration > 0
    running = _running_time(episodes.start[ended], episodes.duration[ended])
    return running, float(episodes.lengths[ended].sum()) / running if running else None


def _running_time(starts: Array, durations: Array) -> float:
    """Return the seconds with at least one episode running. starts, durations: in ns."""
    is_known = starts != UNKNOWN_TIME
    unknown = durations[~is_known].sum(dtype=np.float64)
    starts, durations = starts[is_known], durations[is_known]
    order = np.argsort(starts, kind="stable")
    begins, ends = starts[order], (starts + durations)[order]
    latest_ends = np.append(begins[:1], np.maximum.accumulate(ends)[:-1])  # over all earlier episodes
    return float(unknown + np.maximum(0, ends - np.maximum(begins, latest_ends)).sum(dtype=np.float64)) / 1e9


def _spread(values: Array) -> dict[str, Any]:
    good, nan = values[np.isfinite(values)], int(np.isnan(values).sum())
    infinite = len(values) - len(good) - nan
    names = ("mean", "std", "min", "median", "max")
    spread: dict[str, Any] = {"count": len(good), **dict.fromkeys(names)}
    spread |= {"quantiles": dict.fromkeys(map(str, QUANTILES)), "histogram": None}
    if len(good):
        with np.errstate(over="ignore", invalid="ignore"):
            levels = np.quantile(good, [percent / 100 for percent in (*QUANTILES, 50)]).tolist()
            mean, std = finite(good.mean()), finite(good.std())
        *quantiles, median = map(finite, levels)
        spread |= zip(names, (mean, std, good.min().item(), median, good.max().item()))
        spread |= {"quantiles": dict(zip(map(str, QUANTILES), quantiles)), "histogram": histogram(good)}
    return spread | {"nan": nan, "inf": infinite}


def histogram(values: Array) -> dict[str, Any] | None:
    """Return bins of equal width; for whole numbers, the width is whole, too."""
    low, high = float(values.min()), float(values.max())
    width = (high - low) / _BINS
    if not np.isfinite(width):
        return None
    if low == high:
        width, bins = 0.0, 1
    elif (np.floor(values) == values).all() and high < 2**53 and low > -(2**53):
        width = np.ceil((high - low + 1) / _BINS)
        bins = int((high - low) // width) + 1
    else:
        bins = _BINS
    indices = np.zeros(len(values), np.int64) if not width else ((values - low) / width).astype(np.int64)
    counts = np.bincount(np.minimum(indices, bins - 1), minlength=bins)
    return {"edges": [float(low + i * width) for i in range(bins + 1)], "counts": counts.tolist()}


def _curve(values: Array) -> list[float | None]:
    if not len(values):
        return []
    bounds = np.linspace(0, len(values), min(_POINTS, len(values)) + 1).astype(np.int64)
    with np.errstate(over="ignore"):
        return [finite(mean) for mean in np.add.reduceat(values, bounds[:-1]) / np.diff(bounds)]


def _storage(writers: list[WriterReader]) -> dict[str, Any]:
    totals: dict[str, list[int]] = {}
    file_bytes, raw_bytes = sum(writer.size for writer in writers), 0
    for batch in dict.fromkeys(batch for writer in writers for batch in writer.read_batches):
        for path, (raw, stored) in batch.totals.items():
            total = totals.setdefault("/".join(map(str, path)), [0, 0])
            total[0] += raw
            total[1] += stored
            raw_bytes += 0 if path == _FRAGMENTS else raw
    return {
        "bytes": file_bytes,
        "raw_bytes": raw_bytes,
        "compression_ratio": raw_bytes / file_bytes if file_bytes else None,
        "columns": {
            name: {"raw_bytes": raw, "stored_bytes": stored, "compression_ratio": raw / stored if stored else None}
            for name, (raw, stored) in totals.items()
        },
    }
