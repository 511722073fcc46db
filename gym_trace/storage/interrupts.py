"""Defer signals inside third-party libraries and cleanup code; interrupt libraries that do not handle them."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

from gym_trace.errors import signal_handlers

_SIGNAL_SECONDS = 1.0  # longest time until a signal is handled
_STOP_SECONDS = 0.1  # time between calls of stop()
_T = TypeVar("_T")


def interruptible(call: Callable[[], _T], stop: Callable[[], None] | None = None) -> _T:
    """Return call(). Signals interrupt it in the main thread, though its library handles none before it returns.

    stop: makes call() return soon, which is then waited for; it is called repeatedly, as call() may not have begun.
    None: call() is left running in its thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    returned: list[_T] = []
    raised: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:
            raised.append(error)
        finally:
            done.set()

    try:
        threading.Thread(target=run, name="gym-trace-call", daemon=True).start()
    except RuntimeError:  # the interpreter is shutting down, and starts no threads
        return call()
    try:
        while not done.wait(_SIGNAL_SECONDS):  # a signal just before wait() does not end it
            pass
    except BaseException:
        while stop is not None and not done.wait(_STOP_SECONDS):
            stop()
        raise
    if raised:
        raise raised.pop()
    return returned[0]


@contextlib.contextmanager
def held_back() -> Iterator[Callable[[], None]]:
    """Defer Python signal handlers until the block ends, or until the yielded function is called.

    Exceptions of the handlers, such as KeyboardInterrupt, are raised at that point. Other threads than the main one
    get no signals, so nothing is deferred there.
    """
    before = signal_handlers()
    deferred: list[int] = []

    def defer(number: int, frame: FrameType | None) -> None:
        deferred.append(number)

    def handle() -> None:
        while deferred:
            number = deferred.pop(0)
            before[number](number, None)

    try:
        _install(dict.fromkeys(before, defer))
        yield handle
    finally:
        try:
            _install(before)
        except BaseException:  # raised by a handler that was just restored
            _install(before)
            raise
        finally:
            handle()


def _install(handlers: dict[int, Callable[..., Any]]) -> None:
    for number, handler in handlers.items():
        with contextlib.suppress(ValueError):  # outside the main thread
            signal.signal(number, handler)
