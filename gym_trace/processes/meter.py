"""Elapsed time and throughput of a run."""

from __future__ import annotations

import time
from collections import deque

_WINDOWS = (10.0, 60.0, 300.0)  # seconds


class Meter:
    """Clock of a run that measures steps per second over several windows."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start again from zero."""
        self._begin = time.monotonic()
        self._samples: deque[tuple[float, int]] = deque([(self._begin, 0)])

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin

    def speeds(self, steps: int) -> tuple[float, float, float]:
        """Return steps per second over the last 10 s, 1 min and 5 min, or since the start if that is less.

        steps: total since the start. Call it regularly: each call is a sample.
        """
        now = time.monotonic()
        self._samples.append((now, steps))
        while len(self._samples) > 2 and now - self._samples[1][0] >= _WINDOWS[-1]:
            self._samples.popleft()
        ten, minute, five = (self._speed(now, window) for window in _WINDOWS)
        return ten, minute, five

    def _speed(self, now: float, window: float) -> float:
        since, before = next(sample for sample in self._samples if now - sample[0] <= window)
        return (self._samples[-1][1] - before) / (now - since) if now > since else 0.0
