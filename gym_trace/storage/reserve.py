"""A file descriptor that is kept for later, when none may be left."""

from __future__ import annotations

import contextlib
import os


class Reserve:
    """Holds a descriptor, or none, until something else needs it."""

    def __init__(self) -> None:
        self._held: int | None = None

    def take(self) -> None:
        """Hold one. If none is left, do nothing."""
        if self._held is None:
            with contextlib.suppress(OSError):
                self._held = os.open(os.devnull, os.O_RDONLY)

    def release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            with contextlib.suppress(OSError):  # nothing was written to it
                os.close(held)
