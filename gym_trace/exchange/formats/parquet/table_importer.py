"""Import of any Parquet table with one row per step; the role of each column is guessed, or given by a mapping."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from gym_trace.data.layout import PlainSpace, leaves_in
from gym_trace.data.values import Array, dtype_from, placeholder
from gym_trace.errors import InvalidOption, UnreadableRecording
from gym_trace.exchange.formats.foreign import begins_with, in_parts, widest
from gym_trace.exchange.formats.imported import Imported, NewEpisode, imported, new_schema
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
from gym_trace.exchange.formats.rows import ANY_TEXT, RowQueue, lengths_between, named, steps_of
from gym_trace.playback.row_types import RowType
from gym_trace.printable import printable

_MAGIC = b"PAR1"
_ONE_AT_A_TIME = 1 << 30  # row_bytes that make Table.batches() yield single rows
_MOST_ELEMENTS = 1 << 27  # per row
_TEXT_BYTES = 256  # estimate per text
_MOST_NAMED = 40  # columns in a message
_DEEPEST = 16

_DONE = ("done", "dones", "next.done")  # True also where an episode was truncated
# Roles of columns with their usual names; a mapping may use any of these.
ROLES: dict[str, tuple[str, ...]] = {
    "observations": ("observations", "observation", "obs", "state", "states", "pixels"),
    "actions": ("actions", "action", "acts", "act"),
    "rewards": ("rewards", "reward", "rews", "rew", "next.reward"),
    "terminations": ("terminations", "terminated", "terminateds", "terminal", "terminals", *_DONE),
    "truncations": ("truncations", "truncated", "truncateds", "timeout", "timeouts", "next.truncated"),
    "episode": ("episode", "episode_index", "episode_id", "episodes", "eps_id", "episode_idx"),
    "step": ("step", "step_index", "frame_index", "timestep", "time_step", "step_idx"),
    "next_observations": ("next_observations", "next_observation", "next_obs", "new_obs", "next_state", "next_states"),
}
_FLAGS = ("terminations", "truncations")
_MULTI_COLUMN_ROLES = ("observations", "actions", "next_observations")


@dataclass(frozen=True)
class TableImporter:
    """One Parquet table, one row per step: a file, or all files in a directory.

    map: columns by the names in ROLES: {"observations": "state"}, or "obs=state,acts=action". A column with * stands
    for several: a vector if all are numbers, otherwise a Dict. Empty: no such column.
    """

    map: str | Mapping[str, str] = field(default_factory=dict)

    name: ClassVar[str] = "table"

    def recognises(self, path: Path) -> bool:
        """Return True for Parquet, or a directory with Parquet files."""
        files = parquet_files(path, most=1)
        return bool(files) and begins_with(files[0], _MAGIC)

    def read(self, path: Path) -> Imported:
        """Read the table. Raises InvalidOption if the mapping names a missing column."""
        return imported_table("Parquet table", Table(path, parquet_files(path)), self.map)


def imported_table(kind: str, table: Table, mapping: str | Mapping[str, str]) -> Imported:
    """Return a table with one row per step. mapping: see TableImporter. Raises InvalidOption, UnreadableRecording."""
    return _TableReader(table, _roles(table, _by_role(mapping))).imported(kind)


def _by_role(mapping: str | Mapping[str, str]) -> dict[str, str]:
    """Return a mapping with the keys of ROLES. Raises InvalidOption."""
    if isinstance(mapping, str):
        parts = [part.partition("=") for part in mapping.split(",") if part.strip()]
        if invalid := next((name for name, equals, _ in parts if not equals), None):
            raise InvalidOption(f"map: {invalid!r}: invalid; pass NAME=COLUMN, such as obs=state,acts=action")
        mapping = {name.strip(): column.strip() for name, _, column in parts}
    by_role = {}
    for name, column in mapping.items():
        role = next((role for role, names in ROLES.items() if name in names), None)
        if role is None or not isinstance(column, str):
            raise InvalidOption(f"map: unknown name {name!r}; use {', '.join(ROLES)}")
        by_role[role] = column
    return by_role


# -- roles of columns -------------------------------------------------------------------------------------------------


def _columns_of(table: Table) -> list[str]:
    return list(dict.fromkeys(table.schema.names))


def _roles(table: Table, mapping: dict[str, str]) -> dict[str, list[str]]:
    """Return the columns of each role: those of the mapping, otherwise those with a usual name."""
    columns = _columns_of(table)
    listing = f"its columns are {named(columns, _MOST_NAMED)}"
    roles: dict[str, list[str]] = {}
    for role, column in mapping.items():
        pattern = re.compile(".*".join(map(re.escape, column.split("*"))), re.DOTALL)
        matches = [column] if column in columns else [name for name in columns if pattern.fullmatch(name)]
        if column and not matches:
            raise InvalidOption(f"map: {table.path} has no column {printable(column)!r}; {listing}")
        if len(matches) > 1 and role not in _MULTI_COLUMN_ROLES:
            raise InvalidOption(f"map: {role} takes one column, {printable(column)!r} matches {len(matches)}")
        roles[role] = sorted(matches, key=in_parts) if column else []
    mapped_columns = {name for names in roles.values() for name in names}
    for role in ROLES:
        if role not in roles:
            roles[role] = _guessed(role, [name for name in columns if name not in mapped_columns])
    missing = [role for role in ("observations", "actions") if not roles[role]]
    if not roles["episode"] and not roles["terminations"] and not roles["truncations"]:
        missing.append("episode")
    if missing:
        example = ",".join(f"{role}=COLUMN" for role in ROLES if role in (*missing, "rewards", "episode"))
        raise table.fault(
            f"no columns found for {' or '.join(missing)}; {listing}; map them: "
            f"gym-trace import {printable(table.path)} -o DIR --map {example}"
        )
    return {role: names for role, names in roles.items() if names}


def _guessed(role: str, columns: list[str]) -> list[str]:
    for usual in ROLES[role]:
        if matches := [name for name in columns if name.lower() == usual]:
            return matches[:1]
        if role in _MULTI_COLUMN_ROLES:  # observation.state and observation.image; obs_0, obs_1 …; observations[0]
            pattern = re.compile(rf"{re.escape(usual)}(?:[./].+|[._]?\[?\d+\]?)", re.IGNORECASE)
            if matches := [name for name in columns if pattern.fullmatch(name)]:
                return sorted(matches, key=in_parts)
    return []


# -- types of columns -------------------------------------------------------------------------------------------------


def _space_of(kind: pa.DataType, row: Any, depth: int = 0) -> PlainSpace | None:
    """Return the widest space of a column, by its type and one row; None if unsupported."""
    if isinstance(kind, pa.BaseExtensionType):
        shape = tuple(getattr(kind, "shape", ()))
        space = _space_of(kind.storage_type, row, depth)
        return {**space, "shape": list(shape)} if space is not None and space["type"] == "Box" and shape else space
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if is_text(kind):
        return ANY_TEXT
    if pa.types.is_struct(kind) and depth < _DEEPEST and kind.num_fields:
        parts = row if isinstance(row, dict) else {}
        spaces = {field.name: _space_of(field.type, parts.get(field.name), depth + 1) for field in kind}
        return None if None in spaces.values() or len(spaces) < kind.num_fields else _dict_of(spaces)
    shape = ()
    while is_list(kind) and len(shape) < _DEEPEST:
        if not pa.types.is_fixed_size_list(kind) and not isinstance(row, list):
            return None
        size = int(kind.list_size) if pa.types.is_fixed_size_list(kind) else len(row)
        shape, row, kind = (*shape, size), row[0] if row else None, kind.value_type
    if not is_number(kind) or math.prod(shape) > _MOST_ELEMENTS:
        return None
    return widest(dtype_from(dtype_of(kind).str), shape)


def _dict_of(spaces: Mapping[str, Any]) -> PlainSpace:
    return {"type": "Dict", "spaces": sorted([key, space] for key, space in spaces.items())}


def _leaf(space: PlainSpace) -> RowType | None:
    """Return the RowType of a column of numbers; None for text."""
    return RowType(dtype_from(space["dtype"]), tuple(space["shape"])) if space["type"] == "Box" else None


def _placeholder(space: PlainSpace) -> Any:
    if space["type"] == "Dict":
        return {key: _placeholder(part) for key, part in space["spaces"]}
    return placeholder(None) if (form := _leaf(space)) is None else placeholder(form.dtype, form.shape)


def _rows(space: PlainSpace, array: pa.Array, name: str) -> Any:
    """Return the rows of a column. Raises UnreadableRecording if one has another type."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if array.null_count:
        raise UnreadableRecording(f"{printable(name)}: some rows have no value")
    if space["type"] == "Dict":
        return {key: _rows(part, array.field(key), f"{name}.{key}") for key, part in space["spaces"]}
    if (form := _leaf(space)) is None:
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
        first = next((batch for batch in table.batches(names, _ONE_AT_A_TIME) if len(batch)), None)
        if first is None:
            raise table.fault("has no rows")
        with located(table.path):
            row = first.slice(0, 1).to_pylist()[0]
        spaces = {name: _space_of(table.schema.field(name).type, row[name]) for name in names}
        for role, columns in roles.items():
            for name in columns:
                space = spaces[name]
                if role not in _MULTI_COLUMN_ROLES and space and space.get("shape") == [1]:  # lists of one number
                    spaces[name] = widest(dtype_from(space["dtype"]), ())
                if not _fits(spaces[name], role):
                    kind = printable(table.schema.field(name).type)
                    raise table.fault(f"the column {printable(name)} is {kind:.100}, which cannot be {role}")
        used = {name for columns in roles.values() for name in columns}
        self._spaces = {name: space for name, space in spaces.items() if space is not None}
        self._annotations = [
            name for name, space in self._spaces.items() if name not in used and space["type"] != "Dict"
        ]
        self._imported_columns = [name for name in names if name in used or name in self._annotations]
        self._skipped = [name for name in names if name not in self._imported_columns]
        leaves = (_leaf(leaf) for name in self._imported_columns for _, leaf in leaves_in(self._spaces[name], ()))
        self._row_size = sum(_TEXT_BYTES if form is None else form.row_size for form in leaves)

    def imported(self, kind: str) -> Imported:
        observations, actions = (self._space(role) for role in ("observations", "actions"))
        columns = {role: "+".join(names) for role, names in self._roles.items()}
        environment = {"note": f"{self._table.path.name} names no environment"}
        metadata = {"imported_from": kind, "columns": columns}
        schema = new_schema(kind, observations, actions, environment, metadata)
        lengths, warnings = self._lengths(), [*self._table_warnings()]
        episodes = self._episodes(lengths, warnings)
        return imported(kind, episodes, schema, warnings=warnings, steps=self._table.rows)

    def _table_warnings(self) -> Iterator[str]:
        """Yield the role of each column, and what the table lacks."""
        roles = (f"{role} from {' + '.join(map(printable, names))}" for role, names in self._roles.items())
        yield f"read as a table with one row per step: {', '.join(roles)}"
        yield "the table has no seeds, times or spaces; spaces are as wide as the dtypes"
        if "next_observations" not in self._roles:
            yield "no next observations: final observations are placeholders (NaN, 0 or empty)"
        if "rewards" not in self._roles:
            yield "no rewards: they are NaN"
        if not set(_FLAGS) & set(self._roles):
            yield "no flags: episodes are cut"
        if self._skipped:
            yield f"skipped, neither numbers nor text: {named(self._skipped, _MOST_NAMED)}"

    def _space(self, role: str) -> PlainSpace:
        """Return the space of the columns of a role: that of one column, a vector of numbers, or a Dict."""
        names = self._roles[role]
        spaces = [self._spaces[name] for name in names]
        if len(names) == 1:
            return spaces[0]
        if all(space["type"] == "Box" and not space["shape"] for space in spaces):
            return widest(np.result_type(*(space["dtype"] for space in spaces)), (len(spaces),))
        return _dict_of(dict(zip(_keys(names), spaces)))

    def _rows_of(self, role: str, batch: pa.RecordBatch) -> Any:
        names = self._roles[role]
        parts = [_rows(self._spaces[name], batch.column(name), name) for name in names]
        if len(names) == 1:
            return parts[0]
        form = _leaf(self._space(role))
        return dict(zip(_keys(names), parts)) if form is None else np.stack(parts, 1).astype(form.dtype)

    def _lengths(self) -> list[int]:
        """Return the number of steps of each episode. Raises UnreadableRecording if its rows are not consecutive."""
        if "episode" not in self._roles:
            names = [name for role in _FLAGS for name in self._roles.get(role, ())]
            return lengths_between(np.logical_or(*self._flags_in(batch)) for batch in self._table.batches(names))
        (name,) = self._roles["episode"]
        ids: list[Any] = []
        lengths: list[int] = []
        for batch in self._table.batches([name]):
            column = _rows(self._spaces[name], batch.column(name), name)
            values = np.array(column, object) if isinstance(column, list) else column
            begins = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
            counts = np.diff(begins, append=len(values)).tolist()
            batch_ids = values[begins].tolist()
            if ids and ids[-1] == batch_ids[0]:
                lengths[-1] += counts.pop(0)
                batch_ids.pop(0)
            ids += batch_ids
            lengths += counts
        if len(set(ids)) < len(ids):
            repeated = Counter(ids).most_common(1)[0][0]
            raise self._table.fault(
                f"the rows of episode {printable(repeated):.60} are not consecutive; sort it by {printable(name)}"
            )
        return lengths

    def _flags_in(self, batch: pa.RecordBatch) -> tuple[Array, Array]:
        """Return the terminated and the truncated flags, (rows,) bool each."""
        missing = np.zeros(len(batch), np.bool_)
        terminated, truncated = (
            self._rows_of(role, batch).astype(np.bool_) if role in self._roles else missing for role in _FLAGS
        )
        if self._roles.get("terminations", [""])[0].lower() in _DONE:
            terminated = terminated & ~truncated
        return terminated, truncated

    def _episodes(self, lengths: list[int], warnings: list[str]) -> Iterator[NewEpisode]:
        queue = RowQueue(self._decoded())
        final = _placeholder(self._space("observations"))
        for steps in lengths:
            self._last_number = None
            parts = steps_of(queue, steps, final, warnings, self._in_order)
            yield NewEpisode(steps, parts, has_final_observation="next_observations" in self._roles)

    def _decoded(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield rows by role, and annotations by name, some steps at a time."""
        for batch in self._table.batches(self._imported_columns, self._row_size):
            rows = {role: self._rows_of(role, batch) for role in self._roles if role not in _FLAGS}
            rows |= zip(_FLAGS, self._flags_in(batch))
            rows.setdefault("rewards", np.full(len(batch), np.nan))
            rows["annotations"] = {
                name: _annotation(self._spaces[name], batch.column(name), name) for name in self._annotations
            }
            yield len(batch), rows

    def _in_order(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Return the rows. Raises UnreadableRecording if the numbers of the steps do not increase."""
        if "step" in rows:
            numbers = rows["step"] if self._last_number is None else np.append(self._last_number, rows["step"])
            if (numbers[1:] <= numbers[:-1]).any():
                problem = f"the steps of an episode are not in the order of {printable(self._roles['step'][0])}"
                raise self._table.fault(f"{problem}; sort it, or --map step=")
            self._last_number = numbers[-1]
        return rows


def _annotation(space: PlainSpace, array: pa.Array, name: str) -> Any:
    """Return the rows of an annotation; some may be missing, or have other shapes."""
    try:
        return _rows(space, array, name)
    except UnreadableRecording:
        return array.to_pylist()


def _keys(names: list[str]) -> list[str]:
    """Return the keys of columns in a Dict: state for observation.state, if all names have the same prefix."""
    parts = [re.split("[./]", name, maxsplit=1) for name in names]
    if len({part[0] for part in parts}) == 1 and all(len(part) == 2 for part in parts):
        return [part[1] for part in parts]
    return names


def _fits(space: PlainSpace | None, role: str) -> bool:
    """Return True if a column of this space can have that role."""
    if space is None or role in _MULTI_COLUMN_ROLES:
        return space is not None
    if space["type"] == "Text":
        return role == "episode"
    return space["type"] == "Box" and (not space["shape"] or role == "rewards")
