"""Items of batches: windows, transitions and whole episodes. Find their rows, and gather them."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.layout import Branch, Layout, Path, put_together
from gym_trace.data.trees import mapped
from gym_trace.data.values import Array
from gym_trace.errors import InvalidOption
from gym_trace.playback.sampling.permutation import Stretch, SumTree, drawn, permuted, uniform
from gym_trace.playback.sampling.rows import DecodedRows

Batch = dict[str, Any]
Found = dict[str, Array]
Gather = Callable[[Array], Any]
ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
_AHEAD = 1 << 12  # items per lookup: below this, the overhead of calls dominates
_STRATEGIES = ("future", "final", "random")
_CHOICE, _GOAL = 0x1D, 0x2E  # change the seed, so that the random numbers of Hindsight are independent


class _Ahead(NamedTuple):
    """Batches looked up in advance. Each has `size` items; the distance between their positions is `apart`."""

    order: int | None
    begin: int
    apart: int
    size: int
    found: Found

    def at(self, order: int | None, begin: int, count: int) -> Found | None:
        """Return the batch that begins at this position; None if it was not looked up."""
        number, rest = divmod(begin - self.begin, self.apart)
        first = number * self.size
        if order != self.order or number < 0 or rest or count > self.size or first >= len(self.found["position"]):
            return None
        return {name: array[first : first + count] for name, array in self.found.items()}


class Items:
    """The items of some rows, in an order that is a function of the seed: a batch at any position can be computed.

    Attributes:
        items: number of items to sample from.
    """

    def __init__(self, rows: DecodedRows, items: int, seed: int):
        self.items, self.seed = items, seed
        self._ahead: _Ahead | None = None
        self._expected: tuple[int | None, int] = None, -1
        self._set_rows(rows)

    def _set_rows(self, rows: DecodedRows) -> None:
        self.rows = rows
        self._nested = {}
        for root, layout in (("observations", rows.layouts.observations), ("actions", rows.layouts.actions)):
            if any(path[0] == root for path in rows.columns):
                self._nested[root] = layout, [rows.columns[leaf.path] for leaf in layout.leaves()]

    def with_columns(self, columns: dict[Path, Any]) -> Items:
        """Return these items with the same rows in other columns, such as on a device."""
        changed = copy(self)
        changed._set_rows(self.rows._replace(columns=columns))
        return changed

    def batch(
        self, begin: int, end: int, replacement: bool, epoch: int, tree: SumTree | None = None, apart: int | None = None
    ) -> Batch:
        """Return the items at these positions in the order of an epoch.

        tree: sample by these weights. apart: distance to the batch that will be asked for next; None: its length.
        """
        if tree is not None:
            items, positions, more = self.chosen(begin, end, replacement, epoch, tree)
            return self.of(items, positions) | more
        order, size, apart = None if replacement else epoch, end - begin, apart or end - begin
        found = self._ahead and self._ahead.at(order, begin, size)
        if not found:
            # Look up an unexpected batch alone; from the second in sequence on, many at a time.
            batches = max(1, _AHEAD // size) if self._expected == (order, begin) else 1
            positions = (np.arange(begin, begin + batches * apart, apart)[:, None] + np.arange(size)).ravel()
            items = self._items_at(positions, replacement, epoch)
            self._ahead = _Ahead(order, begin, apart, size, self.find(items, positions))
            found = self._ahead.at(order, begin, size)
            assert found is not None
        self._expected = order, begin + apart
        return self.gather(found)

    def _items_at(self, positions: Array, replacement: bool, epoch: int) -> Array:
        """Return the items at positions in the order of an epoch; after the last one, any item."""
        if replacement:
            return drawn(self.seed, positions, self.items)
        return permuted(self.seed * 1_000_003 + epoch, np.minimum(positions, self.items - 1), self.items)

    def chosen(
        self, begin: int, end: int, replacement: bool, epoch: int, tree: SumTree | None
    ) -> tuple[Array, Array, Batch]:
        """Return the items of batch() and their positions, and what else the batch has."""
        positions = np.arange(begin, end)
        if tree is None:
            return self._items_at(positions, replacement, epoch), positions, {}
        items = tree.find(uniform(self.seed, positions))
        chance = tree.of(items) / tree.total
        return items, positions, {"index": items, "weight": 1 / (self.items * chance)}

    def of(self, items: Array, positions: Array) -> Batch:
        """Return the batch of these items, each in [0, items). positions: positions, which seed random choices."""
        return self.gather(self.find(items, positions))

    def find(self, items: Array, positions: Array) -> Found:
        """Return where the rows of these items are, as arrays with one element per item; one of them is "position"."""
        raise NotImplementedError

    def gather(self, found: Found) -> Batch:
        raise NotImplementedError

    def located(self, items: Array, positions: Array) -> tuple[Array, Array]:
        """Return the slice of each item, and the first step of the item in the episode."""
        raise NotImplementedError

    def weights(self, given: Array, steps: Array) -> Array:
        """Return (items,) float64 weights from one weight per episode, per step, or per item.

        steps: number of steps of each episode of the trace. Raises InvalidOption.
        """
        given, rows = np.asarray(given, np.float64), self.rows
        everything = np.arange(self.items)
        piece, step = self.located(everything, everything)
        episode, first = rows.episode[piece], np.cumsum(steps) - steps
        indices = {
            len(steps): episode,
            int(steps.sum()): first[episode] + rows.begin[piece] + np.maximum(step, 0),
        }
        indices[self.items] = indices.get(self.items, everything)
        if given.ndim != 1 or len(given) not in indices:
            known = f"{len(steps)} episodes, {steps.sum()} steps, or {self.items} items"
            raise InvalidOption(f"weights: invalid shape {given.shape}; pass one for each of {known}")
        weights: Array = given[indices[len(given)]]
        return weights

    def gathered(self, steps: Gather, **others: Gather) -> Batch:
        """Return all columns. others: functions for columns that are not gathered like steps, by name."""
        batch: Batch = {}
        columns = self.rows.columns
        for name in ("observations", "next_observations", "actions", "rewards", "terminations", "truncations"):
            root, gather = name.removeprefix("next_"), others.get(name, steps)
            if root in self._nested and (root == name or name in others):
                layout, arrays = self._nested[root]
                batch[name] = put_together(layout, [gather(array) for array in arrays])
            elif (name,) in columns:
                batch[name] = gather(columns[name,])
        if annotations := {path[1]: steps(array) for path, array in columns.items() if path[0] == "annotations"}:
            batch["annotations"] = annotations
        if ("infos",) in columns:
            batch["infos"] = steps(columns["infos",])
        return batch


# -- windows ----------------------------------------------------------------------------------------------------------


class Windows(Items):
    """Consecutive steps of an episode, with the observation before them: see Trace.windows()."""

    def __init__(
        self,
        rows: DecodedRows,
        seed: int,
        *,
        length: int,
        strict_length: bool,
        span: tuple[bool, bool],
        stride: int,
        sampling: str,
    ):
        # Windows of an episode have numbers: window j begins at step lowest + j * stride.
        self._lowest = np.where(rows.repeated > 0, rows.repeated, -(length - 1) if span[0] else 0)
        highest = rows.whole - 1 if span[1] else np.maximum(rows.whole - length, rows.repeated)
        from_, until = rows.own.T + rows.offset
        from_ = np.where(from_ > 0, from_, self._lowest)
        self._number = -(-(from_ - self._lowest) // stride)  # number of the first window that begins here
        counts = np.maximum((np.minimum(until - 1, highest) - self._lowest) // stride + 1 - self._number, 0)
        if strict_length and not any(span):
            counts[rows.whole - rows.repeated < length] = 0
        counts[rows.whole == rows.repeated] = 0
        self._length, self._stride = length, stride
        self._views: dict[tuple[int, int], Array] = {}  # by id of an array that is never freed, and length
        self._ends = np.cumsum(counts)
        self._stretch = Stretch(self._ends)
        self._begins = self._ends - counts
        self._episodes = np.flatnonzero(counts) if sampling == "episodes" else None
        items = int(counts.sum()) if self._episodes is None else len(self._episodes)
        super().__init__(rows, items, seed)

    def find(self, items: Array, positions: Array) -> Found:
        piece, start = self.located(items, positions)
        end = np.minimum(start + self._length, self.rows.whole[piece])
        start = np.maximum(start, 0)
        return self._located_rows(piece, start - self.rows.offset[piece], end - start, positions)

    def _located_rows(self, piece: Array, start: Array, counts: Array, positions: Array) -> Found:
        """Return find() of these windows. start: counted from the first decoded step."""
        rows = self.rows
        found = {"at": rows.steps[piece] + start, "seen": rows.seen[piece] + start}
        found |= {"counts": counts, "position": positions}
        if rows.known is not None:  # number of steps that led to a known observation
            found["known"] = counts - (~rows.known[piece] & (start + counts == rows.lengths[piece]))
        return found | {"episode": rows.episode[piece], "first_step": start + rows.offset[piece] + rows.begin[piece]}

    def located(self, items: Array, positions: Array) -> tuple[Array, Array]:
        if self._episodes is None:
            piece = self._stretch.find(items)
            chosen = items - self._begins[piece]
        else:
            piece = self._episodes[items]
            count = self._ends[piece] - self._begins[piece]
            chosen = np.minimum((uniform(~self.seed, positions) * count).astype(np.int64), count - 1)
        return piece, self._lowest[piece] + (self._number[piece] + chosen) * self._stride

    def gather(self, found: Found) -> Batch:
        at, seen, counts = found["at"], found["seen"], found["counts"]
        length = self._longest(counts)
        whole = bool((counts == length).all())

        def gathered(array: Any, starts: Array, extra: int) -> Any:
            if not whole:
                return _padded(array, starts, counts + extra, length + extra)
            if isinstance(array, np.ndarray):
                return self._view(array, length + extra)[starts]
            return array.take(starts[:, None] + np.arange(length + extra))

        def steps(array: Any) -> Any:
            return gathered(array, at, 0)

        def observations(array: Any) -> Any:
            return gathered(array, seen, 1)

        batch = self.gathered(steps, observations=observations)
        batch |= {name: found[name].copy() for name in ("episode", "first_step")}
        mask = np.ones((len(at), length), np.bool_) if whole else np.arange(length) < counts[:, None]
        if "known" in found:
            batch["next_observation_mask"] = np.arange(length) < found["known"][:, None]
        return batch | {"mask": mask}

    def _longest(self, counts: Array) -> int:
        return self._length

    def _view(self, array: Array, length: int) -> Array:
        """Return a view whose row i has the rows of the array from i on, (rows - length + 1, length, …); made once."""
        key = id(array), length
        if key not in self._views:
            shape = max(0, len(array) - length + 1), length, *array.shape[1:]
            self._views[key] = np.lib.stride_tricks.as_strided(array, shape, (array.strides[0], *array.strides))
        return self._views[key]


class Trajectories(Windows):
    """Whole episodes, padded to the longest of the batch: see Trace.trajectories()."""

    def __init__(self, rows: DecodedRows, seed: int):
        longest, whole = max(1, int(rows.whole.max(initial=1))), (False, False)
        super().__init__(rows, seed, length=longest, strict_length=False, span=whole, stride=1, sampling="episodes")

    def find(self, items: Array, positions: Array) -> Found:
        assert self._episodes is not None
        piece = self._episodes[items]
        start = self.rows.own[piece, 0]
        return self._located_rows(piece, start, self.rows.lengths[piece] - start, positions)

    def _longest(self, counts: Array) -> int:
        return int(counts.max())


def _padded(array: Any, starts: Array, counts: Array, length: int) -> Any:
    """Gather `length` rows from each start; only the first counts rows are real, the others zeros, or None."""
    steps = np.arange(length)
    padding = steps >= counts[:, None]
    index = starts[:, None] + np.minimum(steps, np.maximum(counts, 1)[:, None] - 1)
    if not isinstance(array, np.ndarray):  # on a device
        return array.take(index, padding=padding)
    gathered = array[index] if len(array) else np.zeros((len(starts), length, *array.shape[1:]), array.dtype)
    gathered[padding] = None if array.dtype == object else np.zeros((), array.dtype)
    return gathered


def joined(batches: list[Batch]) -> Batch:
    """Join batches into one; whole episodes are padded to the longest."""
    found: Batch = batches[0] if len(batches) == 1 else mapped(_joined, *batches)
    return found


def _joined(*arrays: Array) -> Array:
    longest = max(array.shape[1] if array.ndim > 1 else 0 for array in arrays)
    return np.concatenate([_lengthened(array, longest) for array in arrays])


def _lengthened(array: Array, length: int) -> Array:
    if array.ndim < 2 or array.shape[1] == length:
        return array
    fill = None if array.dtype == object else np.zeros((), array.dtype)
    longer = np.full((len(array), length, *array.shape[2:]), fill, array.dtype)
    longer[:, : array.shape[1]] = array
    return longer


# -- transitions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hindsight:
    """Hindsight experience replay (Andrychowicz et al., 2017): replace desired goals with reached ones, in environments
    whose observations are dicts with achieved_goal and desired_goal.

    Attributes:
        strategy: source of the goal: a later observation of the episode ("future"), its last one ("final"),
            or any observation ("random").
        reward_fn: ``reward_fn(achieved_goal, desired_goal, infos)`` with arrays of n rows, achieved_goal is that of
            the next observation; returns (n,) rewards. infos: (n,) dicts if they are among the columns, otherwise None.
            Example: ``env.unwrapped.compute_reward`` of Gymnasium-Robotics.
        ratio: share of the transitions that get another goal; the others stay as recorded.

    Examples:
        >>> def reward(achieved, desired, infos):
        ...     return -np.linalg.norm(achieved - desired, axis=-1)
        >>> goals = gym_trace.Hindsight("future", reward, ratio=0.5)  # trace.transitions(256, goals=goals)
        >>> goals.strategy
        'future'
    """

    strategy: str
    reward_fn: Callable[[Any, Any, Any], Any]
    ratio: float = 0.8

    def __post_init__(self) -> None:
        if self.strategy not in _STRATEGIES:
            raise InvalidOption(f"strategy={self.strategy!r}: pass one of {', '.join(_STRATEGIES)}")
        if not 0 <= self.ratio <= 1:
            raise InvalidOption(f"ratio={self.ratio!r}: pass a number from 0 to 1")

    def check(self, layout: Layout) -> None:
        """Raise InvalidOption unless observations have goals."""
        if not isinstance(layout, Branch) or layout.keys is None or not {ACHIEVED, DESIRED} <= set(layout.keys):
            raise InvalidOption(f"goals: observations of this trace are not dicts with {ACHIEVED} and {DESIRED}")

    def relabel(self, batch: Batch, rows: DecodedRows, found: Found, seed: int) -> None:
        """Give some transitions of a batch other goals and rewards, in place."""
        piece, positions = found["piece"], found["position"]
        step = found["at"] - rows.steps[piece]
        chosen = np.flatnonzero(uniform(seed ^ _CHOICE, positions) < self.ratio)
        chance = uniform(seed ^ _GOAL, positions)[chosen]
        piece, step = piece[chosen], step[chosen]
        array = rows.columns["observations", ACHIEVED]
        last = rows.lengths[piece]
        if self.strategy == "random":
            at = np.minimum((chance * len(array)).astype(np.int64), len(array) - 1)
        elif self.strategy == "final":
            at = rows.seen[piece] + last
        else:
            at = rows.seen[piece] + step + 1 + np.minimum((chance * (last - step)).astype(np.int64), last - step - 1)
        goals = array[at]
        for name in ("observations", "next_observations"):
            batch[name][DESIRED][chosen] = goals
        infos = batch["infos"][chosen] if "infos" in batch else None
        rewards = np.array(batch["rewards"])
        rewards[chosen] = self.reward_fn(batch["next_observations"][ACHIEVED][chosen], goals, infos)
        batch["rewards"] = rewards


class Transitions(Items):
    """Single steps, or n joined into one, with the observations before and after: see Trace.transitions()."""

    def __init__(
        self, rows: DecodedRows, seed: int, *, n_steps: int, gamma: float, n_frames: int, goals: Hindsight | None = None
    ):
        high = rows.own[:, 1]
        if goals is not None and rows.known is not None:  # the goal reached by a last step may be unknown
            high = np.minimum(high, rows.lengths - ~rows.known)
        counts = np.maximum(high - rows.own[:, 0], 0)
        ends = np.cumsum(counts)
        self._stretch = Stretch(ends)
        item = rows.own[:, 0] - ends + counts
        # For each piece, what to add to an item to get its step, the row of that, the row before it, and first_step.
        self._shifts = np.stack(
            [item + rows.offset, item + rows.steps, item + rows.seen, item + rows.offset + rows.begin], axis=1
        )
        super().__init__(rows, int(counts.sum()), seed)
        self._n_steps, self._n_frames, self._goals = n_steps, n_frames, goals
        self._discounts = np.float64(gamma) ** np.arange(n_steps + 1)

    def find(self, items: Array, positions: Array) -> Found:
        rows = self.rows
        piece = self._stretch.find(items)
        shifts = self._shifts.take(piece, axis=0)
        at, seen, first = items + shifts[:, 1], items + shifts[:, 2], items + shifts[:, 3]
        ahead = self._ahead_of(at, piece)

        def frames(seen: Array) -> Array:
            if self._n_frames == 1:
                return seen
            back = np.arange(self._n_frames - 1, -1, -1)
            stacked: Array = np.maximum(seen[:, None] - back, rows.seen[piece][:, None])
            return stacked

        last = at if self._n_steps == 1 else at + ahead - 1
        found = {"piece": piece, "position": positions, "at": at, "ahead": ahead, "last": last}
        found |= {"observations": frames(seen), "next_observations": frames(seen + ahead)}
        if rows.known is not None:
            found["known"] = rows.known[piece] | (last - rows.steps[piece] != rows.lengths[piece] - 1)
        return found | {"discount": self._discounts[ahead], "episode": rows.episode[piece], "first_step": first}

    def gather(self, found: Found) -> Batch:
        def rows_at(name: str) -> Gather:
            return lambda array: array.take(found[name], axis=0)

        batch = self.gathered(
            rows_at("at"),
            observations=rows_at("observations"),
            next_observations=rows_at("next_observations"),
            rewards=lambda array: self._rewards(array, found["at"], found["ahead"]),
            terminations=rows_at("last"),
            truncations=rows_at("last"),
        )
        if "known" in found:
            batch["next_observation_mask"] = found["known"].copy()
        if self._goals is not None:
            self._goals.relabel(batch, self.rows, found, self.seed)
        return batch | {name: found[name].copy() for name in ("discount", "episode", "first_step")}

    def located(self, items: Array, positions: Array) -> tuple[Array, Array]:
        piece = self._stretch.find(items)
        return piece, items + self._shifts[piece, 0]

    def _ahead_of(self, at: Array, piece: Array) -> Array:
        """Return the steps of each transition: n_steps, fewer at the end of an episode or after a terminated step."""
        if self._n_steps == 1:
            return np.ones_like(at)
        ends = (self.rows.steps + self.rows.lengths)[piece]
        ahead: Array = np.minimum(self._n_steps, ends - at)
        span = np.minimum(at[:, None] + np.arange(self._n_steps), ends[:, None] - 1)
        for name in ("terminations", "truncations"):
            if (name,) in self.rows.columns:
                flagged = self.rows.columns[name,][span]
                ahead = np.where(flagged.any(axis=1), np.minimum(ahead, flagged.argmax(axis=1) + 1), ahead)
        return ahead

    def _rewards(self, rewards: Array, at: Array, ahead: Array) -> Array:
        if self._n_steps == 1:
            single: Array = rewards[at]
            return single
        steps = np.arange(self._n_steps)
        several = rewards[np.minimum(at[:, None] + steps, len(rewards) - 1)].astype(np.float64)
        weights = np.where(steps < ahead[:, None], self._discounts[:-1], 0.0)
        total: Array = np.zeros((len(at), *rewards.shape[1:]))
        for k in range(self._n_steps):  # add step by step: rewards after the last step may be NaN
            part = weights[:, k].reshape(-1, *[1] * (rewards.ndim - 1))
            total += np.where(part > 0, several[:, k] * part, 0.0)
        return total
