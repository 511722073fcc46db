"""Storages of traces: a directory, or any implementation of the contract."""

import os
import pickle
import resource
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from memory_storage import MemoryStorage
from runs import play, recorded
from scripted_env import CountingEnv
from storage_contract import StorageContract

from gym_trace import (
    Trace,
    TraceRecordingWrapper,
    check_trace,
    edit,
    open_trace,
    repair_trace,
    scan_recorded_traces,
    summarize,
)
from gym_trace.errors import CorruptTrace, InvalidOption, TraceExists, TraceNotFound
from gym_trace.recording.dead_rings import take_in_rings
from gym_trace.storage.local import LocalStorage
from gym_trace.storage.memory import MemoryReader
from gym_trace.storage.protocol import ReadStorage, Storage
from gym_trace.tools.statistics.describe import describe, list_trace


class TestLocalStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "deep" / "trace")


class TestMemoryStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return MemoryStorage(tmp_path)


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record in memory only."""
    monkeypatch.setattr("gym_trace.recording.options.LocalStorage", MemoryStorage)


@pytest.mark.usefixtures("in_memory")
def test_a_trace_is_recorded_and_read_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.format.batch_files.BATCH_FRAGMENTS", 2)  # several batches
    recorded(tmp_path / "t", episodes=5, uid="w")
    storage = MemoryStorage(tmp_path / "t")
    trace = open_trace(storage)
    assert {"w.manifest.jsonl", "w.000000.gtb"} <= set(storage.names())
    assert len(trace) == scan_recorded_traces(storage) == 5
    assert [len(episode.observations) for episode in trace] == (trace.episodes["steps"] + 1).tolist()
    assert check_trace(storage).damages == []
    with pytest.raises(TraceExists):
        recorded(tmp_path / "t")
    assert not os.listdir(tmp_path)
    repair_trace(storage, tmp_path / "copy")
    same_arrays(trace, open_trace(tmp_path / "copy"))


def same_arrays(one: Trace, other: Trace) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a.observations, b.observations)
        np.testing.assert_array_equal(a.actions, b.actions)


@pytest.mark.usefixtures("in_memory")
def test_a_trace_in_memory_can_be_replaced_and_its_damage_is_located(tmp_path: Path) -> None:
    recorded(tmp_path / "t", uid="first")
    recorded(tmp_path / "t", uid="second", on_exist="replace")
    storage = MemoryStorage(tmp_path / "t")
    assert sorted(storage.names()) == ["second.000000.gtb", "second.manifest.jsonl"]
    storage._files["second.000000.gtb"][-100] ^= 1
    (damage, *_) = check_trace(storage).damages
    assert damage.path == storage.path("second.000000.gtb")


@dataclass(frozen=True)
class ReadOnly(ReadStorage):
    """The least that a storage for reading defines."""

    root: str

    def names(self) -> list[str]:
        return os.listdir(self.root)

    def size(self, name: str) -> int:
        return os.path.getsize(os.path.join(self.root, name))

    def open(self, name: str, holes: int = 0) -> MemoryReader:
        return MemoryReader((Path(self.root) / name).read_bytes())


def test_names_sizes_and_ranges_are_enough_to_read_a_trace(tmp_path: Path) -> None:
    recorded(tmp_path / "t", episodes=3)
    storage, local = ReadOnly(str(tmp_path / "t")), open_trace(tmp_path / "t")
    trace = open_trace(storage)
    same_arrays(trace, local)
    same_arrays(pickle.loads(pickle.dumps(trace[1:])), local[1:])
    assert next(trace.windows(2))["rewards"].tolist() == next(local.windows(2))["rewards"].tolist()
    assert trace.directory == local.directory
    assert describe(trace)["bytes"] == sum(map(storage.size, storage.names()))
    assert check_trace(trace).damages == check_trace(storage).damages == []
    assert describe(storage)["episodes"] == summarize(storage)["episodes"] == 3


def test_writing_to_a_read_only_storage_raises(tmp_path: Path) -> None:
    recorded(tmp_path / "t")
    with pytest.raises(InvalidOption, match="this storage is read-only"):
        take_in_rings(ReadOnly(str(tmp_path / "t")))


@pytest.mark.skipif(os.name != "posix", reason="needs limits of descriptors")
def test_without_file_descriptors_the_holder_of_a_lock_is_an_error(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    file = storage.create("w.manifest.jsonl", lock=True)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            storage.holder("w.manifest.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert storage.holder("w.manifest.jsonl") == "this process"
    file.close()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_only_regular_files_can_be_opened(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    (tmp_path / "file").write_bytes(b"some")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    assert storage.names() == ["file"]
    for name in ("folder", "link", "pipe"):
        with pytest.raises(CorruptTrace, match="not a regular file"):
            storage.open(name)
        with pytest.raises(FileNotFoundError):
            storage.size(name)
        with pytest.raises(OSError, match="left alone"):
            storage.append(name, b"more")
        with pytest.raises(FileExistsError):
            storage.create(name)
        assert storage.holder(name) is None
    with pytest.raises(TraceNotFound, match="is a file; pass"):
        LocalStorage(tmp_path / "file").names()


def test_files_in_the_working_directory_have_plain_paths() -> None:
    assert LocalStorage(".").path("w.000000.gtb") == "w.000000.gtb"
    assert LocalStorage("a/b/").path("w.000000.gtb") == os.path.join("a", "b", "w.000000.gtb")


@pytest.mark.skipif(shutil.which("du") is None, reason="no du here")
def test_the_size_of_a_trace_is_that_of_du_during_and_after_recording(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=4), tmp_path / "t")
    for close in (False, True):
        play(env, 2)
        if close:
            env.close()
        told = int(
            subprocess.run(["du", "-s", "-B1", tmp_path / "t"], capture_output=True, check=True).stdout.split()[0]
        )
        trace = open_trace(tmp_path / "t")
        assert list_trace(tmp_path / "t")["bytes"] == describe(trace)["bytes"] == told
    report = edit.filter(tmp_path / "t", tmp_path / "new")
    assert report.bytes == list_trace(tmp_path / "new")["bytes"]
