"""A trace says what made it: names, versions and the commit, and what may be private only on demand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from shell import in_directory, ok, run
from test_collect import Seeded, whole_episodes

import gym_trace
from gym_trace import collect, open_trace
from gym_trace.collecting.run_log import EVENTS
from gym_trace.errors import InvalidOption

CARTPOLE = partial(gymnasium.make, "CartPole-v1", max_episode_steps=5)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from in_directory(tmp_path, monkeypatch)


def said_of(directory: Path | str) -> Any:

    first, *others = (writer.schema["provenance"] for writer in open_trace(directory).readers)
    assert all(other == first for other in others)
    return first


def git(*words: str) -> str:
    who = {"GIT_AUTHOR_NAME": "n", "GIT_AUTHOR_EMAIL": "e", "GIT_COMMITTER_NAME": "n", "GIT_COMMITTER_EMAIL": "e"}
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True, env=os.environ | who).stdout


@pytest.mark.parametrize("more", [[], ["-j", 2]])
def test_a_trace_says_what_made_it_and_nothing_else(
    here: Path, more: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    git("init", "-q")
    git("add", "clicks.py")
    git("commit", "-q", "-m", "all")
    commit = git("rev-parse", "HEAD").strip()
    monkeypatch.setattr(sys, "argv", ["gym-trace", "SECRET-ARGUMENT"])
    command = ["record", "CartPole-v1", "--episodes", 2, "--policy", "clicks:ones", *more]
    ok(*command, "-o", "clean")
    expected = {"command": "gym-trace record", "policy": "clicks:<lambda>", "gym_trace": gym_trace.__version__}
    assert said_of("clean") == {**expected, "commit": commit, "dirty": False}
    (here / "clicks.py").write_text((here / "clicks.py").read_text() + "# SECRET-CHANGE\n")
    ok(*command, "-o", "changed")
    assert said_of("changed") == {**expected, "commit": commit, "dirty": True}
    assert not any(b"SECRET" in path.read_bytes() for folder in ("clean", "changed") for path in Path(folder).iterdir())
    shown = ok("info", "changed").output
    assert f"gym-trace record, policy clicks:<lambda>, gym_trace {gym_trace.__version__}, commit {commit} and" in shown
    ok(*command, "-o", "asked", "--argv")
    assert said_of("asked")["argv"] == ["gym-trace", "SECRET-ARGUMENT"]
    if more:
        ok(*command, "-o", "diff", "--git-diff")
        assert "SECRET-CHANGE" in (here / "diff" / EVENTS).read_text()


def test_a_diff_is_for_runs_of_several_processes(here: Path) -> None:
    refused = run("record", "CartPole-v1", "--git-diff")
    assert refused.exit_code == 2
    assert "--git-diff needs -j" in refused.output


def test_a_trace_of_collect_names_its_policy(tmp_path: Path) -> None:
    collect(CARTPOLE, Seeded, tmp_path, episodes=2, seed=1)
    assert said_of(tmp_path)["command"] == "gym_trace.collect"
    assert said_of(tmp_path)["policy"] == "test_collect:Seeded"


def test_lambdas_and_what_they_close_over_are_carried_to_workers(tmp_path: Path) -> None:
    length = 4
    result = collect(
        lambda: gymnasium.make("CartPole-v1", max_episode_steps=length),
        lambda observation: int(observation[2] > 0),
        tmp_path,
        episodes=3,
        workers=2,
        seed=1,
    )
    assert result.stopped == "done"
    assert len(whole_episodes(tmp_path, 1)) == 3


@pytest.mark.parametrize("name", ["make_env", "policy"])
def test_what_cannot_be_carried_to_workers_is_named_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    frame = sys._getframe()
    given: dict[str, Any] = {"make_env": CARTPOLE, "policy": None, name: lambda *_: frame}
    with pytest.raises(InvalidOption, match=f"{name} cannot be carried to a worker process.*frame"):
        collect(directory=tmp_path / "t", episodes=1, **given)
    assert not (tmp_path / "t").exists()
