"""Long tests with GYM_TRACE_LONG=1 (make test-long), and the choice of cases for short ones."""

import os

LONG = os.environ.get("GYM_TRACE_LONG") == "1"

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
