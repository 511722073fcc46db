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
_IMAGE = 1024  # elements of a row with at least two axes that make it an image
_LIVELY = 0.9  # a number that changes in at least this share of steps can freeze
_FEW = 20  # min steps to tell how often a number changes


class _Carried(NamedTuple):
    """Episodes that continue in a later block: part (k,), the last row and the lengths of the last runs of each."""

    part: Array
    bits: Array  # (k, width)
    run: Array  # (k, dimensions)


class _Motion:
    """Changes of the rows of one leaf from step to step.

    Each number of a short row of floats is followed by itself, other rows as a whole.
    """

    def __init__(self, leaf: Leaf, limits: Limits | None, longest: int):
        self.leaf = leaf
        self.is_image = len(leaf.shape) >= 2 and math.prod(leaf.shape) >= _IMAGE
        is_float = leaf.dtype is not None and leaf.dtype.kind == "f" and leaf.dtype.itemsize <= 8
        self.is_whole = not is_float or math.prod(leaf.shape) > _MOST_DIMENSIONS
        self.dimensions = 1 if self.is_whole else math.prod(leaf.shape)
        self._limits = limits
        self._longest = longest
        self.rows = self.pairs = 0  # pairs: of a row and the one before it
        self.changes = np.zeros(self.dimensions, np.int64)
        self.frozen = np.zeros(self.dimensions, np.int64)  # pairs in runs of `longest` equal rows or more
        self.freezes = np.zeros(self.dimensions, np.int64)
        self.begin: list[tuple[int, int] | None] = [None] * self.dimensions
        self.repeat: tuple[int, int] | None = None
        self.first: Array | None = None  # row
        self.varies = np.zeros(self.dimensions, bool)
        self.place: tuple[int, int] | None = None
        self.at_bounds = np.zeros(self.dimensions, np.int64)
        self.bound_place: tuple[int, int] | None = None
        self._carried: dict[int, _Carried] = {}  # by writer

    def add(self, block: StepRuns, path: Path, rows: Array) -> None:
        bits = _bits(rows, self.is_whole)
        bounds = block.offsets(path)
        self.rows += len(rows)
        if self.first is None:
            self.first, self.place = bits[0].copy(), block.place(path, 0)
        if not self.varies.all():
            self.varies |= self._per_dimension(bits != self.first).any(axis=0)
        begins = bounds[:-1][np.diff(bounds) > 0]
        ends = bounds[1:][np.diff(bounds) > 0]
        runs = np.flatnonzero(np.diff(bounds) > 0)
        changed = np.empty((len(rows), self.dimensions), bool)
        changed[1:] = self._per_dimension(bits[1:] != bits[:-1])
        changed[begins] = True
        before = self._before(block, runs, begins, bits, changed)
        columns = changed.T.copy()
        self.changes += [np.count_nonzero(column) for column in columns]
        self.changes += np.count_nonzero(before >= 0) - len(begins)
        self.pairs += len(rows) - len(begins) + int(np.count_nonzero(before >= 0))
        self._follow(block, path, rows, bits, columns, begins, ends, runs, before)

    def _per_dimension(self, different: Array) -> Array:
        if not self.is_whole:
            return different
        whole: Array = np.any(different, axis=1)[:, None]
        return whole

    def _before(self, block: StepRuns, runs: Array, begins: Array, bits: Array, changed: Array) -> Array:
        """Compare first rows with the last rows of earlier blocks; return the index of each in the carried episodes."""
        carried = self._carried.get(block.writer)
        before = np.full(len(runs), -1)
        if carried is None or not len(carried.part):
            return before
        goes_on = ~block.has_initial[runs]
        places = np.minimum(np.searchsorted(carried.part, block.row[runs]), len(carried.part) - 1)
        goes_on &= carried.part[places] == block.row[runs]
        before[goes_on] = places[goes_on]
        changed[begins[goes_on]] = self._per_dimension(bits[begins[goes_on]] != carried.bits[places[goes_on]])
        return before

    def _follow(
        self,
        block: StepRuns,
        path: Path,
        rows: Array,
        bits: Array,
        changed: Array,  # (dimensions, rows), modified here
        begins: Array,
        ends: Array,
        runs: Array,
        before: Array,
    ) -> None:
        """Find runs of equal rows, also across blocks."""
        count = len(rows)
        carried = self._carried.get(block.writer)
        goes_on = before >= 0
        earlier = np.zeros((len(runs), self.dimensions), np.int64)  # rows before the block that equal its first
        if carried is not None and goes_on.any():
            same = ~changed.T[begins[goes_on]]
            earlier[goes_on] = np.where(same, carried.run[before[goes_on]], 0)
        if self.repeat is None and self.is_image:
            repeated = np.flatnonzero(~changed[0])[:1]
            self.repeat = block.place(path, int(repeated[0])) if len(repeated) else None
        changed[:, begins] = True
        places = np.flatnonzero(changed.reshape(-1))
        lengths = np.diff(np.append(places, count * self.dimensions))
        offsets = np.arange(self.dimensions)[:, None] * count
        heads = np.searchsorted(places, (offsets + begins).reshape(-1))
        total = lengths.copy()
        total[heads] += earlier.T.reshape(-1)
        long = np.flatnonzero(total >= self._longest)
        long = long[~self._are_at_bound(rows, *np.divmod(places[long], count))] if len(long) else long
        is_new = total[long] - lengths[long] < self._longest  # otherwise it was counted in an earlier block
        dimension = places[long] // count
        np.add.at(self.frozen, dimension, np.where(is_new, total[long] - 1, lengths[long]))
        np.add.at(self.freezes, dimension, is_new)
        for i in long[is_new][np.unique(dimension[is_new], return_index=True)[1]].tolist():
            number, row = divmod(int(places[i]), count)
            if self.begin[number] is None:
                episode, step = block.place(path, row)
                self.begin[number] = episode, step - int(total[i] - lengths[i])
        tails = np.searchsorted(places, (offsets + ends).reshape(-1)) - 1
        open_ = np.flatnonzero(~block.closes[runs])
        last = total[tails].reshape(self.dimensions, -1).T[open_]
        self._carry(block, block.row[runs[open_]], bits[ends[open_] - 1], last)

    def _carry(self, block: StepRuns, part: Array, bits: Array, run: Array) -> None:
        """Keep the last rows of episodes that continue; drop the rows of episodes that end here."""
        carried = self._carried.get(block.writer)
        if carried is not None and len(carried.part):
            rest = ~np.isin(carried.part, block.row)
            part = np.concatenate([carried.part[rest], part])
            bits = np.concatenate([carried.bits[rest], bits])
            run = np.concatenate([carried.run[rest], run])
        order = np.argsort(part)
        self._carried[block.writer] = _Carried(part[order], bits[order], run[order])

    def _are_at_bound(self, rows: Array, dimensions: Array, places: Array) -> Array:
        """Return True for numbers at a bound of their space, where they may stay."""
        if self.is_whole or self._limits is None:
            return np.zeros(len(places), bool)
        values = rows.reshape(len(rows), -1)[places, dimensions]
        low, high = (limit.reshape(-1)[dimensions] for limit in self._limits)
        at: Array = (values == low) | (values == high)
        return at

    def count_bounds(self, block: StepRuns, path: Path, rows: Array) -> None:
        """Count the numbers that are exactly at a finite bound."""
        if self._limits is None or self.is_whole:
            return
        flat = rows.reshape(len(rows), -1)
        at = (flat == self._limits.low.reshape(-1)) | (flat == self._limits.high.reshape(-1))
        self.at_bounds = self.at_bounds + np.count_nonzero(at, axis=0)
        if self.bound_place is None and at.any():
            self.bound_place = block.place(path, int(np.flatnonzero(at.any(axis=1))[0]))

    # -- what was found -----------------------------------------------------------------------------------------------

    @property
    def lively(self) -> Array:
        """Return True for numbers that change in most steps, apart from those in which they are frozen."""
        pairs = self.pairs - self.frozen
        return (pairs >= _FEW) & (self.changes >= _LIVELY * pairs)

    def frozen_dimensions(self) -> Array:
        """Return the numbers that froze, but change in nearly all other steps."""
        return np.flatnonzero((self.freezes > 0) & self.lively)

    @property
    def never_changes(self) -> bool:
        """Return True if rows differ between episodes alone."""
        return self.pairs >= _FEW and not self.changes.any() and bool(self.varies.any())

    def repeated(self) -> int:
        """Return the number of rows that equal the row before, apart from frozen ones."""
        return int(self.pairs - self.changes[0] - self.frozen[0])

    def sighting_of_freezes(self, kind: Kind, path: Path) -> Sighting:
        dimensions = self.frozen_dimensions()
        episode, step = min(place for place in (self.begin[i] for i in dimensions.tolist()) if place is not None)
        some = None if len(dimensions) == self.dimensions else dimensions
        column = column_name(path, some, self.leaf.shape)
        message = f"no change in {self._longest} steps or more, after changes in nearly every step"
        return Sighting(kind, message, int(self.freezes[dimensions].max()), "time", episode, step, column)


def _bits(rows: Array, is_whole: bool) -> Array:
    """Return rows as integers, (rows, width), to compare all bits; wide rows become one integer each."""
    flat = np.ascontiguousarray(rows).reshape(len(rows), -1)
    size = flat.shape[1] * flat.itemsize
    item = flat.itemsize if not is_whole else next(it for it in (8, 4, 2, 1) if size % it == 0)
    return flat.view(f"u{item}") if item in (1, 2, 4, 8) else flat.view(np.uint8)


class _MotionRule:
    """Follows the leaves of one column."""

    root = ""
    kinds_of_space: tuple[str, ...] = ("Box",)

    def __init__(self, trace: Trace, thresholds: Mapping[str, float]):
        self._thresholds = thresholds
        self.longest = max(2, int(thresholds["frozen_steps"]))
        self.motions: dict[tuple[Path, object, tuple[int, ...]], _Motion] = {}
        self.has_others = False  # leaves of other spaces

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
        """Measure more of these rows."""


class ObservationMotionRule(_MotionRule):
    """Looks for observations that freeze, repeat or never change. Only of Box: discrete ones often stay the same."""

    root = "observations"
    kinds: ClassVar[Sequence[Kind]] = (_FROZEN, _COPIES, _REPEATED, _CONSTANT, _CONSTANT_PART)
    columns: ClassVar[Collection[str]] = frozenset(("observations",))
    thresholds: ClassVar[Mapping[str, float]] = {"frozen_steps": 25, "repeated_images": 0.4, "constant_steps": 100}

    def findings(self) -> Iterator[Sighting]:
        found = self.motions.values()
        copies = not self.has_others and all(it.never_changes or not it.varies.any() for it in found)
        for (path, *_), motion in self.motions.items():
            if motion.never_changes and copies:
                message = f"{_COPIES.what}, but differ between episodes: a buffer that was stored as a reference?"
                yield Sighting(_COPIES, message, motion.pairs, "step", *motion.place or (0, -1), column_name(path))
            if len(motion.frozen_dimensions()):
                yield motion.sighting_of_freezes(_FROZEN, path)
            share = motion.repeated() / motion.pairs if motion.pairs >= _FEW else 0.0
            if motion.is_image and motion.changes.any() and share >= self._thresholds["repeated_images"]:
                message = f"{share:.0%} of the images equal the one before"
                yield Sighting(
                    _REPEATED, message, motion.repeated(), "step", *motion.repeat or (0, 0), column_name(path)
                )
            yield from self._constant(path, motion)

    def _constant(self, path: Path, motion: _Motion) -> Iterator[Sighting]:
        if motion.rows < self._thresholds["constant_steps"] or motion.varies.all() or motion.place is None:
            return
        is_float = motion.leaf.dtype is not None and motion.leaf.dtype.kind == "f"
        if not motion.varies.any():
            kind = _CONSTANT if is_float or motion.is_image else _CONSTANT_PART
            yield Sighting(kind, _CONSTANT.what, motion.rows, "step", *motion.place, column_name(path))
        else:
            same = np.flatnonzero(~motion.varies)
            column = column_name(path, same, motion.leaf.shape)
            yield Sighting(_CONSTANT_PART, _CONSTANT_PART.what, motion.rows, "step", *motion.place, column)


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
            if len(clipped) and motion.rows >= _FEW and motion.bound_place is not None:
                some = None if len(clipped) == motion.dimensions else clipped
                message = f"up to {share[clipped].max():.0%} of the actions are exactly at a bound: clipped?"
                column = column_name(path, some, motion.leaf.shape)
                count = int(motion.at_bounds[clipped].max())
                yield Sighting(_CLIPPED, message, count, "step", *motion.bound_place, column)
            if motion.rows >= self._thresholds["constant_actions"] and not motion.varies.any() and motion.place:
                yield Sighting(
                    _CONSTANT_ACTIONS, _CONSTANT_ACTIONS.what, motion.rows, "step", *motion.place, column_name(path)
                )
