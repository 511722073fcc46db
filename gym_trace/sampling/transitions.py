"""Transitions: a step each, or n of them as one, with the observations before and after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gym_trace.errors import InvalidOption
from gym_trace.model.layout import Branch, Layout
from gym_trace.model.values import Array
from gym_trace.sampling.draw import Stretch, uniform
from gym_trace.sampling.draws import Batch, Draws, Found
from gym_trace.sampling.rows import Rows

ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
_STRATEGIES = ("future", "final", "random")
_CHOICE, _GOAL = 0x1D, 0x2E  # what chance is for


@dataclass(frozen=True)
class Hindsight:
    """Hindsight experience replay (Andrychowicz et al., 2017): goals that were reached put in the place of those that
    were wanted, in environments whose observations are dicts with achieved_goal and desired_goal.

    Attributes:
        strategy: where the goal is taken from: an observation that comes later in the episode ("future"), its last one
            ("final"), or any observation ("random").
        reward_fn: ``reward_fn(achieved_goal, desired_goal, infos)`` with arrays of n rows, achieved_goal that of what
            the step led to; returns (n,) rewards. infos: None, or (n,) dicts where they are among the columns. Such as
            ``env.unwrapped.compute_reward`` of Gymnasium-Robotics.
        ratio: of the transitions that get another goal; the others stay as they were recorded.
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
        """Raises InvalidOption unless there are goals."""
        if not isinstance(layout, Branch) or layout.keys is None or not {ACHIEVED, DESIRED} <= set(layout.keys):
            raise InvalidOption(f"goals: observations of this trace are not dicts with {ACHIEVED} and {DESIRED}")

    def relabel(self, batch: Batch, rows: Rows, found: Found, seed: int) -> None:
        """Gives some of the transitions of a batch, which are where they were found, other goals and rewards."""
        piece, places = found["piece"], found["place"]
        step = found["at"] - rows.steps[piece]
        chosen = np.flatnonzero(uniform(seed ^ _CHOICE, places) < self.ratio)
        chance = uniform(seed ^ _GOAL, places)[chosen]
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


class Transitions(Draws):
    """Batches of transitions: see Trace.transitions()."""

    def __init__(
        self,
        rows: Rows,
        seed: int,
        *,
        n_steps: int,
        gamma: float,
        n_frames: int,
        goals: Hindsight | None = None,
    ):
        high = rows.own[:, 1]
        if goals is not None and rows.known is not None:  # what such a last step achieved is unknown
            high = np.minimum(high, rows.lengths - ~rows.known)
        counts = np.maximum(high - rows.own[:, 0], 0)
        ends = np.cumsum(counts)
        self._stretch = Stretch(ends)
        item = rows.own[:, 0] - ends + counts
        # Of each piece, how much larger than an item its step, the row of that, the row before it, and first_step are.
        self._more = np.stack(
            [item + rows.offset, item + rows.steps, item + rows.seen, item + rows.offset + rows.begin], axis=1
        )
        super().__init__(rows, int(counts.sum()), seed)
        self._n_steps, self._n_frames, self._goals = n_steps, n_frames, goals
        self._discounts = np.float64(gamma) ** np.arange(n_steps + 1)

    def find(self, items: Array, places: Array) -> Found:
        rows = self.rows
        piece = self._stretch.find(items)
        more = self._more.take(piece, axis=0)
        at, seen, first = items + more[:, 1], items + more[:, 2], items + more[:, 3]
        ahead = self._ahead_of(at, piece)

        def frames(seen: Array) -> Array:
            if self._n_frames == 1:
                return seen
            back = np.arange(self._n_frames - 1, -1, -1)
            stacked: Array = np.maximum(seen[:, None] - back, rows.seen[piece][:, None])
            return stacked

        last = at if self._n_steps == 1 else at + ahead - 1
        known = {}
        if rows.known is not None:
            is_end = last - rows.steps[piece] == rows.lengths[piece] - 1
            known = {"known": rows.known[piece] | ~is_end}
        found = {"piece": piece, "place": places, "at": at, "ahead": ahead, "last": last}
        found |= {"observations": frames(seen), "next_observations": frames(seen + ahead)}
        return found | known | {"discount": self._discounts[ahead], "episode": rows.episode[piece], "first_step": first}

    def gather(self, found: Found) -> Batch:
        rows, at = self.rows, found["at"]

        def taken(array: Array) -> Any:
            return array.take(at, axis=0)

        batch: Batch = {}
        for name in ("observations", "next_observations"):
            where = found[name]
            self._nested(batch, name, lambda array, where=where: array.take(where, axis=0), "observations")
        self._nested(batch, "actions", taken)
        if ("rewards",) in rows.columns:
            batch["rewards"] = self._rewards(at, found["ahead"])
        for name in ("terminations", "truncations"):
            if (name,) in rows.columns:
                batch[name] = rows.columns[name,].take(found["last"])
        batch |= self._noted(taken)
        if "known" in found:
            batch["next_observation_mask"] = found["known"].copy()
        if self._goals is not None:
            self._goals.relabel(batch, rows, found, self.seed)
        return batch | {name: found[name].copy() for name in ("discount", "episode", "first_step")}

    def located(self, items: Array, places: Array) -> tuple[Array, Array]:
        piece = self._stretch.find(items)
        return piece, items + self._more[piece, 0]

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

    def _rewards(self, at: Array, ahead: Array) -> Array:
        rewards = self.rows.columns["rewards",]
        if self._n_steps == 1:
            taken: Array = rewards[at]
            return taken
        steps = np.arange(self._n_steps)
        several = rewards[np.minimum(at[:, None] + steps, len(rewards) - 1)].astype(np.float64)
        weights = np.where(steps < ahead[:, None], self._discounts[:-1], 0.0)
        total: Array = np.zeros((len(at), *rewards.shape[1:]))
        for k in range(self._n_steps):  # in this order, so that what is not there does not make a NaN of it
            part = weights[:, k].reshape(-1, *[1] * (rewards.ndim - 1))
            total += np.where(part > 0, several[:, k] * part, 0.0)
        return total
