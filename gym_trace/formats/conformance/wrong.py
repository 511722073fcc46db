"""Traces that are wrong in a way in which exports have been wrong: a comparison that does not find them is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from gym_trace.formats.imported import Imported, NewEpisode, NewSteps, imported
from gym_trace.formats.importing import import_trace
from gym_trace.model.vocabulary import OUTCOMES
from gym_trace.playback.trace import Trace, as_trace

Whole = tuple[str, NewSteps]  # outcome, and all steps of an episode


class Wrong(NamedTuple):
    """hidden_by: losses (see contract.LOSSES) of a format in which this cannot be seen."""

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
        return imported("made", self._new(), schema)

    def _new(self) -> Iterator[NewEpisode]:
        for number, (outcome, steps) in enumerate(self._episodes):
            yield NewEpisode(len(steps.rewards), [steps], outcome, seed=number)


# -- trees of arrays --------------------------------------------------------------------------------------------------


def _map(tree: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, dict):
        return {key: _map(part, change) for key, part in tree.items()}
    return tuple(_map(part, change) for part in tree) if isinstance(tree, tuple) else change(tree)


def _joined(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return {key: _joined(part, other[key]) for key, part in one.items()}
    return tuple(map(_joined, one, other)) if isinstance(one, tuple) else np.concatenate((one, other))


def _rolled(rows: Any) -> Any:
    return np.roll(rows, -1, axis=0)


def _doubled(rows: Any) -> Any:
    return np.concatenate((rows[:-1], rows[-2:-1]))


def _has(tree: Any, asked: Callable[[Any], bool]) -> bool:
    if isinstance(tree, (dict, tuple)):
        return any(_has(part, asked) for part in (tree.values() if isinstance(tree, dict) else tree))
    return asked(tree)


# -- what can be wrong ------------------------------------------------------------------------------------------------


def _each(change: Callable[[NewSteps], NewSteps]) -> Callable[[list[Whole]], list[Whole]]:
    return lambda episodes: [(outcome, change(steps)) for outcome, steps in episodes]


def _swapped(episodes: list[Whole]) -> list[Whole]:
    ends = {OUTCOMES[1]: OUTCOMES[2], OUTCOMES[2]: OUTCOMES[1]}
    return [
        (ends.get(outcome, outcome), s._replace(terminations=s.truncations, truncations=s.terminations))
        for outcome, s in episodes
    ]


def _merged(episodes: list[Whole]) -> list[Whole]:
    """Truncated episodes read as terminated."""

    def merge(steps: NewSteps) -> NewSteps:
        assert steps.terminations is not None
        assert steps.truncations is not None
        return steps._replace(
            terminations=steps.terminations | steps.truncations, truncations=np.zeros_like(steps.truncations)
        )

    ended = [OUTCOMES[1] if outcome == OUTCOMES[2] else outcome for outcome, _ in episodes]
    return [(outcome, merge(steps)) for outcome, (_, steps) in zip(ended, episodes)]


def _two_joined(episodes: list[Whole]) -> list[Whole]:
    (_, one), (outcome, other), *rest = episodes
    quiet = np.zeros(len(one.rewards), np.bool_)
    both = NewSteps(
        _joined(_map(one.observations, lambda rows: rows[:-1]), other.observations),
        _joined(one.actions, other.actions),
        np.concatenate((one.rewards, other.rewards)),
        np.concatenate((quiet, other.terminations)),  # type: ignore[arg-type]
        np.concatenate((quiet, other.truncations)),  # type: ignore[arg-type]
    )
    return [(outcome, both), *rest]


def _narrowed(episodes: list[Whole]) -> list[Whole]:
    def narrow(rows: Any) -> Any:
        return rows.astype(np.float32) if rows.dtype == np.float64 else rows

    if not _has(episodes[0][1].observations, lambda rows: rows.dtype == np.float64):
        return episodes
    return _each(lambda steps: steps._replace(observations=_map(steps.observations, narrow)))(episodes)


def _is_image(rows: Any) -> bool:
    return bool(rows.dtype == np.uint8 and rows.ndim > 2)


def _lossy(episodes: list[Whole]) -> list[Whole]:
    def lose(rows: Any) -> Any:
        return rows ^ 1 if _is_image(rows) else rows

    if not _has(episodes[0][1].observations, _is_image):
        return episodes
    return _each(lambda steps: steps._replace(observations=_map(steps.observations, lose)))(episodes)


WRONG = {
    "rewards shifted": Wrong(frozenset(), _each(lambda steps: steps._replace(rewards=_rolled(steps.rewards)))),
    "final observation doubled": Wrong(
        frozenset(("final_observation",)),
        _each(lambda steps: steps._replace(observations=_map(steps.observations, _doubled))),
    ),
    "terminated and truncated swapped": Wrong(frozenset(), _swapped),
    "terminated and truncated merged": Wrong(frozenset(), _merged),
    "observations shifted": Wrong(
        frozenset(), _each(lambda steps: steps._replace(observations=_map(steps.observations, _rolled)))
    ),
    "actions shifted": Wrong(frozenset(), _each(lambda steps: steps._replace(actions=_map(steps.actions, _rolled)))),
    "an episode missing": Wrong(frozenset(), lambda episodes: [episodes[0], *episodes[2:]]),
    "two episodes joined": Wrong(frozenset(), _two_joined),
    "float32 for float64": Wrong(frozenset(("dtype",)), _narrowed),
    "lossy pixels": Wrong(frozenset(("pixels",)), _lossy),
}
