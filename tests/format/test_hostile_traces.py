"""Traces forged with valid checksums: nothing is executed, every failure is a TraceError, and memory stays bounded.

The bounds were set after measuring; hostile_run.py reads with the smaller limits on tables and lists.

`python tests/helpers/hostile_run.py` prints what each of them takes as a table.
"""

import sys
from pathlib import Path

import hostile_run
import pytest
from hostile_forgeries import FORGERIES
from long_tests import LONG, sampled

SECONDS, SECONDS_A_MB = 30.0, 90.0  # limits of processor time for some thirty readings of a trace
MEMORY, MEMORY_A_BYTE = 700 << 20, 150  # bytes

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures processes")


def test_there_are_at_least_forty_forgeries() -> None:
    assert len(FORGERIES) >= 40


@pytest.mark.parametrize(("number", "name"), sampled(enumerate(FORGERIES), 4))
def test_a_forged_trace_does_not_harm_its_reader(number: int, name: str, tmp_path: Path) -> None:
    """Read with the whole library, and with all commands or, in short runs, with some of them in turn."""
    lines = hostile_run.COMMAND_LINES
    (result,) = hostile_run.run([name], tmp_path, lines if LONG else lines[number % 11 :: 11])
    assert result.failures == []
    assert result.acted == []
    assert result.seconds < SECONDS + SECONDS_A_MB * result.bytes / (1 << 20)
    assert result.peak < MEMORY + MEMORY_A_BYTE * result.bytes
