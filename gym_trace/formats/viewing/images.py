"""Which columns are images, and PNG and JPEG as arrays."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from gym_trace.model.values import Array
from gym_trace.reading.forms import Form

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_SMALLEST = 1024  # bytes that are worth a PNG
_MOST_PIXELS = 1 << 26


def is_image(form: Form) -> bool:
    """Whether rows can be PNG, (H, W, C) uint8 with 1, 3 or 4 channels, and are large enough for that."""
    shape = form.shape
    return bool(form.dtype == np.uint8) and len(shape) == 3 and shape[2] in _MODES and bool(np.prod(shape) >= _SMALLEST)


def pixels(data: bytes, shape: tuple[int | None, ...]) -> Array:
    """A PNG or JPEG as an array, (H, W, C) uint8. Raises ValueError, also if it does not have this shape.

    shape: None in it stands for any size.
    """
    try:
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
            found = (image.height, image.width, shape[2] or 0)
            if image.height * image.width > _MOST_PIXELS or any(
                told is not None and told != size for told, size in zip(shape, found)
            ):
                raise ValueError(f"an image of {found}, where {shape} was promised")
            mode = _MODES[found[2]]
            array = np.asarray(image if image.mode == mode else image.convert(mode))
    except (OSError, SyntaxError, KeyError, Image.DecompressionBombError) as error:
        raise ValueError(f"no image: {error}") from error
    return array.reshape(found)
