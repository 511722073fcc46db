"""Interpreters of contestants that cannot share one, and the processes that measure contestants."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
INSTALL_SECONDS = 300
_ENVIRONMENTS = ("gymnasium[classic-control,mujoco]>=1.0", "ale-py", "minigrid", "opencv-python-headless")


class Needs(NamedTuple):
    """Requirements of a contestant with its own interpreter: Python versions, and packages in install order."""

    pythons: tuple[str, ...]
    packages: tuple[tuple[str, ...], ...]


NEEDS = {
    "envlogger": Needs(("3.11", "3.10", "3.9"), (("envlogger==1.2", "numpy<2", *_ENVIRONMENTS),)),
    "lerobot": Needs(("3.12", "3.13"), (("lerobot[dataset]", *_ENVIRONMENTS),)),
    # gym of 2017 needs setuptools of its time.
    "gym-recording": Needs(
        ("3.8", "3.9"), (("setuptools<66", "wheel<0.39"), ("--no-build-isolation", "gym==0.9.7", "numpy<1.24"))
    ),
}


class Unavailable(Exception):
    """A contestant cannot be measured here; the message is the reason."""


def interpreter(name: str, given: str | None) -> str:
    """Return the interpreter of a contestant; create an environment if none is given. Raises Unavailable."""
    if given:
        return given
    if name not in NEEDS:
        return sys.executable
    needs = NEEDS[name]
    environment = HERE.parent / f".venv-bench-{name}"
    python, installed = environment / "bin" / "python", environment / ".installed"
    if not installed.exists():
        base = next(filter(None, map(_python, needs.pythons)), None)
        if base is None:
            raise Unavailable(f"needs Python {' or '.join(needs.pythons)}, which is not installed")
        print(f"creating {environment.name}", flush=True)
        shutil.rmtree(environment, ignore_errors=True)
        _call([base, "-m", "venv", str(environment)])
        deadline = time.monotonic() + INSTALL_SECONDS
        for packages in needs.packages:
            command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
            _call(command, deadline - time.monotonic())
        installed.touch()
    return str(python)


def _python(version: str) -> str | None:
    """Return a working Python of this version from PATH or pyenv."""
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for path in filter(None, [shutil.which("python" + version), *map(str, installed)]):
        if subprocess.run([path, "-c", "import venv"], capture_output=True).returncode == 0:
            return path
    return None


def _call(command: list[str], seconds: float = INSTALL_SECONDS) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"installation took more than {INSTALL_SECONDS} seconds") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or ["ERROR: pip failed"]
        raise Unavailable("installation failed: " + lines[-1].removeprefix("ERROR: "))


class Worker:
    """A process that runs worker.py. Raises Unavailable if its contestant cannot be imported."""

    def __init__(self, name: str, python: str, log: Any, path: str | None = None, benchmarks: Path = HERE):
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        if path:
            environment["PYTHONPATH"] = os.path.abspath(path)
        self._process = subprocess.Popen(
            [python, str(benchmarks / "worker.py"), name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
        )  # fmt: skip
        hello = self._answer()
        if "error" in hello:
            raise Unavailable(hello["error"])
        self.versions, self.note = hello["versions"], hello["note"]

    def do(self, kind: str, directory: str, limit: int = 120, **task: Any) -> dict[str, Any]:
        """Run one measurement and return its result. limit: timeout in seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"kind": kind, "directory": directory, "limit": limit, **task}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": "the worker died"}
