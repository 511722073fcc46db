"""Pictures that Minari has kept as JPEG."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from gym_trace.errors import UnreadableRecording
from gym_trace.model.values import Array


def decoded(rows: Any, shape: tuple[int, ...], fault: Callable[[str], UnreadableRecording]) -> Array:
    """The pictures that Minari would give: (rows, *shape) uint8. rows: of each its bytes, or an array of them."""
    pictures = np.empty((len(rows), *shape), np.uint8)
    for i, row in enumerate(rows):
        raw = row if isinstance(row, bytes) else np.asarray(row, np.uint8).tobytes()
        try:
            with Image.open(io.BytesIO(raw), formats=["JPEG"]) as image:
                if (image.height, image.width) != shape[:2]:
                    raise ValueError(f"{image.size} instead of {shape}")
                pictures[i] = np.asarray(image).reshape(shape)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise fault(f"has a picture that cannot be read ({error!s:.100})") from error
    return pictures
