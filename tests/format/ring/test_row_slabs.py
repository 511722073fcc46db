"""Decoding slabs of rows, including marks without rows, as after an interrupt between two instructions."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

from gym_trace.data.layout import Leaf
from gym_trace.data.packing import pack, unpack
from gym_trace.data.vocabulary import Outcome
from gym_trace.format import wire
from gym_trace.format.ring.log import END, FLAG, INITIAL, START, STOP, VALUE, LogFull
from gym_trace.format.ring.row_layout import RowLayout
from gym_trace.format.ring.rows import START_HAS_INITIAL, RowDecoder
from gym_trace.recording.core import RowSlab
from gym_trace.recording.reset_record import packed_generator, packed_start

LAYOUT = RowLayout(Leaf(("observations",), np.dtype("<f4"), (1,)), Leaf(("actions",), np.dtype("<i8"), ()))
SEQUENCE = 3


class Slab:
    """A slab whose rows and marks are written one by one."""

    def __init__(self, size: int = 4096, layout: RowLayout = LAYOUT):
        self.layout, self.memory = layout, memoryview(bytearray(size))
        self.rows = RowSlab(layout)
        self.rows.begin(self.memory, SEQUENCE)

    def start(self, episode: int) -> Slab:
        self.rows.append(START, b"\x80", START_HAS_INITIAL, 0, episode, 7, 100, 50)
        return self

    def initial(self, first_step: int | None = None) -> Slab:
        """first_step: None after a start."""
        if first_step is not None:
            self.rows.append(INITIAL, b"", 0, 0, first_step)
        self.rows.record_initial(bytes(self.layout.observation_bytes))
        return self

    def row(self) -> Slab:
        self.rows.record_packed_action(bytes(self.layout.action_bytes))
        self.rows.record_packed_result(bytes(self.layout.observation_bytes), 1.0, False, False)
        return self

    def mark(self, kind: int, flags: int = 0, a: int = 0, column: int = 0, payload: bytes = b"") -> Slab:
        self.rows.append(kind, payload, flags, column, a, 0, 200, 150)
        return self

    def decoded(self, memory: Any = None) -> Any:
        segments, self.pending = RowDecoder(self.layout.offsets.described()).decode(SEQUENCE, memory or self.memory)
        assert len(segments) <= 1
        return segments[0] if segments else None

    def fragments(self) -> list[tuple[int, int, int, int]]:
        """Return episode, flags, steps and outcome of each fragment; check that the columns have their rows."""
        segment = self.decoded()
        rows = int(segment.fragments["steps"].sum()) + int(
            np.count_nonzero(segment.fragments["flags"] & wire.HAS_INITIAL)
        )
        assert len(segment.columns.get(("observations",), [])) == rows
        assert len(segment.columns.get(("actions",), [])) == segment.fragments["steps"].sum()
        assert len(segment.columns.get(("rewards",), [])) == segment.fragments["steps"].sum()
        names = "episode", "flags", "steps", "outcome"
        return [tuple(int(row[name]) for name in names) for row in segment.fragments]  # type: ignore[misc]


def test_an_unanswered_last_step_does_not_end_the_episode() -> None:
    slab = Slab().start(0).initial().row().mark(FLAG, wire.TERMINATED, Outcome.TERMINATED)
    assert slab.fragments() == [(0, wire.STARTS | wire.HAS_INITIAL, 1, 0)]


def test_an_answered_last_step_ends_the_episode() -> None:
    slab = (
        Slab().start(0).initial().row().mark(FLAG, wire.TERMINATED, Outcome.TERMINATED).row().start(1).initial().row()
    )
    whole = wire.STARTS | wire.HAS_INITIAL | wire.STOPS | wire.ENDS | wire.TERMINATED
    assert slab.fragments() == [(0, whole, 2, Outcome.TERMINATED), (1, wire.STARTS | wire.HAS_INITIAL, 1, 0)]


def test_log_entries_of_a_missing_row_are_dropped() -> None:
    slab = Slab().start(0).initial().row()
    slab.rows.record_packed_action(bytes(LAYOUT.action_bytes))
    slab.mark(FLAG, wire.TERMINATED, Outcome.TERMINATED).rows.drop(1)
    slab.mark(STOP).mark(END, 0, Outcome.CUT).start(1).initial().row()
    assert slab.fragments() == [
        (0, wire.STARTS | wire.HAS_INITIAL | wire.STOPS, 1, 0),
        (0, wire.STOPS | wire.ENDS, 0, Outcome.CUT),
        (1, wire.STARTS | wire.HAS_INITIAL, 1, 0),
    ]
    assert slab.pending == []


def test_steps_after_a_missing_step_are_a_new_part() -> None:
    slab = Slab().start(0).initial().row().mark(STOP).initial(1).row().row()
    assert slab.fragments() == [(0, wire.STARTS | wire.HAS_INITIAL | wire.STOPS, 1, 0), (0, wire.HAS_INITIAL, 2, 0)]


def test_a_run_without_a_stop_before_the_next_start_is_complete() -> None:
    slab = Slab().start(0).initial().initial(0).row().initial(3).start(1).initial().row()
    assert slab.fragments() == [
        (0, wire.STARTS | wire.HAS_INITIAL | wire.STOPS, 0, 0),
        (0, wire.HAS_INITIAL | wire.STOPS, 1, 0),
        (0, wire.HAS_INITIAL | wire.STOPS, 0, 0),
        (1, wire.STARTS | wire.HAS_INITIAL, 1, 0),
    ]


def test_an_episode_without_its_first_observation_has_no_rows() -> None:
    slab = Slab()
    slab.rows.append(START, b"\x80", 0, 0, 0, 7, 100, 50)
    slab.mark(END, 0, Outcome.CUT).start(1).initial().row()
    assert slab.fragments() == [
        (0, wire.STARTS, 0, 0),
        (0, wire.STOPS | wire.ENDS, 0, Outcome.CUT),
        (1, wire.STARTS | wire.HAS_INITIAL, 1, 0),
    ]


def test_an_episode_with_only_a_start_entry_is_skipped() -> None:
    slab = Slab().start(0)
    assert slab.decoded() is None
    assert slab.pending == []


def test_a_begun_slab_without_rows_is_empty() -> None:
    slab = Slab().start(0).initial().row()
    slab.rows.begin(slab.memory, SEQUENCE)  # old contents do not count, although their marks remain
    assert slab.rows.rows == 0
    assert RowDecoder(LAYOUT.offsets.described()).decode(SEQUENCE + 1, slab.memory) == ([], [])


@pytest.mark.parametrize("cut", range(40))
def test_a_slab_torn_anywhere_keeps_its_complete_rows(cut: int) -> None:
    """Entries and rows count once their marks are written; earlier bytes do not."""
    slab = Slab()
    states = [bytes(slab.memory)]
    flag = partial(slab.mark, FLAG, wire.TERMINATED, Outcome.TERMINATED)
    for write in (lambda: slab.start(0).initial(), slab.row, slab.row, slab.row, flag, slab.row):
        write()
        states.append(bytes(slab.memory))
    before, after = states[cut % 6], states[cut % 6 + 1]
    changed = [i for i in range(len(before)) if before[i] != after[i]]
    marks = _marks_of(before, after)
    torn = bytearray(before)
    random = np.random.default_rng(cut)
    for i in changed:  # any bytes except marks, as before the marks are written
        if i not in marks and random.integers(2):
            torn[i] = after[i]
    one, other = slab.decoded(bytes(torn)), slab.decoded(before)
    assert (one is None) == (other is None)
    if one is not None:
        assert one.fragments.tolist() == other.fragments.tolist()
        assert {path: list(rows) for path, rows in one.columns.items()} == {
            path: list(rows) for path, rows in other.columns.items()
        }


def _marks_of(before: bytes, after: bytes) -> set[int]:
    """Return the positions of marks of rows and entries that only the second slab has."""
    numbers = [np.frombuffer(memory, "<u8") for memory in (before, after)]
    places = np.flatnonzero((numbers[0] != numbers[1]) & (numbers[1] >> np.uint64(32) == SEQUENCE)).tolist()
    return {8 * place + i for place in places for i in range(8)}


def test_an_unanswered_action_is_pending_with_its_odd_values() -> None:
    slab = Slab().start(0).initial().row()
    slab.mark(VALUE, column=1, payload=pack("left"))
    slab.rows.record_packed_action(bytes(LAYOUT.action_bytes))
    assert len(slab.decoded().columns["actions",]) == 1
    assert [(one.episode, one.step, one.leaves) for one in slab.pending] == [(0, 1, ["left"])]


def test_an_entry_that_leaves_no_space_for_a_row_raises() -> None:
    slab = Slab().start(0).initial()
    room = 0
    while slab.rows.has_room(room):
        room += 8
    with pytest.raises(LogFull):
        slab.mark(VALUE, column=1, payload=bytes(4096))
    while slab.rows.has_room():
        slab.row()
    rows = slab.rows.rows
    full = [slab] * 100
    with pytest.raises(LogFull):
        deque(one.mark(VALUE, column=1, payload=b"\xc0") for one in full)
    assert slab.decoded().fragments["steps"].sum() == rows - 1


def test_a_generator_state_is_packed_as_valid_messagepack() -> None:
    env = gymnasium.Env[Any, Any]()
    generator = env.np_random = np.random.default_rng(3)
    for i in range(300):
        if i % 3 == 0:
            generator.integers(0, 10, dtype=np.uint32)  # leaves half a number buffered
        packed, replaced = packed_start(7, None, packed_generator(env), None)
        assert unpack(packed) == {"rng_state": generator.bit_generator.state}
        assert not replaced
        generator.random(i % 5)
