"""Shared by all tests: hypothesis profiles, and a process that never opens a window."""

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator

import hypothesis
import pytest

collect_ignore = ["strangers", "interop", "remote"]  # they need environments of their own; english: quoted

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
# Hundreds of processes import gym_trace: each would compile it for itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

_QUIET = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
hypothesis.settings.register_profile(
    "ci", max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=_QUIET
)
# HYPOTHESIS_PROFILE=hunt looks for new failures; the default tells the same short story at every run.
# A test that needs more or fewer examples than others says so as a multiple or a fraction of settings().max_examples.
hypothesis.settings.register_profile(
    "hunt", max_examples=400, deadline=None, suppress_health_check=_QUIET, print_blob=True
)
# In the background, or under nohup, signals may be ignored, which our processes would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start worker processes by a fork server that has imported what they need: ten times as fast.

    Not for tests that depend on environment variables, imports or the script of a worker.
    """
    from gym_trace.recording.processes.local import LocalProcesses

    modules = ["recording.collecting.worker", "envs.make", "tools.viewer.rendering"]
    names = ["gymnasium.envs.classic_control", "scripted_env", *(f"gym_trace.{module}" for module in modules)]
    multiprocessing.get_context("forkserver").set_forkserver_preload(names)
    others = (LocalProcesses.__init__.__defaults__ or ())[1:]
    monkeypatch.setattr(LocalProcesses.__init__, "__defaults__", ("forkserver", *others))


def pytest_collection_finish() -> None:
    """Exempt the imported modules from garbage collection, as they stay until the end; and collect less often."""
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture(scope="module", autouse=True)
def _imports_stay() -> Iterator[None]:
    """Exempt what a file has imported, too: the library collects garbage as it makes environments, 36 ms each time."""
    yield
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what became of the steps of recordings that crashed."""
    found: dict[tuple[str, str], list[int]] = {}
    for report in (*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")):
        for name, value in report.user_properties if report.when == "call" else ():
            if name == "crash":
                sums = found.setdefault((value[0], value[1]), [0] * (len(value) - 1))
                sums[:] = [a + b for a, b in zip(sums, (1, *value[2:]))]
    for (core, way), (crashes, recovered, lost, wrong, pending, unknown) in sorted(found.items()):
        steps = f"{recovered} steps recovered, {lost} lost, {wrong} wrong"
        terminalreporter.write_line(f"{core} {way}: {crashes} crashes, {steps}; pending {pending}, unknown {unknown}")
