"""The steps of a LeRobot data set, read in their order, some at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gym_trace.errors import MissingExtra, UnreadableRecording
from gym_trace.formats.lerobot.columns import array_of, values_of
from gym_trace.formats.lerobot.dataset import DataSet, Row, located
from gym_trace.formats.lerobot.features import Feature, channels_first, picture_shape
from gym_trace.formats.parquet.tables import batches
from gym_trace.model.layout import Path as LeafPath
from gym_trace.model.values import Array

_MOST_ROWS = 8192  # that are decoded at a time
_MOST_BYTES = 8 << 20
_TEXT_BYTES = 256
_FORMATS = ("PNG", "JPEG", "TIFF", "WEBP")
Columns = dict[LeafPath, Any]  # rows of each
Slices = Callable[[int, int], Any]


class StepReader:
    """Reads the tables of steps from the first to the last, and the videos along with them."""

    def __init__(self, data: DataSet, foreign: bool = False):
        self._data, self._foreign = data, foreign
        size = sum(
            math.prod(one.shape) * one.dtype.itemsize if not one.is_text else _TEXT_BYTES for one in data.features
        )
        self._most = max(1, min(_MOST_ROWS, _MOST_BYTES // max(1, size)))
        self._batches = self._read()
        self._batch: _Batch | None = None
        self._videos: dict[str, tuple[Path, Any]] = {}

    def parts(self, row: Row) -> Iterator[Columns]:
        """The columns of an episode, which is the next one. Raises UnreadableRecording."""
        done = 0
        while done < row.steps:
            if self._batch is None or self._batch.is_over:
                self._batch = next(self._batches, None)
                if self._batch is None:
                    raise UnreadableRecording(f"{self._data.path}: episode {row.number} has no rows, or too few")
            batch, begin = self._batch, self._batch.at
            end = batch.take(min(row.steps - done, self._most), row.number, done)
            columns = {path: rows(begin, end) for path, rows in batch.columns.items()}
            for feature in self._data.features:
                if feature.kind == "video":
                    pictures = self._pictures(feature, row, batch.times[begin:end])
                    columns[feature.path] = shaped_pictures(feature, pictures)
            done += end - begin
            yield columns

    def _read(self) -> Iterator[_Batch]:
        for path in self._data.data_files():
            with located(path):
                for batch in batches(path, self._most, pq.read_schema(path).names):
                    yield _Batch(path, batch, self._data, self._foreign)

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


class _Batch:
    """Some rows of a table, of which parts are taken one after the other."""

    def __init__(self, path: Path, batch: pa.RecordBatch, data: DataSet, foreign: bool):
        self.at, self._path = 0, path
        self._rows: int = batch.num_rows
        named = {name: batch.column(name) for name in batch.schema.names}
        wanted = ["episode_index", "frame_index", "timestamp"]
        if missing := [
            name for name in [*wanted, *(one.name for one in data.features if one.kind != "video")] if name not in named
        ]:
            raise UnreadableRecording(f"{path}: has no column {missing[0]}")
        whole = np.dtype(np.int64)
        self._episodes, self._frames = (array_of(named[name], whole, (), f"{path}: {name}") for name in wanted[:2])
        self.times = array_of(named["timestamp"], np.dtype(np.float64), (), f"{path}: timestamp")
        if not np.isfinite(self.times).all():
            raise UnreadableRecording(f"{path}: invalid timestamp")
        self.columns: dict[LeafPath, Slices] = {}
        for feature in data.features:
            if feature.kind != "video":
                self.columns[feature.path] = decoded(feature, batch, str(path), foreign)
        if foreign:
            self.columns["annotations", "timestamp"] = _slices(array_of(named["timestamp"], np.dtype("f4"), (), ""))
            if len(data.tasks) > 1 and "task_index" in named:
                self.columns["annotations", "task_index"] = _slices(array_of(named["task_index"], whole, (), str(path)))

    @property
    def is_over(self) -> bool:
        return self.at >= self._rows

    def take(self, most: int, episode: int, done: int) -> int:
        """Take the next rows, which must belong to this episode, from step number done on; return their end."""
        begin, end = self.at, min(self.at + most, self._rows)
        expected = np.arange(done, done + end - begin)
        if (self._episodes[begin:end] != episode).any() or (self._frames[begin:end] != expected).any():
            raise UnreadableRecording(f"{self._path}: the rows of episode {episode} are not what meta/episodes says")
        self.at = end
        return end


def decoded(feature: Feature, batch: pa.RecordBatch, where: str = "", foreign: bool = False) -> Slices:
    """A function that gives the rows of a feature from one to another. Raises UnreadableRecording, as that does."""
    name = f"{where}: {feature.name}" if where else feature.name
    column = batch.column(feature.name)
    if feature.is_picture:
        return _pictures_in(feature, column, name)
    if feature.is_text:
        plain = column.to_pylist()
        return _slices(plain if foreign else values_of(plain, feature.kind, name))
    return _slices(array_of(column, feature.dtype, feature.shape, name))


def _slices(rows: Any) -> Slices:
    return lambda begin, end: rows[begin:end]


def _pictures_in(feature: Feature, column: pa.Array, name: str) -> Slices:
    from gym_trace.formats.images import pixels  # Pillow is not needed without pictures

    if not pa.types.is_struct(column.type) or column.type.get_field_index("bytes") < 0:
        raise UnreadableRecording(f"{name}: holds something else than pictures")
    files = column.field("bytes")
    is_plain = feature.dtype != np.uint8 or feature.shape[2:] == (4,)
    shape: tuple[int, ...] = feature.shape if is_plain else picture_shape(feature.shape)

    def rows(begin: int, end: int) -> Array:
        found = np.empty((end - begin, *shape), feature.dtype)
        for place, file in enumerate(files[begin:end].to_pylist()):
            if not isinstance(file, bytes):
                raise UnreadableRecording(f"{name}: a picture is not in the table, but in a file of its own")
            try:
                found[place] = pixels(file, shape, feature.dtype, _FORMATS)
            except ValueError as error:
                raise UnreadableRecording(f"{name}: a picture cannot be read: {error}") from error
        return shaped_pictures(feature, found)

    return rows


def shaped_pictures(feature: Feature, pictures: Array) -> Array:
    """(pictures, H, W, C) as the trace has them."""
    if pictures.shape[1:] == feature.shape:
        return pictures
    channels = 1 if len(feature.shape) == 2 else picture_shape(feature.shape)[2]
    pictures = pictures[..., :channels]
    if channels_first(feature.shape):
        pictures = np.moveaxis(pictures, -1, 1)
    return np.ascontiguousarray(pictures).reshape(len(pictures), *feature.shape)


def in_trace(held: Any, rows: Any) -> Any:
    """Rows one after the other."""
    return np.concatenate([held, rows]) if isinstance(held, np.ndarray) else [*held, *rows]
