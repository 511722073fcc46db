"""Import of LeRobot datasets, version 3; exports of gym-trace are restored."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gym_trace.data.layout import Layout, PlainSpace
from gym_trace.data.layout import Path as LeafPath
from gym_trace.data.schema import Layouts
from gym_trace.data.values import Array, placeholder
from gym_trace.errors import MissingExtra, UnreadableRecording
from gym_trace.exchange.formats.foreign import read_json, widest
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.imported import Imported, NewEpisode, NewSteps, imported, new_schema
from gym_trace.exchange.formats.lerobot.dataset import EpisodeRow, LeRobotDirectory
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
from gym_trace.exchange.formats.rows import ANY_TEXT, RowQueue, first_writer, has_values, steps_of

_FINALS_AT_ONCE = 64


class LeRobotImporter:
    """LeRobot dataset, version 3"""

    name: ClassVar[str] = "lerobot"

    def recognises(self, path: Path) -> bool:
        """Return True if meta/info.json names a version of LeRobot."""
        try:
            return "codebase_version" in read_json(path / "meta" / "info.json")
        except UnreadableRecording:
            return False

    def read(self, path: Path) -> Imported:
        """Raises UnreadableRecording."""
        data = LeRobotDirectory(path)
        if data.about is None:
            return _foreign(data)
        schema, layouts = first_writer(data.about)
        return imported(KIND, _restored_episodes(data, layouts), schema, data.about, steps=data.steps)


# -- exports of gym-trace -------------------------------------------------------------------------------------------


def _restored_episodes(data: LeRobotDirectory, layouts: Layouts) -> Iterator[NewEpisode]:
    def fields(columns: Columns) -> dict[str, Any]:
        return {
            "observations": _joined(layouts.observations, columns),
            "actions": _joined(layouts.actions, columns),
            "rewards": columns["rewards",],
            "infos": columns.get(("infos",)),
            "annotations": {
                str(p[1]): rows for p, rows in columns.items() if p[0] == "annotations" and has_values(rows)
            },
        }

    rows = data.rows()
    with closing(StepReader(data, fields)) as reader:
        for identity, steps, final in _finals(data):
            row = next(rows, None) if steps else EpisodeRow(0, 0, identity, {})
            if row is None or row.steps != steps:
                raise UnreadableRecording(f"{data.path / FINAL}: from another dataset")
            parts = reader.steps(row, _joined(layouts.observations, final))
            yield NewEpisode(steps, parts, identity=row.identity)
        if next(rows, None) is not None:
            raise UnreadableRecording(f"{data.path / FINAL}: from another dataset")


def _finals(data: LeRobotDirectory) -> Iterator[tuple[str | None, int, Columns]]:
    """Yield (identity, steps, final observation) of each episode; the identity only of an empty one."""
    path = data.path / FINAL
    observed = [feature for feature in data.features if feature.path[0] == "observations"]
    observed = [feature._replace(kind="image") if feature.kind == "video" else feature for feature in observed]
    with located(path):
        with parquet_file(path) as file:
            names = file.schema_arrow.names
        for batch in batches(path, _FINALS_AT_ONCE, names):
            texts, counts = batch.column(KEY).to_pylist(), batch.column("steps").to_pylist()
            columns = {feature.path: decoded(feature, batch, str(path)) for feature in observed}
            for i, (identity, steps) in enumerate(zip(texts, counts)):
                if type(steps) is not int or (identity is None) is (steps == 0):
                    raise UnreadableRecording(f"{path}: a row is malformed")
                yield identity, steps, {key: rows[i : i + 1] for key, rows in columns.items()}


def _joined(layout: Layout, columns: Columns) -> Any:
    try:
        return layout.join(iter([columns[leaf.path] for leaf in layout.leaves()]))
    except KeyError as error:
        raise UnreadableRecording(f"malformed column metadata of gym-trace: missing {error}") from error


# -- other datasets --------------------------------------------------------------------------------------------------


def _foreign(data: LeRobotDirectory) -> Imported:
    by_root = {root: [f for f in data.features if f.path[0] == root] for root in ("observations", "actions")}
    if missing := [root for root, features in by_root.items() if not features]:
        raise data.malformed(f"has no {missing[0]}")
    observations, actions = map(_space, by_root.values())
    metadata = {"fps": data.fps, "robot_type": data.robot_type, "tasks": data.tasks, "features": _names(data, by_root)}
    schema = new_schema(KIND, observations, actions, {"note": f"{KIND}, robot: {data.robot_type}"}, metadata)
    facts: dict[str, Any] = {"fps": data.fps}
    if len(data.tasks) == 1 and data.tasks[0]:
        facts["task"] = data.tasks[0]
    return imported(KIND, _episodes(data), schema, None, facts, _warnings(data), data.steps)


def _names(data: LeRobotDirectory, by_root: dict[str, list[Feature]]) -> dict[str, Any]:
    """Return the name of each column in the dataset, so that an export restores it; see features.Origin."""
    names = {}
    for feature in data.features:
        root = feature.path[0]
        if root in by_root or root == "annotations":
            path = feature.path if len(by_root.get(root, ())) != 1 else feature.path[:1]
            names["/".join(map(str, path))] = {"name": feature.name, "names": data.declared[feature.name].get("names")}
    return names


def _warnings(data: LeRobotDirectory) -> Iterator[str]:
    if data.was_changed:
        yield "exported by gym-trace and changed since: imported as from another recorder"
    yield "LeRobot stores no final observations; episode.has_final_observation is False, and the row a placeholder"
    yield "bounds of spaces are unknown: they are as wide as the dtype"
    names = {feature.name for feature in data.features}
    if "next.reward" not in names:
        yield "no rewards: they are NaN"
    if not names & {"next.done", "next.terminated", "next.truncated"}:
        yield "no flags: episodes are cut"
    elif "next.terminated" not in names:
        yield "steps done but not truncated (next.done, next.truncated) are read as terminated"


def _space(features: list[Feature]) -> PlainSpace:
    parts = {str(f.path[1]): ANY_TEXT if f.is_text else widest(f.dtype, f.shape) for f in features}
    if len(parts) == 1:
        return next(iter(parts.values()))
    return {"type": "Dict", "spaces": sorted([key, part] for key, part in parts.items())}


def _episodes(data: LeRobotDirectory) -> Iterator[NewEpisode]:
    observed = [feature for feature in data.features if feature.path[0] == "observations"]
    final = _tree({f.path: placeholder(None if f.is_text else f.dtype, f.shape) for f in observed}, "observations")
    with closing(StepReader(data)) as reader:
        for row in data.rows():
            yield NewEpisode(row.steps, reader.steps(row, final), has_final_observation=False)


def _foreign_fields(columns: Columns) -> dict[str, Any]:
    count = max(map(len, columns.values()))
    done, terminated, truncated = (
        np.asarray(columns.get(("flags", f"next.{name}"), np.zeros(count))).astype(np.bool_)
        for name in ("done", "terminated", "truncated")
    )
    return {
        "observations": _tree(columns, "observations"),
        "actions": _tree(columns, "actions"),
        "rewards": columns.get(("rewards",), np.full(count, np.nan)),
        "terminations": terminated if ("flags", "next.terminated") in columns else done & ~truncated,
        "truncations": truncated,
        "annotations": {str(path[1]): rows for path, rows in columns.items() if path[0] == "annotations"},
    }


def _tree(columns: Columns, root: str) -> Any:
    parts = {str(path[1]): rows for path, rows in columns.items() if path[0] == root}
    return next(iter(parts.values())) if len(parts) == 1 else parts


# -- steps, read in order, some at a time ----------------------------------------------------------------------------


_TEXT_BYTES = 256  # estimate per row
_MOST_OPENINGS = 16  # per video file; each opening decodes it from its start
_FORMATS = ("PNG", "JPEG", "TIFF", "WEBP")
_COUNTED = ("episode_index", "frame_index", "timestamp")
Columns = dict[LeafPath, Any]  # rows by path


class StepReader:
    """Reads the tables of steps in order, and their videos.

    fields: returns columns by the fields of NewSteps; None: of a dataset that gym-trace has not exported.
    """

    def __init__(self, data: LeRobotDirectory, fields: Callable[[Columns], dict[str, Any]] | None = None):
        self._data, self._foreign, self._fields = data, fields is None, fields or _foreign_fields
        self._rows = RowQueue(self._read())
        self._videos: dict[str, tuple[Path, Any]] = {}
        self._openings: Counter[Path] = Counter()

    def steps(self, row: EpisodeRow, final: Any) -> Iterator[NewSteps]:
        """Yield the steps of the next episode. Raises UnreadableRecording."""
        done = 0

        def fields(columns: Columns) -> dict[str, Any]:
            nonlocal done
            episodes, frames, times = (columns.pop((name,)) for name in _COUNTED)
            if (episodes != row.number).any() or (frames != np.arange(done, done + len(frames))).any():
                raise UnreadableRecording(f"{self._data.path}: rows of episode {row.number} contradict meta/episodes")
            done += len(frames)
            for feature in self._data.features:
                if feature.kind == "video":
                    columns[feature.path] = shaped_pictures(feature, self._pictures(feature, row, times))
            return self._fields(columns)

        return steps_of(self._rows, row.steps, final, fields=fields)

    def _read(self) -> Iterator[tuple[int, Columns]]:
        features = self._data.features
        row_size = sum(_TEXT_BYTES if f.is_text else math.prod(f.shape) * f.dtype.itemsize for f in features)
        required = [*_COUNTED, *(feature.name for feature in features if feature.kind != "video")]
        for path in sorted((self._data.path / "data").glob("*/*.parquet")):  # the files that LeRobotDataset reads
            with located(path):
                names = pq.read_schema(path).names
                if missing := [name for name in required if name not in names]:
                    raise UnreadableRecording(f"{path}: has no column {missing[0]}")
                for batch in batches(path, rows_at_a_time(row_size), names):
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
        video = self._videos.get(feature.name)
        if video is None or video[0] != path:
            if video is not None:
                video[1].close()
            self._openings[path] += 1
            if self._openings[path] > _MOST_OPENINGS:
                raise UnreadableRecording(
                    f"{path}: its episodes alternate with those of other videos; sort them by video"
                )
            try:
                from gym_trace.exchange.formats.lerobot.videos import VideoReader  # PyAV is not needed without videos
            except ImportError as error:
                raise MissingExtra(f"videos need PyAV ({error}): pip install 'gym-trace[video]'") from error
            video = self._videos[feature.name] = path, VideoReader(path, *feature.stored_shape[:2])
        pictures: Array = video[1].take(begin + times, 0.5 / self._data.fps)
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
        texts = column.to_pylist()
        return texts if foreign else values_of(texts, feature.kind, name)
    return array_of(column, feature.dtype, feature.shape, name)


class _ImageRows:
    """Images of a column; slicing decodes them to an array."""

    def __init__(self, feature: Feature, column: pa.Array, name: str):
        if not pa.types.is_struct(column.type) or column.type.get_field_index("bytes") < 0:
            raise UnreadableRecording(f"{name}: not all rows are images")
        self._feature, self._files, self._name = feature, column.field("bytes"), name

    def __getitem__(self, which: slice) -> Array:
        from gym_trace.exchange.formats.images import pixels  # Pillow is not needed without images

        feature, files = self._feature, self._files[which].to_pylist()
        is_plain = feature.dtype != np.uint8 or feature.shape[2:] == (4,)
        shape: tuple[int, ...] = feature.shape if is_plain else picture_shape(feature.shape)
        pictures = np.empty((len(files), *shape), feature.dtype)
        for i, file in enumerate(files):
            if not isinstance(file, bytes):
                raise UnreadableRecording(f"{self._name}: image in a separate file: not supported")
            try:
                pictures[i] = pixels(file, shape, feature.dtype, _FORMATS)
            except ValueError as error:
                raise UnreadableRecording(f"{self._name}: unreadable image: {error}") from error
        return shaped_pictures(feature, pictures)


def shaped_pictures(feature: Feature, pictures: Array) -> Array:
    """Convert images of (count, H, W, C) to the shape of the feature in the trace."""
    if pictures.shape[1:] == feature.shape:
        return pictures
    channels = 1 if len(feature.shape) == 2 else picture_shape(feature.shape)[2]
    pictures = pictures[..., :channels]
    if channels_first(feature.shape):
        pictures = np.moveaxis(pictures, -1, 1)
    return np.ascontiguousarray(pictures).reshape(len(pictures), *feature.shape)
