"""Chunks of a slab that several threads encode: the same files, in order, and no thread that stays."""

import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from written_bytes import lines_of

import gym_trace
from gym_trace.errors import RecordingError
from gym_trace.format.columns import ColumnEncoder, Workspace
from gym_trace.format.encoding_threads import EncodingThreads, Job
from gym_trace.format.parity import joined_parity, parity_of, parity_part, shape_for
from gym_trace.recording import recorder
from gym_trace.recording.background import SlabWriter
from gym_trace.storage.memory import MemoryReader

LANES, TIMES = 64, 512


def numbers() -> Any:
    """Return observations of four slabs, of eight chunks each."""
    observations = np.random.default_rng(0).standard_normal((TIMES + 1, LANES, 128), np.float32)
    observations[100, 3, 5] = np.nan
    return observations


def frames() -> Any:
    """Return observations of two slabs, of six chunks each: frames that hardly change, and noise in some lanes."""
    observations = np.zeros((257, 16, 70, 70), np.uint8)
    observations[:, 5:11, :40] = np.random.default_rng(0).integers(0, 256, (257, 6, 40, 70))
    observations[np.arange(257), :, np.arange(257) % 70, 7] = 9
    return observations


def record(directory: Path, observations: Any = None, **options: Any) -> None:
    observations = numbers() if observations is None else observations
    random, shape = np.random.default_rng(1), (len(observations) - 1, observations.shape[1])
    actions, rewards = random.integers(0, 4, shape), random.standard_normal(shape, np.float32)
    ended = random.random(shape) < 0.01
    with gym_trace.TraceWriter(directory, **options) as writer:
        writer.rollouts(observations, actions, rewards, ended, np.zeros_like(ended))
        writer.flush()
        assert not encoding_threads()


def encoding_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gym-trace encoding"]


@pytest.fixture(autouse=True)
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "encoders", lambda: 4)


def before_encoding(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Call a function in each thread that encodes observations, before it does."""
    prepared = ColumnEncoder.prepared

    def watched(self: ColumnEncoder, rows: Any) -> Any:
        encode = prepared(self, rows)

        def encoded(workspace: Workspace) -> Any:
            if self._path == ("observations",):
                call()
            return encode(workspace)

        return encoded

    monkeypatch.setattr(ColumnEncoder, "prepared", watched)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the threads that encode arrays."""
    found: set[str] = set()
    before_encoding(monkeypatch, lambda: found.add(threading.current_thread().name))
    return found


@pytest.mark.parametrize(
    ("observations", "options"),
    [(numbers, {}), (frames, {}), (numbers, {"keep_bytes": 1, "keep_if": "nan"})],
    ids=["numbers", "frames", "newest"],
)
def test_any_number_of_threads_writes_the_same_chunks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: set[str], observations: Any, options: Any
) -> None:
    record(tmp_path / "four", observations(), **options)
    assert "gym-trace encoding" in names
    monkeypatch.setattr(recorder, "encoders", lambda: 1)
    names.clear()
    record(tmp_path / "one", observations(), **options)
    assert "gym-trace encoding" not in names
    lines = list(lines_of(tmp_path / "one"))
    assert lines == list(lines_of(tmp_path / "four"))
    assert not gym_trace.check_trace(tmp_path / "four").damages
    if not options:
        assert sum(": observations: " in line for line in lines) >= 12
    else:
        wanted = [
            episode for episode in gym_trace.open_trace(tmp_path / "four") if np.isnan(episode.observations).any()
        ]
        assert len(wanted) == 1


def test_the_writing_thread_encodes_where_no_other_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: set[str]
) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "gym-trace encoding":
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    record(tmp_path)
    assert "gym-trace encoding" not in names
    assert not gym_trace.check_trace(tmp_path).damages


@pytest.mark.parametrize("error", [MemoryError, SystemExit])
def test_an_error_in_an_encoding_thread_stops_recording(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: type[BaseException]
) -> None:
    def fail() -> None:
        if encoding_threads():
            raise error("no memory")

    before_encoding(monkeypatch, fail)
    with pytest.raises(RecordingError, match="no memory"):
        record(tmp_path)
    assert not encoding_threads()
    assert sum(len(episode) for episode in gym_trace.open_trace(tmp_path).episodes) > 0  # from the ring


def test_an_encoding_thread_that_closes_its_recorder_does_not_hang() -> None:
    class Chunks:
        writer = None

        def write_slab(self, sequence: int, segments: list[Any], pending: list[Any]) -> None:
            threads = EncodingThreads(1, 1)
            job = Job(lambda workspace: out.close(dict))  # as garbage collection may do
            threads.submit(job)
            while threads._jobs.qsize():
                pass
            job.result(threads.workspace)
            threads.stop()

    chunks: Any = Chunks()
    out = SlabWriter("a writer", chunks, lambda: None)
    out.submit(1, list)
    out.wait()
    assert out.is_complete


def test_jobs_give_their_results_in_order_and_their_errors() -> None:
    threads = EncodingThreads(1, 3)

    def work(number: int, workspace: Workspace) -> int:
        return 12 // number

    assert threads.map([lambda w, n=n: work(n, w) for n in range(1, 13)]) == [12 // n for n in range(1, 13)]
    with pytest.raises(ZeroDivisionError):
        threads.map([lambda w, n=n: work(n, w) for n in (1, 0, 2)])
    assert not encoding_threads()


@pytest.mark.parametrize("size", [1, 5000, 300_000, (9 << 20) + 12345])
def test_parity_in_parts_is_that_of_the_whole(size: int) -> None:
    file, shape = MemoryReader(np.random.default_rng(size).bytes(size)), shape_for(size)
    whole = parity_of(file, shape)
    for bounds in ((0, 1, shape.groups), (0, 1, 3, shape.groups)):
        parts = [parity_part(file, shape, range(*pair)) for pair in pairwise(bounds)]
        blocks, checksums, digests = joined_parity(parts, shape)
        assert (blocks == whole.blocks).all()
        assert (checksums == whole.checksums).all()
        assert digests == whole.digests
