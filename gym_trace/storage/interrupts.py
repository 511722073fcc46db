"""Signals such as Ctrl-C where no exception may come: in libraries, and in what puts things in order after one."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any, TypeAlias

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
_SIGNAL = "gym_trace_signal"  # attribute of exceptions that signal handlers raised
_MOMENT = 0.01  # seconds
_IMPATIENCE = 5.0  # seconds: a later Ctrl-C is meant for something else, or for what has not ended yet

_Handler: TypeAlias = Callable[..., Any]


@contextlib.contextmanager
def raised_once() -> Iterator[None]:
    """Within it a second Ctrl-C soon after the first does not interrupt what puts things in order after that.

    Python swallows exceptions in destructors and callbacks of weak references. A signal that comes there comes again.
    """
    raised, is_within, is_swallowing = -_IMPATIENCE, True, False

    def forget() -> None:
        nonlocal raised
        raised = -_IMPATIENCE

    def once(handler: _Handler, number: int, frame: FrameType | None) -> None:
        nonlocal raised
        before, now = raised, time.monotonic()
        if now - before < _IMPATIENCE:
            return
        if _is_in(swallowed.__code__, frame):  # where Python would swallow it again
            later(number)
            return
        raised = now
        try:
            handler(number, frame)
        except BaseException as error:
            vars(error).setdefault(_SIGNAL, []).append((number, forget))
            raise
        raised = before  # a handler that raises nothing

    def later(number: int) -> None:
        _thread.start_new_thread(again, (number,))  # takes no lock that this thread may hold

    def again(number: int) -> None:
        time.sleep(_MOMENT)
        while is_swallowing:
            time.sleep(_MOMENT)
        if is_within:
            os.kill(os.getpid(), number)

    def swallowed(unraisable: Any) -> None:
        nonlocal is_swallowing
        error = unraisable.exc_value
        if error is None or not (signals := vars(error).get(_SIGNAL)):
            before(unraisable)
            return
        is_swallowing = True
        for _, forget in signals:
            forget()
        later(signals[0][0])
        is_swallowing = False

    before, sys.unraisablehook = sys.unraisablehook, swallowed
    try:
        with _handled_by(once, [int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name)]):
            yield
    finally:
        is_within, sys.unraisablehook = False, before


def _is_in(code: CodeType, frame: FrameType | None) -> bool:
    """Return True if a frame, or one that waits for it, is of a function with this code."""
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def held_back() -> Iterator[Callable[[], None]]:
    """Within it signals that functions handle are only noted. KeyboardInterrupt comes at the end, as does what others
    raise, or when what is yielded is called."""
    waiting: list[tuple[_Handler, int]] = []

    def note(handler: _Handler, number: int, frame: FrameType | None) -> None:
        waiting.append((handler, number))

    def check() -> None:
        while waiting:
            handler, number = waiting.pop(0)
            handler(number, None)

    try:
        with _handled_by(note, signal.valid_signals()):
            yield check
    finally:
        check()


@contextlib.contextmanager
def _handled_by(handle: Callable[[_Handler, int, FrameType | None], None], numbers: Iterable[int]) -> Iterator[None]:
    """Asks handle what to do at those signals that functions handle. Outside the main thread, where none arrives,
    nothing."""
    before: dict[int, _Handler] = {}
    try:
        for number in numbers:
            handler = signal.getsignal(number)
            if callable(handler):
                before[number] = handler
                with contextlib.suppress(ValueError):  # in another thread
                    signal.signal(number, lambda number, frame: handle(before[number], number, frame))
        yield
    finally:
        try:
            _restore(before)
        except BaseException:  # what the first handler raised that was there again
            _restore(before)
            raise


def _restore(handlers: dict[int, _Handler]) -> None:
    for number, handler in handlers.items():
        with contextlib.suppress(ValueError):
            signal.signal(number, handler)
