"""Rows in: what the wrapper of a single environment tells its recorder, and how copies go on."""

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

    The hot path is the caller's: it appends whole rows to .rows while len(.rows) < .limit, and calls make_room() when
    that no longer holds. .rows is None while no run of steps is open.
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
        self._ended = False  # the run is complete, and a further step would open another one
        self._value_bytes = 0  # of MessagePack values in the block
        self._full_blocks = 0  # since blocks were last encoded
        self._run = (0, 0)  # absolute row of the leading observation, and the index of the step after it
        self._deferred: OpenRun | None = None
        self._left_to_parent: tuple[list[Any], int] = ([], 0)  # the rows that were there at a fork, and how long
        self._early_notes: dict[str, Any] = {}  # annotations of a row that may never come
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
        """Counts an episode that is not to be recorded."""
        self._episodes += 1

    def begin(self, start: Start, lead: tuple[Any, ...] | None) -> None:
        """Starts an episode; lead: the slots of the reset observation, or None if the first frames are left out."""
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
        """Starts a run of steps in the middle of the episode, with the observation before it."""
        if self._closed or self._out.failure is not None:
            return
        self._run = (self.next_row(), first_step)
        self.block.marks.append((self._position(), LEAD, first_step))
        self._open_run(slots)

    def _open_run(self, slots: tuple[Any, ...]) -> None:
        if self._delta_packers:
            for leaf in self.format.action_leaves:  # of which the row of a leading observation has nothing
                if leaf.path in self._delta_packers:
                    self._delta_packers[leaf.path].settle()
        rows = self.block.rows
        rows.extend(slots + self.format.filler)  # first: a step must not be taken for a leading observation
        self._ended = False
        self.limit = self._capacity
        self.rows = rows
        if not self._out.running:
            self._out.start()

    def prepare_lead(self) -> None:
        """To be called before the slots of a leading observation are packed: makes sure that there is a row for it."""
        if len(self.block.rows) >= self._capacity or self._value_bytes >= VALUES_BYTES:
            self._next_block()

    def flag(self, terminated: bool, truncated: bool) -> None:
        """Says, before its row is appended, that the next row ends the episode."""
        said = wire.TERMINATED * bool(terminated) | wire.TRUNCATED * bool(truncated)
        outcome = Outcome.TERMINATED if terminated else Outcome.TRUNCATED
        self.block.marks.append((self._position(), FLAG, (said, outcome, time.time_ns(), time.monotonic_ns())))
        self._ended = True
        self.limit = 0

    def other_reward(self, reward: Any) -> Any:
        """What a row keeps of a reward that may not be of .reward_kind; to be called before the row is appended."""
        if type(reward) not in ATOMS:
            reward = self.plain("rewards", reward)
        kind = type(reward)
        atom = kind in ATOMS
        self.block.reward_kinds.add(kind if atom else Nonconforming)
        if atom:
            self.reward_kind = kind
        return reward if atom else Nonconforming(self.snapshot("rewards", reward))

    def snapshot(self, column: str, value: Any) -> Any:
        """What a row holds of a value of any kind; counts towards the size of a block."""
        kept = super().snapshot(column, value)
        self.count_values(snapshot_size(kept))
        return kept

    def stop(self) -> None:
        """Ends the run of steps, but not the episode, after the rows that are there."""
        self.rows = None
        if self._deferred is not None:  # forked in a step that raised
            self._deferred = None
            return
        self._drop_marks_without_row()
        position, notes = self._position(), self.block.notes
        while notes and notes[-1][0] >= position:
            notes.pop()
        self.block.marks.append((position, STOP, None))

    def break_off(self, rows: list[Any], filled: int) -> bool:
        """Ends the run of steps at a step that was asked for and never answered; says whether this is one.

        It is none if its row is there after all. The caller has set .rows to None before: so no step can follow on
        those before the gap, whatever falls in here.

        Args:
            rows: what .rows was when the step began.
            filled: how long they were then.
        """
        if self.episode is None:  # closed meanwhile, or forked
            self._deferred = None
            return False
        if len(rows) > filled:
            self.rows = rows
            return False
        self.stop()
        self.skip_step()
        return True

    def skip_step(self) -> None:
        """Counts a step that is not to be recorded, while no run of steps is open."""
        lead, first_step = self._run
        self._run = (lead, first_step + 1)
        self._early_notes = {}

    def end(self, outcome: Outcome = Outcome.CUT) -> None:
        """Ends the episode, if it has not ended, after the rows that are there."""
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
        """Takes back what was said of rows that never came, because an exception such as Ctrl-C fell in between."""
        marks, position = self.block.marks, self._position()
        while marks and marks[-1][0] >= position:
            _, kind, data = marks[-1]
            if kind in (STOP, END) or (kind == BEGIN and not data[1]):
                break  # these need no row
            marks.pop()
            if kind == FLAG:
                self._ended = False
            elif kind == BEGIN:
                self.episode = None

    def end_without_row(self, outcome: int) -> None:
        """As end(), at a step that is left out; steps that may follow belong to the same episode."""
        if self.episode is not None and not self._ended:
            times = (time.time_ns(), time.monotonic_ns())
            self.block.marks.append((self._position(), END, (outcome, *times)))
        self._ended = True
        self.rows = None
        self._early_notes = {}

    def end_at_lead(self, outcome: int) -> None:
        """Ends the episode with the observation that leads the run, if one is open; a further step is another run."""
        rows = self.rows
        self.end_without_row(outcome)
        self.rows, self.limit = rows, 0

    def annotate(self, values: dict[str, Any]) -> None:
        """Gives the next row more values, as rows hold them."""
        if self._ended or self._deferred is not None:  # there may be no next row
            self._early_notes.update(values)
            return
        if self.rows is not None:
            self.block.notes.append((self._position(), values))
            self.count_values(sum(map(snapshot_size, values.values())))

    # -- room ---------------------------------------------------------------------------------------------------------

    def count_values(self, count: int) -> None:
        """Counts bytes of MessagePack values, whose size is not known beforehand, towards the size of a block."""
        self._value_bytes += count
        if self._value_bytes >= VALUES_BYTES:
            self.limit = 0

    def make_room(self) -> list[Any] | None:
        """What rows to go on with, or None if nothing is recorded any more. Raises RecordingError, once."""
        if self._out.failure is not None:
            self.rows = None
            self._report()
            return None
        self._complain()
        if self._out.started:  # unless a fork has ended its thread, this does nothing
            self._out.start()
        if self._deferred is not None:
            self._take_over(self._deferred)
        if self.rows is None:
            return None
        self.rows = self.block.rows  # Ctrl-C may have fallen just as a new block was begun
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
        if self._out.failure is not None:  # it may have come while the limit was being set
            self.limit = 0
        return self.rows

    def _next_block(self) -> None:
        """Hands on what the block holds, and goes on in a new one."""
        block, position = self.block, self._position()
        fresh = RowBlock(block, block.base + position, self.last_observation(), self.reward_kind)
        # What is said of a row that is still to come goes with it: its annotations, the start of its episode.
        fresh.notes += [(0, values) for at, values in block.notes if at >= position]
        fresh.marks += [(0, kind, data) for _, kind, data in block.marks[complete_marks(block.marks, position) :]]
        self.block = fresh  # from now on nothing gets into the old one
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
        """Steps of the episode that the environment was asked for, as far as rows and gaps between them say."""
        lead, first_step = self._run
        return first_step + max(0, self.next_row() - 1 - lead)  # the lead itself may not be there yet

    def last_observation(self) -> tuple[Any, ...]:
        """The observation slots of the last row; of frames, all bytes."""
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
        """The one packer of a leaf of frames."""
        return self._delta_packers.setdefault(leaf.path, DeltaPacker(leaf, self))

    def next_row(self) -> int:
        """The index, counted over all blocks, that the next row has."""
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
        """What another recorder needs to go on with the run that is open here, or None."""
        if self._deferred is not None:
            return self._after_fork(self._deferred)
        if self.episode is None or self._ended or self.failed:
            return None
        return OpenRun(self.episode, self.steps_taken(), None if self.rows is None else self.last_observation())

    def continue_run(self, run: OpenRun | None) -> None:
        """Takes over the run of another recorder when the next step comes; writes nothing if none comes."""
        if run is not None:
            self._deferred = run
            self.rows, self.limit = self.block.rows, 0

    def take_over(self) -> None:
        """Takes up the run of another recorder, if there is one, without a further step."""
        if self._deferred is not None:
            self.make_room()

    def _after_fork(self, run: OpenRun) -> OpenRun:
        """The run where it is now: a step in which the fork fell has left its row with those of the parent."""
        rows, filled = self._left_to_parent
        if len(rows) == filled:
            return run
        slots = rows[-self._width :][: len(self.format.observation_leaves)]
        return run._replace(steps=run.steps + 1, slots=tuple(slots))

    def _take_over(self, run: OpenRun) -> None:
        run = self._after_fork(run)
        self._drop_marks_without_row()  # the end of the episode, in that step
        self._deferred, self._left_to_parent = None, ([], 0)
        self.begin(run.start._replace(episode=self._episodes), None)
        if run.slots is not None:
            self.lead(run.steps, run.slots)
        else:
            self._run = (self.next_row(), run.steps)
