"""Moments for normalization match NumPy, and are computed once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import record_lengths, record_nested
from scripted_env import CountingEnv

from gym_trace import TraceRecordingWrapper, open_trace
from gym_trace.playback.sampling import normalization
from gym_trace.playback.scan import Scan, StepRuns
from gym_trace.playback.trace import Trace


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GYM_TRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("gym_trace.data.moments._BLOCK", 40)
    return tmp_path / "cache"


def check(trace: Trace) -> None:
    found = trace.normalization()
    for name in ("observations", "actions", "rewards"):
        rows = np.concatenate([getattr(episode, name) for episode in trace if len(episode)]).astype(np.float64)
        moments = found[name]
        assert moments.count == len(rows)
        for of in ("mean", "std", "min", "max"):
            np.testing.assert_allclose(getattr(moments, of), getattr(np, of)(rows, axis=0), rtol=1e-12, atol=1e-12)


def test_moments_are_those_of_all_rows_and_what_was_kept_is_extended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    read: list[int] = []  # numbers of steps

    def watched(*args: Any, **options: Any) -> Iterator[StepRuns]:
        for block in Scan(*args, **options):
            read.append(block.size)
            yield block

    monkeypatch.setattr(normalization, "Scan", watched)
    record_lengths(tmp_path / "t", [5, 0, 30, 1, 12], flush_after=9)
    check(open_trace(tmp_path / "t"))
    check(open_trace(tmp_path / "t"))
    assert sum(read) == 48
    record_lengths(tmp_path / "t", [3, 7], on_exist="append")
    check(open_trace(tmp_path / "t"))
    assert sum(read) == 58
    check(open_trace(tmp_path / "t")[::2])
    before = {path.name for path in (tmp_path / "t").iterdir()}
    [kept] = cache.glob("*/*")
    kept.write_bytes(b"no archive")
    check(open_trace(tmp_path / "t"))
    assert {path.name for path in (tmp_path / "t").iterdir()} == before


def test_episodes_that_are_being_recorded_count_with_the_steps_so_far(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=10**6), tmp_path / "t")
    for _ in range(3):
        env.reset()
        for _ in range(4):
            env.annotate(value=0.5)
            env.step(1)
            check(open_trace(tmp_path / "t"))
    found = open_trace(tmp_path / "t").normalization("annotations")
    assert found["annotations"]["value"].mean == 0.5
    env.close()


def test_moments_have_the_structure_of_the_spaces(tmp_path: Path) -> None:
    record_nested(tmp_path / "t")
    trace = open_trace(tmp_path / "t")
    found, batch = trace.normalization(), next(trace.transitions(4))

    def alike(one: Any, other: Any) -> None:
        if isinstance(other, dict):
            assert one.keys() == other.keys()
            alike(tuple(one.values()), tuple(other[key] for key in one))
        elif isinstance(other, tuple):
            for first, second in zip(one, other, strict=True):
                alike(first, second)
        else:
            assert (one is None) == (other.dtype.kind not in "biuf")
            assert one is None or one.mean.shape == other.shape[1:]

    alike(found["observations"], batch["observations"])
    alike(found["actions"], batch["actions"])


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("GYM_TRACE_CACHE", str(tmp_path / "file" / "below"))
    record_lengths(tmp_path / "t", [4, 2])
    check(open_trace(tmp_path / "t"))
