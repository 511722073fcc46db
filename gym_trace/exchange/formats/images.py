"""Untrusted PNG, JPEG and other image files as arrays, with Pillow."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from gym_trace.data.values import Array
from gym_trace.playback.row_types import RowType

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_SMALLEST = 1024  # bytes that are worth a PNG
_MOST_PIXELS = 1 << 26
_BYTES = np.dtype(np.uint8)


def is_image(form: RowType) -> bool:
    """Return True if rows can be PNG, (H, W, C) uint8 with 1, 3 or 4 channels, and are large enough for that."""
    shape = form.shape
    return bool(form.dtype == np.uint8) and len(shape) == 3 and shape[2] in _MODES and bool(np.prod(shape) >= _SMALLEST)


def pixels(
    data: bytes,
    shape: tuple[int | None, ...],
    dtype: np.dtype[Any] = _BYTES,
    formats: tuple[str, ...] = ("PNG", "JPEG"),
) -> Array:
    """Return an image file as an array, (H, W, C) uint8, or of depths, (H, W) or (H, W, 1) of another dtype.

    shape: the expected one; None in it matches any size. Raises ValueError for another shape, before decoding.
    """
    try:
        with Image.open(io.BytesIO(data), formats=formats) as image:
            size = (image.height, image.width)
            if image.height * image.width > _MOST_PIXELS or any(a not in (None, b) for a, b in zip(shape, size)):
                raise ValueError(f"an image of {size} instead of {shape}")
            if dtype == np.uint8:
                mode = _MODES[shape[2] or 0]
                return np.asarray(image if image.mode == mode else image.convert(mode)).reshape(*size, -1)
            array = np.asarray(image)
    except (OSError, SyntaxError, KeyError, Image.DecompressionBombError) as error:
        raise ValueError(f"not an image: {error}") from error
    if array.dtype != dtype:
        raise ValueError(f"depths of {array.dtype} instead of {dtype}")
    return array.reshape([-1 if one is None else one for one in shape])
