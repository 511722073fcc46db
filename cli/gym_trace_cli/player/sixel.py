"""Pictures as sixel, which terminals of DEC, xterm, foot, WezTerm and others show pixel by pixel."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from gym_trace_cli.player.pictures import Picture

_MOST_COLOURS = 256
_CUBE = 6  # levels of red, green and blue, where a picture has more colours
_REPEATED = re.compile(r"(.)\1{3,}")


def sixel(picture: Picture) -> str:
    """The picture as an escape sequence; exact, in hundredths, where its colours are few and differ enough."""
    height, width = picture.shape[:2]
    palette, indices = _in_colours(picture)
    defined = [f"#{n};2;{r};{g};{b}" for n, (r, g, b) in enumerate(((palette * 100 + 127) // 255).tolist())]
    bands = [_band(indices[top : top + 6], len(palette)) for top in range(0, height, 6)]
    return f'\x1bP0;1;0q"1;1;{width};{height}{"".join(defined)}{"-".join(bands)}\x1b\\'


def _in_colours(picture: Picture) -> tuple[Any, Any]:
    """The colours, (N, 3), and which of them each pixel has, (H, W)."""
    codes = ((picture >> (3, 2, 3)).astype(np.int32) << (11, 5, 0)).sum(axis=2)
    examples = np.full(1 << 16, -1)
    examples[codes.reshape(-1)] = np.arange(codes.size)
    found = np.flatnonzero(examples >= 0)
    if len(found) <= _MOST_COLOURS:
        palette = picture.reshape(-1, 3)[examples[found]].astype(int)
    else:
        levels = (picture.astype(np.int32) * (_CUBE - 1) + 127) // 255
        codes = (levels * (_CUBE * _CUBE, _CUBE, 1)).sum(axis=2)
        found = np.arange(_CUBE**3)
        palette = (
            np.stack([found // (_CUBE * _CUBE), found // _CUBE % _CUBE, found % _CUBE], axis=1) * 255 // (_CUBE - 1)
        )
    places = np.zeros(1 << 16, np.intp)
    places[found] = np.arange(len(found))
    return palette, places[codes]


def _band(indices: Any, colours: int) -> str:
    """Six rows of pixels, colour by colour: each character says which of six pixels have it."""
    width = indices.shape[1]
    bits = np.full((colours, width), 63, np.uint8)
    for number, row in enumerate(indices):
        bits[row, np.arange(width)] += 1 << number
    lines = []
    for colour in np.flatnonzero(np.bincount(indices.reshape(-1), minlength=colours)).tolist():
        text = bits[colour].tobytes().decode("ascii").rstrip("?")
        lines.append(f"#{colour}" + _REPEATED.sub(lambda run: f"!{len(run[0])}{run[1]}", text))
    return "$".join(lines)
