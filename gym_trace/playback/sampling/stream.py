"""Batches of a trace that is larger than the memory budget: parts of it are decoded in shuffled order.

A block is a run of steps in whole chunks, or of episodes. An epoch decodes blocks in shuffled order, in groups. The
items of a group are shuffled, while a thread decodes the next groups.

Batch k is the same for any number of workers. Consecutive batches belong to different workers, which would all decode
the same blocks. Therefore, if memory allows, batches come from several strands in turn, and each strand has blocks of
its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.values import Array
from gym_trace.errors import InvalidOption
from gym_trace.playback.episode_index import RecordedEpisodes
from gym_trace.playback.sampling.batches import Batches, Make, Order
from gym_trace.playback.sampling.items import Batch, Items, joined
from gym_trace.playback.sampling.on_demand import OnDemand
from gym_trace.playback.sampling.permutation import permuted
from gym_trace.playback.sampling.rows import DecodePlan, EpisodeSlices, in_memory, without_columns
from gym_trace.playback.sampling.store import decoded
from gym_trace.playback.scan import OnDamage

_AT_ONCE = 2  # shares of the memory: one to sample from, one to decode in the background
_STRANDS = 12, 4, 2, 1  # numbers of workers that can share the decoding without repetition
_MIN_GROUP = 8  # min blocks of a group, if there are several strands
_BLOCKS = _STRANDS[0] * _MIN_GROUP
_LEAST_BLOCKS = 4  # per trace and rank
_LEAST_BYTES = 3 << 19  # per block; larger than most chunks, because smaller blocks would decode a chunk repeatedly
_MOST_BYTES = 32 << 20  # a chunk up to this size is always decoded whole; recorders write smaller ones


class _Epoch(NamedTuple):
    """Groups of blocks in order; ends of their items in all items; the number of batches.

    Batches come from several strands in turn. Each strand has a part of the groups.
    """

    groups: list[Array]
    ends: Array
    batches: int
    strands: int

    def batch_of(self, number: int) -> tuple[int, int]:
        """Return the batch of this turn, counted strand after strand, and the end of the batches of its strand.

        The last batch, which may have fewer items, also has the last turn.
        """
        each, longer = divmod(self.batches, self.strands)
        shorter = self.strands - longer
        strand = (number + shorter) % self.strands
        begin = strand * each + max(0, strand - shorter)
        return begin + number // self.strands, begin + each + (strand >= shorter)

    def group(self, item: int) -> int:
        return int(self.ends.searchsorted(item, side="right"))


class _Blocks(NamedTuple):
    """The blocks of a trace for one rank, as functions that return their pieces.

    counts: number of items of each block. at_once: blocks per group. ahead: True if memory also holds the next groups.
    """

    plan: DecodePlan
    blocks: list[Callable[[], EpisodeSlices]]
    counts: Array
    at_once: int
    strands: int
    ahead: bool


class Stream(Batches):
    """Batches in bounded memory.

    Every item comes once per epoch; with replacement, epochs repeat. Only the items in memory are shuffled together;
    they come from blocks all over the trace.
    """

    def __init__(
        self,
        trace: RecordedEpisodes,
        order: Order,
        make: Make,
        plan: DecodePlan,
        margins: tuple[int, int] | None,
        on_damage: OnDamage | None,
    ):
        """margins: steps before and after a block that its items need; None: whole episodes."""
        self._margins = margins
        self._cut: _Blocks | None = None
        self._ordered: tuple[tuple[int, int, int], _Epoch] | None = None
        self._held: dict[tuple[int, int], Future[Items]] = {}
        self._first: tuple[tuple[int, int], OnDemand] | None = None  # epoch and number of the first group
        self._thread: ThreadPoolExecutor | None = None
        super().__init__(trace, order, make, decoded, None, on_damage, margins)
        self._plan = plan
        if not self._blocks().counts.any():
            raise self._nothing()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_cut": None, "_ordered": None, "_held": {}, "_first": None, "_thread": None}

    def share(self, rank: int, world_size: int) -> None:
        super().share(rank, world_size)
        self._cut, self._held, self._first = None, {}, None  # more ranks have smaller blocks

    def _blocks(self) -> _Blocks:
        if self._cut is None:
            plan = self._plan or DecodePlan(self.trace, self._order.roots, self._on_damage)
            self._plan = plan
            budget = max(0, self._order.cache_bytes - plan.held)
            share = budget // _AT_ONCE
            size = max(_LEAST_BYTES, share // _BLOCKS)
            row = max(1, plan.size // max(1, plan.total))
            fair = plan.total if self._world_size == 1 else -(-plan.total // (_LEAST_BLOCKS * self._world_size))
            steps, most = (max(1, min(bound // row, fair)) for bound in (size, max(size, share, _MOST_BYTES)))
            blocks: list[Callable[[], EpisodeSlices]]
            if self._margins is not None:
                blocks = list(plan.blocks(steps, *self._margins, most))
            else:
                cuts = np.append(plan.first.searchsorted(np.arange(0, plan.total, steps)), len(plan.first) - 1)
                blocks = [partial(plan.episodes, range(*ends)) for ends in pairwise(np.unique(cuts).tolist())]
            largest, counts = 1, np.zeros(len(blocks), np.int64)
            for number, block in enumerate(blocks):
                pieces = block()
                largest = max(largest, plan.size_of(int(pieces.lengths.sum()), len(pieces.episode)))
                counts[number] = self._make(without_columns(plan, pieces), self._order.seed).items
            held = max(1, min(share // largest, -(-len(blocks) // self._world_size)))
            strands = next(strands for strands in _STRANDS if held >= strands * _MIN_GROUP or strands == 1)
            # While a block is decoded, its chunks take about as much again.
            ahead = largest * (_AT_ONCE + 1) <= budget
            self._cut = _Blocks(plan, blocks, counts, held // strands, strands, ahead)
        return self._cut

    @property
    def items(self) -> int:
        """Number of items in the share of an epoch: of the first epoch, if there are several ranks."""
        return int(self._blocks().counts.sum()) if self._world_size == 1 else int(self._epoch_of(0).ends[-1])

    def _epoch_of(self, epoch: int) -> _Epoch:
        """Return the share of this rank in the blocks of an epoch, in groups that are held together."""
        key = epoch, self._rank, self._world_size
        if self._ordered is None or self._ordered[0] != key:
            cut = self._blocks()
            order = permuted(self._order.seed * 1_000_003 + epoch, np.arange(len(cut.blocks)), len(cut.blocks))
            mine = order[self._rank :: self._world_size]
            groups = [mine[i : i + cut.at_once] for i in range(0, len(mine), cut.at_once)]
            ends = np.cumsum([0, *(cut.counts[group].sum() for group in groups)])[1:]
            batches = -(-int(ends[-1]) // self.batch_size) if len(ends) else 0
            self._ordered = key, _Epoch(groups, ends, batches, cut.strands)
        return self._ordered[1]

    def __len__(self) -> int:
        return self._epoch_of(self._epoch).batches

    def advance(self) -> tuple[int, int] | None:
        number = self._number + self._worker
        while number >= (batches := len(self)):
            self._number, self._epoch, number = self._number - batches, self._epoch + 1, number - batches
            if not self._order.replacement or not batches:
                self._number = 0
                return None
        self._number += self._workers
        return number, self._epoch

    def at(self, number: int, epoch: int = 0) -> Batch:
        order = self._epoch_of(epoch)
        batch, _ = order.batch_of(number)
        begin, end = batch * self.batch_size, min((batch + 1) * self.batch_size, int(order.ends[-1]))
        # items of other workers
        others = self.batch_size * (self._workers * self._own_strands(order) // order.strands - 1)
        found = []
        which = order.group(begin)
        while begin < end:
            before = int(order.ends[which - 1]) if which else 0
            until = min(end, int(order.ends[which]))
            if begin < until:
                low, high = begin - before, until - before
                part = self._of_first_group(epoch, which, low, high)
                if part is None:
                    group, apart = self._group(number, epoch, which), high - low + others
                    part = group.batch(low, high, False, epoch, apart=apart)
                found.append(part)
            begin, which = until, which + 1
        return joined(found)

    def _of_first_group(self, epoch: int, which: int, low: int, high: int) -> Batch | None:
        """Return a batch with the rows of its items alone; None if the group should be decoded."""
        if self._item_margins is None:
            return None
        if self._first is None:
            plan, blocks = (cut := self._blocks()).plan, self._epoch_of(epoch).groups[which]
            pieces = (cut.blocks[number]() for number in blocks.tolist())
            slices = EpisodeSlices(*(np.concatenate(column) for column in zip(*pieces)))
            items = self._make(without_columns(plan, slices), self._order.seed)
            share = min(1.0, cut.strands * int(slices.lengths.sum()) / plan.total)
            self._first = (epoch, which), OnDemand(plan, self._made, self._item_margins, items, slices, share)
        key, first = self._first
        batch = None
        if key == (epoch, which):
            items_of, positions, _ = first.items.chosen(low, high, False, epoch, None)
            batch = first.batch(items_of, positions)
        if batch is None:
            self._first = self._item_margins = None
        return batch

    def take(self, items: Array) -> Batch:
        """Raise InvalidOption: a stream has no items by number."""
        raise InvalidOption('items by their number: not supported when streaming; pass cache="disk" or "memory"')

    def _group(self, number: int, epoch: int, which: int) -> Items:
        """Return a decoded group of a batch. A thread decodes the groups of the next batches."""
        order = self._epoch_of(epoch)
        wanted = [which, *self._next(order, which, number)]
        if not self._held.keys() >= {(epoch, group) for group in wanted}:
            # Decode in the order of need: groups of the other strands, and then those after all of these.
            others = range(number + self._workers, order.batches, self._workers)[: self._own_strands(order) - 1]
            first = {order.group(order.batch_of(other)[0] * self.batch_size): other for other in others}
            later = [group for begin, other in first.items() for group in self._next(order, begin, other)]
            keys = dict.fromkeys((epoch, group) for group in [which, *first, *wanted[1:], *later])
            self._held = {key: held for key, held in self._held.items() if key in keys}
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "gym-trace-decode")
            for key in keys:
                if key not in self._held:
                    self._held[key] = self._thread.submit(self._decoded, self._blocks(), order.groups[key[1]])
        return self._held[epoch, which].result()

    def _next(self, order: _Epoch, which: int, number: int) -> list[int]:
        """Return the next group in the strand of a batch as a list; an empty one if memory does not suffice."""
        end = min(order.batch_of(number)[1] * self.batch_size, int(order.ends[-1]))
        return [which + 1] if self._blocks().ahead and order.ends[which] < end else []

    def _own_strands(self, order: _Epoch) -> int:
        """Return the number of strands that the batches of this worker come from."""
        return order.strands // math.gcd(self._workers, order.strands)

    def _decoded(self, cut: _Blocks, group: Array) -> Items:
        rows = cut.plan.decode([cut.blocks[number]() for number in group.tolist()], in_memory)
        return self._make(rows, self._order.seed)
