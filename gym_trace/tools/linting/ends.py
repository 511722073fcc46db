"""Find episodes that end at once, were cut, or terminated exactly at their time limit."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from gym_trace.data.schema import WriterSchema
from gym_trace.data.values import Array
from gym_trace.format import wire
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.scan import StepRuns
from gym_trace.playback.trace import Trace
from gym_trace.tools.linting.findings import NOTE, WARNING, Kind, Sighting

_AT_ONCE = Kind("T401", WARNING, "episodes that end at once")
_CUT = Kind("T402", WARNING, "episodes that were cut by a reset")
_OPEN = Kind("T403", NOTE, "episodes without an end: closed, lost or running")
_AT_LIMIT = Kind("T404", WARNING, "episodes that terminated exactly at the time limit")

# Episodes that end in the last steps before the limit show how many terminate there by chance.
_STEPS_NEAR_LIMIT = 10


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
        trace, table = self._trace, index_of(self._trace)
        schemas = [writer.about_or_empty for writer in index_of(trace).readers]
        outcome, steps = table["outcome"], table["steps"]
        ended = np.isin(outcome, ("terminated", "truncated"))
        filtered = np.array([schema.filters_frames for schema in schemas], bool)[table["writer"]]
        imported = np.array([schema.is_imported for schema in schemas], bool)[table["writer"]]
        whole = ended & (table["first_step"] == 0) & ~filtered
        environments = np.unique([str(schema.environment.get("id")) for schema in schemas], return_inverse=True)[1]
        environment = environments[table["writer"]]
        short = np.zeros(len(table), bool)
        for number in np.unique(environment):
            alike = whole & (environment == number)
            if alike.any() and np.median(steps[alike]) >= self._thresholds["usual_steps"]:
                short |= alike & (steps <= self._thresholds["short_steps"])
        yield from self._sighting(_AT_ONCE, short, _AT_ONCE.what)
        yield from self._sighting(_CUT, (outcome == "cut") & (steps > 0) & ~imported, _CUT.what)
        yield from self._sighting(_OPEN, np.isin(outcome, ("closed", "lost", "running")), _OPEN.what)
        limits = np.array([time_limit(schema) for schema in schemas], np.int64)[table["writer"]]
        at_limit = self._terminated_at(limits, whole)
        near = whole & (steps >= limits - _STEPS_NEAR_LIMIT) & (steps < limits)
        if int(at_limit.sum()) >= max(self._thresholds["at_limit"], 1 + int(near.sum())):
            limit = int(limits[at_limit][0])
            message = f"terminated, not truncated, after exactly {limit} steps, the time limit of the environment"
            yield from self._sighting(_AT_LIMIT, at_limit, message)

    def _terminated_at(self, limits: Array, whole: Array) -> Array:
        """Return True for whole episodes that terminated at their limit and were not also truncated."""
        table = index_of(self._trace)
        found: Array = whole & (limits > 0) & (table["steps"] == limits) & (table["outcome"] == "terminated")
        for index in np.flatnonzero(found).tolist():
            reader, row = index_of(self._trace).locate(index)
            found[index] = not reader.fragments.flags[reader.parts.last_of(np.array([row]))[0]] & wire.TRUNCATED
        return found

    def _sighting(self, kind: Kind, found: Array, message: str) -> Iterator[Sighting]:
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
