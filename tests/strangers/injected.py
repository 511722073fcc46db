"""A pytest plugin that runs Gymnasium's own tests with a recorder around each environment.

Outermost calls of reset and step go through a recorder around the environment; the test keeps its own object. After
each test, every trace is compared with an independent log.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from independent_log import Log, VectorLog, compare

from gym_trace import TraceRecordingVectorWrapper, TraceRecordingWrapper

_main = os.getpid()
_inside = threading.local()  # .busy: True inside a recorder call
_watched: dict[int, Watched] = {}
_directories: Callable[[], Path]
_refused: Counter[str] = Counter()


class Watched:
    """An environment of a test, the recorder around it, and the log."""

    def __init__(self, env: Any):
        self.env, self.directory = env, _directories()
        self.log: Log
        if isinstance(env, gymnasium.vector.VectorEnv):
            self.recorder: Any = TraceRecordingVectorWrapper(env, self.directory, record_infos=True)
            self.log = VectorLog(env)
        else:
            self.recorder = TraceRecordingWrapper(env, self.directory, record_infos=True)
            self.log = Log()

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        given = deepcopy((seed, options))
        try:
            result = self.recorder.reset(seed=seed, options=options)
        except BaseException:
            self.log.lose()
            raise
        if isinstance(self.log, VectorLog):
            self.log.reset(result, *given)
        else:
            self.log.began(0, *deepcopy(result), seed)
        return result

    def step(self, action: Any) -> Any:
        given = deepcopy(action)
        try:
            result = self.recorder.step(action)
        except BaseException:
            self.log.lose()
            raise
        if isinstance(self.log, VectorLog):
            self.log.step(given, result)
        else:
            observation, reward, terminated, truncated, info = deepcopy(result)
            self.log.stepped(0, given, observation, reward, (terminated, truncated), info)
        return result


@contextmanager
def _busy() -> Iterator[None]:
    _inside.busy = True
    try:
        yield
    finally:
        _inside.busy = False


def _through(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        usual = not args and kwargs.keys() <= {"seed", "options"} if name == "reset" else len(args) == 1 and not kwargs
        outermost = getattr(type(self), name) is call and not getattr(_inside, "busy", False)
        if not (usual and outermost) or os.getpid() != _main or not _recording():
            return original(self, *args, **kwargs)
        with _busy():
            if id(self) not in _watched:
                try:
                    _watched[id(self)] = Watched(self)
                except Exception as error:
                    _refused[f"{type(error).__name__}: {error}"[:120]] += 1
                    return original(self, *args, **kwargs)
            return getattr(_watched[id(self)], name)(*args, **kwargs)

    call.__injected__ = True  # type: ignore[attr-defined]
    return call


def _recording() -> bool:
    return "_directories" in globals()


def _inject(base: type) -> None:
    for kind in base.__subclasses__():
        _inject(kind)
        if not kind.__module__.startswith("gym_trace"):
            for name in ("reset", "step"):
                method = kind.__dict__.get(name)
                if callable(method) and not hasattr(method, "__injected__"):
                    setattr(kind, name, _through(name, method))


@pytest.fixture(autouse=True)
def _recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, record_property: Any
) -> Iterator[None]:
    global _directories
    _inject(gymnasium.Env)
    _inject(gymnasium.vector.VectorEnv)
    _directories = lambda: tmp_path_factory.mktemp("trace")  # noqa: E731
    yield
    del _directories
    watched = list(_watched.values())
    _watched.clear()
    for one in watched:
        with suppress(Exception), _busy():
            one.recorder.close()
    for one in watched:
        result = compare(one.log, one.directory)
        record_property("compared", (1, result.episodes, result.steps))
    for why, count in _refused.items():
        record_property("refused", (why, count))
    _refused.clear()


_totals = Counter[str]()


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "teardown":
        for name, value in report.user_properties:
            if name == "compared":
                _totals.update(dict(zip(("environments", "episodes", "steps"), value)))
            elif name == "refused":
                _totals[f"could not be recorded: {value[0]}"] += value[1]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.section("recorded and compared")
    for what, count in _totals.items():
        terminalreporter.write_line(f"{count:8} {what}")
