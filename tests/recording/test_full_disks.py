"""A disk that is full before, during or after the creation of the ring: an error, no signal, readable earlier steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import full_disks
import inquest
import pytest
from crashes import HERE
from gymnasium import vector
from inquest import Verdict
from longer import LONG

from gym_trace import check_trace, open_trace, repair_trace
from gym_trace.statistics.describe import describe

KINDS = ["cartpole", "things"] if LONG else []
KINDS += ["frames", "noise", *(["lanes"] if hasattr(vector, "AutoresetMode") else [])]
PURE = [False, True] if LONG else [False]
STEPS = {"cartpole": 4000, "things": 600, "frames": 300, "noise": 300, "lanes": 150}
SIZES = [100, 600, 1600, 1800, 2500, 5000, 9000, 17000, 30000, 60000]  # kB, smaller and larger than rings

Disk = Callable[[int], Path]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Make disks of a given size in kB."""
    place = tmp_path / "disk"
    mounted = []

    def of_size(kilobytes: int) -> Path:
        place.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)]
        if not sys.platform.startswith("linux") or subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("cannot mount a tmpfs")
        mounted.append(place)
        return place

    yield of_size
    for found in mounted:
        subprocess.run(["umount", str(found)], check=True)


def record(kind: str, directory: Path, diary: Path, steps: int, filler: str, pure: bool) -> dict[str, Any]:
    path = os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "GYM_TRACE_PURE": str(int(pure))}
    command = [sys.executable, full_disks.__file__, kind, str(directory), str(diary), str(steps), filler]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def assert_all_is_there(kind: str, directory: Path, diary: Path, spare: Path, error: bool) -> Verdict:
    report = check_trace(directory)
    assert report.damages == []
    judge = "lanes-NextStep" if kind == "lanes" else kind
    verdict = inquest.judged(open_trace(directory), {"w": diary}, judge)
    assert verdict.is_clean
    assert verdict.pending == 0
    assert [writer["state"] for writer in describe(directory)["writers"]] == ["failed" if error else "closed"]
    assert any("No space left on device" in remark for remark in report.remarks) == error
    assert repair_trace(directory, spare).steps == report.steps
    if report.episodes:
        assert inquest.judged(open_trace(spare), {"w": diary}, judge).recovered == verdict.recovered
    return verdict


@pytest.mark.parametrize("pure", PURE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES if LONG else [600, 5000])
def test_steps_recorded_before_the_disk_was_full_are_readable(
    disk: Disk, tmp_path: Path, size: int, kind: str, pure: bool
) -> None:
    place = disk(size)
    told = record(kind, place / "t", tmp_path / "diary", STEPS[kind], "", pure)
    assert len(told["errors"]) <= 1
    assert told["errors"] == [] or told["after"] == 50 or told["steps"] == STEPS[kind]
    for error in told["errors"]:
        assert "earlier steps stay readable" in error
    assert_all_is_there(kind, place / "t", tmp_path / "diary", tmp_path / "r", bool(told["errors"]))


@pytest.mark.parametrize("pure", PURE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_filled_by_others_does_not_harm_the_ring(disk: Disk, tmp_path: Path, kind: str, pure: bool) -> None:
    place = disk(80_000)
    told = record(kind, place / "t", tmp_path / "diary", STEPS[kind], str(place / "filler"), pure)
    (error,) = told["errors"]
    assert "earlier steps stay readable" in error
    (place / "filler").unlink()
    verdict = assert_all_is_there(kind, place / "t", tmp_path / "diary", tmp_path / "r", True)
    assert verdict.recovered >= STEPS[kind] // 3
