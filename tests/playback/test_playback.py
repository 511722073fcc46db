"""Reading a trace back: in a stream, at random, from several writers, with damage in it."""

import gc
import os
import pickle
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import flip
from gymnasium import spaces
from runs import check_counts, counts_of, play, record_lengths
from scripted_env import ImageEnv, Result, ScriptedEnv, small_blocks

from gym_trace import TraceRecordingWrapper, open_trace, scan_recorded_traces
from gym_trace.errors import CorruptTrace, InvalidOption, TraceError, TraceNotFound
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.writer_reader import WriterReader


def watched_chunks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, frozenset[str]]]:
    """The chunks, and what of them, that are read from now on."""
    read: list[tuple[int, frozenset[str]]] = []
    chunk = WriterReader.chunk

    def watched(self: Any, number: int, roots: frozenset[str], *rows: Any) -> Any:
        read.append((number, roots))
        return chunk(self, number, roots, *rows)

    monkeypatch.setattr(WriterReader, "chunk", watched)
    return read


# -- opening -----------------------------------------------------------------------------------------------------------


def test_opening_a_directory_without_a_trace_raises_a_one_line_error(tmp_path: Path) -> None:
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
    record_lengths(tmp_path, [5, 6, 7])
    read = watched_chunks(monkeypatch)
    trace = open_trace(str(tmp_path))
    assert trace.episodes["steps"].tolist() == [5, 6, 7]
    assert trace.episodes["return"].tolist() == [15.0, 21.0, 28.0]
    assert trace.episodes["seed"].tolist() == [0, 1, 2]
    assert [repr(episode) for episode in (trace[0], trace[-1])]
    assert read == []


# -- random access -----------------------------------------------------------------------------------------------------


def test_episodes_are_found_by_their_place(tmp_path: Path) -> None:
    record_lengths(tmp_path, [3, 0, 5, 1])
    trace = open_trace(tmp_path)
    assert len(trace) == 4
    assert [len(trace[i]) for i in range(-4, 4)] == [3, 0, 5, 1] * 2
    assert [trace[i].index for i in range(4)] == [0, 1, 2, 3]
    assert counts_of(trace[np.int64(2)]) == [0, 1, 2, 3, 4, 5]
    for beyond in (4, -5, 10**9):
        with pytest.raises(IndexError):
            trace[beyond]


def test_random_access_reads_only_the_chunks_of_the_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_lengths(tmp_path, [10] * 30, flush_after=25)
    trace = open_trace(tmp_path)
    read = watched_chunks(monkeypatch)
    assert counts_of(trace[17]) == list(range(11))
    assert len(read) <= 2
    assert {root for _, roots in read for root in roots} == {"observations"}
    trace[17].rewards.sum()
    counts_of(trace[17])
    assert len(read) <= 4  # values are cached


def test_iterating_reads_each_column_when_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_lengths(tmp_path, [10] * 30, flush_after=25)
    trace = open_trace(tmp_path)
    chunks = index_of(trace).readers[0].chunk_count
    assert chunks > 4
    read = watched_chunks(monkeypatch)
    assert sum(len(episode) for episode in trace) == 300
    assert not read
    for episode in trace:
        assert episode.rewards.tolist() == list(range(1, 11))
        assert episode.terminations.tolist() == [False] * 10
    assert read == [(number, {"rewards"}) for number in range(chunks - 1)]  # the last one says how an episode ended
    read.clear()
    for episode in trace:
        assert len(episode.actions) == len(episode.rewards) == 10
    # Columns requested in the previous chunk are read together.
    assert [roots for _, roots in read[:2]] == [{"actions"}, {"rewards"}]
    assert [roots for _, roots in read[-4:]] == [{"actions", "rewards"}] * 4
    read.clear()
    with pytest.raises(TraceError, match="actions not requested"):
        [episode.actions for episode in trace.scan(columns=())]
    assert not read


def test_an_episode_of_a_scan_takes_its_arrays_along(tmp_path: Path) -> None:
    record_lengths(tmp_path / "t", [3, 4], flush_after=2)
    packed = [pickle.dumps(episode) for episode in open_trace(tmp_path / "t")]
    shutil.rmtree(tmp_path / "t")
    assert [counts_of(pickle.loads(episode)) for episode in packed] == [list(range(4)), list(range(5))]


def test_the_cache_of_random_access_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_lengths(tmp_path, [10] * 50, flush_after=10)
    monkeypatch.setattr("gym_trace.playback.opened._CACHE_BYTES", 5000)
    trace = open_trace(tmp_path)
    for _ in range(2):
        for i in (3, 40, 7, 22, 0):
            assert counts_of(trace[i]) == list(range(11))
    assert trace._opened.cache._bytes <= 5000
    assert 1 <= len(trace._opened.cache) < 5


class _Flicker(ImageEnv):
    """Frames that change in one pixel for a while, and then in all: some chunks have changes, others whole frames."""

    def _paint(self) -> Any:
        if self._count % 40 < 20:
            self._image[0, 0] = self._count
        else:
            self._image[...] = np.random.default_rng(self._count).integers(0, 256, self._image.shape)
        return self._image


def test_the_cache_counts_all_that_its_chunks_hold(tmp_path: Path) -> None:
    with small_blocks(rows=20, chunk=1 << 17):
        play(TraceRecordingWrapper(_Flicker(60), tmp_path), 1)
    trace = open_trace(tmp_path)
    assert trace[0].observations.shape == (61, 64, 80, 3)
    cached = [(chunk, size) for chunk, size in trace._opened.cache._chunks.values()]
    path = ("observations",)
    assert {chunk.is_delta_encoded(path) for chunk, _ in cached} == {True, False}
    for chunk, size in cached:
        assert sum(array.nbytes for array in chunk._decoded.values()) <= size


def test_a_slice_reads_only_the_chunks_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_blocks(rows=4, chunk=1 << 20):
        record_lengths(tmp_path, [40])
    episode = open_trace(tmp_path)[0]
    read = watched_chunks(monkeypatch)
    part = episode[20:22]
    assert part.total_reward == part.rewards.sum()
    assert len(part.observations) == 3
    assert len({number for number, _ in read}) <= 2
    assert part.rewards.tolist() == episode.rewards[20:22].tolist()
    assert len({number for number, _ in read}) >= 10
    assert part[1:].first_step == 21
    assert [len(episode[9:3].observations), len(episode[9:3])] == [1, 0]
    for wrong in (3, slice(0, 9, 2)):
        with pytest.raises(TypeError, match="slice without a stride"):
            episode[wrong]  # type: ignore[index]


def test_empty_slices_have_the_observation_of_their_place(tmp_path: Path) -> None:
    record_lengths(tmp_path, [20])
    episode = open_trace(tmp_path)[0]
    assert [counts_of(episode[at:at]) for at in range(21)] == [[at] for at in range(21)]


def test_an_episode_is_joined_over_many_chunks(tmp_path: Path) -> None:
    record_lengths(tmp_path, [100, 3, 250], flush_after=7)
    trace = open_trace(tmp_path)
    assert index_of(trace).readers[0].chunk_count > 40
    check_counts(trace, [100, 3, 250])
    assert [counts_of(trace[i]) for i in (2, 0)] == [list(range(251)), list(range(101))]
    assert trace[2].rewards.tolist() == list(range(1, 251))


# -- streams -----------------------------------------------------------------------------------------------------------


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
    record_lengths(tmp_path, [1, 2, 3, 4, 5, 6], flush_after=4)
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
    record_lengths(tmp_path, [1, 2, 3])
    with pytest.raises(InvalidOption):
        open_trace(tmp_path).scan(**options)


def test_only_the_columns_that_were_asked_for_are_there(tmp_path: Path) -> None:
    record_lengths(tmp_path, [2, 3])
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
        spaces.Box(0, 255, (500,), np.uint8), spaces.Discrete(4), [(rows[0], [Result(row) for row in rows[1:]])]
    )  # fmt: skip
    record_lengths(tmp_path, [39], env)
    (batch,) = tmp_path.glob("*.gtb")
    data = batch.read_bytes()
    flip(batch, data.find(rows[20].tobytes()[:40]) if rows[20].tobytes()[:40] in data else len(data) // 2)
    for episode in open_trace(tmp_path).scan(columns=["rewards", "actions"]):
        assert len(episode.rewards) == 39
        assert episode.actions.tolist() == [step % 4 for step in range(39)]
    with pytest.raises(CorruptTrace, match="checksum"):
        list(open_trace(tmp_path).scan(columns=["observations"]))
    with pytest.raises(CorruptTrace, match="checksum"):
        scan_recorded_traces(tmp_path)


def test_each_chunk_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_lengths(tmp_path, [10] * 20, flush_after=15)
    trace = open_trace(tmp_path)
    read = watched_chunks(monkeypatch)
    check_counts(trace, [10] * 20)
    numbers = [number for number, _ in read]
    assert numbers == sorted(set(numbers))
    read.clear()
    list(trace.scan(episodes=[3, 4]))
    assert len(read) <= 3


def test_a_long_trace_is_read_in_bounded_memory(tmp_path: Path) -> None:
    steps = 9000  # 138 MB of images
    record_lengths(tmp_path, [100] * (steps // 100), ImageEnv(length=10**6))
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
        assert peak < 100 << 20  # three chunks, and what they are decoded from
    assert callbacks == steps


# -- the callback ------------------------------------------------------------------------------------------------------


def test_a_truthy_result_ends_the_scan(tmp_path: Path) -> None:
    record_lengths(tmp_path, [1, 2, 3, 4, 5])
    seen: list[int] = []

    def until_three(observations: Any, actions: Any, rewards: Any) -> bool:
        seen.append(len(actions))
        return len(actions) == 3

    assert scan_recorded_traces(tmp_path, until_three) == 3
    assert seen == [1, 2, 3]


@pytest.mark.parametrize(("limit", "expected"), [(None, 3), (0, 0), (1, 1), (2, 2), (3, 3), (100, 3), (-1, 0)])
def test_a_scan_counts_no_more_episodes_than_asked_for(tmp_path: Path, limit: int | None, expected: int) -> None:
    record_lengths(tmp_path, [1, 2, 3])
    seen: list[int] = []
    assert scan_recorded_traces(str(tmp_path), lambda o, a, r: seen.append(len(a)), max_episodes=limit) == expected
    assert len(seen) == expected
    assert scan_recorded_traces(tmp_path, None, limit) == expected


def test_a_trace_can_be_read_while_the_interpreter_shuts_down(tmp_path: Path) -> None:
    with small_blocks():
        record_lengths(tmp_path, [9] * 6)
    script = "import atexit, gym_trace; atexit.register(lambda: print(gym_trace.scan_recorded_traces(%r)))"
    done = subprocess.run([sys.executable, "-c", script % str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("6\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_in_a_callback_reads_on_to_the_end(tmp_path: Path) -> None:
    with small_blocks():
        record_lengths(tmp_path, [9] * 6)
    seen: list[int] = []
    children: list[int] = []

    def fork_once(observations: Any, actions: Any, rewards: Any) -> None:
        seen.append(len(rewards))
        if len(seen) == 1:
            children.append(os.fork())

    scan_recorded_traces(tmp_path, fork_once)
    if children == [0]:
        os._exit(0 if seen == [9] * 6 else 1)
    assert os.waitpid(children[0], 0)[1] == 0
    assert seen == [9] * 6


def test_an_error_in_the_callback_is_the_callers(tmp_path: Path) -> None:
    record_lengths(tmp_path, [1])

    def fail(*_: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        scan_recorded_traces(tmp_path, fail)


# -- several writers ---------------------------------------------------------------------------------------------------


def test_writers_share_a_trace_and_keep_their_own(tmp_path: Path) -> None:
    record_lengths(tmp_path, [1, 2], uid="a", split="train", metadata={"run": 1})
    record_lengths(tmp_path, [3], uid="b", split="eval", on_exist="append")
    record_lengths(tmp_path, [], uid="c", on_exist="append")
    record_lengths(tmp_path, [4, 5], env=ImageEnv(length=10**6), uid="d", on_exist="append")
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
    assert index_of(trace).locate(0)[0].metadata == {"run": 1}


# -- what is on disk ---------------------------------------------------------------------------------------------------


def test_readers_change_nothing_on_disk(tmp_path: Path) -> None:
    record_lengths(tmp_path, [3, 4], flush_after=2)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    trace = open_trace(tmp_path)
    list(trace)
    trace[1].observations[:] = 0
    trace.refresh()
    scan_recorded_traces(tmp_path)
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()} == before


def damage(directory: Path, chunk: int = 2) -> Path:
    """Flip a byte in a chunk of the only batch, and return its path."""
    offset = int(index_of(open_trace(directory)).readers[0].batches[0].chunks["offset"][chunk])
    (batch,) = directory.glob("*.gtb")
    flip(batch, offset + 70, mask=0xFF)
    return batch


@pytest.mark.parametrize("order", [None, [5, 1, 2, 0]])
def test_damage_is_raised_or_skipped_with_a_warning(tmp_path: Path, order: list[int] | None) -> None:
    record_lengths(tmp_path, [10] * 6, flush_after=10)
    batch = damage(tmp_path)
    with pytest.raises(CorruptTrace) as caught:
        [counts_of(episode) for episode in open_trace(tmp_path).scan(episodes=order)]
    assert caught.value.path == str(batch)
    damaged = open_trace(tmp_path)
    with pytest.warns(UserWarning, match="skipped bytes") as warned:
        found = [(e.index, e.episode_id, counts_of(e)) for e in damaged.scan(episodes=order, on_damage="skip")]
    assert len(warned) == len(damaged.damage) == 1
    whole = list(range(11))
    assert [item for item in found if item[2] == whole] == [(i, i, whole) for i in order or range(6) if i != 2]
    for i in (0, 1, 3, 5):
        assert counts_of(open_trace(tmp_path)[i]) == whole
