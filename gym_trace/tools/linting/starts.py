"""Find episodes whose start cannot be restored, and jumps of the clock of a writer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.playback.scan import StepRuns
from gym_trace.playback.trace import Trace
from gym_trace.playback.writer_reader import WriterReader
from gym_trace.tools.linting.findings import NOTE, WARNING, Kind, Sighting
from gym_trace.tools.replay.lanes import inseparable, lanes_of

_UNVERIFIABLE = Kind("T501", WARNING, "episodes that cannot be verified: no seed, and no generator state recorded")
_ALONE = Kind("T502", NOTE, "recordings that cannot be verified: the environment is not described, or steps all lanes")
_CLOCK = Kind("T503", WARNING, "jumps of the clock")

_STATE = b"rng_state"


class StartsRule:
    """Looks at seeds, generator states and times."""

    kinds: ClassVar[Sequence[Kind]] = (_UNVERIFIABLE, _ALONE, _CLOCK)
    columns: ClassVar[Collection[str]] = frozenset(("starts",))
    thresholds: ClassVar[Mapping[str, float]] = {"clock_seconds": 1}

    def __init__(self, trace: Trace, thresholds: Mapping[str, float]):
        self._trace = trace
        self._jump = max(1, int(thresholds["clock_seconds"] * 1e9))
        self._stateless: dict[int, set[int]] = {}  # by writer: rows of episodes begun without a generator state

    def add(self, block: StepRuns) -> None:
        rows = [row for row, packed in block.starts.items() if _STATE not in packed]
        self._stateless.setdefault(block.writer, set()).update(rows)

    def findings(self) -> Iterator[Sighting]:
        hopeless: list[int] = []
        alone: list[int] = []
        for number, reader in enumerate(self._trace.readers):
            try:
                about = reader.about
            except CorruptTrace:
                continue
            mine = np.flatnonzero(self._trace.content["writer"] == number)
            if about.is_imported or not len(mine):
                continue
            if inseparable(reader) or not (about.environment.get("made") or about.environment.get("spec")):
                alone += self._trace.chosen[mine[:1]].tolist()
            else:
                hopeless += self._unverifiable(number).tolist()
        if hopeless:
            shown = "verify", "--episodes", str(hopeless[0])
            yield Sighting(_UNVERIFIABLE, _UNVERIFIABLE.what, len(hopeless), "episode", hopeless[0], shown_by=shown)
        if alone:
            yield Sighting(_ALONE, _ALONE.what, len(alone), "writer", alone[0])
        jumps = sorted(jump for number in range(len(self._trace.readers)) for jump in self._jumps(number))
        if jumps:
            episode, seconds = jumps[0]
            message = f"the clock jumped by {seconds:+.3g} s, more than the steps took"
            yield Sighting(_CLOCK, message, len(jumps), "time", episode)

    def _unverifiable(self, number: int) -> Array:
        """Return the episodes without a known start state that do not follow a replayable episode."""
        trace, reader, found = self._trace, self._trace.readers[number], []
        seeds, first_steps = trace.content["seed"], trace.content["first_step"]
        rows, stateless = trace.rows, self._stateless.get(number, set())
        for lane in lanes_of(trace, [number]):
            indices = np.array(lane.indices)
            own = [row in stateless for row in rows[indices].tolist()]
            has_start = reader.parts.starts[rows[indices]] >= 0
            known = (seeds[indices] != wire.NO_SEED) | (has_start & ~np.array(own, bool))
            opens = ~np.array(lane.follows, bool) | known
            # Episodes after a replayable episode are replayable, too.
            hopeful = known[np.maximum.accumulate(np.where(opens, np.arange(len(opens)), 0))]
            found.append(indices[~hopeful & (first_steps[indices] == 0)])
        return np.sort(trace.chosen[np.concatenate([np.empty(0, np.int64), *found])])

    def _jumps(self, number: int) -> Iterator[tuple[int, float]]:
        """Yield episodes with a jump of UTC against the monotonic clock during or just before them, and its seconds."""
        trace, reader = self._trace, self._trace.readers[number]
        mine = np.flatnonzero((trace.content["writer"] == number) & ~np.isnat(trace.content["start_time"]))
        offset = trace.content["clock_offset"][mine]
        begin = trace.content["start_time"][mine].view(np.int64) - offset
        drift, has_end = _drifts(reader, trace.rows[mine])
        times = np.concatenate([begin, (begin + trace.content["duration"][mine])[has_end]])
        offsets = np.concatenate([offset, (offset + drift)[has_end]])
        episodes = np.concatenate([trace.chosen[mine], trace.chosen[mine][has_end]])
        order = np.argsort(times, kind="stable")
        jumps = np.diff(offsets[order])
        for i in np.flatnonzero(np.abs(jumps) >= self._jump).tolist():
            yield int(episodes[order[i + 1]]), float(jumps[i] / 1e9)


def _drifts(reader: WriterReader, rows: Array) -> tuple[Array, Array]:
    """Return the drift of UTC from the monotonic clock in these episodes (ns), and True for those with an end."""
    last = reader.parts.last[rows]
    ends = reader.fragments.flags[last] & wire.ENDS > 0
    return np.where(ends, reader.fragments.column("clock_drift", last), 0), ends
