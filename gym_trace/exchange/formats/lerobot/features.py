"""Columns of a trace in a LeRobot dataset: their names and forms, and their rows as Arrow has them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from gym_trace.data.json_values import json_text, tagged
from gym_trace.data.layout import Path, leaves_in
from gym_trace.data.schema import IMPORTED_FROM
from gym_trace.data.values import Array, dtype_from
from gym_trace.errors import InvalidOption, UnreadableRecording
from gym_trace.exchange.formats.foreign import Values, text_of
from gym_trace.exchange.formats.parquet.tables import numbers_in
from gym_trace.exchange.formats.source import ExportSource
from gym_trace.playback.row_types import RowType
from gym_trace.playback.writer_reader import WriterReader

OWN = "meta/gym_trace"  # facts that the format cannot store; no other reader looks there
ABOUT = f"{OWN}/about.json"
FINAL = f"{OWN}/final_observations.parquet"
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
EPISODES = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEOS = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
TASKS = "meta/tasks.parquet"
COUNTED: dict[str, np.dtype[Any]] = {  # columns of every LeRobot dataset
    "timestamp": np.dtype(np.float32),
    "frame_index": np.dtype(np.int64),
    "episode_index": np.dtype(np.int64),
    "index": np.dtype(np.int64),
    "task_index": np.dtype(np.int64),
}
FLAGS = ("next.done", "next.terminated", "next.truncated")
TASK_INDEX, TIMESTAMP = ("annotations", "task_index"), ("annotations", "timestamp")  # annotations of an imported trace
_TAKEN = frozenset((*COUNTED, *FLAGS, "next.reward", "next.info"))
KIND = "LeRobot v3"  # IMPORTED_FROM of an imported trace
_KNOWN_AS = {"pixels": "image", "agent_pos": "state"}  # names that LeRobot's environments and policies use
_MOST_DIMENSIONS = 5  # further dimensions are flattened into the first


class Feature(NamedTuple):
    """One column.

    name: in the dataset. path: in the trace. kind: "array"; "image" or "video"; "text"; or "values", any
    value as JSON. dtype and shape are those of a row in the trace, of arrays and images.
    """

    name: str
    path: Path
    kind: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    names: Any = None  # names of its elements in info.json

    @property
    def is_picture(self) -> bool:
        return self.kind in ("image", "video")

    @property
    def is_text(self) -> bool:
        return self.kind in ("text", "values")

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of a row in the dataset: () of a number, (H, W, C) of an image."""
        if self.is_picture:
            height, width, channels = picture_shape(self.shape)
            return height, width, 3 if self.kind == "video" else channels  # LeRobot decodes videos as RGB
        if self.shape == (1,):
            return ()
        if len(self.shape) > _MOST_DIMENSIONS:
            lead = len(self.shape) - _MOST_DIMENSIONS + 1
            return (math.prod(self.shape[:lead]), *self.shape[lead:])
        return self.shape

    def declared(self) -> dict[str, Any]:
        """Return the feature as in info.json."""
        if self.is_picture:
            names = ["height", "width", "channels"]
            return {"dtype": self.kind, "shape": list(self.stored), "names": names}
        dtype = "string" if self.is_text else self.dtype.name
        return {"dtype": dtype, "shape": list(self.stored) or [1], "names": self.names}

    def kept(self) -> dict[str, Any]:
        known = {"name": self.name, "path": list(self.path), "kind": self.kind}
        return {**known, "dtype": self.dtype.str, "shape": list(self.shape)}


class Origin(NamedTuple):
    """Metadata that an import from LeRobot has kept in the trace.

    features: by path, "observations/images.front", the name there and the names of its elements.
    tasks: several; each step has the place of its own as the annotation task_index. robot_type: or None.
    """

    features: Mapping[str, tuple[str, Any]] = MappingProxyType({})
    tasks: Sequence[str] = ()
    robot_type: str | None = None

    @classmethod
    def of(cls, source: ExportSource) -> Origin:
        """Return the metadata if it has the form that an import gives it. Untrusted input."""
        found = [_origin(reader) for reader in source.trace.readers]
        return found[0] if found and all(one == found[0] for one in found) else cls()


def _origin(reader: WriterReader) -> Origin:
    about = reader.about_or_empty
    said = about.metadata if about.recorder.get(IMPORTED_FROM) == KIND else None
    if not isinstance(said, dict):
        return Origin()
    features, tasks, robot = (said.get(name) for name in ("features", "tasks", "robot_type"))
    named = features.items() if isinstance(features, dict) else ()
    known = {path: (one["name"], _element_names(one)) for path, one in named if _is_named(one)}
    several = tasks if isinstance(tasks, list) and len(tasks) > 1 and all(isinstance(one, str) for one in tasks) else ()
    return Origin(known, several, robot if isinstance(robot, str) else None)


def _is_named(said: Any) -> bool:
    name = said.get("name") if isinstance(said, dict) else None
    return isinstance(name, str) and re.fullmatch(r"[\w.-]{1,200}", name, re.ASCII) is not None and name not in _TAKEN


def _element_names(said: dict[str, Any]) -> Any:
    """Names that JSON can have, of which LeRobot has lists, and maps of lists."""
    names = said.get("names")
    lists = names.values() if isinstance(names, dict) else [names]
    return names if all(isinstance(one, list) and all(isinstance(n, str) for n in one) for one in lists) else None


def timestamps(steps: Array, fps: int) -> Array:
    """Seconds of steps of an episode, given their numbers."""
    found: Array = (steps / fps).astype(np.float32)
    return found


def feature_of(kept: Any) -> Feature:
    """Read the result of kept(). Raises LookupError, TypeError, ValueError, CorruptTrace."""
    path = tuple(kept["path"])
    shape = tuple(kept["shape"])
    if not path or not all(type(part) in (str, int) for part in path) or not all(type(n) is int for n in shape):
        raise TypeError("invalid path or shape")
    if kept["kind"] not in ("array", "image", "video", "text", "values") or min(shape, default=0) < 0:
        raise ValueError("a feature of an unknown kind")
    is_text = kept["kind"] in ("text", "values")
    dtype = np.dtype(object) if is_text else dtype_from(kept["dtype"])
    return Feature(str(kept["name"]), path, kept["kind"], dtype, shape)


def picture_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return height, width and channels of an image row of this shape."""
    if len(shape) == 2:
        return (*shape, 1)
    return (shape[0], shape[1], shape[2]) if shape[2] in (1, 3) else (shape[1], shape[2], shape[0])


def channels_first(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[2] not in (1, 3)


def features_of(source: ExportSource, video: bool, origin: Origin) -> list[Feature]:
    """The columns of a trace, without flags and what LeRobot counts; those that an import took have their names."""
    found: dict[str, Feature] = {}
    spaces = zip(source.plain_spaces, ("observations", "actions"))
    texts = {path for space, root in spaces for path, leaf in leaves_in(space, (root,)) if _is_text(leaf)}
    paths: list[Path] = [leaf.path for layout in source.layouts[:2] for leaf in layout.leaves()]
    paths += [path for path in source.forms if path[0] == "annotations"] + [("rewards",)]
    paths += [("infos",)] if ("infos",) in source.forms else []
    for path in paths:
        form = source.forms[path]
        kind = "text" if form is None and path in texts else _kind(path, form, video)
        alone = path[0] in ("observations", "actions") and len(path) == 1
        given, names = origin.features.get("/".join(map(str, path)), (_name(path, kind, alone), None))
        number, name = 2, given
        while name in found:
            number, name = number + 1, f"{given}_{number}"
        known = form if kind not in ("text", "values") and form is not None else RowType(np.dtype(object), ())
        found[name] = Feature(name, path, kind, known.dtype, known.shape, names)
    return list(found.values())


def _kind(path: Path, form: RowType | None, video: bool) -> str:
    if form is None or form.dtype.kind not in "biuf" or form.dtype.itemsize > 8 or 0 in form.shape:
        return "values"
    shape = form.shape
    has_pixels = len(shape) == 2 or (len(shape) == 3 and (shape[2] in (1, 3) or shape[0] in (1, 3)))
    if path[0] == "observations" and form.dtype == np.uint8 and not form.mixed and has_pixels:
        return "video" if video else "image"
    return "array"


def _name(path: Path, kind: str, alone: bool) -> str:
    root, inner = path[0], [re.sub(r"[^\w-]", "_", str(part), flags=re.ASCII) or "_" for part in path[1:]]
    if root == "observations":
        if alone:
            return "observation.image" if kind in ("image", "video") else "observation.state"
        if len(inner) == 1 and inner[0] in _KNOWN_AS:
            return f"observation.{_KNOWN_AS[inner[0]]}"
        return ".".join(["observation", *(["images"] if kind in ("image", "video") else []), *inner])
    first = {"actions": "action", "rewards": "next.reward", "infos": "next.info"}.get(str(root), "annotation")
    return ".".join([first, *inner])


def _is_text(space: Any) -> bool:
    return space["type"] == "Text" or str(space.get("class")).endswith(".MissionSpace")  # MiniGrid


# -- rows as Arrow has them ----------------------------------------------------------------------


_PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])  # type of images in the package datasets
_MOST_INTEGER = np.iinfo(np.int64).max


def schema_of(features: Sequence[Feature], counted: bool = True) -> pa.Schema:
    """Return the schema of a file. counted: with flags and the columns of every dataset."""
    fields = [_field(feature) for feature in features if feature.kind != "video"]
    said = {feature.name: _told(feature) for feature in features if feature.kind != "video"}
    if counted:
        plain = {**dict.fromkeys(FLAGS, np.dtype(np.bool_)), **COUNTED}
        fields += [pa.field(name, pa.from_numpy_dtype(dtype)) for name, dtype in plain.items()]
        said |= {name: {"dtype": dtype.name, "_type": "Value"} for name, dtype in plain.items()}
    return pa.schema(fields, {"huggingface": json.dumps({"info": {"features": said}})})


def _field(feature: Feature) -> pa.Field:
    if feature.is_picture:
        return pa.field(feature.name, _PICTURE)
    if feature.is_text:
        return pa.field(feature.name, pa.string())
    inner, shape = pa.from_numpy_dtype(feature.dtype), feature.stored
    if len(shape) < 2:
        return pa.field(feature.name, pa.list_(inner, shape[0]) if shape else inner)
    for _ in shape:
        inner = pa.list_(inner)
    kind = f"datasets.features.features.Array{len(shape)}DExtensionType"
    kept = json.dumps([list(shape), feature.dtype.name])
    return pa.field(feature.name, inner, metadata={"ARROW:extension:name": kind, "ARROW:extension:metadata": kept})


def _told(feature: Feature) -> dict[str, Any]:
    """Return the description of a feature for the package datasets."""
    if feature.is_picture:
        return {"_type": "Image"}
    if feature.is_text:
        return {"dtype": "string", "_type": "Value"}
    value, shape = {"dtype": feature.dtype.name, "_type": "Value"}, feature.stored
    if len(shape) == 0:
        return value
    if len(shape) == 1:
        return {"feature": value, "length": shape[0], "_type": "List"}
    return {"shape": list(shape), "dtype": feature.dtype.name, "_type": f"Array{len(shape)}D"}


# -- out --------------------------------------------------------------------------------------------------------------


def rows_of(feature: Feature, rows: Any) -> Any:
    """The rows of a window as they are collected: an array of (steps, *stored), or a list of texts, or PNG files."""
    if feature.kind == "text":
        return list(map(text_of, rows))
    if feature.kind == "values":
        return [json_text(tagged(row)) for row in rows]
    if feature.is_picture:
        return _pictures_of(feature, rows)
    if rows.dtype == object:
        raise InvalidOption(f"{feature.name}: rows of different dtype or shape")
    rows = rows.astype(feature.dtype, copy=False)
    if feature.dtype == np.uint64 and (rows > _MOST_INTEGER).any():
        raise InvalidOption(f"{feature.name}: integers of 2**63 and more; LeRobot cannot load them")
    return rows.reshape(len(rows), *feature.stored)


def _pictures_of(feature: Feature, rows: Array) -> Array:
    """(steps, H, W, C) of uint8."""
    if channels_first(feature.shape):
        rows = np.moveaxis(rows, 1, -1)
    pictures = np.ascontiguousarray(rows).reshape(len(rows), *picture_shape(feature.shape))
    return pictures if pictures.shape[1:] == feature.stored else np.repeat(pictures, 3, axis=3)


def arrow_of(feature: Feature, parts: Sequence[Any]) -> pa.Array:
    """Return the results of rows_of() for some windows as one column; for images, lists of PNG files."""
    if feature.is_picture:
        files = pa.array([file for part in parts for file in part], pa.binary())
        return pa.StructArray.from_arrays([files, pa.nulls(len(files), pa.string())], fields=list(_PICTURE))
    if feature.is_text:
        return pa.array([text for part in parts for text in part], pa.string())
    rows = np.concatenate(parts)
    shape = feature.stored
    array = pa.array(rows.reshape(-1))
    if len(shape) == 1:
        return pa.FixedSizeListArray.from_arrays(array, shape[0])
    for place in range(len(shape), 0, -1):
        count = len(rows) * math.prod(shape[: place - 1])
        array = pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * shape[place - 1], array)
    return array


# -- in ---------------------------------------------------------------------------------------------------------------


def array_of(column: pa.Array, dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> Array:
    """Return a numeric column as (rows, *shape). Raises UnreadableRecording for other columns."""
    found = numbers_in(column, shape)
    if found is None:
        raise UnreadableRecording(f"{name}: not all rows are {dtype.name} of shape {list(shape)}")
    return found.astype(dtype)


def values_of(texts: Iterable[Any], kind: str, name: str) -> list[Any]:
    """Return the values of texts from rows_of(). Raises UnreadableRecording."""
    found, values = [], Values()
    for text in texts:
        if not isinstance(text, str):
            raise UnreadableRecording(f"{name}: not all rows are text")
        try:
            found.append(values.of_text(text) if kind == "text" else values.of(text))
        except UnreadableRecording as error:
            raise UnreadableRecording(f"{name}: {error}") from error
    return found
