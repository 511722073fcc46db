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
    """The picture as an escape sequence; exact where it has at most 256 colours, whose levels are in hundredths."""
    height, width = picture.shape[:2]
    palette, indices = _in_colours(picture)
    defined = [f"#{n};2;{r};{g};{b}" for n, (r, g, b) in enumerate(((palette * 100 + 127) // 255).tolist())]
    bands = [_band(indices[top : top + 6]) for top in range(0, height, 6)]
    return f'\x1bP0;1;0q"1;1;{width};{height}{"".join(defined)}{"-".join(bands)}\x1b\\'


def _in_colours(picture: Picture) -> tuple[Any, Any]:
    """The colours, (N, 3), and which of them each pixel has, (H, W)."""
    codes = (picture.astype(np.int64) << (16, 8, 0)).sum(axis=2)
    found, indices = np.unique(codes, return_inverse=True)
    if len(found) > _MOST_COLOURS:
        levels = (picture.astype(np.int64) * (_CUBE - 1) + 127) // 255
        found, indices = np.unique((levels * (_CUBE * _CUBE, _CUBE, 1)).sum(axis=2), return_inverse=True)
        parts = np.stack([found // (_CUBE * _CUBE), found // _CUBE % _CUBE, found % _CUBE], axis=1)
        return parts * 255 // (_CUBE - 1), indices.reshape(codes.shape)
    return np.stack([found >> 16, found >> 8 & 255, found & 255], axis=1), indices.reshape(codes.shape)


def _band(indices: Any) -> str:
    """Six rows of pixels, colour by colour: each character says which of six pixels have it."""
    weights = (1 << np.arange(len(indices))).reshape(-1, 1)
    lines = []
    for colour in np.unique(indices).tolist():
        bits = ((indices == colour) * weights).sum(axis=0).astype(np.uint8) + 63
        text = bits.tobytes().decode("ascii").rstrip("?")
        lines.append(f"#{colour}" + _REPEATED.sub(lambda run: f"!{len(run[0])}{run[1]}", text))
    return "$".join(lines)
