"""A trace says what made it: names, versions and the commit, and what may be private only on demand."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from failing_workers import SeededPolicy
from shell import in_directory, ok, wait_for
from worker_episodes import whole_episodes

import gym_trace
from gym_trace import collect, open_trace
from gym_trace.errors import InvalidOption
from gym_trace.playback.episode_index import index_of
from gym_trace.recording import provenance
from gym_trace.training.proof.anchors import GIT_NOTE, check_anchor, write_anchor
from gym_trace.training.proof.chain import Chain
from gym_trace.training.proof.result import Proof

CARTPOLE = partial(gymnasium.make, "CartPole-v1", max_episode_steps=5)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(provenance, "_GIT_SECONDS", 60.0)
    yield
    for thread in threading.enumerate():  # which run what the next test replaces
        if thread.name == "gym-trace git":
            thread.join(60)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from in_directory(tmp_path, monkeypatch)


def said_of(directory: Path | str) -> Any:

    first, *others = (writer.schema["provenance"] for writer in index_of(open_trace(directory)).readers)
    assert all(other == first for other in others)
    return first


def git(*words: str) -> str:
    who = {"GIT_AUTHOR_NAME": "n", "GIT_AUTHOR_EMAIL": "e", "GIT_COMMITTER_NAME": "n", "GIT_COMMITTER_EMAIL": "e"}
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True, env=os.environ | who).stdout


@pytest.mark.parametrize("more", [[], ["-j", 1]])
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
    ok(*command, "-o", "full", "--full-provenance")
    assert said_of("full")["argv"] == ["gym-trace", "SECRET-ARGUMENT"]
    assert "SECRET-CHANGE" in said_of("full")["diff"]
    assert said_of("full")["diff_is_whole"]
    assert "SECRET-CHANGE" not in ok("info", "full").output


SCRIPT = """
import sys, gymnasium
from gym_trace import TraceRecordingWrapper
from gym_trace.recording import provenance
provenance._GIT_SECONDS = 60.0
for directory in "ab":
    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), directory)
    env.reset(seed=0)
    env.close()
"""


@pytest.mark.parametrize("command", [["of/mine.py"], ["-m", "of.mine"], ["-c", SCRIPT]])
def test_a_script_is_named_by_what_it_records_and_asks_git_once(here: Path, command: list[str]) -> None:
    (here / "of").mkdir()
    (here / "of" / "mine.py").write_text(SCRIPT)
    git("init", "-q")
    git("add", "of")
    git("commit", "-q", "-m", "all")
    (here / "bin").mkdir()
    (here / "bin" / "git").write_text(f'#!/bin/sh\necho "$@" >> asked\nexec {shutil.which("git")} "$@"\n')
    (here / "bin" / "git").chmod(0o755)
    settings = {**os.environ, "PATH": f"{here / 'bin'}:{os.environ['PATH']}", "GIT_CONFIG_GLOBAL": os.devnull}
    subprocess.run([sys.executable, *command, "SECRET-ARGUMENT"], check=True, env=settings)
    name = {"of/mine.py": "mine.py", "-m": "of.mine", "-c": "python"}[command[0]]
    commit = git("rev-parse", "HEAD").strip()
    expected = {"command": name, "gym_trace": gym_trace.__version__, "commit": commit, "dirty": False}
    assert said_of("a") == said_of("b") == expected
    asked = (here / "asked").read_text().splitlines()
    assert len(asked) == 3  # for the commit, for filters, for changes: once, not for each trace


def marking(here: Path, name: str) -> str:
    """A shell command that leaves a file of this name in ran/, and passes its input on."""
    (here / "ran").mkdir(exist_ok=True)
    return f"sh -c 'touch {here}/ran/{name}; cat'"


def a_strangers_repository(here: Path) -> Path:
    """A repository whose configuration names a program wherever git has a place for one."""
    data = here / "data"
    data.mkdir()
    git("-C", "data", "init", "-q")
    git("init", "-q", "data/inner")
    for folder in (data / "inner", data):
        (folder / "a.txt").write_text("one\n")
        (folder / "b.bin").write_text("one\n")
        (folder / "c.md").write_text("one\n")
        (folder / ".gitattributes").write_text("*.txt filter=clean diff=own\n*.bin filter=process\n*.md diff=own\n")
        git("-C", str(folder), "add", ".")
        git("-C", str(folder), "commit", "-q", "-m", "all")
        for path in folder.glob("?.*"):
            path.write_text("two\n")
        settings = {
            "filter.clean.clean": marking(here, "clean"),
            "filter.clean.required": "true",
            "filter.process.process": marking(here, "process"),
            "core.fsmonitor": marking(here, "fsmonitor"),
            "core.hooksPath": str(here / "hooks"),
            "core.pager": marking(here, "pager"),
            "pager.status": "true",
            "diff.external": marking(here, "external"),
            "diff.own.command": marking(here, "command"),
            "diff.own.textconv": marking(here, "textconv"),
            "diff.submodule": "diff",
            "status.submoduleSummary": "true",
            "extensions.partialClone": "origin",
            "core.repositoryFormatVersion": "1",
            "remote.origin.url": str(here),
            "remote.origin.promisor": "true",
            "remote.origin.uploadpack": marking(here, "uploadpack"),
            "remote.other.url": "ssh://nowhere/there",
            "remote.other.promisor": "true",
            "core.sshCommand": marking(here, "ssh"),
            "core.editor": marking(here, "editor"),
        }
        for name, value in settings.items():
            git("-C", str(folder), "config", name, value)
    (here / "hooks").mkdir()
    for hook in ("post-index-change", "fsmonitor-watchman", "reference-transaction"):
        (here / "hooks" / hook).write_text(f"#!/bin/sh\ntouch {here}/ran/{hook}\n")
        (here / "hooks" / hook).chmod(0o755)
    return data


@pytest.mark.parametrize("missing", [False, True])
def test_no_program_is_run_that_the_configuration_of_a_repository_names(
    here: Path, monkeypatch: pytest.MonkeyPatch, missing: bool
) -> None:
    data = a_strangers_repository(here)
    if missing:  # which a promisor is asked for
        tree = git("-C", "data", "rev-parse", "HEAD^{tree}").strip()
        (data / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    monkeypatch.chdir(data)
    found = provenance.provenance_of("a command", diff=True)
    assert not list((here / "ran").iterdir())
    assert len(found["commit"]) == 40
    assert found.get("dirty") is (None if missing else True)
    if not missing:
        assert "+++ b/c.md" in found["diff"]
        assert "a.txt" not in found["diff"]
        assert found["diff_is_whole"] is False


@pytest.mark.parametrize("missing", [False, True])
def test_an_anchor_in_git_notes_runs_no_program_of_the_repository(
    here: Path, monkeypatch: pytest.MonkeyPatch, missing: bool
) -> None:
    data = a_strangers_repository(here)
    (here / "proof.json").write_text("{}")
    chain = Chain(here / "proof.json")
    with chain.open() as log:
        log.append("start", {})
    monkeypatch.chdir(data)
    if missing:  # which a promisor is asked for
        (data / ".git" / "refs" / "notes").mkdir()
        (data / ".git" / "refs" / "notes" / "gym-trace").write_text("1" * 40 + "\n")
        for ask in (lambda: check_anchor(chain, GIT_NOTE, Proof()), lambda: write_anchor(chain, GIT_NOTE)):
            with pytest.raises(InvalidOption, match="git-note: git: "):
                ask()
    else:
        write_anchor(chain, GIT_NOTE)
        check_anchor(chain, GIT_NOTE, proof := Proof())
        assert proof.proved == ["1 of 1 entries of the log are those of the anchor of git-note"]
    assert not list((here / "ran").iterdir())


def test_an_unavoidable_git_filter_leaves_modified_files_unknown(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = a_strangers_repository(here)
    (data / ".gitattributes").write_text("*.txt filter=a=b\n")
    git("-C", "data", "config", "filter.a=b.clean", marking(here, "odd"))
    monkeypatch.chdir(data)
    assert set(provenance.provenance_of("a command", diff=True)) == {"command", "gym_trace", "commit"}
    assert not list((here / "ran").iterdir())


@pytest.mark.parametrize(
    ("changed", "expected"),
    [([], False), (["plain.txt"], True), (["large.bin"], None), (["plain.txt", "large.bin"], True)],
    ids=str,
)
def test_changes_are_known_only_for_files_without_a_filter(
    here: Path, changed: list[str], expected: bool | None
) -> None:
    git("init", "-q")
    git("config", "filter.lfs.clean", "cat")
    (here / ".gitattributes").write_text("*.bin filter=lfs\n")
    for name in ("plain.txt", "large.bin"):
        (here / name).write_text("one")
    git("add", ".gitattributes", "plain.txt", "large.bin")
    git("commit", "-q", "-m", "all")
    for name in changed:
        (here / name).write_text("other")
    assert provenance.provenance_of("a command").get("dirty") is expected


def test_where_no_git_can_be_asked_recording_goes_on(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"command": "pytest", "gym_trace": gym_trace.__version__}
    monkeypatch.setattr(provenance, "script_name", lambda: "pytest")
    for name in ("gone", "hangs", "not executable", "broken"):
        place = here / name
        (place / "bin").mkdir(parents=True)
        monkeypatch.chdir(place)
        monkeypatch.setenv("PATH", str(place / "bin"))
        script = {"hangs": "exec /bin/sleep 60", "broken": "exit 1"}.get(name)
        if script is not None:
            (place / "bin" / "git").write_text(f"#!/bin/sh\n{script}\n")
            (place / "bin" / "git").chmod(0o755)
        if name == "not executable":
            (place / "bin" / "git").write_text("text")
        if name == "gone":
            (place / "bin").rmdir()
            place.rmdir()
        provenance._of_this_process.cache_clear()
        monkeypatch.setattr(provenance, "_GIT_SECONDS", 0.2)
        monkeypatch.setattr(provenance, "_DIFF_SECONDS", 0.2)
        begin = time.monotonic()
        assert {**provenance.current(), "commit": ""} == {**known, "commit": ""}, name
        provenance.provenance_of("a command", diff=True)
        assert time.monotonic() - begin < 40  # and not the minute of a git that hangs


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
@pytest.mark.parametrize("starts", ["in time", "late"])
def test_no_git_is_left_that_waits_for_a_pipe(here: Path, monkeypatch: pytest.MonkeyPatch, starts: str) -> None:
    git("init", "-q")
    os.mkfifo(".git/pipe")
    git("config", "include.path", "pipe")
    started, popen, may_start = [], subprocess.Popen, threading.Event()
    answer = provenance._Git.output

    def opened(*args: Any, **options: Any) -> Any:
        assert starts == "in time" or may_start.wait(60)
        process = popen(*args, **options)
        started.append(process)
        return process

    def answered_at_once(git: Any, deadline: float) -> Any:
        wait_for(lambda: starts == "late" or len(started) == 2)
        return answer(git, 0.0)

    monkeypatch.setattr(provenance.subprocess, "Popen", opened)
    monkeypatch.setattr(provenance._Git, "output", answered_at_once)
    assert "commit" not in provenance.provenance_of("test")
    may_start.set()
    wait_for(lambda: len(started) == 2)
    assert all(process.wait(60) for process in started)


def test_a_trace_of_collect_names_its_policy(tmp_path: Path) -> None:
    collect(CARTPOLE, SeededPolicy, tmp_path, episodes=2, seed=1)
    assert said_of(tmp_path)["command"] == "gym_trace.collect"
    assert said_of(tmp_path)["policy"] == "failing_workers:SeededPolicy"


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
def test_an_argument_that_cannot_be_pickled_raises_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    frame = sys._getframe()
    given: dict[str, Any] = {"make_env": CARTPOLE, "policy": None, name: lambda *_: frame}
    with pytest.raises(InvalidOption, match=f"{name}: not picklable.*frame"):
        collect(directory=tmp_path / "t", episodes=1, **given)
    assert not (tmp_path / "t").exists()


class OneWay:
    """Can be pickled, and not made again, which is what an old cloudpickle makes of a lambda in a newer Python."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


def test_an_argument_that_cannot_be_unpickled_raises_before_workers_start(tmp_path: Path) -> None:
    one_way = OneWay()
    with pytest.raises(InvalidOption, match=r"make_env: not picklable .*not a number"):
        collect(lambda: one_way, directory=tmp_path / "t", episodes=1)
