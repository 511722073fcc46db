"""Public names have examples in their docstrings, which print what they show."""

import doctest
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import public_api
import pytest

import gym_trace
from gym_trace.errors import MissingExtra

# Classes whose methods have examples, too.
MAIN = (
    "Episode",
    "ReplayEnv",
    "StepTable",
    "Trace",
    "TraceRecordingVectorWrapper",
    "TraceRecordingWrapper",
    "TraceWriter",
)


def public_things() -> Iterator[tuple[str, Any]]:
    """Yield the public functions and classes whose packages are installed, with their paths."""
    yield from ((path, thing) for thing, path in public_api.public_things().items())
    for module in public_api.EXCHANGE:
        try:
            home = importlib.import_module(module)
        except MissingExtra:
            continue
        yield from ((f"{module}.{name}", getattr(home, name)) for name in public_api.names_of(module))


THINGS = dict(public_things())
TESTS = {
    test.name: test
    for path, thing in THINGS.items()
    for test in doctest.DocTestFinder(exclude_empty=True).find(thing, path, globs={})
    if test.examples
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("examples")
    with gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), directory / "traces" / "cartpole") as env:
        gym_trace.record_episodes(env, episodes=20, seed=0)
    return directory


@pytest.mark.parametrize("test", TESTS.values(), ids=TESTS)
def test_the_example_of_a_docstring_prints_what_it_shows(
    test: doctest.DocTest, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    test.globs = {"gym_trace": gym_trace, "gymnasium": gymnasium, "np": np, "targets": gym_trace.targets}
    printed: list[str] = []
    assert not doctest.DocTestRunner().run(test, out=printed.append, clear_globs=False).failed, "".join(printed)


def test_every_public_name_has_an_example() -> None:
    things = {path: thing for path, thing in THINGS.items() if inspect.isfunction(thing) or isinstance(thing, type)}
    # Where an extra is missing, its names are functions of on_first_use that raise MissingExtra.
    names = {path for path, thing in things.items() if thing.__module__ != "gym_trace.on_first_use"}
    for name in MAIN:
        if (thing := THINGS.get(f"gym_trace.{name}")) is not None:  # an old Gymnasium has no vector environments
            methods = (key for key, value in vars(thing).items() if inspect.isroutine(value) and key[0] != "_")
            names |= {f"gym_trace.{name}.{key}" for key in methods}
    assert not sorted(names - TESTS.keys())
