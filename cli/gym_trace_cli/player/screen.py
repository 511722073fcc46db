"""The screen: lines of text as wide as the terminal, and an image between them."""

from __future__ import annotations

import re
import sys
import textwrap
from typing import Any

import numpy as np
from rich.cells import cell_len, set_cell_size

from gym_trace.printable import printable, shown
from gym_trace_cli.player.pictures import Picture, as_picture, colours_of, fitting, half_blocks, shades, sixel
from gym_trace_cli.player.terminal import Terminal

_SGR = re.compile(r"(\x1b\[[0-9;:]*m)")
_LARGEST = (640, 480)  # pixels of a sixel picture
_WIDEST_NAME = 24
_NOTE_LINES = 3


class Screen:
    """Draw frames of episodes on a terminal. unicode: the terminal shows more than ASCII."""

    def __init__(self, terminal: Terminal):
        self._terminal = terminal
        self._colours = colours_of()
        self.unicode = "utf" in (sys.stdout.encoding or "").lower()
        self._drawn: list[str] = []
        self._picture: Picture | None = None  # that is on the screen
        self._place: Any = None  # of the picture
        self._size = (0, 0)

    @property
    def is_stale(self) -> bool:
        """Return True if the terminal was resized or used by other programs."""
        return self._terminal.is_new or self._terminal.size != self._size

    def draw(self, head: list[str], frame: Any, words: list[str], step: int, last: int, keys: list[str]) -> None:
        """Draw the lines above a frame, the frame, the lines below it, a bar, and the longest key help that fits.

        frame: see Viewer.see(). Raises RenderingError where it can not be shown, OSError.
        """
        columns, rows = self._terminal.size
        if self.is_stale:
            self._terminal.is_new = False
            self._drawn, self._picture, self._place, self._size = [], None, None, (columns, rows)
            self._terminal.write("\x1b[0m\x1b[2J")
        foot = [*map(printable, words), self._bar(step, last, columns)]
        foot.append(f"\x1b[2m{next((line for line in keys if cell_len(line) <= columns), '')}\x1b[0m")
        folded = [line for note in head[1:] for line in textwrap.wrap(printable(note), columns)[:_NOTE_LINES]]
        head = [f"\x1b[1m{printable(head[0])}\x1b[0m", *folded]
        room = max(1, rows - len(head) - len(foot))
        lines, picture = self._shown(frame, columns, room)
        drawing = self._drawing(picture, len(head), columns)
        lines = lines[:room] + [""] * (room - len(lines))
        lines = [fitted(line, columns) for line in [*head, *lines, *foot][:rows]]
        before = self._drawn if len(self._drawn) == len(lines) else [""] * len(lines)
        changed = [f"\x1b[{row};1H{line}" for row, (line, old) in enumerate(zip(lines, before), 1) if line != old]
        self._drawn = lines
        self._terminal.write("".join([*changed, drawing]))

    def _shown(self, frame: Any, columns: int, rows: int) -> tuple[list[str], Picture | None]:
        """Draw lines, and an image over them."""
        if isinstance(frame, str):
            return self._text(frame, rows), None
        if isinstance(frame, list):
            return _numbers(frame, columns, rows), None
        picture = as_picture(frame)
        cell = self._terminal.abilities.cell
        if self._terminal.abilities.sixel and cell is not None and self._colours:
            width, height = min(columns * cell[0], _LARGEST[0]), min(rows * cell[1], _LARGEST[1]) // 6 * 6
            if width > 0 and height > 0:
                return [], fitting(picture, width, height)
        if self._colours and self.unicode:
            return half_blocks(picture, columns, rows, self._colours), None
        return shades(picture, columns, rows), None

    def _drawing(self, picture: Picture | None, row: int, columns: int) -> str:
        """Return what draws an image below `rows` rows, unless it is there; clears another one."""
        place = None if picture is None else (row, picture.shape)
        before, self._picture = self._picture, picture
        if self._place not in (None, place):
            self._terminal.write("\x1b[0m\x1b[2J")
            self._drawn, before = [], None
        self._place = place
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
            if not self._colours:  # what stands out still does
                parts = ["\x1b[7m" if _SGR.fullmatch(part) and not _is_reset(part) else part for part in parts]
            lines.append("".join(part if _SGR.fullmatch(part) else printable(part) for part in parts) + "\x1b[0m")
        return lines

    def _bar(self, step: int, last: int, columns: int) -> str:
        said = f"  {step:,}/{last:,}"
        room = max(0, columns - len(said))
        full, empty = ("━", "─") if self.unicode else ("=", "-")
        length = round(room * min(1.0, step / max(1, last)))
        return full * length + empty * (room - length) + said


def _is_reset(sequence: str) -> bool:
    return sequence.strip("\x1b[m0;:") == ""


def fitted(line: str, columns: int) -> str:
    """Cut or fill a line to exactly `width` cells."""
    out, room = [], columns
    for part in _SGR.split(line):
        if part.startswith("\x1b"):
            out.append(part)
        elif part and room:
            length = cell_len(part)
            out.append(part if length <= room else set_cell_size(part, room))
            room -= min(length, room)
    return "".join(out) + "\x1b[0m" + " " * room


def _numbers(values: list[tuple[str, Any]], columns: int, rows: int) -> list[str]:
    """Return names with values in columns that do not move between steps; the rest is counted."""
    indent = min(_WIDEST_NAME, max((len(printable(name)) for name, _ in values), default=0)) + 1
    blocks = [_folded(_cells(value), max(1, columns - indent)) for _, value in values]
    most = next((most for most in range(rows, 1, -1) if sum(min(len(block[0]), most) for block in blocks) <= rows), 1)
    lines = []
    for (name, _), (folded, in_line, cells, width) in zip(values, blocks):
        if len(folded) > most:
            there = in_line * most - -(-len(f"  … {cells:,} more") // width)
            kept = folded[most - 1][: max(0, there - in_line * (most - 1)) * width]
            folded = [*folded[: most - 1], f"{kept}  … {cells - max(there, in_line * (most - 1)):,} more"]
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
