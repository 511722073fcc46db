"""Copies of traces with one planted defect, as exports have had: loaders and comparisons must notice each."""

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from gym_trace.data.trees import cut, joined, mapped
from gym_trace.data.vocabulary import OUTCOMES
from gym_trace.errors import InvalidOption
from gym_trace.exchange.formats import conformance
from gym_trace.exchange.formats.conformance import Loaded, difference, make_zoo
from gym_trace.exchange.formats.contract import Exporter
from gym_trace.exchange.formats.exporting import export
from gym_trace.exchange.formats.imported import Imported, NewEpisode, NewSteps, imported
from gym_trace.exchange.formats.importing import import_trace
from gym_trace.exchange.formats.source import ExportSource
from gym_trace.exchange.formats.steps.windows import with_repeated_final
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.scan import REPEATED
from gym_trace.playback.trace import Trace, as_trace

Whole = tuple[str, NewSteps]  # outcome, and all steps of an episode
Load = Callable[[Path], Iterable[Loaded]]
# Traces with everything that DEFECTS change: float64, images, and both kinds of ends.
TRACES = ("vectors", "float64", "pixels", "integers", "dict")


class Defect(NamedTuple):
    """hidden_by: losses (see contract.LOSSES) of a format that hide this defect."""

    hidden_by: frozenset[str]
    change: Callable[[list[Whole]], list[Whole]]


def plant(defect: str, trace: Trace | str | Path, destination: Path) -> bool:
    """Write a copy of `trace` with one planted defect. Return False if the defect does not apply to this trace.

    defect: one of DEFECTS. trace: a small one, whose episodes all have steps.
    """
    right = _episodes(as_trace(trace))
    made = DEFECTS[defect].change(right)
    if all(one is other for one, other in zip(made, right)) and len(made) == len(right):
        return False
    import_trace(as_trace(trace).directory, destination, _Made(as_trace(trace), made))
    return True


def _episodes(trace: Trace) -> list[Whole]:
    return [(e.outcome, NewSteps(e.observations, e.actions, e.rewards, e.terminations, e.truncations)) for e in trace]


class _Made:
    """An importer of episodes in memory."""

    name: ClassVar[str] = "made"

    def __init__(self, trace: Trace, episodes: list[Whole]):
        self._trace, self._episodes = trace, episodes

    def recognises(self, path: Path) -> bool:
        return False

    def read(self, path: Path) -> Imported:
        schema = {
            k: v for k, v in index_of(self._trace).readers[0].schema.items() if k not in ("writer", "format", "type")
        }
        episodes = enumerate(self._episodes)
        new = (NewEpisode(len(steps.rewards), [steps], outcome, seed=i) for i, (outcome, steps) in episodes)
        return imported("made", new, schema)


# -- defects ---------------------------------------------------------------------------------------------------------


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


DEFECTS = {
    "rewards shifted": Defect(frozenset(), _each("rewards", _rolled)),
    "final observation doubled": Defect(frozenset(("final_observation",)), _each("observations", with_repeated_final)),
    "terminated and truncated swapped": Defect(frozenset(), _swapped),
    "terminated and truncated merged": Defect(frozenset(), _merged),
    "observations shifted": Defect(frozenset(), _each("observations", _rolled)),
    "actions shifted": Defect(frozenset(), _each("actions", _rolled)),
    "an episode missing": Defect(frozenset(), lambda episodes: [episodes[0], *episodes[2:]]),
    "two episodes joined": Defect(frozenset(), _two_joined),
    "float32 for float64": Defect(
        frozenset(("dtype",)),
        _each("observations", lambda rows: rows.astype(np.float32), lambda rows: rows.dtype == np.float64),
    ),
    "lossy pixels": Defect(
        frozenset(("pixels",)),
        _each("observations", lambda rows: rows ^ 1, lambda rows: rows.dtype == np.uint8 and rows.ndim > 2),
    ),
}


# -- checks -----------------------------------------------------------------------------------------------------------


def check_exporter(
    exporter: Exporter, load: Load, directory: Path, *, suffix: str = "", **options: Any
) -> dict[str, str]:
    """Run check_exporter() of conformance; then plant defects into its traces, and check that load shows each."""
    refused = conformance.check_exporter(exporter, load, directory, suffix=suffix, **options)
    for name in TRACES:
        trace = directory / "traces" / name
        if name not in refused and trace.exists():
            found = _noticed(exporter, load, trace, directory / f"{name}-defects", suffix)
            assert len(found) > 3, f"{name}: only {found} apply"
    return refused


def _noticed(exporter: Exporter, load: Load, trace: Path, directory: Path, suffix: str) -> list[str]:
    """Export a trace with each defect that applies and that no loss hides. Return their names."""
    source = ExportSource(as_trace(trace), finals=getattr(exporter, "finals", REPEATED))
    lost = {loss.what for loss in exporter.plan(source).losses}
    found = []
    for number, (name, defect) in enumerate(DEFECTS.items()):
        place, out = directory / f"trace-{number}", directory / f"{number}{suffix}"
        if defect.hidden_by & lost or not plant(name, source.trace, place):
            continue
        found.append(name)
        try:
            export(place, out, exporter)
            shown = difference(source, load(out), lost, only_steps=True)
        except Exception:  # a rejected trace and a failing load show the defect, too
            continue
        assert shown, f"{exporter.name}, {trace.name}: {name}, not noticed"
    return found


def check_adapter(
    load: Callable[[Trace], Iterable[Loaded]], directory: Path, *, lost: Collection[str], only: Collection[str] = ()
) -> dict[str, str]:
    """Convert traces of every kind, also with planted defects, to objects of a library, and compare their steps.

    Args:
        load: converts a trace and yields the episodes of the result. Raises InvalidOption for spaces that the library
            does not support.
        directory: an empty output directory.
        lost: what the objects cannot hold (see contract.LOSSES).
        only: names of the traces (see zoo.py); empty: all.

    Returns:
        The rejected traces by name, with the reason.

    Raises AssertionError if an object differs from its trace, or if a defect does not change the object.
    """
    rejected: dict[str, str] = {}
    for name, path in make_zoo(directory / "traces", only).items():
        source = ExportSource(as_trace(path))
        try:
            problem = difference(source, load(source.trace), lost, only_steps=True)
        except InvalidOption as error:
            rejected[name] = str(error)
            continue
        assert not problem, f"{name}: {problem}"
        for number, (what, defect) in enumerate(DEFECTS.items() if name in TRACES else ()):
            place = directory / f"{name}-defect-{number}"
            if defect.hidden_by.isdisjoint(lost) and plant(what, source.trace, place):
                shown = difference(source, load(as_trace(place)), lost, only_steps=True)
                assert shown, f"{name}: {what} goes unnoticed"
    return rejected
