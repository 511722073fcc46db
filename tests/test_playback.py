"""Reading a trace back: in a stream, at random, while it is written, with nothing but NumPy at hand."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from zoo import CountingEnv, ImageEnv, OddSpace, ScriptedEnv, Told, bits

from gym_trace import TraceRecordingWrapper, open_trace, scan_recorded_traces
from gym_trace.errors import (
    CorruptTrace,
    EnvironmentUnavailable,
    InvalidOption,
    TraceError,
    TraceNotFound,
)
from gym_trace.stored import StoredWriter


def record(directory: Path, lengths: list[int], env: Any = None, flush_after: int = 0, **options: Any) -> None:
    """Episodes of the given lengths; flush_after: a chunk ends after so many steps each."""
    wrapped = TraceRecordingWrapper(CountingEnv(length=10**6) if env is None else env, directory, **options)
    steps = 0
    for number, length in enumerate(lengths):
        wrapped.reset(seed=number)
        for step in range(length):
            wrapped.step(step % 4)
            steps += 1
            if flush_after and steps % flush_after == 0:
                wrapped.flush()
    wrapped.close()


def counts_of(episode: Any) -> list[int]:
    counts: list[int] = episode.observations[:, 0].tolist()
    return counts


def check(trace: Any, lengths: list[int]) -> None:
    assert [counts_of(episode) for episode in trace] == [list(range(length + 1)) for length in lengths]


def watched_chunks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, frozenset[str]]]:
    """The chunks, and what of them, that are read from now on."""
    read: list[tuple[int, frozenset[str]]] = []
    chunk = StoredWriter.chunk

    def watched(self: Any, number: int, roots: frozenset[str]) -> Any:
        read.append((number, roots))
        return chunk(self, number, roots)

    monkeypatch.setattr(StoredWriter, "chunk", watched)
    return read


# -- opening ----------------------------------------------------------------------------------------------------------


def test_what_is_no_trace_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    (tmp_path / "empty").mkdir()
    for path, reason in ((tmp_path / "none", "no such"), (tmp_path / "file", "file"), (tmp_path / "empty", "no trace")):
        for opening in (open_trace, scan_recorded_traces):
            with pytest.raises(TraceNotFound, match=reason) as caught:
                opening(path)
            assert str(path) in str(caught.value)
            assert "\n" not in str(caught.value)
    assert issubclass(TraceNotFound, FileNotFoundError)


def test_opening_reads_no_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path, [5, 6, 7])
    read = watched_chunks(monkeypatch)
    trace = open_trace(str(tmp_path))
    assert trace.episodes["steps"].tolist() == [5, 6, 7]
    assert trace.episodes["return"].tolist() == [15.0, 21.0, 28.0]
    assert trace.episodes["seed"].tolist() == [0, 1, 2]
    assert [repr(episode) for episode in (trace[0], trace[-1])]
    assert read == []


# -- random access ----------------------------------------------------------------------------------------------------


def test_episodes_are_found_by_their_place(tmp_path: Path) -> None:
    record(tmp_path, [3, 0, 5, 1])
    trace = open_trace(tmp_path)
    assert len(trace) == 4
    assert [len(trace[i]) for i in range(-4, 4)] == [3, 0, 5, 1] * 2
    assert [trace[i].index for i in range(4)] == [0, 1, 2, 3]
    assert counts_of(trace[np.int64(2)]) == [0, 1, 2, 3, 4, 5]
    for beyond in (4, -5, 10**9):
        with pytest.raises(IndexError):
            trace[beyond]


def test_random_access_reads_only_the_chunks_of_the_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path, [10] * 30, flush_after=25)
    trace = open_trace(tmp_path)
    read = watched_chunks(monkeypatch)
    assert counts_of(trace[17]) == list(range(11))
    assert len(read) <= 2
    assert {root for _, roots in read for root in roots} == {"observations"}
    trace[17].rewards.sum()
    counts_of(trace[17])
    assert len(read) <= 4  # what was read is remembered


def test_what_random_access_remembers_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path, [10] * 50, flush_after=10)
    monkeypatch.setattr("gym_trace.playback._CACHE_BYTES", 2000)
    trace = open_trace(tmp_path)
    for _ in range(2):
        for i in (3, 40, 7, 22, 0):
            assert counts_of(trace[i]) == list(range(11))
    assert trace._cached_bytes <= 2000
    assert len(trace._cache) < 20


def test_an_episode_is_joined_over_many_chunks(tmp_path: Path) -> None:
    record(tmp_path, [100, 3, 250], flush_after=7)
    trace = open_trace(tmp_path)
    assert trace.stored[0].chunk_count > 40
    check(trace, [100, 3, 250])
    assert [counts_of(trace[i]) for i in (2, 0)] == [list(range(251)), list(range(101))]
    assert trace[2].rewards.tolist() == list(range(1, 251))


# -- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("episodes", "expected"),
    [
        (None, [0, 1, 2, 3, 4, 5]),
        (slice(1, 4), [1, 2, 3]),
        (slice(None, None, 2), [0, 2, 4]),
        (slice(None, None, -1), [5, 4, 3, 2, 1, 0]),
        (slice(10, 20), []),
        ([], []),
        ([4], [4]),
        ([3, 1, 1, -1], [3, 1, 1, 5]),
        (range(2, 5), [2, 3, 4]),
        pytest.param((i for i in (0, 5)), [0, 5], id="a generator"),
        (np.array([True, False, False, True, False, True]), [0, 3, 5]),
        ([False, True, False, False, False, False], [1]),
        (np.array([2, 4], np.uint8), [2, 4]),
    ],
    ids=repr,
)
def test_episodes_come_as_they_were_asked_for(tmp_path: Path, episodes: Any, expected: list[int]) -> None:
    record(tmp_path, [1, 2, 3, 4, 5, 6], flush_after=4)
    found = list(open_trace(tmp_path).scan(episodes=episodes))
    assert [episode.index for episode in found] == expected
    assert [counts_of(episode) for episode in found] == [list(range(i + 2)) for i in expected]


@pytest.mark.parametrize(
    "options",
    [
        {"episodes": [7]},
        {"episodes": [-4]},
        {"episodes": [0.5]},
        {"episodes": np.array([True])},
        {"episodes": np.zeros((2, 2), int)},
        {"columns": ["observation"]},
        {"columns": "rewardz"},
        {"on_damage": "ignore"},
    ],
    ids=repr,
)
def test_a_request_that_makes_no_sense_is_refused_at_once(tmp_path: Path, options: Any) -> None:
    record(tmp_path, [1, 2, 3])
    with pytest.raises(InvalidOption):
        open_trace(tmp_path).scan(**options)


def test_only_the_columns_that_were_asked_for_are_there(tmp_path: Path) -> None:
    record(tmp_path, [2, 3])
    for episode in open_trace(tmp_path).scan(columns=["rewards", "truncations"]):
        assert episode.rewards.tolist() == list(range(1, len(episode) + 1))
        assert episode.truncations.tolist() == [False] * len(episode)
        assert episode.seed == episode.index
        for name in ("observations", "actions", "terminations", "infos", "annotations"):
            with pytest.raises(TraceError, match="columns"):
                getattr(episode, name)
    assert [len(episode) for episode in open_trace(tmp_path).scan(columns=[])] == [2, 3]


def test_columns_that_were_not_asked_for_are_not_read(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 255, (40, 500), np.uint8)
    env = ScriptedEnv(
        spaces.Box(0, 255, (500,), np.uint8), spaces.Discrete(4), [(rows[0], [Told(row) for row in rows[1:]])]
    )  # fmt: skip
    record(tmp_path, [39], env)
    (batch,) = tmp_path.glob("*.gtb")
    data = bytearray(batch.read_bytes())
    data[data.find(rows[20].tobytes()[:40]) if rows[20].tobytes()[:40] in data else len(data) // 2] ^= 1
    batch.write_bytes(data)
    for episode in open_trace(tmp_path).scan(columns=["rewards", "actions"]):
        assert len(episode.rewards) == 39
        assert episode.actions.tolist() == [step % 4 for step in range(39)]
    with pytest.raises(CorruptTrace, match="checksum"):
        list(open_trace(tmp_path).scan(columns=["observations"]))
    with pytest.raises(CorruptTrace, match="checksum"):
        scan_recorded_traces(tmp_path)


def test_each_chunk_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path, [10] * 20, flush_after=15)
    trace = open_trace(tmp_path)
    read = watched_chunks(monkeypatch)
    check(trace, [10] * 20)
    numbers = [number for number, _ in read]
    assert numbers == sorted(set(numbers))
    read.clear()
    list(trace.scan(episodes=[3, 4]))
    assert len(read) <= 3


def test_a_long_trace_is_read_in_bounded_memory(tmp_path: Path) -> None:
    steps = 5000  # 77 MB of images
    record(tmp_path, [100] * (steps // 100), ImageEnv(length=10**6))
    trace = open_trace(tmp_path)
    callbacks = 0

    def count(observations: Any, actions: Any, rewards: Any) -> None:
        nonlocal callbacks
        callbacks += len(actions)

    readings: list[Any] = [
        lambda: sum(len(episode.observations) for episode in trace),
        lambda: scan_recorded_traces(tmp_path, count),
    ]
    for reading in readings:
        gc.collect()
        tracemalloc.start()
        reading()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 45 << 20
    assert callbacks == steps


# -- the callback -----------------------------------------------------------------------------------------------------


def test_a_truthy_result_ends_the_scan(tmp_path: Path) -> None:
    record(tmp_path, [1, 2, 3, 4, 5])
    seen: list[int] = []

    def until_three(observations: Any, actions: Any, rewards: Any) -> bool:
        seen.append(len(actions))
        return len(actions) == 3

    assert scan_recorded_traces(tmp_path, until_three) == 3
    assert seen == [1, 2, 3]


@pytest.mark.parametrize(("limit", "expected"), [(None, 3), (0, 0), (1, 1), (3, 3), (100, 3), (-1, 0)])
def test_no_more_episodes_than_asked_for(tmp_path: Path, limit: int | None, expected: int) -> None:
    record(tmp_path, [1, 2, 3])
    seen: list[int] = []
    assert scan_recorded_traces(str(tmp_path), lambda o, a, r: seen.append(len(a)), max_episodes=limit) == expected
    assert len(seen) == expected


def test_a_scan_without_a_callback_counts(tmp_path: Path) -> None:
    record(tmp_path, [1, 2, 3])
    assert scan_recorded_traces(tmp_path) == 3
    assert scan_recorded_traces(tmp_path, None, 2) == 2


def test_an_error_in_the_callback_is_the_callers(tmp_path: Path) -> None:
    record(tmp_path, [1])

    def fail(*_: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        scan_recorded_traces(tmp_path, fail)


# -- arrays belong to whoever asked for them --------------------------------------------------------------------------

NESTED = spaces.Dict(
    {"image": spaces.Box(0, 255, (8, 8), np.uint8), "pair": spaces.Tuple([spaces.Discrete(5), spaces.Text(3)])}
)


def record_nested(directory: Path) -> None:
    def observation(i: int) -> Any:
        return {"image": np.full((8, 8), i % 200, np.uint8), "pair": (np.int64(i % 5), "abc"[: i % 3])}

    objects = np.empty(2, object)
    objects[:] = [np.arange(3), {"deep": [1]}]
    info = {"list": [1, [2]], "array": np.arange(3.0), "objects": objects, "map": {"a": {"b": 1}}}
    steps = [Told(observation(i), 0.5 * i, info=info) for i in range(1, 30)]
    env = ScriptedEnv(NESTED, spaces.Box(-1, 1, (2,)), [(observation(0), steps)] * 4)
    wrapped = TraceRecordingWrapper(env, directory, record_infos=True)
    for number in range(4):
        wrapped.reset(options={"a": {"b": [1, 2]}} if number % 2 else None)
        for i in range(29):
            wrapped.annotate(logits=np.full(2, i, np.float32), odd=[i] if i % 2 else np.arange(i))
            wrapped.step(np.full(2, i / 40, np.float32))
            if i % 11 == 0:
                wrapped.flush()
    wrapped.close()


def everything_of(episode: Any) -> list[Any]:
    return [
        episode.observations,
        episode.actions,
        episode.rewards,
        episode.terminations,
        episode.truncations,
        episode.infos,
        episode.annotations,
        episode.options,
        episode.rng_state,
    ]


def ruin(value: Any) -> None:
    """Writes over everything that can be written over."""
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


def test_what_is_written_into_an_episode_changes_nothing_that_is_read_later(tmp_path: Path) -> None:
    record_nested(tmp_path)
    expected = [bits(everything_of(episode)) for episode in open_trace(tmp_path)]
    trace = open_trace(tmp_path)
    for _ in range(2):
        for i in range(4):
            episode = trace[i]
            assert bits(everything_of(episode)) == expected[i]
            ruin(everything_of(episode))
    for i, episode in enumerate(trace):
        assert bits(everything_of(episode)) == expected[i]
        ruin(everything_of(episode))
    for i, episode in enumerate(trace.scan(episodes=[3, 2, 2, 0])):
        assert bits(everything_of(episode)) == expected[[3, 2, 2, 0][i]]
        ruin(everything_of(episode))


def test_what_a_callback_writes_changes_nothing_that_comes_later(tmp_path: Path) -> None:
    record(tmp_path, [5, 0, 7, 9], flush_after=4)
    seen: list[Any] = []

    def look_and_ruin(*arrays: Any) -> None:
        seen.append(bits(arrays))
        ruin(arrays)

    scan_recorded_traces(tmp_path, look_and_ruin)
    expected = [bits((e.observations, e.actions, e.rewards)) for e in open_trace(tmp_path)]
    assert seen == expected


def test_arrays_outlive_the_trace_and_its_files(tmp_path: Path) -> None:
    record(tmp_path, [5, 7])
    kept = [episode.observations for episode in open_trace(tmp_path)]
    for path in tmp_path.iterdir():
        path.unlink()
    gc.collect()
    assert [array[:, 0].tolist() for array in kept] == [list(range(6)), list(range(8))]


def test_an_episode_keeps_its_arrays(tmp_path: Path) -> None:
    record(tmp_path, [5])
    episode = open_trace(tmp_path)[0]
    episode.observations[0] = 99
    assert episode.observations[0, 0] == 99  # they are its reader's own


# -- live traces ------------------------------------------------------------------------------------------------------


def test_an_episode_is_there_when_it_has_ended(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=3), tmp_path, flush_seconds=100)
    trace = open_trace(tmp_path)
    assert len(trace) == 0
    env.reset()
    env.step(0)
    env.flush()
    assert trace.refresh() == 0
    assert list(trace) == []
    env.step(0)
    env.flush()
    env.step(0)
    env.flush()
    assert trace.refresh() == 1
    check(trace, [3])
    assert trace[0].outcome == "terminated"
    env.reset()
    env.step(0)
    env.flush()
    assert trace.refresh() == 0
    env.reset()
    env.flush()
    assert trace.refresh() == 1
    env.close()
    assert trace.refresh() == 1
    assert [str(outcome) for outcome in trace.episodes["outcome"]] == ["terminated", "cut", "closed"]
    assert trace.refresh() == 0
    check(trace, [3, 1, 0])


def test_an_episode_opened_earlier_can_be_read_after_the_trace_has_grown(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=3), tmp_path)
    trace = None
    for number in range(3):
        env.reset()
        for _ in range(3):
            env.step(number)
        env.flush()
        if trace is None:
            trace = open_trace(tmp_path)
            first = trace[0]
    env.close()
    assert trace is not None
    trace.refresh()
    assert first.actions.tolist() == [0, 0, 0]
    assert [episode.actions[0] for episode in trace] == [0, 1, 2]


def test_a_new_writer_appears_at_refresh(tmp_path: Path) -> None:
    record(tmp_path, [1, 2], uid="b")
    trace = open_trace(tmp_path)
    record(tmp_path, [3], uid="a", on_exist="append")
    assert trace.refresh() == 1
    assert trace.writers == ["b", "a"]  # the one that began first
    assert [len(episode) for episode in trace] == [1, 2, 3]
    assert trace.episodes["writer"].tolist() == [0, 0, 1]
    assert trace.episodes["index"].tolist() == [0, 1, 2]


def test_a_trace_is_read_while_it_is_written(tmp_path: Path) -> None:
    episodes = 300
    env = TraceRecordingWrapper(CountingEnv(length=17), tmp_path, flush_seconds=0.01)

    def run() -> None:
        for _ in range(episodes):
            env.reset()
            for step in range(17):
                env.step(step % 4)
            threading.Event().wait(0.001)
        env.close()

    thread = threading.Thread(target=run)
    thread.start()
    trace = open_trace(tmp_path)
    seen = 0
    try:
        while thread.is_alive():
            seen += trace.refresh()
            for i in range(max(0, len(trace) - 3), len(trace)):
                assert counts_of(trace[i]) == list(range(18))
    finally:
        thread.join()
    seen += trace.refresh()
    assert seen == len(trace) == episodes
    assert trace.damage == []
    check(trace, [17] * episodes)


def test_what_a_dead_writer_left_open_is_lost_but_there(tmp_path: Path) -> None:
    script = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from zoo import CountingEnv
from gym_trace import TraceRecordingWrapper
env = TraceRecordingWrapper(CountingEnv(length=4), {str(tmp_path)!r})
for length in (4, 2):
    env.reset(seed=length)
    for _ in range(length):
        env.step(3)
env.flush()
print("ready", flush=True)
sys.stdin.readline()
os._exit(9)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        trace = open_trace(tmp_path)
        assert [str(outcome) for outcome in trace.episodes["outcome"]] == ["terminated"]
        process.stdin.close()
        process.wait(30)
    assert trace.refresh() == 1
    check(trace, [4, 2])
    lost = trace[1]
    assert (lost.outcome, lost.seed, lost.end_time, lost.actions.tolist()) == ("lost", 2, None, [3, 3])
    assert not lost.terminations.any()
    assert scan_recorded_traces(tmp_path) == 2


# -- several writers --------------------------------------------------------------------------------------------------


def test_writers_share_a_trace_and_keep_their_own(tmp_path: Path) -> None:
    record(tmp_path, [1, 2], uid="a", split="train", metadata={"run": 1})
    record(tmp_path, [3], uid="b", split="eval", on_exist="append")
    record(tmp_path, [], uid="c", on_exist="append")
    record(tmp_path, [4, 5], env=ImageEnv(length=10**6), uid="d", on_exist="append")
    trace = open_trace(tmp_path)
    assert trace.writers == ["a", "b", "c", "d"]
    found = [(e.writer, e.split, e.episode_id, len(e), e.observations.shape[1:]) for e in trace]
    assert found == [
        ("a", "train", 0, 1, (2,)),
        ("a", "train", 1, 2, (2,)),
        ("b", "eval", 0, 3, (2,)),
        ("d", "train", 0, 4, (64, 80, 3)),
        ("d", "train", 1, 5, (64, 80, 3)),
    ]
    assert [(trace[i].writer, len(trace[i])) for i in (4, 2, 0)] == [("d", 5), ("b", 3), ("a", 1)]
    assert [e.index for e in trace.scan(episodes=[1, 3])] == [1, 3]
    assert trace.metadata == {"run": 1}


# -- environments and spaces ------------------------------------------------------------------------------------------


def test_spaces_come_back_equal(tmp_path: Path) -> None:
    record_nested(tmp_path)
    trace = open_trace(tmp_path)
    assert trace.observation_space == NESTED
    assert list(trace.observation_space) == list(NESTED)
    assert trace.action_space == spaces.Box(-1, 1, (2,))


def test_a_custom_space_is_named_and_its_values_are_read_all_the_same(tmp_path: Path) -> None:
    inner = spaces.Dict({"odd": OddSpace(), "even": spaces.Discrete(2)})
    first = inner.sample()
    env = ScriptedEnv(inner, OddSpace(), [(copy.deepcopy(first), [Told(copy.deepcopy(first))])])
    wrapped = TraceRecordingWrapper(env, tmp_path)
    wrapped.reset()
    wrapped.step({"anything": 1})
    wrapped.close()
    trace = open_trace(tmp_path)
    for space in ("observation_space", "action_space"):
        with pytest.raises(EnvironmentUnavailable, match="OddSpace"):
            getattr(trace, space)
    assert bits(trace[0].observations["odd"][0]) == bits(first["odd"])
    assert trace[0].actions.tolist() == [{"anything": 1}]


def test_the_recorded_environment_is_made_again(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(gymnasium.make("FrozenLake-v1", max_episode_steps=9, map_name="8x8"), tmp_path)
    env.reset(seed=1)
    env.close()
    trace = open_trace(tmp_path)
    assert trace.env_spec["id"] == "FrozenLake-v1"
    again = trace.make_env()
    assert again.spec.max_episode_steps == 9
    assert again.unwrapped.desc.shape == (8, 8)
    assert again.reset(seed=1)[0] == trace[0].observations[0]
    assert trace.make_env(map_name="4x4").unwrapped.desc.shape == (4, 4)


def test_wrappers_that_gymnasium_knows_are_made_again(tmp_path: Path) -> None:
    inner = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path / "inner")
    env = TraceRecordingWrapper(gymnasium.wrappers.NormalizeObservation(inner), tmp_path / "outer")
    env.close()
    before = sorted(path.name for path in (tmp_path / "inner").iterdir())
    again = open_trace(tmp_path / "outer").make_env()
    assert isinstance(again, gymnasium.wrappers.NormalizeObservation)
    again.reset()
    again.close()
    # Playing back does not record: the recorder among the wrappers is left out.
    assert sorted(path.name for path in (tmp_path / "inner").iterdir()) == before


MODULE = """
import gymnasium, pathlib
pathlib.Path({mark!r}).write_text("imported")

class Env(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {{}}
    def step(self, action):
        return 0, 0.0, False, False, {{}}

class Wrapper(gymnasium.Wrapper, gymnasium.utils.RecordConstructorArgs):
    def __init__(self, env):
        gymnasium.utils.RecordConstructorArgs.__init__(self)
        super().__init__(env)

def make(env, **kwargs):
    return env

gymnasium.register("Recorded/Unheard-v0", "{name}:Env")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that leaves a mark when it is imported, and a way to forget that it ever was."""
    name = "environments_of_somebody_else"
    mark = tmp_path / "imported.txt"
    (tmp_path / f"{name}.py").write_text(MODULE.format(mark=str(mark), name=name))
    monkeypatch.syspath_prepend(str(tmp_path))

    def forget() -> None:
        sys.modules.pop(name, None)
        gymnasium.registry.pop("Recorded/Unheard-v0", None)
        mark.unlink(missing_ok=True)

    yield name, mark, forget
    forget()


def test_a_module_that_only_the_trace_names_is_not_imported_unless_allowed(tmp_path: Path, module: Any) -> None:
    name, mark, forget = module
    __import__(name)
    env = TraceRecordingWrapper(gymnasium.make("Recorded/Unheard-v0", disable_env_checker=True), tmp_path / "trace")
    env.reset()
    env.close()
    forget()
    trace = open_trace(tmp_path / "trace")
    assert [len(episode) for episode in trace] == [0]
    assert trace.observation_space == spaces.Discrete(2)
    with pytest.raises(EnvironmentUnavailable, match="allow_import") as caught:
        trace.make_env()
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not mark.exists()
    assert trace.make_env(allow_import=True, disable_env_checker=True).reset()[0] == 0
    assert mark.exists()


def test_a_wrapper_that_only_the_trace_names_is_not_imported_unless_allowed(tmp_path: Path, module: Any) -> None:
    name, mark, forget = module
    wrapped = __import__(name).Wrapper(gymnasium.make("CartPole-v1"))
    env = TraceRecordingWrapper(wrapped, tmp_path / "trace")
    env.close()
    forget()
    trace = open_trace(tmp_path / "trace")
    with pytest.raises(EnvironmentUnavailable, match="allow_import"):
        trace.make_env()
    assert not mark.exists()
    assert type(trace.make_env(allow_import=True)).__name__ == "Wrapper"
    assert mark.exists()


@pytest.mark.parametrize("entry_point", ["builtins:dict", "os:system", "subprocess:Popen", "gymnasium:make", "os:nothing"])
def test_a_function_that_the_trace_calls_a_wrapper_is_not_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry_point: str
) -> None:
    env = TraceRecordingWrapper(gymnasium.wrappers.NormalizeObservation(gymnasium.make("CartPole-v1")), tmp_path)
    spec = env._schema["environment"]["spec"]
    env.close()
    for path in tmp_path.iterdir():
        path.unlink()
    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path, on_exist="append", uid="hostile")
    assert "gymnasium.wrappers" in spec
    start = spec.index('"entry_point": "gymnasium.wrappers')
    hostile = spec[:start] + f'"entry_point": "{entry_point}"' + spec[spec.index(",", start) :]
    trace = open_trace(tmp_path)
    monkeypatch.setitem(trace.schema["environment"], "spec", hostile)
    with pytest.raises(EnvironmentUnavailable, match="wrapper|wrapped"):
        trace.make_env()
    env.close()


def test_an_environment_without_a_spec_cannot_be_made_and_says_so(tmp_path: Path) -> None:
    record(tmp_path, [1])
    with pytest.raises(EnvironmentUnavailable, match=r"zoo\.CountingEnv"):
        open_trace(tmp_path).make_env()


def test_a_trace_is_read_where_gymnasium_is_not_installed(tmp_path: Path) -> None:
    record_nested(tmp_path)
    script = f"""
import sys
sys.modules["gymnasium"] = None
import gym_trace
trace = gym_trace.open_trace({str(tmp_path)!r})
assert len(trace) == 4
for episode in (*trace, trace[2]):
    assert episode.observations["image"].shape == (30, 8, 8)
    assert episode.observations["pair"][1][2] == "ab"
    assert len(episode.infos) == len(episode.rewards) == 29
    assert episode.annotations["logits"].shape == (29, 2)
assert gym_trace.scan_recorded_traces({str(tmp_path)!r}, lambda o, a, r: None) == 4
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=60)


def test_readers_change_nothing_on_disk(tmp_path: Path) -> None:
    record(tmp_path, [3, 4], flush_after=2)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    trace = open_trace(tmp_path)
    list(trace)
    trace[1].observations[:] = 0
    trace.refresh()
    scan_recorded_traces(tmp_path)
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()} == before


def test_damage_is_raised_or_skipped_with_a_warning(tmp_path: Path) -> None:
    record(tmp_path, [10] * 6, flush_after=10)
    trace = open_trace(tmp_path)
    offset = int(trace.stored[0].batches[0].chunks["offset"][2])
    (batch,) = tmp_path.glob("*.gtb")
    data = bytearray(batch.read_bytes())
    data[offset + 70] ^= 0xFF
    batch.write_bytes(data)
    with pytest.raises(CorruptTrace) as caught:
        list(open_trace(tmp_path))
    assert caught.value.path == str(batch)
    damaged = open_trace(tmp_path)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = [(e.episode_id, counts_of(e)) for e in damaged.scan(on_damage="skip")]
    assert len(warned) == 1
    assert len(damaged.damage) == 1
    whole = list(range(11))
    assert [item for item in found if item[1] == whole] == [(i, whole) for i in range(6) if i != 2]
    for i in (0, 1, 3, 5):
        assert counts_of(open_trace(tmp_path)[i]) == whole
