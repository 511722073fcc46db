"""Compare runs: statistics with bootstrap intervals, and learning curves over seeds."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.values import Array
from gym_trace.data.vocabulary import OUTCOMES
from gym_trace.errors import InvalidOption
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.episode_table import outcome_codes
from gym_trace.playback.trace import Trace, TraceLike, as_trace
from gym_trace.storage.protocol import ReadStorage
from gym_trace.tools.statistics.accumulators import finite
from gym_trace.tools.statistics.summary import UNKNOWN_TIME, EpisodeArrays, by_episode, episode_arrays, speed, wall_time

AXES = ("steps", "episodes", "time")
_POINTS = 100  # of a curve
_MOST_AVERAGED = 100  # episodes in a point of a curve, as in the ep_rew_mean of Stable-Baselines3
_LEAST_WINDOWS = 10  # in a run: fewer episodes are averaged in shorter ones
_INTERVAL = (0.025, 0.975)
_MOST_RESAMPLES, _LEAST_RESAMPLES = 50_000, 200  # rliable takes 50,000
_DRAWN = 2_000_000  # values that all resamples have together: a fraction of a second
_LAST = np.iinfo(np.int64).max


class Estimate(NamedTuple):
    """A statistic of samples, and the bounds of its 95 % bootstrap interval. NaN: undefined, or unknown bounds.

    Examples:
        >>> trace = gym_trace.open_trace("traces/cartpole")
        >>> (group,) = gym_trace.compare({"random": [trace]}).groups
        >>> group.mean.value, bool(group.mean.low <= group.mean.value <= group.mean.high)
        (23.05, True)
    """

    value: float
    low: float = np.nan
    high: float = np.nan


@dataclass(frozen=True, eq=False)
class RunGroup:
    """The runs of one name. R: number of runs; G: points of RunComparison.grid.

    Attributes:
        name: their name.
        directories: (R) directories of the traces, as text.
        environments: ids of their environments, each once; "" for an environment without one.
        episodes, steps: (R,) int64, numbers of episodes and of environment steps, without those that branches repeat.
        complete: (R,) int64, number of complete episodes with a finite return. Returns and lengths count only these.
            An episode is complete as for summarize().
        outcomes: number of episodes of each outcome, over all runs.
        returns, lengths: (R,) float64, mean return and mean length of the complete episodes of each run; NaN without
            any.
        over: "runs" if there are several: mean, median and iqm are those of `returns`. "episodes" for a single run:
            they are those of the returns of its complete episodes, and say nothing about other seeds.
        mean, median, iqm: estimates. iqm is the interquartile mean: that without the lowest and the highest quarter.
        steps_to_threshold: (R,) float64, environment steps until the mean return of `window` complete episodes reaches
            the threshold; inf: never; NaN without a threshold.
        seconds: (R,) float64, from the first start to the last end; NaN if unknown.
        steps_per_second: (R,) float64, steps per second with a running episode; NaN if unknown.
        curves: (R, G) float64, mean return of the last `window` complete episodes of each run; NaN before there are as
            many, and after the end of the run.
        curve: (G,) float64, mean of `curves` over the runs that have one; NaN where one of them is.
        low, high: (G,) float64, bounds of the interval of `curve`; NaN for a single run.

    Examples:
        >>> (group,) = gym_trace.compare({"random": ["traces/cartpole"]}).groups
        >>> group.episodes.tolist(), group.outcomes
        ([20], {'terminated': 20})
    """

    name: str
    directories: tuple[str, ...]
    environments: tuple[str, ...]
    episodes: Array
    steps: Array
    complete: Array
    outcomes: dict[str, int]
    returns: Array
    lengths: Array
    over: str
    mean: Estimate
    median: Estimate
    iqm: Estimate
    steps_to_threshold: Array
    seconds: Array
    steps_per_second: Array
    curves: Array = field(repr=False)
    curve: Array = field(repr=False)
    low: Array = field(repr=False)
    high: Array = field(repr=False)


@dataclass(frozen=True, eq=False)
class RunComparison:
    """Runs that were compared by compare().

    Attributes:
        groups: the runs of each name, in the order in which they were given.
        x: "steps", "episodes" or "time": what curves are over.
        grid: (G,) float64, from 0 to the end of the longest run: environment steps; number of episodes; or seconds
            since the first start of the run.
        window: number of complete episodes averaged in each point of a curve.
        threshold: the return that steps_to_threshold is about; None: not asked for.

    Examples:
        >>> comparison = gym_trace.compare({"random": ["traces/cartpole"]}, threshold=30)
        >>> comparison.x, [group.name for group in comparison.groups]
        ('steps', ['random'])
    """

    groups: tuple[RunGroup, ...]
    x: str
    grid: Array = field(repr=False)
    window: int
    threshold: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the attributes as plain data for JSON: arrays are lists, NaN and infinities None.

        Examples:
            >>> sorted(gym_trace.compare({"random": ["traces/cartpole"]}).to_json())
            ['grid', 'groups', 'threshold', 'window', 'x']
        """
        plain: dict[str, Any] = _plain({**vars(self), "groups": [vars(group) for group in self.groups]})
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Estimate):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return finite(value) if isinstance(value, float) else value


def compare(
    traces: Mapping[str, Sequence[TraceLike]] | Sequence[TraceLike],
    *,
    x: str = "steps",
    threshold: float | None = None,
) -> RunComparison:
    """Compare training runs, or evaluations: statistics of their returns, and learning curves.

    Only indexes are read. Rewards of several numbers each have no return here. diff_traces() compares bit for bit.

    The samples of a name are its runs, each with the mean return of its complete episodes; if there is only one run,
    its episodes. The intervals are percentiles of a stratified bootstrap, as in Agarwal et al., "Deep Reinforcement
    Learning at the Edge of the Statistical Precipice" (2021), and in rliable: samples are drawn with replacement among
    those of the same environments, 50,000 times (fewer times, at least 200, for more than 40 samples). The same traces
    give the same numbers. Intervals over few runs are too narrow; those over three runs go from the lowest to the
    highest one.

    A point of a curve is the mean return of the last complete episodes, of up to 100, or of a tenth of those of the
    median run if that is fewer (see RunComparison.window). Episodes come in the order of their ends. The environment
    steps at the end of an episode are the steps of all episodes that have ended by then.

    Args:
        traces: the runs by name: traces, views or directories of the seeds of one setting. A sequence: each has the
            name of its directory. Views count only their episodes: ``trace[-100:]`` gives the final performance.
        x: "steps", "episodes" or "time": what curves are over.
        threshold: a return; find the environment steps until the mean return of a window reaches it.

    Raises:
        InvalidOption: no traces, equal names, or an unknown x.
        TraceNotFound: no trace in a directory.

    Examples:
        >>> trace = gym_trace.open_trace("traces/cartpole")
        >>> early, late = gym_trace.compare({"early": [trace[:10]], "late": [trace[10:]]}).groups
        >>> round(early.iqm.value, 1), round(late.iqm.value, 1), late.over
        (20.5, 21.8, 'episodes')
    """
    if x not in AXES:
        raise InvalidOption(f"x={x!r}: invalid; pass one of {', '.join(AXES)}")
    runs = {name: [_run_of(as_trace(trace), x) for trace in given] for name, given in _named(traces).items()}
    every = [run for given in runs.values() for run in given]
    counts = [len(run.returns) for run in every if len(run.returns)]
    window = window_of(counts)
    grid = np.linspace(0, max(run.end for run in every), _POINTS)
    groups = (_group(name, given, grid, window, threshold) for name, given in runs.items())
    return RunComparison(tuple(groups), x, grid, window, threshold)


def _named(traces: Mapping[str, Sequence[TraceLike]] | Sequence[TraceLike]) -> dict[str, list[TraceLike]]:
    """Return the traces by name. Raises InvalidOption."""
    if isinstance(traces, Mapping):
        named = {str(name): _listed(given) for name, given in traces.items()}
    else:
        listed = _listed(traces)
        names = [os.fspath(it) if isinstance(it, (str, os.PathLike)) else str(as_trace(it).directory) for it in listed]
        if len(set(names)) < len(names):
            raise InvalidOption("traces: two of them have the same name; pass a dict of names and lists of traces")
        named = {name: [trace] for name, trace in zip(names, listed)}
    for name, given in named.items() or [("", [])]:
        if not given:
            raise InvalidOption(f"traces: none given{name and f' for {name!r}'}; pass at least one")
    return named


def _listed(traces: Any) -> list[TraceLike]:
    return [traces] if isinstance(traces, (str, os.PathLike, Trace, ReadStorage)) else list(traces)


class _Run(NamedTuple):
    """A run. Arrays have one element per complete episode with a finite return, in the order of their ends.

    Attributes:
        counts: number of episodes of each outcome.
        x, at_step: the position on the axis and the environment step at which each ended; x is NaN if unknown.
        end: position of the end of the run.
    """

    directory: str
    environments: tuple[str, ...]
    counts: Array
    steps: int
    returns: Array
    lengths: Array
    x: Array
    at_step: Array
    end: float
    seconds: float | None
    steps_per_second: float | None

    def means(self, window: int) -> Array:
        """Return the mean returns of each window of complete episodes; empty if there are fewer."""
        if len(self.returns) < window:
            return np.empty(0)
        with np.errstate(over="ignore", invalid="ignore"):
            means: Array = np.lib.stride_tricks.sliding_window_view(self.returns, window).mean(axis=1)
        return means

    def on_grid(self, grid: Array, window: int) -> Array:
        """Return the curve at the points of the grid; NaN where it is undefined."""
        is_known = np.isfinite(self.x[window - 1 :])
        means, x = self.means(window)[is_known], self.x[window - 1 :][is_known]
        found = np.searchsorted(x, grid, side="right") - 1
        defined = (found >= 0) & (grid <= self.end)
        curve = np.full(len(grid), np.nan)
        curve[defined] = means[found[defined]]
        return curve

    def steps_until(self, threshold: float, window: int) -> float:
        reached = np.flatnonzero(self.means(window) >= threshold)
        return float(self.at_step[reached[0] + window - 1]) if len(reached) else np.inf


def _run_of(trace: Trace, x: str) -> _Run:
    episodes, _ = episodes_by_end(trace)
    steps = np.cumsum(episodes.lengths - episodes.repeated)
    positions = positions_on(x, episodes, steps)
    counted = episodes.complete & np.isfinite(episodes.returns)
    known = positions[np.isfinite(positions)]
    ids = dict.fromkeys(str(writer.about_or_empty.environment.get("id") or "") for writer in index_of(trace).readers)
    return _Run(
        directory=str(trace.directory),
        environments=tuple(ids),
        counts=np.bincount(episodes.outcome, minlength=len(OUTCOMES)),
        steps=int(steps[-1]) if len(steps) else 0,
        returns=episodes.returns[counted],
        lengths=episodes.lengths[counted],
        x=positions[counted],
        at_step=steps[counted],
        end=float(known[-1]) if len(known) else 0.0,
        seconds=wall_time(episodes),
        steps_per_second=speed(episodes)[1],
    )


def episodes_by_end(trace: Trace) -> tuple[EpisodeArrays, Array]:
    """Return the episodes in the order of their ends, unfinished ones last, and the first row of each in the table."""
    codes = outcome_codes(index_of(trace))
    episodes = episode_arrays(trace, codes, np.zeros(len(codes), np.int64), reads_objectives=False)
    by_end = np.argsort(np.where(episodes.end == UNKNOWN_TIME, _LAST, episodes.end), kind="stable")
    order, first = by_episode(index_of(trace))
    return episodes.take(by_end), order[first][by_end]


def window_of(counts: Sequence[int]) -> int:
    """Return how many complete episodes a point of a curve averages. counts: of the runs that have any."""
    return int(np.clip(np.median(counts or [0]) // _LEAST_WINDOWS, 1, _MOST_AVERAGED))


def positions_on(x: str, episodes: EpisodeArrays, steps: Array) -> Array:
    """Return where each episode ends on an axis; NaN if unknown. steps: their cumulative sum."""
    if x == "episodes":
        return np.arange(1.0, len(steps) + 1)
    if x == "steps":
        return steps.astype(np.float64)
    starts = episodes.start[episodes.start != UNKNOWN_TIME]
    if not len(starts):
        return np.full(len(steps), np.nan)
    return np.where(episodes.end == UNKNOWN_TIME, np.nan, (episodes.end - starts.min()) / 1e9)


def _group(name: str, runs: list[_Run], grid: Array, window: int, threshold: float | None) -> RunGroup:
    def each(values: Iterable[float | None]) -> Array:
        return np.array([np.nan if value is None else value for value in values], np.float64)

    counts = sum((run.counts for run in runs), np.zeros(len(OUTCOMES), np.int64))
    environments = [run.environments for run in runs]
    strata = np.array([environments.index(ids) for ids in environments], np.int64)
    returns = each(_mean(run.returns) for run in runs)
    samples, of_sample = (returns, strata) if len(runs) > 1 else (runs[0].returns, np.zeros(len(runs[0].returns), int))
    known = np.isfinite(samples)
    mean, median, iqm = _estimates(samples[known], of_sample[known])
    curves = np.array([run.on_grid(grid, window) for run in runs])
    has_curve = ~np.isnan(curves).all(axis=1)
    curve, low, high = _mean_curve(curves[has_curve], strata[has_curve])
    return RunGroup(
        name=name,
        directories=tuple(run.directory for run in runs),
        environments=tuple(dict.fromkeys(one for ids in environments for one in ids)),
        episodes=np.array([run.counts.sum() for run in runs], np.int64),
        steps=np.array([run.steps for run in runs], np.int64),
        complete=np.array([len(run.returns) for run in runs], np.int64),
        outcomes={outcome: count for outcome, count in zip(OUTCOMES, counts.tolist()) if count},
        returns=returns,
        lengths=each(_mean(run.lengths) for run in runs),
        over="runs" if len(runs) > 1 else "episodes",
        mean=mean,
        median=median,
        iqm=iqm,
        steps_to_threshold=each(None if threshold is None else run.steps_until(threshold, window) for run in runs),
        seconds=each(run.seconds for run in runs),
        steps_per_second=each(run.steps_per_second for run in runs),
        curves=curves,
        curve=curve,
        low=low,
        high=high,
    )


def _mean(values: Array) -> float | None:
    with np.errstate(over="ignore"):
        return float(values.mean()) if len(values) else None


# -- statistics of samples --------------------------------------------------------------------------------------------


def _estimates(samples: Array, strata: Array) -> list[Estimate]:
    """Return mean, median and interquartile mean. strata: number of the stratum of each sample."""
    if not len(samples):
        return [Estimate(np.nan)] * 3
    values = _statistics(samples[None])[:, 0]
    if _are_alone(strata):
        return [Estimate(value) for value in values.tolist()]
    drawn = [_statistics(samples[indices]) for indices in _resamples(strata, len(samples))]
    with np.errstate(invalid="ignore"):  # a mean may be infinite
        low, high = np.quantile(np.concatenate(drawn, axis=1), _INTERVAL, axis=1)
    return list(map(Estimate, values.tolist(), low.tolist(), high.tolist()))


def _are_alone(strata: Array) -> bool:
    """Return True if each stratum has one sample, so that all resamples are the same."""
    return len(np.unique(strata)) == len(strata)


def _statistics(samples: Array) -> Array:
    """Return (3, rows): mean, median and interquartile mean of each row."""
    size = samples.shape[1]
    middle, quarters = [(size - 1) // 2, size // 2], slice(size // 4, size - size // 4)
    ordered = np.partition(samples, [*middle, quarters.start, quarters.stop - 1], axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.stack([part.mean(axis=1) for part in (samples, ordered[:, middle], ordered[:, quarters])])


def _mean_curve(curves: Array, strata: Array) -> tuple[Array, Array, Array]:
    """Return the mean of curves, (runs, points), and the bounds of its interval."""
    unknown = np.full(curves.shape[1], np.nan)
    if not len(curves):
        return unknown, unknown, unknown
    with np.errstate(over="ignore", invalid="ignore"):
        mean = curves.mean(axis=0)
        if _are_alone(strata):
            return mean, unknown, unknown
        drawn = [curves[indices].mean(axis=1) for indices in _resamples(strata, curves.size)]
        low, high = np.quantile(np.concatenate(drawn), _INTERVAL, axis=0)
        return mean, low, high


def _resamples(strata: Array, size: int) -> Iterator[Array]:
    """Yield blocks of resamples, (resamples, samples): indices of samples, each drawn from the stratum in its place.

    size: number of values of one resample, which limits how many there are.
    """
    order = np.argsort(strata, kind="stable")
    begin, end = (np.searchsorted(strata[order], strata[order], side=side) for side in ("left", "right"))
    count, random = int(np.clip(_DRAWN // size, _LEAST_RESAMPLES, _MOST_RESAMPLES)), np.random.default_rng(0)
    block = max(1, _DRAWN // size)
    for first in range(0, count, block):
        yield order[random.integers(begin, end, (min(block, count - first), len(order)))]
