"""The words of a trace: how episodes end, what fragments are, which columns there are."""

from __future__ import annotations

from enum import IntEnum, IntFlag


class Outcome(IntEnum):
    """How an episode ended. Its number is that in the fragment table, its name in lower case what users see.

    RUNNING is told by the lock of the writer, never by a file.
    """

    LOST = 0
    TERMINATED = 1
    TRUNCATED = 2
    CUT = 3
    CLOSED = 4
    RUNNING = 5

    @property
    def word(self) -> str:
        """Such as "terminated"."""
        return self.name.lower()


OUTCOMES = tuple(outcome.word for outcome in Outcome)


class FragmentFlag(IntFlag):
    """What is true of a fragment: see docs/FORMAT.md, section 4."""

    STARTS = 1 << 0
    LEADS = 1 << 1
    TERMINATED = 1 << 2
    TRUNCATED = 1 << 3
    STOPS = 1 << 4
    ENDS = 1 << 5
    PLACEHOLDER = 1 << 6  # its last observation row: nobody knows what its last step led to


COLUMNS = ("observations", "actions", "rewards", "terminations", "truncations", "infos", "annotations")
