"""Edits amid hostile files, other processes, and episodes that go on after their end."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from asking import TellingEnv
from edited import contents
from rings import SCHEMA
from runs import recorded
from vectors import TraceRecordingVectorWrapper

from gym_trace import TraceRecordingWrapper, edit, open_trace, verify_trace
from gym_trace.errors import TraceError, TraceExists
from gym_trace.format import wire
from gym_trace.format.batch_files import BatchFiles
from gym_trace.model.origins import ORIGINS, packed_origins
from gym_trace.storage.local import LocalStorage


def killed_after_the_end(directory: Path) -> None:
    """An episode of two steps and, after its end, another, each a run; killed in the next one after these."""
    env = TellingEnv(length=2)
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


def test_an_action_that_was_not_answered_stays_with_its_run_or_goes_with_it(tmp_path: Path) -> None:
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
    assert len(open_trace(tmp_path / "back").readers[0].pending) == 1


def test_facts_that_several_set_at_once_are_all_there(tmp_path: Path) -> None:
    recorded(tmp_path / "t", 1)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: edit.annotate(tmp_path / "t", {f"k{i}": i}), range(40)))
    assert open_trace(tmp_path / "t").facts == {f"k{i}": i for i in range(40)}


@pytest.mark.parametrize("name", ["journal.part", "trace"])
def test_links_where_an_edit_in_place_works_are_not_followed(tmp_path: Path, name: str) -> None:
    recorded(tmp_path / "t", 2)
    expected = contents(tmp_path / "t")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("mine")
    (tmp_path / ".t.gym-trace-edit").mkdir(0o700)
    (tmp_path / ".t.gym-trace-edit" / name).symlink_to(tmp_path / ("mine" if name == "trace" else "mine/file"))
    edit.compact(tmp_path / "t", in_place=True)
    assert (tmp_path / "mine/file").read_text() == "mine"
    assert contents(tmp_path / "t") == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "t"]


@pytest.mark.parametrize("content", ["[]", "{}", '{"inode": 1}', '{"inode": INODE, "seen": [1]}', "[" * 100_000])
def test_an_invalid_journal_is_ignored(tmp_path: Path, content: str) -> None:
    recorded(tmp_path / "t", 2)
    old = tmp_path / ".t.gym-trace-edit/trace"
    old.mkdir(parents=True)
    old.parent.chmod(0o700)
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
    work = trace.with_name(f".{trace.name}.gym-trace-edit")
    (work / "trace").mkdir(parents=True)
    batch = next(trace.glob("*.gtb"))
    (work / "trace" / batch.name).write_bytes(b"not yours")
    (work / "journal").write_text(json.dumps({"inode": (work / "trace").stat().st_ino, "seen": {}}))
    return work


@pytest.mark.skipif(os.name != "posix", reason="needs users and permissions")
@pytest.mark.parametrize("mode", [0o755, 0o770, 0o707, 0o1777])
def test_a_work_directory_that_others_own_or_can_write_to_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    recorded(tmp_path / "t", 2)
    expected = contents(tmp_path / "t")
    work = planted(tmp_path / "t")
    work.chmod(mode)
    with monkeypatch.context() as patch:
        if mode == 0o755 and (user := os.geteuid()):
            patch.setattr(os, "geteuid", lambda: user + 1)
        elif mode == 0o755:
            os.chown(work, 12345, 12345)
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


def test_few_bytes_do_not_become_many_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "TABLE_ROWS", 1 << 16)
    for number in range(3):
        schema = {**SCHEMA, "writer": f"w{number}", "format": [1, 2], ORIGINS: packed_origins([{}] * 1500)}
        writer = BatchFiles(LocalStorage(tmp_path), schema, level=1, fsync=False)
        writer.batch()
        writer.close({})
    trace = open_trace(tmp_path)
    assert len(trace.readers) == 1500 + 2
    assert ["exceeds the limit for a trace of this size" in damage.problem for damage in trace.damage] == [True] * 2


def test_runs_that_begin_with_the_same_step_are_distinguished(tmp_path: Path) -> None:
    env = TellingEnv(length=3)
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


def test_a_copy_of_a_trace_that_was_still_recorded_does_not_hide_how_an_episode_ended(tmp_path: Path) -> None:
    recording = TraceRecordingWrapper(TellingEnv(), tmp_path / "t")
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


def test_an_episode_of_a_lane_whose_forerunner_was_left_out_is_not_said_to_differ(tmp_path: Path) -> None:
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
