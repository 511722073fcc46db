"""Batches: an iterator over an order of windows, transitions or episodes, which knows its place and can be shared."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gym_trace.errors import CorruptTrace, InvalidOption
from gym_trace.model.values import Array
from gym_trace.printable import printable
from gym_trace.reading.episode_scan import OnDamage
from gym_trace.reading.recorded import Recorded
from gym_trace.sampling.draw import SumTree
from gym_trace.sampling.draws import Batch, Draws
from gym_trace.sampling.rows import Plan, Rows, planned
from gym_trace.sampling.store import Store

Make = Callable[[Rows, int], Draws]  # with a seed


class Batches:
    """An iterator over batches, each a dict of arrays with one row per item.

    A batch depends only on the seed and its position, on nothing that was read before. With replacement
    it never ends; without, it ends after each item once, and the next loop is another epoch, in another order.
    ``len()`` is the number of batches in an epoch.

    It can be pickled, and then begins where it was. Rows are decoded with the first batch. It is for one thread;
    several have one each.
    """

    def __init__(
        self,
        trace: Recorded,
        roots: frozenset[str],
        make: Make,
        store: Store,
        plan: Plan | None,
        *,
        batch_size: int,
        seed: int,
        replacement: bool,
        weights: Array | None = None,
        follow: float | None = None,
        on_damage: OnDamage | None = None,
    ):
        """plan: plan of the trace; None: it may be empty so far. follow: take in new data, at most once per this
        number of seconds.

        Raises InvalidOption if there is nothing to be drawn, or it cannot be kept.
        """
        self.trace, self.batch_size = trace, batch_size
        self._roots, self._make, self._store = roots, make, store
        self._seed, self._replacement = seed, replacement
        self._number = self._epoch = 0
        self._rank, self._world_size = 0, 1
        self._worker, self._workers = 0, 1
        self._weights, self._follow, self._on_damage = weights, follow, on_damage
        self._drawn_of: Draws | None = None
        self._tree: SumTree | None = None
        self._read_at = -np.inf
        self._plan = plan
        if plan is not None:
            store.check(plan)
            self._weighted(self._made(plan.rows({}, plan.episodes(), plan.first[:-1], plan.first[:-1])))

    def refresh(self) -> None:
        """Takes in what has been recorded since. Raises CorruptTrace, InvalidOption."""
        self._read_at = time.monotonic()
        self.trace.refresh()
        self._drawn_of = self._plan = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_drawn_of": None, "_plan": None}

    def __repr__(self) -> str:
        made: Any = self._make
        keywords = ", ".join(f"{name}={value}" for name, value in getattr(made, "keywords", {}).items())
        kind = f"{getattr(made, 'func', made).__name__.lower()}({keywords})"
        place = f"next is batch {self._number} of epoch {self._epoch}"
        share = f", share {self._rank} of {self._world_size}" if self._world_size > 1 else ""
        of = printable(self.trace.directory)
        return f"<{type(self).__name__} of {self.batch_size} {kind} of {of}, seed {self._seed}; {place}{share}>"

    @property
    def _draws(self) -> Draws:
        if self._drawn_of is None:
            try:
                rows = self._store.rows(self.trace, self._plan or planned(self.trace, self._roots, self._on_damage))
            except CorruptTrace:
                if self._on_damage is None:
                    raise
                rows = self._store.rows(self.trace, Plan(self.trace, self._roots, self._on_damage))
            self._drawn_of, self._plan = self._made(rows), None
            self._weighted(self._drawn_of)
        return self._drawn_of

    def _made(self, rows: Rows) -> Draws:
        draws = self._make(rows, self._seed)
        if not draws.items:
            problem = "no episode is long enough" if len(self.trace.episodes) else "the trace or view has no episodes"
            raise InvalidOption(f"{self.trace.directory}: nothing to draw: {problem}")
        return draws

    def _weighted(self, draws: Draws) -> None:
        if self._weights is not None and (self._tree is None or self._tree.items != draws.items):
            self._tree = SumTree(draws.weights(self._weights, self.trace.episodes["steps"]))

    @property
    def items(self) -> int:
        """Number of windows, transitions or episodes to sample from."""
        return self._draws.items

    def __len__(self) -> int:
        return -(-self.items // self.batch_size)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        if self._follow is not None and time.monotonic() - self._read_at >= self._follow:
            self.refresh()
        number = (self._number + self._worker) * self._world_size + self._rank
        if not self._replacement and number >= len(self):
            self._number, self._epoch = 0, self._epoch + 1
            raise StopIteration
        self._number += self._workers
        return self.at(number, self._epoch)

    def at(self, number: int, epoch: int = 0) -> Batch:
        """The batch of this number of an epoch."""
        begin = number * self.batch_size
        end = begin + self.batch_size if self._replacement else min(begin + self.batch_size, self.items)
        apart = self.batch_size * self._world_size * self._workers
        return self._draws.batch(begin, end, self._replacement, epoch, self._tree, apart)

    def take(self, items: Array) -> Batch:
        """The batch of these items, (n,) int64, each from 0 to .items - 1. Raises IndexError."""
        chosen = np.asarray(items, np.int64)
        draws = self._draws
        if len(chosen) and chosen.view(np.uint64).max() >= draws.items:  # as such a negative one is very large
            raise IndexError(f"items are from 0 to {draws.items - 1}")
        return draws.of(chosen, chosen)

    def update_priorities(self, index: Array, priorities: Array) -> None:
        """Gives items other weights. index: as batches have it. priorities: (n,), finite and not negative.

        Raises InvalidOption, also where no weights were given to begin with.
        """
        if self._tree is None:
            raise InvalidOption("these are not drawn by weight; pass weights= where they are made, such as all ones")
        self._tree.update(index, priorities)

    def share(self, rank: int, world_size: int) -> None:
        """Takes the share of one of several processes; together they have the whole. Raises InvalidOption."""
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
        state: dict[str, Any] = {"number": self._number, "epoch": self._epoch, "seed": self._seed, "items": self.items}
        return state if self._tree is None else {**state, "weights": self._tree.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises InvalidOption if it is of another order."""
        if (state.get("seed"), state.get("items")) != (self._seed, self.items):
            raise InvalidOption("this state is of batches with another seed, or of other episodes")
        self._number, self._epoch = int(state["number"]), int(state["epoch"])
        if self._tree is not None and "weights" in state:
            self._tree = SumTree(np.asarray(state["weights"]))
