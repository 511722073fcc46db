"""The steps of a LeRobot data set, read in their order, some at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gym_trace.errors import MissingExtra, UnreadableRecording
from gym_trace.formats.lerobot.columns import array_of, values_of
from gym_trace.formats.lerobot.dataset import DataSet, Row
from gym_trace.formats.lerobot.features import TASK_INDEX, TIMESTAMP, Feature, channels_first, picture_shape
from gym_trace.formats.parquet.tables import batches, located, rows_at_a_time
from gym_trace.formats.rows import Taken
from gym_trace.model.layout import Path as LeafPath
from gym_trace.model.values import Array

_TEXT_BYTES = 256
_FORMATS = ("PNG", "JPEG", "TIFF", "WEBP")
_COUNTED = ("episode_index", "frame_index", "timestamp")
Columns = dict[LeafPath, Any]  # rows of each


class StepReader:
    """Reads the tables of steps from the first to the last, and the videos along with them."""

    def __init__(self, data: DataSet, foreign: bool = False):
        self._data, self._foreign = data, foreign
        self._rows = Taken(self._read())
        self._videos: dict[str, tuple[Path, Any]] = {}

    def parts(self, row: Row) -> Iterator[Columns]:
        """The columns of an episode, which is the next one. Raises UnreadableRecording."""
        done = 0
        while done < row.steps:
            if self._rows.is_over():
                raise UnreadableRecording(f"{self._data.path}: episode {row.number} has no rows, or too few")
            count, columns = self._rows.take(row.steps - done)
            episodes, frames, times = (columns.pop((name,)) for name in _COUNTED)
            if (episodes != row.number).any() or (frames != np.arange(done, done + count)).any():
                told = f"the rows of episode {row.number} are not what meta/episodes says"
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
        for path in sorted((self._data.path / "data").glob("*/*.parquet")):  # as LeRobotDataset finds them
            with located(path):
                names = pq.read_schema(path).names
                if missing := [name for name in needed if name not in names]:
                    raise UnreadableRecording(f"{path}: has no column {missing[0]}")
                for batch in batches(path, rows_at_a_time(size), names):
                    yield batch.num_rows, self._columns(batch, str(path))

    def _columns(self, batch: pa.RecordBatch, where: str) -> Columns:
        """The columns of some rows, also those that are counted, under their names."""

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

    def _pictures(self, feature: Feature, row: Row, times: Array) -> Array:
        path, begin = row.videos[feature.name]
        known = self._videos.get(feature.name)
        if known is None or known[0] != path:
            if known is not None:
                known[1].close()
            height, width, _ = feature.stored
            known = self._videos[feature.name] = path, _reader()(path, height, width)
        pictures: Array = known[1].take(begin + times, 0.5 / self._data.fps)
        return pictures

    def close(self) -> None:
        for _, reader in self._videos.values():
            reader.close()


def _reader() -> Any:
    try:
        from gym_trace.formats.lerobot.videos import VideoReader  # PyAV is not needed without videos
    except ImportError as error:
        raise MissingExtra(f"videos need PyAV ({error}): pip install 'gym-trace[video]'") from error
    return VideoReader


def decoded(feature: Feature, batch: pa.RecordBatch, where: str, foreign: bool = False) -> Any:
    """The rows of a feature, of which pictures are decoded when they are cut out. Raises UnreadableRecording."""
    column, name = batch.column(feature.name), f"{where}: {feature.name}"
    if feature.is_picture:
        return _Pictures(feature, column, name)
    if feature.is_text:
        plain = column.to_pylist()
        return plain if foreign else values_of(plain, feature.kind, name)
    return array_of(column, feature.dtype, feature.shape, name)


class _Pictures:
    """Pictures in a table, as rows of which a slice is an array."""

    def __init__(self, feature: Feature, column: pa.Array, name: str):
        if not pa.types.is_struct(column.type) or column.type.get_field_index("bytes") < 0:
            raise UnreadableRecording(f"{name}: holds something else than pictures")
        self._feature, self._files, self._name = feature, column.field("bytes"), name

    def __getitem__(self, which: slice) -> Array:
        from gym_trace.formats.images import pixels  # Pillow is not needed without pictures

        feature, files = self._feature, self._files[which].to_pylist()
        is_plain = feature.dtype != np.uint8 or feature.shape[2:] == (4,)
        shape: tuple[int, ...] = feature.shape if is_plain else picture_shape(feature.shape)
        found = np.empty((len(files), *shape), feature.dtype)
        for place, file in enumerate(files):
            if not isinstance(file, bytes):
                raise UnreadableRecording(f"{self._name}: a picture is not in the table, but in a file of its own")
            try:
                found[place] = pixels(file, shape, feature.dtype, _FORMATS)
            except ValueError as error:
                raise UnreadableRecording(f"{self._name}: a picture cannot be read: {error}") from error
        return shaped_pictures(feature, found)


def shaped_pictures(feature: Feature, pictures: Array) -> Array:
    """(pictures, H, W, C) as the trace has them."""
    if pictures.shape[1:] == feature.shape:
        return pictures
    channels = 1 if len(feature.shape) == 2 else picture_shape(feature.shape)[2]
    pictures = pictures[..., :channels]
    if channels_first(feature.shape):
        pictures = np.moveaxis(pictures, -1, 1)
    return np.ascontiguousarray(pictures).reshape(len(pictures), *feature.shape)
