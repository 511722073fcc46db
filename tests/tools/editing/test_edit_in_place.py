"""Edits in place: the old trace or the new one is there, whole, with all that lies beside it, killed at any moment."""

import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
import pytest
from long_tests import LONG
from runs import record_lengths, recorded
from scripted_env import CountingEnv
from shell import ok
from trace_contents import check_clean, contents

from gym_trace import TraceRecordingWrapper, collect, edit, open_trace
from gym_trace.errors import InvalidOption, TraceError, TraceNotFound
from gym_trace.storage import local
from gym_trace.storage.exchange import exchange
from gym_trace.tools.editing.in_place import replaced

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs renameat2")
MOMENTS, WRITERS = 100 if LONG else 12, 3


def make_trace(directory: Path) -> None:
    """A trace of several writers, with what people keep beside one."""
    for number in range(WRITERS):
        record_lengths(directory, [3, 4], on_exist="append", metadata=number)
    (directory / "notes.txt").write_text("notes")
    (directory / "logs" / "deep").mkdir(parents=True)
    (directory / "logs" / "deep" / "events").write_text("events")
    (directory / "link").symlink_to("notes.txt")
    edit.annotate(directory, {"author": "Ada"})


def check_beside(directory: Path) -> None:
    assert (directory / "notes.txt").read_text() == "notes"
    assert (directory / "logs" / "deep" / "events").read_text() == "events"
    assert os.readlink(directory / "link") == "notes.txt"
    assert open_trace(directory).facts == {"author": "Ada"}


def replace_with(directory: Path, then: Callable[[Path], Any]) -> None:
    with replaced(directory) as fresh:
        recorded(fresh)
        then(fresh)


def in_child(action: Callable[[], Any], die_at: int) -> int:
    """Does it in another process, which kills itself at some event of Python's; returns how many there were, or -1."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        seen = 0

        def hook(event: str, args: Any) -> None:
            nonlocal seen
            seen += 1
            if seen == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(hook)
            action()
            os.write(write, str(seen).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    said = os.read(read, 100)
    os.close(read)
    return int(said) if said else -1


def test_nothing_is_lost_by_a_kill_at_any_moment_of_an_edit_in_place(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "t"
    make_trace(source)
    expected = contents(source)
    shutil.copytree(source, target, symlinks=True)
    edit.compact(target, in_place=True)  # once here, so that children have nothing to import
    check_clean(target, len(expected))
    shutil.rmtree(target)
    shutil.copytree(source, target, symlinks=True)
    total = in_child(lambda: edit.compact(target, in_place=True), -1)
    assert total > 2 * MOMENTS
    seen = set()
    for moment in np.random.default_rng(0).choice(np.arange(1, total), MOMENTS, replace=False).tolist():
        shutil.rmtree(target)
        shutil.copytree(source, target, symlinks=True)
        assert in_child(lambda: edit.compact(target, in_place=True), moment) == -1
        batches = len(list(target.glob("*.gtb")))
        assert batches in (1, WRITERS)
        seen.add(batches)
        assert contents(target) == expected
        check_beside(target)
        edit.compact(target, in_place=True)
        check_clean(target, len(expected))  # and nothing hidden is left beside it
        assert contents(target) == expected
        check_beside(target)
    assert seen == {1, WRITERS}


def test_every_file_system_event_from_the_exchange_on_leaves_the_new_trace(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "t"
    make_trace(source)
    expected = contents(source)
    shutil.copytree(source, target, symlinks=True)
    for moment in range(1, 1000, 1 if LONG else 2):

        def edited_and_killed(moment: int = moment) -> None:
            def exchanged(one: Any, other: Any) -> None:
                exchange(one, other)
                if os.path.realpath(other) == str(target):
                    left = moment

                    def hook(event: str, args: Any) -> None:
                        nonlocal left
                        left -= 1
                        if not left:
                            os.kill(os.getpid(), signal.SIGKILL)

                    sys.addaudithook(hook)

            with mock.patch("gym_trace.tools.editing.in_place.exchange", exchanged):
                edit.compact(target, in_place=True)

        if in_child(edited_and_killed, -1) != -1:
            break
        assert len(list(target.glob("*.gtb"))) == 1
        check_beside(target)
    assert moment > 20
    assert contents(target) == expected


def test_a_trace_that_is_recorded_into_during_the_edit_is_not_replaced(tmp_path: Path) -> None:
    make_trace(tmp_path / "t")
    expected = contents(tmp_path / "t")
    with pytest.raises(TraceError, match="recording was added during the edit"):
        replace_with(tmp_path / "t", lambda fresh: recorded(tmp_path / "t", on_exist="append"))
    assert expected.items() < contents(tmp_path / "t").items()
    env = TraceRecordingWrapper(CountingEnv(), tmp_path / "t", on_exist="append")
    env.reset()
    with pytest.raises(TraceError, match="still recording"):
        edit.compact(tmp_path / "t", in_place=True)
    env.close()
    assert not list(tmp_path.glob(".*"))
    trace = open_trace(tmp_path / "t")
    recorded(tmp_path / "t", on_exist="append")
    with pytest.raises(TraceError, match="changed since it was opened"):
        edit.compact(trace, in_place=True)
    check_beside(tmp_path / "t")


def test_files_that_arrive_during_the_exchange_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "t"
    make_trace(target)
    expected = contents(target)
    monkeypatch.setattr(local, "_LOCK_TIMEOUT", 0.0)  # recorders wait for the end of the edit, but not for ever

    def late(one: Any, other: Any) -> None:
        if os.path.realpath(other) == str(target):
            record_lengths(target, [6], on_exist="append")
            (target / "logs" / "new").write_text("late")
            (target / "notes.txt").unlink()
            (target / "notes.txt").write_text("other notes")
        exchange(one, other)

    with mock.patch("gym_trace.tools.editing.in_place.exchange", late):
        edit.compact(target, in_place=True)
    found = contents(target)
    assert expected.items() < found.items()
    assert len(found) == len(expected) + 1
    assert (target / "logs" / "new").read_text() == "late"
    assert (target / "notes.txt").read_text() == "other notes"
    check_clean(target)


def test_a_failed_edit_leaves_the_trace_unchanged(tmp_path: Path) -> None:
    make_trace(tmp_path / "t")
    before = {path: path.lstat().st_ino for path in (tmp_path / "t").rglob("*")}
    with pytest.raises(ZeroDivisionError):
        replace_with(tmp_path / "t", lambda fresh: 1 // 0)
    full = OSError(errno.ENOSPC, "no space left on device")
    with (
        mock.patch("gym_trace.tools.editing.in_place.exchange", side_effect=[None, full]),
        pytest.raises(OSError, match="spac"),
    ):
        edit.compact(tmp_path / "t", in_place=True)
    assert {path: path.lstat().st_ino for path in (tmp_path / "t").rglob("*")} == before
    assert not list(tmp_path.glob(".*"))


def test_a_missing_renameat2_fails_before_the_work_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_trace(tmp_path / "t")
    missing = OSError(errno.ENOTSUP, "this system cannot swap two directories atomically")
    with (
        mock.patch("gym_trace.tools.editing.in_place.exchange", side_effect=missing),
        mock.patch("gym_trace.tools.editing.compact.rewrite", side_effect=AssertionError),
        pytest.raises(InvalidOption, match="write to a new directory instead"),
    ):
        edit.compact(tmp_path / "t", in_place=True)
    monkeypatch.chdir(tmp_path / "t" / "logs")
    with pytest.raises(InvalidOption, match="is the current directory"):
        edit.compact(tmp_path / "t", in_place=True)
    monkeypatch.chdir(tmp_path)
    with mock.patch("os.path.ismount", return_value=True), pytest.raises(InvalidOption, match="mount point"):
        edit.compact(tmp_path / "t", in_place=True)
    with pytest.raises(TraceNotFound), replaced(tmp_path):
        pass
    with pytest.raises(InvalidOption, match="either a new directory"):
        edit.compact(tmp_path / "t", tmp_path / "n", in_place=True)
    assert not list(tmp_path.glob(".*"))


def test_two_processes_do_not_edit_one_trace_at_a_time(tmp_path: Path) -> None:
    make_trace(tmp_path / "t")
    with replaced(tmp_path / "t") as fresh:
        shutil.copytree(tmp_path / "t", fresh, dirs_exist_ok=True, symlinks=True)
        with pytest.raises(TraceError, match="another process edits it"):
            edit.compact(tmp_path / "t", in_place=True)
    check_beside(tmp_path / "t")


def test_a_link_to_a_trace_is_followed_and_permissions_stay(tmp_path: Path) -> None:
    make_trace(tmp_path / "real" / "t")
    (tmp_path / "real" / "t").chmod(0o750)
    (tmp_path / "t").symlink_to(tmp_path / "real" / "t")
    edit.compact(tmp_path / "t", in_place=True)
    assert (tmp_path / "t").is_symlink()
    assert (tmp_path / "real" / "t").stat().st_mode & 0o777 == 0o750
    check_beside(tmp_path / "t")
    assert len(list((tmp_path / "t").glob("*.gtb"))) == 1


@pytest.mark.usefixtures("forked_workers")
def test_a_run_that_was_compacted_is_resumed_to_the_same_episodes(tmp_path: Path) -> None:
    make_env = partial(gymnasium.make, "CartPole-v1")
    for episodes in (9, 14):
        collect(make_env, directory=tmp_path / "t", episodes=episodes, workers=2, seed=5, resume=episodes > 9)
        edit.compact(tmp_path / "t", in_place=True)
    result = collect(make_env, directory=tmp_path / "t", episodes=20, workers=1, resume=True)
    assert (result.new_episodes, result.episodes) == (6, 20)
    collect(make_env, directory=tmp_path / "whole", episodes=20, seed=5)
    lengths = [{e.seed: len(e) for e in open_trace(place)} for place in (tmp_path / "t", tmp_path / "whole")]
    assert lengths[0] == lengths[1]
    assert len(lengths[0]) == 20


def test_a_filter_in_place_keeps_what_was_chosen_and_what_lies_beside(tmp_path: Path) -> None:
    make_trace(tmp_path / "t")
    expected = contents(tmp_path / "t")
    trace = open_trace(tmp_path / "t")
    report = edit.filter(trace[trace.episodes["steps"] == 4], in_place=True)
    assert (report.destination, report.episodes) == (trace.directory, WRITERS)
    found = contents(tmp_path / "t")
    assert {key: expected[key] for key in found} == found
    check_clean(tmp_path / "t", WRITERS)
    check_beside(tmp_path / "t")
    assert ok("edit", "filter", tmp_path / "t", "--in-place", "--limit", "1").exit_code == 0
    check_clean(tmp_path / "t", 1)
