"""Write files with one group per episode, along the map of a format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.episode import Episode
from gym_trace.data.layout import Layout, Leaf, Path
from gym_trace.data.packing import unpack
from gym_trace.data.values import Array
from gym_trace.data.vocabulary import ENVIRONMENT, FINAL
from gym_trace.errors import CorruptTrace, InvalidOption
from gym_trace.exchange.formats.columns import Column, observation_column, value_column
from gym_trace.exchange.formats.contract import RESTORED, Loss, losses, mixed_dtypes
from gym_trace.exchange.formats.hdf5.writing import Arrays, Datasets, Group
from gym_trace.exchange.formats.infos import ANNOTATIONS, info_columns, is_text
from gym_trace.exchange.formats.rows import named
from gym_trace.exchange.formats.simulators.groups import BESIDE, GroupMap, Name
from gym_trace.exchange.formats.source import ExportSource
from gym_trace.exchange.formats.steps.windows import Window
from gym_trace.playback.column_selection import name_of
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.row_types import RowType
from gym_trace.playback.scan import KEPT
from gym_trace.printable import printable

MASK = "mask/"  # prefix of annotations that name the sets of an episode, one value each


class GroupPlan(NamedTuple):
    """The arrays of each episode.

    after: those that take a known final observation. empty: groups without arrays. losses: see ExportPlan.
    """

    columns: list[Column]
    after: list[Column]
    empty: list[str]
    states: States
    losses: list[Loss]


def plan_of(source: ExportSource, format: GroupMap) -> GroupPlan:
    """Plan the export of a trace. Raises InvalidOption for what no array of numbers can hold."""
    lost: list[Loss] = []
    columns: list[Column] = []
    after: list[Column] = []
    for leaf in source.layouts.observations.leaves():
        name, form = format.name_of(leaf), _numbers(source, leaf)
        if 0 in form.shape:
            continue
        if format.next_observations:
            columns.append(Column(name, form, partial(_rows, leaf.path, slice(-1))))
            next_name = (format.next_observations, *name[1:])
            after.append(Column(next_name, form, partial(_rows, leaf.path, slice(1, None))))
        else:
            columns.append(observation_column(name, form, leaf.path))
    empty = [] if columns else [format.observations]
    lost += _structure(source.layouts.observations)
    actions = source.layouts.actions
    if not isinstance(actions, Leaf):
        raise InvalidOption("actions: not one array of numbers; wrap the environment so that they are")
    columns.append(_vectors(source, actions, lost))
    rewards = source.form_of_rewards()
    if rewards is None or rewards.dtype.kind not in "biuf" or rewards.shape:
        raise InvalidOption("rewards: not one number per step; export to jsonl, parquet or minari")
    if any(not np.isnan(window.columns["rewards",]).all() for window in source.survey("rewards")):
        columns.append(value_column(("rewards",), rewards, ("rewards",)))  # NaN: the trace has none either
    for flag, path in ((format.terminations, "terminations"), (format.truncations, "truncations")):
        if flag:
            columns.append(value_column((flag,), format.flag, (path,)))
    infos = info_columns(source)
    for info in infos.found:
        if info.path[0] != ANNOTATIONS:
            column = info.column()
            columns.append(column._replace(name=info.path) if info.path[0] in format.infos else column)
    left_out = infos.left_out or (["all"] if infos.has_infos and len(infos.found) == 0 else ())
    if left_out:
        lost.append(Loss("infos", f"infos missing from some steps, or of varying type: {named(list(left_out))}"))
    annotations, unlike = _annotations(source, format)
    if unlike:
        lost.append(Loss("annotations", f"annotations missing from some steps, or not numbers: {named(unlike)}"))
    columns += annotations
    states = States(source, format)
    lost += [*mixed_dtypes({column.name: column.form for column in columns}), *states.losses]
    lost += [*losses(source, "parts", restored=True), *losses(source, "empty_episode")]
    return GroupPlan(columns, after, empty, states, lost)


def _rows(path: Path, part: slice, window: Window) -> Any:
    return window.columns[path][part]


def _numbers(source: ExportSource, leaf: Leaf) -> RowType:
    form = source.forms.get(leaf.path)
    names = [key for key in leaf.path[1:] if type(key) is str]
    if form is None or form.dtype.kind not in "biuf":
        raise InvalidOption(
            f"{printable(name_of(leaf.path))}: not arrays of numbers; export to jsonl, parquet or minari"
        )
    if any(name in ("", ".", "..") or "/" in name or not is_text(name) for name in names):
        raise InvalidOption(f"{printable(name_of(leaf.path))}: a key that is not possible in HDF5; rename it")
    return form


def _structure(layout: Layout) -> Iterator[Loss]:
    """Yield the loss of Tuples and of keys that are not text. Raises InvalidOption for keys that collide."""
    if isinstance(layout, Leaf):
        return
    keys = [key for key, _ in layout.parts()]
    if len({*map(str, keys)}) < len(keys):
        raise InvalidOption("observations: keys collide as text; rename them")
    if layout.keys is None or any(type(key) is not str for key in keys):
        yield Loss("structure", f"Tuples, and keys that are numbers, become groups with keys of text{RESTORED}")
    for _, child in layout.parts():
        yield from _structure(child)


def _vectors(source: ExportSource, leaf: Leaf, lost: list[Loss]) -> Column:
    """Return the column of the actions: loaders take rows of several numbers."""
    form = _numbers(source, leaf)
    if form.shape:
        return value_column(("actions",), form, leaf.path)
    lost.append(Loss("structure", f"actions of one number become arrays of one number{RESTORED}"))
    return Column(("actions",), form._replace(shape=(1,)), lambda window: window.columns[leaf.path].reshape(-1, 1))


def _annotations(source: ExportSource, format: GroupMap) -> tuple[list[Column], list[str]]:
    """Return the annotations that can be arrays beside the others, and the names of those that cannot."""
    columns, unlike, taken = [], [], set[Name]()
    for path, form in sorted(source.forms.items(), key=lambda item: name_of(item[0])):
        if path[0] != "annotations" or str(path[1]).startswith(MASK):
            continue
        name = tuple(str(path[1]).split("/"))
        is_other_state = name[0] == format.states and not format.has_nested_states and len(name) > 1
        is_free = (name[0] not in format.roots or is_other_state) and all(name) and not {".", ".."} & {*name}
        is_free &= all(name[: len(other)] != other[: len(name)] for other in taken)  # no array where a group is
        if form is None or form.mixed or form.dtype.kind not in "biuf" or not is_free or not is_text(str(path[1])):
            unlike.append(str(path[1]))
            continue
        taken.add(name)
        columns.append(value_column(name, form, path))
    return columns, unlike


class States:
    """The recorded states of a trace as arrays, if every step has one, all of one form. losses: without them."""

    def __init__(self, source: ExportSource, format: GroupMap):
        self.losses: list[Loss] = []
        self._format, self._forms = format, dict[Name, RowType]()
        self._with_final: set[int] = set()
        count, are_alike, have_generators = 0, True, False
        for window in source.survey("rewards", states=True):
            given = [*window.columns.get(("states", ENVIRONMENT), ())]
            final = [*window.columns.get(("states", FINAL), ())][-1:]
            if window.closes and final and isinstance(final[0], Mapping):
                self._with_final.add(window.episode.index)
            for state in given + final:
                if isinstance(state, Mapping):
                    forms = {name: RowType(rows.dtype, rows.shape) for name, rows in self._values(state)}
                    self._forms = self._forms or forms
                    are_alike &= bool(forms) and forms == self._forms
                    have_generators |= state.get("generator") is not None
            count += sum(isinstance(state, Mapping) for state in given)
        if count and not (are_alike and count == source.steps):
            self._forms = {}
            self.losses.append(Loss("states", "states that some steps lack, or that are not arrays of one form"))
        elif have_generators:
            self.losses.append(Loss("states", "the generators of states are not kept"))
        elif self._with_final and not format.has_nested_states:
            self.losses.append(Loss("states", "the state after the last step of an episode is not kept"))
        self._arrays = {name: Arrays("/".join(name), form) for name, form in self._forms.items()}

    def _values(self, state: Any) -> Iterator[tuple[Name, Array]]:
        """Yield the arrays of a state; none if it has another form."""
        try:
            value = unpack(state["state"])
        except (CorruptTrace, KeyError, TypeError, ValueError):
            return
        if not self._format.has_nested_states:
            if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
                yield (self._format.states,), value
            return
        found = [*_arrays_in(value, (self._format.states,))] if isinstance(value, dict) else []
        if all(isinstance(rows, np.ndarray) and rows.shape[:1] == (1,) for _, rows in found):
            yield from ((name, rows[0]) for name, rows in found)

    @property
    def groups(self) -> list[str]:
        """Return the names of the groups to create, outer ones first."""
        return sorted({"/".join(name[:end]) for name in self._forms for end in range(1, len(name))})

    def create(self, group: Group, window: Window) -> None:
        """Create the arrays of an episode."""
        self._has_final = self._format.has_nested_states and window.episode.index in self._with_final
        rows = len(window.episode) + self._has_final
        self._datasets = {name: arrays.new(group, rows) for name, arrays in self._arrays.items()}

    def write(self, window: Window) -> None:
        """Write the states of a window."""
        if not self._arrays or not window.steps:
            return
        states = [*window.columns["states", ENVIRONMENT]]
        if self._has_final and window.closes:
            states.append(window.columns["states", FINAL][-1])
        read = [dict(self._values(state)) for state in states]
        for name, arrays in self._arrays.items():
            arrays.write(self._datasets[name], window.start, np.stack([values[name] for values in read]))


def _arrays_in(tree: Mapping[str, Any], path: Name) -> Iterator[tuple[Name, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _arrays_in(value, (*path, str(key)))
        else:
            yield (*path, str(key)), value


def write_episodes(
    source: ExportSource,
    plan: GroupPlan,
    check: Callable[[], None],
    begin: Callable[[Window, int], Group],
) -> None:
    """Write the arrays of all episodes that have steps.

    check: of new_file(). begin: creates the group of an episode, given its first steps and its number.
    """
    groups = [*plan.states.groups, *plan.empty]
    without, whole = (Datasets(columns, groups) for columns in (plan.columns, plan.columns + plan.after))
    datasets, number = whole, 0
    for window in source.windows(states=True):
        if window.start == 0 and len(window.episode):
            datasets = whole if source.finals != KEPT or window.episode.has_final_observation else without
            group = begin(window, number)
            datasets.create(group, len(window.episode))
            plan.states.create(group, window)
            number += 1
        if window.steps:
            datasets.write(window, window.start)
            plan.states.write(window)
        check()


# -- facts ------------------------------------------------------------------------------------------------------------


def imported_metadata(source: ExportSource, kind: str) -> dict[str, Any] | None:
    """Return what an import from this kind of files stored of the whole file; None for another trace."""
    metadata = index_of(source.trace).readers[0].schema.get("metadata")
    if not isinstance(metadata, dict) or metadata.get("imported_from") != kind:
        return None
    return {str(key): value for key, value in metadata.items() if key != "imported_from"}


def facts_of_episode(episode: Episode) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return what an import stored in a reset info: facts of the episode, and by path arrays that are not of steps."""
    facts = dict(episode.reset_info or {})
    arrays = facts.pop(BESIDE, None)
    found = arrays.items() if isinstance(arrays, dict) else ()
    return facts, {path: rows for path, rows in found if isinstance(rows, np.ndarray) and rows.dtype.kind in "biuf"}


def arguments_of(source: ExportSource) -> dict[str, Any]:
    """Return the arguments of the environment that JSON can hold."""
    made = source.environment.get("made")
    kwargs = made.get("kwargs") if isinstance(made, dict) else None
    pairs = kwargs.items() if isinstance(kwargs, dict) else ()
    return {name: stored[1] for name, stored in pairs if stored[0] == "value" and is_json(stored[1])}


def is_json(value: Any) -> bool:
    """Return True for a value that JSON can hold."""
    try:
        return bool(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return False
