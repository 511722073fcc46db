"""Settings of a process that runs a short command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from trace_contents import SAMPLES

SETTINGS = """
import atexit, gc, os, sys

atexit.register(lambda: print(os.environ.get("OPENBLAS_NUM_THREADS"), gc.get_threshold()[0] > 10_000, *sys.modules))
from gym_trace_cli.start import main
main()
"""


def output_of(*words: str, **environment: str) -> list[str]:
    """Return the lines that a new interpreter prints."""
    environment = {name: text for name, text in os.environ.items() if name != "OPENBLAS_NUM_THREADS"} | environment
    return subprocess.run(
        [sys.executable, *words], env=environment, check=True, capture_output=True, text=True
    ).stdout.splitlines()


def test_only_commands_without_user_code_keep_numpy_to_one_thread() -> None:
    assert output_of("-c", SETTINGS, "ls", str(SAMPLES[0]))[-1].startswith("1 True")
    assert output_of("-c", SETTINGS, "record", "--help")[-1].startswith("None False")


def test_info_does_not_import_gymnasium() -> None:
    imported = output_of("-c", SETTINGS, "info", str(SAMPLES[0]))[-1].split()
    assert "numpy" in imported
    assert "gymnasium" not in imported


def test_sql_does_not_import_pandas(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    (tmp_path / "pandas.py").write_text("print('pandas was imported')")
    printed = output_of(
        "-m", "gym_trace", "sql", str(SAMPLES[0]), "SELECT count(*) FROM steps", "--json", PYTHONPATH=str(tmp_path)
    )
    assert [line[:15] for line in printed] == ['{"count_star()"']
