"""Traces that are wrong in a way in which exports have been wrong: a comparison that does not find them is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from gym_trace.data.trees import cut, joined, mapped
from gym_trace.data.vocabulary import OUTCOMES
from gym_trace.exchange.formats.imported import Imported, NewEpisode, NewSteps, imported
from gym_trace.exchange.formats.importing import import_trace
from gym_trace.exchange.formats.steps.windows import with_repeated_final
from gym_trace.playback.trace import Trace, as_trace

Whole = tuple[str, NewSteps]  # outcome, and all steps of an episode


class Wrong(NamedTuple):
    """hidden_by: losses (see contract.LOSSES) of a format that hide this."""

    hidden_by: frozenset[str]
    change: Callable[[list[Whole]], list[Whole]]


def wrong_trace(trace: Trace | str | Path, what: str, destination: Path) -> bool:
    """Writes a trace like this one, but for what is wrong with it; returns whether this can be wrong with it at all.

    what: one of WRONG. trace: a small one, all of whose episodes have steps.
    """
    right = _episodes(as_trace(trace))
    made = WRONG[what].change(right)
    if all(one is other for one, other in zip(made, right)) and len(made) == len(right):
        return False
    import_trace(as_trace(trace).directory, destination, _Made(as_trace(trace), made))
    return True


def _episodes(trace: Trace) -> list[Whole]:
    return [(e.outcome, NewSteps(e.observations, e.actions, e.rewards, e.terminations, e.truncations)) for e in trace]


class _Made:
    """An importer of what was made in memory."""

    name: ClassVar[str] = "made"

    def __init__(self, trace: Trace, episodes: list[Whole]):
        self._trace, self._episodes = trace, episodes

    def recognises(self, path: Path) -> bool:
        return False

    def read(self, path: Path) -> Imported:
        schema = {k: v for k, v in self._trace.readers[0].schema.items() if k not in ("writer", "format", "type")}
        episodes = enumerate(self._episodes)
        new = (NewEpisode(len(steps.rewards), [steps], outcome, seed=i) for i, (outcome, steps) in episodes)
        return imported("made", new, schema)


# -- what can be wrong ------------------------------------------------------------------------------------------------


def _each(
    name: str, change: Callable[[Any], Any], applies: Callable[[Any], bool] = lambda rows: True
) -> Callable[[list[Whole]], list[Whole]]:
    """Return a function that changes the arrays of observations, actions or rewards to which the change applies."""

    def changed(episodes: list[Whole]) -> list[Whole]:
        found: list[bool] = []
        mapped(lambda rows: found.append(applies(rows)), getattr(episodes[0][1], name))
        if not any(found):
            return episodes
        return [
            (outcome, steps._replace(**{name: mapped(lambda r: change(r) if applies(r) else r, getattr(steps, name))}))
            for outcome, steps in episodes
        ]

    return changed


def _rolled(rows: Any) -> Any:
    return np.roll(rows, -1, axis=0)


def _swapped(episodes: list[Whole]) -> list[Whole]:
    ends = {OUTCOMES[1]: OUTCOMES[2], OUTCOMES[2]: OUTCOMES[1]}
    return [
        (ends.get(outcome, outcome), s._replace(terminations=s.truncations, truncations=s.terminations))
        for outcome, s in episodes
    ]


def _merged(episodes: list[Whole]) -> list[Whole]:
    """Truncated episodes read as terminated."""

    def merge(steps: NewSteps) -> NewSteps:
        ends: Any = np.logical_or(*_flags(steps))
        return steps._replace(terminations=ends, truncations=np.zeros_like(ends))

    return [(OUTCOMES[1] if outcome == OUTCOMES[2] else outcome, merge(steps)) for outcome, steps in episodes]


def _flags(steps: NewSteps) -> tuple[Any, Any]:
    return steps.terminations, steps.truncations


def _two_joined(episodes: list[Whole]) -> list[Whole]:
    (_, one), (outcome, other), *rest = episodes
    quiet = np.zeros(len(one.rewards), np.bool_)
    both = NewSteps(
        joined(cut(one.observations, 0, -1), other.observations),
        joined(one.actions, other.actions),
        np.concatenate((one.rewards, other.rewards)),
        np.concatenate((quiet, _flags(other)[0])),
        np.concatenate((quiet, _flags(other)[1])),
    )
    return [(outcome, both), *rest]


WRONG = {
    "rewards shifted": Wrong(frozenset(), _each("rewards", _rolled)),
    "final observation doubled": Wrong(frozenset(("final_observation",)), _each("observations", with_repeated_final)),
    "terminated and truncated swapped": Wrong(frozenset(), _swapped),
    "terminated and truncated merged": Wrong(frozenset(), _merged),
    "observations shifted": Wrong(frozenset(), _each("observations", _rolled)),
    "actions shifted": Wrong(frozenset(), _each("actions", _rolled)),
    "an episode missing": Wrong(frozenset(), lambda episodes: [episodes[0], *episodes[2:]]),
    "two episodes joined": Wrong(frozenset(), _two_joined),
    "float32 for float64": Wrong(
        frozenset(("dtype",)),
        _each("observations", lambda rows: rows.astype(np.float32), lambda rows: rows.dtype == np.float64),
    ),
    "lossy pixels": Wrong(
        frozenset(("pixels",)),
        _each("observations", lambda rows: rows ^ 1, lambda rows: rows.dtype == np.uint8 and rows.ndim > 2),
    ),
}
