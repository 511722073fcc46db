"""Draw captions below the frames of an episode."""

from __future__ import annotations

from typing import Any

import numpy as np

from gym_trace.data.values import Array
from gym_trace.errors import MissingExtra

try:
    from PIL import Image, ImageDraw, ImageFont
except ImportError as missing:
    raise MissingExtra(f"text in images needs Pillow ({missing}): pip install 'gym-trace[video]'") from missing

_NARROWEST = 240  # pixels; narrower images are enlarged, so that the text fits
_SMALLEST = 13  # pixels, font size
_MARGIN = 4


class Caption:
    """Draws lines of text in a band below images of one size; the text covers no part of them."""

    def __init__(self) -> None:
        self._font: Any = None

    def under(self, picture: Array, lines: list[str]) -> Array:
        """Return the image, (H, W, 3) of uint8, enlarged if it is small, with the lines below it."""
        times = -(-_NARROWEST // picture.shape[1])
        picture = picture.repeat(times, axis=0).repeat(times, axis=1)
        width = picture.shape[1]
        if self._font is None:
            self._font = ImageFont.load_default(size=max(_SMALLEST, width // 32))
            self._line_height = sum(self._font.getmetrics())
        band = Image.new("RGB", (width, 2 * _MARGIN + self._line_height * len(lines)))
        draw = ImageDraw.Draw(band)
        for number, line in enumerate(lines):
            place = (_MARGIN, _MARGIN + number * self._line_height)
            draw.text(place, self._fitted(line, width - 2 * _MARGIN), font=self._font, fill="white")
        return np.concatenate([picture, np.asarray(band)])

    def _fitted(self, line: str, room: int) -> str:
        if self._font.getlength(line) <= room:
            return line
        while line and self._font.getlength(line + "...") > room:
            line = line[:-1]
        return line + "..."
