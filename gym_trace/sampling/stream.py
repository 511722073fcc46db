"""Batches of a trace that is larger than the memory that it may take: decoded a part at a time, in shuffled order.

The steps of the trace are cut into blocks of whole chunks, or its episodes into blocks of some. An epoch takes them in
a shuffled order, several at a time: what these hold is drawn in shuffled order, while the next ones are being decoded
in a thread.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from gym_trace.model.values import Array
from gym_trace.reading.recorded import Recorded
from gym_trace.sampling.batches import Batches, Make
from gym_trace.sampling.draw import permuted
from gym_trace.sampling.draws import Batch, Draws, joined
from gym_trace.sampling.rows import OnDamage, Pieces, Plan, Rows, in_memory
from gym_trace.sampling.store import Memory

_AT_ONCE = 2  # shares of the memory: what is drawn from, and what is decoded meanwhile
_BLOCKS = 16  # that are mixed with each other
_LEAST_BLOCKS = 4  # of a trace for each rank and worker
_LEAST_BYTES = 3 << 19  # of a block: more than most chunks, which smaller ones would have decoded again and again


class _Epoch(NamedTuple):
    """Groups of blocks in their order, and of the items of each where they end among all, and how many they are."""

    groups: list[Array]
    ends: Array
    counts: Array


class Stream(Batches):
    """Batches as Batches are, in memory that is bounded.

    Every item comes once an epoch, also with replacement, which only means that there is no end. An order shuffles what
    is in memory at a time, blocks from all over the trace.
    """

    def __init__(
        self,
        trace: Recorded,
        roots: frozenset[str],
        make: Make,
        plan: Plan,
        *,
        batch_size: int,
        seed: int,
        replacement: bool,
        budget: int,
        margins: tuple[int, int] | None,
        on_damage: OnDamage | None = None,
    ):
        """budget: bytes. margins: how many steps before and behind a block items reach over; None: whole episodes."""
        self._budget, self._margins = budget, margins
        self._begin()
        super().__init__(
            trace,
            roots,
            make,
            Memory(),
            plan,
            batch_size=batch_size,
            seed=seed,
            replacement=replacement,
            on_damage=on_damage,
        )

    def _begin(self) -> None:
        self._blocks: list[Pieces] = []
        self._counts = np.zeros(0, np.int64)  # of items in each
        self._at_once = 1  # how many of them are held together
        self._meanwhile = True  # whether there is room for as many again
        self._ordered: tuple[tuple[int, int, int], _Epoch] | None = None
        self._held: dict[tuple[int, int], Future[Draws]] = {}
        self._thread: ThreadPoolExecutor | None = None

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_blocks", "_counts", "_at_once", "_meanwhile", "_ordered", "_held", "_thread")
        return {key: value for key, value in super().__getstate__().items() if key not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def share(self, rank: int, world_size: int) -> None:
        super().share(rank, world_size)
        self._begin()  # more ranks have smaller blocks

    def _planned(self) -> Plan:
        plan = self._plan
        if plan is None:
            self._plan = plan = Plan(self.trace, self._roots, self._on_damage)
        if not self._blocks:
            share = self._budget // _AT_ONCE
            size = max(_LEAST_BYTES, share // _BLOCKS)
            row = max(1, plan.step_bytes)
            fair = -(-plan.total // (_LEAST_BLOCKS * self._world_size))
            steps, most = (max(1, min(size // row, fair)) for size in (size, max(size, share)))
            self._blocks = list(_blocks(plan, steps, most, self._margins))
            largest = max((int(block.lengths.sum()) for block in self._blocks), default=0) * row
            self._at_once = max(1, share // max(1, largest))
            self._meanwhile = largest * _AT_ONCE <= self._budget
            counts = [self._make(_without_columns(plan, block), self._seed).items for block in self._blocks]
            self._counts = np.array(counts, np.int64)
        return plan

    @property
    def items(self) -> int:
        """How many there are in the share of an epoch: of the first one, if there are several ranks."""
        self._planned()
        return int(self._counts.sum()) if self._world_size == 1 else int(self._order(0).ends[-1])

    def _order(self, epoch: int) -> _Epoch:
        """The blocks of an epoch, of which this rank has a share, in groups that are held at a time."""
        self._planned()
        key = epoch, self._rank, self._world_size
        if self._ordered is None or self._ordered[0] != key:
            order = permuted(self._seed * 1_000_003 + epoch, np.arange(len(self._blocks)), len(self._blocks))
            mine = order[self._rank :: self._world_size]
            groups = [mine[i : i + self._at_once] for i in range(0, len(mine), self._at_once)]
            counts = np.array([self._counts[group].sum() for group in groups], np.int64)
            self._ordered = key, _Epoch(groups, np.cumsum(counts), counts)
        return self._ordered[1]

    def __len__(self) -> int:
        ends = self._order(self._epoch).ends
        return -(-int(ends[-1]) // self.batch_size) if len(ends) else 0

    def __next__(self) -> Batch:
        if self._number >= len(self):
            self._number, self._epoch = 0, self._epoch + 1
            if not self._replacement or not len(self):
                raise StopIteration
        self._number += 1
        return self.at(self._number - 1, self._epoch)

    def at(self, number: int, epoch: int = 0) -> Batch:
        plan = self._planned()
        groups, ends, counts = self._order(epoch)
        begin, end = number * self.batch_size, min((number + 1) * self.batch_size, int(ends[-1]))
        found = []
        for which in range(int(ends.searchsorted(begin, side="right")), len(groups)):
            before = int(ends[which] - counts[which])
            low, high = max(0, begin - before), min(int(counts[which]), end - before)
            if low < high:
                found.append(self._group(plan, groups, epoch, which).batch(low, high, False, epoch))
            if ends[which] >= end:
                break
        return joined(found)

    def _group(self, plan: Plan, groups: list[Array], epoch: int, which: int) -> Draws:
        """A group, decoded; the one that comes next is decoded meanwhile."""
        wanted = [(epoch, number) for number in range(which, min(which + 1 + self._meanwhile, len(groups)))]
        self._held = {key: held for key, held in self._held.items() if key in wanted}
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "gym-trace-decode")
        for key in wanted:
            if key not in self._held:
                self._held[key] = self._thread.submit(self._decoded, plan, groups[key[1]])
        return self._held[epoch, which].result()

    def _decoded(self, plan: Plan, group: Array) -> Draws:
        return self._make(plan.decode([self._blocks[number] for number in group.tolist()], in_memory), self._seed)


def _blocks(plan: Plan, steps: int, most: int, margins: tuple[int, int] | None) -> Any:
    if margins is not None:
        yield from plan.blocks(steps, *margins, most)
        return
    bounds = np.unique(np.append(plan.first.searchsorted(np.arange(0, plan.total, steps)), len(plan.first) - 1))
    for p, q in zip(bounds[:-1].tolist(), bounds[1:].tolist()):
        yield plan.episodes(np.arange(p, q))


def _without_columns(plan: Plan, pieces: Pieces) -> Rows:
    """What is known of rows before they are decoded."""
    none = np.zeros_like(pieces.episode)
    return plan.rows({}, pieces, none, none)
