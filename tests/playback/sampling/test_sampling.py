"""Batches for training: what is drawn is what was recorded, and everything is drawn."""

import os
import pickle
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import record_lengths, record_nested
from scripted_env import CountingEnv, Result, ToyEnv

import gym_trace
from gym_trace import TraceRecordingWrapper, open_trace
from gym_trace.errors import InvalidOption
from gym_trace.playback.sampling import stream, targets
from gym_trace.playback.sampling.batches import Batches, roots_of
from gym_trace.playback.sampling.items import ACHIEVED, DESIRED, Hindsight
from gym_trace.playback.sampling.permutation import Stretch, SumTree, drawn, permuted
from gym_trace.playback.sampling.rows import DecodedRows, DecodePlan, EpisodeSlices, in_memory
from gym_trace.playback.sampling.store import Disk, decoded
from gym_trace.playback.trace import Trace

LENGTHS = [5, 0, 1, 12, 3, 7, 2, 30, 1, 4]


def rows_of(trace: Trace) -> DecodedRows:
    return decoded(DecodePlan(trace, roots_of(None)))


def windows(trace: Trace, length: int, rows: DecodedRows | None = None, **options: Any) -> Batches:
    return of_rows(trace.windows(length, **{"batch_size": 7, "seed": 3, "replacement": False, **options}), rows)


def transitions(trace: Trace, rows: DecodedRows | None = None, **options: Any) -> Batches:
    options = {"batch_size": 7, "seed": 3, "gamma": 0.9, "replacement": False, **options}
    return of_rows(trace.transitions(**options), rows)


def of_rows(batches: Batches, rows: DecodedRows | None) -> Batches:
    if rows is not None:
        batches._store, batches._item_margins = lambda _: rows, None
    return batches


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    one, other = np.asarray(one), np.asarray(other)
    if one.dtype == object:
        return one.shape == other.shape and one.tolist() == other.tolist()
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def row(tree: Any, *index: Any) -> Any:
    if isinstance(tree, dict):
        return {key: row(item, *index) for key, item in tree.items()}
    if isinstance(tree, tuple):
        return tuple(row(item, *index) for item in tree)
    return tree[index]


def check_window(trace: Trace, batch: dict[str, Any], i: int) -> tuple[int, int]:
    """Compares a window with the slice of its episode; returns which it is."""
    episode, first = trace[int(batch["episode"][i])], int(batch["first_step"][i])
    mask = batch["mask"][i]
    count = int(mask.sum())
    assert mask[:count].all()
    part = episode[first : first + count]
    assert len(part) == count
    assert same(row(batch["observations"], i, slice(0, count + 1)), part.observations)
    for name in ("actions", "rewards", "terminations", "truncations"):
        assert same(row(batch[name], i, slice(0, count)), getattr(part, name)), name
        assert not np.asarray(row(batch["rewards"], i, slice(count, None))).any()
    return int(batch["episode"][i]), first


def all_windows(trace: Trace, batches: Batches) -> list[tuple[int, int]]:
    return [check_window(trace, batch, i) for batch in batches for i in range(len(batch["episode"]))]


def watched_decoding(monkeypatch: pytest.MonkeyPatch) -> list[EpisodeSlices]:
    """Return a list of the pieces that are decoded from now on."""
    found: list[EpisodeSlices] = []
    decode = DecodePlan.decode
    monkeypatch.setattr(
        DecodePlan, "decode", lambda self, pieces, room: found.extend(pieces) or decode(self, pieces, room)
    )
    return found


def pairs(lengths: list[int], length: int = 2, stride: int = 1) -> list[tuple[int, int]]:
    """Return the episode and first step of each window in episodes of these lengths."""
    return [(e, s) for e, n in enumerate(lengths) for s in range(0, n - length + 1, stride)]


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """Episodes of several lengths, over several chunks."""
    record_lengths(tmp_path, LENGTHS, flush_after=9)
    return open_trace(tmp_path)


@pytest.mark.parametrize("length", [1, 2, 3, 12, 30])
@pytest.mark.parametrize("stride", [1, 2, 5])
def test_an_epoch_has_every_window_once(trace: Trace, length: int, stride: int) -> None:
    expected = pairs(LENGTHS, length, stride)
    batches = windows(trace, length, stride=stride)
    first, second = all_windows(trace, batches), all_windows(trace, batches)
    assert sorted(first) == sorted(second) == expected
    assert first != second or len(expected) < 5


def test_short_episodes_and_spans_are_padded_with_nothing(trace: Trace) -> None:
    short = all_windows(trace, windows(trace, 4, strict_length=False))
    assert sorted(short) == [(e, s) for e, n in enumerate(LENGTHS) if n for s in range(max(n - 3, 1))]
    right = all_windows(trace, windows(trace, 4, span=(False, True)))
    assert sorted(right) == [(e, s) for e, n in enumerate(LENGTHS) for s in range(n)]
    both = all_windows(trace, windows(trace, 4, span=(True, True)))
    assert sorted(both) == sorted((e, max(s, 0)) for e, n in enumerate(LENGTHS) if n for s in range(-3, n))


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    steps=st.integers(1, 60),
    length=st.integers(1, 5),
    span=st.tuples(st.booleans(), st.booleans()),
    strict=st.booleans(),
    stride=st.integers(1, 3),
    flush=st.integers(1, 20),
)
def test_blocks_of_a_trace_have_together_what_the_whole_has(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    steps: int,
    length: int,
    span: tuple[bool, bool],
    strict: bool,
    stride: int,
    flush: int,
) -> None:
    directory = tmp_path_factory.mktemp("blocks")
    record_lengths(directory, lengths, flush_after=flush)
    trace = open_trace(directory)
    plan = DecodePlan(trace, roots_of(None))
    options = {"span": span, "strict_length": strict, "stride": stride}

    def found(rows: DecodedRows) -> list[tuple[int, int]]:
        try:
            return all_windows(trace, windows(trace, length, rows, **options))
        except ValueError:  # nothing to be drawn
            return []

    blocks = [block() for block in plan.blocks(steps, 0, length - 1)]
    assert all(0 < (block.high - block.low).sum() <= steps for block in blocks)
    whole = sorted(found(plan.decode([plan.episodes()], in_memory)))
    assert sorted(pair for one in blocks for pair in found(plan.decode([one], in_memory))) == whole
    if plan.total:
        assert sorted(found(plan.decode(blocks[::-1], in_memory))) == whole


@pytest.mark.skipif(not hasattr(gymnasium.vector, "AutoresetMode"), reason="needs gymnasium 1.1")
def test_lanes_parts_and_several_writers_are_put_together(tmp_path: Path) -> None:
    envs = gym_trace.TraceRecordingVectorWrapper(
        gymnasium.vector.SyncVectorEnv([lambda k=k: CountingEnv(length=3 + k) for k in range(3)]), tmp_path
    )
    envs.reset(seed=0)
    for _ in range(40):
        envs.step(envs.action_space.sample())
    envs.close()
    env = TraceRecordingWrapper(
        CountingEnv(length=20), tmp_path, on_exist="append", frame_filter=lambda step, *_: step % 7 < 4
    )
    for seed in range(3):
        env.reset(seed=seed)
        for _ in range(20):
            env.step(1)
    env.close()
    trace = open_trace(tmp_path)
    assert len(trace.writers) == 2
    for chosen in (trace, trace.select(sort="-steps"), trace[::3]):
        lengths = chosen.episodes["steps"].tolist()
        assert sorted(all_windows(chosen, windows(chosen, 2))) == pairs(lengths)


def test_dicts_tuples_and_texts_have_the_structure_of_their_spaces(tmp_path: Path) -> None:
    record_nested(tmp_path)
    trace = open_trace(tmp_path)
    assert all_windows(trace, windows(trace, 2))


def test_whole_episodes_are_padded_to_the_longest_of_a_batch(trace: Trace) -> None:
    seen = []
    for batch in trace.trajectories(4, replacement=False):
        assert batch["mask"].shape[1] == batch["mask"].sum(axis=1).max()
        seen += [check_window(trace, batch, i) for i in range(len(batch["episode"]))]
    assert sorted(seen) == [(e, 0) for e, n in enumerate(LENGTHS) if n]


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("n_frames", [1, 3])
def test_transitions_are_those_written_out_step_by_step(trace: Trace, n_steps: int, n_frames: int) -> None:
    plan = DecodePlan(trace, roots_of(None))
    blocks = [block() for block in plan.blocks(8, n_frames - 1, n_steps)]
    for rows in (rows_of(trace), *(plan.decode([one], in_memory) for one in blocks)):
        for batch in transitions(trace, rows, n_steps=n_steps, n_frames=n_frames):
            for i, (place, t) in enumerate(zip(batch["episode"].tolist(), batch["first_step"].tolist())):
                episode = trace[place]
                flagged = np.flatnonzero((episode.terminations | episode.truncations)[t:])
                m = min([n_steps, len(episode) - t, *(flagged[:1] + 1).tolist()])
                returns = sum(0.9**k * float(episode.rewards[t + k]) for k in range(m))
                assert batch["rewards"][i] == pytest.approx(returns, rel=1e-12)
                assert batch["discount"][i] == pytest.approx(0.9**m, rel=1e-12)
                assert batch["terminations"][i] == episode.terminations[t + m - 1]
                assert batch["truncations"][i] == episode.truncations[t + m - 1]
                assert same(batch["actions"][i], episode.actions[t])
                for name, at in (("observations", t), ("next_observations", t + m)):
                    frames = [episode.observations[max(0, at - k)] for k in reversed(range(n_frames))]
                    assert same(batch[name][i], frames[0] if n_frames == 1 else np.stack(frames))


def test_each_transition_comes_once_an_epoch_or_evenly_with_replacement(trace: Trace) -> None:
    expected = pairs(LENGTHS, 1)
    once = [pair for batch in transitions(trace) for pair in zip(batch["episode"], batch["first_step"])]
    assert sorted(once) == expected
    many = transitions(trace, batch_size=100, replacement=True)
    counts: dict[Any, int] = {}
    for _ in range(200):
        batch = next(many)
        for pair in zip(batch["episode"].tolist(), batch["first_step"].tolist()):
            counts[pair] = counts.get(pair, 0) + 1
    each = 20_000 / len(expected)
    chi = sum((counts.get(pair, 0) - each) ** 2 / each for pair in expected)
    freedom = len(expected) - 1
    assert abs(chi - freedom) < 4 * np.sqrt(2 * freedom)


def test_the_same_seed_gives_the_same_batches_and_goes_on_where_it_was(trace: Trace) -> None:
    for replacement in (False, True):
        first, second = (windows(trace, 2, replacement=replacement) for _ in range(2))
        for _ in range(3):
            assert same(next(first), next(second))
        state = second.state_dict()
        later = [next(second) for _ in range(3)]
        resumed = windows(trace, 2, replacement=replacement)
        resumed.load_state_dict(state)
        assert all(same(next(resumed), batch) for batch in later)
        assert not same(next(windows(trace, 2, replacement=replacement, seed=4)), next(windows(trace, 2)))


def test_shares_of_all_ranks_are_the_whole_order(trace: Trace) -> None:
    whole = [batch["first_step"].tolist() for batch in windows(trace, 2)]
    shares = []
    for rank in range(3):
        share = windows(trace, 2)
        share.share(rank, 3)
        shares.append([batch["first_step"].tolist() for batch in share])
    assert [shares[i % 3][i // 3] for i in range(len(whole))] == whole


@settings(max_examples=2 * settings().max_examples)
@given(seed=st.integers(0, 2**70), count=st.integers(1, 3000))
def test_an_order_without_repetition_has_everything_once(seed: int, count: int) -> None:
    assert sorted(permuted(seed, np.arange(count), count).tolist()) == list(range(count))
    assert set(drawn(seed, np.arange(10), count).tolist()) <= set(range(count))


def test_neighbours_in_an_order_have_nothing_to_do_with_each_other() -> None:
    for order in (permuted(1, np.arange(100_000), 100_000), drawn(1, np.arange(100_000), 100_000)):
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.02
        assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.02


@pytest.mark.parametrize(
    "options",
    [
        {"length": 0},
        {"length": 31},
        {"length": True},
        {"batch_size": 0},
        {"stride": 0},
        {"sampling": "chunks"},
        {"span": (True,)},
        {"seed": "a"},
        {"cache_bytes": -1},
        {"on_damage": "ignore"},
        {"follow": -1, "replacement": True},
        {"follow": float("nan"), "replacement": True},
        {"columns": "infos.x"},
        {"columns": "annotations.logprob"},
        {"weights": -np.ones(len(LENGTHS)), "replacement": True},
    ],
)
def test_invalid_options_raise_at_the_call(trace: Trace, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"pass|nothing|weights|unknown columns"):
        windows(trace, **{"length": 2, **options})
    with pytest.raises(ValueError, match="gamma"):
        trace.transitions(gamma="a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="goals"):
        trace.transitions(goals="future")  # type: ignore[arg-type]


def test_batches_say_what_they_are(trace: Trace) -> None:
    batches = windows(trace, np.int64(2))
    next(batches)
    assert "Batches of 7 windows(length=2, " in repr(batches)
    assert repr(batches).endswith("seed 3; next is batch 1 of epoch 0>")


def test_targets_take_the_probabilities_that_were_recorded(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=5), tmp_path)
    for _ in range(3):
        env.reset()
        for step in range(5):
            env.annotate(logprob=-0.1 * step, value=np.float32(step))
            env.step(1)
    env.close()
    trace = open_trace(tmp_path)
    batch = next(trace.windows(4, 8, columns=("rewards", "terminations", "truncations", "annotations.logprob")))
    assert batch["annotations"].keys() == {"logprob"}
    assert batch["annotations"]["logprob"].dtype == np.float64
    same_policy = batch["annotations"]["logprob"] - batch["annotations"]["logprob"]
    flags = batch["terminations"], batch["truncations"]
    values = np.zeros((8, 5))
    found, _ = targets.vtrace(batch["rewards"], values, same_policy, *flags, gamma=0.9)
    np.testing.assert_allclose(found, targets.returns_to_go(batch["rewards"], *flags, gamma=0.9))
    with pytest.raises(ValueError, match=r"unknown columns.*annotations.values.*annotations are.*logprob"):
        trace.windows(4, columns=("rewards", "annotations.values"))


def streamed(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    """Make blocks small, so that a trace of a few steps has several."""
    monkeypatch.setattr(stream, "_LEAST_BYTES", sizes.get("block", 200))
    monkeypatch.setattr(stream, "_BLOCKS", sizes.get("blocks", 2))
    monkeypatch.setattr(stream, "_MOST_BYTES", sizes.get("block", 200))


@pytest.fixture(scope="module")
def short_episodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("short") / "t"
    record_lengths(directory, [2] * 30_000)
    return directory


@pytest.mark.parametrize("kind", ["windows", "transitions", "trajectories"])
def test_batches_of_many_short_episodes_keep_to_cache_bytes(short_episodes: Path, kind: str) -> None:
    trace = open_trace(short_episodes)
    args = (1, 256) if kind == "windows" else (256,)
    next(getattr(trace, kind)(*args))  # imports
    made = {}
    for megabytes in (6, 12):
        tracemalloc.start()
        batches = getattr(trace, kind)(*args, cache_bytes=megabytes << 20)
        for _ in range(300):
            next(batches)
        assert tracemalloc.get_traced_memory()[1] < megabytes << 20
        tracemalloc.stop()
        made[megabytes] = type(batches).__name__
    assert made == {6: "Stream", 12: "Batches"}


@pytest.mark.parametrize("block", [1, 200, 1000])
@pytest.mark.parametrize("length", [1, 3, 12])
def test_a_stream_has_every_window_once_an_epoch(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, block: int, length: int
) -> None:
    streamed(monkeypatch, block=block)
    expected = pairs(LENGTHS, length)
    for sampling in ("steps", "episodes"):
        batches = windows(trace, length, cache=None, cache_bytes=0, sampling=sampling)
        first, second = all_windows(trace, batches), all_windows(trace, batches)
        if sampling == "steps":
            assert sorted(first) == sorted(second) == expected
        else:
            assert sorted(e for e, _ in first) == [e for e, n in enumerate(LENGTHS) if n >= length]
        assert [len(batch["episode"]) for batch in batches] == [7] * (len(first) // 7) + [len(first) % 7][
            : len(first) % 7
        ]


def test_a_stream_of_transitions_or_episodes_has_everything_once(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed(monkeypatch)
    expected = pairs(LENGTHS, 1)
    batches = transitions(trace, cache=None, cache_bytes=0, n_steps=3, n_frames=2)
    known = {(e, s): row(b, i) for b, e, s, i in _items(transitions(trace, n_steps=3, n_frames=2))}
    for batch, e, s, i in _items(batches):
        assert same(row(batch, i), known.pop((e, s)))
    assert not known
    assert len(expected) == batches.items
    whole = trace.trajectories(3, replacement=False, cache=None, cache_bytes=0)
    seen = [check_window(trace, batch, i) for batch in whole for i in range(len(batch["episode"]))]
    assert sorted(seen) == [(e, 0) for e, n in enumerate(LENGTHS) if n]


def _items(batches: Batches) -> Any:
    for batch in batches:
        for i, (e, s) in enumerate(zip(batch["episode"].tolist(), batch["first_step"].tolist())):
            yield batch, e, s, i


@pytest.mark.parametrize("cache", ["memory", "disk", None])
def test_batches_can_be_pickled_shared_and_resumed(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, cache: str | None
) -> None:
    streamed(monkeypatch)
    monkeypatch.setenv("GYM_TRACE_CACHE", str(tmp_path_factory.mktemp("cache")))
    first = windows(trace, 2, cache=cache, cache_bytes=1 << 20)
    for _ in range(4):
        next(first)
    second, state = pickle.loads(pickle.dumps(first)), first.state_dict()
    third = windows(trace, 2, cache=cache, cache_bytes=1 << 20)
    third.load_state_dict(state)
    for _ in range(3):
        expected = next(first)
        assert same(expected, next(second))
        assert same(expected, next(third))
    shares = []
    for rank in range(3):
        share = windows(trace, 2, cache=cache, cache_bytes=1 << 20)
        share.share(rank, 3)
        shares += all_windows(trace, share)
    assert sorted(shares) == sorted(all_windows(trace, windows(trace, 2)))


def test_rows_on_disk_are_found_again_and_extended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_lengths(tmp_path / "trace", [4, 0, 7])
    trace, disk = open_trace(tmp_path / "trace"), Disk(tmp_path / "cache", 1 << 20)
    read = watched_decoding(monkeypatch)

    def found(trace: Trace) -> list[tuple[int, int]]:
        rows = disk.rows(DecodePlan(trace, roots_of(None)))
        return sorted(all_windows(trace, windows(trace, 2, rows)))

    assert found(trace) == found(trace) == pairs([4, 0, 7])
    record_lengths(tmp_path / "trace", [3, 2], on_exist="append")
    assert found(open_trace(tmp_path / "trace")) == pairs([4, 0, 7, 3, 2])
    assert found(open_trace(tmp_path / "trace")[::2]) == pairs([4, 7, 2])
    assert [len(pieces.episode) for pieces in read] == [3, 2]
    [directory] = (tmp_path / "cache").iterdir()
    file = max(directory.glob("*.rows"), key=lambda path: path.stat().st_size)
    file.write_bytes(b"x" + file.read_bytes()[1:])
    assert found(open_trace(tmp_path / "trace")) == pairs([4, 0, 7, 3, 2])
    assert [len(pieces.episode) for pieces in read] == [3, 2, 5]


@pytest.mark.skipif(os.name != "posix", reason="needs permissions")
def test_a_cache_where_others_can_plant_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_lengths(tmp_path / "trace", [4, 7])
    trace, root = open_trace(tmp_path / "trace"), tmp_path / "cache"
    monkeypatch.setenv("GYM_TRACE_CACHE", str(root))
    next(trace.windows(2, cache="disk"))
    (tmp_path / "mine").write_text("kept")
    for path in root.rglob("*.*"):
        path.unlink()
        if path.suffix == ".rows":
            path.symlink_to(tmp_path / "mine")
    root.chmod(0o777)
    for call in (lambda: next(trace.windows(2, cache="disk")), lambda: trace.normalization()):
        with pytest.raises(InvalidOption, match="cache: writable by others; set GYM_TRACE_CACHE to"):
            call()
    assert (tmp_path / "mine").read_text() == "kept"


@pytest.mark.skipif(os.name != "posix", reason="needs permissions")
def test_no_other_user_can_keep_the_lock_of_cached_rows(tmp_path: Path) -> None:
    record_lengths(tmp_path / "trace", [4])
    trace, disk = open_trace(tmp_path / "trace"), Disk(tmp_path / "cache", 1 << 20)
    for _ in range(2):
        disk.rows(DecodePlan(trace, roots_of(None)))
        [directory] = (tmp_path / "cache").iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700
        directory.chmod(0o755)


def test_the_least_recently_used_cache_is_evicted_and_nothing_else(tmp_path: Path) -> None:
    for name in "abc":
        record_lengths(tmp_path / name, [50])
    disk = Disk(tmp_path / "cache", 2 * 2500)
    (tmp_path / "cache" / "notes").mkdir(parents=True)
    (tmp_path / "cache" / "notes" / "mine").write_bytes(bytes(10_000))
    kept = []
    for name in "abc":
        trace = open_trace(tmp_path / name)
        disk.rows(DecodePlan(trace, roots_of(None)))
        kept.append({path.name for path in (tmp_path / "cache").iterdir() if path.name != "notes"})
    assert (tmp_path / "cache" / "notes" / "mine").exists()
    assert len(kept[0]) == 1
    assert kept[0] - kept[2]
    assert kept[2] - kept[1]


@settings(max_examples=2 * settings().max_examples)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=40),
    updates=st.lists(st.tuples(st.integers(0, 39), st.floats(0, 10)), max_size=20),
)
def test_a_tree_of_sums_finds_what_a_search_in_cumulative_sums_does(
    weights: list[float], updates: list[tuple[int, float]]
) -> None:
    tree, known = SumTree(np.array(weights)), np.array(weights)
    for item, weight in updates:
        if item < len(known):
            tree.update(np.array([item]), np.array([weight]))
            known[item] = weight
    assert tree.total == pytest.approx(known.sum())
    if known.sum() > 0:
        for fraction in np.random.default_rng(0).random(50):
            item = int(tree.find(np.array([fraction]))[0])
            ends = np.cumsum(known)
            assert known[item] > 0
            assert ends[item] - known[item] - 1e-9 <= fraction * known.sum() <= ends[item] + 1e-9


def test_items_are_drawn_by_their_weights_and_weighted_back(trace: Trace) -> None:
    weights = np.zeros(len(LENGTHS))
    weights[[3, 7]] = 1, 3
    batches = trace.windows(2, 1000, weights=weights)
    batch = next(batches)
    assert set(batch["episode"].tolist()) == {3, 7}
    share = np.mean(batch["episode"] == 7)
    assert share == pytest.approx(3 * 29 / (3 * 29 + 11), abs=0.04)
    windows_in_all = batches.items
    assert batch["weight"][batch["episode"] == 3][0] == pytest.approx((3 * 29 + 11) / windows_in_all)
    index = batch["index"][batch["episode"] == 7]
    batches.update_priorities(np.unique(index), np.zeros(len(np.unique(index))))
    state = batches.state_dict()
    assert 3 in next(batches)["episode"]
    again = trace.windows(2, 1000, weights=weights)
    assert again.items == batches.items
    again.load_state_dict(state)
    assert same(next(again)["index"], batches.at(1)["index"])


@pytest.mark.parametrize("options", [{"weights": np.ones(3)}, {"cache": None}, {"replacement": False}])
def test_invalid_weights_raise(trace: Trace, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="weights"):
        next(trace.windows(2, **{"weights": np.ones(len(LENGTHS)), **options}))
    with pytest.raises(ValueError, match="weight"):
        trace.windows(2).update_priorities(np.array([0]), np.array([1.0]))


class Reaching(ToyEnv):
    """A goal to be reached on a line."""

    observation_space = spaces.Dict({name: spaces.Box(-99, 99, (1,)) for name in ("observation", ACHIEVED, DESIRED)})
    action_space = spaces.Discrete(3)

    def result(self, action: Any) -> Result:
        if action is None:
            self._at, self._goal = 0, int(self.np_random.integers(5, 9))
        else:
            self._at += int(action) - 1
        values = {"observation": self._at, ACHIEVED: self._at, DESIRED: self._goal}
        observation = {name: np.array([value], np.float32) for name, value in values.items()}
        return Result(observation, float(self._at == self._goal) - 1.0)


def reached(achieved: np.ndarray, desired: np.ndarray, infos: Any) -> np.ndarray:
    return (achieved[:, 0] == desired[:, 0]) - 1.0


@pytest.mark.parametrize("strategy", ["future", "final", "random"])
@pytest.mark.parametrize("cache", ["memory", None])
def test_goals_that_were_reached_get_the_rewards_for_them(tmp_path: Path, strategy: str, cache: str | None) -> None:
    record_lengths(tmp_path, [6, 1, 9], Reaching())
    trace = open_trace(tmp_path)
    goals = Hindsight(strategy, reached, ratio=0.5)
    batches = trace.transitions(4, goals=goals, replacement=False, cache=cache)
    other = 0
    for _ in range(10):
        for batch, e, s, i in _items(batches):
            episode = trace[e]
            goal, before = batch["observations"][DESIRED][i, 0], episode.observations[DESIRED][s, 0]
            later = episode.observations[ACHIEVED][s + 1 :, 0].tolist()
            everything = [a for one in trace for a in one.observations[ACHIEVED][:, 0].tolist()]
            allowed = {"future": later, "final": later[-1:], "random": everything}[strategy]
            assert goal == before or goal in allowed
            assert batch["next_observations"][DESIRED][i, 0] == goal
            assert batch["rewards"][i] == (later[0] == goal) - 1.0
            other += goal != before
    assert 50 < other < 110


def test_invalid_goals_raise(trace: Trace) -> None:
    with pytest.raises(ValueError, match="dicts with achieved_goal"):
        trace.transitions(goals=Hindsight("future", reached))
    with pytest.raises(ValueError, match="pass one of"):
        Hindsight("past", reached)


def test_goals_need_rows_in_memory(tmp_path: Path) -> None:
    record_lengths(tmp_path, [6], Reaching())
    with pytest.raises(InvalidOption, match="goals: cache='cuda' does not support them"):
        open_trace(tmp_path).transitions(4, goals=Hindsight("future", reached), cache="cuda")


def test_following_takes_in_new_steps_and_drops_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=10**6), tmp_path)
    lengths: list[int] = []

    def record(length: int) -> None:
        env.reset()
        for _ in range(length):
            env.step(1)
        lengths.append(length)

    record(5)
    read = watched_decoding(monkeypatch)
    trace = open_trace(tmp_path)
    everything = trace.windows(2, 64, follow=0)
    newest = open_trace(tmp_path).windows(2, 64, follow=0, most_steps=12)
    for length in (3, 8, 1, 4, 9, 2, 2, 2):
        record(length)
        batch = next(everything)
        for i in range(64):
            check_window(trace, batch, i)
        assert everything.items == sum(max(0, n - 1) for n in lengths)
        batch = next(newest)
        count = int(np.searchsorted(np.cumsum(lengths[::-1]), 12, side="right"))
        assert newest.items == sum(max(0, n - 1) for n in lengths[-max(1, count) :])
        for i in range(64):
            check_window(trace, batch, i)
    assert sum(len(pieces.episode) for pieces in read) < 4 * len(lengths)
    env.close()


@pytest.mark.parametrize("options", [{"cache": "disk"}, {"replacement": False}, {"weights": np.ones(len(LENGTHS))}])
def test_follow_with_incompatible_options_raises(trace: Trace, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="follow"):
        trace.windows(2, follow=1, **options)
    with pytest.raises(ValueError, match="follow"):
        trace[:3].windows(2, follow=1)


@pytest.mark.parametrize("cache", ["memory", None])
def test_episodes_that_a_view_has_several_times_are_decoded_each_time(tmp_path: Path, cache: str | None) -> None:
    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path / "t")
    for seed in range(4):
        env.reset(seed=seed)
        while not any(env.step(seed % 2)[2:4]):
            pass
    env.close()
    view = open_trace(tmp_path / "t")[[3, 3, 1]]
    rows = rows_of(view)
    assert len(rows.columns["rewards",]) == sum(view.episodes["steps"][1:])  # decoded once
    assert rows.steps.tolist() == [0, 0, view.episodes["steps"][0]]
    for batch in view.transitions(8, replacement=False, cache=cache):
        for row, (place, step) in enumerate(zip(batch["episode"].tolist(), batch["first_step"].tolist())):
            assert (batch["observations"][row] == view[place].observations[step]).all()
            assert batch["actions"][row] == view[place].actions[step]


def test_streams_of_small_traces_have_something_for_each_of_several_ranks(trace: Trace) -> None:
    shares = []
    for rank in range(5):
        batches = trace.windows(2, 4, cache=None, replacement=False)
        batches.share(rank, 5)
        shares.append(all_windows(trace, batches))
    assert all(shares)
    assert sorted(pair for share in shares for pair in share) == sorted(all_windows(trace, windows(trace, 2)))
    lonely = trace.windows(2, 4, cache=None)
    lonely.share(99, 100)
    assert list(lonely) == []


def test_a_stretch_is_found_for_any_lengths() -> None:
    random = np.random.default_rng(0)
    for lengths in ([3], [0, 0, 2, 0, 1], [1] * 900 + [100_000], [0] * 50 + [7] * 9, random.integers(0, 40, 500)):
        ends = np.cumsum(lengths)
        numbers = random.permutation(ends[-1])[:5000]
        assert same(Stretch(ends).find(numbers), ends.searchsorted(numbers, side="right"))


def test_a_stream_has_no_items_by_number(trace: Trace) -> None:
    with pytest.raises(ValueError, match='pass cache="disk"'):
        trace.windows(2, cache=None).take(np.arange(2))


def test_a_pickled_copy_of_batches_has_no_rows(trace: Trace) -> None:
    batches = trace.windows(2, cache="memory")
    before = len(pickle.dumps(batches))
    next(batches)
    assert len(pickle.dumps(batches)) <= before
    assert batches._items is not None


def test_rows_on_a_device_need_pytorch(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "gym_trace.playback.sampling.on_device", raising=False)
    with pytest.raises(
        InvalidOption, match=r"^cache='cuda': pass \"auto\", .*; rows on a device need PyTorch .*pip install torch$"
    ):
        trace.windows(2, cache="cuda")
    with pytest.raises(InvalidOption, match='follow: needs cache="auto" or "memory"'):
        trace.windows(2, cache="cuda", follow=1)
