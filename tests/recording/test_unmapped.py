"""File systems without safe mappings: steps are in ordinary memory, and written every second."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from runs import acted, recorder_of
from zoo import CountingEnv

from gym_trace import TraceRecordingWrapper, check_trace, open_trace
from gym_trace.errors import RecordingError


def test_without_a_mapping_all_is_recorded_and_it_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gym_trace.storage.local._SAFE_TO_MAP", frozenset())
    with caplog.at_level(logging.WARNING, "gym_trace"):
        env = acted(TraceRecordingWrapper(CountingEnv(), tmp_path), *["reset", 1, "flush"] * 3)
    assert len(caplog.records) == 1
    assert "can lose the last second" in caplog.text
    assert not list(tmp_path.glob("*.ring"))
    assert [len(episode) for episode in open_trace(tmp_path)] == [1, 1, 1]
    assert env._recorder.flush_seconds == 1.0
    env.close()
    assert [episode.outcome for episode in open_trace(tmp_path)] == ["cut", "cut", "closed"]


def test_without_room_for_a_thread_the_caller_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.recording.background._HEADROOM", 1 << 62)
    monkeypatch.setattr(threading.Thread, "start", lambda _: pytest.fail("a thread was started"))
    env = TraceRecordingWrapper(CountingEnv(), tmp_path)
    for number in range(3):
        acted(env, "reset", 1, "flush")
        assert [len(episode) for episode in open_trace(tmp_path)] == [1] * (number + 1)
    env.close()
    parts = [(len(episode), episode.outcome) for episode in open_trace(tmp_path)]
    assert parts == [(1, "cut"), (1, "cut"), (1, "closed")]


@pytest.mark.parametrize("lanes", [False, True])
def test_a_ring_is_made_as_soon_as_there_are_file_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lanes: bool
) -> None:
    env, action = recorder_of(CountingEnv, tmp_path, lanes, uid="w")

    def short(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "gym_trace"):
        patch.setattr("gym_trace.storage.local.open", short, raising=False)  # of the list of mounts
        acted(env, "reset", action, "flush", action)
    assert len(caplog.records) == 1
    assert "no file descriptors left" in caplog.text
    assert not (tmp_path / "w.ring").exists()
    env.flush()
    assert (tmp_path / "w.ring").exists()
    assert env._recorder.flush_seconds == 10.0
    env.step(action)
    shutil.copytree(tmp_path, tmp_path / "copy")  # as if the process had been killed now
    assert sum(map(len, open_trace(tmp_path / "copy"))) == 3
    env.close()
    assert not (tmp_path / "w.ring").exists()


def test_a_ring_that_cannot_be_removed_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_: object, name: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", name)

    monkeypatch.setattr("gym_trace.storage.local.LocalStorage.remove", denied)
    env = acted(TraceRecordingWrapper(CountingEnv(), tmp_path, uid="w"), "reset", 0)
    with pytest.warns(UserWarning, match="w.ring'; all its steps are saved"):
        env.close()
    env.close()
    assert [(len(episode), episode.outcome) for episode in open_trace(tmp_path)] == [(1, "closed")]
    assert check_trace(tmp_path).damages == []


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_file_that_cannot_be_closed_is_a_recording_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_error: str
) -> None:
    env = TraceRecordingWrapper(CountingEnv(), tmp_path, on_error=on_error)
    close = os.close

    def fails(fd: int) -> None:
        close(fd)
        raise OSError(errno.EIO, "Input/output error")

    raised: Any = pytest.raises(RecordingError) if on_error == "raise" else pytest.warns(RuntimeWarning)
    with monkeypatch.context() as patch, raised:
        patch.setattr(os, "close", fails)
        env.reset()
    acted(env, "reset", 0, "close")
