"""The examples of the page on GPU simulators run on the CPU, each where its package is installed.

All of BLOCKS ran on 2026-11-27: mjlab 1.6.0, Brax 0.14.2 and MJX 3.11.0 with JAX 0.10.2, Newton 1.8.0 with Warp 1.19.0.
Isaac Lab needs a GPU, and ManiSkill 3.0.1 a Vulkan driver also for observations of states; they were not run.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = {"mjlab": 1, "brax": 1, "mujoco-mjx": 1, "newton": 1}  # number of examples per package


def test_the_examples_of_the_page_run() -> None:
    installed = [name for name in BLOCKS if is_installed(name)]
    if not installed:
        pytest.skip("none of the simulators is installed")
    page = ROOT / "docs" / "guides" / "simulators.md"
    command = [sys.executable, str(ROOT / "tests" / "helpers" / "snippets.py"), str(page)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f": {sum(BLOCKS[name] for name in installed)} blocks ran" in done.stdout


def is_installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False
