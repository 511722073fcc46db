"""Batches of a trace that is larger than the memory that it may take: decoded a part at a time, in shuffled order.

The steps of the trace are cut into blocks of whole chunks, or its episodes into blocks of some. An epoch takes them in
a shuffled order, several at a time: what these hold is drawn in shuffled order, while the next ones are being decoded
in a thread.

Batch k is the same however many workers take turns. As batches one after the other are of different workers, then, what
is decoded for one of them would have to be decoded for the others, too; so, where there is memory for it, batches come
from several strands in turn, each with blocks of its own.
"""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from gym_trace.errors import InvalidOption
from gym_trace.model.values import Array
from gym_trace.reading.episode_scan import OnDamage
from gym_trace.reading.recorded import Recorded
from gym_trace.sampling.batches import Batches, Make
from gym_trace.sampling.draw import permuted
from gym_trace.sampling.draws import Batch, Draws, joined
from gym_trace.sampling.rows import Pieces, Plan, Rows, in_memory
from gym_trace.sampling.store import Memory

_AT_ONCE = 2  # shares of the memory: one to sample from, one to decode in the background
_STRANDS = 12, 4, 2, 1  # how many workers can share the decoding without a part of it being done twice
_MIXED = 8  # blocks of a group at least, where there are several strands
_BLOCKS = _STRANDS[0] * _MIXED
_LEAST_BLOCKS = 4  # of a trace for each of several ranks
_LEAST_BYTES = 3 << 19  # of a block: more than most chunks, which smaller ones would have decoded again and again
_MOST_BYTES = 32 << 20  # of a chunk that is decoded at once in any case: more than recorders write


@dataclass(frozen=True)
class _Epoch:
    """Groups of blocks in their order, of the items of each where they end among all, and how many batches they make.

    Batches come from several strands in turn, each of which has a part of the groups, so that workers that take turns
    need not all decode everything.
    """

    groups: list[Array]
    ends: Array
    batches: int
    strands: int

    def place(self, number: int) -> tuple[int, int]:
        """Which batch of all, strand behind strand, comes at this turn, and which one follows the last of its strand.

        The last one, which may have fewer items, comes last.
        """
        each, longer = divmod(self.batches, self.strands)
        shorter = self.strands - longer
        strand = (number + shorter) % self.strands
        begin = strand * each + max(0, strand - shorter)
        return begin + number // self.strands, begin + each + (strand >= shorter)

    def group(self, item: int) -> int:
        """Return the group of an item."""
        return int(self.ends.searchsorted(item, side="right"))


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
        self._at_once = 1  # how many of them are a group
        self._strands = 1
        self._meanwhile = True  # whether there is room for the groups that come next
        self._ordered: tuple[tuple[int, int, int], _Epoch] | None = None
        self._held: dict[tuple[int, int], Future[Draws]] = {}
        self._thread: ThreadPoolExecutor | None = None

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_blocks", "_counts", "_at_once", "_strands", "_meanwhile", "_ordered", "_held", "_thread")
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
            fair = plan.total if self._world_size == 1 else -(-plan.total // (_LEAST_BLOCKS * self._world_size))
            steps, most = (max(1, min(bound // row, fair)) for bound in (size, max(size, share, _MOST_BYTES)))
            self._blocks = list(_blocks(plan, steps, most, self._margins))
            largest = max(1, max((int(block.lengths.sum()) for block in self._blocks), default=0) * row)
            mine = -(-len(self._blocks) // self._world_size)
            held = max(1, min(share // largest, mine))
            self._strands = next(strands for strands in _STRANDS if held >= strands * _MIXED or strands == 1)
            self._at_once = held // self._strands
            self._meanwhile = largest * _AT_ONCE <= self._budget
            counts = [self._make(_without_columns(plan, block), self._seed).items for block in self._blocks]
            self._counts = np.array(counts, np.int64)
        return plan

    @property
    def items(self) -> int:
        """Number of items in the share of an epoch: of the first epoch, if there are several ranks."""
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
            ends = np.cumsum([0, *(self._counts[group].sum() for group in groups)])[1:]
            batches = -(-int(ends[-1]) // self.batch_size) if len(ends) else 0
            self._ordered = key, _Epoch(groups, ends, batches, self._strands)
        return self._ordered[1]

    def __len__(self) -> int:
        return self._order(self._epoch).batches

    def __next__(self) -> Batch:
        number = self._number + self._worker
        while number >= (batches := len(self)):
            self._number, self._epoch, number = self._number - batches, self._epoch + 1, number - batches
            if not self._replacement or not batches:
                self._number = 0
                raise StopIteration
        self._number += self._workers
        return self.at(number, self._epoch)

    def at(self, number: int, epoch: int = 0) -> Batch:
        order = self._order(epoch)
        place, _ = order.place(number)
        begin, end = place * self.batch_size, min((place + 1) * self.batch_size, int(order.ends[-1]))
        left_out = self.batch_size * (self._workers * self._own_strands() // self._strands - 1)  # by other workers
        found = []
        which = order.group(begin)
        while begin < end:
            before = int(order.ends[which - 1]) if which else 0
            until = min(end, int(order.ends[which]))
            if begin < until:
                low, high = begin - before, until - before
                apart = high - low + left_out
                found.append(self._group(number, epoch, which).batch(low, high, False, epoch, apart=apart))
            begin, which = until, which + 1
        return joined(found)

    def take(self, items: Array) -> Batch:
        """Raise InvalidOption: a stream has no items by number."""
        raise InvalidOption('items by their number: not supported when streaming; pass cache="disk" or "memory"')

    def _group(self, number: int, epoch: int, which: int) -> Draws:
        """Return a group of a batch, decoded, while a thread decodes those of the next batches."""
        order = self._order(epoch)
        wanted = [which, *self._next(order, which, number)]
        if not self._held.keys() >= {(epoch, group) for group in wanted}:
            # What is needed first is decoded first: groups of the other strands, and then those behind all of these.
            others = range(number + self._workers, order.batches, self._workers)[: self._own_strands() - 1]
            first = {order.group(order.place(other)[0] * self.batch_size): other for other in others}
            later = [group for begin, other in first.items() for group in self._next(order, begin, other)]
            self._hold(epoch, [which, *first, *wanted[1:], *later])
        return self._held[epoch, which].result()

    def _next(self, order: _Epoch, which: int, number: int) -> list[int]:
        """The group that comes behind one in the strand of a batch, if there is room for it."""
        end = min(order.place(number)[1] * self.batch_size, int(order.ends[-1]))
        return [which + 1] if self._meanwhile and order.ends[which] < end else []

    def _own_strands(self) -> int:
        """From how many strands the batches of this worker come."""
        return self._strands // math.gcd(self._workers, self._strands)

    def _hold(self, epoch: int, groups: list[int]) -> None:
        """Decode these in the background, in this order, and drop all others."""
        plan, order = self._planned(), self._order(epoch)
        keys = [(epoch, group) for group in groups]
        self._held = {key: held for key, held in self._held.items() if key in keys}
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "gym-trace-decode")
        for key in keys:
            if key not in self._held:
                self._held[key] = self._thread.submit(self._decoded, plan, order.groups[key[1]])

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
    """Return rows without columns, before they are decoded."""
    none = np.zeros_like(pieces.episode)
    return plan.rows({}, pieces, none, none)
