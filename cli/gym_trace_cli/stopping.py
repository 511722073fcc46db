"""Ending a long command at a good moment when it is told to stop."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

from gym_trace.child_processes import started_safely
from gym_trace_cli.exit_codes import SIGNALLED

_NAMES = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
if hasattr(signal, "SIGHUP"):
    _NAMES[signal.SIGHUP] = "hung up"
_OUTPUTS = (1, 2)


@contextmanager
def spared_children() -> Iterator[None]:
    """Processes begun within it do not hear the Ctrl-C that a terminal sends to all: we end them in good order.

    Nor do they import modules of the current directory while they start, where they are not forked.
    """
    with nullcontext() if multiprocessing.get_start_method() == "fork" else started_safely(), _without_interrupts():
        yield


@contextmanager
def _without_interrupts() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})  # which they inherit
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within it SIGTERM and SIGHUP end the command as Ctrl-C does, by an exception, so that things are put in order."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(SIGNALLED + number)

    numbers = [number for number in _NAMES if number != signal.SIGINT and signal.getsignal(number) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


class StopSignals:
    """Within it the first Ctrl-C, SIGTERM or SIGHUP is only noted, and a second one, of the impatient, strikes at once.

    So the command can end between two steps, where everything is whole, rather than anywhere at all.

    Attributes:
        received: number of the signal that came, or 0.
    """

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}
        self._terminals: list[int] = []

    @property
    def exit_code(self) -> int:
        return SIGNALLED + self.received

    @property
    def what_happened(self) -> str:
        return _NAMES[signal.Signals(self.received)]

    def __enter__(self) -> StopSignals:
        self._terminals = [fd for fd in _OUTPUTS if os.isatty(fd)]
        for number in _NAMES:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as it is for jobs in the background
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if _NAMES[signal.Signals(number)] == "hung up":
            for fd in self._terminals:  # which is gone: writing to it would fail
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
        if not self.received:
            self.received = number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(SIGNALLED + number)
