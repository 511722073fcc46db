"""Which episodes are filmed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from gym_trace.errors import InvalidOption

Schedule = Callable[[int], bool]  # given the number of an episode


def cubic(episode: int) -> bool:
    """Whether episode is 0, 1, 8, 27 … 729, or a multiple of 1,000; the schedule of Gymnasium and of Monitor."""
    return episode % 1000 == 0 if episode >= 1000 else round(episode ** (1 / 3)) ** 3 == episode


def schedule_of(given: Any) -> Schedule:
    """A schedule as people name it: "cubic", "every:N", or a function of the episode's number. Raises InvalidOption."""
    if callable(given):
        return given  # type: ignore[no-any-return]
    if given == "cubic":
        return cubic
    found = re.fullmatch(r"every:([1-9]\d*)", given) if isinstance(given, str) else None
    if found is None:
        raise InvalidOption(f'{given!r} is no schedule: write "cubic", or "every:N" for every Nth episode')
    step = int(found[1])
    return lambda episode: episode % step == 0
