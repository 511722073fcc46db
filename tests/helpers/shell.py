"""The command line as tests call it, and a module with an environment, policies and callbacks to call it with."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import forked_python
import gymnasium
import pytest
from click.testing import CliRunner, Result
from gym_trace_cli import progress
from gym_trace_cli.main import cli

progress._PLAIN_SECONDS = math.inf  # on a busy machine any command may take long enough to print its progress

MODULE = """
import builtins
import time
import gymnasium
import numpy as np
from gymnasium import spaces
from pathlib import Path


class Clock(gymnasium.Env):
    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, length=10, delay=0.0, hang_at=None, fail_at=None, failure="ZeroDivisionError"):
        self.length, self.delay, self.hang_at, self.fail_at, self.failure = length, delay, hang_at, fail_at, failure

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2), {}

    def step(self, action):
        self.steps += 1
        time.sleep(self.delay)
        if self.steps == self.hang_at:
            Path("hangs").touch()
            time.sleep(60)
        if self.steps == self.fail_at:
            raise getattr(builtins, self.failure)("the simulator broke")
        return np.array([self.steps, action], float), 1.0, self.steps >= self.length, False, {"steps": self.steps}


gymnasium.register("CliClock-v0", entry_point=Clock)
ones = lambda observation: 1


class Alternating:
    def __init__(self, observation_space, action_space):
        assert action_space.n == 2

    def reset(self, seed):
        self.last = 1

    def __call__(self, observation):
        self.last = 1 - self.last
        return self.last


class Plain:
    def __call__(self, observation):
        return 1


calls = []


def two_only(observations, actions, rewards):
    calls.append((observations, actions, rewards))
    return len(calls) == 2


not_callable = 3
"""


def in_directory(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Makes path the current directory, with the module clicks.py in it."""
    (path / "clicks.py").write_text(MODULE)
    monkeypatch.chdir(path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "clicks", raising=False)
    yield path
    sys.modules.pop("clicks", None)
    gymnasium.registry.pop("CliClock-v0", None)


def run(*args: object) -> Result:
    with mock.patch.dict(os.environ):  # --cache stays for the workers of a command
        return CliRunner().invoke(cli, [str(arg) for arg in args], prog_name="gym-trace")


def ok(*args: object) -> Result:
    result = run(*args)
    assert result.exit_code == 0, result.output
    return result


def strict_json(text: str) -> Any:
    """Parse JSON; NaN and Infinity are errors."""

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    return json.loads(text, parse_constant=refuse)


def process(
    *args: object, script: str = "from gym_trace_cli.main import cli; cli()", **kwargs: Any
) -> subprocess.Popen[str]:
    """The command in a process of its own.

    script: HEARING makes a file when it has noted a signal; of two signals that come together a process hears one.
    """
    command = [sys.executable, "-c", script, *map(str, args)]
    kwargs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **kwargs}
    return forked_python.Popen(command, text=True, **kwargs)


HEARING = """
from pathlib import Path
from gym_trace_cli.main import cli
from gym_trace_cli.stopping import StopSignals

note = StopSignals._note

def heard(*given):
    try:
        note(*given)
    finally:
        Path("heard").touch()

StopSignals._note = heard
cli()
"""


def wait_for(condition: Callable[[], object]) -> None:
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)  # which leaves the processor to what is waited for
    raise AssertionError("waited in vain")
