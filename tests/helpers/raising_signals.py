"""Signals whose handlers raise, at a chosen line of the code under test."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


class InterruptsAt:
    """Raise a signal, whose handler raises, before the nth line, or return, of the hot functions.

    Garbage collection is off: it would close an earlier recorder, and an exception in there is lost.
    """

    def __init__(
        self, number: int, raises: type[BaseException], is_hot: Callable[[CodeType], bool], returns: bool = True
    ):
        self.left, self.line, self._raises, self._is_hot = number, "", raises, is_hot
        self._events = ("line", "return") if returns else ("line",)

    def __enter__(self) -> InterruptsAt:
        gc.disable()
        self._before = sys.gettrace()
        self._handler = signal.signal(signal.SIGALRM, self._handle)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        signal.signal(signal.SIGALRM, self._handler)
        gc.enable()

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() or not self._is_hot(frame.f_code):
            return None
        if event in self._events and not self.line:
            self.left -= 1
            if self.left < 0:
                self.line = f"{frame.f_code.co_name}, line {frame.f_lineno}, {event}"
                signal.raise_signal(signal.SIGALRM)
        return self._trace

    def _handle(self, *_: object) -> None:
        raise self._raises


class CallsAt(InterruptsAt):
    """Call a function in the signal handler."""

    def __init__(self, number: int, function: Any, *arguments: Any, **named: Any):
        super().__init__(number, KeyboardInterrupt, *arguments, **named)
        self._function = function

    def _handle(self, *_: object) -> None:
        self._function()
