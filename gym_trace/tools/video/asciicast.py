"""Write text screens as an asciicast, version 2, the format of asciinema."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, TextIO

from gym_trace.errors import InvalidOption, RenderingError
from gym_trace.storage.local import open_new

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_MIN_SIZE = (40, 10)  # columns and rows of the terminal
_CLEAR = "\x1b[H\x1b[2J"


class CastWriter:
    """Writes text screens one by one."""

    def __init__(self, path: Path, fps: float, title: str = ""):
        if not 0.01 <= fps <= 1000:
            raise InvalidOption(f"fps={fps!r}: out of range; pass 0.01 to 1000 frames per second")
        self.path = path
        self.frames = 0
        self._fps = fps
        self._title = title
        self._part = path.with_name(path.name + ".part")
        self._file: TextIO | None = None
        self._size = _MIN_SIZE

    def write(self, screen: Any) -> None:
        """Replace the current screen. Raises RenderingError, OSError."""
        if not isinstance(screen, str):
            raise RenderingError(f"asciicast: render() returned {type(screen).__name__}; text is required")
        lines = screen.rstrip("\n").split("\n")
        plain = [_ESCAPE.sub("", line) for line in lines]
        size = (max(self._size[0], *map(len, plain)), max(self._size[1], len(lines) + 1))
        if self._file is None:
            self._file = open(open_new(self._part), "w", encoding="utf-8", newline="\n")  # noqa: SIM115
            self._line({"version": 2, "width": size[0], "height": size[1], "title": self._title})
        elif size != self._size:
            self._event("r", f"{size[0]}x{size[1]}")
        self._size = size
        self._event("o", _CLEAR + "\r\n".join(lines))
        self.frames += 1

    def close(self) -> None:
        """Hold the last screen for one frame, and rename the file to its final name. Raises RenderingError."""
        if self._file is None:
            raise RenderingError(f"{self.path}: no frames to write")
        self._event("o", "")
        self._file.close()
        self._part.replace(self.path)

    def drop(self) -> None:
        """Remove the unfinished file."""
        if self._file is not None:
            self._file.close()
        self._part.unlink(missing_ok=True)

    def _event(self, kind: str, data: str) -> None:
        self._line([round(self.frames / self._fps, 6), kind, data])

    def _line(self, entry: Any) -> None:
        assert self._file is not None
        self._file.write(json.dumps(entry, ensure_ascii=False) + "\n")
