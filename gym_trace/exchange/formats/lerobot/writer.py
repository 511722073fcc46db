"""Writes a LeRobot dataset: tables of steps and of episodes, videos, and metadata."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gym_trace.data.layout import Path as LeafPath
from gym_trace.data.showing.pictures import png
from gym_trace.data.values import ABSENT, Array, objects
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.lerobot import statistics
from gym_trace.exchange.formats.lerobot.features import (
    ABOUT,
    COUNTED,
    DATA,
    EPISODES,
    FINAL,
    FLAGS,
    TASK_INDEX,
    TASKS,
    VIDEOS,
    Feature,
    arrow_of,
    rows_of,
    schema_of,
    timestamps,
)
from gym_trace.exchange.formats.parquet.files import ParquetFiles
from gym_trace.exchange.formats.source import ExportSource, flags
from gym_trace.exchange.formats.steps.windows import Window

CHUNK = 1000  # files per directory
DATA_MB = 100  # approximate size of a Parquet file
VIDEO_MB = 200  # approximate size of a video file


def file_path(root: Path, template: str, number: int, **names: str) -> Path:
    """Return the path of a file. template: of features.py."""
    chunk, file = divmod(number, CHUNK)
    return root / template.format(chunk_index=chunk, file_index=file, **names)


class Tables(ParquetFiles):
    """A sequence of Parquet files with the same columns."""

    def __init__(self, root: Path, template: str, schema: pa.Schema, plain: list[str]):
        """plain: columns without a dictionary: their values seldom repeat, or are compressed."""
        with_dictionary = [name for name in schema.names if name not in plain]
        super().__init__(partial(file_path, root, template), schema, use_dictionary=with_dictionary)

    @property
    def is_large(self) -> bool:
        return self.has_reached(DATA_MB << 20)

    def add(self, columns: dict[str, Any]) -> None:
        """Write rows as one row group."""
        typed = [(columns[field.name], field.type) for field in self.schema]
        arrays = [rows.cast(kind) if isinstance(rows, pa.Array) else pa.array(rows, kind) for rows, kind in typed]
        self.write(pa.Table.from_arrays(arrays, schema=self.schema))


def write_tasks(path: Path, tasks: list[str]) -> None:
    """Write the table of tasks. LeRobot reads it with pandas, which takes its index from metadata of the schema."""
    names = [("task_index", "int64", "int64"), ("task", "unicode", "object")]
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
        for name, kind, numpy in names
    ]
    index = {"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object"}
    metadata = {
        "index_columns": ["task"],
        "column_indexes": [{**index, "metadata": {"encoding": "UTF-8"}}],
        "columns": columns,
        "pandas_version": "2.2.0",
    }
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks, pa.string())})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(metadata)}), path)


_MOST_ROWS, _MOST_BYTES = 1 << 16, 64 << 20  # per row group
_MOST_FINALS = 256  # final observations per row group
_MOST_SECONDS = 500  # per video file of several episodes, because LeRobot finds images by sums of float32 times


class DatasetWriter:
    """Writes the files of a dataset. Rows are collected, and written as row groups."""

    def __init__(
        self,
        source: ExportSource,
        target: Path,
        features: list[Feature],
        counted: list[Feature],
        fps: int,
        tasks: list[str],
        robot_type: str | None,
    ):
        """counted: features that equal COUNTED columns. tasks: names; with several, a column has their indices."""
        self._source, self._target, self._features, self._fps = source, target, features, fps
        self._counted_features, self._tasks, self._robot_type = counted, tasks, robot_type
        self._task_indices: list[Array] = []  # one part per window
        self._episode_tasks: list[Array] = []  # task indices of the open episode
        plain = [f"{feature.name}.bytes" if feature.is_picture else feature.name for feature in features]
        plain += ["timestamp", "index", "frame_index"]
        self._data = Tables(target, DATA, schema_of(features), plain)
        self._meta: Tables | None = None
        self._final: Tables | None = None
        observed = (feature for feature in features if feature.path[0] == "observations")
        self._final_features = [f._replace(kind="image") if f.kind == "video" else f for f in observed]
        self._videos = {feature.name: _Videos(feature, target, fps) for feature in features if feature.kind == "video"}
        self._samples = {feature.name: _ImageSample() for feature in features if feature.is_picture}
        self._rows: dict[str, list[Any]] = {}
        self._steps: list[tuple[int, int, int]] = []  # runs of steps: episode, first step, count
        self._row_bytes, self._row_count = 0, 0  # collected so far
        self._episodes: list[dict[str, Any]] = []  # complete ones whose rows are not written yet
        self._open: dict[str, Any] = {}  # position of the open episode in the files
        # Statistics by feature, of the written rows of the open episode, and of all written episodes.
        self._open_statistics: dict[str, list[statistics.Statistics]] = {}
        self._all_statistics: dict[str, statistics.Statistics] = {}
        self._finals: list[tuple[str | None, int, dict[LeafPath, Any]]] = []  # identity, steps, final observation
        self._count, self._frames = 0, 0  # complete episodes, and steps

    # -- windows ------------------------------------------------------------------------------------------------------

    def write(self) -> None:
        for window in self._source.windows():
            self._add_window(window)
        self._flush()
        for videos in self._videos.values():
            videos.close()
        self._write_finals()
        for tables in (self._data, self._meta, self._final):
            if tables is not None:
                tables.close()
        self._write_metadata()

    def detach(self) -> None:
        """Close all open files as they are."""
        for videos in self._videos.values():
            videos.detach()
        for tables in (self._data, self._meta, self._final):
            if tables is not None:
                tables.detach()

    def _add_window(self, window: Window) -> None:
        columns = self._leaves(window)
        if window.steps:
            if window.start == 0:
                self._open = {"from": self._frames, "data": divmod(self._data.number, CHUNK)}
                self._open["videos"] = {
                    name: videos.begin(len(window.episode)) for name, videos in self._videos.items()
                }
            self._steps.append((self._count, window.start, window.steps))
            self._frames += window.steps
            self._row_count += window.steps
            for feature in self._features:
                self._add(feature, columns[feature.path], window)
            terminated, truncated = flags(window)
            for name, rows in zip(FLAGS, (terminated | truncated, terminated, truncated)):
                self._rows.setdefault(name, []).append(rows)
            tasks = columns[TASK_INDEX] if len(self._tasks) > 1 else np.zeros(window.steps, np.int64)
            self._task_indices.append(tasks)
            self._episode_tasks.append(np.unique(tasks))
        if window.closes:
            self._end_episode(window, columns)
        if self._row_count >= _MOST_ROWS or self._row_bytes >= _MOST_BYTES or (window.closes and self._data.is_large):
            self._flush()

    def _leaves(self, window: Window) -> dict[LeafPath, Any]:
        """Return the columns of a window; missing ones are ABSENT."""
        absent = objects([ABSENT] * window.steps)
        return {feature.path: absent for feature in self._features} | window.columns

    def _add(self, feature: Feature, rows: Any, window: Window) -> None:
        if feature.path[0] == "observations":
            rows = rows[: window.steps]
        converted = rows_of(feature, rows)
        if feature.is_picture:
            self._samples[feature.name].add(converted, window.start, len(window.episode))
            if feature.kind == "video":
                self._videos[feature.name].write(converted)
                return
            converted = [png(picture) for picture in converted]
        self._row_bytes += converted.nbytes if isinstance(converted, np.ndarray) else sum(map(len, converted))
        self._rows.setdefault(feature.name, []).append(converted)

    def _end_episode(self, window: Window, columns: dict[LeafPath, Any]) -> None:
        steps = len(window.episode)
        identity = self._source.identity(window.episode)
        final = {feature.path: columns[feature.path][-1:] for feature in self._final_features}
        self._finals.append((None if steps else identity, steps, final))
        if steps:
            episode = {"episode": self._count, "steps": steps, "identity": identity, **self._open}
            episode["tasks"] = [self._tasks[i] for i in np.unique(np.concatenate(self._episode_tasks)).tolist()]
            self._episode_tasks = []
            episode["pictures"] = {name: sample.take() for name, sample in self._samples.items()}
            self._episodes.append(episode)
            self._count += 1
        if len(self._finals) >= _MOST_FINALS:
            self._write_finals()

    # -- row groups ---------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        if self._steps:
            arrays = {f.name: arrow_of(f, self._rows[f.name]) for f in self._features if f.kind != "video"}
            numbers = {f.name: np.concatenate(self._rows[f.name]) for f in self._features if f.kind == "array"}
            numbers |= {name: np.concatenate(self._rows[name]) for name in FLAGS} | self._counted_columns()
            arrays |= {name: pa.array(numbers[name]) for name in (*FLAGS, *COUNTED)}
            self._data.add(arrays)
            self._add_statistics(numbers)
        is_open = bool(self._steps) and self._steps[-1][0] == self._count
        self._rows, self._steps, self._row_bytes, self._row_count = {}, [], 0, 0
        self._task_indices = []
        if self._data.is_large and not is_open:
            self._data.next_file()

    def _counted_columns(self) -> dict[str, Any]:
        episodes, starts, steps = (np.array(values, np.int64) for values in zip(*self._steps))
        total = int(steps.sum())
        frame_index = np.arange(total) - np.repeat(np.cumsum(steps) - steps - starts, steps)
        index = np.arange(self._frames - total, self._frames)
        times, tasks = timestamps(frame_index, self._fps), np.concatenate(self._task_indices)
        return dict(zip(COUNTED, (times, frame_index, np.repeat(episodes, steps), index, tasks)))

    def _add_statistics(self, numbers: dict[str, Any]) -> None:
        """Compute the statistics of the rows of this group; write the metadata of the episodes that end in it."""
        window_episodes = np.array([episode for episode, _, _ in self._steps])
        steps = np.array([count for _, _, count in self._steps])
        begins = np.flatnonzero(np.diff(window_episodes, prepend=-1))  # windows of the same episode are one run
        starts = (np.cumsum(steps) - steps)[begins]
        run_episodes = window_episodes[begins]
        complete = len(self._episodes)
        by_feature: dict[str, statistics.Statistics] = {}
        for name, rows in numbers.items():
            earlier = self._open_statistics.pop(name, [])
            parts = statistics.joined([*earlier, statistics.of_rows(rows, starts)])
            earlier_episodes = [np.full(len(part["count"]), run_episodes[0]) for part in earlier]
            episodes = np.concatenate([*earlier_episodes, run_episodes])
            first = np.flatnonzero(np.diff(episodes, prepend=-1))
            end = first[complete] if complete < len(first) else len(episodes)  # end of the complete episodes
            if complete:
                by_feature[name] = statistics.merged({key: part[:end] for key, part in parts.items()}, first[:complete])
            if end < len(episodes):
                self._open_statistics[name] = [{key: part[end:] for key, part in parts.items()}]
        if complete:
            for name in self._samples:
                by_feature[name] = statistics.joined([episode["pictures"][name] for episode in self._episodes])
            self._write_episodes(by_feature)

    def _write_episodes(self, by_feature: dict[str, statistics.Statistics]) -> None:
        """Write the rows of complete episodes. by_feature: their statistics."""
        for name, part in by_feature.items():
            parts = [self._all_statistics[name], part] if name in self._all_statistics else [part]
            self._all_statistics[name] = statistics.merged(statistics.joined(parts), np.zeros(1, np.int64))
        episodes, self._episodes = self._episodes, []
        int64, text = pa.int64(), pa.string()
        begins = np.array([episode["from"] for episode in episodes])
        steps = np.array([episode["steps"] for episode in episodes])
        chunk, file = divmod(0 if self._meta is None else self._meta.number, CHUNK)
        columns: dict[str, Any] = {
            "episode_index": pa.array([episode["episode"] for episode in episodes], int64),
            "tasks": pa.array([episode["tasks"] for episode in episodes], pa.list_(text)),
            "length": pa.array(steps, int64),
            "data/chunk_index": pa.array([episode["data"][0] for episode in episodes], int64),
            "data/file_index": pa.array([episode["data"][1] for episode in episodes], int64),
            "dataset_from_index": pa.array(begins, int64),
            "dataset_to_index": pa.array(begins + steps, int64),
        }
        for name in self._videos:
            chunks, files, frames = np.array([episode["videos"][name] for episode in episodes]).T
            columns[f"videos/{name}/chunk_index"] = pa.array(chunks, int64)
            columns[f"videos/{name}/file_index"] = pa.array(files, int64)
            columns[f"videos/{name}/from_timestamp"] = pa.array(frames / self._fps)
            columns[f"videos/{name}/to_timestamp"] = pa.array((frames + steps) / self._fps)
        for name, part in by_feature.items():
            for key in ("min", "max", "mean", "std", "count", *statistics.QUANTILES):
                columns[f"stats/{name}/{key}"] = _lists(part[key], name in self._samples and key != "count")
        columns["meta/episodes/chunk_index"] = pa.array(np.full(len(episodes), chunk))
        columns["meta/episodes/file_index"] = pa.array(np.full(len(episodes), file))
        columns[KEY] = pa.array([episode["identity"] for episode in episodes], text)
        if self._meta is None:
            schema = pa.schema([(name, array.type) for name, array in columns.items()])
            self._meta = Tables(self._target, EPISODES, schema, [KEY])
        self._meta.add(columns)
        if self._meta.is_large:
            self._meta.next_file()

    # -- final observations and metadata ------------------------------------------------------------------------------

    def _write_finals(self) -> None:
        if not self._finals:
            return
        if self._final is None:
            schema = schema_of(self._final_features, counted=False)
            schema = schema.insert(0, pa.field("steps", pa.int64())).insert(0, pa.field(KEY, pa.string()))
            self._final = Tables(self._target, FINAL, schema, [KEY])
        columns: dict[str, Any] = {KEY: [identity for identity, _, _ in self._finals]}
        columns["steps"] = [steps for _, steps, _ in self._finals]
        for feature in self._final_features:
            parts = [rows_of(feature, rows[feature.path]) for _, _, rows in self._finals]
            if feature.is_picture:
                parts = [[png(picture) for picture in part] for part in parts]
            columns[feature.name] = arrow_of(feature, parts)
        self._final.add(columns)
        self._finals = []

    def _write_metadata(self) -> None:
        declared = {feature.name: feature.declared() for feature in self._features}
        for name, videos in self._videos.items():
            declared[name]["info"] = videos.info()
        scalar = {"shape": [1], "names": None}
        declared |= {name: {"dtype": "bool", **scalar} for name in FLAGS}
        declared |= {name: {"dtype": dtype.name, **scalar} for name, dtype in COUNTED.items()}
        info = {
            "codebase_version": "v3.0",
            "robot_type": self._robot_type,
            "total_episodes": self._count,
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "chunks_size": CHUNK,
            "data_files_size_in_mb": DATA_MB,
            "video_files_size_in_mb": VIDEO_MB,
            "fps": self._fps,
            "splits": {"train": f"0:{self._count}"},
            "data_path": DATA,
            "video_path": VIDEOS if self._videos else None,
            "features": declared,
        }
        stats = {name: statistics.to_json(run, name in self._samples) for name, run in self._all_statistics.items()}
        about = {
            "version": 1,
            "episodes": self._count,
            "frames": self._frames,
            "features": [feature.to_json() for feature in (*self._features, *self._counted_features)],
            KEY: self._source.about,
        }
        write_tasks(self._target / TASKS, self._tasks)
        for path, content in (("meta/info.json", info), ("meta/stats.json", stats), (ABOUT, about)):
            text = json.dumps(content, indent=None if path == ABOUT else 4, allow_nan=False)
            (self._target / path).write_text(text + "\n", encoding="utf-8")


class _ImageSample:
    """Histogram of sampled images of the open episode, for its statistics."""

    def __init__(self) -> None:
        self._histogram: Any = 0
        self._count = 0

    def add(self, pictures: Array, start: int, steps: int) -> None:
        """Add images from index start on, of an episode of `steps` steps."""
        indices = statistics.sampled(steps) - start
        indices = indices[(indices >= 0) & (indices < len(pictures))]
        self._count += len(indices)
        self._histogram = self._histogram + statistics.histogram_of(pictures[indices])

    def take(self) -> statistics.Statistics:
        """Return the statistics of the episode, and start with the next one."""
        result = statistics.of_pictures(self._histogram, self._count)
        self._histogram, self._count = 0, 0
        return result


class _Videos:
    """A sequence of video files of one feature."""

    def __init__(self, feature: Feature, target: Path, fps: int):
        from gym_trace.exchange.formats.lerobot.videos import INFO, VideoWriter  # PyAV is not needed without videos

        self._writer_class, self._feature, self._target, self._fps = VideoWriter, feature, target, fps
        self._info, self._number = INFO, 0
        self._writer: VideoWriter | None = None

    def begin(self, steps: int) -> tuple[int, int, int]:
        """Begin an episode. Return chunk and number of its file, and the number of earlier images in it."""
        if self._writer is not None:
            is_full = os.path.getsize(self._writer.path) >= VIDEO_MB << 20
            if is_full or self._writer.frames + steps > _MOST_SECONDS * self._fps:
                self.close()
                self._number += 1
        if self._writer is None:
            height, width, _ = self._feature.stored_shape
            path = file_path(self._target, VIDEOS, self._number, video_key=self._feature.name)
            self._writer = self._writer_class(path, self._fps, height, width)
        return *divmod(self._number, CHUNK), self._writer.frames

    def write(self, pictures: Array) -> None:
        if self._writer is not None:
            self._writer.write(pictures)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def detach(self) -> None:
        if self._writer is not None:
            self._writer.detach()
            self._writer = None

    def info(self) -> dict[str, Any]:
        height, width, _ = self._feature.stored_shape
        sizes = {"video.height": height, "video.width": width, "video.channels": 3}
        return {**sizes, "video.fps": self._fps, **self._info}


def _lists(values: Array, is_picture: bool) -> pa.Array:
    """Return each row as a list; rows of images as lists of shape (C, 1, 1)."""
    array = pa.array(values.reshape(-1))
    if is_picture:
        offsets = pa.array(np.arange(values.size + 1, dtype=np.int32))
        array = pa.ListArray.from_arrays(offsets, pa.ListArray.from_arrays(offsets, array))
    return pa.ListArray.from_arrays(np.arange(len(values) + 1, dtype=np.int32) * values.shape[1], array)
