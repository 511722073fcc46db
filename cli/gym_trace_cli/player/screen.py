"""The screen: lines of text as wide as the terminal, and an image between them.

Images are two coloured pixels per cell, characters as shades of grey, or sixel.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.cells import cell_len, set_cell_size

from gym_trace.printable import printable, shown
from gym_trace.replay import as_picture
from gym_trace_cli.player.terminal import Terminal

Picture = npt.NDArray[np.uint8]  # (H, W, 3)

_COLOURLESS = ("dumb", "unknown", "vt", "ansi", "emacs")  # beginnings of TERM
_SHADES = np.array(list(" .:-=+*#%@"))
# Colours 16 to 231 of the 256 are a cube with these levels of red, green and blue; the rest are greys.
_LEVELS = np.array([0, 95, 135, 175, 215, 255])
_GREYS = 8 + 10 * np.arange(24)
_MOST_COLOURS = 256  # in a sixel image
_CUBE = 6  # levels of red, green and blue in a sixel image with more colours
_REPEATED = re.compile(r"(.)\1{3,}")
_SGR = re.compile(r"(\x1b\[[0-9;:]*m)")
_LARGEST_SIXEL = (640, 480)  # pixels
_WIDEST_NAME = 24
_NOTE_LINES = 3


class Screen:
    """Draw frames of episodes on a terminal. unicode: the terminal shows more than ASCII."""

    def __init__(self, terminal: Terminal):
        self._terminal = terminal
        self._colours = colours_of()
        self.unicode = "utf" in (sys.stdout.encoding or "").lower()
        self._drawn: list[str] = []
        self._picture: Picture | None = None  # the picture on the screen
        self._picture_position: Any = None  # its row and shape
        self._size = (0, 0)

    @property
    def is_stale(self) -> bool:
        """Return True if the terminal was resized or used by other programs."""
        return self._terminal.is_new or self._terminal.size != self._size

    def draw(self, head: list[str], frame: Any, words: list[str], step: int, last: int, keys: list[str]) -> None:
        """Draw the lines above a frame, the frame, the lines below it, a bar, and the longest key help that fits.

        frame: see Viewer.see(). Raises RenderingError for a frame that cannot be shown, and OSError.
        """
        columns, rows = self._terminal.size
        if self.is_stale:
            self._terminal.is_new = False
            self._drawn, self._picture, self._picture_position, self._size = [], None, None, (columns, rows)
            self._terminal.write("\x1b[0m\x1b[2J")
        foot = [*map(printable, words), self._bar(step, last, columns)]
        foot.append(f"\x1b[2m{next((line for line in keys if cell_len(line) <= columns), '')}\x1b[0m")
        folded = [line for note in head[1:] for line in textwrap.wrap(printable(note), columns)[:_NOTE_LINES]]
        head = [f"\x1b[1m{printable(head[0])}\x1b[0m", *folded]
        height = max(1, rows - len(head) - len(foot))
        lines, picture = self._frame_lines(frame, columns, height)
        drawing = self._drawing(picture, len(head), columns)
        lines = lines[:height] + [""] * (height - len(lines))
        lines = [fitted(line, columns) for line in [*head, *lines, *foot][:rows]]
        before = self._drawn if len(self._drawn) == len(lines) else [""] * len(lines)
        changed = [f"\x1b[{row};1H{line}" for row, (line, old) in enumerate(zip(lines, before), 1) if line != old]
        self._drawn = lines
        self._terminal.write("".join([*changed, drawing]))

    def _frame_lines(self, frame: Any, columns: int, rows: int) -> tuple[list[str], Picture | None]:
        """Return a frame as lines of text, or no lines and a sixel image."""
        if isinstance(frame, str):
            return self._text(frame, rows), None
        if isinstance(frame, list):
            return _numbers(frame, columns, rows), None
        picture = as_picture(frame)
        cell = self._terminal.abilities.cell
        if self._terminal.abilities.sixel and cell is not None and self._colours:
            width, height = min(columns * cell[0], _LARGEST_SIXEL[0]), min(rows * cell[1], _LARGEST_SIXEL[1]) // 6 * 6
            if width > 0 and height > 0:
                return [], fitting(picture, width, height)
        if self._colours and self.unicode:
            return half_blocks(picture, columns, rows, self._colours), None
        return shades(picture, columns, rows), None

    def _drawing(self, picture: Picture | None, row: int, columns: int) -> str:
        """Return the sequence that draws an image below `row`, "" if it is drawn already. Clears another image."""
        position = None if picture is None else (row, picture.shape)
        before, self._picture = self._picture, picture
        if self._picture_position not in (None, position):
            self._terminal.write("\x1b[0m\x1b[2J")
            self._drawn, before = [], None
        self._picture_position = position
        if picture is None or (before is not None and np.array_equal(before, picture)):
            return ""
        cell = self._terminal.abilities.cell or (1, 1)
        margin = max(0, columns - -(-picture.shape[1] // cell[0])) // 2
        return f"\x1b[{row + 1};{margin + 1}H{sixel(picture)}"

    def _text(self, screen: str, rows: int) -> list[str]:
        """Return rendered text as lines; only colour escape sequences are kept."""
        lines = []
        for line in screen.strip("\n").expandtabs().splitlines()[:rows]:
            parts = _SGR.split(line)
            if not self._colours:  # bold and reversed text still stand out, and resets stay
                parts = ["\x1b[7m" if _SGR.fullmatch(part) and part.strip("\x1b[m0;:") else part for part in parts]
            lines.append("".join(part if _SGR.fullmatch(part) else printable(part) for part in parts) + "\x1b[0m")
        return lines

    def _bar(self, step: int, last: int, columns: int) -> str:
        counter = f"  {step:,}/{last:,}"
        width = max(0, columns - len(counter))
        full, empty = ("━", "─") if self.unicode else ("=", "-")
        length = round(width * min(1.0, step / max(1, last)))
        return full * length + empty * (width - length) + counter


def fitted(line: str, columns: int) -> str:
    """Cut or fill a line to exactly `columns` cells."""
    out, remaining = [], columns
    for part in _SGR.split(line):
        if part.startswith("\x1b"):
            out.append(part)
        elif part and remaining:
            length = cell_len(part)
            out.append(part if length <= remaining else set_cell_size(part, remaining))
            remaining -= min(length, remaining)
    return "".join(out) + "\x1b[0m" + " " * remaining


def _numbers(values: list[tuple[str, Any]], columns: int, rows: int) -> list[str]:
    """Return lines of names and values, in columns that stay between steps; values that do not fit are counted."""
    indent = min(_WIDEST_NAME, max((len(printable(name)) for name, _ in values), default=0)) + 1
    blocks = [_folded(_cells(value), max(1, columns - indent)) for _, value in values]
    most = next((most for most in range(rows, 1, -1) if sum(min(len(block[0]), most) for block in blocks) <= rows), 1)
    lines = []
    for (name, _), (folded, in_line, cells, width) in zip(values, blocks):
        if len(folded) > most:
            above = in_line * (most - 1)
            fit = max(above, in_line * most - -(-len(f"  … {cells:,} more") // width))
            last_line = folded[most - 1][: (fit - above) * width]
            folded = [*folded[: most - 1], f"{last_line}  … {cells - fit:,} more"]
        lines.append(f"{printable(name)[: indent - 1].ljust(indent)}{folded[0]}")
        lines += [" " * indent + line for line in folded[1:]]
    return lines


def _folded(cells: list[str], columns: int) -> tuple[list[str], int, int, int]:
    """Return cells in lines, cells per line, their count, and the width of one."""
    width = max(map(len, cells), default=0) + 2
    in_line = max(1, columns // width)
    lines = ["".join(cell.rjust(width) for cell in cells[i : i + in_line]) for i in range(0, len(cells), in_line)]
    return lines or [""], in_line, len(cells), width


_MOST_CELLS = 4000


def _cells(value: Any) -> list[str]:
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf":
        flat = np.asarray(value).reshape(-1)[:_MOST_CELLS]
        if flat.dtype.kind == "f":
            return [f"{number:.4g}".rjust(9) for number in flat.tolist()]
        least = {"b": 5, "i": 4, "u": 3}[flat.dtype.kind]
        return [str(number).rjust(least) for number in flat.tolist()]
    return [printable(shown(value, 1000))]


# -- images ------------------------------------------------------------------------------------------------------------


def colours_of(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of colours of the terminal: 16,777,216, 256, or 0."""
    term = environ.get("TERM", "")
    if environ.get("NO_COLOR") or not term or term.startswith(_COLOURLESS):
        return 0
    if environ.get("COLORTERM") in ("truecolor", "24bit") or term.endswith("-direct"):
        return 1 << 24
    return 256


def fitting(picture: Picture, width: int, height: int) -> Picture:
    """Scale an image to fit width x height square pixels."""
    rows, columns = picture.shape[:2]
    scale = min(width / columns, height / rows)
    size = (max(1, min(height, round(rows * scale))), max(1, min(width, round(columns * scale))))
    return _scaled(_scaled(picture, size[0], 0), size[1], 1)


def _scaled(picture: Picture, size: int, axis: int) -> Picture:
    """Average rows or columns to get fewer, repeat them to get more."""
    old_size = picture.shape[axis]
    if size >= old_size:
        return np.asarray(picture.take(np.arange(size) * old_size // size, axis))
    bounds = np.arange(size + 1) * old_size // size
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
        firsts = np.flatnonzero(starts).tolist()
        ends = [*firsts[1:], upper.shape[1]]
        runs = zip(upper[row, firsts].tolist(), lower[row, firsts].tolist(), firsts, ends)
        text = "".join(_run(top, bottom, end - first, colours) for top, bottom, first, end in runs)
        lines.append(f"{' ' * ((columns - upper.shape[1]) // 2)}{text}\x1b[0m")
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

    Colours are exact to a hundredth of full brightness if they are at most 256, and differ enough.
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
    used = np.flatnonzero(examples >= 0)
    if len(used) <= _MOST_COLOURS:
        palette = picture.reshape(-1, 3)[examples[used]].astype(int)
    else:
        levels = (picture.astype(np.int32) * (_CUBE - 1) + 127) // 255
        codes = levels @ (_CUBE * _CUBE, _CUBE, 1)
        used = np.arange(_CUBE**3)
        palette = np.stack(np.unravel_index(used, (_CUBE,) * 3), axis=1) * 255 // (_CUBE - 1)
    indices = np.zeros(1 << 16, np.intp)
    indices[used] = np.arange(len(used))
    return palette, indices[codes]


def _band(indices: Any, colours: int) -> str:
    """Return six rows of pixels as text, colour by colour; each character has one bit per row."""
    width = indices.shape[1]
    bits = np.full((colours, width), 63, np.uint8)
    for number, row in enumerate(indices):
        bits[row, np.arange(width)] += 1 << number
    lines = []
    for colour in np.flatnonzero(np.bincount(indices.reshape(-1), minlength=colours)).tolist():
        text = bits[colour].tobytes().decode("ascii").rstrip("?")
        lines.append(f"#{colour}" + _REPEATED.sub(lambda run: f"!{len(run[0])}{run[1]}", text))
    return "$".join(lines)
