"""Windows: consecutive steps of an episode, with the observation before them."""

from __future__ import annotations

import numpy as np

from gym_trace.model.values import Array
from gym_trace.sampling.draw import Stretch, uniform
from gym_trace.sampling.draws import Batch, Draws, Found, Stretches, padded
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
        self._views = Stretches()
        self._ends = np.cumsum(counts)
        self._stretch = Stretch(self._ends)
        self._begins = self._ends - counts
        self._episodes = np.flatnonzero(counts) if sampling == "episodes" else None
        items = int(counts.sum()) if self._episodes is None else len(self._episodes)
        super().__init__(rows, items, seed)

    def find(self, items: Array, places: Array) -> Found:
        piece, start = self.located(items, places)
        end = np.minimum(start + self._length, self.rows.whole[piece])
        start = np.maximum(start, 0)
        return self.placed(piece, start - self.rows.offset[piece], end - start, places)

    def placed(self, piece: Array, start: Array, counts: Array, places: Array) -> Found:
        """Do the work of find() for given windows; start counts from the first step that is here."""
        rows = self.rows
        found = {"at": rows.steps[piece] + start, "seen": rows.seen[piece] + start, "counts": counts, "place": places}
        if rows.known is not None:  # how many of the observations that the steps led to are
            found["known"] = counts - (~rows.known[piece] & (start + counts == rows.lengths[piece]))
        return found | {"episode": rows.episode[piece], "first_step": start + rows.offset[piece] + rows.begin[piece]}

    def located(self, items: Array, places: Array) -> tuple[Array, Array]:
        if self._episodes is None:
            piece = self._stretch.find(items)
            chosen = items - self._begins[piece]
        else:
            piece = self._episodes[items]
            count = self._ends[piece] - self._begins[piece]
            chosen = np.minimum((uniform(~self.seed, places) * count).astype(np.int64), count - 1)
        return piece, self._lowest + (self._number[piece] + chosen) * self._stride

    def gather(self, found: Found) -> Batch:
        at, seen, counts = found["at"], found["seen"], found["counts"]
        length = self._longest(counts)
        whole = bool((counts == length).all())

        def steps(array: Array) -> Array:
            return self._views.get(array, length)[at] if whole else padded(array, at, counts, length)

        def observations(array: Array) -> Array:
            if whole:
                return self._views.get(array, length + 1)[seen]
            return padded(array, seen, counts + 1, length + 1)

        batch: Batch = {}
        self._nested(batch, "observations", observations)
        self._nested(batch, "actions", steps)
        columns = self.rows.columns
        batch |= {root: steps(columns[root,]) for root in _STEP_ROOTS if (root,) in columns}
        batch |= self._noted(steps)
        batch |= {name: found[name].copy() for name in ("episode", "first_step")}
        mask = np.ones((len(at), length), np.bool_) if whole else np.arange(length) < counts[:, None]
        if "known" in found:
            batch["next_observation_mask"] = np.arange(length) < found["known"][:, None]
        return batch | {"mask": mask}

    def _longest(self, counts: Array) -> int:
        return self._length


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

    def find(self, items: Array, places: Array) -> Found:
        assert self._episodes is not None
        piece = self._episodes[items]
        return self.placed(piece, np.zeros_like(piece), self.rows.lengths[piece], places)

    def _longest(self, counts: Array) -> int:
        return int(counts.max())
