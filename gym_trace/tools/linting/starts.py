"""Find episodes whose start cannot be restored, and jumps of the clock of a writer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.scan import StepRuns
from gym_trace.playback.trace import Trace
from gym_trace.playback.writer_reader import WriterReader
from gym_trace.tools.linting.findings import NOTE, WARNING, Kind, Sighting
from gym_trace.tools.replay.lanes import inseparable, lanes_of

_UNVERIFIABLE = Kind("T501", WARNING, "episodes that cannot be verified: no seed, and no generator state recorded")
_UNDESCRIBED = Kind(
    "T502", NOTE, "recordings that cannot be verified: the environment is not described, or steps all lanes together"
)
_CLOCK = Kind("T503", WARNING, "jumps of the clock")

_STATE = b"rng_state"


class StartsRule:
    """Checks seeds, generator states and times."""

    kinds: ClassVar[Sequence[Kind]] = (_UNVERIFIABLE, _UNDESCRIBED, _CLOCK)
    columns: ClassVar[Collection[str]] = frozenset(("starts",))
    thresholds: ClassVar[Mapping[str, float]] = {"clock_seconds": 1}

    def __init__(self, trace: Trace, thresholds: Mapping[str, float]):
        self._trace = trace
        self._min_jump = max(1, int(thresholds["clock_seconds"] * 1e9))  # nanoseconds
        self._stateless: dict[int, set[int]] = {}  # by writer: rows of episodes without an initial generator state

    def add(self, block: StepRuns) -> None:
        rows = [row for row, packed in block.starts.items() if _STATE not in packed]
        self._stateless.setdefault(block.writer, set()).update(rows)

    def findings(self) -> Iterator[Sighting]:
        unverifiable: list[int] = []
        undescribed: list[int] = []  # first episode of each writer
        for number, reader in enumerate(index_of(self._trace).readers):
            try:
                about = reader.about
            except CorruptTrace:
                continue
            own = np.flatnonzero(index_of(self._trace)["writer"] == number)
            if about.is_imported or not len(own):
                continue
            if inseparable(reader) or not (about.environment.get("made") or about.environment.get("spec")):
                undescribed += own[:1].tolist()
            else:
                unverifiable += self._unverifiable(number).tolist()
        if unverifiable:
            first, count = unverifiable[0], len(unverifiable)
            shown = "verify", "--episodes", str(index_of(self._trace).whole_indices[first])
            yield Sighting(_UNVERIFIABLE, _UNVERIFIABLE.what, count, "episode", first, shown_by=shown)
        if undescribed:
            yield Sighting(_UNDESCRIBED, _UNDESCRIBED.what, len(undescribed), "writer", undescribed[0])
        jumps = sorted(jump for number in range(len(index_of(self._trace).readers)) for jump in self._jumps(number))
        if jumps:
            episode, seconds = jumps[0]
            message = f"the clock jumped by {seconds:+.3g} s, more than the steps took"
            yield Sighting(_CLOCK, message, len(jumps), "time", episode)

    def _unverifiable(self, number: int) -> Array:
        """Return the episodes without a known start state that do not follow a replayable episode."""
        trace, reader, found = self._trace, index_of(self._trace).readers[number], []
        seeds, first_steps = index_of(trace)["seed"], index_of(trace)["first_step"]
        rows, stateless = index_of(trace).rows, self._stateless.get(number, set())
        for lane in lanes_of(trace, [number]):
            indices = np.array(lane.indices)
            is_stateless = np.array([row in stateless for row in rows[indices].tolist()], bool)
            has_start = reader.parts.starts[rows[indices]] >= 0
            is_known = (seeds[indices] != wire.NO_SEED) | (has_start & ~is_stateless)
            opens = ~np.array(lane.follows, bool) | is_known
            # Episodes after a replayable episode are replayable, too.
            is_replayable = is_known[np.maximum.accumulate(np.where(opens, np.arange(len(opens)), 0))]
            found.append(indices[~is_replayable & (first_steps[indices] == 0)])
        return np.sort(np.concatenate([np.empty(0, np.int64), *found]))

    def _jumps(self, number: int) -> Iterator[tuple[int, float]]:
        """Yield each jump of UTC against the monotonic clock: the episode in which or before which it was, seconds."""
        trace, reader = self._trace, index_of(self._trace).readers[number]
        own = np.flatnonzero((index_of(trace)["writer"] == number) & ~np.isnat(index_of(trace)["start_time"]))
        offset = index_of(trace)["clock_offset"][own]
        begin = index_of(trace)["start_time"][own].view(np.int64) - offset
        drift, has_end = _drifts(reader, index_of(trace).rows[own])
        times = np.concatenate([begin, (begin + index_of(trace)["duration"][own])[has_end]])
        offsets = np.concatenate([offset, (offset + drift)[has_end]])
        episodes = np.concatenate([own, own[has_end]])
        order = np.argsort(times, kind="stable")
        jumps = np.diff(offsets[order])
        for i in np.flatnonzero(np.abs(jumps) >= self._min_jump).tolist():
            yield int(episodes[order[i + 1]]), float(jumps[i] / 1e9)


def _drifts(reader: WriterReader, rows: Array) -> tuple[Array, Array]:
    """Return the drift of UTC from the monotonic clock in these episodes (ns), and True for those with an end."""
    last = reader.parts.last[rows]
    ends = reader.fragments.flags[last] & wire.ENDS > 0
    return np.where(ends, reader.fragments.column("clock_drift", last), 0), ends
