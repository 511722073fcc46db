"""Decode untrusted image files, such as PNG and JPEG, with Pillow."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from gym_trace.data.values import Array
from gym_trace.playback.row_types import RowType

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_LEAST_BYTES = 1024  # smaller rows are not worth a PNG
_MOST_PIXELS = 1 << 26
_BYTES = np.dtype(np.uint8)


def is_image(form: RowType) -> bool:
    """Return True for rows to store as PNG: (H, W, C) uint8 with 1, 3 or 4 channels, and not too small."""
    shape = form.shape
    is_picture = bool(form.dtype == np.uint8) and len(shape) == 3 and shape[2] in _MODES
    return is_picture and bool(np.prod(shape) >= _LEAST_BYTES)


def pixels(
    data: bytes,
    shape: tuple[int | None, ...],
    dtype: np.dtype[Any] = _BYTES,
    formats: tuple[str, ...] = ("PNG", "JPEG"),
) -> Array:
    """Decode an image file to (H, W, C) uint8; a depth image, with another dtype, to (H, W) or (H, W, 1).

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
    return array.reshape([-1 if length is None else length for length in shape])
