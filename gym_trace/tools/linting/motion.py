"""Find observations and actions that freeze, repeat, never change, or stay at a bound."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from gym_trace.data.layout import Leaf, Path, PlainSpace
from gym_trace.data.values import Array
from gym_trace.playback.scan import StepRuns
from gym_trace.playback.trace import Trace
from gym_trace.tools.linting.findings import ERROR, NOTE, WARNING, Kind, Sighting, column_name
from gym_trace.tools.linting.values import Limits

_FROZEN = Kind("T201", WARNING, "observations that stop changing")
_COPIES = Kind("T202", ERROR, "observations that never change within an episode")
_REPEATED = Kind("T203", WARNING, "images that repeat")
_CONSTANT = Kind("T204", WARNING, "observations that are the same in the whole trace")
_CONSTANT_PART = Kind("T205", NOTE, "numbers of an observation that are the same in the whole trace")
_FROZEN_ACTIONS = Kind("T211", WARNING, "continuous actions that stop changing")
_CLIPPED = Kind("T212", WARNING, "continuous actions that are often at a bound")
_CONSTANT_ACTIONS = Kind("T213", WARNING, "actions that are the same in the whole trace")

_MOST_DIMENSIONS = 64  # larger rows are not checked number by number
_IMAGE = 1024  # min elements of an image, which has two axes or more
_FREQUENT = 0.9  # a number that changes in at least this share of steps can freeze
_MIN_PAIRS = 20  # fewer do not show how often a number changes


class _Open(NamedTuple):
    """Open episodes: k episodes of a writer that continue in a later block.

    Attributes:
        row: (k,) rows of the episodes in reader.parts, ascending.
        bits: (k, width) last row of each, see _bits().
        run: (k, dimensions) lengths of the runs of equal rows that end with the last row.
    """

    row: Array
    bits: Array
    run: Array


class _Motion:
    """Changes of the rows of one leaf from step to step.

    Short rows of floats are compared number by number (dimensions), other rows as a whole.
    """

    def __init__(self, leaf: Leaf, limits: Limits | None, longest: int):
        self.leaf = leaf
        self.is_image = len(leaf.shape) >= 2 and math.prod(leaf.shape) >= _IMAGE
        is_float = leaf.dtype is not None and leaf.dtype.kind == "f" and leaf.dtype.itemsize <= 8
        self.is_whole = not is_float or math.prod(leaf.shape) > _MOST_DIMENSIONS
        self.dimensions = 1 if self.is_whole else math.prod(leaf.shape)
        self._limits = limits
        self._longest = longest
        self.rows = self.pairs = 0  # pairs: rows that have a row before them in their episode
        self.changes = np.zeros(self.dimensions, np.int64)
        self.frozen = np.zeros(self.dimensions, np.int64)  # pairs in freezes: runs of `longest` equal rows or more
        self.freezes = np.zeros(self.dimensions, np.int64)
        self.first_freezes: list[tuple[int, int] | None] = [None] * self.dimensions  # positions: episode and step
        self.first_repeat: tuple[int, int] | None = None
        self.first_position: tuple[int, int] | None = None
        self.first_bits: Array | None = None
        self.varies = np.zeros(self.dimensions, bool)
        self.at_bounds = np.zeros(self.dimensions, np.int64)
        self.first_at_bound: tuple[int, int] | None = None
        self._open: dict[int, _Open] = {}  # by writer

    def add(self, block: StepRuns, path: Path, rows: Array) -> None:
        bits = _bits(rows, self.is_whole)
        bounds = block.offsets(path)
        self.rows += len(rows)
        if self.first_bits is None:
            self.first_bits, self.first_position = bits[0].copy(), block.place(path, 0)
        if not self.varies.all():
            self.varies |= self._per_dimension(bits != self.first_bits).any(axis=0)
        runs = np.flatnonzero(np.diff(bounds) > 0)
        begins, ends = bounds[:-1][runs], bounds[1:][runs]
        changed = np.empty((len(rows), self.dimensions), bool)
        changed[1:] = self._per_dimension(bits[1:] != bits[:-1])
        changed[begins] = True
        continued = self._compare_with_open(block, runs, begins, bits, changed)
        columns = changed.T.copy()
        first_rows = len(begins) - int(
            np.count_nonzero(continued >= 0)
        )  # first rows of episodes count as changed, but are not pairs
        self.changes += np.array([np.count_nonzero(column) for column in columns]) - first_rows
        self.pairs += len(rows) - first_rows
        self._find_freezes(block, path, rows, bits, columns, begins, ends, runs, continued)

    def _per_dimension(self, different: Array) -> Array:
        if not self.is_whole:
            return different
        whole: Array = np.any(different, axis=1)[:, None]
        return whole

    def _compare_with_open(self, block: StepRuns, runs: Array, begins: Array, bits: Array, changed: Array) -> Array:
        """Compare the first rows of runs with the last rows of open episodes, and update `changed`.

        Returns (runs,) int64, the index of each run's episode in the open ones; -1 if it begins here.
        """
        open_ = self._open.get(block.writer)
        continued = np.full(len(runs), -1)
        if open_ is None or not len(open_.row):
            return continued
        indices = np.minimum(np.searchsorted(open_.row, block.row[runs]), len(open_.row) - 1)
        continues = ~block.has_initial[runs] & (open_.row[indices] == block.row[runs])
        continued[continues] = indices[continues]
        changed[begins[continues]] = self._per_dimension(bits[begins[continues]] != open_.bits[indices[continues]])
        return continued

    def _find_freezes(
        self,
        block: StepRuns,
        path: Path,
        rows: Array,
        bits: Array,
        changed: Array,  # (dimensions, rows), modified here
        begins: Array,
        ends: Array,
        runs: Array,
        continued: Array,
    ) -> None:
        """Count runs of equal rows that are long enough to be freezes, also across blocks.

        All dimensions are treated at once: a position below is dimension * len(rows) + row.
        """
        count = len(rows)
        open_ = self._open.get(block.writer)
        continues = continued >= 0
        earlier = np.zeros((len(runs), self.dimensions), np.int64)  # rows of earlier blocks that equal the first row
        if open_ is not None and continues.any():
            is_same = ~changed.T[begins[continues]]
            earlier[continues] = np.where(is_same, open_.run[continued[continues]], 0)
        if self.first_repeat is None and self.is_image:
            repeated = np.flatnonzero(~changed[0])[:1]
            self.first_repeat = block.place(path, int(repeated[0])) if len(repeated) else None
        changed[:, begins] = True
        starts = np.flatnonzero(changed.reshape(-1))  # positions where equal rows begin
        lengths = np.diff(np.append(starts, count * self.dimensions))
        offsets = np.arange(self.dimensions)[:, None] * count
        total = lengths.copy()
        total[np.searchsorted(starts, (offsets + begins).reshape(-1))] += earlier.T.reshape(-1)
        long = np.flatnonzero(total >= self._longest)
        long = long[~self._are_at_bound(rows, *np.divmod(starts[long], count))] if len(long) else long
        is_new = total[long] - lengths[long] < self._longest  # otherwise it was counted in an earlier block
        dimension = starts[long] // count
        np.add.at(self.frozen, dimension, np.where(is_new, total[long] - 1, lengths[long]))
        np.add.at(self.freezes, dimension, is_new)
        for i in long[is_new][np.unique(dimension[is_new], return_index=True)[1]].tolist():
            number, row = divmod(int(starts[i]), count)
            if self.first_freezes[number] is None:
                episode, step = block.place(path, row)
                self.first_freezes[number] = episode, step - int(total[i] - lengths[i])
        last = total[np.searchsorted(starts, (offsets + ends).reshape(-1)) - 1].reshape(self.dimensions, -1).T
        stays_open = np.flatnonzero(~block.closes[runs])
        self._update_open(block, block.row[runs[stays_open]], bits[ends[stays_open] - 1], last[stays_open])

    def _update_open(self, block: StepRuns, row: Array, bits: Array, run: Array) -> None:
        """Replace the episodes of this block among the open ones. row, bits, run: see _Open."""
        open_ = self._open.get(block.writer)
        if open_ is not None and len(open_.row):
            others = ~np.isin(open_.row, block.row)
            row = np.concatenate([open_.row[others], row])
            bits = np.concatenate([open_.bits[others], bits])
            run = np.concatenate([open_.run[others], run])
        order = np.argsort(row)
        self._open[block.writer] = _Open(row[order], bits[order], run[order])

    def _are_at_bound(self, rows: Array, dimensions: Array, indices: Array) -> Array:
        """Return True for numbers at a bound of their space, where they may stay. indices: their rows."""
        if self.is_whole or self._limits is None:
            return np.zeros(len(indices), bool)
        values = rows.reshape(len(rows), -1)[indices, dimensions]
        low, high = (limit.reshape(-1)[dimensions] for limit in self._limits)
        are_at_bound: Array = (values == low) | (values == high)
        return are_at_bound

    def count_bounds(self, block: StepRuns, path: Path, rows: Array) -> None:
        """Count the numbers that are exactly at a finite bound."""
        if self._limits is None or self.is_whole:
            return
        flat = rows.reshape(len(rows), -1)
        at = (flat == self._limits.low.reshape(-1)) | (flat == self._limits.high.reshape(-1))
        self.at_bounds = self.at_bounds + np.count_nonzero(at, axis=0)
        if self.first_at_bound is None and at.any():
            self.first_at_bound = block.place(path, int(np.flatnonzero(at.any(axis=1))[0]))

    # -- results ------------------------------------------------------------------------------------------------------

    def frozen_dimensions(self) -> Array:
        """Return the dimensions that froze, but change in nearly all other steps."""
        pairs = self.pairs - self.frozen
        return np.flatnonzero((self.freezes > 0) & (pairs >= _MIN_PAIRS) & (self.changes >= _FREQUENT * pairs))

    @property
    def never_changes(self) -> bool:
        """Return True if rows differ between episodes, but never within one."""
        return self.pairs >= _MIN_PAIRS and not self.changes.any() and bool(self.varies.any())

    def repeated(self) -> int:
        """Return the number of rows that equal the row before, apart from frozen ones."""
        return int(self.pairs - self.changes[0] - self.frozen[0])

    def sighting_of_freezes(self, kind: Kind, path: Path) -> Sighting:
        dimensions = self.frozen_dimensions()
        positions = [self.first_freezes[i] for i in dimensions.tolist()]
        episode, step = min(position for position in positions if position is not None)
        column = column_name(path, None if len(dimensions) == self.dimensions else dimensions, self.leaf.shape)
        message = f"no change in {self._longest} steps or more, after changes in nearly every step"
        return Sighting(kind, message, int(self.freezes[dimensions].max()), "time", episode, step, column)


def _bits(rows: Array, is_whole: bool) -> Array:
    """Return rows as integers, (rows, width), to compare all bits; wide rows become one integer each."""
    flat = np.ascontiguousarray(rows).reshape(len(rows), -1)
    size = flat.shape[1] * flat.itemsize
    item = flat.itemsize if not is_whole else next(width for width in (8, 4, 2, 1) if size % width == 0)
    return flat.view(f"u{item}") if item in (1, 2, 4, 8) else flat.view(np.uint8)


class _MotionRule:
    """Measures the motion of each leaf of one column."""

    root = ""
    kinds_of_space: tuple[str, ...] = ("Box",)

    def __init__(self, trace: Trace, thresholds: Mapping[str, float]):
        self._thresholds = thresholds
        self.longest = max(2, int(thresholds["frozen_steps"]))
        self.motions: dict[tuple[Path, object, tuple[int, ...]], _Motion] = {}
        self.has_others = False  # True if there are leaves of other kinds of spaces

    def add(self, block: StepRuns) -> None:
        for path, rows in block.columns.items():
            leaf, space = block.reader.about.leaves.get(path, (None, None))
            if path[0] != self.root or leaf is None or space is None:
                continue
            if space["type"] not in self.kinds_of_space:
                self.has_others = True
                continue
            if (rows.dtype, rows.shape[1:]) != (leaf.dtype, leaf.shape) or not rows.size:
                continue
            key = path, leaf.dtype, leaf.shape
            if key not in self.motions:
                self.motions[key] = _Motion(leaf, Limits.of(leaf, space), self.longest)
            self.motions[key].add(block, path, rows)
            self.measure(self.motions[key], space, block, path, rows)

    def measure(self, motion: _Motion, space: PlainSpace, block: StepRuns, path: Path, rows: Array) -> None:
        """Update the motion of a leaf further; called with the rows of each block."""


class ObservationMotionRule(_MotionRule):
    """Looks for Box observations that freeze, repeat or never change. Discrete ones often stay the same."""

    root = "observations"
    kinds: ClassVar[Sequence[Kind]] = (_FROZEN, _COPIES, _REPEATED, _CONSTANT, _CONSTANT_PART)
    columns: ClassVar[Collection[str]] = frozenset(("observations",))
    thresholds: ClassVar[Mapping[str, float]] = {"frozen_steps": 25, "repeated_images": 0.4, "constant_steps": 100}

    def findings(self) -> Iterator[Sighting]:
        motions = self.motions.values()
        are_copies = not self.has_others and all(one.never_changes or not one.varies.any() for one in motions)
        for (path, *_), motion in self.motions.items():
            column = column_name(path)
            if motion.never_changes and are_copies:
                message = f"{_COPIES.what}, but differ between episodes: a buffer that was stored as a reference?"
                yield Sighting(_COPIES, message, motion.pairs, "step", *motion.first_position or (0, -1), column)
            if len(motion.frozen_dimensions()):
                yield motion.sighting_of_freezes(_FROZEN, path)
            share = motion.repeated() / motion.pairs if motion.pairs >= _MIN_PAIRS else 0.0
            if motion.is_image and motion.changes.any() and share >= self._thresholds["repeated_images"]:
                message = f"{share:.0%} of the images equal the one before"
                position = motion.first_repeat or (0, 0)
                yield Sighting(_REPEATED, message, motion.repeated(), "step", *position, column)
            yield from self._constant(path, motion)

    def _constant(self, path: Path, motion: _Motion) -> Iterator[Sighting]:
        position = motion.first_position
        if motion.rows < self._thresholds["constant_steps"] or motion.varies.all() or position is None:
            return
        is_float = motion.leaf.dtype is not None and motion.leaf.dtype.kind == "f"
        if not motion.varies.any():
            kind = _CONSTANT if is_float or motion.is_image else _CONSTANT_PART
            yield Sighting(kind, _CONSTANT.what, motion.rows, "step", *position, column_name(path))
        else:
            column = column_name(path, np.flatnonzero(~motion.varies), motion.leaf.shape)
            yield Sighting(_CONSTANT_PART, _CONSTANT_PART.what, motion.rows, "step", *position, column)


class ActionMotionRule(_MotionRule):
    """Looks for continuous actions that freeze or stay at a bound, and for actions that are always the same."""

    root = "actions"
    kinds_of_space = ("Box", "Discrete", "MultiDiscrete", "MultiBinary")
    kinds: ClassVar[Sequence[Kind]] = (_FROZEN_ACTIONS, _CLIPPED, _CONSTANT_ACTIONS)
    columns: ClassVar[Collection[str]] = frozenset(("actions",))
    thresholds: ClassVar[Mapping[str, float]] = {"frozen_actions": 25, "clipped_actions": 0.25, "constant_actions": 100}

    def __init__(self, trace: Trace, thresholds: Mapping[str, float]):
        super().__init__(trace, {**thresholds, "frozen_steps": thresholds["frozen_actions"]})

    def measure(self, motion: _Motion, space: PlainSpace, block: StepRuns, path: Path, rows: Array) -> None:
        if space["type"] == "Box" and rows.dtype.kind == "f":
            motion.count_bounds(block, path, rows)

    def findings(self) -> Iterator[Sighting]:
        for (path, *_), motion in self.motions.items():
            is_float = motion.leaf.dtype is not None and motion.leaf.dtype.kind == "f"
            if is_float and len(motion.frozen_dimensions()):
                yield motion.sighting_of_freezes(_FROZEN_ACTIONS, path)
            share = motion.at_bounds / max(1, motion.rows)
            # Numbers that are always at a bound have two values by design, like a gripper.
            clipped = np.flatnonzero((share >= self._thresholds["clipped_actions"]) & (share < 1))
            if len(clipped) and motion.rows >= _MIN_PAIRS and motion.first_at_bound is not None:
                message = f"up to {share[clipped].max():.0%} of the actions are exactly at a bound: clipped?"
                dimensions = None if len(clipped) == motion.dimensions else clipped
                column = column_name(path, dimensions, motion.leaf.shape)
                count = int(motion.at_bounds[clipped].max())
                yield Sighting(_CLIPPED, message, count, "step", *motion.first_at_bound, column)
            position = motion.first_position
            if motion.rows >= self._thresholds["constant_actions"] and not motion.varies.any() and position:
                what = _CONSTANT_ACTIONS.what
                yield Sighting(_CONSTANT_ACTIONS, what, motion.rows, "step", *position, column_name(path))
