"""Whatever process of a training run is killed, the run ends or goes on, and proves what it learnt from.

GYM_TRACE_LONG=1 kills each kind twenty times.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gym_trace import check_trace
from gym_trace.training import verify_run

LONG = os.environ.get("GYM_TRACE_LONG", "0") not in ("", "0")
COMMAND = [sys.executable, "-c", "from gym_trace_cli.main import cli; cli()"]
SETTINGS = ["--steps", "12000", "--num-envs", "8", "--workers", "2", "--set", "rollout=32", "--set", "hidden=16"]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


def called(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def of_session(session: int) -> list[int]:
    """The processes that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, number = path.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(number) == session and state != "Z":
            found.append(int(path.parent.name))
    return found


def does(pid: int, kind: str) -> bool:
    """Return True if a process of a run is its learner or an actor, by its open files."""
    try:
        if kind == "actor":
            return ".ring" in Path(f"/proc/{pid}/maps").read_text()
        held = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    return any(path.endswith("updates.msgpack") for path in held)


@pytest.mark.parametrize("number", range(20 if LONG else 1))
@pytest.mark.parametrize("kind", ["driver", "learner", "actor"])
def test_a_run_of_which_a_process_is_killed_ends_or_goes_on_and_verifies(
    kind: str, number: int, tmp_path: Path
) -> None:
    directory = tmp_path / "r"
    log = (tmp_path / "said").open("w")
    command = [*COMMAND, "train", "CartPole-v1", "-o", str(directory), "--seed", str(number), *SETTINGS]
    driver = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    while not (directory / "updates.msgpack").exists() and driver.poll() is None:
        time.sleep(0.01)
    time.sleep(random.Random(f"{kind} {number}").uniform(0, 2.5))
    victims = [driver.pid] if kind == "driver" else [pid for pid in of_session(driver.pid) if does(pid, kind)]
    for pid in victims[:1]:
        os.kill(pid, signal.SIGKILL)
    code = driver.wait(120)
    deadline = time.monotonic() + 30
    while of_session(driver.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not of_session(driver.pid)
    said = (tmp_path / "said").read_text()
    if kind == "driver":
        assert code == -signal.SIGKILL or (directory / "done").exists(), said
        resumed = called("train", "--resume", directory)
        assert resumed.returncode == 0, said + resumed.stderr
    else:
        assert code == 0, said
        assert not victims or (directory / "done").exists()
    # As after a reboot, or on another machine, where no process can read a ring.
    elsewhere = shutil.copytree(directory, tmp_path / "elsewhere", ignore=shutil.ignore_patterns("*.ring"))
    found = verify_run(elsewhere)
    assert (found.differs, found.versions) == ("", found.of)
    assert check_trace(directory / "trace").damages == []
    assert not list((directory / "trace").glob("*.ring"))
