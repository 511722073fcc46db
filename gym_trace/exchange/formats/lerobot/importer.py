"""Import of LeRobot datasets, version 3; exports of gym-trace are restored."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gym_trace.data.layout import Layout, PlainSpace
from gym_trace.data.layout import Path as LeafPath
from gym_trace.data.schema import Layouts
from gym_trace.data.values import ABSENT, Array
from gym_trace.errors import MissingExtra, UnreadableRecording
from gym_trace.exchange.formats.foreign import placeholder, read_json, widest
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.imported import Imported, NewEpisode, NewSteps, imported, new_schema
from gym_trace.exchange.formats.lerobot.dataset import DataSet, EpisodeRow
from gym_trace.exchange.formats.lerobot.features import (
    FINAL,
    KIND,
    TASK_INDEX,
    TIMESTAMP,
    Feature,
    array_of,
    channels_first,
    picture_shape,
    values_of,
)
from gym_trace.exchange.formats.parquet.tables import batches, located, parquet_file, rows_at_a_time
from gym_trace.exchange.formats.rows import ANY_TEXT, RowQueue, after_steps, first_writer

_ENDS = 64  # final observations that are read at a time


class LeRobotImporter:
    """LeRobot dataset, version 3."""

    name: ClassVar[str] = "lerobot"

    def recognises(self, path: Path) -> bool:
        """Return True if meta/info.json names a version of LeRobot."""
        try:
            return "codebase_version" in read_json(path / "meta" / "info.json")
        except UnreadableRecording:
            return False

    def read(self, path: Path) -> Imported:
        """Raises UnreadableRecording."""
        data = DataSet(path)
        if data.about is None:
            return _foreign(data)
        schema, layouts = first_writer(data.about)
        return imported(KIND, _episodes_again(data, layouts), schema, data.about, steps=data.steps)


def _parts(
    given: Iterator[Columns], final: Columns, shaped: Callable[[Columns, Columns], NewSteps]
) -> Iterator[NewSteps]:
    """Yield steps with the observations that they led to. given: columns with the observations before the steps."""
    parts = (({path: rows for path, rows in one.items() if path[0] == "observations"}, one) for one in given)
    for observations, steps in after_steps(chain(parts, [(final, {})])):
        yield shaped(steps, observations)


# -- exports of gym-trace -------------------------------------------------------------------------------------------


def _episodes_again(data: DataSet, layouts: Layouts) -> Iterator[NewEpisode]:
    def shaped(steps: Columns, observations: Columns) -> NewSteps:
        infos = steps.get(("infos",))
        return NewSteps(
            _joined(layouts.observations, observations),
            _joined(layouts.actions, steps),
            steps[("rewards",)],
            infos=infos if _has_any(infos) else None,
            annotations={str(p[1]): rows for p, rows in steps.items() if p[0] == "annotations" and _has_any(rows)},
        )

    rows = data.rows()
    with closing(StepReader(data)) as reader:
        for identity, steps, final in _ends(data):
            if steps:
                row = next(rows, None)
                if row is None or row.steps != steps:
                    raise UnreadableRecording(f"{data.path / FINAL}: from another dataset")
                yield NewEpisode(steps, _parts(reader.parts(row), final, shaped), identity=row.identity)
            else:
                empty = NewSteps(_joined(layouts.observations, final), np.empty(0), np.empty(0))
                yield NewEpisode(0, [empty], identity=identity)
        if next(rows, None) is not None:
            raise UnreadableRecording(f"{data.path / FINAL}: from another dataset")


def _ends(data: DataSet) -> Iterator[tuple[str | None, int, Columns]]:
    """Identity of an empty episode, steps, final observation."""
    path = data.path / FINAL
    observed = [one for one in data.features if one.path[0] == "observations"]
    observed = [one._replace(kind="image") if one.kind == "video" else one for one in observed]
    with located(path):
        with parquet_file(path) as file:
            names = file.schema_arrow.names
        for batch in batches(path, _ENDS, names):
            texts, counts = batch.column(KEY).to_pylist(), batch.column("steps").to_pylist()
            columns = {feature.path: decoded(feature, batch, str(path)) for feature in observed}
            for place, (text, steps) in enumerate(zip(texts, counts)):
                if type(steps) is not int or (text is None) is (steps == 0):
                    raise UnreadableRecording(f"{path}: a row is malformed")
                yield text, steps, {key: rows[place : place + 1] for key, rows in columns.items()}


def _joined(layout: Layout, columns: Columns) -> Any:
    try:
        return layout.join(iter([columns[leaf.path] for leaf in layout.leaves()]))
    except KeyError as error:
        raise UnreadableRecording(f"malformed column metadata of gym-trace: missing {error}") from error


def _has_any(rows: Any) -> bool:
    return rows is not None and (isinstance(rows, np.ndarray) or any(row is not ABSENT for row in rows))


# -- other datasets --------------------------------------------------------------------------------------------------


def _foreign(data: DataSet) -> Imported:
    by_root = {root: [one for one in data.features if one.path[0] == root] for root in ("observations", "actions")}
    if missing := [root for root, features in by_root.items() if not features]:
        raise data.malformed(f"has no {missing[0]}")
    made = [_space(features) for features in by_root.values()]
    metadata = {"fps": data.fps, "robot_type": data.robot_type, "tasks": data.tasks, "features": _names(data, by_root)}
    schema = new_schema(KIND, made[0], made[1], {"note": f"{KIND}, robot: {data.robot_type}"}, metadata)
    facts: dict[str, Any] = {"fps": data.fps}
    if len(data.tasks) == 1 and data.tasks[0]:
        facts["task"] = data.tasks[0]
    return imported(KIND, _episodes(data), schema, None, facts, _notes(data), data.steps)


def _names(data: DataSet, by_root: dict[str, list[Feature]]) -> dict[str, Any]:
    """Return the name of each column in the dataset, from which an export restores it; see features.Origin."""
    found = {}
    for feature in data.features:
        root = feature.path[0]
        if root in by_root or root == "annotations":
            path = feature.path if len(by_root.get(root, ())) != 1 else feature.path[:1]
            found["/".join(map(str, path))] = {"name": feature.name, "names": data.declared[feature.name].get("names")}
    return found


def _notes(data: DataSet) -> Iterator[str]:
    if data.was_changed:
        yield "exported by gym-trace and changed since: imported as from another recorder"
    yield ("LeRobot stores no final observations; episode.has_final_observation is False, and the row a placeholder")
    yield "bounds of spaces are unknown: they are as wide as the dtype"
    names = {feature.name for feature in data.features}
    if "next.reward" not in names:
        yield "no rewards: they are NaN"
    if not names & {"next.done", "next.terminated", "next.truncated"}:
        yield "no flags: episodes are cut"
    elif "next.terminated" not in names:
        yield "steps done but not truncated (next.done, next.truncated) are read as terminated"


def _space(features: list[Feature]) -> PlainSpace:
    parts = {str(one.path[1]): ANY_TEXT if one.is_text else widest(one.dtype, one.shape) for one in features}
    if len(parts) == 1:
        return next(iter(parts.values()))
    return {"type": "Dict", "spaces": sorted([key, part] for key, part in parts.items())}


def _episodes(data: DataSet) -> Iterator[NewEpisode]:
    observed = [one for one in data.features if one.path[0] == "observations"]
    final = {one.path: placeholder(None if one.is_text else one.dtype, one.shape) for one in observed}
    with closing(StepReader(data, foreign=True)) as reader:
        for row in data.rows():
            parts = _parts(reader.parts(row), final, _shaped)
            yield NewEpisode(row.steps, parts, has_final_observation=False)


def _shaped(steps: Columns, observations: Columns) -> NewSteps:
    count = max(map(len, steps.values()))
    rewards = steps.get(("rewards",), np.full(count, np.nan))
    done, ended, cut = (steps.get(("flags", f"next.{name}")) for name in ("done", "terminated", "truncated"))
    truncated = np.zeros(count, np.bool_) if cut is None else cut.astype(np.bool_)
    if ended is None:
        ended = truncated & False if done is None else done.astype(np.bool_) & ~truncated
    notes = {str(path[1]): rows for path, rows in steps.items() if path[0] == "annotations"}
    actions = {path: rows for path, rows in steps.items() if path[0] == "actions"}
    return NewSteps(_tree(observations), _tree(actions), rewards, ended.astype(np.bool_), truncated, annotations=notes)


def _tree(columns: Columns) -> Any:
    if len(columns) == 1:
        return next(iter(columns.values()))
    return {str(path[1]): rows for path, rows in columns.items()}


# -- steps, read in their order, some at a time ----------------------------------------------------------------------


_TEXT_BYTES = 256
_MOST_OPENINGS = 16  # per video; each opening decodes it from its beginning
_FORMATS = ("PNG", "JPEG", "TIFF", "WEBP")
_COUNTED = ("episode_index", "frame_index", "timestamp")
Columns = dict[LeafPath, Any]  # rows by path


class StepReader:
    """Reads the tables of steps from the first to the last, and the videos along with them."""

    def __init__(self, data: DataSet, foreign: bool = False):
        self._data, self._foreign = data, foreign
        self._rows = RowQueue(self._read())
        self._videos: dict[str, tuple[Path, Any]] = {}
        self._openings: Counter[Path] = Counter()

    def parts(self, row: EpisodeRow) -> Iterator[Columns]:
        """Return the columns of the next episode. Raises UnreadableRecording."""
        done = 0
        while done < row.steps:
            if self._rows.is_over():
                raise UnreadableRecording(f"{self._data.path}: episode {row.number} has no rows, or too few")
            count, columns = self._rows.take(row.steps - done)
            episodes, frames, times = (columns.pop((name,)) for name in _COUNTED)
            if (episodes != row.number).any() or (frames != np.arange(done, done + count)).any():
                told = f"rows of episode {row.number} contradict meta/episodes"
                raise UnreadableRecording(f"{self._data.path}: {told}")
            for feature in self._data.features:
                if feature.kind == "video":
                    columns[feature.path] = shaped_pictures(feature, self._pictures(feature, row, times))
            done += count
            yield columns

    def _read(self) -> Iterator[tuple[int, Columns]]:
        features = self._data.features
        size = sum(_TEXT_BYTES if one.is_text else math.prod(one.shape) * one.dtype.itemsize for one in features)
        needed = [*_COUNTED, *(one.name for one in features if one.kind != "video")]
        for path in sorted((self._data.path / "data").glob("*/*.parquet")):  # LeRobotDataset reads these files
            with located(path):
                names = pq.read_schema(path).names
                if missing := [name for name in needed if name not in names]:
                    raise UnreadableRecording(f"{path}: has no column {missing[0]}")
                for batch in batches(path, rows_at_a_time(size), names):
                    yield batch.num_rows, self._columns(batch, str(path))

    def _columns(self, batch: pa.RecordBatch, where: str) -> Columns:
        """Return the columns of some rows by path, and the counted columns by name."""

        def counted(name: str, dtype: str) -> Array:
            return array_of(batch.column(name), np.dtype(dtype), (), f"{where}: {name}")

        columns: Columns = {
            feature.path: decoded(feature, batch, where, self._foreign)
            for feature in self._data.features
            if feature.kind != "video"
        }
        columns |= {(name,): counted(name, dtype) for name, dtype in zip(_COUNTED, ("i8", "i8", "f8"))}
        if not np.isfinite(columns["timestamp",]).all():
            raise UnreadableRecording(f"{where}: invalid timestamp")
        if self._foreign:
            columns[TIMESTAMP] = counted("timestamp", "f4")
            if len(self._data.tasks) > 1 and "task_index" in batch.schema.names:
                columns[TASK_INDEX] = counted("task_index", "i8")
        return columns

    def _pictures(self, feature: Feature, row: EpisodeRow, times: Array) -> Array:
        path, begin = row.videos[feature.name]
        known = self._videos.get(feature.name)
        if known is None or known[0] != path:
            if known is not None:
                known[1].close()
            self._openings[path] += 1
            if self._openings[path] > _MOST_OPENINGS:
                raise UnreadableRecording(
                    f"{path}: its episodes alternate with those of other videos; sort them by video"
                )
            try:
                from gym_trace.exchange.formats.lerobot.videos import VideoReader  # PyAV is not needed without videos
            except ImportError as error:
                raise MissingExtra(f"videos need PyAV ({error}): pip install 'gym-trace[video]'") from error
            known = self._videos[feature.name] = path, VideoReader(path, *feature.stored[:2])
        pictures: Array = known[1].take(begin + times, 0.5 / self._data.fps)
        return pictures

    def close(self) -> None:
        for _, reader in self._videos.values():
            reader.close()


def decoded(feature: Feature, batch: pa.RecordBatch, where: str, foreign: bool = False) -> Any:
    """Return the rows of a feature; images are decoded on access. Raises UnreadableRecording."""
    column, name = batch.column(feature.name), f"{where}: {feature.name}"
    if feature.is_picture:
        return _ImageRows(feature, column, name)
    if feature.is_text:
        plain = column.to_pylist()
        return plain if foreign else values_of(plain, feature.kind, name)
    return array_of(column, feature.dtype, feature.shape, name)


class _ImageRows:
    """Images of a table: a slice of rows decodes them to an array."""

    def __init__(self, feature: Feature, column: pa.Array, name: str):
        if not pa.types.is_struct(column.type) or column.type.get_field_index("bytes") < 0:
            raise UnreadableRecording(f"{name}: not all rows are images")
        self._feature, self._files, self._name = feature, column.field("bytes"), name

    def __getitem__(self, which: slice) -> Array:
        from gym_trace.exchange.formats.images import pixels  # Pillow is not needed without pictures

        feature, files = self._feature, self._files[which].to_pylist()
        is_plain = feature.dtype != np.uint8 or feature.shape[2:] == (4,)
        shape: tuple[int, ...] = feature.shape if is_plain else picture_shape(feature.shape)
        found = np.empty((len(files), *shape), feature.dtype)
        for place, file in enumerate(files):
            if not isinstance(file, bytes):
                raise UnreadableRecording(f"{self._name}: image in a separate file: not supported")
            try:
                found[place] = pixels(file, shape, feature.dtype, _FORMATS)
            except ValueError as error:
                raise UnreadableRecording(f"{self._name}: unreadable image: {error}") from error
        return shaped_pictures(feature, found)


def shaped_pictures(feature: Feature, pictures: Array) -> Array:
    """Return (images, H, W, C) in the shape of the trace."""
    if pictures.shape[1:] == feature.shape:
        return pictures
    channels = 1 if len(feature.shape) == 2 else picture_shape(feature.shape)[2]
    pictures = pictures[..., :channels]
    if channels_first(feature.shape):
        pictures = np.moveaxis(pictures, -1, 1)
    return np.ascontiguousarray(pictures).reshape(len(pictures), *feature.shape)
