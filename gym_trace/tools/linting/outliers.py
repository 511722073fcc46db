"""Find episodes far from the others: in length, jerk, time at rest, or where they end (huggingface/lerobot#3760)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from gym_trace.data.layout import Path
from gym_trace.data.values import Array
from gym_trace.data.vocabulary import Outcome
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.episode_table import OUTCOME_CODE
from gym_trace.playback.scan import StepRuns
from gym_trace.playback.trace import Trace
from gym_trace.tools.linting.findings import NOTE, Kind, Sighting, environments_of

_LENGTH = Kind("T405", NOTE, "episodes far longer or shorter than the others")
_JERK = Kind("T406", NOTE, "episodes far jerkier than the others")
_REST = Kind("T407", NOTE, "episodes far longer at rest than the others")
_END = Kind("T408", NOTE, "episodes that end far from where the others end")
_FORMS = {_LENGTH: "{:.0f} steps", _JERK: "jerk {:.3g}", _REST: "{:.0%} at rest", _END: "distance {:.3g}"}

_MOST_DIMENSIONS = 512  # larger rows, such as images, are not measured
_MIN_PAIRS = 100  # steps that show how much a number usually changes
_MIN_STEPS = 20  # shorter episodes have no jerk and no time at rest
_AT_REST = 0.1  # of a usual change
_SAMPLE = 1024  # final observations that show where episodes usually end
_FARTHEST = 10  # spreads of a number, so that one number alone is not a distance
_MOST_SHARE = 0.05  # more episodes are another kind of episode, not outliers
_DEVIATIONS = 1.4826  # standard deviations of a normal distribution in its median absolute deviation
_LEAST_SPREADS = {_REST: 0.05, _END: 0.25}
_LEAST_RATIO = 0.1  # of other measures, to their median
_MOST_NAMED, _MOST_LISTED = 5, 50


class _Numbers(NamedTuple):
    """A column of floats.

    Attributes:
        rows: (rows, numbers).
        weights: (numbers,), so that `change @ weights` is 1 for a usual change; 0 for a number that does not change.
        ranges: (numbers,) float64, standard deviations.
    """

    rows: Array
    weights: Array
    ranges: Array


class _Ends:
    """Measures how far episodes end from where they usually end, by a sample of the first ones."""

    def __init__(self, ranges: Array, distances: Array):
        """distances: by episode, set here."""
        self._ranges, self._distances = ranges, distances
        self._new: list[tuple[Array, Array]] = []  # episodes and their final observations
        self._usual: tuple[Array, Array, Array] | None = None  # medians, spreads, and which numbers vary

    def add(self, episodes: Array, finals: Array) -> None:
        self._new.append((episodes, finals))
        if self._usual is not None or sum(len(episodes) for episodes, _ in self._new) >= _SAMPLE:
            self.measure()

    def measure(self) -> None:
        """Set the distances of all episodes that were added."""
        if not self._new:
            return
        episodes, finals = (np.concatenate(parts) for parts in zip(*self._new))
        self._new = []
        if self._usual is None:
            middle = np.median(finals, axis=0)
            spread = np.maximum(_DEVIATIONS * np.median(np.abs(finals - middle), axis=0), self._ranges / 2)
            varies = spread > 0
            self._usual = middle[varies], spread[varies], varies
        middle, spread, varies = self._usual
        spreads = np.minimum(np.abs(finals[:, varies] - middle) / spread, _FARTHEST)
        self._distances[episodes] = spreads.mean(axis=1) if varies.any() else 0


class OutliersRule:
    """Compares the whole episodes of an environment that ended in the same way."""

    kinds: ClassVar[Sequence[Kind]] = (_LENGTH, _JERK, _REST, _END)
    columns: ClassVar[Collection[str]] = frozenset(("observations", "actions"))
    thresholds: ClassVar[Mapping[str, float]] = {"outlier_spreads": 6, "outlier_episodes": 20}

    def __init__(self, trace: Trace, thresholds: Mapping[str, float]):
        self._trace, self._thresholds = trace, thresholds
        self._environments = environments_of(trace)
        self._usual: dict[tuple[int, Path], tuple[Array, Array]] = {}  # weights and ranges, see _Numbers
        self._jerk, self._rest = np.zeros((2, 2, len(trace)))  # sums, and how many steps they are of
        self._distances = np.full(len(trace), np.nan)
        self._ends: dict[tuple[object, ...], _Ends] = {}

    def add(self, block: StepRuns) -> None:
        with np.errstate(all="ignore"):  # NaN and infinities are T101 and T102
            actions, observations = self._numbers(block, "actions"), self._numbers(block, "observations")
            moving, offsets = (actions, block.step_offsets) if actions else (observations, block.observation_offsets)
            changes = {path: np.diff(column.rows, axis=0) for path, column in moving.items()}
            self._add_jerk(block, offsets, moving, changes)
            self._add_rest(block, actions, observations, changes)
            self._add_ends(block, observations)

    def _numbers(self, block: StepRuns, root: str) -> dict[Path, _Numbers]:
        """Return the columns of floats of one part of the steps. The first long block shows what is usual in them."""
        found, environment = {}, int(self._environments[block.writer])
        for path, rows in block.columns.items():
            leaf, space = block.reader.about.leaves.get(path, (None, None))
            if path[0] != root or leaf is None or space is None or space["type"] != "Box" or rows.dtype.kind != "f":
                continue
            if rows.shape[1:] != leaf.shape or not 0 < math.prod(leaf.shape) <= _MOST_DIMENSIONS:
                continue
            rows = rows.reshape(len(rows), -1)
            if (environment, path) not in self._usual and len(rows) > _MIN_PAIRS:
                mean = np.abs(np.diff(rows, axis=0)).mean(axis=0, dtype=np.float64)
                varies = np.isfinite(mean) & (mean > 0)
                weights = np.divide(1, mean, out=np.zeros_like(mean), where=varies) / max(1, np.count_nonzero(varies))
                self._usual[environment, path] = weights.astype(rows.dtype), rows.std(axis=0, dtype=np.float64)
            weights, ranges = self._usual.get((environment, path), (rows[:0], rows[:0]))
            if weights.shape == rows.shape[1:] and weights.any():
                found[path] = _Numbers(rows, weights, ranges)
        return found

    def _add_jerk(
        self, block: StepRuns, offsets: Array, moving: dict[Path, _Numbers], changes: dict[Path, Array]
    ) -> None:
        """Add up the third differences of the rows of each run. changes: the first differences."""
        begins, lengths = offsets[:-1], np.diff(offsets)
        runs = np.flatnonzero(lengths > 3)
        if not moving or not len(runs):
            return
        jerk = np.zeros(int(offsets[-1]) + 1)
        for path, column in moving.items():
            third = changes[path][2:] + changes[path][:-2]
            third -= 2 * changes[path][1:-1]
            jerk[3:-1] += np.abs(third, out=third) @ column.weights
        for i in range(3):  # differences to rows of the run before
            jerk[np.minimum(begins + i, len(jerk) - 1)] = 0
        bounds = np.stack([begins[runs], offsets[1:][runs]], axis=1)
        self._jerk[0, block.episode[runs]] += np.add.reduceat(jerk, bounds.reshape(-1))[::2] / len(moving)
        self._jerk[1, block.episode[runs]] += lengths[runs] - 3

    def _add_rest(
        self,
        block: StepRuns,
        actions: dict[Path, _Numbers],
        observations: dict[Path, _Numbers],
        changes: dict[Path, Array],
    ) -> None:
        """Count the steps whose action and observation are nearly those of the step before."""
        others = [rows for path, rows in block.columns.items() if path[0] == "actions" and path not in actions]
        runs = np.flatnonzero(block.lengths > 1)
        if not (actions or observations) or any(rows.dtype == object for rows in others) or not len(runs):
            return
        is_still = np.ones(block.size, np.bool_)
        is_still[block.step_offsets[:-1][block.lengths > 0]] = False
        for path, column in actions.items():
            is_still[1:] &= np.abs(changes[path]) @ column.weights < _AT_REST
        for rows in others:
            is_still[1:] &= (rows[1:] == rows[:-1]).reshape(block.size - 1, -1).all(axis=1)
        steps = np.flatnonzero(is_still)
        after = block.rows_after[steps]
        is_known = after < block.observation_offsets[1:][block.run_of_step[steps]]
        steps, after = steps[is_known], after[is_known]
        for path, column in observations.items():
            change = changes[path][after - 1] if path in changes else column.rows[after] - column.rows[after - 1]
            still = np.abs(change, out=change) @ column.weights < _AT_REST
            steps, after = steps[still], after[still]
        self._rest[0, block.episode] += np.bincount(block.run_of_step[steps], minlength=len(block))
        self._rest[1, block.episode[runs]] += block.lengths[runs] - 1

    def _add_ends(self, block: StepRuns, observations: dict[Path, _Numbers]) -> None:
        """Add the final observations of the episodes that end in this block."""
        ends = block.closes & block.final_known & (np.diff(block.observation_offsets) > 0)
        for terminated in (False, True):
            runs = np.flatnonzero(ends & (block.terminated == terminated))
            if not observations or not len(runs):
                continue
            last, columns = block.observation_offsets[1:][runs] - 1, observations.values()
            key = int(self._environments[block.writer]), terminated, *observations
            if key not in self._ends:
                self._ends[key] = _Ends(np.concatenate([column.ranges for column in columns]), self._distances)
            finals = np.concatenate([column.rows[last] for column in columns], axis=1, dtype=np.float64)
            self._ends[key].add(block.episode[runs], finals)

    def findings(self) -> Iterator[Sighting]:
        trace, table = self._trace, index_of(self._trace)
        with np.errstate(all="ignore"):
            for ends in self._ends.values():
                ends.measure()
        outcome, writer = table[OUTCOME_CODE], table["writer"]
        filtered = np.array([reader.about_or_empty.filters_frames for reader in index_of(trace).readers], np.bool_)
        whole = (
            (table["first_step"] == 0) & np.isin(outcome, (Outcome.TERMINATED, Outcome.TRUNCATED)) & ~filtered[writer]
        )
        groups = len(Outcome) * self._environments[writer] + outcome
        values = {
            _LENGTH: table["steps"].astype(np.float64),
            _JERK: _means(*self._jerk),
            _REST: _means(*self._rest),
            _END: self._distances,
        }
        for kind, measured in values.items():
            found: list[tuple[int, str]] = []
            for group in np.unique(groups[whole]):
                episodes = np.flatnonzero(whole & (groups == group) & np.isfinite(measured))
                found += self._outliers(kind, episodes, measured[episodes])
            if found:
                named = ", ".join(text for _, text in found[:_MOST_NAMED]) + ", …" * (len(found) > _MOST_NAMED)
                shown = ",".join(str(index_of(trace).whole_indices[episode]) for episode, _ in found[:_MOST_LISTED])
                about = len(found), "episode", min(found)[0]
                yield Sighting(kind, f"{kind.what}: {named}", *about, shown_by=("ls", "--episodes", shown))

    def _outliers(self, kind: Kind, episodes: Array, values: Array) -> Iterator[tuple[int, str]]:
        """Yield the outliers of a group of episodes, the farthest first, and how far they are.

        They are few, and no other episode is farther than half of their distance, as in the tail of a distribution.
        """
        if len(episodes) < max(2, self._thresholds["outlier_episodes"]):
            return
        distance = _distances(kind, values)
        order = np.argsort(-distance, kind="stable")[: max(1, int(_MOST_SHARE * len(episodes))) + 1]
        far = distance[order]
        gaps = np.flatnonzero((far[:-1] >= self._thresholds["outlier_spreads"]) & (far[1:] <= far[:-1] / 2))
        for i, spreads in zip(order[: gaps.max(initial=-1) + 1].tolist(), far.tolist()):
            value, median = (_FORMS[kind].format(number) for number in (values[i], np.median(values)))
            yield (
                int(episodes[i]),
                f"{index_of(self._trace).whole_indices[episodes[i]]} ({value}, {spreads:.0f} spreads from {median})",
            )


def _means(sums: Array, counts: Array) -> Array:
    """Return the mean of each episode; NaN for short ones."""
    means: Array = np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts >= _MIN_STEPS)
    return means


def _distances(kind: Kind, values: Array) -> Array:
    """Return how far values are above their median, in robust standard deviations of those above it.

    Lengths and jerks have long tails, so they are compared by their ratios. Lengths also count below the median, by
    their differences.
    """
    median = np.median(values)
    above, least = values - median, _LEAST_SPREADS.get(kind, 0)
    if not least and median > 0:
        above, least = np.log(np.maximum(values, 1e-9 * median) / median), _LEAST_RATIO
    with np.errstate(all="ignore"):
        distances: Array = above / max(_DEVIATIONS * np.median(above[above >= 0]), least)
    if kind is _LENGTH:
        below = median - values
        spread = max(_DEVIATIONS * np.median(below[below >= 0]), _LEAST_RATIO * median)
        distances = np.where(below > 0, below / spread, distances)
    return distances
