"""Base of all kinds of batches: the items, and how their rows are gathered."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gym_trace.errors import InvalidOption
from gym_trace.model.layout import put_together
from gym_trace.model.values import Array
from gym_trace.sampling.draw import SumTree, drawn, permuted, uniform
from gym_trace.sampling.rows import Rows

Batch = dict[str, Any]
Found = dict[str, Array]
_AHEAD = 1 << 12  # items that are looked up at a time: a call of NumPy costs more than what it does for some hundred


class _Ahead(NamedTuple):
    """Batches looked up in advance: each has `size` items, at positions that are `apart`."""

    order: int | None
    begin: int
    apart: int
    size: int
    found: Found

    def at(self, order: int | None, begin: int, count: int) -> Found | None:
        """One of them."""
        number, rest = divmod(begin - self.begin, self.apart)
        first = number * self.size
        if order != self.order or number < 0 or rest or count > self.size or first >= len(self.found["place"]):
            return None
        return {name: array[first : first + count] for name, array in self.found.items()}


class Draws:
    """Batches of the rows of some stretches of a trace: whichever is asked for, as a function of the seed.

    Attributes:
        items: number of items to sample from.
    """

    def __init__(self, rows: Rows, items: int, seed: int):
        self.rows, self.items, self.seed = rows, items, seed
        self._ahead: _Ahead | None = None
        self._expected: tuple[int | None, int] = None, -1
        layouts = {"observations": rows.layouts.observations, "actions": rows.layouts.actions}
        paths = {root: [leaf.path for leaf in layout.leaves()] for root, layout in layouts.items()}
        self._trees = {
            root: (layout, [rows.columns[path] for path in paths[root]])
            for root, layout in layouts.items()
            if any(path[0] == root for path in rows.columns)
        }

    def batch(
        self, begin: int, end: int, replacement: bool, epoch: int, tree: SumTree | None = None, apart: int | None = None
    ) -> Batch:
        """The items at these places of the order of an epoch.

        tree: to draw by weight. apart: how far the batch that is asked for next begins behind this one; None: at its
        end.
        """
        if tree is not None:
            places = np.arange(begin, end)
            items = tree.find(uniform(self.seed, places))
            chance = tree.of(items) / tree.total
            return self.of(items, places) | {"index": items, "weight": 1 / (self.items * chance)}
        order, size, apart = None if replacement else epoch, end - begin, apart or end - begin
        found = self._ahead and self._ahead.at(order, begin, size)
        if not found:
            # Look up an unexpected batch alone; from the second in sequence on, many at a time.
            batches = max(1, _AHEAD // size) if self._expected == (order, begin) else 1
            places = (np.arange(begin, begin + batches * apart, apart)[:, None] + np.arange(size)).ravel()
            self._ahead = _Ahead(order, begin, apart, size, self.find(self._ordered(places, order), places))
            found = self._ahead.at(order, begin, size)
            assert found is not None
        self._expected = order, begin + apart
        return self.gather(found)

    def _ordered(self, places: Array, epoch: int | None) -> Array:
        """The items at these places, of which those behind the last one are any; epoch None: drawn with replacement."""
        if epoch is None:
            return drawn(self.seed, places, self.items)
        return permuted(self.seed * 1_000_003 + epoch, np.minimum(places, self.items - 1), self.items)

    def of(self, items: Array, places: Array) -> Batch:
        """The batch of these items, each in [0, items). places: in the order, of which chance may be made."""
        return self.gather(self.find(items, places))

    def find(self, items: Array, places: Array) -> Found:
        """Return where the rows of these items are, as arrays with one element per item; one of them is "place"."""
        raise NotImplementedError

    def gather(self, found: Found) -> Batch:
        """The batch of what was found."""
        raise NotImplementedError

    def located(self, items: Array, places: Array) -> tuple[Array, Array]:
        """Return the piece of each item, and the first step of the item in the episode."""
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

    def _nested(self, batch: Batch, name: str, gather: Any, root: str | None = None) -> None:
        """Puts the leaves under a root into a batch, each gathered, with the structure of its space; if they are there.

        root: None: it is called as the name is.
        """
        if tree := self._trees.get(root or name):
            layout, arrays = tree
            batch[name] = put_together(layout, [gather(array) for array in arrays])

    def _noted(self, gather: Any) -> Batch:
        """Annotations and infos, where they are there."""
        columns = self.rows.columns
        notes = {str(path[1]): gather(array) for path, array in columns.items() if path[0] == "annotations"}
        found: Batch = {"annotations": notes} if notes else {}
        if ("infos",) in columns:
            found["infos"] = gather(columns["infos",])
        return found


class Stretches:
    """Views of arrays whose row i has the rows from i on, `length` of them; made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], Array] = {}

    def get(self, array: Array, length: int) -> Array:
        """(rows - length + 1, length, …). array: one that stays."""
        key = id(array), length
        if key not in self._made:
            shape = max(0, len(array) - length + 1), length, *array.shape[1:]
            self._made[key] = np.lib.stride_tricks.as_strided(array, shape, (array.strides[0], *array.strides))
        return self._made[key]


def padded(array: Array, starts: Array, counts: Array, length: int) -> Array:
    """Gather `length` rows from each start; only the first counts rows are real, the others zeros, or None."""
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
