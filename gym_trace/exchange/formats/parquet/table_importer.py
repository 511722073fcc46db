"""Any Parquet table with one row per step as a trace; the role of each column is guessed, or given by a mapping."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from gym_trace.data.layout import PlainSpace
from gym_trace.data.trees import cut, leaves_of, mapped
from gym_trace.data.values import Array, dtype_from
from gym_trace.errors import InvalidOption, UnreadableRecording
from gym_trace.exchange.formats.foreign import begins_with, in_parts, placeholder, widest
from gym_trace.exchange.formats.imported import Imported, NewEpisode, NewSteps, imported, new_schema
from gym_trace.exchange.formats.parquet.tables import (
    Table,
    dtype_of,
    is_list,
    is_number,
    is_text,
    located,
    numbers_in,
    parquet_files,
)
from gym_trace.exchange.formats.rows import ANY_TEXT, RowQueue, after_steps, named
from gym_trace.printable import printable

_KIND = "Parquet table"
_MAGIC = b"PAR1"
_LARGE = 1 << 30  # assumed bytes of a row, so that one is read at a time
_MOST_ELEMENTS = 1 << 27  # per row
_MOST_NAMED = 40  # columns in a message
_DEEPEST = 16

_DONE = ("done", "dones", "next.done")  # true also where an episode was truncated
# Roles of columns with their usual names; a mapping may use any of these.
ROLES: dict[str, tuple[str, ...]] = {
    "observations": ("observations", "observation", "obs", "state", "states"),
    "actions": ("actions", "action", "acts", "act"),
    "rewards": ("rewards", "reward", "rews", "rew", "next.reward"),
    "terminations": ("terminations", "terminated", "terminateds", "terminal", "terminals", *_DONE),
    "truncations": ("truncations", "truncated", "truncateds", "timeout", "timeouts", "next.truncated"),
    "episode": ("episode", "episode_index", "episode_id", "episodes", "eps_id"),
    "step": ("step", "step_index", "frame_index", "timestep", "time_step"),
    "next_observations": ("next_observations", "next_observation", "next_obs", "new_obs", "next_state", "next_states"),
}
_FLAGS = ("terminations", "truncations")
_MANY = ("observations", "actions", "next_observations")  # several columns may form one of these


@dataclass(frozen=True)
class _CellType:
    """Numbers of a dtype and shape; texts if dtype is None."""

    dtype: np.dtype[Any] | None
    shape: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of a row, about."""
        return 256 if self.dtype is None else self.dtype.itemsize * math.prod(self.shape)


_ColumnType = Any  # _CellType, dict of column types, or None for unsupported columns


@dataclass(frozen=True)
class TableImporter:
    """One Parquet table, one row per step: a file, or all files in a directory.

    map: columns by the names in ROLES: {"observations": "state"}, or "obs=state,acts=action". A name with
    * in it stands for several columns: a vector if all are numbers, otherwise a Dict. Empty: no such column.
    """

    map: str | Mapping[str, str] = field(default_factory=dict)

    name: ClassVar[str] = "table"

    def recognises(self, path: Path) -> bool:
        """Return True for Parquet, or a directory with Parquet files."""
        found = parquet_files(path, most=1)
        return bool(found) and begins_with(found[0], _MAGIC)

    def read(self, path: Path) -> Imported:
        """Read the table. Raises InvalidOption if the mapping names a missing column."""
        table = Table(path, parquet_files(path))
        return _TableReader(table, _roles(table, _given(self.map))).imported()


def _given(mapping: str | Mapping[str, str]) -> dict[str, str]:
    """A mapping by the names of ROLES. Raises InvalidOption."""
    if isinstance(mapping, str):
        parts = [part.partition("=") for part in mapping.split(",") if part.strip()]
        if bad := next((name for name, equals, _ in parts if not equals), None):
            raise InvalidOption(f"map: {bad!r}: invalid; pass NAME=COLUMN, such as obs=state,acts=action")
        mapping = {name.strip(): column.strip() for name, _, column in parts}
    found = {}
    for name, column in mapping.items():
        role = next((role for role, names in ROLES.items() if name in names), None)
        if role is None or not isinstance(column, str):
            raise InvalidOption(f"map: unknown name {name!r}; use {', '.join(ROLES)}")
        found[role] = column
    return found


# -- roles of columns -------------------------------------------------------------------------------------------------


def _columns_of(table: Table) -> list[str]:
    return list(dict.fromkeys(table.schema.names))


def _roles(table: Table, given: dict[str, str]) -> dict[str, list[str]]:
    """Return the columns of each role: those of the mapping, otherwise those with a usual name."""
    there = _columns_of(table)
    known = f"its columns are {named(there, _MOST_NAMED)}"
    found: dict[str, list[str]] = {}
    for role, column in given.items():
        pattern = re.compile(".*".join(map(re.escape, column.split("*"))), re.DOTALL)
        chosen = [column] if column in there else [name for name in there if pattern.fullmatch(name)]
        if column and not chosen:
            raise InvalidOption(f"map: {table.path} has no column {printable(column)!r}; {known}")
        if len(chosen) > 1 and role not in _MANY:
            raise InvalidOption(f"map: {role} takes one column, {printable(column)!r} matches {len(chosen)}")
        found[role] = sorted(chosen, key=in_parts) if column else []
    taken = {name for names in found.values() for name in names}
    for role in ROLES:
        if role not in found:
            found[role] = _guessed(role, [name for name in there if name not in taken])
    missing = [role for role in ("observations", "actions") if not found[role]]
    if not found["episode"] and not found["terminations"] and not found["truncations"]:
        missing.append("episode")
    if missing:
        line = ",".join(f"{role}=COLUMN" for role in ROLES if role in (*missing, "rewards", "episode"))
        raise table.fault(
            f"no columns found for {' or '.join(missing)}; {known}; map them: "
            f"gym-trace import {printable(table.path)} -o DIR --map {line}"
        )
    return {role: names for role, names in found.items() if names}


def _guessed(role: str, there: list[str]) -> list[str]:
    for usual in ROLES[role]:
        if named := [name for name in there if name.lower() == usual]:
            return named[:1]
        if role in _MANY:  # observation.state and observation.image; obs_0, obs_1 …; observations[0]
            parts = re.compile(rf"{re.escape(usual)}(?:[./].+|[._]?\[?\d+\]?)", re.IGNORECASE)
            if several := [name for name in there if parts.fullmatch(name)]:
                return sorted(several, key=in_parts)
    return []


# -- types of columns -------------------------------------------------------------------------------------------------


def _form_of(kind: pa.DataType, row: Any, depth: int = 0) -> _ColumnType:
    """Infer a column's type from one value; None if unsupported."""
    if isinstance(kind, pa.BaseExtensionType):
        shape = tuple(getattr(kind, "shape", ()))
        form = _form_of(kind.storage_type, row, depth)
        return replace(form, shape=shape) if isinstance(form, _CellType) and shape else form
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if is_text(kind):
        return _CellType(None)
    if pa.types.is_struct(kind) and depth < _DEEPEST and kind.num_fields:
        parts = row if isinstance(row, dict) else {}
        forms = {one.name: _form_of(one.type, parts.get(one.name), depth + 1) for one in kind}
        return None if None in forms.values() or len(forms) < kind.num_fields else forms
    shape = ()
    while is_list(kind) and len(shape) < _DEEPEST:
        if pa.types.is_fixed_size_list(kind):
            shape, row = (*shape, int(kind.list_size)), row[0] if row else None
        elif isinstance(row, list):
            shape, row = (*shape, len(row)), row[0] if row else None
        else:
            return None
        kind = kind.value_type
    if not is_number(kind):
        return None
    leaf = _CellType(dtype_from(dtype_of(kind).str), shape)
    return leaf if math.prod(shape) <= _MOST_ELEMENTS else None


def _rows(form: _ColumnType, array: pa.Array, name: str) -> Any:
    """Return the rows of a column. Raises UnreadableRecording if one has another type."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if array.null_count:
        raise UnreadableRecording(f"{printable(name)}: some rows have no value")
    if not isinstance(form, _CellType):
        return {key: _rows(part, array.field(key), f"{name}.{key}") for key, part in form.items()}
    if form.dtype is None:
        return array.to_pylist()
    values = numbers_in(array, form.shape)
    if values is None:
        raise UnreadableRecording(f"{printable(name)}: rows are not all of shape {list(form.shape)}")
    return values.astype(form.dtype)


# -- episodes ---------------------------------------------------------------------------------------------------------


class _TableReader:
    def __init__(self, table: Table, roles: dict[str, list[str]]):
        self._table, self._roles = table, roles
        names = _columns_of(table)
        first = next((batch for batch in table.batches(names, _LARGE) if len(batch)), None)
        if first is None:
            raise table.fault("has no rows")
        with located(table.path):
            row = first.slice(0, 1).to_pylist()[0]
        forms = {name: _form_of(table.schema.field(name).type, row[name]) for name in names}
        for role, chosen in roles.items():
            for name in chosen:
                if not _fits(forms[name], role):
                    kind = printable(table.schema.field(name).type)
                    raise table.fault(f"the column {printable(name)} is {kind:.100}, which cannot be {role}")
        self._forms = forms
        used = {name for chosen in roles.values() for name in chosen}
        self._notes = [name for name in names if name not in used and isinstance(forms[name], _CellType)]
        self._left_out = [name for name in names if name not in used and name not in self._notes]
        self._read = [name for name in names if name in used or name in self._notes]
        self._row_size = max(1, sum(leaf.size for name in self._read for leaf in leaves_of(forms[name])))

    def imported(self) -> Imported:
        observations, actions = (_space(self._form(role)) for role in ("observations", "actions"))
        columns = {role: "+".join(names) for role, names in self._roles.items()}
        environment = {"note": f"{self._table.path.name} does not say the environment"}
        metadata = {"imported_from": _KIND, "columns": columns}
        schema = new_schema(_KIND, observations, actions, environment, metadata)
        lengths = self._lengths()
        return imported(_KIND, self._episodes(lengths), schema, warnings=self._table_warnings(), steps=self._table.rows)

    def _table_warnings(self) -> Iterator[str]:
        """Yield which columns were taken for what, and what the table lacks."""
        roles = (f"{role} from {' + '.join(map(printable, names))}" for role, names in self._roles.items())
        yield f"read as a table with one row per step: {', '.join(roles)}"
        yield "the table has no seeds, times or spaces; spaces are as wide as the dtypes"
        if "next_observations" not in self._roles:
            yield "no next observations: final observations are placeholders (NaN, 0 or empty)"
        if "rewards" not in self._roles:
            yield "no rewards: they are NaN"
        if not set(_FLAGS) & set(self._roles):
            yield "no flags: episodes are cut"
        if self._left_out:
            yield f"skipped, neither numbers nor text: {named(self._left_out, _MOST_NAMED)}"

    def _form(self, role: str) -> _ColumnType:
        """Join the columns of a role: one column, a vector of numbers, or a dict."""
        names = self._roles[role]
        forms = [self._forms[name] for name in names]
        if len(names) == 1:
            return forms[0]
        if all(isinstance(form, _CellType) and form.dtype is not None and not form.shape for form in forms):
            return _CellType(np.result_type(*(form.dtype for form in forms)), (len(forms),))
        return dict(zip(_keys(names), forms))

    def _rows_of(self, role: str, batch: pa.RecordBatch) -> Any:
        names = self._roles[role]
        found = [_rows(self._forms[name], batch.column(name), name) for name in names]
        if len(names) == 1:
            return found[0]
        form = self._form(role)
        return np.stack(found, 1).astype(form.dtype) if isinstance(form, _CellType) else dict(zip(_keys(names), found))

    def _lengths(self) -> list[int]:
        """Yield the steps of each episode. Raises UnreadableRecording if its rows are not consecutive."""
        if "episode" not in self._roles:
            names = [name for role in _FLAGS for name in self._roles.get(role, ())]
            over = [np.logical_or(*self._flags_in(batch)) for batch in self._table.batches(names)]
            ends = np.flatnonzero(np.concatenate(over)) + 1
            if not len(ends) or ends[-1] < self._table.rows:
                ends = np.append(ends, self._table.rows)
            return [int(length) for length in np.diff(ends, prepend=0)]
        (name,) = self._roles["episode"]
        ids: list[Any] = []
        lengths: list[int] = []
        for batch in self._table.batches([name]):
            column = _rows(self._forms[name], batch.column(name), name)
            values = np.array(column, object) if isinstance(column, list) else column
            begins = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
            counts = np.diff(begins, append=len(values)).tolist()
            firsts = values[begins].tolist()
            if ids and ids[-1] == firsts[0]:
                lengths[-1] += counts.pop(0)
                firsts.pop(0)
            ids += firsts
            lengths += counts
        if len(set(ids)) < len(ids):
            twice = Counter(ids).most_common(1)[0][0]
            raise self._table.fault(
                f"the rows of episode {printable(twice):.60} are not consecutive; sort it by {printable(name)}"
            )
        return lengths

    def _flags_in(self, batch: pa.RecordBatch) -> tuple[Array, Array]:
        """Return the terminated and the truncated flags, (rows,) bool each."""
        pair = [np.zeros(len(batch), np.bool_), np.zeros(len(batch), np.bool_)]
        for place, role in enumerate(_FLAGS):
            if role in self._roles:
                pair[place] = self._rows_of(role, batch).astype(np.bool_)
        if self._roles.get("terminations", [""])[0].lower() in _DONE:
            pair[0] &= ~pair[1]
        return pair[0], pair[1]

    def _episodes(self, lengths: list[int]) -> Iterator[NewEpisode]:
        rows = RowQueue(self._decoded())
        final = mapped(lambda leaf: placeholder(leaf.dtype, leaf.shape), self._form("observations"))
        has_final = "next_observations" in self._roles
        for steps in lengths:
            yield NewEpisode(steps, self._parts(rows, steps, final), has_final_observation=has_final)

    def _decoded(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield rows by role, and annotations by name, some steps at a time."""
        for batch in self._table.batches(self._read, self._row_size):
            found = {role: self._rows_of(role, batch) for role in self._roles if role not in _FLAGS}
            found |= zip(_FLAGS, self._flags_in(batch))
            found.setdefault("rewards", np.full(len(batch), np.nan))
            found["annotations"] = {name: _note(self._forms[name], batch.column(name), name) for name in self._notes}
            yield len(batch), found

    def _parts(self, given: RowQueue, steps: int, final: Any) -> Iterator[NewSteps]:
        def parts() -> Iterator[tuple[Any, Any]]:
            before, left = None, steps
            while left and not given.is_over():
                count, rows = given.take(left)
                left -= count
                before = self._in_order(rows, before)
                yield rows["observations"], rows
            yield (cut(rows["next_observations"], count - 1) if "next_observations" in rows else final), None

        for observations, rows in after_steps(parts()):
            terminated, truncated, notes = rows["terminations"], rows["truncations"], rows["annotations"]
            yield NewSteps(observations, rows["actions"], rows["rewards"], terminated, truncated, annotations=notes)

    def _in_order(self, rows: dict[str, Any], before: Any) -> Any:
        """Return the last step number. Raises UnreadableRecording if the numbers do not increase."""
        if "step" not in rows:
            return None
        numbers = rows["step"] if before is None else np.append(before, rows["step"])
        if (numbers[1:] <= numbers[:-1]).any():
            name = printable(self._roles["step"][0])
            raise self._table.fault(f"the steps of an episode are not in the order of {name}; sort it, or --map step=")
        return numbers[-1]


def _note(form: _CellType, array: pa.Array, name: str) -> Any:
    """Return the rows of an annotation; some may be missing, or have other shapes."""
    try:
        return _rows(form, array, name)
    except UnreadableRecording:
        return array.to_pylist()


def _keys(names: list[str]) -> list[str]:
    """Return the names of columns in a Dict: state for observation.state, if all names have such a prefix."""
    parts = [re.split("[./]", name, maxsplit=1) for name in names]
    if len({part[0] for part in parts}) == 1 and all(len(part) == 2 for part in parts):
        return [part[1] for part in parts]
    return names


def _fits(form: _ColumnType, role: str) -> bool:
    """Return True if a column of this form can have that role."""
    if role in _MANY:
        return form is not None
    if not isinstance(form, _CellType) or (form.shape and role != "rewards"):
        return False
    return form.dtype is not None or role == "episode"


def _space(form: _ColumnType) -> PlainSpace:
    if isinstance(form, _CellType):
        return ANY_TEXT if form.dtype is None else widest(form.dtype, form.shape)
    return {"type": "Dict", "spaces": sorted([key, _space(part)] for key, part in form.items())}
