"""Features of TensorFlow Datasets: features.json, and the rows of a feature in an example."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gym_trace.data.layout import Layout, Leaf, PlainSpace
from gym_trace.data.schema import Layouts
from gym_trace.data.values import placeholder
from gym_trace.exchange.formats.foreign import unpacked, widest
from gym_trace.exchange.formats.images import pixels
from gym_trace.exchange.formats.rlds.examples import FeatureList, ListReader, MalformedExample
from gym_trace.exchange.formats.rows import custom

_CORE = "tensorflow_datasets.core.features."
_CLASSES = {
    "tensor": _CORE + "tensor_feature.Tensor",
    "text": _CORE + "text_feature.Text",
    "image": _CORE + "image_feature.Image",
    "featuresDict": _CORE + "features_dict.FeaturesDict",
    "sequence": _CORE + "dataset_feature.Dataset",
}
_NUMBERS = {np.dtype(letter).name: np.dtype(letter).newbyteorder("<") for letter in "?bhilqBHILQefdFD"}
# Dtypes stored as lists of numbers, others as bytes. uint32 would be smaller as bytes, but TensorFlow cannot decode it.
_LIST_DTYPES = (np.dtype(np.float32), np.dtype(np.bool_), np.dtype(np.uint32))
_MOST_FEATURES = 1 << 12
_DEEPEST = 32
_UINT8 = np.dtype(np.uint8)
_LARGEST_ROW = 1 << 28  # bytes


@dataclass(frozen=True)
class Feature:
    """A feature, which is one list of an example.

    Attributes:
        kind: "tensor", "text", "image" or "label".
        dtype, shape: of a row; None in a shape stands for any size. Text has neither.
        encoding: "none", "bytes" or "zlib" for tensors; "png", "jpeg" or "" for images.
        classes: number of classes of a label; 0: not a label, or unknown.
        doc: description in features.json.
    """

    kind: str
    dtype: np.dtype[Any] = _UINT8
    shape: tuple[int | None, ...] = ()
    encoding: str = "none"
    classes: int = 0
    doc: str = ""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the shape of a row; any size is 0."""
        return tuple(size or 0 for size in self.shape)

    @property
    def numbers(self) -> int:
        """Return the numbers per row; 0 if rows differ in size."""
        return math.prod(self.sizes)


Features = dict[str, "Feature | Features"]


def tensor(dtype: np.dtype[Any], shape: tuple[int, ...], doc: str = "") -> Feature | None:
    """Return a tensor that stores every bit; None if TensorFlow lacks the dtype."""
    if dtype.name not in _NUMBERS:
        return None
    in_list = dtype in _LIST_DTYPES and math.prod(shape) > 0
    return Feature("tensor", dtype, shape, "none" if in_list else "bytes", doc=doc)


# -- export -----------------------------------------------------------------------------------------------------------


def features_json(features: Features, steps: str) -> str:
    """Return the text of features.json. steps: the name of the features that are a nested dataset."""
    plain = _plain_dict(features)
    inner = plain["featuresDict"]["features"][steps]
    nested = {"pythonClassName": _CLASSES["sequence"], "sequence": {"feature": inner, "length": "-1"}}
    plain["featuresDict"]["features"][steps] = nested
    return json.dumps(plain, indent=4, sort_keys=True)


def _plain_dict(features: Features) -> dict[str, Any]:
    members = {name: _plain(feature) for name, feature in features.items()}
    return {"pythonClassName": _CLASSES["featuresDict"], "featuresDict": {"features": members}}


def _plain(feature: Feature | Features) -> dict[str, Any]:
    if isinstance(feature, dict):
        return _plain_dict(feature)
    content: dict[str, Any] = {}
    if feature.kind != "text":
        shape = {"dimensions": list(map(str, feature.shape))} if feature.shape else {}
        name = "encodingFormat" if feature.kind == "image" else "encoding"
        content = {"dtype": feature.dtype.name, "shape": shape, name: feature.encoding}
    plain: dict[str, Any] = {"pythonClassName": _CLASSES[feature.kind], feature.kind: content}
    return plain | ({"description": feature.doc} if feature.doc else {})


# -- import -----------------------------------------------------------------------------------------------------------


def features_of(plain: Any) -> tuple[Features, dict[str, str]]:
    """Read features.json. Return the features, and the class of each unknown one by its path with slashes.

    Raises MalformedExample.
    """
    unknown: dict[str, str] = {}
    features = _feature_of(plain, "", unknown, 0)
    if not isinstance(features, dict):
        raise MalformedExample("features.json does not describe a dict of features")
    return features, unknown


def _feature_of(plain: Any, path: str, unknown: dict[str, str], depth: int) -> Features | Feature | None:
    if not isinstance(plain, dict) or depth > _DEEPEST or len(unknown) > _MOST_FEATURES:
        raise MalformedExample("features.json is malformed")
    if "type" in plain and "content" in plain:
        raise MalformedExample("features.json: older than TensorFlow Datasets 4.5; save it with a newer version")
    class_name = str(plain.get("pythonClassName", "")).rpartition(".")[2]
    content = {key: value for key, value in plain.items() if isinstance(value, dict)}
    if class_name == "FeaturesDict":
        members = _map(content.get("featuresDict", {}).get("features", {}))
        features = {name: _feature_of(part, f"{path}/{name}", unknown, depth + 1) for name, part in members.items()}
        return {name: feature for name, feature in features.items() if feature is not None}
    if class_name == "Dataset" and depth == 1:
        return _feature_of(content.get("sequence", {}).get("feature"), path, unknown, depth + 1)
    if class_name in ("Tensor", "Scalar"):
        return _tensor_of(_map(content.get("tensor")), path)
    if class_name == "Text":
        return Feature("text")
    if class_name == "ClassLabel":
        count = str(_map(content.get("classLabel")).get("numClasses", 0))
        return Feature("label", np.dtype("<i8"), classes=int(count) if count.isdecimal() and len(count) < 10 else 0)
    if class_name == "Image" and (image := _image_of(_map(content.get("image")))) is not None:
        return image
    unknown[path.lstrip("/")] = class_name or "unknown"
    return None


def _map(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > _MOST_FEATURES:
        raise MalformedExample("features.json is malformed")
    return value


def _tensor_of(content: dict[str, Any], path: str) -> Feature:
    name, encoding = str(content.get("dtype"))[:40], str(content.get("encoding") or "none").lower()
    shape = _shape_of(content)
    if name in ("string", "object", "str") and not shape:
        return Feature("text")
    if name not in _NUMBERS or encoding not in ("none", "bytes", "zlib") or None in shape:
        raise MalformedExample(f"{path[1:]}: tensors of {name}, shape {shape}, {encoding:.20} are not supported")
    return Feature("tensor", _NUMBERS[name], shape, encoding)


def _image_of(content: dict[str, Any]) -> Feature | None:
    shape = _shape_of(content) if content.get("shape") else (None, None, 3)
    if str(content.get("dtype", "uint8")) != "uint8" or len(shape) != 3 or shape[2] not in (1, 3, 4):
        return None
    return Feature("image", np.dtype(np.uint8), shape, str(content.get("encodingFormat", "")).lower())


def _shape_of(content: dict[str, Any]) -> tuple[int | None, ...]:
    sizes = _map(content.get("shape", {})).get("dimensions", [])
    try:
        shape = tuple(None if int(size) < 0 else int(size) for size in sizes)
    except (TypeError, ValueError) as error:
        raise MalformedExample("features.json: invalid shape") from error
    if len(shape) > _DEEPEST or math.prod(size or 1 for size in shape) * 16 > _LARGEST_ROW:
        raise MalformedExample("features.json: invalid shape")
    return shape


def leaves_of(features: Features | Feature, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Feature]]:
    """Yield each feature with its path."""
    if isinstance(features, Feature):
        yield path, features
    else:
        for name, part in features.items():
            yield from leaves_of(part, (*path, name))


def name_of(key: object) -> str:
    """Return the name of a feature for a key of a Dict space, or an index of a Tuple; a slash would nest features."""
    return str(key).replace("%", "%25").replace("/", "%2F") if isinstance(key, str) else str(key)


def key_of(name: str) -> str:
    """Invert name_of() for keys."""
    return name.replace("%2F", "/").replace("%25", "%")


_VALUE_BYTES = 1024  # estimate for a row without a fixed size
ReadRows = Callable[[int], Any]  # (count)


class StepColumns:
    """Reads the observations and actions of a record, in order. row_size: estimated bytes per step."""

    def __init__(self, layouts: Layouts, steps: Features, lists: dict[str, FeatureList], ours: bool):
        """ours: True if gym-trace exported the dataset."""
        self.row_size = 1
        self._ours, self._lists = ours, lists
        self._readers: dict[tuple[str | int, ...], tuple[ReadRows, Feature]] = {}
        self._layouts = layouts
        for name, layout in (("observation", layouts.observations), ("action", layouts.actions)):
            self._open(layout, steps.get(name), f"steps/{name}")

    def _open(self, layout: Layout, feature: Feature | Features | None, name: str) -> None:
        if isinstance(layout, Leaf):
            if not isinstance(feature, Feature) or name not in self._lists:
                raise MalformedExample(f"{name}: missing")
            self._readers[layout.path] = reader_of(ListReader(self._lists[name]), feature, self._ours), feature
            size = feature.numbers * feature.dtype.itemsize if feature.kind in ("tensor", "image") else 0
            self.row_size += size or _VALUE_BYTES
            return
        parts = feature if isinstance(feature, dict) else {}
        for key, child in layout.parts():
            child_name = name_of(key) if self._ours else str(key)
            self._open(child, parts.get(child_name), f"{name}/{child_name}")

    def observations(self, count: int) -> Any:
        """Read the next `count` rows. Raises MalformedExample."""
        return self._joined(self._layouts.observations, lambda read, _: read(count))

    def actions(self, count: int) -> Any:
        """Read the next `count` rows. Raises MalformedExample."""
        return self._joined(self._layouts.actions, lambda read, _: read(count))

    def placeholder(self) -> Any:
        """Return one row that stands for an unknown observation."""
        return self._joined(
            self._layouts.observations,
            lambda _, leaf: placeholder(None if leaf.kind == "text" else leaf.dtype, leaf.sizes),
        )

    def _joined(self, layout: Layout, rows: Callable[[ReadRows, Feature], Any]) -> Any:
        return layout.join(rows(*self._readers[leaf.path]) for leaf in layout.leaves())


def reader_of(rows: ListReader, feature: Feature, ours: bool) -> ReadRows:
    """Return a function that reads the next `count` rows, as values_of() but texts as str, or their values if ours."""

    def read(count: int) -> Any:
        values = values_of(rows, feature, count)
        if feature.kind != "text":
            return values
        return unpacked(values) if ours else [text.decode(errors="replace") for text in values]

    return read


def values_of(rows: ListReader, feature: Feature, count: int) -> Any:
    """Read the next `count` rows: an array; a list of bytes for text; a list of arrays for images of any size."""
    if feature.kind == "text":
        return rows.values(count)
    if feature.kind == "image":
        try:
            pictures = [pixels(data, feature.shape) for data in rows.values(count)]
        except ValueError as error:
            raise MalformedExample(str(error)) from error
        return pictures if None in feature.shape else np.array(pictures, np.uint8).reshape(count, *feature.sizes)
    dtype, shape, numbers = feature.dtype, feature.sizes, feature.numbers
    if feature.encoding in ("bytes", "zlib"):
        size = numbers * dtype.itemsize
        raw = (rows.raw if feature.encoding == "bytes" else rows.inflated)(count, size)
        return np.frombuffer(raw, dtype).reshape(count, *shape)
    array = (rows.floats if dtype.kind == "f" else rows.integers)(count * numbers)
    return array.astype(dtype, copy=False).reshape(count, *shape)


def space_of(feature: Feature | Features) -> PlainSpace:
    """Return the widest space of the rows of a feature, as plain data (docs/FORMAT.md, section 5)."""
    if isinstance(feature, dict):
        return {"type": "Dict", "spaces": [[name, space_of(part)] for name, part in feature.items()]}
    dtype = feature.dtype
    if feature.kind == "label" and feature.classes:
        return {"type": "Discrete", "dtype": dtype.str, "n": feature.classes, "start": 0}
    if feature.kind == "text" or None in feature.shape or dtype.kind == "c":
        description = "text" if feature.kind == "text" else f"{feature.kind}s of {dtype}, shape {feature.shape}"
        return custom(description)
    return widest(dtype, feature.sizes)
