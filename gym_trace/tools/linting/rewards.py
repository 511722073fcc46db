"""Find rewards that are always the same, or that have another scale than the rest."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from gym_trace.data.values import Array
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.scan import StepRuns
from gym_trace.playback.trace import Trace
from gym_trace.tools.linting.findings import NOTE, WARNING, Kind, Sighting, last_steps

_CONSTANT = Kind("T301", NOTE, "rewards that are the same in the whole trace")
_SCALE = Kind("T302", WARNING, "rewards of a writer that have another scale than those of the other writers")
_LONE = Kind("T303", WARNING, "single rewards of another scale than the rest")

_PATH = ("rewards",)
_LOWEST, _EXPONENTS = -1100, 2200  # exponents counted, from the lowest on; float64 has those from -1074 to 1024
_MIN_REWARDS = 50  # fewer do not show a scale
_MAX_LONE_SHARE = 1e-3  # more rewards of a writer are not lone ones


class _Exponents:
    """Counts of the rewards of one writer by their power of two. Rewards of 0 do not count.

    Attributes:
        counts: (_EXPONENTS,) int64, counts of all rewards.
        inner: (_EXPONENTS,) int64, counts without the last steps of episodes, whose rewards often have another scale.
        first: by index in `inner`: episode and step of the first such reward.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(_EXPONENTS, np.int64)
        self.inner = np.zeros(_EXPONENTS, np.int64)
        self.first: dict[int, tuple[int, int]] = {}

    def add(self, block: StepRuns, rewards: Array, is_last: Array) -> None:
        is_counted = np.isfinite(rewards) & (rewards != 0)
        exponents = np.frexp(np.abs(rewards, dtype=np.float64))[1] - _LOWEST
        self.counts += np.bincount(exponents[is_counted], minlength=_EXPONENTS)
        rows = np.flatnonzero(is_counted & ~is_last)
        inner = np.bincount(exponents[rows], minlength=_EXPONENTS)
        self.inner += inner
        for exponent in np.flatnonzero(inner).tolist():
            if exponent not in self.first:
                self.first[exponent] = block.place(_PATH, int(rows[np.argmax(exponents[rows] == exponent)]))


def _median(counts: Array) -> int:
    return int(np.searchsorted(np.cumsum(counts), (counts.sum() + 1) // 2))


class RewardsRule:
    """Compares the scales of rewards, as powers of two."""

    kinds: ClassVar[Sequence[Kind]] = (_CONSTANT, _SCALE, _LONE)
    columns: ClassVar[Collection[str]] = frozenset(("rewards",))
    thresholds: ClassVar[Mapping[str, float]] = {"reward_scale": 100, "lone_reward": 1000}

    def __init__(self, trace: Trace, thresholds: Mapping[str, float]):
        self._log2_thresholds = {
            name: max(1, math.ceil(math.log2(max(2, thresholds[name])))) for name in self.thresholds
        }
        self._trace = trace
        self._exponents: dict[int, _Exponents] = {}  # by writer
        self._rows = 0
        self._first: Any = None
        self._first_position = (0, 0)
        self._varies = False

    def add(self, block: StepRuns) -> None:
        rewards = block.columns.get(_PATH)
        if rewards is None or rewards.ndim != 1 or rewards.dtype.kind not in "iuf":
            return
        if self._first is None:
            self._first, self._first_position = rewards[0], block.place(_PATH, 0)
        self._rows += len(rewards)
        self._varies = self._varies or bool((rewards != self._first).any())
        self._exponents.setdefault(block.writer, _Exponents()).add(block, rewards, last_steps(block))

    def findings(self) -> Iterator[Sighting]:
        if self._rows and not self._varies:
            message = f"all rewards are {float(self._first):g}"
            yield Sighting(_CONSTANT, message, self._rows, "step", *self._first_position, "rewards")
        factors: dict[int, float] = {}
        for numbers in self._writers_by_environment():
            factors |= self._factors(numbers)
        if factors:
            episode = int(np.argmax(np.isin(index_of(self._trace)["writer"], list(factors))))
            writers = ", ".join(self._trace.writers[number] for number in list(factors)[:3])
            message = f"rewards of {writers} are about {next(iter(factors.values())):.3g} times those of the others"
            count = sum(int(self._exponents[number].counts.sum()) for number in factors)
            shown = "stats", "--by", "writer"
            yield Sighting(_SCALE, message, count, "step", episode, None, "rewards", shown)
        yield from self._lone_rewards()

    def _writers_by_environment(self) -> Iterator[list[int]]:
        by_id: dict[str, list[int]] = {}
        for number in self._exponents:
            environment = index_of(self._trace).readers[number].about_or_empty.environment
            by_id.setdefault(str(environment.get("id")), []).append(number)
        yield from by_id.values()

    def _factors(self, numbers: list[int]) -> dict[int, float]:
        """Return writers whose rewards have another scale than most rewards, with the factor between the scales."""
        total, factors = sum(self._exponents[number].counts for number in numbers), {}
        for number in numbers:
            own = self._exponents[number].counts
            others = total - own
            if own.sum() < _MIN_REWARDS or others.sum() < own.sum():
                continue
            distance = _median(own) - _median(others)
            if abs(distance) >= self._log2_thresholds["reward_scale"]:
                factors[number] = 2.0**distance
        # If two writers have equally many rewards, report the later one.
        return dict([list(factors.items())[-1]]) if len(numbers) == 2 and len(factors) == 2 else factors

    def _lone_rewards(self) -> Iterator[Sighting]:
        count, positions = 0, []
        for exponents in self._exponents.values():
            rewards = int(exponents.counts.sum())
            if rewards < _MIN_REWARDS:
                continue
            limit = _median(exponents.counts) + self._log2_thresholds["lone_reward"]
            large = int(exponents.inner[limit:].sum())
            if 0 < large <= max(1, _MAX_LONE_SHARE * rewards):
                count += large
                positions += [position for exponent, position in exponents.first.items() if exponent >= limit]
        if count:
            yield Sighting(_LONE, _LONE.what, count, "step", *min(positions), "rewards")
