"""An episode taken from a trace stays that episode while others record, pickle and read."""

import copy
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from runs import counts_of, record_lengths
from scripted_env import CountingEnv, ImageEnv, bits, small_blocks
from vector_wrapper import TraceRecordingVectorWrapper

from gym_trace import (
    Episode,
    ReplayEnv,
    Trace,
    TraceRecordingWrapper,
    diff_traces,
    load_results,
    open_trace,
    scan_recorded_traces,
    summarize,
    verify_trace,
)
from gym_trace.errors import InvalidOption, TraceError
from gym_trace.playback.episode_index import index_of
from gym_trace.tools.replay.observations import ObservationRows

LANES = 3


class Stamped(CountingEnv):
    """Puts the number of its lane into each observation."""

    def __init__(self, lane: int, length: int):
        super().__init__(length)
        self.lane = lane

    def reset(self, **options: Any) -> Any:
        super().reset(**options)
        self._buffer[1] = self.lane
        return self._buffer, {}

    def step(self, action: Any) -> Any:
        _, *told = super().step(action)
        self._buffer[1] = self.lane
        return self._buffer, *told


def lanes(directory: Path, **options: Any) -> TraceRecordingVectorWrapper:
    """Lanes whose episodes end at different times, so that their places in the table change while they run."""
    envs = SyncVectorEnv([partial(Stamped, lane, 3 + 2 * lane) for lane in range(LANES)])
    recorder = TraceRecordingVectorWrapper(envs, directory, **options)
    recorder.reset(seed=0)
    return recorder


def check(episode: Episode, steps: int) -> None:
    assert len(episode) == steps
    assert episode.observations[:, 0].tolist() == list(range(steps + 1))
    assert set(episode.observations[:, 1].tolist()) == {episode.lane}
    assert episode.rewards.tolist() == [float(n) for n in range(1, steps + 1)]
    assert [len(column) for column in (episode.actions, episode.terminations, episode.truncations)] == [steps] * 3


def test_episodes_taken_before_a_refresh_give_their_own_arrays(tmp_path: Path) -> None:
    envs = lanes(tmp_path)
    trace = open_trace(tmp_path)
    taken: list[tuple[Episode, int]] = []
    for _ in range(25):
        envs.step(envs.action_space.sample())
        envs.flush()
        trace.refresh()
        taken += [(trace[i], int(steps)) for i, steps in enumerate(trace.episodes["steps"])]
    envs.close()
    trace.refresh()
    assert len({(episode.episode_id, episode.index) for episode, _ in taken}) > len({e.episode_id for e, _ in taken})
    for episode, steps in taken:
        check(episode, steps)
        for part in (episode[1:3], episode[-1:], episode[:0]):
            assert part.observations.tolist() == episode.observations[part.first_step :][: len(part) + 1].tolist()
            assert part.rewards.tolist() == episode.rewards[part.first_step :][: len(part)].tolist()


def test_a_running_episode_stays_what_it_was_and_is_looked_up_again(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=5), tmp_path, record_infos=True)
    env.reset(seed=4, options={"a": 1})
    env.annotate(value=0.5)
    env.step(0)
    env.flush()
    trace = open_trace(tmp_path)
    episode = trace[0]
    for _ in range(4):
        env.step(0)
    env.close()
    trace.refresh()
    assert (len(episode), episode.outcome, counts_of(episode), episode.options) == (1, "running", [0, 1], {"a": 1})
    assert (len(episode.infos), episode.terminations.tolist(), list(episode.annotations)) == (1, [False], ["value"])
    assert (len(trace[0]), trace[0].outcome, trace[0].terminations.tolist()[-1]) == (5, "terminated", True)


def test_a_running_scan_continues_across_a_refresh(tmp_path: Path) -> None:
    envs = lanes(tmp_path)
    for _ in range(6):
        envs.step(envs.action_space.sample())
        envs.flush()
    trace = open_trace(tmp_path)
    steps = trace.episodes["steps"].tolist()
    picked = np.flatnonzero(trace.episodes["lane"] != 1)
    view, player, rows = trace[picked], ReplayEnv(trace), [ObservationRows(trace, i) for i in range(len(trace))]
    begun: list[Iterator[Episode]] = [
        trace.scan(),
        trace.scan(episodes=picked),
        trace.scan(episodes=picked[::-1]),
        iter(view),
    ]
    firsts = [next(scan) for scan in begun]
    for _ in range(20):
        envs.step(envs.action_space.sample())
        envs.flush()
    trace.refresh()
    expected = [range(len(steps)), picked.tolist(), picked[::-1].tolist(), picked.tolist()]
    for first, scan, places in zip(firsts, begun, expected):
        episodes = [first, *scan]
        assert [len(episode) for episode in episodes] == [steps[place] for place in places]
        for episode in episodes:
            check(episode, len(episode))
    for row, count in zip(rows, steps):
        assert [row.value(row.layout, i)[0] for i in range(len(row))] == list(range(count + 1))
    for _ in steps:
        player.reset()
        assert player.episode is not None
        check(player.episode, steps[player.episode.index])
    envs.close()


def test_a_vanished_episode_raises_and_is_not_replaced_by_another(tmp_path: Path) -> None:
    record_lengths(tmp_path, [2, 3], uid="a")
    trace = open_trace(tmp_path)
    episode, view = trace[1], trace[1:]
    pickled = pickle.dumps((episode, view))
    for path in tmp_path.iterdir():
        path.unlink()
    record_lengths(tmp_path, [5], uid="a")
    with pytest.raises(TraceError, match="was changed or removed"):
        pickle.loads(pickled)
    for path in tmp_path.iterdir():
        path.unlink()
    record_lengths(tmp_path, [5], uid="b")
    with pytest.raises(TraceError, match="no longer exists"):
        pickle.loads(pickled)
    trace.refresh()
    with pytest.raises(TraceError, match="look it up again"):
        _ = episode.rewards


def test_a_batch_that_a_listing_missed_moves_no_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.format.batch_files.BATCH_FRAGMENTS", 1)
    record_lengths(tmp_path, [1, 2, 3, 4], flush_after=1)
    missed = sorted(tmp_path.glob("*.gtb"))[1]
    missed.rename(tmp_path / "elsewhere")
    trace = open_trace(tmp_path)
    taken = [(episode, len(episode)) for episode in map(trace.__getitem__, range(len(trace)))]
    (tmp_path / "elsewhere").rename(missed)
    trace.refresh()
    assert trace.episodes["steps"].tolist() == [1, 2, 3, 4]
    read = 0
    for episode, steps in taken:
        try:
            assert counts_of(episode)[-steps:] == list(range(episode.first_step + 1, episode.first_step + steps + 1))
            assert episode.actions.tolist() == [n % 4 for n in range(episode.first_step, episode.first_step + steps)]
            read += 1
        except TraceError:  # steps after the missed ones are no longer a part
            continue
    assert read >= 2


def test_a_handle_does_not_keep_the_table_of_its_time(tmp_path: Path) -> None:
    record_lengths(tmp_path, [1] * 50)
    episode = open_trace(tmp_path)[7]
    assert episode._record.base.size == 1
    assert episode.actions.tolist() == [0]


def test_a_directory_is_found_after_the_working_directory_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env = TraceRecordingWrapper(CountingEnv(length=2), tmp_path / "t")
    env.reset()
    env.step(0)
    env.flush()
    trace = open_trace("t")
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    env.step(0)
    env.close()
    trace.refresh()
    assert trace.directory == tmp_path / "t"
    assert counts_of(trace[0]) == [0, 1, 2]


# -- pickles and threads -----------------------------------------------------------------------------------------------


def _told(what: Any) -> Any:
    if isinstance(what, Trace):
        return [(e.writer, e.episode_id, e.outcome, e.observations.tolist()) for e in what]
    if isinstance(what, Episode):
        arrays = what.observations.tolist(), what.rewards.tolist()
        return what.index, what.outcome, what.first_step, what.options, *arrays
    observation, _ = what.reset()
    return observation.tolist(), [what.step(0)[0].tolist() for _ in range(len(what.episode))]


def things(directory: Path) -> dict[str, Callable[[], Any]]:
    """Return functions that make objects to pickle, each after something of it was read."""

    def used() -> Trace:
        trace = open_trace(directory)
        assert trace[0].rewards.size
        assert trace[-1].options is None
        return trace

    return {
        "trace": used,
        "view": lambda: used()[[4, 1]],
        "view of a view": lambda: used()[1:][::2],
        "episode": lambda: used()[3],
        "slice": lambda: used()[3][1:3],
        "scanned": lambda: list(used().scan())[3],
        "slice of a scanned one": lambda: list(used().scan(columns=("observations", "rewards")))[3][1:3],
        "player": lambda: ReplayEnv(used()),
    }


@pytest.mark.parametrize("name", things(Path()))
def test_traces_episodes_and_players_can_be_pickled_and_copied(tmp_path: Path, name: str) -> None:
    record_lengths(tmp_path, [3, 1, 4, 5, 2], flush_after=4)
    make = things(tmp_path)[name]
    expected = _told(make())
    for duplicate in (pickle.loads(pickle.dumps(make())), copy.deepcopy(make()), copy.copy(make())):
        assert _told(duplicate) == expected
    assert len(pickle.dumps(make())) < 5000


def test_a_player_that_was_pickled_in_mid_episode_plays_on(tmp_path: Path) -> None:
    record_lengths(tmp_path, [4])
    player = ReplayEnv(tmp_path)
    player.reset()
    player.step(0)
    for duplicate in (pickle.loads(pickle.dumps(player)), copy.deepcopy(player)):
        assert [duplicate.step(0)[0][0] for _ in range(3)] == [2, 3, 4]
    assert player.step(0)[0][0] == 2


def test_a_pickled_trace_has_the_same_episodes_when_more_has_been_recorded(tmp_path: Path) -> None:
    envs = lanes(tmp_path)
    for _ in range(6):
        envs.step(envs.action_space.sample())
        envs.flush()
    trace = open_trace(tmp_path)
    expected = _told(trace)
    pickled = [
        pickle.dumps(what) for what in (trace, trace[1:], list(trace.scan()), [trace[i] for i in range(len(trace))])
    ]
    for _ in range(9):
        envs.step(envs.action_space.sample())
    envs.close()
    again, view, scanned, episodes = map(pickle.loads, pickled)
    assert _told(again) == expected
    assert _told(view) == expected[1:]
    for taken in (scanned, episodes):
        assert [(e.writer, e.episode_id, e.outcome, e.observations.tolist()) for e in taken] == expected
    assert again.refresh() > 0
    assert _told(again) == _told(open_trace(tmp_path))
    assert view.refresh() == 0


def test_other_processes_read_what_they_are_given(tmp_path: Path) -> None:
    record_lengths(tmp_path, [3, 1, 4, 5, 2])
    trace = open_trace(tmp_path)
    given = [trace, trace[1:3], trace[2], trace[3][1:4], ReplayEnv(trace)]
    expected = [_told(what) for what in (trace, trace[1:3], trace[2], trace[3][1:4], ReplayEnv(trace))]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        assert list(pool.map(_told, given)) == expected


def test_eight_threads_read_one_trace_while_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.playback.opened._CACHE_BYTES", 3000)  # so that chunks come and go all the time
    with small_blocks():
        envs = lanes(tmp_path)
    for _ in range(60):
        envs.step(envs.action_space.sample())
    envs.flush()
    trace, done = open_trace(tmp_path), threading.Event()

    def read(seed: int) -> int:
        random, count = np.random.default_rng(seed), 0
        shared = trace[0]
        while not done.is_set() or not count:
            now = trace[:]
            i = int(random.integers(len(now)))
            check(now[i], int(now.episodes["steps"][i]))
            assert len(shared[: count % 3].rewards) == count % 3
            if seed == 0:
                trace.refresh()
            count += 1
        return count

    with ThreadPoolExecutor(8) as pool:
        readers = [pool.submit(read, seed) for seed in range(8)]
        try:
            for _ in range(60):
                envs.step(envs.action_space.sample())
                envs.flush()
            envs.close()  # which seals the batch that they are reading
        finally:
            done.set()
        assert all(reader.result() for reader in readers)
    cache = trace._opened.cache
    assert cache._bytes == sum(size for _, size in cache._chunks.values())
    assert cache._bytes <= 3000 or len(cache) == 1


# -- views -------------------------------------------------------------------------------------------------------------


def test_slices_indices_and_masks_give_views(tmp_path: Path) -> None:
    record_lengths(tmp_path, [3, 1, 4, 5, 2], uid="a")
    record_lengths(tmp_path, [6, 7], uid="b", on_exist="append")
    trace = open_trace(tmp_path)
    for chosen, lengths in (
        (slice(0, 3), [3, 1, 4]),
        ([1, 4], [1, 2]),
        (np.array([6, 0]), [7, 3]),
        (trace.episodes["steps"] > 4, [5, 6, 7]),
        (slice(None, None, -3), [7, 5, 3]),
        ([2, 2], [4, 4]),
        ([], []),
    ):
        view = trace[chosen]
        assert isinstance(view, Trace)
        assert [len(view[i]) for i in range(len(view))] == lengths
        assert [len(episode) for episode in view] == lengths
        assert [len(episode) for episode in view.scan(columns=("rewards",))] == lengths
        assert [episode.index for episode in view] == view.episodes["index"].tolist() == list(range(len(lengths)))
        assert [view.writers[row["writer"]] for row in view.episodes] == [episode.writer for episode in view]
        seen: list[int] = []
        assert scan_recorded_traces(view, lambda _, actions, __, seen=seen: seen.append(len(actions))) == len(lengths)
        assert seen == lengths
        assert view.refresh() == 0
    assert [len(e) for e in trace[3:].scan(episodes=[1, 3])] == [2, 7]
    assert [len(e) for e in trace[3:][trace[3:].episodes["steps"] > 5]] == [6, 7]
    assert trace[5:].writers == ["b"]
    assert trace[-1].index == 6
    for wrong in ([9], np.zeros(3, bool), "ab", 1.5):
        with pytest.raises((InvalidOption, TypeError)):
            trace[wrong]  # type: ignore[index]


def test_functions_that_take_a_trace_take_a_view(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path)
    env.action_space.seed(2)
    for number in range(5):
        env.reset(seed=7 if number == 0 else None)
        ended = False
        while not ended:
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            ended = terminated or truncated
    env.close()
    trace = open_trace(tmp_path)
    steps = trace.episodes["steps"]
    view = trace[[3, 1]]
    verdicts = sorted(verify_trace(view), key=lambda verdict: verdict.index)
    assert [(v.index, v.steps, v.verdict) for v in verdicts] == [
        (0, steps[3], "identical"),
        (1, steps[1], "identical"),
    ]
    assert [(v.index, v.steps) for v in verify_trace(view, episodes=[1])] == [(1, steps[1])]
    assert [found.difference for found in diff_traces(view, trace[[3, 1]])] == [None, None]
    summary = summarize(view, by="outcome", columns=True)
    assert (summary["episodes"], summary["steps"]) == (2, steps[3] + steps[1])
    assert summary["rewards"]["count"] == steps[3] + steps[1]
    assert summary["storage"] is None
    assert sorted(load_results(view)["episode_lengths"]) == sorted([steps[3], steps[1]])
    player = ReplayEnv(view)
    assert bits(player.reset()[0]) == bits(trace[3].observations[0])
    assert view.make_env().spec.id == "CartPole-v1"


def test_a_view_speaks_for_its_own_writers_alone(tmp_path: Path) -> None:
    record_lengths(tmp_path, [2], uid="a")
    record_lengths(tmp_path, [3], env=ImageEnv(10**6), uid="b", on_exist="append")
    trace = open_trace(tmp_path)
    assert trace[1:].observation_space == ImageEnv().observation_space
    assert ReplayEnv(trace[:1]).observation_space == CountingEnv().observation_space


# -- how an episode began ----------------------------------------------------------------------------------------------


def test_how_an_episode_began_is_found_without_looking_through_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=1), tmp_path, record_infos=True)
    for number in range(300):
        env.reset(options={"number": number})
        env.step(0)
        if number % 50 == 49:
            env.flush()
    env.close()
    trace = open_trace(tmp_path)
    chunks = index_of(trace).readers[0].chunk_count
    assert chunks >= 6

    class Watched(np.ndarray):  # type: ignore[type-arg]
        looked_at = 0

        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            Watched.looked_at += np.size(found)
            return found

    assert trace[5].options == {"number": 5}  # finds the beginnings of all of them
    fragments = index_of(trace).readers[0].fragments
    monkeypatch.setattr(fragments, "flags", fragments.flags.view(Watched))
    for i in (0, 299, 150, 151):
        Watched.looked_at = 0
        assert trace[i].options == {"number": i}
        assert trace[i].reset_info == {"reset": True}
        assert Watched.looked_at < 300  # not even once at each
    assert Watched.looked_at
    assert [episode.options for episode in trace] == [{"number": n} for n in range(300)]
