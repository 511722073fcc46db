"""Print a table of results per package."""

from __future__ import annotations

import importlib.metadata
import os
from collections import Counter
from typing import Any

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
os.environ.setdefault("MUJOCO_GL", "disable")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

_WORTH = {"passed": 0, "skipped": 1, "failed": 2}
_results: dict[str, tuple[str, str]] = {}  # by test: outcome, reason


def pytest_collectreport(report: Any) -> None:
    if report.outcome != "passed" and report.nodeid.endswith(".py"):
        _results[report.nodeid] = (report.outcome, _why(report))


def pytest_runtest_logreport(report: Any) -> None:
    before = _results.get(report.nodeid, ("passed", ""))
    if _WORTH[report.outcome] >= _WORTH[before[0]]:
        _results[report.nodeid] = (report.outcome, "" if report.outcome == "passed" else _why(report))


def _why(report: Any) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr).strip().partition("\n")[0]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    packages: dict[str, list[tuple[str, str, str]]] = {}
    for nodeid, (outcome, why) in _results.items():
        file, _, test = nodeid.partition("::")
        package = file.rpartition("/")[2].removeprefix("test_").removesuffix(".py").replace("_", "-")
        packages.setdefault(package, []).append((test, outcome, why))
    write = terminalreporter.write_line
    terminalreporter.section("third-party packages")
    write(f"{'package':20} {'version':10} {'passed':>6} {'failed':>6} {'skipped':>7}")
    for package, rows in sorted(packages.items()):
        count = Counter(outcome for _, outcome, _ in rows)
        write(f"{package:20} {_version(package):10} {count['passed']:6} {count['failed']:6} {count['skipped']:7}")
        told: dict[str, list[str]] = {}
        for test, outcome, why in rows:
            if outcome != "passed":
                told.setdefault(f"{outcome}: {why:.300}", []).append(test)
        for what, tests in told.items():
            write(f"    {what} ({', '.join(filter(None, tests)) or 'all':.200})")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "–"
