"""Edits amid hostile files, other processes, and episodes that go on after their end."""

import contextlib
import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from echo_env import EchoEnv
from other_users import HERS, MINE, as_user, everybodys_directory, needs_users
from rings import SCHEMA
from runs import recorded
from trace_contents import contents
from vector_wrapper import TraceRecordingVectorWrapper

from gym_trace import TraceRecordingWrapper, edit, open_trace, verify_trace
from gym_trace.data.origins import ORIGINS, packed_origins
from gym_trace.errors import TraceError, TraceExists
from gym_trace.format import wire
from gym_trace.format.batch_files import BatchFiles
from gym_trace.playback.episode_index import index_of
from gym_trace.storage import local
from gym_trace.storage.exchange import exchange
from gym_trace.storage.local import LocalStorage
from gym_trace.storage.staging import take
from gym_trace.tools.editing import in_place
from gym_trace.tools.editing.in_place import replaced


def killed_after_the_end(directory: Path) -> None:
    """An episode of two steps and, after its end, another, each a run; killed in the next one after these."""
    env = EchoEnv(length=2)
    recording = TraceRecordingWrapper(env, directory.with_name("live"))
    recording.reset(seed=1)
    for _ in range(3):
        recording.step(0)
    step = env.step

    def copying(action: Any) -> Any:
        shutil.copytree(directory.with_name("live"), directory)
        return step(action)

    with mock.patch.object(env, "step", copying):
        recording.step(3)
    recording.close()


def test_a_pending_action_stays_with_its_run_or_goes_with_it(tmp_path: Path) -> None:
    killed_after_the_end(tmp_path / "t")
    trace = open_trace(tmp_path / "t")
    *others, last = [episode.pending_action for episode in trace]
    assert (others, last) == ([None] * len(others), 3)
    for number in range(len(trace)):
        edit.filter(trace, tmp_path / f"{number}", [number])
        (episode,) = open_trace(tmp_path / f"{number}")
        assert episode.pending_action == (3 if number == len(trace) - 1 else None)
    edit.merge([tmp_path / f"{number}" for number in reversed(range(len(trace)))], tmp_path / "back")
    assert contents(tmp_path / "back") == contents(tmp_path / "t")
    assert len(index_of(open_trace(tmp_path / "back")).readers[0].pending) == 1


def test_facts_that_several_set_at_once_are_all_there(tmp_path: Path) -> None:
    recorded(tmp_path / "t", 1)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: edit.annotate(tmp_path / "t", {f"k{i}": i}), range(40)))
    assert open_trace(tmp_path / "t").facts == {f"k{i}": i for i in range(40)}


def left_work(trace: Path) -> Path:
    """Make the work directory of an edit that was killed."""
    work = take(trace.with_name(f".{trace.name}.gym-trace-edit"))
    assert work is not None
    work.release()
    return work.path


@pytest.mark.parametrize("name", [".journal.0.part", "journal", "trace"])
def test_links_where_an_edit_in_place_works_are_not_followed(tmp_path: Path, name: str) -> None:
    recorded(tmp_path / "t", 2)
    expected = contents(tmp_path / "t")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("mine")
    left_work(tmp_path / "t")
    (tmp_path / ".t.gym-trace-edit" / name).symlink_to(tmp_path / ("mine" if name == "trace" else "mine/file"))
    edit.compact(tmp_path / "t", in_place=True)
    assert (tmp_path / "mine/file").read_text() == "mine"
    assert contents(tmp_path / "t") == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "t"]


@pytest.mark.parametrize("content", ["[]", "{}", '{"inode": 1}', '{"inode": INODE, "seen": [1]}', "[" * 100_000])
def test_an_invalid_journal_is_ignored(tmp_path: Path, content: str) -> None:
    recorded(tmp_path / "t", 2)
    old = left_work(tmp_path / "t") / "trace"
    old.mkdir()
    journal = old.with_name("journal")
    os.mkfifo(journal)
    with pytest.raises(OSError, match="no regular file"):
        edit.compact(tmp_path / "t", in_place=True)
    journal.unlink()
    journal.write_text(content.replace("INODE", str(old.stat().st_ino)))
    edit.compact(tmp_path / "t", in_place=True)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def planted(trace: Path) -> Path:
    """Plant a work directory whose journal puts a foreign file into the trace."""
    work = left_work(trace)
    (work / "trace").mkdir()
    batch = next(trace.glob("*.gtb"))
    (work / "trace" / batch.name).write_bytes(b"not yours")
    (work / "journal").write_text(json.dumps({"inode": (work / "trace").stat().st_ino, "seen": {}}))
    return work


@pytest.mark.skipif(os.name != "posix", reason="needs users and permissions")
@pytest.mark.parametrize("mode", [0o755, 0o770, 0o707, 0o1777])
def test_a_work_directory_that_others_own_or_can_write_to_is_not_trusted(tmp_path: Path, mode: int) -> None:
    recorded(tmp_path / "t", 2)
    expected = contents(tmp_path / "t")
    work = planted(tmp_path / "t")
    work.chmod(mode)
    if mode in (0o755, 0o770):
        if os.geteuid():
            pytest.skip("needs other users")
        os.chown(work, 12345 if mode == 0o755 else -1, 12345)
    words = r"belongs to another user \(uid \d+\)" if mode == 0o755 else "writable by others"
    with pytest.raises(TraceError, match=rf"t\.gym-trace-edit: {words}"):
        edit.compact(tmp_path / "t", in_place=True)
    assert contents(tmp_path / "t") == expected
    assert (work / "journal").exists()
    shutil.rmtree(work)
    umask = os.umask(0)
    try:
        edit.compact(tmp_path / "t", in_place=True)  # whatever the umask: its own directory is the user's alone
    finally:
        os.umask(umask)
    assert contents(tmp_path / "t") == expected


def compact_in_place(trace: Path) -> None:
    edit.compact(trace, in_place=True)


@needs_users
@pytest.mark.parametrize("shared", ["..", ".", "logs/deep"])
def test_nothing_is_edited_in_place_where_another_user_may_put_links(tmp_path: Path, shared: str) -> None:
    recorded(tmp_path / "t", 2)
    compact_in_place(tmp_path / "t")  # once here: other users cannot import
    with everybodys_directory() as place:
        place.chmod(0o755)
        mine = place / "mine"
        shutil.copytree(tmp_path / "t", mine / "t")
        (mine / "t/logs/deep").mkdir(parents=True)
        for path in (mine, *mine.rglob("*")):
            os.chown(path, MINE, MINE)
        before = sorted(mine.rglob("*"))
        for mode, group, problem in (
            (0o777, MINE, "writable by others"),
            (0o775, HERS, "writable by others"),
            (0o755, MINE, ""),
        ):
            directory = mine / "t" / shared
            os.chown(directory, MINE, group)
            directory.chmod(mode)
            said = as_user(MINE, lambda: compact_in_place(mine / "t"))
            if problem:
                assert f"InvalidOption: {directory.resolve()}: {problem}, so this trace cannot be edited" in said
                assert sorted(mine.rglob("*")) == before
            else:
                assert said == ""
        os.chown(mine, HERS, HERS)
        mine.chmod(0o1777)
        assert f"belongs to another user (uid {HERS})" in as_user(MINE, lambda: compact_in_place(mine / "t"))
        os.chown(mine, 0, 0)  # as /tmp is
        assert as_user(MINE, lambda: compact_in_place(mine / "t")) == ""


@pytest.mark.parametrize("to", ["away", "other"])
def test_an_edit_in_place_survives_a_parent_replaced_by_a_link(tmp_path: Path, to: str) -> None:
    trace = tmp_path / "above" / "in" / "t"
    recorded(trace, 2)
    recorded(tmp_path / "other" / "in" / "t", 2)
    (tmp_path / "other/in/.t.gym-trace-edit/trace").mkdir(parents=True)
    before = {path: path.lstat().st_ino for path in (tmp_path / "other").rglob("*")}

    def edit_and_rename() -> None:
        with replaced(trace) as fresh:
            recorded(fresh, 5)
            (tmp_path / "above").rename(tmp_path / "away")
            (tmp_path / "above").symlink_to(tmp_path / to)

    with pytest.raises(TraceError, match="nothing was changed") if to == "other" else contextlib.nullcontext():
        edit_and_rename()
    assert len(open_trace(tmp_path / "away/in/t")) == (2 if to == "other" else 5)
    assert {path: path.lstat().st_ino for path in (tmp_path / "other").rglob("*")} == before
    assert os.listdir(tmp_path / "away/in") == ["t"]


def test_facts_confirmed_while_a_trace_is_replaced_are_all_there(tmp_path: Path) -> None:
    recorded(tmp_path / "t", 2)
    threads: list[threading.Thread] = []

    def annotate(**facts: str) -> None:
        threads.append(thread := threading.Thread(target=edit.annotate, args=(tmp_path / "t", facts)))
        thread.start()
        thread.join(0.2)  # as far as it comes: it may wait for the edit

    def exchanging(one: Any, other: Any) -> None:
        if os.path.realpath(other) == str(tmp_path / "t"):
            annotate(before="1")
        exchange(one, other)

    def tidying(work: Path, place: Path) -> None:
        if (work / "journal").exists():
            annotate(after="2")
        tidy(work, place)

    tidy = in_place._tidy
    with mock.patch.object(in_place, "exchange", exchanging), mock.patch.object(in_place, "_tidy", tidying):
        edit.compact(tmp_path / "t", in_place=True)
    for thread in threads:
        thread.join()
    assert open_trace(tmp_path / "t").facts == {"before": "1", "after": "2"}


def test_a_lock_that_is_kept_makes_an_annotation_fail_and_not_get_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(tmp_path / "t", 1)
    monkeypatch.setattr(local, "_LOCK_TIMEOUT", 0.1)
    with local.alone(tmp_path / "t"), pytest.raises(TraceError, match="keeps it locked; try again"):
        edit.annotate(tmp_path / "t", {"author": "Ada"})
    edit.annotate(tmp_path / "t", {"author": "Ada"})


def test_facts_that_a_killed_process_left_unfinished_are_removed(tmp_path: Path) -> None:
    recorded(tmp_path / "t", 1)
    mine = tmp_path / "t/facts.json.mine.part"
    for left in (tmp_path / "t/facts.json.0123abcd.part", mine):
        left.write_text("half")
    edit.annotate(tmp_path / "t", {"author": "Ada"})
    assert list((tmp_path / "t").glob("facts.json*.part")) == [mine]


def test_few_bytes_do_not_become_many_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "TABLE_ROWS", 1 << 15)
    for number in range(3):
        schema = {**SCHEMA, "writer": f"w{number}", "format": [1, 2], ORIGINS: packed_origins([{}] * 1500)}
        writer = BatchFiles(LocalStorage(tmp_path), schema, level=1, fsync=False)
        writer.batch()
        writer.close({})
    trace = open_trace(tmp_path)
    assert len(index_of(trace).readers) == 1500 + 2
    assert ["exceeds the limit for a trace of this size" in damage.problem for damage in trace.damage] == [True] * 2


def test_runs_that_begin_with_the_same_step_are_distinguished(tmp_path: Path) -> None:
    env = EchoEnv(length=3)
    env.raises_after = {2}
    recording = TraceRecordingWrapper(env, tmp_path / "t")
    recording.reset(seed=1)
    for _ in range(5):
        try:
            recording.step(1)
        except ValueError:
            continue
    recording.close()
    starts = open_trace(tmp_path / "t").episodes["first_step"].tolist()
    assert len(set(starts)) < len(starts)
    edit.filter(tmp_path / "t", tmp_path / "part", np.arange(len(starts))[1:])
    report = edit.merge([tmp_path / "t", tmp_path / "part"], tmp_path / "both")
    assert (report.episodes, report.duplicates) == (len(starts), len(starts) - 1)


def test_a_copy_of_a_running_trace_does_not_hide_an_episode_end(tmp_path: Path) -> None:
    recording = TraceRecordingWrapper(EchoEnv(), tmp_path / "t")
    recording.reset(seed=1)
    recording.step(1)
    recording.flush()
    shutil.copytree(tmp_path / "t", tmp_path / "early")
    recording.close()
    with pytest.raises(TraceError, match=r"with different .*outcome"):
        edit.merge([tmp_path / "early", tmp_path / "t"], tmp_path / "both")


def test_files_that_appear_in_the_destination_stay_there(tmp_path: Path) -> None:
    recorded(tmp_path / "t", 2)

    def arrive(done: int, total: int) -> None:
        (tmp_path / "new").mkdir(exist_ok=True)
        (tmp_path / "new/mine").write_text("mine")

    with pytest.raises(TraceExists, match="new: was created by another process"):
        edit.merge([tmp_path / "t"], tmp_path / "new", on_progress=arrive)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.parent.name != "t") == ["mine", "new", "t"]


def test_verify_skips_a_lane_whose_previous_episode_was_dropped(tmp_path: Path) -> None:
    gymnasium = pytest.importorskip("gymnasium", "1.1")
    lanes = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    envs = TraceRecordingVectorWrapper(lanes, tmp_path / "t")
    envs.reset(seed=5)
    for _ in range(80):
        envs.step(np.array([1, 1]))
    envs.close()
    assert {verdict.verdict for verdict in verify_trace(tmp_path / "t")} == {"identical"}
    trace = open_trace(tmp_path / "t")
    edit.filter(trace, tmp_path / "part", (trace.episodes["lane"] == 1) | (np.arange(len(trace)) % 4 == 0))
    assert {verdict.verdict for verdict in verify_trace(tmp_path / "part")} == {"identical", "unverifiable"}
