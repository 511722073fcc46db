"""Batches beside others: threads, processes, damage, a trace that grows; and that chance is fair."""

import multiprocessing
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import flip
from long_tests import LONG
from runs import record_lengths
from sampling_processes import drawn, firsts
from scripted_env import CountingEnv
from test_sampling import LENGTHS, all_windows, check_window, pairs, same, streamed, watched_decoding, windows

from gym_trace import TraceRecordingWrapper, open_trace
from gym_trace.errors import CorruptTrace, InvalidOption
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.sampling import stream
from gym_trace.playback.sampling.batches import Batches, roots_of
from gym_trace.playback.sampling.rows import DecodePlan
from gym_trace.playback.sampling.store import Disk
from gym_trace.playback.trace import Trace


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    record_lengths(tmp_path / "trace", LENGTHS, flush_after=9)
    return open_trace(tmp_path / "trace")


def damage(trace: Trace, where: str = "column") -> None:
    """Flips a byte of a chunk."""
    [file] = Path(trace.directory).glob("*.gtb")
    chunk = index_of(trace).readers[0].batches[0].chunks[3]
    begin, end = int(chunk["offset"]), int(chunk["offset"]) + int(chunk["length"])
    flip(file, end - 20 if where == "column" else begin + 60, mask=0xFF)


@pytest.mark.filterwarnings("ignore:.*skipped:UserWarning")
@pytest.mark.parametrize("damaged", [False, True])
def test_threads_and_workers_draw_the_same_at_once_while_the_trace_grows(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damaged: bool
) -> None:
    monkeypatch.setenv("GYM_TRACE_CACHE", str(tmp_path / "cache"))
    if damaged:
        damage(trace)
    trace = open_trace(tmp_path / "trace")

    def several() -> list[Batches]:
        options: dict[str, Any] = {"cache_bytes": 1 << 20, "on_damage": "skip" if damaged else "raise"}
        return [trace.windows(2, 16, cache=cache, **options) for cache in ("memory", "disk", None)]

    batches = several()
    expected = [firsts(some, 3) for some in several()]
    workers, queues = [], []
    for method in ["fork"] * 4 + ["spawn"] * (4 if LONG else 1):
        context = multiprocessing.get_context(method)
        queues.append(context.Queue())
        workers.append(context.Process(target=drawn, args=(batches, queues[-1])))
    found: list[Any] = [several() for _ in range(8)]  # readers of the trace before it grows

    def draw(place: int) -> None:
        found[place] = [firsts(some, 3) for some in found[place]]

    for worker in workers:
        worker.start()
    threads = [threading.Thread(target=draw, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    record_lengths(tmp_path / "trace", [5, 5], on_exist="append")
    trace.refresh()
    for thread in threads:
        thread.join()
    found += [queue.get(timeout=60) for queue in queues]
    for worker in workers:
        worker.join()
    assert found == [expected] * len(found)
    assert [firsts(some, 3) for some in batches] == expected
    assert len(trace) == len(LENGTHS) + 2


@pytest.mark.parametrize("cache", ["memory", "disk", None])
@pytest.mark.parametrize("replacement", [False, True])
def test_workers_in_turn_draw_the_batches_of_one_and_can_be_resumed(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: str | None, replacement: bool
) -> None:
    streamed(monkeypatch, blocks=12)
    monkeypatch.setattr(stream, "_MIN_GROUP", 1)
    monkeypatch.setenv("GYM_TRACE_CACHE", str(tmp_path / "cache"))
    options: dict[str, Any] = {"cache": cache, "replacement": replacement, "batch_size": 5}

    def made() -> Batches:
        return windows(trace, 2, cache_bytes=40_000, **options)

    one = made()
    expected = [next(one)["first_step"].tolist() for _ in range(len(one) - 1)]
    state = one.state_dict()
    after = 30 if replacement else 1  # over the end of an epoch, where there is another one
    expected += [next(one)["first_step"].tolist() for _ in range(after)]
    assert cache is not None or one._blocks().strands == 4  # type: ignore[attr-defined]
    for workers in (1, 2, 3, 4, 12):
        several = [made() for _ in range(workers)]
        for worker, batches in enumerate(several):
            batches.take_turns(worker, workers)
        found = [next(several[number % workers])["first_step"].tolist() for number in range(len(expected))]
        assert found == expected
        for batches in several:
            batches.load_state_dict(state)
        found = [next(several[number % workers])["first_step"].tolist() for number in range(after)]
        assert found == expected[-after:]


def test_workers_share_the_decoding_of_a_stream(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed(monkeypatch, blocks=12)
    monkeypatch.setattr(stream, "_MIN_GROUP", 1)
    decoded: list[int] = []
    decode = stream.Stream._decoded
    monkeypatch.setattr(
        stream.Stream, "_decoded", lambda self, cut, group: decoded.append(len(group)) or decode(self, cut, group)
    )
    for worker in range(4):
        batches = windows(trace, 2, cache=None, cache_bytes=40_000)
        batches.take_turns(worker, 4)
        list(batches)
    blocks = len(batches._blocks().blocks)  # type: ignore[attr-defined]
    assert blocks <= sum(decoded) <= blocks + 3  # where the part of one ends and that of another begins


def test_a_worker_index_out_of_range_raises(trace: Trace) -> None:
    with pytest.raises(InvalidOption, match="worker of 0 to workers - 1"):
        trace.windows(2).take_turns(2, 2)


@pytest.mark.filterwarnings("ignore:.*skipped:UserWarning")
@pytest.mark.parametrize("cache", ["memory", "disk", None])
@pytest.mark.parametrize("where", ["column", "head"])
def test_damage_is_raised_or_left_out_with_a_warning(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: str | None, where: str
) -> None:
    monkeypatch.setenv("GYM_TRACE_CACHE", str(tmp_path / "cache"))
    damage(trace, where)
    options: dict[str, Any] = {"cache": cache, "cache_bytes": 1 << 20, "replacement": False}
    with pytest.raises(CorruptTrace, match="gym-trace check"):
        list(open_trace(tmp_path / "trace").windows(2, 7, **options))
    expected = []
    for part in open_trace(tmp_path / "trace").scan(on_damage="skip"):
        begin = int(part.first_step) - int(trace.episodes["first_step"][part.index])
        expected += [(part.index, begin + step) for step in range(len(part) - 1)]
    damaged = open_trace(tmp_path / "trace")
    batches = damaged.windows(2, 7, on_damage="skip", **options)
    assert sorted(all_windows(damaged, batches)) == sorted(expected)
    assert 0 < len(expected) < sum(max(0, length - 1) for length in LENGTHS)
    assert len(damaged.damage) == 1
    with pytest.warns(UserWarning, match=r"skipped bytes"):
        next(open_trace(tmp_path / "trace").transitions(7, on_damage="skip", **options))
    if cache is not None:
        weights = np.zeros(len(LENGTHS))
        weights[7] = 1
        options["replacement"] = True
        heavy = next(damaged.windows(2, 7, weights=weights, on_damage="skip", **options))
        assert set(heavy["episode"].tolist()) == {7}


@pytest.mark.parametrize("cache", ["memory", None])
def test_windows_are_uniform_over_the_positions_of_an_epoch(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, cache: str | None
) -> None:
    streamed(monkeypatch, blocks=8)
    items = pairs(LENGTHS)
    epochs, times = 60, 4
    batches = windows(
        trace, 2, batch_size=len(items) // times, cache=cache, cache_bytes=1500 if cache is None else 9999
    )
    counts = np.zeros((len(items), times))
    for _ in range(epochs):
        for time, batch in enumerate(firsts(batches, times)):
            for pair in batch:
                counts[items.index(pair), time] += 1
        with pytest.raises(StopIteration):
            next(batches)
    each = epochs / times
    assert (counts.sum(axis=1) == epochs).all()
    chi, freedom = float(((counts - each) ** 2 / each).sum()), len(items) * (times - 1)
    assert abs(chi - freedom) < 6 * np.sqrt(2 * freedom)  # windows of a block come together


def test_neighbours_in_a_stream_have_little_to_do_with_each_other(tmp_path: Path) -> None:
    record_lengths(tmp_path, [400] * 10)
    trace = open_trace(tmp_path)
    budget = DecodePlan(trace, roots_of(None)).size * 3 // 4  # a quarter is drawn from at a time
    batches = trace.transitions(4000, cache=None, cache_bytes=budget, replacement=False, columns="rewards")
    places = np.concatenate([batch["episode"] * 400 + batch["first_step"] for batch in batches])
    assert sorted(places) == list(range(4000))
    assert abs(np.corrcoef(places[1:], places[:-1])[0, 1]) < 0.15


def test_files_on_disk_that_were_touched_are_compared_in_full(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = watched_decoding(monkeypatch)
    record_lengths(tmp_path / "long", [3000], flush_after=500)
    trace, disk = open_trace(tmp_path / "long"), Disk(tmp_path / "cache", 1 << 30)
    disk.rows(DecodePlan(trace, roots_of(None)))
    [directory] = (tmp_path / "cache").iterdir()
    file = max(directory.glob("*.rows"), key=lambda path: path.stat().st_size)
    file.touch()
    disk.rows(DecodePlan(trace, roots_of(None)))
    assert len(decoded) == 1
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    rows = disk.rows(DecodePlan(trace, roots_of(None)))
    assert len(decoded) == 2
    assert same(np.asarray(rows.columns["rewards",]), trace[0].rewards)


def test_following_a_growing_trace_is_right_while_others_sample(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=10**6), tmp_path)
    env.reset()
    for _ in range(4):
        env.step(1)
    trace = open_trace(tmp_path)
    batches, still = trace.windows(2, 16, follow=0), trace.windows(2, 16)
    before = firsts(trace.windows(2, 16), 4)
    for length in range(1, 5):
        env.reset()
        for _ in range(length):
            env.step(1)
        batch = next(batches)
        for i in range(16):
            check_window(trace, batch, i)
    assert firsts(still, 4) == before
    env.close()
