"""Arrays that were read belong to the caller."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
from runs import record_lengths, record_nested
from zoo import bits

from gym_trace import open_trace, scan_recorded_traces


def everything_of(episode: Any) -> list[Any]:
    names = ("observations", "actions", "rewards", "terminations", "truncations", "infos", "annotations", "options")
    return [getattr(episode, name) for name in (*names, "rng_state")]


def ruin(value: Any) -> None:
    """Overwrite everything that is writable."""
    if isinstance(value, np.ndarray):
        assert value.flags.writeable
        if value.dtype == object:
            for item in value.flat:
                ruin(item)
            value[...] = None
        else:
            value[...] = np.ones((), value.dtype) if value.dtype == bool else 77
    elif isinstance(value, dict):
        for item in value.values():
            ruin(item)
        value.clear()
    elif isinstance(value, (list, tuple)):
        for item in value:
            ruin(item)
        if isinstance(value, list):
            value.clear()


def test_writing_into_an_episode_does_not_change_later_reads(tmp_path: Path) -> None:
    record_nested(tmp_path)
    expected = [bits(everything_of(episode)) for episode in open_trace(tmp_path)]
    trace = open_trace(tmp_path)
    some = [3, 2, 2, 0]
    by_index = (trace[i] for _ in range(2) for i in range(4))
    for episodes, order in ((by_index, [0, 1, 2, 3] * 2), (trace, range(4)), (trace.scan(episodes=some), some)):
        for i, episode in zip(order, episodes):
            assert bits(everything_of(episode)) == expected[i]
            ruin(everything_of(episode))


def test_a_callback_that_writes_does_not_change_later_episodes(tmp_path: Path) -> None:
    record_lengths(tmp_path, [5, 0, 7, 9], flush_after=4)
    seen: list[Any] = []

    def look_and_ruin(*arrays: Any) -> None:
        seen.append(bits(arrays))
        ruin(arrays)

    scan_recorded_traces(tmp_path, look_and_ruin)
    expected = [bits((e.observations, e.actions, e.rewards)) for e in open_trace(tmp_path)]
    assert seen == expected


def test_arrays_outlive_the_trace_and_its_files(tmp_path: Path) -> None:
    record_lengths(tmp_path, [5, 7])
    kept = [episode.observations for episode in open_trace(tmp_path)]
    for path in tmp_path.iterdir():
        path.unlink()
    gc.collect()
    assert [array[:, 0].tolist() for array in kept] == [list(range(6)), list(range(8))]


def test_an_episode_keeps_its_arrays(tmp_path: Path) -> None:
    record_lengths(tmp_path, [5])
    episode = open_trace(tmp_path)[0]
    episode.observations[0] = 99
    assert episode.observations[0, 0] == 99  # they are its reader's own


def test_a_scan_does_not_overwrite_arrays_of_an_earlier_one(tmp_path: Path) -> None:
    record_lengths(tmp_path / "a", [50, 70])
    record_lengths(tmp_path / "b", [70, 50])  # of the same sizes, so that its memory would fit
    kept: list[Any] = []
    scan_recorded_traces(tmp_path / "a", lambda *arrays: kept.append(arrays))
    expected = bits(kept)
    for _ in range(3):
        scan_recorded_traces(tmp_path / "b", lambda *_: None)
        assert all(episode.observations is not None for episode in open_trace(tmp_path / "b"))
    assert bits(kept) == expected
