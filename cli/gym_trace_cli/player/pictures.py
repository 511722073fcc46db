"""Images in terminals: two coloured pixels per cell, characters as shades of grey, or sixel."""

from __future__ import annotations

import os
import re
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
_MOST_COLOURS = 256  # of sixel
_CUBE = 6  # levels of red, green and blue, where a picture has more colours
_REPEATED = re.compile(r"(.)\1{3,}")


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


def sixel(picture: Picture) -> str:
    """Return a picture as an escape sequence that DEC terminals, xterm, foot, WezTerm and others show pixel by pixel.

    It is exact, in hundredths, if its colours are few and differ enough.
    """
    height, width = picture.shape[:2]
    palette, indices = _in_colours(picture)
    defined = [f"#{n};2;{r};{g};{b}" for n, (r, g, b) in enumerate(((palette * 100 + 127) // 255).tolist())]
    bands = [_band(indices[top : top + 6], len(palette)) for top in range(0, height, 6)]
    return f'\x1bP0;1;0q"1;1;{width};{height}{"".join(defined)}{"-".join(bands)}\x1b\\'


def _in_colours(picture: Picture) -> tuple[Any, Any]:
    """Return the colours, (N, 3), and the index of each pixel's colour, (H, W)."""
    codes = ((picture >> (3, 2, 3)).astype(np.int32) << (11, 5, 0)).sum(axis=2)
    examples = np.full(1 << 16, -1)
    examples[codes.reshape(-1)] = np.arange(codes.size)
    found = np.flatnonzero(examples >= 0)
    if len(found) <= _MOST_COLOURS:
        palette = picture.reshape(-1, 3)[examples[found]].astype(int)
    else:
        levels = (picture.astype(np.int32) * (_CUBE - 1) + 127) // 255
        codes = levels @ (_CUBE * _CUBE, _CUBE, 1)
        found = np.arange(_CUBE**3)
        palette = np.stack(np.unravel_index(found, (_CUBE,) * 3), axis=1) * 255 // (_CUBE - 1)
    places = np.zeros(1 << 16, np.intp)
    places[found] = np.arange(len(found))
    return palette, places[codes]


def _band(indices: Any, colours: int) -> str:
    """Return six rows of pixels, colour by colour: a bit per pixel."""
    width = indices.shape[1]
    bits = np.full((colours, width), 63, np.uint8)
    for number, row in enumerate(indices):
        bits[row, np.arange(width)] += 1 << number
    lines = []
    for colour in np.flatnonzero(np.bincount(indices.reshape(-1), minlength=colours)).tolist():
        text = bits[colour].tobytes().decode("ascii").rstrip("?")
        lines.append(f"#{colour}" + _REPEATED.sub(lambda run: f"!{len(run[0])}{run[1]}", text))
    return "$".join(lines)
