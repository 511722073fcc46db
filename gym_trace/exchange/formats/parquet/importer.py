"""Parquet as the exporter here writes it, made a trace again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path as FilePath
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from gym_trace.data.layout import Layout, Leaf, Path
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.imported import Imported, NewEpisode, NewSteps, imported
from gym_trace.exchange.formats.parquet.decoding import decoded, tree_rows
from gym_trace.exchange.formats.parquet.exporter import COLUMNS_KEY
from gym_trace.exchange.formats.parquet.tables import Table, located
from gym_trace.exchange.formats.rows import RowQueue, first_writer, led_to
from gym_trace.format.manifest import json_of
from gym_trace.playback.tables.columns import ArrowColumn, table_column

_FOLDERS = ("steps", "episodes")
_MOST_SAID = 64 << 20  # bytes of a text in the metadata
# The type of a column, None where the table has nothing of it, and what makes rows of an array and their number.
_Read = tuple[pa.DataType | None, Callable[[Any, int], Any]]


class ParquetImporter:
    """Parquet, as gym-trace export writes it"""

    name: ClassVar[str] = "parquet"

    def recognises(self, path: FilePath) -> bool:
        return all(_files_in(path / folder) for folder in _FOLDERS)

    def read(self, path: FilePath) -> Imported:
        steps, episodes = (Table(path / folder, _files_in(path / folder)) for folder in _FOLDERS)
        with located(episodes.path):
            about = _said(episodes, KEY)
            schema, (observations, actions, _) = first_writer(about)
            columns = {
                column.path: column for column in map(ArrowColumn.from_json, json_of(_said(episodes, COLUMNS_KEY)))
            }
            lists = sum(column.list_bytes for column in columns.values())
            rows = _rows_of(steps, _of_steps(columns, observations, actions), lists)
            ends = _rows_of(episodes, _of_episodes(columns, observations), lists)
        return imported("Parquet", _episodes(steps, rows, ends), schema, about, steps=steps.rows)


def _files_in(folder: FilePath) -> list[FilePath]:
    return sorted(file for file in folder.glob("*.parquet") if file.is_file()) if folder.is_dir() else []


def _said(table: Table, key: str) -> str:
    """Return a text in the metadata of the files. Raises UnreadableRecording, ValueError."""
    text = (table.schema.metadata or {}).get(key.encode(), b"")
    if not 0 < len(text) <= _MOST_SAID:
        raise table.fault(f"no {key} in its metadata; only exports of gym-trace can be imported")
    return str(text, "utf-8")


# -- what is read of the tables ---------------------------------------------------------------------------------------


def _of_steps(columns: dict[Path, ArrowColumn], observations: Layout, actions: Layout) -> dict[str, _Read]:
    found = {
        "episode": (pa.int64(), _numbers),
        "observation": _tree(columns, observations, "observations"),
        "action": _tree(columns, actions, "actions"),
        "reward": _tree(columns, Leaf(("rewards",), None, ()), "rewards"),
        "terminated": (pa.bool_(), _numbers),
        "truncated": (pa.bool_(), _numbers),
    }
    if ("infos",) in columns:
        found["info"] = _tree(columns, Leaf(("infos",), None, ()), "infos")
    notes = {str(path[1]): column for path, column in columns.items() if path[0] == "annotations" and column.is_there}
    if notes:
        kind = pa.struct([column.field(name) for name, column in sorted(notes.items())])
        found["annotations"] = kind, partial(_annotations, notes)
    return found


def _of_episodes(columns: dict[Path, ArrowColumn], observations: Layout) -> dict[str, _Read]:
    return {
        "episode": (pa.int64(), _numbers),
        "steps": (pa.int64(), _numbers),
        "final_observation": _tree(columns, observations, "observations"),
        KEY: (pa.string(), lambda array, count: array.to_pylist()),
    }


def _tree(columns: dict[Path, ArrowColumn], layout: Layout, root: str) -> _Read:
    found = table_column(root, layout, columns, (root,))
    kind = None if found is None else found[0].type
    return kind, lambda array, count: tree_rows(layout, columns, array, count, (root,))


def _numbers(array: pa.Array, count: int) -> Any:
    return array.to_numpy(zero_copy_only=False)


def _annotations(notes: dict[str, ArrowColumn], array: pa.Array, count: int) -> dict[str, Any]:
    return {name: decoded(column, array.field(name)) for name, column in notes.items()}


def _rows_of(table: Table, columns: dict[str, _Read], list_bytes: int) -> RowQueue:
    """Return the rows of a table, decoded. list_bytes: of a row in columns whose types do not say how many.

    Raises UnreadableRecording if the table has not these columns.
    """
    for name, (kind, _) in columns.items():
        places = table.schema.get_all_field_indices(name)
        if [table.schema.field(place).type for place in places] != ([] if kind is None else [kind]):
            raise table.fault(f"{name} contradicts its metadata")
    return RowQueue(_decoded(table, columns, list_bytes))


def _decoded(table: Table, columns: dict[str, _Read], list_bytes: int) -> Iterator[tuple[int, dict[str, Any]]]:
    there = [name for name, (kind, _) in columns.items() if kind is not None]
    for batch in table.batches(there, table.row_bytes(there) + list_bytes):
        with located(table.path):
            rows = {
                name: decode(None if kind is None else batch.column(name), batch.num_rows)
                for name, (kind, decode) in columns.items()
            }
        yield batch.num_rows, rows


# -- episodes ---------------------------------------------------------------------------------------------------------


def _episodes(table: Table, steps: RowQueue, episodes: RowQueue) -> Iterator[NewEpisode]:
    while not episodes.is_over():
        _, row = episodes.take(1)
        number, count = int(row["episode"][0]), int(row["steps"][0])
        if not 0 <= count <= table.rows:
            raise table.fault(f"has {table.rows} steps, and episode {number} {count}")
        yield NewEpisode(count, _parts(table, steps, number, count, row["final_observation"]), identity=row[KEY][0])
    if not steps.is_over():
        raise table.fault("steps without an episode")


def _parts(table: Table, steps: RowQueue, number: int, count: int, final: Any) -> Iterator[NewSteps]:
    if not count:
        yield NewSteps(final, None, np.empty(0))
    for observations, rows in led_to(chain(_steps_of(table, steps, number, count), [(final, None)])):
        infos = rows.get("info")
        yield NewSteps(
            observations,
            rows["action"],
            rows["reward"],
            rows["terminated"],
            rows["truncated"],
            None if infos is None or all(info is None for info in infos) else infos,
            rows.get("annotations", {}),
        )


def _steps_of(table: Table, steps: RowQueue, number: int, left: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    while left:
        if steps.is_over():
            raise table.fault(f"episode {number} has fewer steps than declared")
        count, rows = steps.take(left)
        if not (rows["episode"] == number).all():
            raise table.fault(f"the steps of episode {number} are not consecutive")
        left -= count
        yield rows["observation"], rows
