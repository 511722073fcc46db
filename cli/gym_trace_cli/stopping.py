"""Signals: end a long command at a safe point."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

from gym_trace.recording import started_safely
from gym_trace_cli.exit_codes import SIGNALLED

_NAMES = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
_OUTPUTS = (1, 2)


@contextmanager
def spared_children() -> Iterator[None]:
    """Shield processes started in the block from Ctrl-C in the terminal: the command ends them in order.

    Unless forked, they import nothing from the current directory while they start.
    """
    import multiprocessing  # most commands start no process

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})  # children inherit it
    try:
        with nullcontext() if multiprocessing.get_start_method() == "fork" else started_safely():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Ended(SystemExit):
    """A signal ends the command with this exit code. message: what happened."""

    def __init__(self, number: int):
        self.exit_code = SIGNALLED + number
        super().__init__(self.exit_code)
        self.message = _NAMES[signal.Signals(number)]


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into exceptions, so that the command cleans up.

    Ctrl-C raises KeyboardInterrupt, the others Ended. A second signal interrupts the cleanup.
    """
    before: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in _NAMES:
                handler = signal.getsignal(number)
                if handler is not signal.SIG_IGN:  # a background job ignores it
                    before[number] = handler
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else _end)
        _active.append(None)
        yield
    finally:
        if _active:
            _active.pop()
        for changed, handler in before.items():
            signal.signal(changed, handler)


def _end(number: int, frame: FrameType | None) -> None:
    _leave_terminals(number, [fd for fd in _OUTPUTS if os.isatty(fd)])
    raise Ended(number)


def _leave_terminals(number: int, terminals: list[int]) -> None:
    """Stop writing to terminals that have hung up."""
    if number == signal.SIGHUP:
        for fd in terminals:
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)


_active: list[None] = []  # one entry per running command


def _reset_in_child() -> None:
    """Let forked processes, such as those of an environment, end by SIGTERM and SIGHUP."""
    if _active:
        _active.clear()
        for number in _NAMES:
            if number != signal.SIGINT and callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_reset_in_child)


class StopSignals:
    """Defer the first Ctrl-C, SIGTERM or SIGHUP, so that the command ends between two steps; a second one acts at once.

    Attributes:
        received: number of the signal, or 0.
        defers: False while the command has nothing to save: the first signal acts at once, too.
    """

    def __init__(self, defers: bool = True) -> None:
        self.received, self.defers = 0, defers
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
            if signal.getsignal(number) is not signal.SIG_IGN:  # a background job ignores it
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        _leave_terminals(number, self._terminals)
        first, self.received = not self.received, self.received or number
        if first and self.defers:
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Ended(number)
