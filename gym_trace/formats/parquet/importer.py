"""Parquet as the exporter here writes it, made a trace again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path as FilePath
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from gym_trace.errors import CorruptTrace
from gym_trace.formats.identity import KEY, read_about
from gym_trace.formats.imported import Imported, NewEpisode, NewSteps, imported
from gym_trace.formats.parquet.columns import Column, tree_field, tree_rows
from gym_trace.formats.parquet.exporter import COLUMNS_KEY
from gym_trace.formats.parquet.tables import Table, files_in
from gym_trace.model.layout import Layout, Leaf, Path
from gym_trace.model.schema import WriterSchema

_FOLDERS = ("steps", "episodes")
_Decoder = Callable[[Any, int], Any]  # a pyarrow.Array, or None, and how many rows


class ParquetImporter:
    """Parquet, as gym-trace export writes it"""

    name: ClassVar[str] = "parquet"

    def recognises(self, path: FilePath) -> bool:
        return all(files_in(path / folder) for folder in _FOLDERS)

    def read(self, path: FilePath) -> Imported:
        steps, episodes = (Table(path / folder) for folder in _FOLDERS)
        about = episodes.said(KEY)
        schema: dict[str, Any] = next(iter(read_about(about).get("writers", {}).values()), {})
        columns = _columns_of(episodes)
        try:
            observations, actions, _ = WriterSchema.of(schema).layouts
            of_steps = _of_steps(columns, observations, actions)
            of_episodes = _of_episodes(columns, observations)
        except (CorruptTrace, AssertionError) as error:
            raise episodes.malformed("the spaces in its metadata are not those of its columns") from error
        found = _episodes(_Rows(steps, of_steps), _Rows(episodes, of_episodes))
        return imported("Parquet", found, schema, about, steps=steps.rows)


def _columns_of(table: Table) -> dict[Path, Column]:
    try:
        told = [Column.read(one) for one in table.said_json(COLUMNS_KEY)]
    except (LookupError, TypeError, ValueError, CorruptTrace) as error:
        raise table.malformed(f"{COLUMNS_KEY} in its metadata is malformed") from error
    return {column.path: column for column in told}


# -- what is read of the tables ---------------------------------------------------------------------------------------


class _Read(NamedTuple):
    """A column of a table: its type, None where the table has nothing of it, and what becomes of its rows."""

    type: pa.DataType | None
    decoded: _Decoder


def _of_steps(columns: dict[Path, Column], observations: Layout, actions: Layout) -> dict[str, _Read]:
    found = {
        "episode": _Read(pa.int64(), _numbers),
        "observation": _tree(columns, observations, "observations"),
        "action": _tree(columns, actions, "actions"),
        "reward": _tree(columns, Leaf(("rewards",), None, ()), "rewards"),
        "terminated": _Read(pa.bool_(), _numbers),
        "truncated": _Read(pa.bool_(), _numbers),
    }
    if ("infos",) in columns:
        found["info"] = _tree(columns, Leaf(("infos",), None, ()), "infos")
    notes = {str(path[1]): column for path, column in columns.items() if path[0] == "annotations" and column.is_there}
    if notes:
        kind = pa.struct([column.field(name) for name, column in sorted(notes.items())])
        found["annotations"] = _Read(kind, partial(_annotations, notes))
    return found


def _of_episodes(columns: dict[Path, Column], observations: Layout) -> dict[str, _Read]:
    return {
        "episode": _Read(pa.int64(), _numbers),
        "steps": _Read(pa.int64(), _numbers),
        "final_observation": _tree(columns, observations, "observations"),
        KEY: _Read(pa.string(), _texts),
    }


def _tree(columns: dict[Path, Column], layout: Layout, root: str) -> _Read:
    field = tree_field(root, layout, columns, (root,))
    return _Read(None if field is None else field.type, partial(_rows_of_tree, columns, layout, root))


def _rows_of_tree(columns: dict[Path, Column], layout: Layout, root: str, array: pa.Array | None, count: int) -> Any:
    return tree_rows(layout, columns, array, count, (root,))


def _numbers(array: pa.Array, count: int) -> Any:
    return array.to_numpy(zero_copy_only=False)


def _texts(array: pa.Array, count: int) -> Any:
    return array.to_pylist()


def _annotations(notes: dict[str, Column], array: pa.Array, count: int) -> dict[str, Any]:
    return {name: column.decoded(array.field(name)) for name, column in notes.items()}


class _Rows:
    """The rows of a table, one after the other."""

    def __init__(self, table: Table, columns: dict[str, _Read]):
        """Raises UnreadableRecording if the table has not these columns."""
        self.table, self._columns = table, columns
        for name, column in columns.items():
            places = table.schema.get_all_field_indices(name)
            if len(places) != (column.type is not None) or (
                places and table.schema.field(places[0]).type != column.type
            ):
                raise table.malformed(f"{name} is not what its metadata says")
        there = [name for name, column in columns.items() if column.type is not None]
        self._pieces = table.pieces(there)
        self._held: dict[str, Any] = {}
        self._at = self._count = 0

    def take(self, most: int) -> tuple[int, dict[str, Any]]:
        """Yield the number of the next rows, at least one and at most the given number, and their columns."""
        if self._at >= self._count:
            self._hold()
        begin, end = self._at, min(self._count, self._at + most)
        self._at = end
        return end - begin, {name: slice_of(rows, begin, end) for name, rows in self._held.items()}

    def is_over(self) -> bool:
        if self._at >= self._count:
            try:
                self._hold()
            except StopIteration:
                return True
        return False

    def _hold(self) -> None:
        batch = next(self._pieces)
        self._at, self._count = 0, batch.num_rows
        try:
            self._held = {
                name: column.decoded(batch.column(name) if column.type is not None else None, batch.num_rows)
                for name, column in self._columns.items()
            }
        except (pa.ArrowException, LookupError, TypeError, ValueError) as error:
            raise self.table.malformed(f"a value is malformed ({error!r:.100})") from error


def slice_of(rows: Any, begin: int, end: int) -> Any:
    if isinstance(rows, dict):
        return {key: slice_of(part, begin, end) for key, part in rows.items()}
    if isinstance(rows, tuple):
        return tuple(slice_of(part, begin, end) for part in rows)
    return rows[begin:end]


def joined(first: Any, second: Any) -> Any:
    if isinstance(first, dict):
        return {key: joined(part, second[key]) for key, part in first.items()}
    if isinstance(first, tuple):
        return tuple(map(joined, first, second))
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return np.concatenate([first, second])
    return [*first, *second]


# -- episodes ---------------------------------------------------------------------------------------------------------


def _episodes(steps: _Rows, episodes: _Rows) -> Iterator[NewEpisode]:
    while not episodes.is_over():
        _, row = episodes.take(1)
        number, count = int(row["episode"][0]), int(row["steps"][0])
        if not 0 <= count <= steps.table.rows:
            raise episodes.table.malformed(
                f"episode {number} has {count} steps, and the other table {steps.table.rows}"
            )
        yield NewEpisode(count, _parts(steps, number, count, row["final_observation"]), identity=row[KEY][0])
    if not steps.is_over():
        raise steps.table.malformed("there are steps of no episode")


def _parts(steps: _Rows, number: int, left: int, final: Any) -> Iterator[NewSteps]:
    if not left:
        yield NewSteps(final, None, np.empty(0))
        return
    rows, is_first = _steps_of(steps, number, left), True
    left -= len(rows["episode"])
    while left:
        following = _steps_of(steps, number, left)
        left -= len(following["episode"])
        yield _part(rows, slice_of(following["observation"], 0, 1), is_first)
        rows, is_first = following, False
    yield _part(rows, final, is_first)


def _steps_of(steps: _Rows, number: int, most: int) -> dict[str, Any]:
    if steps.is_over():
        raise steps.table.malformed(f"episode {number} has fewer steps than are said")
    _, rows = steps.take(most)
    if not (rows["episode"] == number).all():
        raise steps.table.malformed(f"the steps of episode {number} are not one after the other")
    return rows


def _part(rows: dict[str, Any], following: Any, is_first: bool) -> NewSteps:
    """following: the observation after these steps, one row."""
    before = rows["observation"]
    observations = joined(before if is_first else slice_of(before, 1, len(rows["episode"])), following)
    infos = rows.get("info")
    return NewSteps(
        observations,
        rows["action"],
        rows["reward"],
        rows["terminated"],
        rows["truncated"],
        None if infos is None or all(info is None for info in infos) else infos,
        rows.get("annotations", {}),
    )
