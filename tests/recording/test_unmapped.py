"""File systems without safe mappings: steps are in ordinary memory, and written every second."""

import contextlib
import errno
import logging
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import acted, recorder_of
from scripted_env import CountingEnv

from gym_trace import TraceRecordingWrapper, check_trace, open_trace
from gym_trace.errors import RecordingError
from gym_trace.format.ring.memory import Ring


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


def test_memory_without_a_mapping_grows_with_all_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.storage.local._SAFE_TO_MAP", frozenset())
    monkeypatch.setattr("gym_trace.recording.recorder._UNMAPPED_SECONDS", 1e6)
    with TraceRecordingWrapper(CountingEnv(length=3000), tmp_path, flush_seconds=1e6) as env:
        env.reset(seed=0)
        for _ in range(3000):
            env.step(1)
    (episode,) = open_trace(tmp_path)
    assert episode.observations[:, 0].tolist() == list(range(3001))


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
        patch.setattr("gym_trace.storage.local.open", short, raising=False)  # opens the list of mounts
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


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Prevent the process from opening files inside the block; what it closes there it can open again."""
    before, held = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("lanes", [False, True])
def test_no_descriptor_left_at_the_first_step_loses_no_step(tmp_path: Path, lanes: bool) -> None:
    def lengths(name: str) -> list[int]:
        return [len(episode) for episode in open_trace(tmp_path / name)]

    for name in ("usual", "short"):
        env, action = recorder_of(CountingEnv, tmp_path / name, lanes, uid="w")
        with no_descriptors() if name == "short" else contextlib.nullcontext():
            for _ in range(3):
                acted(env, "reset", *[action] * 50, "flush")
        shutil.copytree(tmp_path / name, tmp_path / f"{name} killed")
        acted(env, action, "close")
    assert lengths("short killed") == lengths("usual killed")
    assert lengths("short") == lengths("usual")
    assert sum(lengths("short")) >= 100
    assert check_trace(tmp_path / "short").damages == []


@pytest.mark.parametrize("lanes", [False, True])
def test_steps_in_memory_that_cannot_be_written_are_said_to_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lanes: bool
) -> None:
    monkeypatch.setattr("gym_trace.storage.local._SAFE_TO_MAP", frozenset())
    env, action = recorder_of(CountingEnv, tmp_path, lanes, uid="w")
    acted(env, "reset", action, "flush", action)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gym_trace.storage.local.LocalAppender.write", full)
    with pytest.raises(RecordingError, match="which were in memory, are lost"):
        env.flush()
    env.close()


def test_recorders_give_back_the_descriptor_that_they_reserve(tmp_path: Path) -> None:
    def reserved() -> int:
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sum(os.readlink(link) == os.devnull for link in links if os.path.lexists(link))

    before = reserved()
    for number in range(4):
        env = TraceRecordingWrapper(CountingEnv(), tmp_path / str(number))
        assert reserved() == before + 1
        if number % 2:
            acted(env, "reset", 0, "flush")
            assert reserved() == before
        env.close()
        assert reserved() == before


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


def test_without_descriptors_a_ring_tries_to_grow_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_trace.recording.single.slabs._GROW_RETRY_NS", 1 << 62)
    rings = list[Ring]()
    monkeypatch.setattr("gym_trace.recording.recorder.Ring", lambda *args: rings.append(Ring(*args)) or rings[-1])
    with TraceRecordingWrapper(CountingEnv(length=5000), tmp_path) as env:
        env.reset(seed=0)
        env.step(1)
        with no_descriptors():
            for _ in range(4999):
                env.step(1)
        assert [ring.mapped for ring in rings] == [True, False]
        assert env._recorder.slabs.base > 2000  # several slabs
    (episode,) = open_trace(tmp_path)
    assert episode.observations[:, 0].tolist() == list(range(5001))
