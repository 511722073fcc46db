"""A file descriptor reserved for later, when none may be free."""

from __future__ import annotations

import contextlib
import os


class Reserve:
    """Holds a descriptor, if one was free, until the owner needs it."""

    def __init__(self) -> None:
        self._held: int | None = None

    def take(self) -> None:
        """Reserve a descriptor; do nothing if none is free."""
        if self._held is None:
            with contextlib.suppress(OSError):
                self._held = os.open(os.devnull, os.O_RDONLY)

    def release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            with contextlib.suppress(OSError):  # nothing was written to it
                os.close(held)
