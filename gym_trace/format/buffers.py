"""Memory for decoded columns, used again when nobody holds the arrays in it any more."""

from __future__ import annotations

import sys
from threading import Lock

import numpy as np

from gym_trace.values import Array

_KEPT = 32  # buffers; two chunks of some columns are in use at a time
_KEPT_BYTES = 64 << 20


class Buffers:
    """Hands out byte arrays, to any thread.

    The first touch of fresh memory can take longer than decoding into it. A callback that keeps no arrays gets the same
    memory again and again; whatever is kept, in whatever view, is never touched. References are counted to tell them
    apart, so where they are not counted exactly all memory is fresh.
    """

    def __init__(self) -> None:
        self._kept: list[Array] = []
        self._taking = Lock()

    def take(self, size: int) -> Array:
        """A writable array of size bytes, of any content, that nobody else has."""
        with self._taking:
            kept = self._kept
            for i in range(len(kept) if _COUNTS else 0):
                if size <= kept[i].size <= 2 * size and sys.getrefcount(kept[i]) == _IDLE:
                    kept.append(kept.pop(i))
                    return kept[-1][:size]
            fresh = np.empty(size + size // 16, np.uint8)  # the next one may be a little larger
            kept.append(fresh)
            while len(kept) > _KEPT or sum(buffer.size for buffer in kept[:-1]) > _KEPT_BYTES:
                kept.pop(0)
            return fresh[:size]


_probe = [np.empty(1, np.uint8)]
_IDLE = sys.getrefcount(_probe[0])
_COUNTS = sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)()
