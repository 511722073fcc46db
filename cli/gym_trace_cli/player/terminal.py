"""Lend the terminal to the player: single keys, a screen of its own, and everything restored at the end."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import sys
import tempfile
import termios
import time
import warnings
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Any, BinaryIO, NamedTuple

from gym_trace.printable import printable

_IN, _OUT = 0, 1
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BEGIN = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"  # another screen, no cursor, no wrapping of lines
# Also ends a truncated image. The last part is for terminals without an alternate screen.
_END = "\x1b\\\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l\r\x1b[K"
# Queries of cell size, image colours and capabilities; every terminal answers the last.
_QUERIES = "\x1b[16t\x1b[?1;1;0S\x1b[c"
_LEAST_COLOURS = 256  # with fewer colours, characters show more than an image
_ANSWER_SECONDS = 0.5
_GUARD_SECONDS = 0.25
_LENT, _GIVEN_BACK, _DONE = b"+", b"-", b"."  # messages to the guard
_TOKEN = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|\x1b[^\[O\x1b]|\x1b(?=\x1b)|[^\x1b]", re.S)
_UNFINISHED = re.compile(rb"\x1b(\[[0-?]*[ -/]*|O)?\Z")
_ACTIONS = {
    "pause": [b" "],
    "quit": [b"q", b"Q", b"\x04"],
    "next": [b"\r", b"\n", b"."],
    "right": [b"\x1b[C", b"\x1bOC"],
    "left": [b"\x1b[D", b"\x1bOD"],
    "up": [b"\x1b[A", b"\x1bOA"],
    "down": [b"\x1b[B", b"\x1bOB"],
    "home": [b"\x1b[H", b"\x1b[1~"],
    "end": [b"\x1b[F", b"\x1b[4~"],
    "faster": [b"+", b"="],
    "slower": [b"-"],
}
_KEYS = {key: action for action, keys in _ACTIONS.items() for key in keys}


class Abilities(NamedTuple):
    """Abilities of the terminal. sixel: it shows images; cell: width and height in pixels."""

    sixel: bool = False
    cell: tuple[int, int] | None = None


class Terminal:
    """A context manager that takes the terminal for the player.

    Other output, such as that of environments, is printed at the end. Ctrl-Z gives the terminal back until the
    process resumes. If the process dies, a small guard process gives the terminal back.

    Attributes:
        abilities: see Abilities.
        is_new: the screen must be redrawn; reset by the code that draws.
    """

    def __init__(self) -> None:
        self.abilities = Abilities()
        self.is_new = True
        self._stack = ExitStack()
        self._tty = _OUT
        self._lent = False
        self._unread = b""
        self._read_at = 0.0

    def __enter__(self) -> Terminal:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            self._modes = termios.tcgetattr(_IN)
            sys.stdout.flush()
            sys.stderr.flush()
            self._tty = os.dup(_OUT)
            self._stack.callback(os.close, self._tty)
            self._stack.enter_context(_OtherOutput())
            self._guard = _Guard(self._tty, self._modes)
            self._stack.callback(self._guard.dismiss)
            self._stack.callback(self._give_back)
            for number, handler in ((signal.SIGTSTP, self._suspend), (signal.SIGCONT, self._resumed)):
                self._stack.callback(signal.signal, number, signal.signal(number, handler))
            self._take()
            self.abilities = self._query_abilities()
        except BaseException:
            self._stack.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self

    def __exit__(self, *_: object) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_ENDING, signal.SIGTSTP))
        try:
            self._stack.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows."""
        with suppress(OSError):
            size = os.get_terminal_size(self._tty)
            if min(size) > 0:
                return size
        return 80, 24

    def write(self, text: str) -> None:
        """Write to the terminal. Raises OSError if it is gone."""
        raw = text.encode(sys.stdout.encoding or "ascii", "replace")
        while raw:
            raw = raw[os.write(self._tty, raw) :]

    def key(self, seconds: float) -> str | None:
        """Return the next known key, None on timeout, or "quit" if the terminal is gone."""
        deadline = time.monotonic() + seconds
        while (token := self._token(deadline)) is not None:
            if token == b"":
                return "quit"
            if token in _KEYS:
                return _KEYS[token]
        return None

    def _token(self, deadline: float) -> bytes | None:
        """Return the bytes of one key or answer, or b"" at the end of input."""
        while True:
            if match := _TOKEN.match(self._unread):
                self._unread = self._unread[match.end() :]
                return match[0]
            wait = max(0.0, deadline - time.monotonic())
            if not select.select([_IN], [], [], wait)[0]:
                return None
            if self._unread and time.monotonic() - self._read_at > 0.1:  # the Escape key alone
                self._unread = b""
            read = b""
            with suppress(OSError):
                read = os.read(_IN, 4096)
            if not read:
                return b""
            self._unread, self._read_at = self._unread + read, time.monotonic()
            if not _TOKEN.match(self._unread) and not _UNFINISHED.match(self._unread):
                self._unread = b""

    # -- taking and giving back the terminal --------------------------------------------------------------------------

    def _take(self) -> None:
        modes = termios.tcgetattr(_IN)
        modes[0] &= ~termios.IXON  # Ctrl-S stops nothing
        modes[3] &= ~(termios.ICANON | termios.ECHO)
        modes[6][termios.VMIN], modes[6][termios.VTIME] = 1, 0
        termios.tcsetattr(_IN, termios.TCSANOW, modes)
        self.is_new = True
        if not self._lent:
            self._lent = True
            self._guard.send(_LENT)
            self.write(_BEGIN)

    def _give_back(self) -> None:
        _restore(self._tty, self._modes)
        self._guard.send(_GIVEN_BACK)
        self._lent = False

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z."""
        self._give_back()
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, before)  # resumed
        self._resumed(number, frame)

    def _resumed(self, number: int, frame: FrameType | None) -> None:
        with suppress(OSError, termios.error):
            self._take()

    def _query_abilities(self) -> Abilities:
        self.write(_QUERIES)
        deadline, sixel, cell, colours = time.monotonic() + _ANSWER_SECONDS, False, None, _LEAST_COLOURS
        while token := self._token(deadline):
            if match := re.fullmatch(rb"\x1b\[6;(\d{1,4});(\d{1,4})t", token):
                cell = int(match[2]), int(match[1])
            elif match := re.fullmatch(rb"\x1b\[\?1;0;(\d{1,6})S", token):
                colours = int(match[1])
            elif match := re.fullmatch(rb"\x1b\[\?([\d;]*)c", token):
                sixel = b"4" in match[1].split(b";")[1:] and colours >= _LEAST_COLOURS
                break
        return Abilities(sixel, cell if cell is not None and min(cell) > 0 else self._cell())

    def _cell(self) -> tuple[int, int] | None:
        """Return the cell size that the system knows."""
        with suppress(OSError):
            rows, columns, width, height = struct.unpack("HHHH", fcntl.ioctl(self._tty, termios.TIOCGWINSZ, bytes(8)))
            if rows and columns and width >= columns and height >= rows:
                return width // columns, height // rows
        return None


def _restore(tty: int, modes: Any) -> None:
    for restore in (
        lambda: os.write(tty, _END.encode()),
        lambda: termios.tcflush(_IN, termios.TCIFLUSH),  # unread keys are not for the shell
        lambda: termios.tcsetattr(_IN, termios.TCSANOW, modes),
    ):
        with suppress(OSError, termios.error):  # the terminal may be gone
            restore()


class _OtherOutput:
    """Context manager that collects other output, and prints its last lines at the end."""

    _MOST = 20  # lines

    def __enter__(self) -> None:
        self._spool: BinaryIO = tempfile.TemporaryFile()
        self._before = {fd: os.dup(fd) for fd in (1, 2) if os.isatty(fd)}
        for fd in self._before:
            os.dup2(self._spool.fileno(), fd)

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        for fd, before in self._before.items():
            os.dup2(before, fd)
            os.close(before)
        self._spool.seek(max(0, self._spool.seek(0, os.SEEK_END) - 100_000))
        lines = self._spool.read().decode("utf-8", "replace").splitlines()
        self._spool.close()
        lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in lines]
        unique = list(dict.fromkeys(line for line in lines if line))
        if len(unique) > self._MOST:
            unique = ["…", *unique[-self._MOST :]]
        with suppress(OSError):
            sys.stderr.writelines(f"{printable(line)}\n" for line in unique)
            sys.stderr.flush()


class _Guard:
    """A process that restores the terminal if this one dies."""

    def __init__(self, tty: int, modes: Any):
        read, self._write = os.pipe()
        parent = os.getpid()
        with warnings.catch_warnings():  # forking with threads is safe here: the child only waits
            warnings.simplefilter("ignore", DeprecationWarning)
            self._child = os.fork()
        if not self._child:
            try:
                _watch(parent, read, self._write, tty, modes)
            finally:
                os._exit(0)
        os.close(read)

    def send(self, message: bytes) -> None:
        """Send whether the terminal is lent now."""
        with suppress(OSError):
            os.write(self._write, message)

    def dismiss(self) -> None:
        self.send(_DONE)
        os.close(self._write)
        with suppress(ChildProcessError):
            os.waitpid(self._child, 0)


def _watch(parent: int, read: int, write: int, tty: int, modes: Any) -> None:
    for number in (*_ENDING, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    os.close(write)
    lent, message = False, b"?"
    while message and os.getppid() == parent:  # children of an environment may keep the pipe open
        if select.select([read], [], [], _GUARD_SECONDS)[0]:
            message = os.read(read, 16)
            if message.endswith(_DONE):
                return
            lent = message.endswith(_LENT) if message else lent
    if lent:
        _restore(tty, modes)
