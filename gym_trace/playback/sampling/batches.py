"""Batches: an iterator over windows, transitions or episodes that can be saved, restored and shared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from gym_trace.data.layout import Path
from gym_trace.data.showing.text import count as counted
from gym_trace.data.tensors import plain_array
from gym_trace.data.values import Array
from gym_trace.data.vocabulary import COLUMNS
from gym_trace.errors import CorruptTrace, InvalidOption
from gym_trace.playback.episode_index import RecordedEpisodes, index_of
from gym_trace.playback.sampling.items import Batch, Items
from gym_trace.playback.sampling.on_demand import OnDemand
from gym_trace.playback.sampling.permutation import SumTree
from gym_trace.playback.sampling.rows import DecodedRows, DecodePlan, planned, without_columns
from gym_trace.playback.scan import OnDamage
from gym_trace.printable import printable

CACHES = 'pass "auto", "memory", "disk", a device of PyTorch such as "cuda", or None to stream'
Make = Callable[[DecodedRows, int], Items]  # (rows, seed)
Store = Callable[[DecodePlan], DecodedRows]  # decodes the rows of all episodes of a plan. Raises CorruptTrace


@dataclass
class Order:
    """Arguments shared by all kinds of batches: see Trace.windows(). Raises InvalidOption."""

    batch_size: int
    seed: int
    columns: Iterable[str] | None
    replacement: bool
    weights: Array | None
    cache: str | None
    cache_bytes: int
    follow: float | None
    most_steps: int | None
    on_damage: str
    roots: frozenset[str] = field(init=False)  # the columns to read

    def __post_init__(self) -> None:
        check_positive(batch_size=self.batch_size)
        if not isinstance(self.seed, (int, np.integer)):
            raise InvalidOption(f"seed={self.seed!r}: pass an integer")
        if not isinstance(self.cache_bytes, (int, np.integer)) or self.cache_bytes < 0:
            raise InvalidOption(f"cache_bytes={self.cache_bytes!r}: pass a number of bytes")
        if self.on_damage not in ("raise", "skip"):
            raise InvalidOption(f'on_damage={self.on_damage!r}: pass "raise" or "skip"')
        if self.follow is not None and not (isinstance(self.follow, (int, float, np.number)) and self.follow >= 0):
            raise InvalidOption(f"follow={self.follow!r}: pass the minimum seconds between refreshes, 0 or more")
        if self.most_steps is not None:
            check_positive(most_steps=self.most_steps)
        if self.cache is not None and not isinstance(self.cache, str):
            raise InvalidOption(f"cache={self.cache!r}: {CACHES}")
        if self.weights is not None and not self.replacement:
            raise InvalidOption("weights: need replacement=True")
        can_follow = self.replacement and self.weights is None and self.cache in ("auto", "memory")
        if self.follow is not None and not can_follow:
            raise InvalidOption('follow: needs cache="auto" or "memory", replacement=True and no weights')
        if self.most_steps is not None and self.follow is None:
            raise InvalidOption("most_steps: needs follow; otherwise select episodes: trace[-100:]")
        self.seed, self.roots = int(self.seed), roots_of(self.columns)


def roots_of(columns: Iterable[str] | None) -> frozenset[str]:
    """Return the columns to read. None: all but infos. Raises InvalidOption."""
    if columns is None:
        return frozenset(COLUMNS) - {"infos"}
    roots = frozenset([columns] if isinstance(columns, str) else columns)
    if unknown := {root for root in roots - set(COLUMNS) if not str(root).startswith("annotations.")}:
        known = f"{', '.join(COLUMNS)}, annotations.NAME"
        raise InvalidOption(f"columns: unknown columns {sorted(map(str, unknown))}; choose from {known}")
    return roots


def check_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if not isinstance(number, (int, np.integer)) or isinstance(number, bool) or number < 1:
            raise InvalidOption(f"{name}={number!r}: pass a number of at least 1")


class Batches:
    """An iterator over batches, each a dict of arrays with one row per item.

    A batch depends only on the seed and its position. With replacement the iterator never ends; without, it ends after
    each item once, and the next loop is another epoch, in another order. ``len()`` counts the batches of an epoch.

    A pickled copy continues at the same position. The first batches of rows in memory read only what they need; then
    all rows are decoded. Use it in one thread only.
    """

    def __init__(
        self,
        trace: RecordedEpisodes,
        order: Order,
        make: Make,
        store: Store,
        plan: DecodePlan | None,
        on_damage: OnDamage | None,
        margins: tuple[int, int] | None = None,
    ):
        """plan: plan of the trace; None: made later, as the trace may be empty. on_damage: as in Scan.

        margins: steps before and after a step that its item needs: the first batches read the rows of their items
            alone. None: the first batch decodes all rows.

        Raises InvalidOption if there is nothing to sample.
        """
        self.trace, self.batch_size = trace, order.batch_size
        self._order, self._make, self._store, self._on_damage = order, make, store, on_damage
        self._number = self._epoch = 0
        self._rank, self._world_size = 0, 1
        self._worker, self._workers = 0, 1
        self._items: Items | None = None
        self._item_margins = margins if on_damage is None else None
        self._on_demand: OnDemand | None = None
        self._tree: SumTree | None = None
        self._read_at = -np.inf
        self._plan = plan
        if plan is not None:
            self._set_weights(self._made(without_columns(plan, plan.episodes())))

    def refresh(self) -> None:
        """Take in newly recorded data. Raises CorruptTrace, InvalidOption."""
        self._read_at = time.monotonic()
        self.trace.refresh()
        self._items = self._plan = self._on_demand = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_items": None, "_plan": None, "_on_demand": None}

    def __repr__(self) -> str:
        made: Any = self._make
        keywords = ", ".join(f"{name}={value}" for name, value in getattr(made, "keywords", {}).items())
        kind = f"{getattr(made, 'func', made).__name__.lower()}({keywords})"
        position = f"next is batch {self._number} of epoch {self._epoch}"
        share = f", share {self._rank} of {self._world_size}" if self._world_size > 1 else ""
        of = f"{printable(self.trace.directory)}, seed {self._order.seed}"
        return f"<{type(self).__name__} of {self.batch_size} {kind} of {of}; {position}{share}>"

    @property
    def _decoded_items(self) -> Items:
        if self._items is None:
            trace, roots, self._on_demand = self.trace, self._order.roots, None
            try:
                rows = self._store(self._plan or planned(trace, roots, self._on_damage))
            except CorruptTrace:
                if self._on_damage is None:
                    raise
                rows = self._store(DecodePlan(trace, roots, self._on_damage))
            self._items, self._plan = self._made(rows), None
            self._set_weights(self._items)
        return self._items

    def _first_batches(self) -> OnDemand | None:
        """Return what makes the first batches; None once all rows are decoded, or should be."""
        if self._items is not None or self._item_margins is None:
            return None
        if self._on_demand is None:
            plan = self._plan = self._plan or planned(self.trace, self._order.roots, None)
            items = self._made(without_columns(plan, plan.episodes()))
            self._set_weights(items)
            self._on_demand = OnDemand(plan, self._made, self._item_margins, items)
        return self._on_demand

    def _made(self, rows: DecodedRows) -> Items:
        made = self._make(rows, self._order.seed)
        if not made.items:
            raise self._nothing()
        return made

    def _nothing(self) -> InvalidOption:
        steps = index_of(self.trace)["steps"]
        problem = "the trace or view has no episodes"
        if len(steps):
            problem = f"no episode is long enough; the longest has {counted(int(steps.max()), 'step')}"
        return InvalidOption(f"{self.trace.directory}: nothing to sample: {problem}")

    def _set_weights(self, made: Items) -> None:
        weights = self._order.weights
        if weights is not None and (self._tree is None or self._tree.items != made.items):
            self._tree = SumTree(made.weights(weights, index_of(self.trace)["steps"]))

    @property
    def has_goals(self) -> bool:
        """True if goals are relabelled, which takes rows in arrays."""
        return getattr(self._make, "keywords", {}).get("goals") is not None

    @property
    def reads_ahead(self) -> bool:
        """True if later batches do not depend on what happens to earlier ones: without weights and follow."""
        return self._order.weights is None and self._order.follow is None

    def with_columns(self, change: Callable[[dict[Path, Any]], dict[Path, Any]]) -> Batches:
        """Return batches of the same rows in other columns, at the same position."""
        changed, items = copy(self), self._decoded_items
        changed._items = items.with_columns(change(items.rows.columns))
        return changed

    @property
    def items(self) -> int:
        """Number of windows, transitions or episodes to sample from."""
        first = self._first_batches()
        return self._decoded_items.items if first is None else first.items.items

    def __len__(self) -> int:
        return -(-self.items // self.batch_size)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        position = self.advance()
        if position is None:
            raise StopIteration
        return self.at(*position)

    def advance(self) -> tuple[int, int] | None:
        """Move to the next batch; return the arguments of at() for it, None at the end of an epoch."""
        follow = self._order.follow
        if follow is not None and time.monotonic() - self._read_at >= follow:
            self.refresh()
        number = (self._number + self._worker) * self._world_size + self._rank
        if not self._order.replacement and number >= len(self):
            self._number, self._epoch = 0, self._epoch + 1
            return None
        self._number += self._workers
        return number, self._epoch

    def next_positions(self, count: int) -> list[tuple[int, int]]:
        """Return the positions of the next batches of the epoch, at most `count`, and stay at this one."""
        here = self._number, self._epoch
        found = list(islice(iter(self.advance, None), count))
        self._number, self._epoch = here
        return found

    def at(self, number: int, epoch: int = 0) -> Batch:
        begin = number * self.batch_size
        end = begin + self.batch_size if self._order.replacement else min(begin + self.batch_size, self.items)
        batch = self._on_demand_batch(begin, end, epoch)
        if batch is not None:
            return batch
        apart = self.batch_size * self._world_size * self._workers
        return self._decoded_items.batch(begin, end, self._order.replacement, epoch, self._tree, apart)

    def _on_demand_batch(self, begin: int, end: int, epoch: int) -> Batch | None:
        """Return one of the first batches; None if all rows are decoded, or should be."""
        first = self._first_batches()
        if first is None:
            return None
        items, positions, more = first.items.chosen(begin, end, self._order.replacement, epoch, self._tree)
        batch = first.batch(items, positions)
        if batch is None:
            self._item_margins = None
            return None
        return batch | more

    def take(self, items: Array) -> Batch:
        """Return the batch of these items, (n,) int64, each from 0 to items - 1. Raises IndexError."""
        chosen = np.asarray(items, np.int64)
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < self.items:
            raise IndexError(f"items are from 0 to {self.items - 1}")
        return self._decoded_items.of(chosen, chosen)

    def update_priorities(self, index: Array, priorities: Array) -> None:
        """Change the weights of items. index: as in batches. priorities: (n,), finite and not negative.

        Raises InvalidOption, also for batches made without weights.
        """
        if self._tree is None:
            raise InvalidOption("update_priorities: unweighted batches; create them with weights=, such as all ones")
        self._tree.update(plain_array(index), plain_array(priorities))  # also tensors on a device

    def share(self, rank: int, world_size: int) -> None:
        """Restrict these batches to the share of one of several processes. Raises InvalidOption."""
        if not 0 <= rank < world_size:
            raise InvalidOption(f"rank={rank}, world_size={world_size}: pass a rank of 0 to world_size - 1")
        self._rank, self._world_size = rank, world_size

    def take_turns(self, worker: int, workers: int) -> None:
        """Take every workers-th batch of the share: workers that take turns yield all of them, in order.

        Raises InvalidOption.
        """
        if not 0 <= worker < workers:
            raise InvalidOption(f"worker={worker}, workers={workers}: pass a worker of 0 to workers - 1")
        self._worker, self._workers = worker, workers

    def state_dict(self) -> dict[str, Any]:
        """Return position and weights; load_state_dict() continues there exactly."""
        weights = {} if self._tree is None else {"weights": self._tree.weights}
        seed = self._order.seed
        return {"number": self._number, "epoch": self._epoch, "seed": seed, "items": self.items, **weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position. Raises InvalidOption if the state has another seed or number of items."""
        if (state.get("seed"), state.get("items")) != (self._order.seed, self.items):
            raise InvalidOption("state_dict: from batches with another seed or of other episodes")
        self._number, self._epoch = int(state["number"]), int(state["epoch"])
        if self._tree is not None and "weights" in state:
            self._tree = SumTree(np.asarray(state["weights"]))
