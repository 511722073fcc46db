"""Images in terminal cells: two coloured pixels per cell, or characters as shades of grey."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from gym_trace.errors import RenderingError

Picture = npt.NDArray[np.uint8]  # (H, W, 3)

_COLOURLESS = ("dumb", "unknown", "vt", "ansi", "emacs")  # beginnings of TERM
_SHADES = np.array(list(" .:-=+*#%@"))
_LEVELS = np.array([0, 95, 135, 175, 215, 255])  # of red, green and blue among the 256 colours, from the 16th on
_GREYS = 8 + 10 * np.arange(24)  # from the 232nd on


def colours_of(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of colours of the terminal: 16,777,216, 256, or 0."""
    term = environ.get("TERM", "")
    if environ.get("NO_COLOR") or not term or term.startswith(_COLOURLESS):
        return 0
    if environ.get("COLORTERM") in ("truecolor", "24bit") or term.endswith("-direct"):
        return 1 << 24
    return 256


def as_picture(frame: Any) -> Picture:
    """Return a frame as (H, W, 3). Raises RenderingError if it is not an image."""
    picture = np.asarray(frame)
    if picture.ndim == 2:
        picture = picture[:, :, None]
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] not in (1, 3, 4) or not picture.size:
        raise RenderingError(f"a frame of {picture.dtype} and shape {picture.shape[:8]} is not an image")
    colours: Picture = np.broadcast_to(picture[:, :, :3], (*picture.shape[:2], 3))
    return colours


def fitting(picture: Picture, width: int, height: int) -> Picture:
    """Scale an image to fit width x height square pixels."""
    rows, columns = picture.shape[:2]
    scale = min(width / columns, height / rows)
    size = (max(1, min(height, round(rows * scale))), max(1, min(width, round(columns * scale))))
    return _scaled(_scaled(picture, size[0], 0), size[1], 1)


def _scaled(picture: Picture, size: int, axis: int) -> Picture:
    """Average rows or columns to get fewer, repeat them to get more."""
    there = picture.shape[axis]
    if size >= there:
        return np.asarray(picture.take(np.arange(size) * there // size, axis))
    bounds = np.arange(size + 1) * there // size
    counts = np.diff(bounds).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
    sums = np.add.reduceat(picture, bounds[:-1], axis, dtype=np.uint32)
    return np.asarray((sums + counts // 2) // counts, np.uint8)


def half_blocks(picture: Picture, columns: int, rows: int, colours: int) -> list[str]:
    """Return lines of cells of two pixels each: upper half block and background."""
    small = fitting(picture, columns, 2 * rows)
    if len(small) % 2:
        small = np.concatenate([small, np.zeros((1, *small.shape[1:]), np.uint8)])
    codes = _nearest(small) if colours == 256 else (small.astype(np.int64) << (16, 8, 0)).sum(axis=2)
    upper, lower = codes[::2], codes[1::2]
    begins = np.ones(upper.shape, bool)
    begins[:, 1:] = (np.diff(upper, axis=1) != 0) | (np.diff(lower, axis=1) != 0)
    lines = []
    for row, starts in enumerate(begins):
        places = np.flatnonzero(starts).tolist()
        ends = [*places[1:], upper.shape[1]]
        cells = zip(upper[row, places].tolist(), lower[row, places].tolist(), places, ends)
        runs = "".join(_run(top, bottom, end - begin, colours) for top, bottom, begin, end in cells)
        lines.append(f"{' ' * ((columns - upper.shape[1]) // 2)}{runs}\x1b[0m")
    return lines


def _run(top: int, bottom: int, length: int, colours: int) -> str:
    if colours == 256:
        return f"\x1b[38;5;{top};48;5;{bottom}m" + "▀" * length
    fore, behind = (f"{code >> 16};{code >> 8 & 255};{code & 255}" for code in (top, bottom))
    return f"\x1b[38;2;{fore};48;2;{behind}m" + "▀" * length


def shades(picture: Picture, columns: int, rows: int) -> list[str]:
    """Return lines of characters, denser for brighter pixels."""
    small = fitting(picture, columns, 2 * rows)
    grey = small.astype(np.float64) @ (0.299, 0.587, 0.114)
    grey = (grey[::2] + grey[[*range(1, len(grey), 2), *[-1] * (len(grey) % 2)]]) / 2
    grey -= grey.min()
    levels = (grey * ((len(_SHADES) - 0.01) / max(1.0, grey.max()))).astype(int)
    margin = " " * ((columns - small.shape[1]) // 2)
    return [margin + "".join(line) for line in _SHADES[levels]]


def _nearest(picture: Picture) -> npt.NDArray[np.int64]:
    """Return the nearest of the 256 colours, (H, W): cube or grey."""
    pixels = picture.astype(np.int64)
    cube = np.searchsorted((_LEVELS[1:] + _LEVELS[:-1]) // 2, pixels, side="left")
    grey = np.clip((pixels.mean(axis=2).astype(np.int64) - 3) // 10, 0, 23)
    off_cube = ((_LEVELS[cube] - pixels) ** 2).sum(axis=2)
    off_grey = ((_GREYS[grey][:, :, None] - pixels) ** 2).sum(axis=2)
    return np.where(off_grey < off_cube, 232 + grey, 16 + cube @ (36, 6, 1))
