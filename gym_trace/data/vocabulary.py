"""The vocabulary of a trace: outcomes of episodes, flags of fragments, names of columns."""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Any


class Outcome(IntEnum):
    """Outcome of an episode. The fragment table stores its number; users see its name in lower case.

    RUNNING is never stored: readers derive it from the lock of the writer.
    """

    LOST = 0
    TERMINATED = 1
    TRUNCATED = 2
    CUT = 3
    CLOSED = 4
    RUNNING = 5

    @property
    def word(self) -> str:
        """The name that users see, such as "terminated"."""
        return self.name.lower()


OUTCOMES = tuple(outcome.word for outcome in Outcome)


class FragmentFlag(IntFlag):
    """Flags of a fragment (docs/FORMAT.md, section 4)."""

    STARTS = 1 << 0
    HAS_INITIAL = 1 << 1
    TERMINATED = 1 << 2
    TRUNCATED = 1 << 3
    STOPS = 1 << 4
    ENDS = 1 << 5
    PLACEHOLDER = 1 << 6  # the last observation row is unknown: an import or an environment did not have it


OPTIONAL_ROOTS = ("annotations", "states")  # roots of columns that steps, and so chunks, may lack
STATES = "states/"  # prefix of states among the annotations of a ring
GENERATOR = "generator"  # name of a state: that of the environment's random generator, set before the step
ENVIRONMENT = "environment"  # name of a state: that of the whole environment before the step
FINAL = "final"  # name of a state: that of the whole environment after the step, which ended the episode
COLUMNS = ("observations", "actions", "rewards", "terminations", "truncations", "infos", "annotations")
SCANNED = (*COLUMNS, "states")  # columns that scans read


def annotation_path(name: Any) -> tuple[str, Any]:
    """Return the path of the column for an annotation or state in a ring."""
    is_state = isinstance(name, str) and name.startswith(STATES)
    return ("states", name.removeprefix(STATES)) if is_state else ("annotations", name)
