"""Windows: so many steps of an episode one after the other, with the observation before them."""

from __future__ import annotations

import numpy as np

from gym_trace.model.values import Array
from gym_trace.sampling.draw import uniform
from gym_trace.sampling.draws import Batch, Draws, padded, stretches
from gym_trace.sampling.rows import Rows

_STEP_ROOTS = ("rewards", "terminations", "truncations")


class Windows(Draws):
    """Batches of windows: see Trace.windows()."""

    def __init__(
        self,
        rows: Rows,
        seed: int,
        *,
        length: int,
        strict_length: bool,
        span: tuple[bool, bool],
        stride: int,
        sampling: str,
    ):
        # Windows of an episode have numbers: window j begins at step lowest + j * stride.
        self._lowest = -(length - 1) if span[0] else 0
        highest = rows.whole - 1 if span[1] else np.maximum(rows.whole - length, 0)
        from_, until = rows.own.T + rows.offset
        from_ = np.where(from_ > 0, from_, self._lowest)
        self._number = -(-(from_ - self._lowest) // stride)  # of the first that begins here
        counts = np.maximum((np.minimum(until - 1, highest) - self._lowest) // stride + 1 - self._number, 0)
        if strict_length and not any(span):
            counts[rows.whole < length] = 0
        counts[rows.whole == 0] = 0
        self._length, self._stride = length, stride
        self._ends = np.cumsum(counts)
        self._begins = self._ends - counts
        self._episodes = np.flatnonzero(counts) if sampling == "episodes" else None
        items = int(counts.sum()) if self._episodes is None else len(self._episodes)
        super().__init__(rows, items, seed)

    def of(self, items: Array, places: Array) -> Batch:
        piece, start = self.located(items, places)
        rows = self.rows
        end = np.minimum(start + self._length, rows.whole[piece])
        start = np.maximum(start, 0)
        return self.cut(piece, start - rows.offset[piece], end - start)

    def located(self, items: Array, places: Array) -> tuple[Array, Array]:
        if self._episodes is None:
            piece = np.searchsorted(self._ends, items, side="right")
            chosen = items - self._begins[piece]
        else:
            piece = self._episodes[items]
            count = self._ends[piece] - self._begins[piece]
            chosen = np.minimum((uniform(~self.seed, places) * count).astype(np.int64), count - 1)
        return piece, self._lowest + (self._number[piece] + chosen) * self._stride

    def cut(self, piece: Array, start: Array, counts: Array) -> Batch:
        """The batch of windows that are given: (n,) int64 each, start counted from the first step that is here."""
        rows = self.rows
        at, seen = rows.steps[piece] + start, rows.seen[piece] + start
        length = self._length
        whole = bool((counts == length).all())

        def steps(array: Array) -> Array:
            return stretches(array, at, length) if whole else padded(array, at, counts, length)

        def observations(array: Array) -> Array:
            return stretches(array, seen, length + 1) if whole else padded(array, seen, counts + 1, length + 1)

        batch: Batch = {}
        if self._has("observations"):
            batch["observations"] = self._trees("observations", observations)
        if self._has("actions"):
            batch["actions"] = self._trees("actions", steps)
        columns = rows.columns
        batch |= {root: steps(columns[root,]) for root in _STEP_ROOTS if (root,) in columns}
        batch |= self._noted(steps)
        of = {"episode": rows.episode[piece], "first_step": start + rows.offset[piece] + rows.begin[piece]}
        return batch | of | {"mask": np.arange(length) < counts[:, None]}


class Trajectories(Windows):
    """Batches of whole episodes, padded to the longest of the batch: see Trace.trajectories()."""

    def __init__(self, rows: Rows, seed: int):
        super().__init__(
            rows,
            seed,
            length=max(1, int(rows.whole.max(initial=1))),
            strict_length=False,
            span=(False, False),
            stride=1,
            sampling="episodes",
        )

    def of(self, items: Array, places: Array) -> Batch:
        assert self._episodes is not None
        piece = self._episodes[items]
        counts = self.rows.lengths[piece]
        self._length = int(counts.max())
        return self.cut(piece, np.zeros_like(piece), counts)
