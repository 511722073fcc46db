"""A loop with a TraceWriter that is killed at random: no step is lost, and the action being executed is known."""

import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from long_tests import LONG

pytest.importorskip("resource")

import crash_report
from crash_runs import FAILED, Crash, CrashServer

ROUNDS = 300 if LONG else 12

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a ring, fork and signals")


def way(chance: random.Random, number: int) -> dict[str, Any]:
    """Return a way to die: from outside at any time, within act(), at any line of the recorder."""
    rows = chance.choice([None, None, chance.randrange(1, 8)])
    ways: list[dict[str, Any]] = [
        {"seconds": chance.uniform(0, 0.3 if LONG else 0.05)},
        {"where": "step", "at": chance.randrange(1, 300), "death": chance.choice(["kill", "segfault", "exit"])},
        {"line": chance.randrange(1, 12_000)},
        {"line": chance.randrange(1, 3000), "near": True},
    ]
    return {**ways[number % len(ways)], "rows": rows}


@pytest.mark.parametrize("pure", [False, True], ids=["compiled", "pure"])
def test_a_loop_that_is_killed_loses_no_step_and_its_action_is_known(tmp_path: Path, pure: bool) -> None:
    crash_server, verdict, dead = CrashServer(pure), crash_report.StepCounts(), 0
    try:
        for number in range(int(pure), ROUNDS, 2):  # half of them each
            chance = random.Random(number)
            place, diary = tmp_path / f"t{number}", tmp_path / f"diary{number}"
            (status,) = crash_server(
                Crash("robot", str(place), str(diary), seed=number, options={"uid": "w"}, **way(chance, number // 2))
            )
            assert status != FAILED
            dead += os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 3
            found = crash_report.examine_crash(place, {"w": diary}, "robot", tmp_path / f"r{number}")
            assert found.is_clean, (number, found)
            verdict += found
    finally:
        crash_server.close()
    assert dead == ROUNDS // 2
    assert verdict.recovered > 10 * dead
    assert verdict.pending > dead // 8
    print(f"{dead} kills: {verdict}")
