"""Metadata of a LeRobot dataset, read without trust."""

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
from gym_trace.exchange.formats.lerobot.features import ABOUT, COUNTED, DATA, TASKS, VIDEOS, Feature, feature_of
from gym_trace.exchange.formats.parquet.tables import batches, is_text, located, parquet_file

_MOST_JSON = 64 << 20
_MOST_SIZE = 1 << 27  # elements of a row
_MOST_TASKS = 1 << 20
_NUMBERS = frozenset(np.dtype(letter).name for letter in "?bhilqBHILQefd")
_OF_EPISODES = ("episode_index", "length")
_OF_VIDEOS = ("chunk_index", "file_index", "from_timestamp")


class EpisodeRow(NamedTuple):
    """An episode. videos: by feature, the file and the second in it with which it begins."""

    number: int
    steps: int
    identity: str | None
    videos: dict[str, tuple[Path, float]]


class DataSet:
    """A dataset.

    Attributes:
        fps, robot_type, episodes, steps, tasks: as declared. declared: its columns.
        features: columns other than counters; paths begin with observations, actions, rewards, flags or annotations.
        about: the text of ExportSource.about, if gym-trace exported it and it has not changed since then; or None.
        was_changed: True if it has changed since.
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
        self.about, self.was_changed, own = self._own()
        foreign = [self._feature(name, declared) for name, declared in self.declared.items() if name not in COUNTED]
        if len({feature.path for feature in foreign}) < len(foreign):
            raise self.malformed("has features whose names differ only in their prefix")
        self.features = foreign if own is None else own
        self._videos = [feature.name for feature in self.features if feature.kind == "video"]
        self.tasks = self._tasks()

    def malformed(self, what: str) -> UnreadableRecording:
        return UnreadableRecording(f"{self.path / 'meta' / 'info.json'}: {what}")

    def _count(self, info: dict[str, Any], name: str) -> int:
        count = info.get(name)
        if type(count) is not int or count < 0:
            raise self.malformed(f"has {count!r:.40} as {name}")
        return count

    def _template(self, template: Any) -> str:
        """Return a template of paths reduced to the places of its numbers."""
        if not isinstance(template, str) or len(template) > 1000:
            raise self.malformed("has no usable paths")
        plain = re.sub(r"\{(chunk_index|file_index)(:0\d?d)?\}|\{video_key\}", "", template)
        if re.search(r"[{}\\\0]", plain) or template.startswith("/") or ".." in template.split("/"):
            raise self.malformed(f"has unsupported paths: {template!r:.100}")
        return template

    def _own(self) -> tuple[str | None, bool, list[Feature] | None]:
        if not (self.path / ABOUT).is_file():
            return None, False, None
        plain = read_json(self.path / ABOUT)
        about, features = plain.get(KEY), plain.get("features")
        if plain.get("episodes") != self.episodes or plain.get("frames") != self.steps:
            return None, True, None
        try:
            if plain.get("version") != 1 or not isinstance(about, str) or not isinstance(features, list):
                raise ValueError("of another version")
            return about, False, [*map(feature_of, features)]
        except (LookupError, TypeError, ValueError, CorruptTrace) as error:
            raise UnreadableRecording(f"{self.path / ABOUT}: malformed gym-trace metadata") from error

    def _feature(self, name: str, plain: Any) -> Feature:
        """Read a feature that gym-trace has not exported."""
        if not isinstance(plain, dict) or not isinstance(plain.get("shape"), list):
            raise self.malformed(f"has a malformed feature {name!r:.60}")
        shape, dtype = tuple(plain["shape"]), plain.get("dtype")
        if not all(type(size) is int and size >= 0 for size in shape) or np.prod(shape, dtype=float) > _MOST_SIZE:
            raise self.malformed(f"feature {name!r:.60} has an invalid shape")
        path = _path_of(name)
        if dtype in ("image", "video"):
            return self._pictures(name, path, plain, shape)
        if dtype == "string":
            return Feature(name, path, "text", np.dtype(object), ())
        if dtype == "language":
            return Feature(name, path, "values", np.dtype(object), ())
        if not isinstance(dtype, str) or dtype not in _NUMBERS:
            raise self.malformed(f"has a feature {name!r:.60} of {dtype!r:.40}, not supported")
        return Feature(name, path, "array", np.dtype(dtype), shape if path[0] not in ("rewards", "flags") else ())

    def _pictures(self, name: str, path: Any, plain: dict[str, Any], shape: tuple[int, ...]) -> Feature:
        info, names = plain.get("info") or plain.get("video_info") or {}, plain.get("names")
        if not isinstance(info, dict) or len(shape) != 3:
            raise self.malformed(f"images {name!r:.60} have an invalid shape")
        if isinstance(names, list) and names and str(names[0]).startswith("channel"):
            shape = (shape[1], shape[2], shape[0])
        if info.get("is_depth_map") or info.get("video.is_depth_map"):
            if plain["dtype"] == "video":
                raise self.malformed(f"depth video {name!r:.60}: not supported")
            dtype = np.dtype(np.float32 if info.get("depth_unit") == "m" else np.uint16)
            return Feature(name, path, "image", dtype, (*shape[:2], 1))
        channels = 3 if plain["dtype"] == "video" or shape[2] not in (1, 3, 4) else shape[2]
        return Feature(name, path, plain["dtype"], np.dtype(np.uint8), (*shape[:2], channels))

    def _tasks(self) -> list[str]:
        path = self.path / TASKS
        if not path.is_file():
            return []
        named: dict[Any, str] = {}
        count = size = 0
        with located(path):
            with parquet_file(path) as file:
                schema, rows = file.schema_arrow, file.metadata.num_rows
            if rows > _MOST_TASKS:
                raise UnreadableRecording(f"{path}: more than {_MOST_TASKS} tasks")
            texts = [field.name for field in schema if is_text(field.type)][:1]
            for batch in batches(path, 1024, ["task_index", *texts]):
                count += len(batch)
                places = batch.column("task_index").to_pylist()
                named |= zip(places, batch.column(texts[0]).to_pylist()) if texts else ()
                size += sum(len(named[place] or "") for place in places) if texts else 0
                if size > _MOST_JSON:
                    raise UnreadableRecording(f"{path}: tasks exceed {_MOST_JSON} characters")
        return [str(named.get(place, "")) for place in range(count)]

    # -- episodes -----------------------------------------------------------------------------------------------------

    def rows(self) -> Iterator[EpisodeRow]:
        """The episodes in their order. Raises UnreadableRecording."""
        number = 0
        for path in sorted((self.path / "meta" / "episodes").glob("*/*.parquet")):
            with located(path):
                names = [name for name in pq.read_schema(path).names if not name.startswith("stats/")]
                wanted = [*_OF_EPISODES, *(f"videos/{key}/{part}" for key in self._videos for part in _OF_VIDEOS)]
                if missing := [name for name in wanted if name not in names]:
                    raise UnreadableRecording(f"{path}: has no column {missing[0]}")
                for batch in batches(path, 1024, [*wanted, *({KEY} & set(names))]):
                    for plain in batch.to_pylist():
                        yield self._row(path, number, plain)
                        number += 1
        if number != self.episodes:
            raise self.malformed(f"has {self.episodes} episodes, and tables of {number}")

    def _row(self, path: Path, number: int, plain: dict[str, Any]) -> EpisodeRow:
        videos = {}
        for key in self._videos:
            chunk, file, begin = (plain[f"videos/{key}/{part}"] for part in _OF_VIDEOS)
            if type(chunk) is not int or type(file) is not int or not isinstance(begin, float):
                raise UnreadableRecording(f"{path}: episode {number}: location of video {key} missing")
            name = self._video.format(video_key=key, chunk_index=chunk, file_index=file)
            if ".." in name.split("/") or name.startswith("/"):
                raise self.malformed(f"path outside of the dataset: {name!r:.100}")
            videos[key] = self.path / name, begin
        steps, identity = plain["length"], plain.get(KEY)
        if plain["episode_index"] != number or type(steps) is not int or steps < 1:
            raise UnreadableRecording(f"{path}: the row of episode {number} is malformed")
        return EpisodeRow(number, steps, identity if isinstance(identity, str) and self.about else None, videos)


def _path_of(name: str) -> Any:
    """Return the path in a trace for a feature that gym-trace has not exported."""
    for root, column in (("observation", "observations"), ("action", "actions")):
        if name == root or name.startswith((f"{root}.", f"{root}s.")):
            return (column, name.partition(".")[2] or name)
    if name == "next.reward":
        return ("rewards",)
    if name in ("next.done", "next.terminated", "next.truncated"):
        return ("flags", name)
    return ("annotations", name)
