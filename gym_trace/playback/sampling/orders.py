"""Check the arguments of windows(), transitions() and trajectories(), and make their batches."""

from __future__ import annotations

from copy import copy
from functools import partial

import numpy as np

from gym_trace.errors import InvalidOption, MissingExtra
from gym_trace.playback.episode_index import RecordedEpisodes, whole_of, writer_agreed_on
from gym_trace.playback.sampling.batches import CACHES, Batches, Make, Order, check_positive
from gym_trace.playback.sampling.items import Hindsight, Trajectories, Transitions, Windows
from gym_trace.playback.sampling.rows import DecodePlan, planned
from gym_trace.playback.sampling.store import Disk, Growing, decoded
from gym_trace.playback.sampling.stream import Stream
from gym_trace.playback.scan import OnDamage
from gym_trace.storage.local import cache_root

Kind = tuple[Make, "tuple[int, int] | None"]  # function that makes items, and the steps that they need before and after
TRAJECTORIES: Kind = Trajectories, None


def windows(length: int, strict_length: bool, span: bool | tuple[bool, bool], stride: int, sampling: str) -> Kind:
    """Check the arguments of Trace.windows(), and return its kind of items. Raises InvalidOption."""
    check_positive(length=length, stride=stride)
    if sampling not in ("steps", "episodes"):
        raise InvalidOption(f'sampling={sampling!r}: pass "steps" or "episodes"')
    sides = (span, span) if isinstance(span, bool) else span
    if not isinstance(sides, tuple) or [*map(type, sides)] != [bool, bool]:
        raise InvalidOption(f"span={span!r}: pass True or False, or two of these: (begin, end)")
    made = partial(Windows, length=length, strict_length=strict_length, span=sides, stride=stride, sampling=sampling)
    return made, (0, length - 1) if sampling == "steps" else None


def transitions(trace: RecordedEpisodes, n_steps: int, gamma: float, n_frames: int, goals: Hindsight | None) -> Kind:
    """Check the arguments of Trace.transitions(), and return its kind of items. Raises InvalidOption."""
    check_positive(n_steps=n_steps, n_frames=n_frames)
    if not isinstance(gamma, (int, float, np.number)) or not 0 <= gamma <= 1:
        raise InvalidOption(f"gamma={gamma!r}: pass a number from 0 to 1")
    made = partial(Transitions, n_steps=n_steps, gamma=gamma, n_frames=n_frames, goals=goals)
    if goals is None:
        return made, (n_frames - 1, n_steps - 1)
    if not isinstance(goals, Hindsight):
        raise InvalidOption(f'goals={goals!r}: pass Hindsight("future", reward_fn)')
    if n_steps > 1 or n_frames > 1:
        raise InvalidOption("goals: need single steps; pass n_steps=1 and n_frames=1")
    goals.check(writer_agreed_on(trace, "observation_space").layouts.observations)
    return made, None


def batches_of(trace: RecordedEpisodes, kind: Kind, order: Order, report: OnDamage) -> Batches:
    """Return the batches of a trace. report: called with the damage that on_damage="skip" skips.

    Raises InvalidOption, CorruptTrace.
    """
    cache, (make, margins) = order.cache, kind
    on_damage = report if order.on_damage == "skip" else None
    if order.follow is not None:
        if whole_of(trace) is not trace:
            raise InvalidOption("follow: views do not grow; follow the whole trace")
        return Batches(trace, order, make, Growing(order.most_steps).rows, None, on_damage)
    trace = copy(trace)  # a refresh by the caller does not change the copy
    plan = planned(trace, order.roots, on_damage)
    if cache == "auto":
        cache = "memory" if plan.held + plan.size <= order.cache_bytes else None
    if cache == "memory":
        return Batches(trace, order, make, decoded, plan, on_damage, margins)
    if cache == "disk":
        disk = Disk(cache_root(), order.cache_bytes)
        disk.check(plan)
        return Batches(trace, order, make, disk.rows, plan, on_damage)
    if cache is not None:
        if isinstance(make, partial) and make.keywords.get("goals") is not None:
            raise InvalidOption(f'goals: cache={cache!r} does not support them; pass cache="memory" or "disk"')
        try:
            from gym_trace.playback.sampling.on_device import TensorBatches
        except MissingExtra as error:
            raise InvalidOption(f"cache={cache!r}: {CACHES}; {error}") from error
        return TensorBatches(cache, trace, order, make, plan, on_damage)
    if order.weights is not None:
        raise InvalidOption('weights: not supported when streaming; pass cache="memory" or "disk"')
    plan = plan if on_damage is None else DecodePlan(trace, order.roots, on_damage)
    return Stream(trace, order, make, plan, margins, on_damage)
