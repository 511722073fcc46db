"""PNG and other files of pictures as arrays. This is the one module of them that needs Pillow."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import numpy as np
from PIL import Image

from gym_trace.errors import UnreadableRecording
from gym_trace.model.values import Array

_FORMATS = ("PNG", "JPEG", "TIFF", "WEBP")
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def pictures_from(files: Iterable[Any], dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> Array:
    """Files as (pictures, H, W, C) of dtype: uint8, or uint16 or float32 of depths. Raises UnreadableRecording."""
    found = [_picture(file, dtype, shape, name) for file in files]
    return np.stack(found) if found else np.empty((0, *shape), dtype)


def _picture(file: Any, dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> Array:
    if not isinstance(file, bytes):
        raise UnreadableRecording(f"{name}: a picture is not in the table, but in a file of its own")
    try:
        with Image.open(io.BytesIO(file), formats=_FORMATS) as image:
            if (image.height, image.width) != shape[:2]:  # before anything is decoded
                raise UnreadableRecording(
                    f"{name}: a picture of {image.height} x {image.width}, where meta/info.json says "
                    f"{shape[0]} x {shape[1]}"
                )
            if dtype == np.uint8:
                mode = _MODES[shape[2]]
                return np.asarray(image if image.mode == mode else image.convert(mode)).reshape(shape)
            array = np.asarray(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UnreadableRecording(f"{name}: a picture cannot be read: {error}") from error
    if array.dtype != dtype or array.size != np.prod(shape):
        raise UnreadableRecording(f"{name}: depths of {array.dtype} {array.shape}, where {dtype} {shape} was promised")
    return array.reshape(shape)
