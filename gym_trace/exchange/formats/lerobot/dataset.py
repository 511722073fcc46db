"""Read the untrusted metadata of a LeRobot dataset."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from gym_trace.errors import CorruptTrace, UnreadableRecording
from gym_trace.exchange.formats.foreign import read_json
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.lerobot.features import ABOUT, COUNTED, DATA, TASKS, VIDEOS, Feature
from gym_trace.exchange.formats.parquet.tables import batches, is_text, located, parquet_file

_MOST_TASK_TEXT = 64 << 20  # characters of all tasks
_MOST_ELEMENTS = 1 << 27  # per row
_MOST_TASKS = 1 << 20
_NUMBERS = frozenset(np.dtype(letter).name for letter in "?bhilqBHILQefd")
_EPISODE_COLUMNS = ("episode_index", "length")
_VIDEO_COLUMNS = ("chunk_index", "file_index", "from_timestamp")


class EpisodeRow(NamedTuple):
    """An episode. videos: by feature, the file, and the time in it at which the episode begins, s."""

    number: int
    steps: int
    identity: str | None
    videos: dict[str, tuple[Path, float]]


class LeRobotDirectory:
    """A LeRobot dataset.

    Attributes:
        fps, robot_type, episodes, steps, tasks: as declared. declared: the features in info.json.
        features: all but COUNTED; paths begin with observations, actions, rewards, flags or annotations.
        about: the text of ExportSource.about, if gym-trace exported the dataset and it has not changed since; or None.
        was_changed: True if gym-trace exported the dataset, and it has changed since.
    """

    def __init__(self, path: Path):
        """Raises UnreadableRecording."""
        self.path = path
        info = read_json(path / "meta" / "info.json")
        version = info.get("codebase_version")
        if not isinstance(version, str) or not version.startswith("v3."):
            advice = "python -m lerobot.scripts.convert_dataset_v21_to_v30 converts version 2.1"
            raise self.malformed(f"unsupported version {version!r:.40}; only version 3 is supported; {advice}")
        fps = info.get("fps")
        if not isinstance(fps, (int, float)) or isinstance(fps, bool) or not 0 < fps < 1e6:
            raise self.malformed(f"invalid frame rate {fps!r:.40}")
        self.fps = fps
        self.robot_type = info.get("robot_type")
        self.episodes, self.steps = (self._count(info, name) for name in ("total_episodes", "total_frames"))
        self.declared: Any = info.get("features")
        self._template(info.get("data_path") or DATA)
        self._video = self._template(info.get("video_path") or VIDEOS)
        if not isinstance(self.declared, dict):
            raise self.malformed("has no features")
        self.about, self.was_changed, exported = self._exported()
        foreign = [self._feature(name, declared) for name, declared in self.declared.items() if name not in COUNTED]
        if len({feature.path for feature in foreign}) < len(foreign):
            raise self.malformed("has features whose names differ only in their prefix")
        self.features = foreign if exported is None else exported
        self._videos = [feature.name for feature in self.features if feature.kind == "video"]
        self.tasks = self._tasks()

    def malformed(self, problem: str) -> UnreadableRecording:
        return UnreadableRecording(f"{self.path / 'meta' / 'info.json'}: {problem}")

    def _count(self, info: dict[str, Any], name: str) -> int:
        count = info.get(name)
        if type(count) is not int or count < 0:
            raise self.malformed(f"has {count!r:.40} as {name}")
        return count

    def _template(self, template: Any) -> str:
        """Check a template of paths: known fields only, and below the dataset."""
        if not isinstance(template, str) or len(template) > 1000:
            raise self.malformed("has no usable paths")
        without_fields = re.sub(r"\{(chunk_index|file_index)(:0\d?d)?\}|\{video_key\}", "", template)
        if re.search(r"[{}\\\0]", without_fields) or template.startswith("/") or ".." in template.split("/"):
            raise self.malformed(f"has unsupported paths: {template!r:.100}")
        return template

    def _exported(self) -> tuple[str | None, bool, list[Feature] | None]:
        """Return about, was_changed, and the features that gym-trace exported; None if it did not, or was_changed."""
        if not (self.path / ABOUT).is_file():
            return None, False, None
        plain = read_json(self.path / ABOUT)
        about, features = plain.get(KEY), plain.get("features")
        if plain.get("episodes") != self.episodes or plain.get("frames") != self.steps:
            return None, True, None
        try:
            if plain.get("version") != 1 or not isinstance(about, str) or not isinstance(features, list):
                raise ValueError("another version")
            return about, False, [*map(Feature.from_json, features)]
        except (LookupError, TypeError, ValueError, CorruptTrace) as error:
            raise UnreadableRecording(f"{self.path / ABOUT}: malformed gym-trace metadata") from error

    def _feature(self, name: str, declared: Any) -> Feature:
        """Return a feature that gym-trace has not exported."""
        if not isinstance(declared, dict) or not isinstance(declared.get("shape"), list):
            raise self.malformed(f"has a malformed feature {name!r:.60}")
        shape, dtype = tuple(declared["shape"]), declared.get("dtype")
        if not all(type(size) is int and size >= 0 for size in shape) or np.prod(shape, dtype=float) > _MOST_ELEMENTS:
            raise self.malformed(f"feature {name!r:.60} has an invalid shape")
        path = _path_of(name)
        if dtype in ("image", "video"):
            return self._image_feature(name, path, declared, shape)
        if dtype == "string":
            return Feature(name, path, "text", np.dtype(object), ())
        if dtype == "language":
            return Feature(name, path, "values", np.dtype(object), ())
        if not isinstance(dtype, str) or dtype not in _NUMBERS:
            raise self.malformed(f"feature {name!r:.60} has the unsupported dtype {dtype!r:.40}")
        return Feature(name, path, "array", np.dtype(dtype), shape if path[0] not in ("rewards", "flags") else ())

    def _image_feature(self, name: str, path: Any, declared: dict[str, Any], shape: tuple[int, ...]) -> Feature:
        info, names = declared.get("info") or declared.get("video_info") or {}, declared.get("names")
        if not isinstance(info, dict) or len(shape) != 3:
            raise self.malformed(f"images {name!r:.60} have an invalid shape")
        if isinstance(names, list) and names and str(names[0]).startswith("channel"):
            shape = (shape[1], shape[2], shape[0])
        if info.get("is_depth_map") or info.get("video.is_depth_map"):
            if declared["dtype"] == "video":
                raise self.malformed(f"depth video {name!r:.60}: not supported")
            dtype = np.dtype(np.float32 if info.get("depth_unit") == "m" else np.uint16)
            return Feature(name, path, "image", dtype, (*shape[:2], 1))
        channels = 3 if declared["dtype"] == "video" or shape[2] not in (1, 3, 4) else shape[2]
        return Feature(name, path, declared["dtype"], np.dtype(np.uint8), (*shape[:2], channels))

    def _tasks(self) -> list[str]:
        path = self.path / TASKS
        if not path.is_file():
            return []
        by_index: dict[Any, str] = {}
        count = size = 0
        with located(path):
            with parquet_file(path) as file:
                schema, rows = file.schema_arrow, file.metadata.num_rows
            if rows > _MOST_TASKS:
                raise UnreadableRecording(f"{path}: more than {_MOST_TASKS} tasks")
            texts = [field.name for field in schema if is_text(field.type)][:1]
            for batch in batches(path, 1024, ["task_index", *texts]):
                count += len(batch)
                indices = batch.column("task_index").to_pylist()
                by_index |= zip(indices, batch.column(texts[0]).to_pylist()) if texts else ()
                size += sum(len(by_index[index] or "") for index in indices) if texts else 0
                if size > _MOST_TASK_TEXT:
                    raise UnreadableRecording(f"{path}: tasks exceed {_MOST_TASK_TEXT} characters")
        return [str(by_index.get(index, "")) for index in range(count)]

    # -- episodes -----------------------------------------------------------------------------------------------------

    def rows(self) -> Iterator[EpisodeRow]:
        """Yield the episodes in order. Raises UnreadableRecording."""
        number = 0
        for path in sorted((self.path / "meta" / "episodes").glob("*/*.parquet")):
            with located(path):
                names = [name for name in pq.read_schema(path).names if not name.startswith("stats/")]
                required = [f"videos/{key}/{part}" for key in self._videos for part in _VIDEO_COLUMNS]
                required += _EPISODE_COLUMNS
                if missing := [name for name in required if name not in names]:
                    raise UnreadableRecording(f"{path}: has no column {missing[0]}")
                for batch in batches(path, 1024, [*required, *({KEY} & set(names))]):
                    for values in batch.to_pylist():
                        yield self._row(path, number, values)
                        number += 1
        if number != self.episodes:
            raise self.malformed(f"declares {self.episodes} episodes, but meta/episodes has {number}")

    def _row(self, path: Path, number: int, values: dict[str, Any]) -> EpisodeRow:
        videos = {}
        for key in self._videos:
            chunk, file, begin = (values[f"videos/{key}/{part}"] for part in _VIDEO_COLUMNS)
            if type(chunk) is not int or type(file) is not int or not isinstance(begin, float):
                raise UnreadableRecording(f"{path}: episode {number}: location of video {key} missing")
            name = self._video.format(video_key=key, chunk_index=chunk, file_index=file)
            if ".." in name.split("/") or name.startswith("/"):
                raise self.malformed(f"path outside of the dataset: {name!r:.100}")
            videos[key] = self.path / name, begin
        steps, identity = values["length"], values.get(KEY)
        if values["episode_index"] != number or type(steps) is not int or steps < 1:
            raise UnreadableRecording(f"{path}: the row of episode {number} is malformed")
        return EpisodeRow(number, steps, identity if isinstance(identity, str) and self.about else None, videos)


def _path_of(name: str) -> Any:
    """Return the path in a trace of a feature that gym-trace has not exported."""
    for root, column in (("observation", "observations"), ("action", "actions")):
        if name == root or name.startswith((f"{root}.", f"{root}s.")):
            return (column, name.partition(".")[2] or name)
    if name == "next.reward":
        return ("rewards",)
    if name in ("next.done", "next.terminated", "next.truncated"):
        return ("flags", name)
    return ("annotations", name)
