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

_MIN_WIDTH = 240  # pixels; narrower images are enlarged, so that the text fits
_MIN_FONT_SIZE = 13  # pixels
_MARGIN = 4


class Caption:
    """Draws lines of text in a band below images of one size."""

    def __init__(self) -> None:
        self._font: Any = None

    def under(self, picture: Array, lines: list[str]) -> Array:
        """Return the image, (H, W, 3) of uint8, enlarged if it is small, with the lines below it."""
        factor = -(-_MIN_WIDTH // picture.shape[1])
        picture = picture.repeat(factor, axis=0).repeat(factor, axis=1)
        width = picture.shape[1]
        if self._font is None:
            self._font = ImageFont.load_default(size=max(_MIN_FONT_SIZE, width // 32))
            self._line_height = sum(self._font.getmetrics())
        band = Image.new("RGB", (width, 2 * _MARGIN + self._line_height * len(lines)))
        draw = ImageDraw.Draw(band)
        for number, line in enumerate(lines):
            position = (_MARGIN, _MARGIN + number * self._line_height)
            draw.text(position, self._fitted(line, width - 2 * _MARGIN), font=self._font, fill="white")
        return np.concatenate([picture, np.asarray(band)])

    def _fitted(self, line: str, width: int) -> str:
        if self._font.getlength(line) <= width:
            return line
        while line and self._font.getlength(line + "...") > width:
            line = line[:-1]
        return line + "..."
