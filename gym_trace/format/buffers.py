"""Memory for decoded columns, used again when nobody holds the arrays in it any more."""

from __future__ import annotations

import os
import sys
from threading import Lock

import numpy as np

from gym_trace.model.values import Array

_KEPT = 32  # buffers; two chunks of some columns are in use at a time
_KEPT_BYTES, _RESTING_BYTES = 64 << 20, 16 << 20


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
        """A writable array of size bytes, of any content, that nobody else has.

        Waits for nobody: it may be called where it is being called already, by a signal handler or a finalizer.
        """
        if not self._taking.acquire(blocking=False):
            return np.empty(size, np.uint8)
        try:
            kept = self._kept
            for i in reversed(range(len(kept) if _COUNTS else 0)):  # what was used last is in the processor's cache
                if size <= kept[i].size <= 2 * size and sys.getrefcount(kept[i]) == _IDLE:
                    kept.append(kept.pop(i))
                    return kept[-1][:size]
            fresh = np.empty(size + size // 16, np.uint8)  # the next one may be a little larger
            kept.append(fresh)
            self._forget(_KEPT_BYTES, but=1)
            return fresh[:size]
        finally:
            self._taking.release()

    def rest(self) -> None:
        """To be called when nothing is being read for now: keeps only a little memory, for the next time."""
        if self._taking.acquire(blocking=False):
            try:
                self._forget(_RESTING_BYTES, but=0)
            finally:
                self._taking.release()

    def _forget(self, size: int, but: int) -> None:
        """Lets go of what was used least lately, until no more than size is kept besides the last but buffers."""
        kept = self._kept
        while len(kept) > _KEPT or sum(buffer.size for buffer in kept[: len(kept) - but]) > size:
            kept.pop(0)


def common() -> Buffers:
    """Those that all readers of this process use, so that to read a trace once more touches no fresh memory."""
    return _common


def _start_afresh() -> None:
    global _common
    _common = Buffers()


_common = Buffers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)  # a thread of the parent may have been taking some

_probe = [np.empty(1, np.uint8)]
_IDLE = sys.getrefcount(_probe[0])
_COUNTS = sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)()
