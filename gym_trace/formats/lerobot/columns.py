"""Rows as Arrow has them in a LeRobot data set, and back."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gym_trace.errors import InvalidOption, UnreadableRecording
from gym_trace.formats.foreign import Values
from gym_trace.formats.lerobot.features import COUNTED, FLAGS, Feature, channels_first, picture_shape
from gym_trace.formats.parquet.tables import numbers_in
from gym_trace.formats.rows import is_utf8
from gym_trace.formats.steps.plain import json_text, tagged
from gym_trace.model.values import Array

_PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])  # as the package datasets has it
_MOST_INTEGER = np.iinfo(np.int64).max
_UP = 2  # the filter of PNG that takes the row above away
_LEVEL = 6  # of deflate
_MARK = "\0"  # before JSON that stands in the place of a text


def schema_of(features: Sequence[Feature], counted: bool = True) -> pa.Schema:
    """The schema of a file. counted: with flags, and with what LeRobot counts."""
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
    """As the package datasets describes it."""
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
        return [_text(row) for row in rows]
    if feature.kind == "values":
        return [json_text(tagged(row)) for row in rows]
    if feature.is_picture:
        return _pictures_of(feature, rows)
    if rows.dtype == object:
        raise InvalidOption(f"{feature.name}: some of its rows are of another form than the others")
    rows = rows.astype(feature.dtype, copy=False)
    if feature.dtype == np.uint64 and (rows > _MOST_INTEGER).any():
        raise InvalidOption(f"{feature.name}: has integers of 2**63 and more, which LeRobot cannot load")
    return rows.reshape(len(rows), *feature.stored)


def _pictures_of(feature: Feature, rows: Array) -> Array:
    """(steps, H, W, C) of uint8."""
    if channels_first(feature.shape):
        rows = np.moveaxis(rows, 1, -1)
    pictures = np.ascontiguousarray(rows).reshape(len(rows), *picture_shape(feature.shape))
    return pictures if pictures.shape[1:] == feature.stored else np.repeat(pictures, 3, axis=3)


def _text(value: Any) -> str:
    is_plain = type(value) is str and not value.startswith(_MARK) and is_utf8(value)
    return value if is_plain else _MARK + json_text(tagged(value))


def png_of(picture: Array) -> bytes:
    """(H, W, 1 or 3) of uint8 as a PNG file."""
    height, width, channels = picture.shape
    rows = picture.reshape(height, width * channels)
    lines = np.empty((height, 1 + width * channels), np.uint8)
    lines[:, 0] = _UP
    lines[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=lines[1:, 1:])
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes((8, 2 if channels == 3 else 0, 0, 0, 0))
    pieces = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.data, _LEVEL)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        len(data).to_bytes(4, "big") + kind + data + zlib.crc32(data, zlib.crc32(kind)).to_bytes(4, "big")
        for kind, data in pieces
    )


def arrow_of(feature: Feature, parts: Sequence[Any]) -> pa.Array:
    """Return the results of rows_of() for some windows as one column; for pictures, lists of PNG files."""
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
    """A column of numbers as (rows, *shape). Raises UnreadableRecording if it is none."""
    found = numbers_in(column, shape)
    if found is None:
        raise UnreadableRecording(f"{name}: holds something else than {dtype.name} of shape {list(shape)} in each row")
    return found.astype(dtype)


def values_of(texts: Iterable[Any], kind: str, name: str) -> list[Any]:
    """The values that rows_of() gave these texts for. Raises UnreadableRecording."""
    found, values = [], Values()
    for text in texts:
        if not isinstance(text, str):
            raise UnreadableRecording(f"{name}: holds something else than text")
        if kind == "text" and not text.startswith(_MARK):
            found.append(text)
            continue
        try:
            found.append(values.of(text.removeprefix(_MARK)))
        except UnreadableRecording as error:
            raise UnreadableRecording(f"{name}: {error}") from error
    return found
