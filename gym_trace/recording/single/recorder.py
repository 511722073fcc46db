"""The recorder of a single environment: rows, episodes and runs of steps, blocks, forks and copies."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from gym_trace.format import wire
from gym_trace.model.deltas import DeltaPacker, Nonconforming
from gym_trace.model.layout import Leaf, Path
from gym_trace.model.vocabulary import Outcome
from gym_trace.recording.options import RecordingOptions
from gym_trace.recording.recorder import Recorder
from gym_trace.recording.reset_record import Start
from gym_trace.recording.segment import ATOMS, snapshot_size
from gym_trace.recording.single.block import (
    BEGIN,
    END,
    FLAG,
    LEAD,
    STOP,
    VALUES_BYTES,
    OpenRun,
    RowBlock,
    RowFormat,
    complete_marks,
)
from gym_trace.recording.single.encoder import RowEncoder
from gym_trace.storage.protocol import Storage


class RowRecorder(Recorder):
    """One writer of a trace, fed row by row from one thread.

    The caller appends whole rows to .rows while len(.rows) < .limit, and calls make_room() otherwise. While no run of
    steps is open, .rows is None.
    """

    block: RowBlock

    def __init__(
        self,
        storage: Storage,
        schema: dict[str, Any],
        row_format: RowFormat,
        options: RecordingOptions,
        summary: Callable[[], dict[str, Any]],
        lazy: bool,
    ):
        self.format = row_format
        self._width = row_format.width
        self._capacity = row_format.capacity * row_format.width
        self._delta_packers: dict[Path, DeltaPacker] = {}
        super().__init__(storage, schema, row_format.chunk_bytes, options, summary, lazy)

    def _reset_state(self) -> None:
        super()._reset_state()
        self._ended = False  # the episode has ended: a step after that opens another run
        self._value_bytes = 0  # of MessagePack values in the block
        self._full_blocks = 0  # since the last encoding
        self._run = (0, 0)  # the row of the leading observation, over all blocks, and the index of the step after it
        self._deferred: OpenRun | None = None
        self._left_to_parent: tuple[list[Any], int] = ([], 0)  # the rows at a fork, and their length then
        self._early_notes: dict[str, Any] = {}  # annotations of a step that may not come
        self.reward_kind: type = float  # of the last reward
        self.episode: Start | None = None
        self.rows: list[Any] | None = None
        self.limit = self._capacity
        for packer in self._delta_packers.values():
            packer.forget()

    def _new_encoder(self) -> RowEncoder:
        return RowEncoder(self.format)

    def _new_block(self) -> RowBlock:
        return RowBlock()

    # -- episodes and runs of steps -----------------------------------------------------------------------------------

    def skip_episode(self) -> None:
        """Counts an episode that is not recorded."""
        self._episodes += 1

    def begin(self, start: Start, lead: tuple[Any, ...] | None) -> None:
        """Starts an episode. lead: the slots of the reset observation; None if the run of steps begins later."""
        self._episodes += 1
        self.rows = None
        if self._closed or self._out.failure is not None:
            return
        self.episode = start
        block = self.block
        position = len(block.rows) // self._width
        self._run = (block.base + position, 0)
        block.marks.append((position, BEGIN, (start, lead is not None)))
        if lead is not None:
            self._open_run(lead)

    def lead(self, first_step: int, slots: tuple[Any, ...]) -> None:
        """Starts a run of steps in the middle of the episode with its leading observation."""
        if self._closed or self._out.failure is not None:
            return
        self._run = (self.next_row(), first_step)
        self.block.marks.append((self._position(), LEAD, first_step))
        self._open_run(slots)

    def _open_run(self, slots: tuple[Any, ...]) -> None:
        if self._delta_packers:
            for leaf in self.format.action_leaves:  # the row of a leading observation has no action
                if leaf.path in self._delta_packers:
                    self._delta_packers[leaf.path].settle()
        rows = self.block.rows
        rows.extend(slots + self.format.filler)  # before .rows is set: no step may come first
        self._ended = False
        self.limit = self._capacity
        self.rows = rows
        if not self._out.running:
            self._out.start()

    def prepare_lead(self) -> None:
        """Makes sure that there is room for a leading observation; to be called before it is packed."""
        if len(self.block.rows) >= self._capacity or self._value_bytes >= VALUES_BYTES:
            self._next_block()

    def flag(self, terminated: bool, truncated: bool) -> None:
        """Marks the next row as the end of the episode; to be called before it is appended."""
        said = wire.TERMINATED * bool(terminated) | wire.TRUNCATED * bool(truncated)
        outcome = Outcome.TERMINATED if terminated else Outcome.TRUNCATED
        self.block.marks.append((self._position(), FLAG, (said, outcome, time.time_ns(), time.monotonic_ns())))
        self._ended = True
        self.limit = 0

    def other_reward(self, reward: Any) -> Any:
        """The slot of a reward that may not be of .reward_kind; to be called before the row is appended."""
        if type(reward) not in ATOMS:
            reward = self.plain("rewards", reward)
        kind = type(reward)
        atom = kind in ATOMS
        self.block.reward_kinds.add(kind if atom else Nonconforming)
        if atom:
            self.reward_kind = kind
        return reward if atom else Nonconforming(self.snapshot("rewards", reward))

    def snapshot(self, column: str, value: Any) -> Any:
        """As Recorder.snapshot(); counts towards the size of a block."""
        kept = super().snapshot(column, value)
        self.count_values(snapshot_size(kept))
        return kept

    def stop(self) -> None:
        """Ends the run of steps, but not the episode, after the last row."""
        self.rows = None
        if self._deferred is not None:  # the process forked within a step that raised
            self._deferred = None
            return
        self._drop_marks_without_row()
        position, notes = self._position(), self.block.notes
        while notes and notes[-1][0] >= position:
            notes.pop()
        self.block.marks.append((position, STOP, None))

    def break_off(self, rows: list[Any], filled: int) -> bool:
        """Ends the run of steps at a step that raised; returns whether the step is lost.

        It is not if its row was appended already. The caller has set .rows to None before, so that no step can continue
        the run, even if this is interrupted.

        Args:
            rows: .rows when the step began.
            filled: their length then.
        """
        if self.episode is None:  # closed, or forked, within the step
            self._deferred = None
            return False
        if len(rows) > filled:
            self.rows = rows
            return False
        self.stop()
        self.skip_step()
        return True

    def skip_step(self) -> None:
        """Counts a step that is not recorded, while no run of steps is open."""
        lead, first_step = self._run
        self._run = (lead, first_step + 1)
        self._early_notes = {}

    def end(self, outcome: Outcome = Outcome.CUT) -> None:
        """Ends the episode after the last row, if it has not ended."""
        self.rows = None
        marks = self.block.marks
        if marks and marks[-1][0] >= len(self.block.rows) // self._width:
            self._drop_marks_without_row()
        if self._ended:
            self._early_notes = {}
        else:
            self.end_without_row(outcome)
        self._ended = False
        self.episode = self._deferred = None

    def _drop_marks_without_row(self) -> None:
        """Removes the marks of rows that were never appended, because an exception such as Ctrl-C came in between."""
        marks, position = self.block.marks, self._position()
        while marks and marks[-1][0] >= position:
            _, kind, data = marks[-1]
            if kind in (STOP, END) or (kind == BEGIN and not data[1]):
                break  # these are complete without a row
            marks.pop()
            if kind == FLAG:
                self._ended = False
            elif kind == BEGIN:
                self.episode = None

    def end_without_row(self, outcome: int) -> None:
        """Ends the episode at a step that is left out. Steps after that belong to the same episode."""
        if self.episode is not None and not self._ended:
            times = (time.time_ns(), time.monotonic_ns())
            self.block.marks.append((self._position(), END, (outcome, *times)))
        self._ended = True
        self.rows = None
        self._early_notes = {}

    def end_at_lead(self, outcome: int) -> None:
        """Ends the episode with the leading observation. Steps after that are another run."""
        rows = self.rows
        self.end_without_row(outcome)
        self.rows, self.limit = rows, 0

    def annotate(self, values: dict[str, Any]) -> None:
        """Adds values, which are snapshots, to the next row."""
        if self._ended or self._deferred is not None:  # there may not be a next row
            self._early_notes.update(values)
            return
        if self.rows is not None:
            self.block.notes.append((self._position(), values))
            self.count_values(sum(map(snapshot_size, values.values())))

    # -- room ---------------------------------------------------------------------------------------------------------

    def count_values(self, count: int) -> None:
        """Counts bytes of values whose size is not fixed towards the size of the block."""
        self._value_bytes += count
        if self._value_bytes >= VALUES_BYTES:
            self.limit = 0

    def make_room(self) -> list[Any] | None:
        """Returns the rows to append to, or None if nothing is recorded any more. Raises RecordingError, once."""
        if self._out.failure is not None:
            self.rows = None
            self._report()
            return None
        self._complain()
        if self._out.started:  # starts the thread again that was ended before a fork
            self._out.start()
        if self._deferred is not None:
            self._take_over(self._deferred)
        if self.rows is None:
            return None
        self.rows = self.block.rows  # in case Ctrl-C interrupted _next_block()
        if self._ended:
            first_step, slots = self.steps_taken(), self.last_observation()
            self.prepare_lead()
            self.lead(first_step, slots)
        if len(self.rows) >= self._capacity or self._value_bytes >= VALUES_BYTES:
            self._next_block()
        if self._early_notes:
            self.block.notes.append((self._position(), self._early_notes))
            self._early_notes = {}
        self.limit = self._capacity
        if self._out.failure is not None:  # the thread may have failed after the check above
            self.limit = 0
        return self.rows

    def _next_block(self) -> None:
        """Begins a new block; encodes the full ones if there are enough."""
        block, position = self.block, self._position()
        fresh = RowBlock(block, block.base + position, self.last_observation(), self.reward_kind)
        # The annotations and marks of a row that is still to come belong to the new block.
        fresh.notes += [(0, values) for at, values in block.notes if at >= position]
        fresh.marks += [(0, kind, data) for _, kind, data in block.marks[complete_marks(block.marks, position) :]]
        self.block = fresh  # from here on the old block does not change
        self._full_blocks += self.format.blocks_at_once if self._value_bytes >= VALUES_BYTES else 1
        self._value_bytes = 0
        if self.rows is not None:
            self.rows = fresh.rows
        block.joined = self.format.joined(block.rows, block.reward_kinds, 0, position)
        block.rows = []
        if self._full_blocks >= self.format.blocks_at_once:
            self._full_blocks = 0
            self._out.advance()
            if self._encoder.complaints:
                self._complain()
        self._out.catch_up()

    def steps_taken(self) -> int:
        """The number of steps of the episode so far, lost ones included."""
        lead, first_step = self._run
        return first_step + max(0, self.next_row() - 1 - lead)  # the leading observation may not be appended yet

    def last_observation(self) -> tuple[Any, ...]:
        """The observation slots of the last row; of deltas, all bytes of the value."""
        rows = self.block.rows
        if not rows:
            return self.block.last_row
        slots = rows[-self._width :][: len(self.format.observation_leaves)]
        for i, leaf in enumerate(self.format.observation_leaves):
            if leaf.path in self._delta_packers:
                self._delta_packers[leaf.path].settle()
            if type(slots[i]) is tuple:
                slots[i] = self._delta_packers[leaf.path].last()
        return tuple(slots)

    def delta_packer(self, leaf: Leaf) -> DeltaPacker:
        """The packer of a leaf of large values."""
        return self._delta_packers.setdefault(leaf.path, DeltaPacker(leaf, self))

    def next_row(self) -> int:
        """The index of the next row, counted over all blocks."""
        block = self.block
        return block.base + len(block.rows) // self._width

    def _position(self) -> int:
        return len(self.block.rows) // self._width

    # -- forks and copies ---------------------------------------------------------------------------------------------

    def restart_in_child(self) -> None:
        rows = self.block.rows
        left = (rows, len(rows)) if self._deferred is None else self._left_to_parent
        super().restart_in_child()
        self._left_to_parent = left

    def open_run(self) -> OpenRun | None:
        """What another recorder needs to continue the open episode, or None."""
        if self._deferred is not None:
            return self._after_fork(self._deferred)
        if self.episode is None or self._ended or self.failed:
            return None
        return OpenRun(self.episode, self.steps_taken(), None if self.rows is None else self.last_observation())

    def continue_run(self, run: OpenRun | None) -> None:
        """Continues the episode of another recorder at the next step; writes nothing before."""
        if run is not None:
            self._deferred = run
            self.rows, self.limit = self.block.rows, 0

    def take_over(self) -> None:
        """Continues the episode of another recorder now, if there is one."""
        if self._deferred is not None:
            self.make_room()

    def _after_fork(self, run: OpenRun) -> OpenRun:
        """The open episode now: if the process forked within a step, its row is among those of the parent."""
        rows, filled = self._left_to_parent
        if len(rows) == filled:
            return run
        slots = rows[-self._width :][: len(self.format.observation_leaves)]
        return run._replace(steps=run.steps + 1, slots=tuple(slots))

    def _take_over(self, run: OpenRun) -> None:
        run = self._after_fork(run)
        self._drop_marks_without_row()  # that step may have ended the episode
        self._deferred, self._left_to_parent = None, ([], 0)
        self.begin(run.start._replace(episode=self._episodes), None)
        if run.slots is not None:
            self.lead(run.steps, run.slots)
        else:
            self._run = (self.next_row(), run.steps)
