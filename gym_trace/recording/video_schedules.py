"""Schedules that choose the episodes to film."""

from __future__ import annotations

import re
from collections.abc import Callable

from gym_trace.errors import InvalidOption

Schedule = Callable[[int], bool]  # called with the number of an episode


def cubic(episode: int) -> bool:
    """Return True for episodes 0, 1, 8, 27 … 729 and multiples of 1,000: the schedule of Gymnasium and Monitor."""
    return episode % 1000 == 0 if episode >= 1000 else round(episode ** (1 / 3)) ** 3 == episode


def schedule_of(given: object) -> Schedule:
    """Return a schedule from "cubic", "every:N", or a function of the episode number. Raises InvalidOption.

    Examples:
        >>> schedule = gym_trace.recording.schedule_of("every:10")
        >>> [number for number in range(30) if schedule(number)]
        [0, 10, 20]
    """
    if callable(given):
        return given
    if given == "cubic":
        return cubic
    found = re.fullmatch(r"every:([1-9]\d*)", given) if isinstance(given, str) else None
    if found is None:
        raise InvalidOption(f'{given!r}: invalid schedule; pass "cubic", or "every:N" for every Nth episode')
    step = int(found[1])
    return lambda episode: episode % step == 0
