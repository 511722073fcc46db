"""All recorded data is readable: the writer stays below the limits of readers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from runs import record_lengths
from scripted_env import CountingEnv, ImageEnv, Result, ScriptedEnv, bits, small_blocks

from gym_trace import TraceRecordingWrapper, check_trace, errors, open_trace
from gym_trace.format import wire
from gym_trace.format.columns import parse_column
from gym_trace.format.ring.chunk_builder import split_to_limits
from gym_trace.format.ring.segment import Segment
from gym_trace.playback.episode_index import index_of

LIMITS = ("MAX_TABLE", "MAX_ROWS", "MAX_VALUES", "MAX_COLUMN", "CHUNK_BYTES", "TABLE_ROWS")
LARGE = 10**6


@pytest.fixture(
    params=[
        (2, 2, 600, 4000, LARGE, LARGE),
        (7, 9, 1500, 9000, 4000, 0),
        (40, LARGE, LARGE, LARGE, LARGE, 0),
        (LARGE, LARGE, LARGE, 6000, LARGE, LARGE),
        (LARGE, LARGE, LARGE, LARGE, 2500, 0),
    ]
)
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, limit in zip(LIMITS, request.param):
        monkeypatch.setattr(wire, name, limit)
    return request.param


def test_episodes_of_any_length_stay_below_the_limits(tmp_path: Path, limits: Any) -> None:
    lengths = [0, 1, 1, 30, 0, 0, 2, 5, 1, 1, 1]
    record_lengths(tmp_path / "t", lengths, record_infos=True)
    trace = open_trace(tmp_path / "t")
    assert [episode.observations[:, 0].tolist() for episode in trace] == [list(range(n + 1)) for n in lengths]
    assert [[info["count"] for info in e.infos] for e in trace if len(e)] == [
        list(range(1, n + 1)) for n in lengths if n
    ]
    assert [(e.seed, e.outcome) for e in trace] == [(i, "cut") for i in range(len(lengths) - 1)] + [(10, "closed")]
    assert check_trace(tmp_path / "t").damages == []


def test_frames_stay_below_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_COLUMN", 200_000)  # one frame takes 15,360 bytes
    with small_blocks(rows=64, chunk=10**8, frame=4096):
        seen = []
        env = TraceRecordingWrapper(ImageEnv(length=50), tmp_path / "t")
        seen.append(env.reset()[0].copy())
        seen += [env.step(0)[0].copy() for _ in range(50)]
        env.close()
    (episode,) = open_trace(tmp_path / "t")
    assert bits(episode.observations) == bits(np.array(seen))
    assert check_trace(tmp_path / "t").damages == []


@pytest.mark.parametrize("turn", ["typed", "odd", "annotated"])
def test_constant_frames_and_varying_values_stay_below_the_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn: str
) -> None:
    monkeypatch.setattr("gym_trace.format.ring.chunk_builder.most_bytes", lambda: 25_000)
    steps = [Result(np.zeros((40, 41, 3), np.uint8), 1.0 if turn != "odd" or i % 2 else "odd") for i in range(60)]
    env = ScriptedEnv(spaces.Box(0, 255, (40, 41, 3), np.uint8), spaces.Discrete(2), [(steps[0].observation, steps)])
    wrapped = TraceRecordingWrapper(env, tmp_path / "t", record_infos=True)
    wrapped.reset()
    for i in range(60):
        if turn == "annotated" and i % 7 == 0:
            wrapped.annotate(**{f"note{i}": "x", "more": i})
        wrapped.step(0)
    wrapped.close()
    monkeypatch.setattr(wire, "CHUNK_BYTES", 100_000)  # the readers' limit: a slab exceeds it, a chunk must not
    (episode,) = open_trace(tmp_path / "t")
    assert episode.observations.shape == (61, 40, 41, 3)
    assert not episode.observations.any()
    assert check_trace(tmp_path / "t").damages == []


@pytest.mark.parametrize(
    ("space", "resets", "steps"),
    [
        (spaces.Box(0, 255, (64, 64), np.uint8), 300, 0),
        (spaces.Box(0, 255, (64, 64), np.uint8), 40, 3),
        (spaces.Dict({str(i): spaces.Box(0, 1, (0,)) for i in range(60)}), 1, 3000),
    ],
)
def test_a_slab_stays_below_the_limits_of_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, space: Any, resets: int, steps: int
) -> None:
    """Constant frames of episodes without steps, and values without bytes."""
    monkeypatch.setattr(wire, "CHUNK_BYTES", 500_000)
    with small_blocks(rows=2000, chunk=400_000, values=8192):
        told = Result(space.sample())
        env = TraceRecordingWrapper(
            ScriptedEnv(space, spaces.Discrete(2), [(told.observation, [told] * steps)] * resets), tmp_path / "t"
        )
        for _ in range(resets):
            env.reset()
            for _ in range(steps):
                env.step(0)
        live = open_trace(tmp_path / "t")
        assert sum(live.episodes["steps"]) == resets * steps
        env.close()
    assert [len(episode) for episode in open_trace(tmp_path / "t")] == [steps] * resets
    assert check_trace(tmp_path / "t").damages == []


def test_many_large_values_stay_below_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_VALUES", 100_000)
    steps = [
        Result("a" * size, size, info={"large": b"x" * size}) for size in (10, 20_000, 15_000, 0, 20_000, 20_000, 7)
    ]
    env = ScriptedEnv(spaces.Text(20_000), spaces.Discrete(2), [("b" * 20_000, steps)])
    wrapped = TraceRecordingWrapper(env, tmp_path / "t", record_infos=True)
    wrapped.reset()
    for _ in steps:
        wrapped.annotate(note="c" * 19_000)
        wrapped.step(0)
    wrapped.close()
    (episode,) = open_trace(tmp_path / "t")
    assert [len(text) for text in episode.observations] == [20_000, *(step.reward for step in steps)]
    assert [len(info["large"]) for info in episode.infos] == [step.reward for step in steps]
    assert check_trace(tmp_path / "t").damages == []


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="NumPy 1 has no more than 32")
@pytest.mark.parametrize("dimensions", [33, 40])
def test_arrays_with_too_many_dimensions_for_a_column_are_stored_as_values(tmp_path: Path, dimensions: int) -> None:
    env = TraceRecordingWrapper(CountingEnv(), tmp_path / "t")
    env.reset()
    value = np.ones((1,) * (dimensions - 1) + (2,))
    for _ in range(2):
        env.annotate(value=value)
        env.step(0)
    env.close()
    (episode,) = open_trace(tmp_path / "t")
    assert [bits(kept) for kept in episode.annotations["value"]] == [bits(value)] * 2


def test_metadata_beyond_the_limit_raises_before_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.format.manifest._MAX_LINE", 10_000)
    with pytest.raises(errors.UnstorableValue, match="the limit is 10000"):
        TraceRecordingWrapper(CountingEnv(), tmp_path / "t", metadata="x" * 10_000)
    assert list((tmp_path / "t").iterdir()) == []


def test_a_value_beyond_the_limit_is_named_before_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_COLUMN", 400)
    space = spaces.Dict({"image": spaces.Box(0, 255, (10, 11), np.uint8), "speed": spaces.Box(0, 1, (2,))})
    with pytest.raises(errors.UnstorableValue, match="observations/image: 110 bytes per row; the limit is 100"):
        TraceRecordingWrapper(ScriptedEnv(space, spaces.Discrete(2), []), tmp_path / "t")


@pytest.mark.parametrize(
    ("shape", "rows", "told"),
    [
        ((1,) * 65, 1, "has 65 dimensions a row"),
        ((2,), (1 << 24) + 1, "declares .* rows"),
        ((3 << 30,), 1, "declares .* bytes"),
    ],
)
def test_a_column_beyond_the_limits_is_named_by_readers(shape: tuple[int, ...], rows: int, told: str) -> None:
    size = rows * int(np.prod(shape, dtype=object))
    with pytest.raises(errors.CorruptTrace, match=f"column observations/image {told}; the limit is"):
        parse_column([["observations", "image"], "|u1", list(shape), rows, 0, size, size, 0])


def fragments_of(runs: list[tuple[bool, bool, int, bool]]) -> Any:
    table = np.zeros(len(runs), wire.FRAGMENT)
    for row, (number, (starts, leads, steps, ends)) in zip(table, enumerate(runs)):
        row["episode"], row["steps"], row["first_step"] = number, steps, 100 * number
        row["flags"] = (
            wire.STARTS * starts | wire.HAS_INITIAL * leads | (wire.STOPS | wire.ENDS | wire.TERMINATED) * ends
        )
        row["outcome"], row["seed"], row["duration"] = ends, number * starts, number * ends
    return table


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 9), st.booleans()), min_size=1, max_size=12),
    st.integers(2, 30),
    st.integers(400, 4000),
)
def test_split_segments_hold_the_same_data(runs: Any, table: int, values: int) -> None:
    fragments = fragments_of(runs)
    steps = int(fragments["steps"].sum())
    leads, starts = (int((fragments["flags"] & flag != 0).sum()) for flag in (wire.HAS_INITIAL, wire.STARTS))
    columns: Any = {
        ("starts",): [b"s%d" % i for i in range(starts)],
        ("observations",): np.arange(3 * (steps + leads)).reshape(-1, 3),
        ("rewards",): np.arange(steps) / 2,
        ("infos",): [b"i" * (i % 50) for i in range(steps)],
    }
    segment = Segment(fragments, {path: rows for path, rows in columns.items() if len(rows)}, 10**9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "MAX_TABLE", table)
        patch.setattr(wire, "MAX_VALUES", values)
        parts = list(split_to_limits(segment))
        assert all(len(part.fragments) <= table // 2 for part in parts)
    for path, rows in segment.columns.items():
        pieces = [part.columns[path] for part in parts if path in part.columns]
        if isinstance(rows, np.ndarray):
            assert bits(np.concatenate(pieces)) == bits(rows)
        else:
            assert [row for piece in pieces for row in piece] == rows
    for part in parts:
        own = part.fragments
        assert len(part.columns.get(("rewards",), ())) == own["steps"].sum()
        rows_led = int((own["flags"] & wire.HAS_INITIAL != 0).sum())
        assert len(part.columns.get(("observations",), ())) == own["steps"].sum() + rows_led
    together = np.concatenate([part.fragments for part in parts])
    for number, whole in enumerate(fragments):
        own = together[together["episode"] == number]
        assert own["steps"].sum() == whole["steps"]
        assert own["first_step"].tolist() == (whole["first_step"] + np.cumsum(own["steps"]) - own["steps"]).tolist()
        assert np.bitwise_or.reduce(own["flags"]) == whole["flags"]
        for name, place in (("seed", 0), ("outcome", -1), ("duration", -1)):
            assert own[name][place] == whole[name]
            assert own[name].sum() == whole[name]


def test_columns_have_the_byte_order_of_the_format(tmp_path: Path) -> None:
    vector = pytest.importorskip("gymnasium.wrappers.vector") and pytest.importorskip("gymnasium.vector")
    if not hasattr(vector, "AutoresetMode"):
        pytest.skip("vector environments need gymnasium 1.1")
    from numbered_lanes import FixedResultEnv

    from gym_trace import TraceRecordingVectorWrapper

    rewards = np.array([1.5, 2.5, 3.5], ">f8")
    env = TraceRecordingVectorWrapper(FixedResultEnv(rewards=rewards), tmp_path / "t")
    env.reset()
    env.annotate(value=np.arange(3, dtype=">i4"))
    env.step(np.zeros(3, np.int64))
    env.close()
    trace = open_trace(tmp_path / "t")
    batch = index_of(trace).readers[0].batches[0]
    columns = [batch.read_chunk(number, lambda path: True).columns for number in range(len(batch.chunks))]
    assert not [path for chunk in columns for path, column in chunk.items() if column.dtype.startswith(">")]
    values = [(episode.rewards[0], episode.annotations["value"][0]) for episode in trace]
    assert values == [(1.5, 0), (2.5, 1), (3.5, 2)]
