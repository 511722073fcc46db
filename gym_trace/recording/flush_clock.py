"""The flush clock of a slab."""

from __future__ import annotations

import time

_LOOKS = 16  # looks at the clock per flush interval
_MOST_STRIDE = 1 << 14  # most rows between two looks
_MOST_SECONDS = 1e9


class FlushClock:
    """The time at which a slab is due, and the number of rows at which to look at the clock again.

    Attributes:
        due: when the content of the slab must be written, in nanoseconds of the monotonic clock; 0: at the next step.
        look_at: number of rows in the slab at the next look().
    """

    def __init__(self) -> None:
        self.due, self.look_at = 0, 1
        self._looked, self._stride = 0, 1
        self._soon = 0  # time between two looks that are close together

    def start(self, seconds: float) -> None:
        """Begin with an empty slab. seconds: the flush interval."""
        interval = int(min(_MOST_SECONDS, seconds) * 1e9)
        self._soon, self._looked = interval // _LOOKS, time.monotonic_ns()
        self.due, self.look_at = self._looked + interval, self._stride

    def request(self) -> None:
        """Make the slab due at the next step."""
        self.due = 0

    @property
    def is_requested(self) -> bool:
        return self.due == 0

    def look(self, rows: int) -> int:
        """Return the time; set the next look so that there are some in each flush interval."""
        now = time.monotonic_ns()
        is_soon = now - self._looked < self._soon
        self._stride = min(2 * self._stride, _MOST_STRIDE) if is_soon else max(1, self._stride // 2)
        self._looked, self.look_at = now, rows + self._stride
        return now
