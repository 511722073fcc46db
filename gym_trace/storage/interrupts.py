"""Defer signals inside third-party libraries and cleanup code."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from gym_trace.errors import signal_handlers


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
