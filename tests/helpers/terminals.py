"""Terminals for tests: one that remembers what is drawn on it, and a real one, of the system, with a process in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import struct
import sys
import termios
import time
from collections.abc import Iterable
from typing import Any

import forked_python
from gym_trace_cli.player.terminal import Abilities
from rich.cells import cell_len

_LAST = b"\x00last\x00"
_SEQUENCE = re.compile(r"\x1bP.*?\x1b\\|\x1b\\|\x1b\[([0-?]*)[ -/]*([@-~])|\x1b.|.", re.S)


class Drawn:
    """The screen of a terminal. Lines are not wrapped, as the player wants it."""

    def __init__(self, columns: int = 80, rows: int = 24):
        self.columns, self.rows = columns, rows
        self.pictures: list[tuple[int, int, str]] = []
        self.modes: dict[str, bool] = {}
        self._cells: dict[tuple[int, int], str] = {}
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        for found in _SEQUENCE.finditer(text):
            if found[0].startswith("\x1bP"):
                self.pictures.append((self._row, self._column, found[0]))
            elif found[2] is not None:
                self._control(found[1], found[2])
            elif found[0] == "\n":
                self._row += 1
            elif found[0] == "\r":
                self._column = 0
            elif not found[0].startswith("\x1b"):
                assert found[0].isprintable(), f"{found[0]!r} on the screen"
                self._cells[self._row, min(self._column, self.columns - 1)] = found[0]
                self._column += cell_len(found[0])

    def _control(self, arguments: str, final: str) -> None:
        if final == "H":
            self._row, self._column = (int(part) - 1 for part in (arguments or "1;1").split(";"))
            assert 0 <= self._row < self.rows
        elif final == "J":
            self._cells.clear()
        elif final in "hl":
            self.modes[arguments] = final == "h"
        else:
            assert final in "mKtcS", f"CSI {arguments}{final}"

    @property
    def lines(self) -> list[str]:
        rows = (("".join(self._cells.get((y, x), " ") for x in range(self.columns))) for y in range(self.rows))
        return [row.rstrip() for row in rows]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


class Scripted:
    """A gym_trace_cli.player.terminal.Terminal with keys from a list, in which None is a pause.

    unasked: keys for calls that do not wait.
    """

    def __init__(
        self,
        keys: Iterable[str | None] = (),
        size: tuple[int, int] = (80, 24),
        abilities: Abilities | None = None,
        unasked: Iterable[str | None] = (),
    ):
        self.drawn = Drawn(*size)
        self.size, self.abilities, self.is_new = size, abilities or Abilities(), True
        self.screens: list[str] = []  # at each key
        self._keys, self._unasked = iter(keys), iter(unasked)

    def write(self, text: str) -> None:
        self.drawn.feed(text)

    def key(self, seconds: float) -> str | None:
        key = next(self._keys, "quit") if seconds else next(self._unasked, None)
        if key is not None:
            self.screens.append(self.drawn.text)
        return key


class Console:
    """A Python process in a real terminal. A context manager; ends the process.

    answer: of the terminal to a query of its capabilities.
    """

    def __init__(
        self,
        *command: str,
        columns: int = 80,
        rows: int = 24,
        environ: dict[str, str] | None = None,
        answer: str = "\x1b[?1;2c",
    ):
        self._answer = answer
        self._master, self.slave = os.openpty()
        self.resize(columns, rows)
        self.modes = termios.tcgetattr(self.slave)
        self.raw = b""
        named = {"TERM": "xterm-256color", "COLORTERM": "", "NO_COLOR": "", "PYTHONIOENCODING": "utf-8"}
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), self.slave)
        environ = {**os.environ, **named, **(environ or {})}
        self.process: Any = forked_python.Popen(command, start_new_session=True, env=environ, **streams)

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self.slave)

    def resize(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def read(self, seconds: float = 0.05) -> None:
        while select.select([self._master], [], [], seconds)[0]:
            read = os.read(self._master, 1 << 16)
            self.raw += read
            if b"\x1b[c" in read and self._answer:
                self.send(self._answer)

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        """Wait until it was written, at any place and time, since the last call."""
        deadline, sought = time.monotonic() + seconds, text.encode()
        while sought not in self.raw:
            assert time.monotonic() < deadline, f"{text!r} is not in {self.raw[-2000:]!r}"
            self.read()
        self.raw = self.raw[self.raw.index(sought) + len(sought) :]

    def ended(self, seconds: float = 60.0) -> int:
        """Return the exit code; .raw has the output."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"goes on: {self.raw[-2000:]!r}"
            self.read()
        os.write(self.slave, _LAST)  # behind all that the process wrote, which may arrive later than its exit status
        while _LAST not in self.raw:
            assert time.monotonic() < deadline, f"no end of {self.raw[-2000:]!r}"
            self.read()
        self.raw = self.raw.replace(_LAST, b"")
        return int(self.process.returncode)

    @property
    def is_as_it_was(self) -> bool:
        """Return True if the terminal has its original modes."""
        return termios.tcgetattr(self.slave) == self.modes


def written(terminal: int) -> bytes:
    """Read what was written to a terminal until no process has it open, and close it."""
    found = b""
    with contextlib.suppress(OSError):
        while more := os.read(terminal, 1 << 16):
            found += more
    os.close(terminal)
    return found


def console(*args: object, **kwargs: Any) -> Console:
    """gym-trace in a terminal."""
    return Console(sys.executable, "-c", "from gym_trace_cli.main import cli; cli()", *map(str, args), **kwargs)
