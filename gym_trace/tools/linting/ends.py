"""Ends of episodes: immediate, cut, or by a time limit recorded as termination."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from gym_trace.data.schema import WriterSchema
from gym_trace.data.values import Array
from gym_trace.format import wire
from gym_trace.playback.scan import StepRuns
from gym_trace.playback.trace import Trace
from gym_trace.tools.linting.findings import NOTE, WARNING, Kind, Sighting

_AT_ONCE = Kind("T401", WARNING, "episodes that end at once")
_CUT = Kind("T402", WARNING, "episodes that were cut by a reset")
_OPEN = Kind("T403", NOTE, "episodes without an end: closed, lost or running")
_AT_LIMIT = Kind("T404", WARNING, "episodes that terminated exactly at the time limit")

_NEAR = 10  # steps before the limit: episodes that end there show how many terminate by chance


class EndsRule:
    """Looks at outcomes and lengths in the table of episodes."""

    kinds: ClassVar[Sequence[Kind]] = (_AT_ONCE, _CUT, _OPEN, _AT_LIMIT)
    columns: ClassVar[Collection[str]] = ()
    thresholds: ClassVar[Mapping[str, float]] = {"short_steps": 1, "usual_steps": 10, "at_limit": 3}

    def __init__(self, trace: Trace, thresholds: Mapping[str, float]):
        self._trace, self._thresholds = trace, thresholds

    def add(self, block: StepRuns) -> None:
        """Do nothing: this rule needs no steps."""

    def findings(self) -> Iterator[Sighting]:
        trace, table = self._trace, self._trace.content
        about = [writer.about_or_empty for writer in trace.readers]
        outcome, steps = table["outcome"], table["steps"]
        ended = np.isin(outcome, ("terminated", "truncated"))
        filtered = np.array([it.filters_frames for it in about], bool)[table["writer"]]
        imported = np.array([it.is_imported for it in about], bool)[table["writer"]]
        whole = ended & (table["first_step"] == 0) & ~filtered
        of_environment = np.unique([str(it.environment.get("id")) for it in about], return_inverse=True)[1]
        groups = of_environment[table["writer"]]
        short = np.zeros(len(table), bool)
        for group in np.unique(groups):
            mine = whole & (groups == group)
            if mine.any() and np.median(steps[mine]) >= self._thresholds["usual_steps"]:
                short |= mine & (steps <= self._thresholds["short_steps"])
        yield from self._of(_AT_ONCE, short, _AT_ONCE.what)
        yield from self._of(_CUT, (outcome == "cut") & (steps > 0) & ~imported, _CUT.what)
        yield from self._of(_OPEN, np.isin(outcome, ("closed", "lost", "running")), _OPEN.what)
        limits = np.array([time_limit(it) for it in about], np.int64)[table["writer"]]
        at_limit, near = self._terminated(whole, limits), whole & (steps >= limits - _NEAR) & (steps < limits)
        if int(at_limit.sum()) >= max(self._thresholds["at_limit"], 1 + int(near.sum())):
            limit = int(limits[at_limit][0])
            message = f"terminated, not truncated, after exactly {limit} steps, the time limit of the environment"
            yield from self._of(_AT_LIMIT, at_limit, message)

    def _terminated(self, whole: Array, limits: Array) -> Array:
        """Return the episodes that terminated at their limit and were not truncated there."""
        table = self._trace.content
        found: Array = whole & (limits > 0) & (table["steps"] == limits) & (table["outcome"] == "terminated")
        for index in np.flatnonzero(found).tolist():
            reader, row = self._trace.place_of(index)
            found[index] = not reader.fragments.flags[reader.parts.last_of(np.array([row]))[0]] & wire.TRUNCATED
        return found

    def _of(self, kind: Kind, found: Array, message: str) -> Iterator[Sighting]:
        if found.any():
            episode = int(np.argmax(found))
            yield Sighting(kind, message, int(np.count_nonzero(found)), "episode", episode)


def time_limit(about: WriterSchema) -> int:
    """Return the number of steps after which the recorded environment truncated its episodes; 0 if unknown."""
    limit: Any = None
    made = about.environment.get("made")
    for wrapper in made.get("wrappers") or () if isinstance(made, dict) else ():
        match wrapper:
            case [str(name), {"max_episode_steps": ["value", int(steps)]}] if name.endswith(":TimeLimit"):
                limit = steps
    if limit is None:
        try:
            spec = json.loads(str(about.environment.get("spec")))
            limit = spec.get("max_episode_steps") if isinstance(spec, dict) else None
        except (ValueError, RecursionError):
            limit = None
    return limit if isinstance(limit, int) and 0 < limit < 1 << 62 else 0
