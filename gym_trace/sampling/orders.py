"""Checks the arguments of windows(), transitions() and trajectories(), and makes their batches."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from gym_trace.errors import InvalidOption
from gym_trace.model.values import Array
from gym_trace.model.vocabulary import COLUMNS
from gym_trace.reading.episode_scan import OnDamage
from gym_trace.reading.recorded import Recorded
from gym_trace.sampling.batches import Batches, Make
from gym_trace.sampling.growing import Growing
from gym_trace.sampling.rows import Plan, planned
from gym_trace.sampling.store import Disk, Memory, default_root
from gym_trace.sampling.stream import Stream
from gym_trace.sampling.transitions import Hindsight, Transitions
from gym_trace.sampling.windows import Trajectories, Windows

Kind = tuple[Make, "tuple[int, int] | None"]  # how items are made, and how many steps before and after they reach
TRAJECTORIES: Kind = Trajectories, None


def windows(length: int, strict_length: bool, span: bool | tuple[bool, bool], stride: int, sampling: str) -> Kind:
    """Return windows, as Trace.windows() describes them. Raises InvalidOption."""
    _check_positive(length=length, stride=stride)
    if sampling not in ("steps", "episodes"):
        raise InvalidOption(f'sampling={sampling!r}: pass "steps" or "episodes"')
    sides = (span, span) if isinstance(span, bool) else span
    if not isinstance(sides, tuple) or [*map(type, sides)] != [bool, bool]:
        raise InvalidOption(f"span={span!r}: pass True or False, or two of these: (begin, end)")
    made = partial(Windows, length=length, strict_length=strict_length, span=sides, stride=stride, sampling=sampling)
    return made, (0, length - 1) if sampling == "steps" else None


def transitions(trace: Recorded, n_steps: int, gamma: float, n_frames: int, goals: Hindsight | None) -> Kind:
    """Return transitions, as Trace.transitions() describes them. Raises InvalidOption."""
    _check_positive(n_steps=n_steps, n_frames=n_frames)
    if not isinstance(gamma, (int, float, np.number)) or not 0 <= gamma <= 1:
        raise InvalidOption(f"gamma={gamma!r}: pass a number from 0 to 1")
    made = partial(Transitions, n_steps=n_steps, gamma=gamma, n_frames=n_frames, goals=goals)
    if goals is None:
        return made, (n_frames - 1, n_steps - 1)
    if not isinstance(goals, Hindsight):
        raise InvalidOption(f'goals={goals!r}: pass Hindsight("future", reward_fn)')
    if n_steps > 1 or n_frames > 1:
        raise InvalidOption("goals: need single steps; pass n_steps=1 and n_frames=1")
    goals.check(trace.writer_agreed_on("observation_space").layouts.observations)
    return made, None


@dataclass(frozen=True)
class Order:
    """Arguments shared by all kinds of batches."""

    batch_size: int
    seed: int
    columns: Iterable[str] | None
    replacement: bool
    weights: Array | None
    cache: str | None
    cache_bytes: int
    follow: float | None
    most_steps: int | None
    on_damage: str

    def batches(self, trace: Recorded, kind: Kind, is_view: bool, report: OnDamage) -> Batches:
        """Return the batches of a trace. report: called with the damage that on_damage="skip" skips."""
        roots, cache, (made, margins) = self._checked(), self.cache, kind
        on_damage = report if self.on_damage == "skip" else None
        common: dict[str, Any] = {
            "batch_size": self.batch_size,
            "seed": int(self.seed),
            "replacement": self.replacement,
            "on_damage": on_damage,
        }
        if self.follow is not None:
            if is_view:
                raise InvalidOption("follow: views do not grow; follow the whole trace")
            return Batches(trace, roots, made, Growing(self.most_steps), None, follow=self.follow, **common)
        trace = copy(trace)  # whose episodes stay the same when the caller refreshes
        plan = planned(trace, roots, on_damage)
        if cache == "auto":
            cache = "memory" if plan.size <= self.cache_bytes else None
        if cache is None:
            if self.weights is not None:
                raise InvalidOption('weights: not supported when streaming; pass cache="memory" or "disk"')
            plan = plan if on_damage is None else Plan(trace, roots, on_damage)
            return Stream(trace, roots, made, plan, budget=self.cache_bytes, margins=margins, **common)
        store = Memory() if cache == "memory" else Disk(default_root(), self.cache_bytes)
        return Batches(trace, roots, made, store, plan, weights=self.weights, **common)

    def _checked(self) -> frozenset[str]:
        """Return the columns to read. Raises InvalidOption."""
        _check_positive(batch_size=self.batch_size)
        if not isinstance(self.seed, (int, np.integer)):
            raise InvalidOption(f"seed={self.seed!r}: pass an integer")
        if not isinstance(self.cache_bytes, (int, np.integer)) or self.cache_bytes < 0:
            raise InvalidOption(f"cache_bytes={self.cache_bytes!r}: pass a number of bytes")
        if self.on_damage not in ("raise", "skip"):
            raise InvalidOption(f'on_damage={self.on_damage!r}: pass "raise" or "skip"')
        if self.follow is not None and not (isinstance(self.follow, (int, float, np.number)) and self.follow >= 0):
            raise InvalidOption(f"follow={self.follow!r}: pass how many seconds to wait between looks, at least 0")
        if self.most_steps is not None:
            _check_positive(most_steps=self.most_steps)
        if self.cache not in ("auto", "memory", "disk", None):
            raise InvalidOption(f'cache={self.cache!r}: pass "auto", "memory", "disk", or None to keep nothing')
        if self.weights is not None and not self.replacement:
            raise InvalidOption("weights: what is drawn without replacement cannot be drawn by weight")
        known = self.replacement and self.weights is None and self.cache in ("auto", "memory")
        if self.follow is not None and not known:
            raise InvalidOption(
                'follow: of what is kept in memory (cache="auto"), drawn with replacement and no weights'
            )
        if self.most_steps is not None and self.follow is None:
            raise InvalidOption("most_steps goes with follow; without, choose episodes: trace[-100:]")
        return roots_of(self.columns)


def roots_of(columns: Iterable[str] | None) -> frozenset[str]:
    """Return the columns to read. None: all but infos. Raises InvalidOption."""
    if columns is None:
        return frozenset(COLUMNS) - {"infos"}
    roots = frozenset([columns] if isinstance(columns, str) else columns)
    if unknown := {root for root in roots - set(COLUMNS) if not str(root).startswith("annotations.")}:
        known = f"{', '.join(COLUMNS)}, annotations.NAME"
        raise InvalidOption(f"columns: no such columns {sorted(map(str, unknown))}; there are {known}")
    return roots


def _check_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if not isinstance(number, (int, np.integer)) or isinstance(number, bool) or number < 1:
            raise InvalidOption(f"{name}={number!r}: pass a number of at least 1")
