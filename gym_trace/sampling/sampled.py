"""What a trace offers for training: windows(), transitions() and trajectories()."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gym_trace.errors import InvalidOption
from gym_trace.model.values import Array
from gym_trace.model.vocabulary import COLUMNS
from gym_trace.reading.recorded import Recorded

# All that draws is imported when it is asked for: most traces are opened for something else.
if TYPE_CHECKING:
    from gym_trace.sampling.batches import Batches, Make
    from gym_trace.sampling.transitions import Hindsight

_CACHE_BYTES = 1 << 30


class Sampled(Recorded):
    """A trace that batches can be drawn of."""

    def windows(
        self,
        length: int,
        batch_size: int = 256,
        *,
        seed: int = 0,
        columns: Iterable[str] | None = None,
        strict_length: bool = True,
        span: bool | tuple[bool, bool] = False,
        stride: int = 1,
        replacement: bool = True,
        sampling: str = "steps",
        weights: Array | None = None,
        cache: str | None = "auto",
        cache_bytes: int = _CACHE_BYTES,
        follow: float | None = None,
        most_steps: int | None = None,
        on_damage: str = "raise",
    ) -> Batches:
        """Batches of windows: so many steps of an episode one after the other, never of two.

        ``for batch in trace.windows(64, 256)`` gives dicts of arrays: observations (256, 65, …), a row more than the
        others, actions (256, 64, …), rewards, terminations, truncations, annotations (a dict of them), mask (256, 64),
        True where there is a step, and (256,) episode, its place in the trace, and first_step. Dict and Tuple spaces
        have dicts and tuples of arrays. A view is drawn of as a trace is: ``trace.select("return > 100").windows(64)``.

        An episode whose final observation is not known (Episode.has_final_observation) comes without its last step, or,
        where that terminated it, with the observation before it once more. Of a trace with such terminated episodes
        batches also have next_observation_mask, (256, 64), False where the observation that a step led to is not known.

        Args:
            length: steps of a window.
            batch_size: windows of a batch; the last one of an epoch may have fewer.
            seed: the same seed gives the same batches, in any process and with any number of workers; those of a
                stream (cache=None) are others, and depend on cache_bytes.
            columns: only these, and infos, if they are named; "annotations.logprob" is one annotation. None: all but
                infos.
            strict_length: whether to leave out episodes that are shorter; otherwise they are padded with zeros.
            span: whether windows may reach beyond the begin and the end of an episode, (begin, end) or both alike, and
                have less steps then.
            stride: windows begin at every so many-th step of an episode.
            replacement: whether to draw each window anew, without end. Otherwise an iteration is an epoch, which has
                each window once.
            sampling: "steps": each window is as likely as any other; "episodes": first an episode is drawn.
            weights: draws windows in proportion to these, with replacement: one for each episode, each step (that a
                window begins with), or each window. Batches have index and weight, too, (batch_size,): what
                update_priorities() takes, and one over the chance of a window in units of 1 / windows.
            cache: where decoded rows are kept: "memory"; "disk", below $GYM_TRACE_CACHE or the user's directory for
                caches, from where they are mapped, found again, and extended when the trace has grown; None: nowhere,
                which decodes parts of the trace again each epoch, in shuffled order; "auto": in memory if they fit.
            cache_bytes: of memory, or of disk, that this may take. A stream takes what one chunk is once decoded, if
                that is more (recorders write up to 24 MiB).
            follow: takes in what is being recorded, at most every so many seconds; the trace is refreshed then, and
                rows that are there are not decoded again. None: episodes stay those that the trace had.
            most_steps: with follow, keeps those episodes alone that began last and have so many steps together.
            on_damage: "raise" CorruptTrace at a damaged chunk, or "skip" it, as scan() does: windows do not reach over
                what is left out, a warning tells what that was, and .damage of the trace lists it. What is streamed is
                read once beforehand, then, to know what there is.

        Raises InvalidOption, CorruptTrace; TraceError if the writers have different spaces.
        """
        from gym_trace.sampling.windows import Windows

        _check(length=length, stride=stride)
        if sampling not in ("steps", "episodes"):
            raise InvalidOption(f'sampling={sampling!r}: pass "steps" or "episodes"')
        sides = (span, span) if isinstance(span, bool) else span
        if not isinstance(sides, tuple) or [*map(type, sides)] != [bool, bool]:
            raise InvalidOption(f"span={span!r}: pass True or False, or two of these: (begin, end)")
        made = partial(
            Windows, length=length, strict_length=strict_length, span=sides, stride=stride, sampling=sampling
        )
        margins = (0, length - 1) if sampling == "steps" else None
        order = _Order(
            batch_size, seed, columns, replacement, weights, cache, cache_bytes, follow, most_steps, on_damage
        )
        return self._batches(made, margins, order)

    def transitions(
        self,
        batch_size: int = 256,
        *,
        seed: int = 0,
        columns: Iterable[str] | None = None,
        n_steps: int = 1,
        gamma: float = 0.99,
        n_frames: int = 1,
        goals: Hindsight | None = None,
        replacement: bool = True,
        weights: Array | None = None,
        cache: str | None = "auto",
        cache_bytes: int = _CACHE_BYTES,
        follow: float | None = None,
        most_steps: int | None = None,
        on_damage: str = "raise",
    ) -> Batches:
        """Batches of transitions, dicts of arrays with a row each: observations, actions, rewards, next_observations,
        terminations, truncations, discount, annotations, episode, first_step.

        A step that led to an observation that is not known (Episode.has_final_observation) is left out, unless it
        terminated its episode: the target of a value does not need next_observations then, which are those of
        observations once more. Of a trace with such steps batches also have next_observation_mask, (batch_size,), which
        is False there.

        Args:
            n_steps: how many steps a transition spans, fewer at the end of an episode: rewards are discounted and
                summed up (float64), next_observations come after the last of them, and terminations and truncations are
                those of the last. The target of a value is
                ``rewards + discount * ~terminations * value(next_observations)``.
            gamma: of a step; discount is gamma to the number of steps.
            n_frames: so many observations are stacked, (batch_size, n_frames, …), the newest last; before the first one
                of an episode it is repeated.
            goals: gives transitions goals that were reached: ``Hindsight("future", env.unwrapped.compute_reward)``.
            batch_size, seed, columns, replacement, weights, cache, cache_bytes, follow, most_steps,
            on_damage: as of windows().

        Raises as windows() does.
        """
        from gym_trace.sampling.transitions import Hindsight, Transitions

        _check(n_steps=n_steps, n_frames=n_frames)
        if not isinstance(gamma, (int, float, np.number)) or not 0 <= gamma <= 1:
            raise InvalidOption(f"gamma={gamma!r}: pass a number from 0 to 1")
        made = partial(Transitions, n_steps=n_steps, gamma=gamma, n_frames=n_frames, goals=goals)
        margins: tuple[int, int] | None = (n_frames - 1, n_steps - 1)
        if goals is not None:
            if not isinstance(goals, Hindsight):
                raise InvalidOption(f'goals={goals!r}: pass Hindsight("future", reward_fn)')
            if n_steps > 1 or n_frames > 1:
                raise InvalidOption("goals are given to single steps, with n_steps=1 and n_frames=1")
            goals.check(self.writer_agreed_on("observation_space").layouts.observations)
            margins = None
        order = _Order(
            batch_size, seed, columns, replacement, weights, cache, cache_bytes, follow, most_steps, on_damage
        )
        return self._batches(made, margins, order)

    def trajectories(
        self,
        batch_size: int = 16,
        *,
        seed: int = 0,
        columns: Iterable[str] | None = None,
        replacement: bool = True,
        cache: str | None = "auto",
        cache_bytes: int = _CACHE_BYTES,
        follow: float | None = None,
        most_steps: int | None = None,
        on_damage: str = "raise",
    ) -> Batches:
        """Batches of whole episodes, as windows() has them, padded to the longest of the batch. Those without steps are
        left out. Arguments, and what is raised, as of windows()."""
        from gym_trace.sampling.windows import Trajectories

        order = _Order(batch_size, seed, columns, replacement, None, cache, cache_bytes, follow, most_steps, on_damage)
        return self._batches(Trajectories, None, order)

    def normalization(self, columns: Iterable[str] | None = None) -> dict[str, Any]:
        """Mean, std, min, max and count of each element of each column that is of numbers, over all steps.

        ``norm = trace.normalization()["observations"]``, then ``(batch["observations"] - norm.mean) / norm.std``. The
        structure is that of batches: Dict and Tuple spaces have dicts and tuples of Moments, None for leaves that are
        no numbers; annotations are a dict. The observation after the last step counts, too, where it is known.

        Rows are decoded once, in memory that is bounded. Of a whole trace what was computed is kept among the caches
        (of $GYM_TRACE_CACHE, or the user's directory for such; never beside the trace), and what has been recorded
        since is added to it; of a view it is computed each time.

        Args:
            columns: only these. None: observations, actions and rewards.

        Raises InvalidOption, CorruptTrace; TraceError if the writers have different spaces.
        """
        from gym_trace.sampling.normalization import moments_of

        chosen = ("observations", "actions", "rewards") if columns is None else columns
        return moments_of(self, roots_of(chosen), self._content.chosen is not None)

    def _batches(self, made: Make, margins: tuple[int, int] | None, order: _Order) -> Batches:
        """margins: how many steps before and behind its first step an item reaches over; None: its whole episode."""
        from gym_trace.sampling.batches import Batches
        from gym_trace.sampling.growing import Growing
        from gym_trace.sampling.rows import Plan, planned
        from gym_trace.sampling.store import Disk, Memory, default_root
        from gym_trace.sampling.stream import Stream

        roots, cache = order.checked(), order.cache
        common: dict[str, Any] = {
            "batch_size": order.batch_size,
            "seed": int(order.seed),
            "replacement": order.replacement,
            "on_damage": self._report if order.on_damage == "skip" else None,
        }
        if order.follow is not None:
            if self._content.chosen is not None:
                raise InvalidOption("follow: of a whole trace; this is a view, which does not grow")
            return Batches(self, roots, made, Growing(order.most_steps), None, follow=order.follow, **common)
        trace, report = copy(self), common["on_damage"]  # whose episodes stay what they are
        plan = planned(trace, roots, report)
        if cache == "auto":
            cache = "memory" if plan.size <= order.cache_bytes else None
        if cache is None:
            if order.weights is not None:
                raise InvalidOption(
                    'weights: what is streamed cannot be drawn by weight; pass cache="memory" or "disk"'
                )
            plan = plan if report is None else Plan(trace, roots, report)
            return Stream(trace, roots, made, plan, budget=order.cache_bytes, margins=margins, **common)
        store = Memory() if cache == "memory" else Disk(default_root(), order.cache_bytes)
        return Batches(trace, roots, made, store, plan, weights=order.weights, **common)


@dataclass(frozen=True)
class _Order:
    """The arguments that all kinds of batches have."""

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

    def checked(self) -> frozenset[str]:
        """The columns that are meant. Raises InvalidOption."""
        _check(batch_size=self.batch_size)
        if not isinstance(self.seed, (int, np.integer)):
            raise InvalidOption(f"seed={self.seed!r}: pass an integer")
        if not isinstance(self.cache_bytes, (int, np.integer)) or self.cache_bytes < 0:
            raise InvalidOption(f"cache_bytes={self.cache_bytes!r}: pass a number of bytes")
        if self.on_damage not in ("raise", "skip"):
            raise InvalidOption(f'on_damage={self.on_damage!r}: pass "raise" or "skip"')
        if self.follow is not None and not (isinstance(self.follow, (int, float, np.number)) and self.follow >= 0):
            raise InvalidOption(f"follow={self.follow!r}: pass how many seconds to wait between looks, at least 0")
        if self.most_steps is not None:
            _check(most_steps=self.most_steps)
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
    """The columns that are meant. None: all but infos. Raises InvalidOption."""
    if columns is None:
        return frozenset(COLUMNS) - {"infos"}
    roots = frozenset([columns] if isinstance(columns, str) else columns)
    if unknown := {root for root in roots - set(COLUMNS) if not str(root).startswith("annotations.")}:
        known = f"{', '.join(COLUMNS)}, annotations.NAME"
        raise InvalidOption(f"columns: no such columns {sorted(map(str, unknown))}; there are {known}")
    return roots


def _check(**numbers: int) -> None:
    for name, number in numbers.items():
        if not isinstance(number, (int, np.integer)) or isinstance(number, bool) or number < 1:
            raise InvalidOption(f"{name}={number!r}: pass a number of at least 1")
