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

    Exceptions of the handlers, such as KeyboardInterrupt, are raised then. Outside the main thread, where no signal
    arrives, nothing is deferred.
    """
    before = signal_handlers()
    waiting: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        waiting.append(number)

    def check() -> None:
        while waiting:
            number = waiting.pop(0)
            before[number](number, None)

    try:
        _install(dict.fromkeys(before, note))
        yield check
    finally:
        try:
            _install(before)
        except BaseException:  # raised by the first handler that was installed again
            _install(before)
            raise
        finally:
            check()


def _install(handlers: dict[int, Callable[..., Any]]) -> None:
    for number, handler in handlers.items():
        with contextlib.suppress(ValueError):  # outside the main thread
            signal.signal(number, handler)
