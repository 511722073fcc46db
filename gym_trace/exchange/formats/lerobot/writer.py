"""Writes a LeRobot dataset: tables of steps and of episodes, videos, and metadata."""

from __future__ import annotations

import json
import os
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
from gym_trace.exchange.formats.source import ExportSource, flags
from gym_trace.exchange.formats.steps.windows import Window

CHUNK = 1000  # files in a directory
DATA_MB = 100  # about how large a file of tables gets
VIDEO_MB = 200


class Place:
    """Position of a file in a dataset: chunk_index and file_index."""

    def __init__(self) -> None:
        self.chunk, self.file = 0, 0

    def advance(self) -> None:
        self.chunk, self.file = (self.chunk, self.file + 1) if self.file + 1 < CHUNK else (self.chunk + 1, 0)

    def path(self, root: Path, template: str, **names: str) -> Path:
        return root / template.format(chunk_index=self.chunk, file_index=self.file, **names)


class Tables:
    """A sequence of Parquet files with the same columns."""

    def __init__(self, root: Path, template: str, schema: pa.Schema, plain: list[str]):
        """plain: columns of values that seldom repeat, or are compressed already."""
        self.place, self._root, self._template, self._schema = Place(), root, template, schema
        self._plain = plain
        self._sink: Any = None
        self._writer: Any = None

    @property
    def is_large(self) -> bool:
        return self._sink is not None and self._sink.tell() >= DATA_MB << 20

    def write(self, columns: dict[str, Any]) -> None:
        """Writes rows as one group of them."""
        if self._writer is None:
            path = self.place.path(self._root, self._template)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._sink = pa.OSFile(str(path), "wb")
            repeating = [name for name in self._schema.names if name not in self._plain]
            self._writer = pq.ParquetWriter(
                self._sink, self._schema, compression="zstd", use_dictionary=repeating, store_schema=True
            )
        given = [(columns[field.name], field.type) for field in self._schema]
        arrays = [rows.cast(kind) if isinstance(rows, pa.Array) else pa.array(rows, kind) for rows, kind in given]
        table = pa.Table.from_arrays(arrays, schema=self._schema)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))

    def next_file(self) -> None:
        """Start another file."""
        self.close()
        self.place.advance()

    def close(self) -> None:
        """Makes the file whole. Raises OSError."""
        if self._writer is not None:
            self._writer.close()
            self._sink.close()
            self._writer = self._sink = None

    def drop(self) -> None:
        """Close an incomplete file."""
        writer, sink, self._writer, self._sink = self._writer, self._sink, None, None
        if writer is not None:
            writer.is_open = False  # or it would try once more to make it whole
        if sink is not None:
            sink.close()


def write_tasks(path: Path, tasks: list[str]) -> None:
    """The table of tasks, whose index pandas, which LeRobot reads it with, finds in the schema."""
    names = [("task_index", "int64", "int64"), ("task", "unicode", "object")]
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
        for name, kind, numpy in names
    ]
    index = {"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object"}
    said = {
        "index_columns": ["task"],
        "column_indexes": [{**index, "metadata": {"encoding": "UTF-8"}}],
        "columns": columns,
        "pandas_version": "2.2.0",
    }
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks, pa.string())})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(said)}), path)


_MOST_ROWS = 1 << 16  # per row group
_MOST_BYTES = 64 << 20
_MOST_ENDS = 256  # final observations that are written at a time
_LONGEST = 500  # seconds in a video file of several episodes: LeRobot adds up times of 32 bits, and looks for the sum


class DatasetWriter:
    """The files of a dataset while they are written: rows are collected for a while, then go out as a group."""

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
        """counted: features that every dataset stores. tasks: names; with several, a column has their indices."""
        self._source, self._target, self._features, self._fps = source, target, features, fps
        self._counted_features, self._tasks, self._robot_type = counted, tasks, robot_type
        self._task_indices: list[Array] = []  # one part per window
        self._of_episode: list[Array] = []  # task indices of the open episode
        plain = [f"{feature.name}.bytes" if feature.is_picture else feature.name for feature in features]
        plain += ["timestamp", "index", "frame_index"]
        self._data = Tables(target, DATA, schema_of(features), plain)
        self._meta: Tables | None = None
        self._final: Any = None
        observed = (feature for feature in features if feature.path[0] == "observations")
        self._finals = [one._replace(kind="image") if one.kind == "video" else one for one in observed]
        self._videos = {feature.name: _Videos(feature, target, fps) for feature in features if feature.kind == "video"}
        self._pictures = {feature.name: _Sample() for feature in features if feature.is_picture}
        self._rows: dict[str, list[Any]] = {}
        self._steps: list[tuple[int, int, int]] = []  # runs of steps: episode, first step, count
        self._bytes, self._held = 0, 0  # bytes and number of the rows
        self._episodes: list[dict[str, Any]] = []  # complete, not written yet
        self._open: dict[str, Any] = {}  # the open episode
        self._found: dict[str, list[statistics.Statistics]] = {}  # statistics of runs of the open episode
        self._all: dict[str, statistics.Statistics] = {}
        self._ends: list[tuple[str | None, int, dict[LeafPath, Any]]] = []  # final observations
        self._count, self._frames = 0, 0

    # -- a window ---------------------------------------------------------------------------------------------------

    def write(self) -> None:
        for window in self._source.windows():
            self._window(window)
        self._flush()
        for videos in self._videos.values():
            videos.close()
        self._write_ends()
        for files in (self._data, self._meta, self._final):
            if files is not None:
                files.close()
        self._finish()

    def drop(self) -> None:
        """Close all open files, complete or not."""
        for videos in self._videos.values():
            videos.drop()
        for files in (self._data, self._meta, self._final):
            if files is not None:
                files.drop()

    def _window(self, window: Window) -> None:
        columns = self._leaves(window)
        if window.steps:
            if window.start == 0:
                self._open = {"from": self._frames, "data": (self._data.place.chunk, self._data.place.file)}
                self._open["videos"] = {
                    name: videos.begin(len(window.episode)) for name, videos in self._videos.items()
                }
            self._steps.append((self._count, window.start, window.steps))
            self._frames += window.steps
            self._held += window.steps
            for feature in self._features:
                self._add(feature, columns[feature.path], window)
            terminated, truncated = flags(window)
            for name, rows in zip(FLAGS, (terminated | truncated, terminated, truncated)):
                self._rows.setdefault(name, []).append(rows)
            several = len(self._tasks) > 1
            tasks = columns[TASK_INDEX] if several else np.zeros(window.steps, np.int64)
            self._task_indices.append(tasks)
            self._of_episode.append(np.unique(tasks))
        if window.closes:
            self._close(window, columns)
        if self._held >= _MOST_ROWS or self._bytes >= _MOST_BYTES or (window.closes and self._data.is_large):
            self._flush()

    def _leaves(self, window: Window) -> dict[LeafPath, Any]:
        absent = objects([ABSENT] * window.steps)
        return {feature.path: absent for feature in self._features} | window.columns

    def _add(self, feature: Feature, rows: Any, window: Window) -> None:
        if feature.path[0] == "observations":
            rows = rows[: window.steps]
        given = rows_of(feature, rows)
        if feature.is_picture:
            self._pictures[feature.name].add(given, window.start, len(window.episode))
            if feature.kind == "video":
                self._videos[feature.name].write(given)
                return
            given = [png(picture) for picture in given]
        self._bytes += given.nbytes if isinstance(given, np.ndarray) else sum(map(len, given))
        self._rows.setdefault(feature.name, []).append(given)

    def _close(self, window: Window, columns: dict[LeafPath, Any]) -> None:
        steps = len(window.episode)
        identity = self._source.identity(window.episode)
        self._ends.append((None if steps else identity, steps, {f.path: columns[f.path][-1:] for f in self._finals}))
        if steps:
            said = {"episode": self._count, "steps": steps, "identity": identity, **self._open}
            said["tasks"] = [self._tasks[place] for place in np.unique(np.concatenate(self._of_episode)).tolist()]
            self._of_episode = []
            said["pictures"] = {name: sample.found() for name, sample in self._pictures.items()}
            self._episodes.append(said)
            self._count += 1
        if len(self._ends) >= _MOST_ENDS:
            self._write_ends()

    # -- a group of rows --------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        if self._steps:
            arrays = {f.name: arrow_of(f, self._rows[f.name]) for f in self._features if f.kind != "video"}
            numbers = {f.name: np.concatenate(self._rows[f.name]) for f in self._features if f.kind == "array"}
            numbers |= {name: np.concatenate(self._rows[name]) for name in FLAGS} | self._counted()
            arrays |= {name: pa.array(numbers[name]) for name in (*FLAGS, *COUNTED)}
            self._data.write(arrays)
            self._measure(numbers)
        is_open = bool(self._steps) and self._steps[-1][0] == self._count
        self._rows, self._steps, self._bytes, self._held = {}, [], 0, 0
        self._task_indices = []
        if self._data.is_large and not is_open:
            self._data.next_file()

    def _counted(self) -> dict[str, Any]:
        episodes, starts, steps = (np.array(values, np.int64) for values in zip(*self._steps))
        total = int(steps.sum())
        inside = np.arange(total) - np.repeat(np.cumsum(steps) - steps - starts, steps)
        index = np.arange(self._frames - total, self._frames)
        times, tasks = timestamps(inside, self._fps), np.concatenate(self._task_indices)
        return dict(zip(COUNTED, (times, inside, np.repeat(episodes, steps), index, tasks)))

    def _measure(self, numbers: dict[str, Any]) -> None:
        """Statistics of these rows, and the metadata of the episodes that end with them."""
        runs = np.array([episode for episode, _, _ in self._steps])
        steps = np.array([count for _, _, count in self._steps])
        begins = np.flatnonzero(np.diff(runs, prepend=-1))  # windows of the same episode are one run
        starts = (np.cumsum(steps) - steps)[begins]
        of_episodes = runs[begins]
        over = len(self._episodes)
        told: dict[str, statistics.Statistics] = {}
        for name, rows in numbers.items():
            parts = statistics.of_rows(rows, starts)
            held = self._found.pop(name, [])
            known = statistics.joined([*held, parts])
            which = np.concatenate([np.full(len(part["count"]), of_episodes[0]) for part in held] + [of_episodes])
            first = np.flatnonzero(np.diff(which, prepend=-1))
            rest = first[over] if over < len(first) else len(which)
            if over:
                whole = {key: value[:rest] for key, value in known.items()}
                told[name] = statistics.merged(whole, first[:over])
            if rest < len(which):
                self._found[name] = [{key: value[rest:] for key, value in known.items()}]
        if over:
            for name in self._pictures:
                told[name] = statistics.joined([episode["pictures"][name] for episode in self._episodes])
            self._write_episodes(told)

    def _write_episodes(self, told: dict[str, statistics.Statistics]) -> None:
        for name, found in told.items():
            known = statistics.joined([self._all[name], found]) if name in self._all else found
            self._all[name] = statistics.merged(known, np.zeros(1, np.int64))
        over, self._episodes = self._episodes, []
        whole, text = pa.int64(), pa.string()
        begins = np.array([episode["from"] for episode in over])
        steps = np.array([episode["steps"] for episode in over])
        place = Place() if self._meta is None else self._meta.place
        columns: dict[str, Any] = {
            "episode_index": pa.array([episode["episode"] for episode in over], whole),
            "tasks": pa.array([episode["tasks"] for episode in over], pa.list_(text)),
            "length": pa.array(steps, whole),
            "data/chunk_index": pa.array([episode["data"][0] for episode in over], whole),
            "data/file_index": pa.array([episode["data"][1] for episode in over], whole),
            "dataset_from_index": pa.array(begins, whole),
            "dataset_to_index": pa.array(begins + steps, whole),
        }
        for name in self._videos:
            chunks, files, frames = np.array([episode["videos"][name] for episode in over]).T
            columns[f"videos/{name}/chunk_index"] = pa.array(chunks, whole)
            columns[f"videos/{name}/file_index"] = pa.array(files, whole)
            columns[f"videos/{name}/from_timestamp"] = pa.array(frames / self._fps)
            columns[f"videos/{name}/to_timestamp"] = pa.array((frames + steps) / self._fps)
        for name, found in told.items():
            for key in ("min", "max", "mean", "std", "count", *statistics.QUANTILES):
                columns[f"stats/{name}/{key}"] = _lists(found[key], name in self._pictures and key != "count")
        columns["meta/episodes/chunk_index"] = pa.array(np.full(len(over), place.chunk))
        columns["meta/episodes/file_index"] = pa.array(np.full(len(over), place.file))
        columns[KEY] = pa.array([episode["identity"] for episode in over], text)
        if self._meta is None:
            schema = pa.schema([(name, array.type) for name, array in columns.items()])
            self._meta = Tables(self._target, EPISODES, schema, [KEY])
        self._meta.write(columns)
        if self._meta.is_large:
            self._meta.next_file()

    # -- the rest -----------------------------------------------------------------------------------------------------

    def _write_ends(self) -> None:
        if not self._ends:
            return
        if self._final is None:
            schema = schema_of(self._finals, counted=False)
            schema = schema.insert(0, pa.field("steps", pa.int64())).insert(0, pa.field(KEY, pa.string()))
            self._final = Tables(self._target, FINAL, schema, [KEY])
        columns: dict[str, Any] = {KEY: [identity for identity, _, _ in self._ends]}
        columns["steps"] = [steps for _, steps, _ in self._ends]
        for feature in self._finals:
            parts = [rows_of(feature, rows[feature.path]) for _, _, rows in self._ends]
            if feature.is_picture:
                parts = [[png(picture) for picture in part] for part in parts]
            columns[feature.name] = arrow_of(feature, parts)
        self._final.write(columns)
        self._ends = []

    def _finish(self) -> None:
        declared = {feature.name: feature.declared() for feature in self._features}
        for name, videos in self._videos.items():
            declared[name]["info"] = videos.info()
        number = {"shape": [1], "names": None}
        declared |= {name: {"dtype": "bool", **number} for name in FLAGS}
        declared |= {name: {"dtype": dtype.name, **number} for name, dtype in COUNTED.items()}
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
        stats = {name: statistics.told(found, name in self._pictures) for name, found in self._all.items()}
        about = {
            "version": 1,
            "episodes": self._count,
            "frames": self._frames,
            "features": [feature.kept() for feature in (*self._features, *self._counted_features)],
            KEY: self._source.about,
        }
        write_tasks(self._target / TASKS, self._tasks)
        for path, said in (("meta/info.json", info), ("meta/stats.json", stats), (ABOUT, about)):
            text = json.dumps(said, indent=None if path == ABOUT else 4, allow_nan=False)
            (self._target / path).write_text(text + "\n", encoding="utf-8")


class _Sample:
    """A sample of the pictures of an episode, for its statistics."""

    def __init__(self) -> None:
        self._histogram: Any = 0
        self._many = 0

    def add(self, pictures: Array, start: int, steps: int) -> None:
        """Add images from index start on, of an episode of `steps` steps."""
        chosen = statistics.sampled(steps) - start
        chosen = chosen[(chosen >= 0) & (chosen < len(pictures))]
        self._many += len(chosen)
        self._histogram = self._histogram + statistics.counted(pictures[chosen])

    def found(self) -> statistics.Statistics:
        """Return the statistics of the finished episode."""
        found = statistics.of_pictures(self._histogram, self._many)
        self._histogram, self._many = 0, 0
        return found


class _Videos:
    def __init__(self, feature: Feature, target: Path, fps: int):
        from gym_trace.exchange.formats.lerobot.videos import INFO, VideoWriter  # PyAV is not needed without videos

        self._open, self._feature, self._target, self._fps = VideoWriter, feature, target, fps
        self._info, self._place = INFO, Place()
        self._writer: VideoWriter | None = None

    def begin(self, steps: int) -> tuple[int, int, int]:
        """Begin an episode. Return chunk and number of its file, and the number of earlier images in it."""
        if self._writer is not None:
            full = os.path.getsize(self._writer.path) >= VIDEO_MB << 20
            if full or self._writer.frames + steps > _LONGEST * self._fps:
                self.close()
                self._place.advance()
        if self._writer is None:
            height, width, _ = self._feature.stored
            path = self._place.path(self._target, VIDEOS, video_key=self._feature.name)
            self._writer = self._open(path, self._fps, height, width)
        return self._place.chunk, self._place.file, self._writer.frames

    def write(self, pictures: Array) -> None:
        if self._writer is not None:
            self._writer.write(pictures)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def drop(self) -> None:
        if self._writer is not None:
            self._writer.drop()
            self._writer = None

    def info(self) -> dict[str, Any]:
        height, width, _ = self._feature.stored
        sizes = {"video.height": height, "video.width": width, "video.channels": 3}
        return {**sizes, "video.fps": self._fps, **self._info}


def _lists(values: Array, of_picture: bool) -> pa.Array:
    """Each row as a list; of pictures, of (C, 1, 1)."""
    array = pa.array(values.reshape(-1))
    if of_picture:
        each = pa.array(np.arange(values.size + 1, dtype=np.int32))
        array = pa.ListArray.from_arrays(each, pa.ListArray.from_arrays(each, array))
    return pa.ListArray.from_arrays(np.arange(len(values) + 1, dtype=np.int32) * values.shape[1], array)
