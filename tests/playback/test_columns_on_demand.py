"""Columns of episodes that are made when they are asked for equal those that a plain loop over all fragments finds."""

from __future__ import annotations

import gc
import pickle
import threading
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from scripted_env import CountingEnv, small_blocks

from gym_trace import TraceRecordingWrapper, open_trace
from gym_trace.data.vocabulary import OUTCOMES, Outcome
from gym_trace.format import wire
from gym_trace.format.fragments import Fragments
from gym_trace.playback.episode_index import EpisodeIndex, index_of
from gym_trace.playback.episode_table import EPISODE, OUTCOME_CODE, episode_runs

NAT = np.iinfo(np.int64).min
FLAGS = [wire.STARTS, wire.HAS_INITIAL, wire.TERMINATED, wire.STOPS, wire.ENDS, wire.PLACEHOLDER]
SEVERAL = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 1, 2, 3, 1 << 41]),  # episode
        st.integers(0, 4),  # first step
        st.integers(0, 3),  # steps
        st.sets(st.sampled_from(FLAGS)).map(sum),
        st.integers(0, 9),  # outcome
        st.floats(width=64),  # sum of rewards
        st.integers(-2, 3),  # seed
    ),
    max_size=14,
)


def table_of(several: list[tuple[Any, ...]]) -> Any:
    table = np.zeros(len(several), wire.FRAGMENT)
    for i, (episode, first, steps, flags, outcome, reward, seed) in enumerate(several):
        table[i] = (episode, first, steps, i % 2, flags, outcome, reward, seed, 100 + i, -i, 10 * i, i)
    return table


def plain_runs(table: Any, among: list[int]) -> list[list[int]]:
    """Return the fragments of each row."""
    by_episode: dict[int, list[int]] = {}
    for f in among:
        if table[f]["steps"] or table[f]["flags"] & wire.HAS_INITIAL:
            by_episode.setdefault(int(table[f]["episode"]), []).append(f)
    runs: list[list[int]] = []
    for of_episode in by_episode.values():
        end = None
        for f in of_episode:
            if end is None or table[f]["flags"] & wire.HAS_INITIAL or int(table[f]["first_step"]) != end:
                runs.append([])
            runs[-1].append(f)
            end = int(table[f]["first_step"]) + int(table[f]["steps"])
    return sorted(runs, key=lambda run: run[-1])


def plain_row(table: Any, among: list[int], run: list[int], alive: bool) -> dict[str, Any]:
    first, last = table[run[0]], table[run[-1]]
    same = [f for f in among if table[f]["episode"] == first["episode"]]
    start = next((table[f] for f in same if table[f]["flags"] & wire.STARTS), None)
    end = next((table[f] for f in same if table[f]["flags"] & wire.ENDS), None)
    trimmed = not first["flags"] & wire.HAS_INITIAL
    total = first["reward_sum"]
    for f in run[1:]:
        with np.errstate(all="ignore"):
            total = total + table[f]["reward_sum"]
    code = (Outcome.RUNNING if alive else Outcome.LOST) if end is None else min(int(end["outcome"]), Outcome.CLOSED)
    started = NAT if start is None else int(start["start_time"])
    known = start is not None and end is not None
    return {
        "episode_id": int(first["episode"]),
        "lane": int(first["lane"]),
        "first_step": int(first["first_step"]) + trimmed,
        "steps": sum(int(table[f]["steps"]) for f in run) - trimmed,
        "return": np.nan if trimmed else total,
        "outcome": OUTCOMES[code],
        "seed": wire.NO_SEED if start is None else int(start["seed"]),
        "start_time": np.datetime64(started, "ns"),
        "end_time": np.datetime64(started + int(end["duration"]) + int(end["clock_drift"]) if known else NAT, "ns"),
        "clock_offset": 0 if start is None else int(start["clock_offset"]),
        "duration": 0 if end is None else int(end["duration"]),
        "has_final_observation": not last["flags"] & wire.PLACEHOLDER,
    }


def same(found: Any, expected: Any) -> bool:
    return bool(np.array_equal(found, expected, equal_nan=found.dtype.kind in "fM"))


@given(SEVERAL, st.booleans(), st.data())
def test_columns_at_any_rows_equal_those_of_a_plain_loop(
    several: list[tuple[Any, ...]], alive: bool, data: st.DataObject
) -> None:
    table = table_of(several)
    everything = list(range(len(table)))
    among = data.draw(st.one_of(st.none(), st.sets(st.sampled_from(everything)).map(sorted))) if everything else None
    there = everything if among is None else among
    parts = episode_runs(Fragments([table]), alive, None if among is None else np.array(among, np.int64))
    runs = plain_runs(table, there)
    fragments = parts.fragments.tolist()
    assert [fragments[a:b] for a, b in pairwise(parts.first.tolist())] == runs
    owner = {f: row for row, run in enumerate(runs) for f in run}
    assert parts.of_fragment.tolist() == [owner.get(f, -1) for f in everything]
    expected = np.zeros(len(runs), EPISODE)
    expected["index"] = np.arange(len(runs))
    for row, run in enumerate(runs):
        for name, value in plain_row(table, there, run, alive).items():
            expected[name][row] = value
    begin = data.draw(st.integers(0, len(runs)))
    end = data.draw(st.integers(begin, len(runs)))
    places = np.array(data.draw(st.lists(st.integers(0, len(runs) - 1), max_size=9)) if runs else [], np.int64)
    for rows in (slice(None), slice(begin, end), places):
        for name in EPISODE.names or ():
            assert same(parts.column(name, rows), expected[name][rows]), name
        codes = parts.column(OUTCOME_CODE, rows).tolist()
        assert [OUTCOMES[code] for code in codes] == expected["outcome"][rows].tolist()
    whole = parts.table()
    assert whole.dtype == EPISODE
    assert all(same(whole[name], expected[name]) for name in EPISODE.names or ())


class ManyEnvs(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Lanes whose episodes have one and two steps in turn."""

    def __init__(self, lanes: int) -> None:
        self.num_envs, self.calls = lanes, 0
        self.single_observation_space = spaces.Box(-1, 1, (1,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, lanes)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, lanes)
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}
        self.rows = np.zeros((lanes, 1), np.float32)
        self.ended = np.zeros(lanes, np.bool_)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.rows.copy(), {}

    def step(self, actions: Any) -> Any:
        self.calls += 1
        ends = ~self.ended & ((np.arange(self.num_envs) + self.calls) % 2 == 0)
        self.ended = ends
        return self.rows.copy(), np.ones(self.num_envs), ends.copy(), np.zeros(self.num_envs, np.bool_), {}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of about 100,000 episodes, whose fragments are not in the order of their episodes."""
    if not hasattr(gymnasium.vector, "AutoresetMode"):
        pytest.skip("vector environments need gymnasium 1.1")
    from gym_trace import TraceRecordingVectorWrapper

    directory = tmp_path_factory.mktemp("many")
    envs = TraceRecordingVectorWrapper(ManyEnvs(512), directory)
    envs.reset(seed=0)
    for _ in range(400):
        envs.step(np.zeros(512, np.int64))
    envs.close()
    return directory


def test_a_trace_of_many_episodes_is_opened_in_little_memory_for_each(many: Path) -> None:
    open_trace(many)
    gc.collect()
    tracemalloc.start()
    trace = open_trace(many)
    count, fragments = len(trace), len(index_of(trace).readers[0].fragments)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count > 50_000
    assert held < 75 * fragments  # a row of the fragment table has 80 bytes, one of episodes 129
    assert peak < 150 * fragments


def test_tables_of_many_episodes_are_compared_in_little_memory(many: Path) -> None:
    one, same_one = index_of(open_trace(many)), index_of(open_trace(many))
    assert one.has_rows_of(same_one)  # decodes the fragments
    tracemalloc.start()
    assert one.has_rows_of(same_one)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * len(one)
    other = index_of(open_trace(many)[np.append(np.arange(len(one) - 1), 0)])
    assert not one.has_rows_of(other)
    assert not one.has_rows_of(index_of(open_trace(many)[:-1]))


def test_columns_records_and_scans_of_many_episodes_equal_their_table(many: Path) -> None:
    trace, again = open_trace(many), open_trace(many)
    table = trace.episodes
    for name in EPISODE.names or ():
        assert same(index_of(again)[name], table[name]), name
    assert (table["outcome"] == np.array(OUTCOMES)[index_of(again)[OUTCOME_CODE]]).all()
    places = np.random.default_rng(0).integers(0, len(table), 40)
    for place in places.tolist():
        assert again[place]._record.tobytes() == table[place].tobytes()  # which filled parts of its table
    assert again.episodes.tobytes() == table.tobytes()
    view = open_trace(many)[places]
    for name in EPISODE.names or ():
        expected = np.arange(40) if name == "index" else table[name][places]
        assert same(index_of(view)[name], expected), name
    records = [episode._record for episode in open_trace(many).scan(columns=("rewards",), episodes=slice(0, 3000))]
    assert b"".join(pickle.loads(pickle.dumps(record)).tobytes() for record in records) == table[:3000].tobytes()


def test_episodes_whose_ids_are_far_apart_are_ordered_and_found() -> None:
    random = np.random.default_rng(0)
    table = np.zeros(2000, wire.FRAGMENT)
    table["episode"] = random.permutation(np.arange(2000, dtype=np.uint64) << np.uint64(53))
    table["flags"], table["seed"] = wire.STARTS | wire.HAS_INITIAL | wire.ENDS, np.arange(2000)
    parts = episode_runs(Fragments([table]), False)
    assert parts["seed"].tolist() == list(range(2000))
    assert (parts["episode_id"].astype(np.uint64) == table["episode"]).all()


def test_threads_fill_a_table_once(many: Path) -> None:
    trace = open_trace(many)
    expected = open_trace(many).episodes.tobytes()
    found: list[bytes] = []

    def ask(seed: int) -> None:
        for place in np.random.default_rng(seed).integers(0, len(trace), 30).tolist():
            found.append(trace[place]._record.tobytes())
        found.append(trace.episodes.tobytes())

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 * 31
    assert found.count(expected) == 4


def test_selections_see_changes_of_the_table(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=2), tmp_path)
    for _ in range(5):
        env.reset()
        env.step(0)
        env.step(0)
    env.close()
    trace = open_trace(tmp_path)
    trace.episodes["return"] = [3.0, 1.0, 2.0, 5.0, 4.0]
    assert trace.select(sort="return").indices.tolist() == [1, 2, 0, 4, 3]
    assert index_of(trace)["return"].tolist() == [3.0, 1.0, 2.0, 5.0, 4.0]
    assert trace[[3, 0]].episodes["return"].tolist() == [5.0, 3.0]
    assert index_of(open_trace(tmp_path))["return"].tolist() != [3.0, 1.0, 2.0, 5.0, 4.0]


def test_a_live_trace_grows_by_what_is_new_in_columns_and_table(tmp_path: Path) -> None:
    with small_blocks():
        env = TraceRecordingWrapper(CountingEnv(length=3), tmp_path)
        env.reset()
        env.step(0)
        trace = open_trace(tmp_path)
        for round_ in range(6):
            for _ in range(4 * (round_ + 1)):
                env.reset()
                for _ in range(3):
                    env.step(0)
            if round_ % 2:
                env.flush()
            trace.refresh()
            fresh = open_trace(tmp_path)
            for name in EPISODE.names or ():
                assert same(index_of(trace)[name], index_of(fresh)[name]), name
            assert trace.episodes.tobytes() == fresh.episodes.tobytes()
            assert len(trace) == len(index_of(fresh)["steps"])
        env.close()


def test_shares_of_parts_are_those_of_their_own_fragments() -> None:
    table = table_of([(i // 3, i % 3, 1, wire.HAS_INITIAL * (i % 3 == 0) | wire.STARTS * (i % 3 == 0), 0, 1.0, i)
                      for i in range(12)])  # fmt: skip
    whole = episode_runs(Fragments([table]), False)
    own = Fragments([table[3:9]])
    share, alone = whole.share(own, 3, 1, 3), episode_runs(own, False)
    assert len(share) == len(alone) == 2
    assert share.table().tobytes() == alone.table().tobytes()
    assert share.of_fragment.tolist() == alone.of_fragment.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_content_without_writers_or_episodes_has_empty_columns() -> None:
    content = EpisodeIndex.whole(())
    assert len(content) == len(content.table) == len(content["steps"]) == 0
    assert content[OUTCOME_CODE].tolist() == []
    assert len(content.view(np.arange(0)).table) == 0
