"""Rings as files of a trace: listed, replaced, copied, and read by another process during recording."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cradle
import numpy as np
import pytest
import rings
import victim
from longer import LONG
from zoo import CountingEnv

from gym_trace import TraceRecordingWrapper, check_trace, open_trace
from gym_trace.format.directory import find_writers
from gym_trace.storage.local import LocalStorage


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
    (tmp_path / "u.ring").write_bytes(rings.Run().play(3).ring())  # of an unknown writer
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
    times = victim.new_progress(tmp_path / "progress")
    command = [sys.executable, victim.__file__, "cartpole", str(tmp_path / "t"), str(tmp_path / "progress"), "0.5"]
    process = cradle.Popen(command)
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
    env = victim.make("cartpole")
    run = victim.play(env)
    for number, episode in enumerate(trace):
        assert (episode.episode_id, episode.first_step, episode.seed) == (number, 0, number)
        observations = [np.array(next(run)[0])]
        for step in range(len(episode)):
            action, observation, *_ = next(run)
            assert action == episode.actions[step]
            observations.append(np.array(observation))
        assert episode.observations.tobytes() == np.array(observations).tobytes()
    env.close()
