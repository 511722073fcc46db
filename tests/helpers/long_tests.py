"""Long tests with GYM_TRACE_LONG=1 (make test-long), and the choice of cases for short ones."""

import os
from collections.abc import Iterable
from typing import TypeVar

LONG = os.environ.get("GYM_TRACE_LONG") == "1"
Case = TypeVar("Case")


def sampled(cases: Iterable[Case], every: int) -> list[Case]:
    """Return all cases in long runs, and otherwise one of `every`, spread evenly."""
    return list(cases)[:: 1 if LONG else every]


# Traces of the conformance suite that formats are tried with: all but "long", of 40,000 steps; none means all.
TRACES = [
    "vectors",
    "float64",
    "pixels",
    "dict",
    "tuple",
    "text",
    "integers",
    "several-integers",
    "one-episode",
    "ends",
]
TRACES += ["flags-within", "parts", "seeds", "infos", "several-rewards", "odd-numbers"]
if LONG:
    TRACES = []
