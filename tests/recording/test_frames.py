"""Rows stored as changes restore every frame, whatever happens in between."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from scripted_env import Result, ToyEnv

from gym_trace import TraceRecordingWrapper, open_trace
from gym_trace.data.deltas import DeltaPacker, DeltaRows
from gym_trace.data.layout import Leaf
from gym_trace.errors import CorruptTrace
from gym_trace.format import transforms
from gym_trace.format.columns import ColumnEncoder, LargeRows, Workspace, decode, parse_column
from gym_trace.format.encodings import CHANGES, ENCODINGS, ZSTD, Encoding
from gym_trace.format.ring.row_slab import RowSlab
from gym_trace.recording.single import slabs as recording

SHAPES = [(70, 60), (4097,), (2050, 3), (1366, 3), (70_001,)]  # words of 8, 1, 2 and 2 bytes, and more than 65,536


class Slots:
    """A recorder that keeps log entries; values outside their space become None."""

    def __init__(self, frame: np.ndarray, room: int = 1 << 30):
        self.slots: list[Any] = []
        self.room = room  # bytes available for changes
        self.interrupted = False  # raise KeyboardInterrupt after the next entry
        self.packer = DeltaPacker(Leaf(("observations",), frame.dtype, frame.shape), 5, self, self.other)

    def put(self, slot: Any) -> None:
        self.slots.append(slot)
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt

    def other(self, value: Any) -> bytes:
        self.put(None)
        return b"other"

    def log_whole(self, column: int, value: bytes) -> None:
        assert column == 5
        self.put(value)

    def log_changes(self, column: int, count: int, changes: bytes) -> bool:
        assert column == 5
        if len(changes) > self.room:
            return False
        self.put((changes[: 4 * count], changes[4 * count :]))
        return True

    def drop(self) -> None:
        """Drop the last value: its row was never written."""
        self.slots.pop()
        self.packer.forget()


def frames_of(kinds: list[int], shape: tuple[int, ...], dtype: str = "|u1") -> list[np.ndarray]:
    """Return a frame per kind: 0 unchanged, 1 a few changes, 2 also the first and last word, 3 all new."""
    random = np.random.default_rng(zlib.crc32(repr((kinds, shape)).encode()))
    frame = np.zeros(shape, dtype)
    frames = []
    for kind in kinds:
        flat = frame.reshape(-1)
        if kind:
            flat[random.integers(0, flat.size, 5)] = random.integers(0, 256, 5)
        if kind == 2:
            flat[0] += 1
            flat[-1] += 1
        if kind == 3:
            flat[:] = random.integers(0, 256, flat.size)
        frames.append(frame.copy())
    return frames


def packed(frames: list[np.ndarray], torn: set[int], odd: set[int], room: int = 1 << 30) -> list[Any]:
    """Return the slots of the frames.

    Before a frame in torn, another frame is packed without its row. A frame in odd is replaced by another object.
    """
    rows = Slots(frames[0], room)
    for i, frame in enumerate(frames):
        if i in torn:
            rows.packer(np.full_like(frame, 77))
            rows.drop()
        value = "odd" if i in odd else frame.copy()
        assert rows.packer(value) == (b"other" if i in odd else b"")
        if i not in odd:
            value[...] = 99  # environments reuse their buffers
    return rows.slots


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.sampled_from(SHAPES[:4]),
    st.sets(st.integers(0, 29)),
    st.sets(st.integers(0, 29)),
    st.sampled_from([1 << 30, 60, 0]),
)
def test_slots_restore_the_recorded_frames(
    kinds: list[int], shape: tuple[int, ...], torn: set[int], odd: set[int], room: int
) -> None:
    frames = frames_of(kinds, shape)
    slots = packed(frames, torn, odd, room)
    assert [slot is None for slot in slots] == [i in odd for i in range(len(slots))]
    rows = DeltaRows(np.dtype("|u1"), shape, [slot for slot in slots if slot is not None], None)
    expected = [frame.tobytes() for i, frame in enumerate(frames) if i not in odd]
    for count in (1, 3, 100):
        assert [frame.tobytes() for array in rows.arrays(count) for frame in array] == expected
    after = rows.after()
    assert (b"" if after is None else after.tobytes()) == (expected[-1] if expected else b"")


def test_still_frames_take_few_bytes_and_others_no_more_than_their_size() -> None:
    still = packed(frames_of([3] + [1] * 20, (70, 60)), set(), set())
    assert [type(slot) for slot in still] == [bytes] + [tuple] * 20
    noise = packed(frames_of([3] * 21, (70, 60)), set(), set())
    assert {type(slot) for slot in noise} == {bytes}


@pytest.mark.parametrize("kind", [1, 3])
def test_the_last_frame_is_available(kind: int) -> None:
    frames = frames_of([kind] * 9, (70, 60))
    rows = Slots(frames[0])
    for frame in frames:
        rows.packer(frame)
        assert rows.packer.last() == frame.tobytes()


@pytest.mark.parametrize("kind", [1, 3])
def test_a_frame_after_ctrl_c_does_not_depend_on_the_interrupted_one(kind: int) -> None:
    frames = frames_of([1, 1, kind, 1, 1], (70, 60))
    rows = Slots(frames[0])
    for i, frame in enumerate(frames):
        if i == 2:
            rows.interrupted = True
            with pytest.raises(KeyboardInterrupt):
                rows.packer(frame)
            if kind == 3:
                rows.slots.pop()  # removed, or never written
        else:
            rows.packer(frame)
    assert [type(slot) for slot in rows.slots[2 + (kind == 1) :]] == [bytes, tuple]
    rest = DeltaRows(np.dtype("|u1"), (70, 60), rows.slots[-2:], None)
    assert [frame.tobytes() for array in rest.arrays(9) for frame in array] == [f.tobytes() for f in frames[3:]]


@pytest.mark.parametrize("dtype", ["|u1", "<f4", "<i2"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [0, 1, 3])
def test_columns_in_parts_round_trip(kind: int, shape: tuple[int, ...], dtype: str) -> None:
    frames = frames_of([3] + [kind] * 24, shape, dtype)
    encoder = ColumnEncoder(("observations",), Workspace(1))
    encodings = set()
    for take in ((7, 18), (1, 1, 23), (25,)):
        begin, before, slots, parts = 0, None, packed(frames, set(), set()), []
        for count in take:
            rows = DeltaRows(np.dtype(dtype), shape, slots[begin : begin + count], before)
            parts.append(rows)
            begin, before = begin + count, rows.after()
        column, blob = encoder.encode(LargeRows(parts))
        encodings.add(column.encoding)
        decoded = decode(parse_column(column.descriptor()), blob)
        assert decoded.dtype == dtype
        assert decoded.tobytes() == np.array(frames).tobytes()
        column, blob = encoder.encode(LargeRows([np.array(frames[:9]), np.array(frames[9:])]))
        assert decode(column, blob).tobytes() == np.array(frames).tobytes()
    if kind == 3 and dtype == "|u1":
        assert encodings == {0}


def hardly_changing() -> np.ndarray[Any, Any]:
    """Frames of a game: a moving bat and ball."""
    frames = np.full((40, 210, 160, 3), 60, np.uint8)
    for i, frame in enumerate(frames):
        frame[3 * i % 150 + 30 :][:16, 140:144] = 90
        frame[7 * i % 180 + 20 :][:4, 5 * i % 150 :][:, :2] = 236
    return frames


def test_encodings_are_tried_again_when_many_words_change(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Encoding] = []
    size_under = ColumnEncoder._size_under

    def watched(self: ColumnEncoder, encoding: Encoding, *rest: Any) -> int:
        tried.append(encoding)
        return size_under(self, encoding, *rest)

    monkeypatch.setattr(ColumnEncoder, "_size_under", watched)
    encoder = ColumnEncoder(("observations",), Workspace(1))
    still = hardly_changing()
    noise = np.random.default_rng(0).integers(0, 256, still.shape, np.uint8)
    for _ in range(10):
        column, blob = encoder.encode(still)
        assert column.encoding == CHANGES.bits | ZSTD
    assert tried == [CHANGES]
    for _ in range(10):
        column, blob = encoder.encode(noise)
        assert np.array_equal(decode(column, blob), noise)
    assert column.encoding == 0
    assert set(tried) == {encoding for encoding in ENCODINGS if encoding.applies(still[0].nbytes, 1)}


def test_a_single_row_does_not_choose_the_encoding() -> None:
    encoder = ColumnEncoder(("observations",), Workspace(1))
    rows = hardly_changing()
    encoder.encode(rows[:1])
    column, _ = encoder.encode(rows)
    assert column.encoding == CHANGES.bits | ZSTD


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("encoding", [one for one in ENCODINGS if one.applies(4400, 4)], ids=lambda one: str(one.bits))
def test_every_encoding_of_large_rows_round_trips(
    monkeypatch: pytest.MonkeyPatch, encoding: Encoding, compressed: bool
) -> None:
    def choice(self: Any, *_: Any) -> tuple[Encoding, bool]:
        return encoding, compressed

    monkeypatch.setattr(ColumnEncoder, "_choice", choice)
    frames = np.array(frames_of([3, 1, 0, 2, 3, 1], (1100,), "<f4"))
    column, blob = ColumnEncoder(("observations",), Workspace(1)).encode(frames)
    assert column.encoding == encoding.bits | ZSTD * compressed
    assert decode(parse_column(column.descriptor()), blob).tobytes() == frames.tobytes()


@given(st.data())
def test_forged_changes_raise_or_fill_the_rows(data: st.DataObject) -> None:
    frames = np.array(frames_of([3, 1, 1, 2, 0, 1], (4104,)))
    good = bytearray(frames[0].tobytes() + transforms.changes(frames[1:], frames[0], np.empty(513 * 5, np.bool_)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4104, len(good) - 1))
        good[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, 3)) and data.draw(st.integers(4104, len(good)))
    out = np.empty((6, 4104), np.uint8)
    try:
        transforms.undo_changes(np.frombuffer(bytes(good[: cut or None]), np.uint8), 6, 0, out)
    except CorruptTrace:
        return
    assert out[0].tobytes() == frames[0].tobytes()


@pytest.mark.parametrize(
    ("rows", "encoding", "raw"),
    [(0, 16, 0), (2, 16, 4095), (2, 16, 8 * 8192 + 1), (2, 16 | 2, 8192), (2, 16 | 4, 8192), (2, 16 | 8, 4096)],
)
def test_an_inconsistent_column_of_changes_raises(rows: int, encoding: int, raw: int) -> None:
    parse_column([["a"], "|u1", [4096], 2, 16, 5000, 5000, 0])
    with pytest.raises(CorruptTrace):
        parse_column([["a"], "|u1", [4096], rows, encoding, raw, raw, 0])
    with pytest.raises(CorruptTrace):
        parse_column([["a"], "|u1", [4095], 2, 16, 5000, 5000, 0])


@given(st.integers(0, 6), st.integers(0, 6))
def test_a_range_of_rows_of_changes_decodes_alone(begin: int, end: int) -> None:
    frames = np.array(frames_of([3, 1, 1, 2, 0, 1], (4104,)))
    packed = frames[0].tobytes() + b"".join(
        transforms.changes(frames[i : i + 2], frames[i - 1], np.empty(513 * 2, np.bool_)) for i in (1, 3, 5)
    )
    out = np.empty((max(0, end - begin), 4104), np.uint8)
    transforms.undo_changes(np.frombuffer(packed, np.uint8), 6, begin, out)
    assert out.tobytes() == frames[begin : max(begin, end)].tobytes()


def test_changes_outside_of_the_row_raise() -> None:
    row = np.zeros((1, 4096), np.uint8)
    listed = np.zeros(600, np.uint64), np.zeros(600, np.uint16)
    bad = b"".join(part.tobytes() for part in (row, np.uint32(1), np.uint32(600), *listed))
    with pytest.raises(CorruptTrace, match="outside its row"):
        transforms.undo_changes(np.frombuffer(bad, np.uint8), 2, 0, np.empty((2, 4096), np.uint8))


class PicturesEnv(ToyEnv):
    """Returns scripted results of steps, or raises scripted exceptions."""

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], results: list[Any]):
        super().__init__(observation_space, action_space)
        self.results = results

    def result(self, action: Any) -> Result:
        result = self.results.pop(0)
        if action is None:
            self.observation_space.seed(0)
            return Result(result)
        if isinstance(result, Exception):
            raise result
        return Result(*result)


PICTURE = spaces.Box(0, 255, (64, 64), np.uint8)
BLACK, DOTTED = np.zeros((64, 64), np.uint8), np.zeros((64, 64), np.uint8)
DOTTED[0, 0] = 7


def test_the_action_of_a_failed_step_is_not_the_base_of_the_next(tmp_path: Path) -> None:
    observation = np.zeros(2, np.float32)
    ok = (observation, 0.0, False, False)
    env = TraceRecordingWrapper(
        PicturesEnv(spaces.Box(-1, 1, (2,)), PICTURE, [observation, ok, ValueError("failed"), observation, ok]),
        tmp_path,
    )
    env.reset()
    env.step(BLACK)
    with pytest.raises(ValueError, match="failed"):
        env.step(DOTTED)
    env.reset()
    env.step(DOTTED)
    env.close()
    assert [episode.actions[:, 0, 0].tolist() for episode in open_trace(tmp_path)] == [[0], [7]]


def test_frames_are_kept_if_other_values_cannot_be_stored(tmp_path: Path) -> None:
    both = spaces.Dict(picture=PICTURE, text=spaces.Text(5))
    told = [(DOTTED, object()), (DOTTED, "x"), (DOTTED.astype(np.int32), "y"), (DOTTED, "z")]
    steps = [({"picture": picture, "text": text}, 0.0, False, False) for picture, text in told]
    first = {"picture": BLACK, "text": "x"}
    env = TraceRecordingWrapper(PicturesEnv(both, spaces.Discrete(2), [first, *steps]), tmp_path)
    env.reset()
    env.step(0)
    with pytest.warns(UserWarning, match="text: a value of type builtins.object"):
        env.step(0)
    env.step(0)
    with pytest.warns(UserWarning, match="int32") as caught:
        env.step(0)
    assert [warning.filename for warning in caught] == [__file__]
    env.close()
    (episode,) = open_trace(tmp_path)
    assert [int(picture[0, 0]) for picture in episode.observations["picture"]] == [0, 7, 7, 7, 7]
    texts = [getattr(text, "class_name", text) for text in episode.observations["text"]]
    assert texts == ["x", "builtins.object", "x", "y", "z"]


@pytest.mark.parametrize(("place", "seen"), [("log_value", [[0], [7, 7]]), ("record_result", [[0], [7, 7]])])
def test_a_frame_interrupted_by_ctrl_c_is_not_the_base_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, seen: list[list[int]]
) -> None:
    monkeypatch.setattr(recording, "RowSlab", RowSlab)  # C code cannot be interrupted
    steps = [(DOTTED, 0.0, True, False), (DOTTED, 0.0, False, False), (DOTTED, 0.0, False, False)]
    env = TraceRecordingWrapper(PicturesEnv(PICTURE, spaces.Discrete(2), [BLACK, *steps]), tmp_path)
    env.reset()
    owner = env._slabs if place == "log_value" else env._steps.episodes
    name = "log_changes" if place == "log_value" else "record_result"
    whole = getattr(owner, name)

    def interrupted(*arguments: Any) -> None:
        if place == "log_value":
            whole(*arguments)  # the value is written, the row is not
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            env.step(0)
    env.step(0)
    env.step(0)
    env.close()
    assert [episode.observations[:, 0, 0].tolist() for episode in open_trace(tmp_path)] == seen
