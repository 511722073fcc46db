"""Observations and frames that are images: detection, thumbnails and PNG."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from gym_trace.errors import RenderingError

Array = npt.NDArray[Any]
_MOST_PIXELS = 160  # per side of a thumbnail
_UP = 2  # PNG filter: the difference from the row above
_PNG_COLOR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}  # by number of channels: gray, gray and alpha, RGB, RGBA


def is_picture(dtype: Any, shape: tuple[int, ...] | None) -> bool:
    """Return True if values of this dtype and shape are images or stacks of images. shape: None if it varies."""
    if shape is None:
        return False
    return bool(dtype == np.uint8) and len(shape) in (2, 3, 4) and min(shape[-3:]) > 0


def picture_size(dtype: Any, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return height and width of the image in a value of this dtype and shape; None if it is not an image."""
    if not is_picture(dtype, shape):
        return None
    view = np.broadcast_to(np.zeros((), np.uint8), shape)  # takes no memory
    height, width = picture_of(view).shape[:2]
    return height, width


def pictures_in(tree: Any) -> list[Array]:
    """Return the arrays with one image per row, from an array or nested dicts and tuples of arrays."""
    if isinstance(tree, dict):
        return [array for part in tree.values() for array in pictures_in(part)]
    if isinstance(tree, tuple):
        return [array for part in tree for array in pictures_in(part)]
    has_pictures = isinstance(tree, np.ndarray) and len(tree) > 0 and is_picture(tree.dtype, tree.shape[1:])
    return [tree] if has_pictures else []


def picture_of(observation: Any) -> Array:
    """Return the image in an observation, or the last one of a stack, (stack, H, W) or (stack, H, W, 3).

    (3, H, W) is one image with the channels first.
    """
    picture = np.asarray(observation)
    if picture.ndim == 4:
        picture = picture[-1]
    if picture.ndim == 3 and picture.shape[0] == 3 < min(picture.shape[1:]):
        return picture.transpose(1, 2, 0)
    if picture.ndim == 3 and picture.shape[2] not in (1, 3):
        picture = picture[:, :, -1] if picture.shape[2] == 4 < picture.shape[0] else picture[-1]
    return picture


def as_picture(frame: Any) -> Array:
    """Convert a frame, (H, W) or (H, W, C) with C in 1, 3, 4, to (H, W, 3) of uint8. Raises RenderingError.

    Examples:
        >>> gym_trace.replay.as_picture(np.zeros((84, 84), np.uint8)).shape
        (84, 84, 3)
    """
    picture = np.asarray(frame)
    if picture.ndim == 2:
        picture = picture[:, :, None]
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] not in (1, 3, 4) or 0 in picture.shape:
        raise RenderingError(f"not an image: {picture.dtype} of shape {picture.shape}; images are uint8 (H, W, 3)")
    picture = np.repeat(picture, 3, axis=2) if picture.shape[2] == 1 else picture[:, :, :3]
    return np.ascontiguousarray(picture)


def thumbnail(picture: Array) -> bytes:
    """Return an image of uint8, (H, W), (H, W, 1) or (H, W, 3), as a small PNG."""
    step = -(-max(picture.shape[:2]) // _MOST_PIXELS)
    return png(picture[::step, ::step])


def png(picture: Array, level: int = -1) -> bytes:
    """Return an image of uint8, (H, W) or (H, W, C) with C up to 4, as a lossless PNG. level: compression level."""
    height, width = picture.shape[:2]
    rows = np.ascontiguousarray(picture).reshape(height, -1)
    color_type = _PNG_COLOR_TYPES[rows.shape[1] // width if picture.ndim == 3 else 1]
    lines = np.full((height, 1 + rows.shape[1]), _UP, np.uint8)  # the first byte of a line is its filter
    lines[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=lines[1:, 1:])
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, color_type, 0, 0, 0])
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.data, level)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_png_part(name, content) for name, content in parts)


def _png_part(name: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(name + content).to_bytes(4, "big")
    return len(content).to_bytes(4, "big") + name + content + checksum
