"""The examples of docstrings print what they show."""

import doctest
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import gym_trace
from gym_trace.playback.sampling import targets

PUBLIC = [getattr(gym_trace, name) for name in gym_trace.__all__ if name != "train"]  # without PyTorch
TESTS = [
    test
    for thing in (*PUBLIC, targets)
    for test in doctest.DocTestFinder(exclude_empty=True).find(thing, globs={})
    if test.examples
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("examples")
    with gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), place / "traces" / "cartpole") as env:
        gym_trace.record_episodes(env, episodes=20, seed=0)
    return place


@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.name)
def test_the_example_of_a_docstring_prints_what_it_shows(
    test: doctest.DocTest, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    test.globs = {"gym_trace": gym_trace, "gymnasium": gymnasium, "np": np, "targets": targets}
    said: list[str] = []
    assert not doctest.DocTestRunner().run(test, out=said.append, clear_globs=False).failed, "".join(said)


def test_there_are_examples() -> None:
    assert len(TESTS) >= 7
