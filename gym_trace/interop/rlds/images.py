"""PNG and JPEG as arrays."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from gym_trace.interop.rlds.features import Feature
from gym_trace.interop.rlds.varints import MalformedExample
from gym_trace.model.values import Array

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_MOST_PIXELS = 1 << 26


def pixels(data: bytes, feature: Feature) -> Array:
    """An image, (H, W, C) uint8. Raises MalformedExample, also if it has not the shape of the feature."""
    try:
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
            shape = (image.height, image.width, feature.sizes[2])
            if image.height * image.width > _MOST_PIXELS or any(
                told is not None and told != size for told, size in zip(feature.shape, shape)
            ):
                raise MalformedExample(f"an image of {shape}, where {feature.shape} was promised")
            mode = _MODES[shape[2]]
            array = np.asarray(image if image.mode == mode else image.convert(mode))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise error if isinstance(error, MalformedExample) else MalformedExample(f"no image: {error}") from error
    return array.reshape(shape)
