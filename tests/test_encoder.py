"""Marks without their rows, as an interrupt between two instructions leaves them."""

from __future__ import annotations

from typing import Any

import numpy as np

from gym_trace.format import wire
from gym_trace.model.layout import Leaf
from gym_trace.model.packing import unpack
from gym_trace.model.vocabulary import Outcome
from gym_trace.recording.reset_record import Start, packed_start
from gym_trace.recording.single.block import BEGIN, END, FLAG, LEAD, RowBlock, RowFormat
from gym_trace.recording.single.encoder import RowEncoder

FORM = RowFormat(Leaf(("observations",), np.dtype("<f4"), (1,)), Leaf(("actions",), np.dtype("<i8"), ()), False)
ROW = (b"\0\0\0\0", 1, 1.0)
LEADING = (b"\0\0\0\0", *FORM.filler)


def start(episode: int) -> Start:
    return Start(episode, 0, 7, b"\x80", 100, 50)


def block(*entries: object) -> RowBlock:
    """A block of rows (tuples of three) and marks (kind, data) in the order in which they were appended."""
    made = RowBlock()
    for entry in entries:
        if isinstance(entry, list):
            made.marks.append((len(made.rows) // 3, entry[0], entry[1]))
        else:
            made.rows.extend(entry)  # type: ignore[arg-type]
    return made


def flags_and_steps(made: RowBlock) -> list[tuple[int, int, int, int]]:
    encoder = RowEncoder(FORM)
    _, (segment,) = encoder.encoded(encoder.begun(made), [made], partly=True)
    rows = int(segment.fragments["steps"].sum()) + int(np.count_nonzero(segment.fragments["flags"] & wire.LEADS))
    assert len(segment.columns.get(("observations",), [])) == rows
    assert len(segment.columns.get(("rewards",), [])) == segment.fragments["steps"].sum()
    return [tuple(int(row[name]) for name in ("episode", "flags", "steps", "outcome")) for row in segment.fragments]  # type: ignore[misc]


def test_a_last_step_that_never_came_ends_the_episode_as_cut() -> None:
    made = block(
        [BEGIN, (start(0), True)], LEADING, ROW, [FLAG, (wire.TERMINATED, 1, 200, 150)],
        [BEGIN, (start(1), True)], LEADING, ROW,
    )  # fmt: skip
    whole = wire.STARTS | wire.LEADS | wire.STOPS | wire.ENDS
    assert flags_and_steps(made) == [(0, whole, 1, Outcome.CUT), (1, wire.STARTS | wire.LEADS, 1, 0)]


def test_a_run_that_goes_on_after_a_step_that_never_came_is_a_further_part() -> None:
    made = block(
        [BEGIN, (start(0), True)], LEADING, ROW, [FLAG, (wire.TERMINATED, 1, 200, 150)], [LEAD, 1], LEADING, ROW, ROW
    )  # fmt: skip
    assert flags_and_steps(made) == [(0, wire.STARTS | wire.LEADS | wire.STOPS, 1, 0), (0, wire.LEADS, 2, 0)]


def test_a_run_that_was_not_stopped_before_the_next_one_began_is_whole() -> None:
    made = block(
        [BEGIN, (start(0), True)], LEADING, [LEAD, 0], LEADING, ROW, [LEAD, 3], LEADING,
        [BEGIN, (start(1), True)], LEADING, ROW,
    )  # fmt: skip
    assert flags_and_steps(made) == [
        (0, wire.STARTS | wire.LEADS | wire.STOPS, 0, 0),
        (0, wire.LEADS | wire.STOPS, 1, 0),
        (0, wire.LEADS | wire.STOPS, 0, 0),
        (1, wire.STARTS | wire.LEADS, 1, 0),
    ]


def test_a_block_that_gets_full_while_it_is_encoded_is_encoded_as_far_as_it_was(monkeypatch: Any) -> None:
    made = block([BEGIN, (start(0), True)], LEADING, ROW)
    fragments = RowEncoder._fragments

    def overtaken(self: RowEncoder, *args: Any) -> Any:
        if made.joined is None:
            made.rows.extend(ROW)
            made.joined, made.rows = FORM.joined(made.rows, made.reward_kinds, 0, 3), []
        return fragments(self, *args)

    monkeypatch.setattr(RowEncoder, "_fragments", overtaken)
    encoder = RowEncoder(FORM)
    progress, (first,) = encoder.encoded(encoder.begun(made), [made], partly=True)
    _, (second,) = encoder.encoded(progress, [made], partly=True)
    assert [segment.fragments["steps"].tolist() for segment in (first, second)] == [[1], [1]]
    assert [len(segment.columns[("observations",)]) for segment in (first, second)] == [2, 1]


def test_a_generator_state_is_packed_as_messagepack_says() -> None:
    generator = np.random.default_rng(3)
    for i in range(300):
        if i % 3 == 0:
            generator.integers(0, 10, dtype=np.uint32)  # leaves half a number behind
        state = generator.bit_generator.state
        packed, replaced = packed_start(7, None, state, None)
        assert unpack(packed) == {"rng_state": state}
        assert not replaced
        generator.random(i % 5)


def test_an_episode_whose_first_observation_never_came_has_no_rows() -> None:
    made = block(
        [BEGIN, (start(0), True)], [END, (Outcome.CUT, 200, 150)], [BEGIN, (start(1), True)], LEADING, ROW
    )  # fmt: skip
    assert flags_and_steps(made) == [
        (0, wire.STARTS, 0, 0),
        (0, wire.STOPS | wire.ENDS, 0, Outcome.CUT),
        (1, wire.STARTS | wire.LEADS, 1, 0),
    ]
