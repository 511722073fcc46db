"""What all kinds of batches have in common: an order, a place in it, and shares of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from gym_trace.errors import InvalidOption
from gym_trace.model.layout import put_together
from gym_trace.model.values import Array
from gym_trace.sampling.draw import drawn, permuted
from gym_trace.sampling.rows import Rows

Batch = dict[str, Any]


class Batches:
    """An iterator over batches. What comes is a function of the seed and of the place, whatever came before.

    With replacement it never ends; without, it ends after each of the items once, and the next loop is another epoch,
    in another order. ``len()`` is the batches of an epoch.

    Attributes:
        items: how many there are to be drawn.
        batch_size: of them in a batch; the last one of an epoch may have fewer.
    """

    def __init__(self, rows: Rows, items: int, batch_size: int, seed: int, replacement: bool):
        if not isinstance(batch_size, int) or batch_size < 1:
            raise InvalidOption(f"batch_size={batch_size!r}: pass a number of at least 1")
        if not items:
            raise InvalidOption("there is nothing to be drawn: no episode is long enough")
        self.rows = rows
        self.items, self.batch_size = items, batch_size
        self._seed, self._replacement = seed, replacement
        self._batch, self._epoch = 0, 0
        self._rank, self._world_size = 0, 1

    def __len__(self) -> int:
        return -(-self.items // self.batch_size)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Batch:
        number = self._batch * self._world_size + self._rank
        if not self._replacement and number >= len(self):
            self._batch, self._epoch = 0, self._epoch + 1
            raise StopIteration
        self._batch += 1
        return self.at(number, self._epoch)

    def at(self, number: int, epoch: int = 0) -> Batch:
        """The batch of this number of an epoch."""
        begin = number * self.batch_size
        end = begin + self.batch_size if self._replacement else min(begin + self.batch_size, self.items)
        return self.of(self._drawn(np.arange(begin, end), epoch), np.arange(begin, end))

    def of(self, items: Array, places: Array) -> Batch:
        """The batch of these items, each in [0, items). places: in the order, of which chance may be made."""
        raise NotImplementedError

    def _drawn(self, places: Array, epoch: int) -> Array:
        if self._replacement:
            return drawn(self._seed, places, self.items)
        return permuted(self._seed * 1_000_003 + epoch, places, self.items)

    def share(self, rank: int, world_size: int) -> None:
        """Takes every world_size-th batch, from the rank-th on: shares of all ranks together are the whole order.

        Raises InvalidOption.
        """
        if not 0 <= rank < world_size:
            raise InvalidOption(f"rank={rank}, world_size={world_size}: pass a rank of 0 to world_size - 1")
        self._rank, self._world_size = rank, world_size

    def state_dict(self) -> dict[str, int]:
        """Where it is, from which load_state_dict() goes on exactly."""
        return {"batch": self._batch, "epoch": self._epoch, "seed": self._seed, "items": self.items}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Raises InvalidOption if it is of another order."""
        if (state.get("seed"), state.get("items")) != (self._seed, self.items):
            raise InvalidOption("this state is of batches with another seed, or of another trace")
        self._batch, self._epoch = int(state["batch"]), int(state["epoch"])

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _trees(self, root: str, gather: Any) -> Any:
        """The leaves under a root, each gathered, with the structure of its space."""
        layout = self.rows.layouts.observations if root == "observations" else self.rows.layouts.actions
        return put_together(layout, [gather(self.rows.columns[leaf.path]) for leaf in layout.leaves()])

    def _has(self, root: str) -> bool:
        return any(path[0] == root for path in self.rows.columns)

    def _noted(self, gather: Any) -> Batch:
        """Annotations and infos, where they are there."""
        columns = self.rows.columns
        notes = {str(path[1]): gather(array) for path, array in columns.items() if path[0] == "annotations"}
        found: Batch = {"annotations": notes} if notes else {}
        if ("infos",) in columns:
            found["infos"] = gather(columns["infos",])
        return found


def stretches(array: Array, starts: Array, length: int) -> Array:
    """(n, length, …): so many rows from each of the starts on."""
    view = np.lib.stride_tricks.as_strided(
        array, (max(0, len(array) - length + 1), length, *array.shape[1:]), (array.strides[0], *array.strides)
    )
    return view[starts]


def padded(array: Array, starts: Array, counts: Array, length: int) -> Array:
    """The same with only the first counts rows of each; behind them zeros, or None."""
    steps = np.arange(length)
    taken = array[starts[:, None] + np.minimum(steps, np.maximum(counts, 1)[:, None] - 1)] if len(array) else None
    if taken is None:
        taken = np.zeros((len(starts), length, *array.shape[1:]), array.dtype)
    taken[steps >= counts[:, None]] = None if array.dtype == object else np.zeros((), array.dtype)
    return taken
