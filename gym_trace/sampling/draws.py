"""What all kinds of batches have in common: which items there are, and how rows are gathered."""

from __future__ import annotations

from typing import Any

import numpy as np

from gym_trace.errors import InvalidOption
from gym_trace.model.layout import put_together
from gym_trace.model.values import Array
from gym_trace.sampling.draw import SumTree, drawn, permuted, uniform
from gym_trace.sampling.rows import Rows

Batch = dict[str, Any]


class Draws:
    """Batches of the rows of some stretches of a trace: whichever is asked for, as a function of the seed.

    Attributes:
        items: how many there are to be drawn.
    """

    def __init__(self, rows: Rows, items: int, seed: int):
        self.rows, self.items, self.seed = rows, items, seed

    def batch(self, begin: int, end: int, replacement: bool, epoch: int, tree: SumTree | None = None) -> Batch:
        """The items at these places of the order of an epoch. tree: to draw by weight."""
        places = np.arange(begin, end)
        if tree is not None:
            items = tree.find(uniform(self.seed, places))
            chance = tree.of(items) / tree.total
            return self.of(items, places) | {"index": items, "weight": 1 / (self.items * chance)}
        if replacement:
            return self.of(drawn(self.seed, places, self.items), places)
        return self.of(permuted(self.seed * 1_000_003 + epoch, places, self.items), places)

    def of(self, items: Array, places: Array) -> Batch:
        """The batch of these items, each in [0, items). places: in the order, of which chance may be made."""
        raise NotImplementedError

    def located(self, items: Array, places: Array) -> tuple[Array, Array]:
        """Of each item the piece that it is in, and its first step, in the episode."""
        raise NotImplementedError

    def weights(self, given: Array, steps: Array) -> Array:
        """(items,) float64 of what was given for each episode, each step, or each item. steps: of each episode of the
        trace. Raises InvalidOption."""
        given, rows = np.asarray(given, np.float64), self.rows
        everything = np.arange(self.items)
        piece, step = self.located(everything, everything)
        episode, first = rows.episode[piece], np.cumsum(steps) - steps
        forms = {len(steps): episode, int(steps.sum()): first[episode] + rows.begin[piece] + np.maximum(step, 0)}
        forms[self.items] = forms.get(self.items, everything)
        if given.ndim != 1 or len(given) not in forms:
            told = f"{len(steps)} episodes, {steps.sum()} steps, or {self.items} items"
            raise InvalidOption(f"weights of the shape {given.shape}: pass one for each of {told}")
        weights: Array = given[forms[len(given)]]
        return weights

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


def joined(batches: list[Batch]) -> Batch:
    """Several batches as one; of whole episodes padded to the longest."""
    if len(batches) == 1:
        return batches[0]
    return {name: _joined([batch[name] for batch in batches]) for name in batches[0]}


def _joined(trees: list[Any]) -> Any:
    first = trees[0]
    if isinstance(first, dict):
        return {key: _joined([tree[key] for tree in trees]) for key in first}
    if isinstance(first, tuple):
        return tuple(_joined(list(parts)) for parts in zip(*trees))
    longest = max(tree.shape[1] if tree.ndim > 1 else 0 for tree in trees)
    return np.concatenate([_lengthened(tree, longest) for tree in trees])


def _lengthened(array: Array, length: int) -> Array:
    if array.ndim < 2 or array.shape[1] == length:
        return array
    fill = None if array.dtype == object else np.zeros((), array.dtype)
    longer = np.full((len(array), length, *array.shape[2:]), fill, array.dtype)
    longer[:, : array.shape[1]] = array
    return longer
