"""Steps in a ring are read like steps in a batch. Rings are listed, replaced and copied with their trace."""

import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import endless_recording
import forked_python
import numpy as np
import pytest
import rings
from long_tests import LONG
from runs import in_a_child
from scripted_env import CountingEnv

from gym_trace import Trace, TraceRecordingWrapper, check_trace, open_trace
from gym_trace.format import wire
from gym_trace.format.directory import find_writers
from gym_trace.format.ring.memory import sequence_of
from gym_trace.format.ring.recovered import read_ring
from gym_trace.playback import writer_reader
from gym_trace.playback.episode_index import index_of
from gym_trace.recording import take_in_rings
from gym_trace.storage.local import LocalStorage


def lengths(trace: Trace) -> list[tuple[int, int, str]]:
    return [(episode.episode_id, len(episode), episode.outcome) for episode in trace]


def running(directory: Path, *lengths: int, count: int = 3, **options: Any) -> tuple[rings.Writer, rings.Run, Trace]:
    """Return a running writer whose episodes are all in its ring, its run, and its trace."""
    writer, run = rings.Writer(directory), rings.Run().play(*lengths, **options)
    writer.put(run.ring(count))
    return writer, run, open_trace(directory)


def check(trace: Trace) -> None:
    for episode in [*trace, *(trace[i] for i in range(len(trace)))]:
        rings.check_episode(episode)
    assert trace.damage == []


@pytest.mark.parametrize("written", range(6))
def test_steps_of_a_killed_writer_are_read_from_its_ring(tmp_path: Path, written: int) -> None:
    run = rings.Run().play(3, 7, 100, 1, 60, 5, 100, 100, 100, 2, open_end=True)
    assert len(run.slabs) > 5
    del run.slabs[written + 3 :]
    rings.killed(tmp_path, run, written)
    trace = open_trace(tmp_path)
    assert lengths(trace)[:2] == [(0, 3, "terminated"), (1, 7, "terminated")]
    assert {outcome for _, _, outcome in lengths(trace)[:-1]} == {"terminated"}
    assert sum(trace.episodes["steps"]) == sum(
        slab.rows - sum(slab.memory[at + 8] == rings.START for at in places(slab)) for slab in run.slabs
    )
    check(trace)


def places(slab: rings.Slab) -> list[int]:
    """Return the offsets of the entries of a log."""
    at, found = 64, []
    while at < slab.position:
        found.append(at)
        at += 56 + (int.from_bytes(slab.memory[at + 4 : at + 8], "little") + 7 & ~7)
    return found


def test_a_writer_without_any_batch_is_read(tmp_path: Path) -> None:
    rings.killed(tmp_path, rings.Run().play(4, open_end=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.manifest.jsonl", "w.ring"]
    assert lengths(open_trace(tmp_path)) == [(0, 4, "lost")]


def test_a_ring_without_its_writer_is_ignored(tmp_path: Path) -> None:
    rings.killed(tmp_path, rings.Run().play(4))
    rings.killed(tmp_path, rings.Run().play(2), name="v")
    (tmp_path / "v.manifest.jsonl").unlink()
    assert open_trace(tmp_path).writers == ["w"]


def test_slabs_that_are_in_batches_are_not_read_again(tmp_path: Path) -> None:
    run = rings.Run().play(3, 7, 100, 1)
    rings.killed(tmp_path, run, written=len(run.slabs))
    assert lengths(open_trace(tmp_path)) == [(i, n, "terminated") for i, n in enumerate((3, 7, 100, 1))]


def test_the_ring_replaces_chunks_of_an_unfinished_slab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = rings.Run().play(3, 7, 20, open_end=True)
    writer = rings.Writer(tmp_path)
    writer.put(run.ring())
    with monkeypatch.context() as patch:
        patch.setattr("gym_trace.format.ring.chunk_builder.most_bytes", lambda: 400)
        written: list[Any] = []
        write = writer.files.write

        def some(*chunk: Any) -> None:
            written.append(chunk)
            if len(written) < 3:
                write(*chunk)

        patch.setattr(writer.files, "write", some)
        writer.write(run.slab)
    writer.die()
    assert len(written) == 4
    assert [more for _, _, (_, more), _ in written] == [True] * (len(written) - 1) + [False]
    check(trace := open_trace(tmp_path))
    assert lengths(trace) == [(0, 3, "terminated"), (1, 7, "terminated"), (2, 20, "lost")]
    (tmp_path / "w.ring").unlink()
    trace = open_trace(tmp_path)
    assert 0 < sum(trace.episodes["steps"]) < 30
    check(trace)


def test_a_ring_of_an_earlier_boot_is_ignored(tmp_path: Path) -> None:
    run = rings.Run().play(50, 50, 50, open_end=True)
    rings.killed(tmp_path, run, written=1, boot=b"\1" * 16)
    trace = open_trace(tmp_path)
    assert 0 < sum(trace.episodes["steps"]) < 150
    check(trace)


def test_a_step_is_readable_as_soon_as_it_is_in_the_ring(tmp_path: Path) -> None:
    writer, run, trace = running(tmp_path)
    assert len(trace) == 0
    run.reset()
    for step in range(1, 300):
        run.take_step()
        writer.put(run.ring())
        while len(run.slabs) > 2:
            writer.write(run.slabs.pop(0))
        trace.refresh()
        assert lengths(trace) == [(0, step, "running")]
    check(trace)
    before = index_of(trace).readers
    trace.refresh()
    assert index_of(trace).readers == before
    writer.die()
    trace.refresh()
    assert lengths(trace) == [(0, 299, "lost")]


def test_episodes_do_not_change_when_their_rows_move_into_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_trace.format.batch_files.BATCH_FRAGMENTS", 7)
    writer, run, trace = running(tmp_path)
    taken: list[Any] = []
    chance = np.random.default_rng(5)
    for _ in range(60):
        run.play(int(chance.integers(1, 30)))
        writer.put(run.ring())
        while len(run.slabs) > 1 and chance.integers(2):
            writer.write(run.slabs.pop(0))
        while len(run.slabs) > 3:
            writer.write(run.slabs.pop(0))
        writer.put(run.ring())
        trace.refresh()
        new = trace[len(trace) - 1]
        taken += [new, pickle.loads(pickle.dumps(new))]
        for i in chance.integers(len(taken), size=5):
            rings.check_episode(taken[i])
    for slab in run.slabs:
        writer.write(slab)
    (tmp_path / "w.ring").unlink()
    writer.files.close({})
    trace.refresh()
    assert {outcome for _, _, outcome in lengths(trace)} == {"terminated"}
    for episode in taken:
        episode._cache.clear()
        rings.check_episode(episode)
    check(trace)


def test_a_pickled_trace_keeps_the_steps_of_its_ring(tmp_path: Path) -> None:
    writer, run, trace = running(tmp_path, 5, 9, open_end=True)
    pickled = pickle.dumps((trace, trace[1], trace[1:]))
    run.play(50, 50, 50)
    for slab in run.slabs:
        writer.write(slab)
    writer.files.close({})
    (tmp_path / "w.ring").unlink()
    again, episode, view = pickle.loads(pickled)
    assert lengths(again) == [(0, 5, "terminated"), (1, 9, "running")]
    check(again)
    rings.check_episode(episode)
    assert lengths(view) == [(1, 9, "running")]
    assert again.refresh() == 3


def test_a_writer_closed_after_its_listing_loses_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, run, trace = running(tmp_path, 5, 9)

    def overtaken(storage: Any) -> Any:
        writers = find_writers(storage)
        if writers[0].has_ring:
            writer.write(run.slab)
            writer.files.close({})
            (tmp_path / "w.ring").unlink()
        return writers

    monkeypatch.setattr("gym_trace.playback.opened.find_writers", overtaken)
    trace.refresh()
    assert lengths(trace) == [(0, 5, "terminated"), (1, 9, "terminated")]


def test_batches_started_after_a_listing_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.format.batch_files.BATCH_FRAGMENTS", 1)
    writer, run = rings.Writer(tmp_path), rings.Run().play(250)
    assert len(run.slabs) == 4
    full = run.slabs[:]
    run.slabs = full[:3]
    writer.put(run.ring())
    trace = open_trace(tmp_path)

    def overtaken(storage: Any) -> Any:
        writers = find_writers(storage)
        if not writers[0].batches:
            writer.write(full[0])
            writer.write(full[1])
            run.slabs = full
            writer.put(run.ring())
        return writers

    monkeypatch.setattr("gym_trace.playback.opened.find_writers", overtaken)
    trace.refresh()
    assert lengths(trace) == [(0, 250, "terminated")]
    check(trace)


def test_a_slab_reused_during_a_copy_is_read_from_its_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, run, trace = running(tmp_path, 5, 9, count=1)
    asked: list[int] = []

    def overtaken(file: Any, place: int) -> int:
        asked.append(place)
        if len(asked) == 2:
            writer.write(run.slab)
            run.turn()
            run.play(2)
            writer.put(run.ring(count=1))
            return 2
        return sequence_of(file, place)

    monkeypatch.setattr("gym_trace.format.ring.recovered.sequence_of", overtaken)
    trace.refresh()
    assert len(asked) > 2
    assert lengths(trace) == [(0, 5, "terminated"), (1, 9, "terminated"), (2, 2, "terminated")]


@pytest.mark.filterwarnings("ignore:.*skipped (bytes|all of it)")
def test_a_damaged_ring_loses_only_its_own_steps(tmp_path: Path) -> None:
    run = rings.killed(tmp_path, rings.Run().play(3, 40, 40, open_end=True), written=1)
    data = (tmp_path / "w.ring").read_bytes()
    assert len(run.slabs) > 1
    for size in [*range(0, 500, 1 if LONG else 11), *range(500, len(data), 401 if LONG else 1009)]:
        (tmp_path / "w.ring").write_bytes(data[:size])
        trace = open_trace(tmp_path)
        assert 0 < sum(trace.episodes["steps"]) < 83
        for episode in trace.scan(on_damage="skip"):
            rings.check_episode(episode)
        assert bool(trace.damage) == (size > 0), size


def test_fragments_of_a_ring_equal_those_of_a_chunk(tmp_path: Path) -> None:
    run = rings.Run().play(3, 7)
    rings.killed(tmp_path / "r", run)
    rings.killed(tmp_path / "b", run, written=1)
    (tmp_path / "b" / "w.ring").unlink()
    (one,), (other,) = index_of(open_trace(tmp_path / "r")).readers, index_of(open_trace(tmp_path / "b")).readers
    assert one.fragments[:].tobytes() == other.fragments[:].tobytes()
    assert (
        one.fragments["flags"].tolist()
        == [wire.STARTS | wire.HAS_INITIAL | wire.TERMINATED | wire.STOPS | wire.ENDS] * 2
    )
    assert open_trace(tmp_path / "r").episodes.tolist() == open_trace(tmp_path / "b").episodes.tolist()


def test_a_ring_begins_small_and_grows_with_the_steps(tmp_path: Path) -> None:
    env, sizes = TraceRecordingWrapper(CountingEnv(), tmp_path, flush_seconds=1e6), []
    for episode in range(150):
        env.reset(seed=episode)
        while not any(env.step(1)[2:4]):
            pass
        (ring,) = tmp_path.glob("*.ring")
        sizes.append(512 * ring.stat().st_blocks)
        if sizes[-1] != sizes[episode - 1] or episode % 30 == 0:
            assert [len(one) for one in open_trace(tmp_path)] == [5] * (episode + 1)
    assert sizes[0] <= 60 << 10 < 1 << 20 < sizes[-1]
    assert len(set(sizes)) == 2
    env.close()
    assert index_of(open_trace(tmp_path)).readers[0].chunk_count == 1


@pytest.mark.parametrize("is_renamed", [False, True])
def test_a_writer_killed_while_its_ring_grows_loses_no_step(tmp_path: Path, is_renamed: bool) -> None:
    def killed(source: str, target: str) -> None:
        if os.path.exists(target):  # the ring that is too small
            if is_renamed:
                os.replace(source, target)
            os._exit(0)
        os.replace(source, target)

    def record() -> None:
        env = TraceRecordingWrapper(CountingEnv(length=10_000), tmp_path / "t", flush_seconds=1e6)
        env.reset(seed=0)
        with mock.patch("os.rename", killed), open(tmp_path / "step", "wb", buffering=0) as progress:
            for step in range(10_000):
                os.pwrite(progress.fileno(), b"%5d" % step, 0)
                env.step(1)

    in_a_child(record)
    done = int((tmp_path / "step").read_text())
    assert done > 500
    (episode,) = open_trace(tmp_path / "t")
    assert episode.observations[:, 0].tolist() == list(range(done + 1))
    assert take_in_rings(tmp_path / "t")[1] == []
    assert [len(one) for one in open_trace(tmp_path / "t")] == [done]


def test_a_refresh_reads_a_dead_ring_once_and_notes_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rings.killed(tmp_path, rings.Run().play(3, open_end=True))
    rings.killed(tmp_path, rings.Run().play(5), name="v")
    trace, read = open_trace(tmp_path), []
    assert sorted(map(len, trace)) == [3, 5]
    monkeypatch.setattr(writer_reader, "read_ring", lambda *args: read.append(args[1]) or read_ring(*args))
    assert not trace.refresh()
    assert read == []
    assert take_in_rings(tmp_path) == (["v", "w"], [])
    trace.refresh()
    assert sorted(map(len, trace)) == [3, 5]
    assert [one.tail.batch for one in index_of(trace).readers] == [None, None]


# -- rings as files ---------------------------------------------------------------------------------------------------


def test_rings_are_listed_with_their_writers(tmp_path: Path) -> None:
    rings.killed(tmp_path, rings.Run().play(3))
    rings.killed(tmp_path, rings.Run().play(3), name="v")
    (tmp_path / "v.ring").unlink()
    (tmp_path / "u.ring").write_bytes(b"not of a writer")
    found = {files.writer: files.has_ring for files in find_writers(LocalStorage(tmp_path))}
    assert found == {"v": False, "w": True}


def test_rings_are_deleted_with_their_trace(tmp_path: Path) -> None:
    rings.killed(tmp_path, rings.Run().play(3))
    rings.killed(tmp_path, rings.Run().play(3), name="v")
    (tmp_path / "w.ring.part").write_bytes(bytes(300))
    (tmp_path / "v.ring").write_bytes(b"a diary that I keep")
    (tmp_path / "u.ring").write_bytes(rings.Run().play(3).ring())  # ring of an unknown writer
    TraceRecordingWrapper(CountingEnv(), tmp_path, uid="new", on_exist="replace").close()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["new.manifest.jsonl", "u.ring", "v.ring"]


@pytest.mark.skipif(not hasattr(os, "SEEK_HOLE"), reason="needs holes")
def test_a_sparse_copy_of_a_ring_is_readable(tmp_path: Path) -> None:
    run = rings.Run(size=24 << 20).play(3, 7, 2, open_end=True)
    rings.killed(tmp_path / "whole", run)
    (tmp_path / "copy").mkdir()
    for path in (tmp_path / "whole").iterdir():
        subprocess.run(["cp", "--sparse=always", path, tmp_path / "copy" / path.name], check=True)
    status = (tmp_path / "copy" / "w.ring").stat()
    assert 512 * status.st_blocks < status.st_size / 20
    assert [len(episode) for episode in open_trace(tmp_path / "copy")] == [3, 7, 2]
    assert check_trace(tmp_path / "copy").damages == []


def test_a_running_recording_is_readable_to_its_last_step(tmp_path: Path) -> None:
    times = endless_recording.new_progress(tmp_path / "progress")
    command = [
        sys.executable,
        endless_recording.__file__,
        "cartpole",
        str(tmp_path / "t"),
        str(tmp_path / "progress"),
        "0.5",
    ]
    process = forked_python.Popen(command)
    try:
        while not times[0] and process.poll() is None:
            time.sleep(0.001)
        trace, seen, looks = open_trace(tmp_path / "t"), 0, 0
        begin = time.monotonic()
        while time.monotonic() < begin + (3 if LONG else 0.7) or looks < 4:
            done = int(times[0])
            trace.refresh()
            now = int(trace.episodes["steps"].sum())
            assert now >= max(done, seen)  # a step is in the ring before step() returns
            check_end(trace)
            seen, looks = now, looks + 1
    finally:
        process.kill()
        process.wait()
    trace.refresh()
    assert int(trace.episodes["steps"].sum()) >= int(times[0])
    assert looks > 3
    check_all(trace)
    (tmp_path / "progress").unlink()
    shutil.rmtree(tmp_path / "t")


def check_end(trace: Any) -> None:
    """Check that partial episodes are a prefix of a run of CartPole."""
    last = trace[-1]
    assert (last.outcome in ("running", "lost")) or last.terminations[-1] or last.truncations[-1]
    assert last.observations.shape == (len(last) + 1, 4)
    assert np.isfinite(last.observations).all()
    assert (last.observations[1:] != last.observations[:-1]).any(axis=1).all()
    assert set(last.actions.tolist()) <= {0, 1}
    assert last.rewards.tolist() == [1.0] * len(last)
    assert not last.terminations[:-1].any()


def check_all(trace: Any) -> None:
    env = endless_recording.make("cartpole")
    run = endless_recording.play(env)
    for number, episode in enumerate(trace):
        assert (episode.episode_id, episode.first_step, episode.seed) == (number, 0, number)
        observations = [np.array(next(run)[0])]
        for step in range(len(episode)):
            action, observation, *_ = next(run)
            assert action == episode.actions[step]
            observations.append(np.array(observation))
        assert episode.observations.tobytes() == np.array(observations).tobytes()
    env.close()
