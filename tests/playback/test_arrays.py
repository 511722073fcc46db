"""Arrays that were read belong to the caller."""

import gc
import pickle
from operator import attrgetter
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from runs import record_lengths, record_nested
from scripted_env import CountingEnv, Result, ScriptedEnv, bits
from trace_contents import record_anything
from vector_wrapper import TraceRecordingVectorWrapper

from gym_trace import TraceRecordingWrapper, open_trace, scan_recorded_traces

COLUMNS_OF = attrgetter("observations", "actions", "rewards", "terminations", "truncations", "annotations")


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
    record_lengths(tmp_path / "b", [70, 50])  # the same sizes, so that its memory would fit
    kept: list[Any] = []
    scan_recorded_traces(tmp_path / "a", lambda *arrays: kept.append(arrays))
    expected = bits(kept)
    for _ in range(3):
        scan_recorded_traces(tmp_path / "b", lambda *_: None)
        assert all(episode.observations is not None for episode in open_trace(tmp_path / "b"))
    assert bits(kept) == expected


def record_lanes(directory: Path, lengths: list[int], steps: int, flush_every: int) -> None:
    makes = [lambda length=length: CountingEnv(length) for length in lengths]
    envs = TraceRecordingVectorWrapper(gymnasium.vector.SyncVectorEnv(makes), directory)
    envs.reset(seed=0)
    for step in range(steps):
        envs.step(np.full(len(lengths), step % 4))
        if step % flush_every == flush_every - 1:
            envs.flush()
    envs.close()


def kept_by(directory: Path) -> list[Any]:
    """Return the arrays of a callback, which are those of a scan and of the episodes by their indices."""
    kept: list[Any] = []
    scan_recorded_traces(directory, lambda *arrays: kept.append(arrays))
    trace = open_trace(directory)
    for episodes in (trace.scan(), (trace[i] for i in range(len(trace)))):
        assert bits(kept) == bits([(it.observations, it.actions, it.rewards) for it in episodes])
    return kept


def test_a_callback_gets_episodes_of_lanes_that_go_through_several_chunks(tmp_path: Path) -> None:
    record_lanes(tmp_path, [1, 2, 3, 5, 8, 40], 60, flush_every=4)
    kept = kept_by(tmp_path)
    assert [len(rewards) for *_, rewards in kept].count(40) == 1
    assert len(kept) > 60


def test_a_callback_gets_rewards_whose_type_changes_from_chunk_to_chunk(tmp_path: Path) -> None:
    rewards = [[np.float32(0.5)] * 4, [np.float32(0.5)] * 3 + [np.int16(1)] * 3, [np.int16(2)] * 4, [0.5, "much"] * 2]
    episodes = [(np.zeros(1), [Result(np.ones(1), reward) for reward in told]) for told in rewards]
    env = ScriptedEnv(spaces.Box(0, 1, (1,), np.float64), spaces.Discrete(2), episodes)
    wrapped = TraceRecordingWrapper(env, tmp_path)
    for told in rewards:
        wrapped.reset()
        for step in range(len(told)):
            wrapped.step(0)
            if step == 2:
                wrapped.flush()
    wrapped.close()
    assert [found.dtype for *_, found in kept_by(tmp_path)] == [np.float32, np.float64, np.int16, object]


def test_a_callback_gets_the_same_dtypes_for_episodes_without_steps(tmp_path: Path) -> None:
    episodes = [(np.zeros(1), [Result(np.ones(1), np.float32(0.5))] * count) for count in (3, 0, 2, 0, 4, 1, 2)]
    wrapped = TraceRecordingWrapper(
        ScriptedEnv(spaces.Box(0, 1, (1,), np.float64), spaces.Discrete(2), episodes), tmp_path
    )
    for _, results in episodes:
        wrapped.reset()
        for _ in results:
            wrapped.step(0)
    wrapped.close()
    kept = kept_by(tmp_path)
    assert [rewards.dtype for *_, rewards in kept if not len(rewards)] == [np.float64] * 2
    assert {rewards.dtype for *_, rewards in kept if len(rewards)} == {np.dtype(np.float32)}


def test_an_array_of_a_callback_keeps_little_memory_but_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_trace.playback.episode_groups._JOINED_BYTES", 1000)
    record_lanes(tmp_path, [3] * 30 + [80], 81, flush_every=1)  # no episode is in one chunk
    observations = [array for array, *_ in kept_by(tmp_path)]
    memory = [array if array.base is None else array.base for array in observations]
    assert all(whole.nbytes <= max(1000, array.nbytes) for array, whole in zip(observations, memory))
    assert max(array.nbytes for array in observations) > 1000
    assert len({id(whole) for whole in memory}) < len(observations) / 2  # small ones were joined together


def test_episodes_of_a_scan_that_are_kept_read_their_other_columns_later(tmp_path: Path) -> None:
    record_lanes(tmp_path, [1, 2, 3, 5, 8, 40], 60, flush_every=4)
    trace = open_trace(tmp_path)
    kept = [episode for episode in trace.scan() if len(episode.rewards)]
    assert len(kept) > 60
    for episode in kept:
        assert bits(COLUMNS_OF(episode)) == bits(COLUMNS_OF(trace[episode.index]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(5))
def test_every_way_to_read_episodes_gives_the_same_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    random = np.random.default_rng(seed)
    record_anything(tmp_path / "t", random)
    monkeypatch.setattr("gym_trace.playback.episode_groups._JOINED_BYTES", 400)
    monkeypatch.setattr("gym_trace.playback.episode_groups._FEWEST", 1 + seed % 3)
    kept_by(tmp_path / "t")
    trace = open_trace(tmp_path / "t")
    expected = [bits(COLUMNS_OF(trace[i])) for i in range(len(trace))]
    some, order = np.flatnonzero(random.random(len(trace)) < 0.5), random.permutation(len(trace))
    scans: list[tuple[Any, Any]] = [
        (range(len(trace)), trace.scan()),
        (range(len(trace)), trace.scan(on_damage="skip")),
        (range(len(trace)), map(pickle.loads, map(pickle.dumps, trace.scan()))),
        (some, trace.scan(episodes=some)),
        (order, trace[order].scan()),
    ]
    for indices, episodes in scans:
        assert [bits(COLUMNS_OF(episode)) for episode in episodes] == [expected[i] for i in indices]
