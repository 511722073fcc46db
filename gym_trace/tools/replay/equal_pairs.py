"""Find pairs of equal episodes: columns of many episodes are compared at once."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from gym_trace.data.layout import Layout, Leaf
from gym_trace.data.packing import pack_lenient
from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace
from gym_trace.playback.episode_index import EpisodeIndex
from gym_trace.playback.scan import Scan, StepRuns

_IN_TABLE = ("first_step", "outcome", "seed")
_IN_STARTS = {"options": "options", "infos": "reset_info", "seed": "seed"}  # large seeds
_COLUMNS = ("observations", "actions", "rewards", "terminations", "truncations", "infos", "annotations")


def equal_pairs(
    a: EpisodeIndex, b: EpisodeIndex, left: Array, right: Array, compared: Collection[str]
) -> Iterator[Array]:
    """Yield a mask for each stretch of consecutive pairs: True if all compared values are equal bit for bit.

    False: the episodes differ, or one could not be read, or must be looked at closely. Memory does not grow with the
    traces.

    Args:
        left, right: indices of the pairs in a and b.
        compared: see diff_traces().
    """
    facts = ["steps", "has_final_observation", *(name for name in _IN_TABLE if name in compared)]
    equal = np.all([a[name][left] == b[name][right] for name in facts], axis=0)
    columns, done = [name for name in _COLUMNS if name in compared], 0
    try:
        equal &= len(_structures(a) | _structures(b)) <= 1
        candidates = np.flatnonzero(equal)
        x, y = (_Runs(Scan(index, columns, of[candidates], order="episode")) for index, of in ((a, left), (b, right)))
        for begin, end, runs_equal in _same_runs(x, y, len(candidates)):
            mine = candidates[begin:end]
            equal[mine] &= runs_equal & _same_starts(a, b, left[mine], right[mine], compared)
            until = int(mine[-1]) + 1
            yield equal[done:until]
            done = until
    except CorruptTrace:  # raised again for the pair that cannot be read
        equal[done:] = False
    yield equal[done:]


def same(a: Any, b: Any) -> bool:
    """Return True if two columns or values are equal bit for bit, including dtypes and shapes."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype != object and b.dtype != object:
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and all(map(same, a.tolist(), b.tolist()))
    return bool(pack_lenient(a)[0] == pack_lenient(b)[0])


class _Runs:
    """The runs of a Scan in the order of episodes, one after another."""

    def __init__(self, blocks: Scan):
        self._blocks = iter(blocks)
        self._count = 0  # episodes in the blocks before
        self.block: StepRuns | None = None
        self.at = 0  # number of the next run in the block
        self.next_block()

    def next_block(self) -> None:
        self.block, self.at = next(self._blocks, None), 0
        if self.block is not None:
            self.episode = self._count + np.cumsum(self.block.opens) - 1  # number of the episode of each run
            self._count = int(self.episode[-1]) + 1

    @property
    def left(self) -> int:
        return 0 if self.block is None else len(self.block) - self.at

    def advance(self, at: int) -> None:
        self.at = at
        if not self.left:
            self.next_block()


def _same_runs(x: _Runs, y: _Runs, count: int) -> Iterator[tuple[int, int, Array]]:
    """Yield (begin, end, mask) for consecutive pairs of episodes: True if their runs of steps are equal."""
    equal, done = np.ones(count, np.bool_), 0
    while x.block is not None and y.block is not None:
        most = min(x.left, y.left)
        mine, other = slice(x.at, x.at + most), slice(y.at, y.at + most)
        alike = x.episode[mine] == y.episode[other]
        alike &= x.block.starts_at[mine] == y.block.starts_at[other]
        alike &= x.block.lengths[mine] == y.block.lengths[other]
        runs = most if alike.all() else int(alike.argmin())
        if runs:
            differ = _differing(x.block, x.at, y.block, y.at, runs)
            equal[x.episode[mine][:runs][differ]] = False
            x.advance(x.at + runs)
            y.advance(y.at + runs)
        else:  # long episodes are divided in another way
            episode = min(int(x.episode[x.at]), int(y.episode[y.at]))
            equal[episode] = False
            for it in (x, y):
                it.advance(max(it.at, int(np.searchsorted(it.episode, episode, side="right"))))
        complete = min(count if it.block is None else int(it.episode[it.at]) for it in (x, y))
        if complete > done:
            yield done, complete, equal[done:complete]
            done = complete
    if done < count:
        yield done, count, np.zeros(count - done, np.bool_)


def _differing(x: StepRuns, i: int, y: StepRuns, j: int, count: int) -> Array:
    """Return a mask over some runs, from i on in one block and from j on in the other: True if the rows differ."""
    if x.columns.keys() != y.columns.keys():
        return np.ones(count, np.bool_)
    differ = np.zeros(count, np.bool_)
    for path in x.columns:
        bounds, others = (block.offsets(path)[at : at + count + 1] for block, at in ((x, i), (y, j)))
        mine, other = x.columns[path][bounds[0] : bounds[-1]], y.columns[path][others[0] : others[-1]]
        bounds = bounds - bounds[0]
        if mine.dtype != other.dtype or mine.shape != other.shape:
            return np.ones(count, np.bool_)
        if mine.dtype == object:
            ends = bounds.tolist()
            differ |= [not same(mine[begin:end], other[begin:end]) for begin, end in pairwise(ends)]
        elif mine.tobytes() != other.tobytes():
            rows = (mine.reshape(len(mine), -1).view(np.uint8) != other.reshape(len(mine), -1).view(np.uint8)).any(
                axis=1
            )
            differ[np.searchsorted(bounds, np.flatnonzero(rows), side="right") - 1] = True
    return differ


def _same_starts(a: EpisodeIndex, b: EpisodeIndex, left: Array, right: Array, compared: Collection[str]) -> Array:
    """Return True for each pair whose reset records are the same, as far as they are compared."""
    names = [stored for name, stored in _IN_STARTS.items() if name in compared]
    equal = np.ones(len(left), np.bool_)
    if not names:
        return equal
    stored = zip(a.packed_starts_of(left), b.packed_starts_of(right))
    unlike = [i for i, (mine, other) in enumerate(stored) if mine != other]
    starts = zip(a.starts_of(left[unlike]), b.starts_of(right[unlike]))
    equal[unlike] = [all(same(mine.get(name), other.get(name)) for name in names) for mine, other in starts]
    return equal


def _structures(index: EpisodeIndex) -> set[Hashable]:
    """Return the structures of the values in a trace. Raises CorruptTrace."""
    readers = (index.readers[number] for number in np.unique(index["writer"]).tolist())
    return {
        (_structure(it.observations), _structure(it.actions), it.infos) for it in (reader.layouts for reader in readers)
    }


def _structure(layout: Layout) -> Hashable:
    if isinstance(layout, Leaf):
        return layout.dtype, layout.shape
    return layout.keys is None, frozenset((key, _structure(child)) for key, child in layout.parts())
