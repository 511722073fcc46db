"""Columns of a trace in a LeRobot dataset: names and types, and the conversion of rows to Arrow and back."""

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
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.row_types import RowType
from gym_trace.playback.writer_reader import WriterReader

ABOUT = "meta/gym_trace/about.json"  # LeRobot ignores this directory
FINAL = "meta/gym_trace/final_observations.parquet"
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
_RESERVED_NAMES = frozenset((*COUNTED, *FLAGS, "next.reward", "next.info"))
KIND = "LeRobot v3"  # IMPORTED_FROM of an imported trace
_LEROBOT_NAMES = {"pixels": "image", "agent_pos": "state"}  # names in environments of LeRobot and in its datasets
_MOST_DIMENSIONS = 5  # further dimensions are flattened into the first


class Feature(NamedTuple):
    """A column.

    name: in the dataset. path: in the trace. kind: "array", "image", "video", "text", or "values": any value as JSON.
    dtype, shape: of a row in the trace; () of object for text and values.
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
    def stored_shape(self) -> tuple[int, ...]:
        """Return the shape of a row in the dataset: () for a number, (H, W, C) for an image."""
        if self.is_picture:
            height, width, channels = picture_shape(self.shape)
            return height, width, 3 if self.kind == "video" else channels  # LeRobot decodes videos as RGB
        if self.shape == (1,):
            return ()
        if len(self.shape) > _MOST_DIMENSIONS:
            flattened = len(self.shape) - _MOST_DIMENSIONS + 1
            return (math.prod(self.shape[:flattened]), *self.shape[flattened:])
        return self.shape

    def declared(self) -> dict[str, Any]:
        """Return the feature as in info.json."""
        if self.is_picture:
            names = ["height", "width", "channels"]
            return {"dtype": self.kind, "shape": list(self.stored_shape), "names": names}
        dtype = "string" if self.is_text else self.dtype.name
        return {"dtype": dtype, "shape": list(self.stored_shape) or [1], "names": self.names}

    def to_json(self) -> dict[str, Any]:
        fields = {"name": self.name, "path": list(self.path), "kind": self.kind}
        return {**fields, "dtype": self.dtype.str, "shape": list(self.shape)}

    @classmethod
    def from_json(cls, fields: Any) -> Feature:
        """Invert to_json(). Raises LookupError, TypeError, ValueError, CorruptTrace."""
        path, shape, kind = tuple(fields["path"]), tuple(fields["shape"]), fields["kind"]
        if not path or not all(type(part) in (str, int) for part in path) or not all(type(n) is int for n in shape):
            raise TypeError("invalid path or shape")
        if kind not in ("array", "image", "video", "text", "values") or min(shape, default=0) < 0:
            raise ValueError("unknown kind, or invalid shape")
        dtype = np.dtype(object) if kind in ("text", "values") else dtype_from(fields["dtype"])
        return cls(str(fields["name"]), path, kind, dtype, shape)


class Origin(NamedTuple):
    """Metadata of a LeRobot dataset that its import has stored in the trace.

    features: by path, such as "observations/images.front": the name in the dataset, and the names of its elements.
    tasks: the names if there are several; the annotation task_index has the index of the task of each step.
    """

    features: Mapping[str, tuple[str, Any]] = MappingProxyType({})
    tasks: Sequence[str] = ()
    robot_type: str | None = None

    @classmethod
    def of(cls, source: ExportSource) -> Origin:
        """Return the metadata if it is valid, and the same for all writers; it is untrusted."""
        origins = [_origin(reader) for reader in index_of(source.trace).readers]
        return origins[0] if origins and all(origin == origins[0] for origin in origins) else cls()


def _origin(reader: WriterReader) -> Origin:
    about = reader.about_or_empty
    metadata = about.metadata if about.recorder.get(IMPORTED_FROM) == KIND else None
    if not isinstance(metadata, dict):
        return Origin()
    features, tasks, robot = (metadata.get(name) for name in ("features", "tasks", "robot_type"))
    items = features.items() if isinstance(features, dict) else ()
    valid = {path: (feature["name"], _element_names(feature)) for path, feature in items if _has_valid_name(feature)}
    if not isinstance(tasks, list) or len(tasks) < 2 or not all(isinstance(task, str) for task in tasks):
        tasks = []
    return Origin(valid, tasks, robot if isinstance(robot, str) else None)


def _has_valid_name(feature: Any) -> bool:
    name = feature.get("name") if isinstance(feature, dict) else None
    is_name = isinstance(name, str) and re.fullmatch(r"[\w.-]{1,200}", name, re.ASCII) is not None
    return is_name and name not in _RESERVED_NAMES


def _element_names(feature: dict[str, Any]) -> Any:
    """Return the names of elements as LeRobot has them: a list, or a map of lists; None for other values."""
    names = feature.get("names")
    lists = names.values() if isinstance(names, dict) else [names]
    return names if all(isinstance(part, list) and all(isinstance(n, str) for n in part) for part in lists) else None


def timestamps(steps: Array, fps: int) -> Array:
    """Return the seconds of steps from the start of their episode. steps: indices."""
    seconds: Array = (steps / fps).astype(np.float32)
    return seconds


def picture_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return height, width and channels of an image row of this shape."""
    if len(shape) == 2:
        return (*shape, 1)
    return (shape[0], shape[1], shape[2]) if shape[2] in (1, 3) else (shape[1], shape[2], shape[0])


def channels_first(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[2] not in (1, 3)


def features_of(source: ExportSource, video: bool, origin: Origin) -> list[Feature]:
    """Return the columns of a trace but flags and COUNTED ones; imported columns get back their names."""
    features: dict[str, Feature] = {}
    spaces = zip(source.plain_spaces, ("observations", "actions"))
    texts = {path for space, root in spaces for path, leaf in leaves_in(space, (root,)) if _is_text(leaf)}
    paths: list[Path] = [leaf.path for layout in source.layouts[:2] for leaf in layout.leaves()]
    paths += [path for path in source.forms if path[0] == "annotations"] + [("rewards",)]
    paths += [("infos",)] if ("infos",) in source.forms else []
    for path in paths:
        form = source.forms[path]
        kind = "text" if form is None and path in texts else _kind(path, form, video)
        is_whole_space = path[0] in ("observations", "actions") and len(path) == 1
        base, names = origin.features.get("/".join(map(str, path)), (_name(path, kind, is_whole_space), None))
        number, name = 2, base
        while name in features:
            number, name = number + 1, f"{base}_{number}"
        row_type = form if kind not in ("text", "values") and form is not None else RowType(np.dtype(object), ())
        features[name] = Feature(name, path, kind, row_type.dtype, row_type.shape, names)
    return list(features.values())


def _kind(path: Path, form: RowType | None, video: bool) -> str:
    if form is None or form.dtype.kind not in "biuf" or form.dtype.itemsize > 8 or 0 in form.shape:
        return "values"
    shape = form.shape
    has_pixels = len(shape) == 2 or (len(shape) == 3 and (shape[2] in (1, 3) or shape[0] in (1, 3)))
    if path[0] == "observations" and form.dtype == np.uint8 and not form.mixed and has_pixels:
        return "video" if video else "image"
    return "array"


def _name(path: Path, kind: str, is_whole_space: bool) -> str:
    root, inner = path[0], [re.sub(r"[^\w-]", "_", str(part), flags=re.ASCII) or "_" for part in path[1:]]
    if root == "observations":
        if is_whole_space:
            return "observation.image" if kind in ("image", "video") else "observation.state"
        if len(inner) == 1 and inner[0] in _LEROBOT_NAMES:
            return f"observation.{_LEROBOT_NAMES[inner[0]]}"
        return ".".join(["observation", *(["images"] if kind in ("image", "video") else []), *inner])
    prefix = {"actions": "action", "rewards": "next.reward", "infos": "next.info"}.get(str(root), "annotation")
    return ".".join([prefix, *inner])


def _is_text(space: Any) -> bool:
    return space["type"] == "Text" or str(space.get("class")).endswith(".MissionSpace")  # MiniGrid


# -- Arrow types ------------------------------------------------------------------------------------------------------


_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])  # the type of images in the package datasets
_MOST_INTEGER = np.iinfo(np.int64).max


def schema_of(features: Sequence[Feature], counted: bool = True) -> pa.Schema:
    """Return the schema of a file. counted: with FLAGS and COUNTED columns."""
    columns = [_column(feature) for feature in features if feature.kind != "video"]
    if counted:
        dtypes = {**dict.fromkeys(FLAGS, np.dtype(np.bool_)), **COUNTED}
        columns += [(pa.field(name, pa.from_numpy_dtype(dtype)), _value(dtype.name)) for name, dtype in dtypes.items()]
    descriptions = {field.name: description for field, description in columns}
    metadata = {"huggingface": json.dumps({"info": {"features": descriptions}})}
    return pa.schema([field for field, _ in columns], metadata)


def _column(feature: Feature) -> tuple[pa.Field, dict[str, Any]]:
    """Return a feature as a field, and its description for the package datasets."""
    if feature.is_picture:
        return pa.field(feature.name, _IMAGE), {"_type": "Image"}
    if feature.is_text:
        return pa.field(feature.name, pa.string()), _value("string")
    kind, shape, value = pa.from_numpy_dtype(feature.dtype), feature.stored_shape, _value(feature.dtype.name)
    if not shape:
        return pa.field(feature.name, kind), value
    if len(shape) == 1:
        description = {"feature": value, "length": shape[0], "_type": "List"}
        return pa.field(feature.name, pa.list_(kind, shape[0])), description
    for _ in shape:
        kind = pa.list_(kind)
    class_name = f"Array{len(shape)}D"
    metadata = {
        "ARROW:extension:name": f"datasets.features.features.{class_name}ExtensionType",
        "ARROW:extension:metadata": json.dumps([list(shape), feature.dtype.name]),
    }
    description = {"shape": list(shape), "dtype": feature.dtype.name, "_type": class_name}
    return pa.field(feature.name, kind, metadata=metadata), description


def _value(dtype: str) -> dict[str, Any]:
    return {"dtype": dtype, "_type": "Value"}


# -- rows to Arrow ----------------------------------------------------------------------------------------------------


def rows_of(feature: Feature, rows: Any) -> Any:
    """Convert the rows of a window for arrow_of(): to an array (steps, *stored_shape), or a list of texts."""
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
    return rows.reshape(len(rows), *feature.stored_shape)


def _pictures_of(feature: Feature, rows: Array) -> Array:
    """Return (steps, H, W, C) uint8."""
    if channels_first(feature.shape):
        rows = np.moveaxis(rows, 1, -1)
    pictures = np.ascontiguousarray(rows).reshape(len(rows), *picture_shape(feature.shape))
    return pictures if pictures.shape[1:] == feature.stored_shape else np.repeat(pictures, 3, axis=3)


def arrow_of(feature: Feature, parts: Sequence[Any]) -> pa.Array:
    """Return parts of a column as one Arrow array. parts: results of rows_of(); for images, lists of PNG files."""
    if feature.is_picture:
        files = pa.array([file for part in parts for file in part], pa.binary())
        return pa.StructArray.from_arrays([files, pa.nulls(len(files), pa.string())], fields=list(_IMAGE))
    if feature.is_text:
        return pa.array([text for part in parts for text in part], pa.string())
    rows = np.concatenate(parts)
    shape = feature.stored_shape
    array = pa.array(rows.reshape(-1))
    if len(shape) == 1:
        return pa.FixedSizeListArray.from_arrays(array, shape[0])
    for axis in reversed(range(len(shape))):
        count = len(rows) * math.prod(shape[:axis])
        array = pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * shape[axis], array)
    return array


# -- rows from Arrow --------------------------------------------------------------------------------------------------


def array_of(column: pa.Array, dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> Array:
    """Return a numeric column as (rows, *shape). Raises UnreadableRecording for other columns."""
    array = numbers_in(column, shape)
    if array is None:
        raise UnreadableRecording(f"{name}: not all rows are {dtype.name} of shape {list(shape)}")
    return array.astype(dtype)


def values_of(texts: Iterable[Any], kind: str, name: str) -> list[Any]:
    """Invert rows_of() for texts. Raises UnreadableRecording."""
    values, decoder = [], Values()
    for text in texts:
        if not isinstance(text, str):
            raise UnreadableRecording(f"{name}: not all rows are text")
        try:
            values.append(decoder.of_text(text) if kind == "text" else decoder.of(text))
        except UnreadableRecording as error:
            raise UnreadableRecording(f"{name}: {error}") from error
    return values
