"""Slabs of lanes: a copy made at any moment holds exactly the steps recorded so far."""

import contextlib
import itertools
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import forked_python
import numpy as np
import pytest
from forked_python import HELPERS
from gymnasium import spaces, vector
from hypothesis import given, settings
from hypothesis import strategies as st
from long_tests import LONG
from numbered_lanes import COUNT, DISABLED, MODES, NEXT_STEP, SAME_STEP, SPACES, NumberedLaneEnv, modes, parts_of
from scripted_env import bits

from gym_trace import TraceRecordingVectorWrapper, open_trace
from gym_trace.data.packing import pack, unpack
from gym_trace.errors import CorruptTrace, RecordingError, UnstorableValue
from gym_trace.format import wire
from gym_trace.format.batch_files import BatchFiles
from gym_trace.format.columns import ColumnEncoder, Workspace, decode
from gym_trace.format.ring.chunk_builder import ChunkWriter, add_reward_sums
from gym_trace.format.ring.lanes.decoder import LaneDecoder
from gym_trace.format.ring.lanes.events import PYTHON_LOOPS, AllExcept, Steps, lane_rows
from gym_trace.format.ring.lanes.layout import REWARDS
from gym_trace.format.ring.memory import LANES
from gym_trace.format.ring.recovered import read_ring
from gym_trace.playback.episode_index import index_of
from gym_trace.recording.vector import slabs as vector_slabs
from gym_trace.storage.local import LocalStorage

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="there is no ring here"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "infos": {"record_infos": True},
    "episodes": {"record_infos": True, "episode_filter": lambda episode: episode % 3 != 1},
    "frames": {"frame_filter": lambda step: step != 1},
}
PLAYS = ["step", "step", "step", "note", "reset", "some", "raise", "flush"]


class Lanes(vector.SyncVectorEnv):
    """Raises if `fails` is set. If odd is set, results have other dtypes than their spaces at every second step."""

    def __init__(self, mode: Any, space: str, odd: bool):
        makers = [partial(NumberedLaneEnv, lane, SPACES[space], SPACES["discrete"]) for lane in range(COUNT)]
        super().__init__(makers, autoreset_mode=mode)
        self.over, self.fails, self.t, self.odd = np.zeros(COUNT, np.bool_), False, 0, odd

    def step(self, actions: Any) -> Any:
        if self.fails:
            raise ZeroDivisionError
        observations: Any
        rewards: Any
        observations, rewards, terminations, truncations, infos = super().step(actions)
        self.over = terminations | truncations
        self.t += 1
        if self.odd:
            rewards = [rewards, rewards.astype(np.float32), (8 * rewards).astype(np.int16), rewards.astype(object)][
                self.t % 4
            ]
            if self.t % 2 and isinstance(observations, np.ndarray):
                observations = observations.astype(np.float16)
        return observations, rewards, terminations, truncations, infos


class Run:
    """A recorded environment and the operations on it.

    Attributes:
        asked: the actions of the last step.
        failed: True if the last step raised.
        written: the segments of each submitted slab.
    """

    def __init__(self, directory: Path, mode: Any, space: str, odd: bool, options: str):
        self.directory, self.mode, self.odd = directory, mode, odd
        self.env = Lanes(mode, space, odd)
        given = {"flush_seconds": 1000.0, **OPTIONS[options]}
        self.wrapped = TraceRecordingVectorWrapper(self.env, directory, uid="w", **given)
        self.recorder = self.wrapped._recorder
        self.written: list[list[Any]] = []
        self.asked, self.failed, self.number = np.zeros(COUNT, np.int64), False, 0
        submit = self.recorder.out.submit

        def submitted(sequence: int, segments: Any, pending: Any) -> None:
            self.written.append(list(map(_copied, segments())))
            submit(sequence, segments, pending)

        self.recorder.out.submit = submitted  # type: ignore[method-assign]
        self.wrapped.reset(seed=3, options={"level": 2})

    def play(self, play: str) -> None:
        self.number += 1
        if self.mode == DISABLED and self.env.over.any():
            self.reset()
        if play == "note":
            self.wrapped.annotate(note=np.arange(COUNT) + self.number, word=[str(self.number)] * COUNT)
        if play in ("step", "note", "raise"):
            self.step(play == "raise")
        elif play == "reset" or (play == "some" and self.mode != DISABLED):
            self.reset()
        elif play == "some":
            self.reset(np.arange(COUNT) == self.number % COUNT)
        else:
            self.wrapped.flush()

    def step(self, fails: bool) -> None:
        self.env.fails = fails
        kind = np.int16 if self.odd and self.number % 3 == 0 else np.int64
        self.asked = (np.arange(COUNT) + self.number).astype(kind)
        self.failed = fails
        try:
            self.wrapped.step(self.asked)
        except ZeroDivisionError:
            assert fails
            self.env.over[:] = self.mode == DISABLED

    def reset(self, mask: Any = None) -> None:
        self.failed = False
        self.wrapped.reset(options=None if mask is None else {"reset_mask": mask})
        self.env.over[:] = False if mask is None else self.env.over & ~mask


def _copied(segment: Any) -> Any:
    columns = {path: rows[:] if isinstance(rows, list) else rows.copy() for path, rows in segment.columns.items()}
    return segment._replace(fragments=segment.fragments.copy(), columns=columns)


def in_ring(directory: Path, after: int = 0) -> tuple[list[Any], list[Any]]:
    """Return the segments of the slabs of a ring after slab `after`, and the pending actions."""
    image = read_ring(LocalStorage(directory), "w", alive=False)
    assert image is not None
    assert image.kind == LANES
    segments: list[Any] = []
    pending: list[Any] = []
    for sequence, slab, _ in image.slabs:
        if sequence > after:
            of_slab, pending = LaneDecoder(image.layout).decode(sequence, slab)
            segments += of_slab
    return segments, pending


def parts_in(directory: Path) -> list[dict[str, Any]]:
    """Return everything in every part of a trace, except times."""
    open_ones = dict.fromkeys(("closed", "lost"), "open")
    return [
        {**part, "outcome": open_ones.get(part["outcome"], part["outcome"])} for part in parts_of(open_trace(directory))
    ]


def rebuilt(directory: Path, schema: dict[str, Any], *slabs: list[Any]) -> list[dict[str, Any]]:
    """Write the segments of slabs to a trace of a dead writer; return its parts."""
    chunks = ChunkWriter(lambda: BatchFiles(LocalStorage(directory), schema, 1, False), 1 << 30)
    directory.mkdir()
    for sequence, segments in enumerate(slabs, 1):
        chunks.write_slab(sequence, segments, [])
    if chunks.writer is None:
        return []
    chunks.writer.detach()
    return parts_in(directory)


@settings(max_examples=settings().max_examples // 2)
@given(
    st.sampled_from(MODES),
    st.sampled_from(["box", "mixed", "scalar", "hollow", "frames"]),
    st.sampled_from(sorted(OPTIONS)),
    st.booleans(),
    st.lists(st.sampled_from(PLAYS), min_size=4, max_size=12),
)
def test_a_ring_copied_after_each_operation_holds_all_recorded_steps(
    tmp_path_factory: Any, mode: Any, space: str, options: str, odd: bool, plays: list[str]
) -> None:
    directory = tmp_path_factory.mktemp("trace")
    run = Run(directory / "t", mode, space, odd, options)
    for number, play in enumerate(plays):
        run.play(play)
        segments, pending = in_ring(directory / "t", after=run.recorder.out.submitted)
        if not (LONG or play == "raise" or number == len(plays) - 1):
            continue
        found = rebuilt(directory / f"{number}", run.recorder._schema, *run.written, segments)
        other = Run(directory / f"closed{number}", mode, space, odd, options)
        for before in plays[: number + 1]:
            other.play(before)
        other.wrapped.close()
        assert found == parts_in(directory / f"closed{number}")
        asked = {lane.lane: lane.leaves[0] for lane in pending}
        assert bool(pending) <= run.failed
        assert all(bits(action) == bits(run.asked[lane]) for lane, action in asked.items())
        if options in ("plain", "infos") and run.failed and play == "raise" and plays[:number].count("raise") == 0:
            open_ones = {part["lane"] for part in found if part["outcome"] == "open"}
            resets = set(np.flatnonzero(run.env.over).tolist()) if mode == NEXT_STEP else set()
            assert set(asked) == open_ones - resets
    run.wrapped.close()
    assert not (directory / "t" / "w.ring").exists()


@modes
@pytest.mark.parametrize(
    ("options", "bytes_"),
    list(itertools.product(sorted(OPTIONS), (300, 900)) if LONG else zip(sorted(OPTIONS), (300, 900, 900, 300))),
)
def test_every_slab_can_be_decoded_without_the_recorder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any, options: str, bytes_: int
) -> None:
    monkeypatch.setattr(vector_slabs, "_LEAST_BYTES", bytes_)
    monkeypatch.setattr(vector_slabs, "_MOST_BYTES", bytes_)
    run = Run(tmp_path / "t", mode, "box", False, options)
    found: dict[int, list[Any]] = {}
    plays = itertools.islice(
        itertools.cycle(["step", "step", "note", "step", "raise", "step", "some", "step"]), 60 if bytes_ > 300 else 40
    )
    for play in plays:
        run.play(play)
        image = read_ring(LocalStorage(tmp_path / "t"), "w", alive=False)
        assert image is not None
        for sequence, slab, _ in image.slabs:  # the last decoding of a slab sees all of it
            found[sequence] = list(map(_copied, LaneDecoder(image.layout).decode(sequence, slab)[0]))
    assert len(found) > 3
    run.wrapped.close()
    closed = parts_in(tmp_path / "t")
    slabs = [segments for _, segments in sorted(found.items())]
    assert rebuilt(tmp_path / "r", run.recorder._schema, *slabs) == closed


@modes
def test_true_flags_of_any_byte_value_are_recorded(tmp_path: Path, mode: Any) -> None:
    run = Run(tmp_path / "t", mode, "box", False, "plain")
    step = run.env.step

    def step_with_masks(actions: Any) -> Any:
        observations, rewards, terminations, *rest = step(actions)
        return observations, rewards, (terminations.view(np.uint8) * np.uint8(255)).view(np.bool_), *rest

    run.env.step = step_with_masks  # type: ignore[method-assign]
    for _ in range(7):
        run.play("step")
    segments, _ = in_ring(tmp_path / "t")
    found = rebuilt(tmp_path / "r", run.recorder._schema, segments)
    run.wrapped.close()
    assert found == parts_in(tmp_path / "t")
    assert "terminated" in {part["outcome"] for part in found}


def test_an_entry_larger_than_the_ring_starts_a_larger_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_slabs, "_LEAST_LOG", 8 << 10)
    monkeypatch.setattr(vector_slabs, "_LEAST_BYTES", 1 << 10)
    run = Run(tmp_path / "t", SAME_STEP, "box", False, "plain")
    size = (tmp_path / "t" / "w.ring").stat().st_size
    for number in range(3):
        run.play("step")
        run.wrapped.annotate(large=np.full((COUNT, 1000 * 10**number), number))
        run.play("step")
        run.wrapped.annotate(large=[f"{number}" * (3000 * 10**number)] * COUNT)
    assert (tmp_path / "t" / "w.ring").stat().st_size > 4 * size
    segments, pending = in_ring(tmp_path / "t", after=run.recorder.out.submitted)
    found = rebuilt(tmp_path / "r", run.recorder._schema, *run.written, segments)
    run.wrapped.close()
    assert found == parts_in(tmp_path / "t")
    assert not pending
    notes = [note for part in open_trace(tmp_path / "t") for note in part.annotations.get("large", [])]
    assert {len(note) for note in notes if isinstance(note, np.ndarray)} == {1000, 10_000, 100_000}


def test_a_step_beyond_the_ring_limit_raises_and_loses_no_earlier_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_slabs, "MOST_SLAB_BYTES", 2 << 20)
    with pytest.raises(UnstorableValue, match="at most 2097152 can be kept"):
        Run(tmp_path / "frames", NEXT_STEP, "frames", False, "plain")
    run = Run(tmp_path / "t", NEXT_STEP, "box", False, "plain")
    run.play("step")
    run.wrapped.annotate(large=np.zeros((COUNT, 30_000)))
    run.play("step")  # into a larger ring, up to the limit
    run.wrapped.annotate(large=np.zeros((COUNT, 90_000)))
    run.play("step")
    with pytest.raises(RecordingError, match="at most 2097152 can be kept"):
        run.play("step")
    assert max(map(len, open_trace(tmp_path / "t"))) == 2
    run.wrapped.close()


@modes
def test_a_step_that_kills_the_process_is_pending(tmp_path: Path, mode: Any) -> None:
    script = f"""
import os, sys
sys.path[:0] = {[os.path.dirname(__file__), HELPERS]!r}
from test_lane_ring import *
run = Run(Path({str(tmp_path / "t")!r}), MODES[{MODES.index(mode)}], "box", False, "infos")
for _ in range(5):
    run.play("step")
NumberedLaneEnv.step = lambda *_: os._exit(9)
run.play("step")
"""
    assert forked_python.run([sys.executable, "-c", script], check=False).returncode == 9
    segments, pending = in_ring(tmp_path / "t")
    other = Run(tmp_path / "other", mode, "box", False, "infos")
    for _ in range(5):
        other.play("step")
    resets = other.env.over if mode == NEXT_STEP else np.zeros(COUNT, np.bool_)
    if mode == DISABLED and other.env.over.any():
        other.reset()
    assert {(lane.lane, int(lane.leaves[0])) for lane in pending} == {(i, i + 6) for i in range(COUNT) if not resets[i]}
    other.wrapped.close()
    assert rebuilt(tmp_path / "r", other.recorder._schema, segments) == parts_in(tmp_path / "other")
    for lane in pending:
        (part,) = [p for p in open_trace(tmp_path / "other") if p.episode_id == lane.episode]
        assert (part.lane, len(part)) == (lane.lane, lane.step)


@modes
@pytest.mark.parametrize("options", ["infos", "frames"])
def test_damaged_slabs_raise_only_corrupt_trace(tmp_path: Path, mode: Any, options: str) -> None:
    run = Run(tmp_path / "t", mode, "mixed", True, options)
    for play in ["step", "note", "step", "flush", "step", "some", "step"]:
        run.play(play)
    image = read_ring(LocalStorage(tmp_path / "t"), "w", alive=False)
    assert image is not None
    run.wrapped.close()
    decoder, random = LaneDecoder(image.layout), np.random.default_rng(1)
    log = image.layout["log"]
    for sequence, slab, _ in image.slabs:
        used = len(slab) - len(slab[log:].lstrip(b"\0")) + 6000
        for _ in range(1000 if LONG else 100):
            damaged = bytearray(slab)
            for at in random.integers(log, min(len(slab), used), random.integers(1, 4)):
                damaged[at] = random.integers(0, 256)
            with contextlib.suppress(CorruptTrace):
                decoder.decode(sequence, bytes(damaged))


@pytest.mark.parametrize(
    "change",
    [
        {"lanes": 0},
        {"lanes": 1 << 40},
        {"times": -1},
        {"times": 1 << 29},
        {"log": 1 << 50},
        {"log": "x"},
        {"mode": "Never"},
        {"columns": []},
        {"columns": [[["rewards"], "<f4", [], 64, True]]},
        {"columns": 3},
    ],
)
def test_an_invalid_layout_raises(tmp_path: Path, change: dict[str, Any]) -> None:
    run = Run(tmp_path / "t", NEXT_STEP, "box", False, "plain")
    image = read_ring(LocalStorage(tmp_path / "t"), "w", alive=False)
    run.wrapped.close()
    assert image is not None
    LaneDecoder(unpack(pack(image.layout)))
    with pytest.raises(CorruptTrace):
        LaneDecoder({**image.layout, **change})


class Films(vector.VectorEnv):  # type: ignore[type-arg]
    """Two steps of frames of 256 KiB in four lanes, then the end of lane 2."""

    metadata: dict[str, Any] = {"autoreset_mode": vector.AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self) -> None:
        self.num_envs, self.steps = 4, 0
        self.single_observation_space, self.single_action_space = (
            spaces.Box(0, 255, (1 << 18,), np.uint8),
            spaces.Discrete(2),
        )
        self.observation_space = vector.utils.batch_space(self.single_observation_space, 4)
        self.action_space = vector.utils.batch_space(self.single_action_space, 4)

    def frames(self) -> Any:
        return np.repeat(np.arange(4, dtype=np.uint8)[:, None] + 10 * self.steps, 1 << 18, axis=1)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, Any]:
        return self.frames(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Any]:
        self.steps += 1
        ended = np.array([False, False, self.steps == 5, False])
        return self.frames(), np.arange(4.0), ended, np.zeros(4, np.bool_), {}


def test_large_rows_of_each_lane_lie_in_chunks_of_their_own(tmp_path: Path) -> None:
    env = TraceRecordingVectorWrapper(Films(), tmp_path / "t")
    env.reset(seed=0)
    for _ in range(10):
        env.step(np.zeros(4, np.int64))
    env.close()
    trace = open_trace(tmp_path / "t")
    batch = index_of(trace).readers[0].batches[0]
    bounds = np.cumsum([0, *batch.chunks["fragments"].tolist()])
    lanes = [set(batch.fragments["lane"][a:b].tolist()) for a, b in itertools.pairwise(bounds) if b - a]
    assert all(len(of_chunk) == 1 for of_chunk in lanes)
    assert {lane for of_chunk in lanes for lane in of_chunk} == {0, 1, 2, 3}
    for episode in trace:
        steps = (
            episode.first_step
            + np.arange(len(episode) + 1)
            + (6 if episode.lane == 2 and episode.episode_id > 3 else 0)
        )
        assert (episode.observations == (10 * steps + episode.lane).astype(np.uint8)[:, None]).all()


@given(st.sampled_from(["f4", "f8", "i2", "?"]), st.sampled_from([1, 0.5, 1 << 60]), st.integers(0, 1 << 32))
def test_equal_rewards_are_stored_and_summed_like_any_others(dtype: str, reward: float, seed: int) -> None:
    chance = np.random.default_rng(seed)
    by_time = np.full(chance.integers(1, 6, 2), reward if dtype[0] == "f" else 1, dtype)
    excluded = np.flatnonzero(chance.random(by_time.size) < chance.choice([0, 0.2, 0.9]))
    column, rows = by_time.T, AllExcept(excluded, by_time.size)
    column[np.divmod(excluded, len(by_time))] = 0  # rows of resets have no reward
    if chance.random() < 0.3:
        by_time.flat[chance.integers(by_time.size)] = chance.choice([0, -0.0, 1, np.nan if dtype[0] == "f" else 0])
    expected = np.empty(rows.remaining, dtype)
    lane_rows(column, excluded, expected)
    found = Steps({REWARDS: column}, {}, np.empty(0), np.empty(0), [], PYTHON_LOOPS).rows(REWARDS, rows)
    assert isinstance(found, np.ndarray)
    assert bits(found) == bits(expected)
    if len(found):
        encode = ColumnEncoder(REWARDS, Workspace(1)).encode
        assert bits(decode(*encode(found))) == bits(decode(*encode(expected))) == bits(expected)
    table = np.zeros(2, wire.FRAGMENT)
    table["steps"] = len(found) // 3, len(found) - len(found) // 3
    copied = table.copy()
    add_reward_sums(found, table)
    add_reward_sums(expected, copied)
    assert table.tobytes() == copied.tobytes()
