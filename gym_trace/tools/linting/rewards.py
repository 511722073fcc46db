"""Find rewards that are always the same, or that have another scale than the rest."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from gym_trace.data.values import Array
from gym_trace.playback.scan import StepRuns
from gym_trace.playback.trace import Trace
from gym_trace.tools.linting.findings import NOTE, WARNING, Kind, Sighting, last_steps

_CONSTANT = Kind("T301", NOTE, "rewards that are the same in the whole trace")
_SCALE = Kind("T302", WARNING, "rewards of a writer of another scale than those of the others")
_LONE = Kind("T303", WARNING, "single rewards of another scale than the rest")

_PATH = ("rewards",)
_EXPONENTS = 2200  # exponents of float64: -1074 to 1024, counted from _LOWEST on
_LOWEST = -1100
_ENOUGH = 50  # min rewards to tell a scale
_RARE = 1e-3  # rewards below this share are ignored


class _Sizes:
    """Counts of the sizes of one writer's rewards, by their exponent, and the first place of each."""

    def __init__(self) -> None:
        self.counts = np.zeros(_EXPONENTS, np.int64)  # all but 0
        self.within = np.zeros(_EXPONENTS, np.int64)  # before the last step of an episode, which is often paid apart
        self.first: dict[int, tuple[int, int]] = {}  # first position of each size in within

    def add(self, block: StepRuns, rewards: Array, is_last: Array) -> None:
        known = np.isfinite(rewards) & (rewards != 0)
        sizes = np.frexp(np.abs(rewards, dtype=np.float64))[1] - _LOWEST
        self.counts += np.bincount(sizes[known], minlength=_EXPONENTS)
        within = np.flatnonzero(known & ~is_last)
        counts = np.bincount(sizes[within], minlength=_EXPONENTS)
        self.within += counts
        for size in np.flatnonzero(counts).tolist():
            if size not in self.first:
                self.first[size] = block.place(_PATH, int(within[np.argmax(sizes[within] == size)]))


def _median(counts: Array) -> int:
    return int(np.searchsorted(np.cumsum(counts), (counts.sum() + 1) // 2))


class RewardsRule:
    """Compares rewards by their powers of two."""

    kinds: ClassVar[Sequence[Kind]] = (_CONSTANT, _SCALE, _LONE)
    columns: ClassVar[Collection[str]] = frozenset(("rewards",))
    thresholds: ClassVar[Mapping[str, float]] = {"reward_scale": 100, "lone_reward": 1000}

    def __init__(self, trace: Trace, thresholds: Mapping[str, float]):
        self._ratios = {name: max(1, math.ceil(math.log2(max(2, thresholds[name])))) for name in self.thresholds}
        self._trace = trace
        self._sizes: dict[int, _Sizes] = {}
        self._rows = 0
        self._first: Any = None
        self._place = (0, 0)
        self._varies = False

    def add(self, block: StepRuns) -> None:
        rewards = block.columns.get(_PATH)
        if rewards is None or rewards.ndim != 1 or rewards.dtype.kind not in "iuf":
            return
        if self._first is None:
            self._first, self._place = rewards[0], block.place(_PATH, 0)
        self._rows += len(rewards)
        self._varies = self._varies or bool((rewards != self._first).any())
        self._sizes.setdefault(block.writer, _Sizes()).add(block, rewards, last_steps(block))

    def findings(self) -> Iterator[Sighting]:
        if self._rows and not self._varies:
            message = f"all rewards are {float(self._first):g}"
            yield Sighting(_CONSTANT, message, self._rows, "step", *self._place, "rewards")
        odd: dict[int, float] = {}
        for numbers in self._alike():
            odd |= self._of_another_scale(numbers)
        if odd:
            firsts = (self._trace.content["writer"] == number for number in odd)
            places = [int(np.argmax(mine)) for mine in firsts]
            writers = ", ".join(self._trace.writers[number] for number in list(odd)[:3])
            message = f"rewards of {writers} are about {next(iter(odd.values())):.3g} times those of the others"
            count = sum(int(self._sizes[number].counts.sum()) for number in odd)
            shown = "stats", "--by", "writer"
            yield Sighting(_SCALE, message, count, "step", min(places), None, "rewards", shown)
        yield from self._lone()

    def _alike(self) -> Iterator[list[int]]:
        """Yield the writers of each environment."""
        by_id: dict[str, list[int]] = {}
        for number in self._sizes:
            environment = self._trace.readers[number].about_or_empty.environment
            by_id.setdefault(str(environment.get("id")), []).append(number)
        yield from by_id.values()

    def _of_another_scale(self, numbers: list[int]) -> dict[int, float]:
        """Return the factor of each writer whose rewards have another scale than most rewards."""
        total, odd = sum(self._sizes[number].counts for number in numbers), {}
        for number in numbers:
            own = self._sizes[number].counts
            others = total - own
            if own.sum() < _ENOUGH or others.sum() < own.sum():
                continue
            distance = _median(own) - _median(others)
            if abs(distance) >= self._ratios["reward_scale"]:
                odd[number] = 2.0**distance
        # Of two writers with as many rewards, the later one is the odd one.
        return dict([list(odd.items())[-1]]) if len(numbers) == 2 and len(odd) == 2 else odd

    def _lone(self) -> Iterator[Sighting]:
        count, places = 0, []
        for sizes in self._sizes.values():
            usual = int(sizes.counts.sum())
            if usual < _ENOUGH:
                continue
            from_ = _median(sizes.counts) + self._ratios["lone_reward"]
            large = int(sizes.within[from_:].sum())
            if 0 < large <= max(1, _RARE * usual):
                count += large
                places += [place for size, place in sizes.first.items() if size >= from_]
        if count:
            yield Sighting(_LONE, _LONE.what, count, "step", *min(places), "rewards")
