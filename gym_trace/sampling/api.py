"""windows(), transitions() and trajectories(): what Trace offers for training."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from gym_trace.errors import InvalidOption
from gym_trace.playback.recorded import Recorded
from gym_trace.sampling.batches import Batches, Make
from gym_trace.sampling.rows import Plan, roots_of
from gym_trace.sampling.store import Disk, Memory, default_root
from gym_trace.sampling.stream import Stream
from gym_trace.sampling.transitions import Transitions
from gym_trace.sampling.windows import Trajectories, Windows

CACHE_BYTES = 1 << 30


def windows(
    trace: Recorded,
    length: int,
    batch_size: int,
    seed: int,
    columns: Iterable[str] | None,
    strict_length: bool,
    span: bool | tuple[bool, bool],
    stride: int,
    replacement: bool,
    sampling: str,
    cache: str | None,
    cache_bytes: int,
) -> Batches:
    """As Trace.windows()."""
    for name, number in (("length", length), ("stride", stride)):
        if not isinstance(number, int) or number < 1:
            raise InvalidOption(f"{name}={number!r}: pass a number of at least 1")
    if sampling not in ("steps", "episodes"):
        raise InvalidOption(f'sampling={sampling!r}: pass "steps" or "episodes"')
    sides = (span, span) if isinstance(span, bool) else span
    made = partial(Windows, length=length, strict_length=strict_length, span=sides, stride=stride, sampling=sampling)
    margins = (0, length - 1) if sampling == "steps" else None
    return _batches(trace, columns, made, batch_size, seed, replacement, cache, cache_bytes, margins)


def transitions(
    trace: Recorded,
    batch_size: int,
    seed: int,
    columns: Iterable[str] | None,
    n_steps: int,
    gamma: float,
    n_frames: int,
    replacement: bool,
    cache: str | None,
    cache_bytes: int,
) -> Batches:
    """As Trace.transitions()."""
    for name, number in (("n_steps", n_steps), ("n_frames", n_frames)):
        if not isinstance(number, int) or number < 1:
            raise InvalidOption(f"{name}={number!r}: pass a number of at least 1")
    if not 0 <= gamma <= 1:
        raise InvalidOption(f"gamma={gamma!r}: pass a number from 0 to 1")
    made = partial(Transitions, n_steps=n_steps, gamma=gamma, n_frames=n_frames)
    margins = n_frames - 1, n_steps - 1
    return _batches(trace, columns, made, batch_size, seed, replacement, cache, cache_bytes, margins)


def trajectories(
    trace: Recorded,
    batch_size: int,
    seed: int,
    columns: Iterable[str] | None,
    replacement: bool,
    cache: str | None,
    cache_bytes: int,
) -> Batches:
    """As Trace.trajectories()."""
    return _batches(trace, columns, Trajectories, batch_size, seed, replacement, cache, cache_bytes, None)


def _batches(
    trace: Recorded,
    columns: Iterable[str] | None,
    made: Make,
    batch_size: int,
    seed: int,
    replacement: bool,
    cache: str | None,
    cache_bytes: int,
    margins: tuple[int, int] | None,
) -> Batches:
    roots = roots_of(columns)
    if cache not in ("auto", "memory", "disk", None):
        raise InvalidOption(f'cache={cache!r}: pass "auto", "memory", "disk", or None to keep nothing')
    if cache == "auto":
        cache = "memory" if Plan(trace, roots).size <= cache_bytes else None
    if cache is None:
        return Stream(trace, roots, made, batch_size, seed, replacement, cache_bytes, margins)
    store = Memory() if cache == "memory" else Disk(default_root(), cache_bytes)
    return Batches(trace, roots, made, batch_size, seed, replacement, store)
