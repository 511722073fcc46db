"""Staged files and directories appear whole; leftovers of killed processes are removed by the next run of the same."""

import contextlib
import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from runs import recorded

from gym_trace.storage import local, staging
from gym_trace.storage.staging import new_directory, new_file, remove_left, replaced_directory, replaced_file

needs_processes = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and locks")


def write_half(target: Path) -> None:
    with replaced_file(target) as staged:
        staged.write_text("half")
        raise KeyboardInterrupt


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    target.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write_half(target)
    assert (target.read_text(), os.listdir(tmp_path)) == ("old", ["report.json"])
    with replaced_file(target) as staged:
        staged.write_text("new")
        assert target.read_text() == "old"
    assert (target.read_text(), os.listdir(tmp_path)) == ("new", ["report.json"])


def killed_within(staged_as: Callable[[Path], Any], target: Path) -> None:
    """Make something in another process, which is killed when half is written."""
    child = os.fork()
    if not child:
        with staged_as(target) as staged:
            (staged / "half" if staged.is_dir() else staged).write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


@contextlib.contextmanager
def replaced_made(target: Path) -> Iterator[Path]:
    with replaced_directory(target) as staged:
        staged.mkdir()
        yield staged


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_directory_is_replaced_completely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool) -> None:
    if not exchanges:
        missing = OSError(errno.ENOTSUP, "this system cannot swap two directories atomically")
        monkeypatch.setattr(staging, "exchange", mock.Mock(side_effect=missing))
        (tmp_path / "t").mkdir()
    for name in ("old", "new"):
        with replaced_made(tmp_path / "t") as staged:
            (staged / name).write_text(name)
        assert os.listdir(tmp_path) == ["t"]
        assert os.listdir(tmp_path / "t") == [name]


def test_an_error_of_the_directory_names_the_requested_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / ".t.0.part"))
    monkeypatch.setattr(staging, "work_beside", mock.Mock(side_effect=refused))
    with pytest.raises(PermissionError) as raised, replaced_file(tmp_path / "t"):
        pass
    assert raised.value.filename == str(tmp_path / "t")


@needs_processes
@pytest.mark.parametrize("staged_as", [new_file, new_directory, replaced_file, replaced_made])
def test_leftovers_of_killed_processes_are_removed_by_the_next_same_run(
    tmp_path: Path, staged_as: Callable[[Path], Any]
) -> None:
    def write(staged: Path) -> None:
        (staged / "content" if staged.is_dir() else staged).write_text("whole")

    foreign = tmp_path / ".t.1.part"  # not marked as one of ours
    (foreign / "t").mkdir(parents=True)
    killed_within(staged_as, tmp_path / "another")
    killed_within(staged_as, tmp_path / "t")
    assert stat.S_IMODE((tmp_path / ".t.0.part").stat().st_mode) == 0o700
    with staged_as(tmp_path / "t") as staged:
        write(staged)
        killed_within(staged_as, tmp_path / "t")
    assert not (tmp_path / "t/half").exists()
    assert {*tmp_path.glob(".*")} == {foreign, *(tmp_path / f".{name}.part" for name in ("another.0", "t.2"))}
    (shutil.rmtree if (tmp_path / "t").is_dir() else os.unlink)(tmp_path / "t")
    with staged_as(tmp_path / "t") as staged:
        write(staged)
    assert {*tmp_path.glob(".*")} == {foreign, tmp_path / ".another.0.part"}
    (shutil.rmtree if (tmp_path / "t").is_dir() else os.unlink)(tmp_path / "t")
    remove_left(tmp_path)
    assert [*tmp_path.iterdir()] == [foreign]


@needs_processes
def test_the_staged_files_of_a_living_process_are_left_alone(tmp_path: Path) -> None:
    with contextlib.ExitStack() as others:
        made = [others.enter_context(replaced_file(tmp_path / "t")) for _ in range(10)]
        for number, staged in enumerate(made):
            staged.write_text(str(number))
        killed_within(replaced_file, tmp_path / "t")
        with replaced_file(tmp_path / "t") as mine:
            mine.write_text("mine")
        remove_left(tmp_path)
        assert [staged.read_text() for staged in made] == list("0123456789")
        assert (tmp_path / "t").read_text() == "mine"
    assert (tmp_path / "t").read_text() == "0"
    left = [path for path in tmp_path.glob(".t.*") if path.name not in {f".t.{slot}.part" for slot in range(8)}]
    assert len(left) <= 1  # the directory of the killed edit has a random name: all 8 known names are taken


@needs_processes
@pytest.mark.skipif(sys.platform != "linux", reason="needs paths of descriptors")
@pytest.mark.parametrize("staged_as", [new_file, new_directory, replaced_file, replaced_made])
def test_a_link_in_place_of_a_work_directory_is_not_followed(tmp_path: Path, staged_as: Callable[[Path], Any]) -> None:
    shared, home = tmp_path / "shared", tmp_path / "home"
    for folder in (shared, home, home / "t"):
        folder.mkdir()
    shared.chmod(0o777)
    (home / "t" / "precious").touch()
    with staged_as(shared / "t") as staged:
        (work,) = shared.glob(".t*")
        work.rename(shared / "stolen")
        work.symlink_to(home)
        (staged / "content" if staged.is_dir() else staged).write_text("whole")
    assert [one.name for one in home.rglob("*")] == ["t", "precious"]
    made = shared / "t"
    assert (made / "content" if made.is_dir() else made).read_text() == "whole"


@pytest.mark.skipif(sys.platform != "linux", reason="needs paths of descriptors")
def test_a_foreign_directory_named_as_a_work_directory_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, private = tmp_path / "shared", tmp_path / "private"
    shared.mkdir()
    shared.chmod(0o777)
    private.mkdir(0o700)
    (private / "precious").touch()
    mkdir = Path.mkdir

    def swapped(path: Path, *args: Any, **options: Any) -> None:
        mkdir(path, *args, **options)
        if path.parent == shared and private.exists():
            path.rename(shared / "stolen")
            private.rename(path)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", swapped)
        with replaced_file(shared / "t") as staged:
            staged.write_text("whole")
    assert [path.parent.name for path in shared.rglob("precious")] == [".t.0.part"]
    assert (shared / "t").read_text() == "whole"


def test_git_sees_nothing_of_what_a_killed_process_left(tmp_path: Path) -> None:
    git = ("git", "-C", str(tmp_path))
    subprocess.run([*git, "init", "-q"], check=True)
    killed_within(new_directory, tmp_path / "golden")
    said = subprocess.run([*git, "status", "--porcelain", "--untracked-files=all"], check=True, capture_output=True)
    assert said.stdout == b""


@pytest.mark.skipif(os.name != "posix", reason="needs pipes")
def test_a_pipe_among_what_is_made_raises_and_stalls_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no regular file"), new_directory(tmp_path / "t") as staged:
        os.mkfifo(staged / "pipe")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.name != "posix", reason="needs locks")
def test_a_manifest_locked_by_a_reader_fails_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_LOCK_TIMEOUT", 0.1)
    kept: list[int] = []
    os_open = os.open

    def opened(path: Any, flags: int, *args: Any) -> int:
        fd = os_open(path, flags, *args)
        if str(path).endswith("manifest.jsonl") and flags & os.O_EXCL:
            kept.append(os_open(path, os.O_RDONLY))
            assert local.lock(kept[-1])
        return fd

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opened)
        with pytest.raises(OSError, match="perhaps a reader, holds its lock"):
            recorded(tmp_path / "t")
    os.close(kept[0])
    assert not list((tmp_path / "t").glob("*"))
    recorded(tmp_path / "t")
