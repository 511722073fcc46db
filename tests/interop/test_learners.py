"""The learners of examples/: each records its trace, learns a little, and plays what it learned, in one command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["bc", "cql", "iql", "dt"])
def test_a_learner_records_learns_and_plays_in_one_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYM_TRACE_CACHE", str(tmp_path / "cache"))
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"train_{name}.py"), str(tmp_path / "trace")]
    done = subprocess.run([*command, "--updates", "3", "--episodes", "2"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    learned = r"trained for .* s of CPU time\n(target return 500: )?learned: return -?\d+\.\d \(from "
    assert re.search(learned, done.stdout)
