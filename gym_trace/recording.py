"""Rows in: what a wrapper tells a recorder, and what the recorder hands on to be written. Forks and copies, too."""

from __future__ import annotations

import os
import pathlib
import time
import warnings
import weakref
from collections.abc import Callable
from multiprocessing.util import register_after_fork
from typing import Any

from gym_trace import forks
from gym_trace.blocks import (
    BEGIN,
    CLOSED,
    CUT,
    END,
    FLAG,
    LEAD,
    STOP,
    TERMINATED,
    TRUNCATED,
    VALUES_BYTES,
    Block,
    OpenRun,
    RowFormat,
    Start,
    settled,
)
from gym_trace.chunks import ChunkWriter
from gym_trace.encoder import Encoder
from gym_trace.errors import InvalidOption, RecordingError
from gym_trace.format import wire
from gym_trace.format.directory import new_writer_id
from gym_trace.format.writer import TraceWriter
from gym_trace.frames import FramePacker
from gym_trace.layout import Leaf, Path
from gym_trace.values import copied
from gym_trace.writing import BlockWriter


class Recorder:
    """One writer of a trace, fed row by row from one thread.

    The hot path is the caller's: it appends whole rows to .rows while len(.rows) < .limit, and calls make_room() when
    that no longer holds. .rows is None while no run of steps is open.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        schema: dict[str, Any],
        row_format: RowFormat,
        *,
        level: int,
        fsync: bool,
        flush_seconds: float,
        on_error: str = "raise",
        summary: Callable[[], dict[str, Any]] = dict,
        lazy: bool = False,
    ):
        if not flush_seconds >= 0:
            raise InvalidOption(f"flush_seconds={flush_seconds!r}: pass a number of seconds, 0 or more")
        if not -7 <= level <= 22:
            raise InvalidOption(f"level={level!r}: pass a zstd level from -7 to 22")
        if on_error not in ("raise", "warn"):
            raise InvalidOption(f'on_error={on_error!r}: pass "raise" or "warn"')
        self.directory = directory
        self.format = row_format
        self._schema = schema
        self._level, self._fsync, self._flush_seconds = level, fsync, flush_seconds
        self._on_error = on_error
        self._summary = summary
        self._width = row_format.width
        self._capacity = row_format.capacity * row_format.width
        self._owner: weakref.ref[object] | None = None
        self._closed = False
        self._frame_packers: dict[Path, FramePacker] = {}
        self._start_afresh()
        if not lazy:
            self._chunks.writer = self._open_writer()
        forks.watch(self)

    def _start_afresh(self) -> None:
        """The state of a writer that has written nothing yet."""
        self._encoder = Encoder(self.format)
        self._chunks = ChunkWriter(self._open_writer, self.format.chunk_bytes)
        name = f"gym-trace {self.writer_id}"
        self._out = BlockWriter(
            name, self._encoder, self._chunks, lambda: self.block, self._notice, self._flush_seconds
        )
        self._episodes = 0
        self._reported = False
        self._complained: set[str] = set()
        self._paused = False
        self._ended = False  # the run is complete, and a further step would open another one
        self._value_bytes = 0  # of MessagePack values in the block
        self._base = 0  # rows in blocks before the one being filled
        self._run_base = 0  # absolute row of the leading observation, less the index of the first step
        self._last_row: tuple[Any, ...] = ()
        self._deferred: OpenRun | None = None
        self._early_notes: dict[str, Any] = {}  # annotations of a row that may never come
        self.episode: Start | None = None
        self.rows: list[Any] | None = None
        self.limit = self._capacity
        self.block = Block()
        for packer in self._frame_packers.values():
            packer.forget()
        self._pid = os.getpid()

    def _open_writer(self) -> TraceWriter:
        self.directory.mkdir(parents=True, exist_ok=True)
        return TraceWriter(self.directory, self._schema, self._level, self._fsync)

    @property
    def writer_id(self) -> str:
        """The id that the writer's files bear."""
        return str(self._schema["writer"])

    @property
    def failed(self) -> bool:
        """Whether writing has failed, so that nothing is recorded any more."""
        return self._out.failure is not None

    @property
    def next_episode(self) -> int:
        """The id that the next episode will have."""
        return self._episodes

    # -- episodes and runs of steps -----------------------------------------------------------------------------------

    def skip_episode(self) -> None:
        """Counts an episode that is not to be recorded."""
        self._episodes += 1

    def begin(self, start: Start, lead: tuple[Any, ...] | None) -> None:
        """Starts an episode; lead: the slots of the reset observation, or None if the first frames are left out."""
        self._episodes += 1
        self.rows = None
        if self._out.failure is not None:
            self._report()
            return
        if self._closed:
            self._warn_once("reset", "the recorder is closed: this episode is not recorded")
            return
        self.episode = start
        position = len(self.block.rows) // self._width
        self.block.marks.append((position, BEGIN, (start, lead is not None)))
        self._run_base = self._base + position
        if lead is not None:
            self._open_run(lead)

    def lead(self, first_step: int, slots: tuple[Any, ...]) -> None:
        """Starts a run of steps in the middle of the episode, with the observation before it."""
        if self._closed or self._out.failure is not None:
            return
        self.block.marks.append((self._position(), LEAD, first_step))
        self._run_base = self._base + self._position() - first_step
        self._open_run(slots)

    def _open_run(self, slots: tuple[Any, ...]) -> None:
        self._ended = False
        self.limit = self._capacity
        self.rows = self.block.rows
        self.rows.extend(slots + self.format.filler)
        self._out.start()

    def prepare_lead(self) -> None:
        """To be called before the slots of a leading observation are packed: makes sure that there is a row for it."""
        if len(self.block.rows) >= self._capacity or self._value_bytes >= VALUES_BYTES:
            self._turn_over()

    def flag(self, terminated: bool, truncated: bool) -> None:
        """Says, before its row is appended, that the next row ends the episode."""
        said = wire.TERMINATED * bool(terminated) | wire.TRUNCATED * bool(truncated)
        outcome = TERMINATED if terminated else TRUNCATED
        self.block.marks.append((self._position(), FLAG, (said, outcome, time.time_ns(), time.monotonic_ns())))
        self._ended = True
        self.limit = 0

    def stop(self) -> None:
        """Ends the run of steps, but not the episode."""
        self.block.marks.append((self._position(), STOP, None))
        self.rows = None

    def end(self, outcome: int = CUT) -> None:
        """Ends the episode, if it has not ended, after the rows that are there."""
        self._forget_torn()
        self.end_unseen(outcome)
        self._ended = False
        self.episode = self._deferred = None

    def _forget_torn(self) -> None:
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

    def end_unseen(self, outcome: int) -> None:
        """As end(), at a step that is left out; steps that may follow belong to the same episode."""
        if self.episode is not None and not self._ended:
            times = (time.time_ns(), time.monotonic_ns())
            self.block.marks.append((self._position(), END, (outcome, *times)))
        self._ended = True
        self.rows = None
        self._early_notes = {}

    def annotate(self, values: dict[str, Any]) -> None:
        """Gives the next row more values."""
        copies = {name: copied(value) for name, value in values.items()}
        if self._ended or self._deferred is not None:  # there may be no next row
            self._early_notes.update(copies)
            return
        if self.rows is not None and (len(self.rows) >= self.limit or self._value_bytes >= VALUES_BYTES):
            self.make_room()
        if self.rows is not None:
            self.block.notes.append((self._position(), copies))
            self._value_bytes += sum(getattr(value, "nbytes", 64) for value in copies.values())

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
        if self._deferred is not None:
            self._go_on(self._deferred)
        if self.rows is None:
            return None
        if self._ended:
            first_step, slots = self.steps_taken(), self.last_observation()
            self.prepare_lead()
            self.lead(first_step, slots)
        if len(self.rows) >= self._capacity or self._value_bytes >= VALUES_BYTES:
            self._turn_over()
        if self._early_notes:
            self.block.notes.append((self._position(), self._early_notes))
            self._early_notes = {}
        self.limit = self._capacity
        if self._out.failure is not None:  # it may have come while the limit was being set
            self.limit = 0
        return self.rows

    def _turn_over(self) -> None:
        """Hands on what the block holds, and goes on in a new one."""
        block, last_row, position = self.block, self.last_observation(), self._position()
        fresh = Block()
        # What is said of a row that is still to come goes with it: its annotations, the start of its episode.
        fresh.notes += [(0, values) for at, values in block.notes if at >= position]
        fresh.marks += [(0, kind, data) for _, kind, data in block.marks[settled(block.marks, position) :]]
        self._out.put(block)
        self.block, self._base, self._last_row = fresh, self._base + position, last_row
        self._value_bytes = 0
        if self.rows is not None:
            self.rows = self.block.rows
        self._out.work(everything=False)
        if self._encoder.complaints:
            self._complain()

    def _notice(self) -> None:
        if self.failed or any(column not in self._complained for column in self._encoder.complaints):
            self.limit = 0

    def steps_taken(self) -> int:
        """Steps of the episode that the rows stand for."""
        return self._base + self._position() - 1 - self._run_base

    def last_observation(self) -> tuple[Any, ...]:
        """The observation slots of the last row; of frames, all bytes."""
        rows = self.block.rows
        if not rows:
            return self._last_row
        slots = rows[-self._width :][: len(self.format.observation_leaves)]
        for i, leaf in enumerate(self.format.observation_leaves):
            if type(slots[i]) is tuple:
                slots[i] = self._frame_packers[leaf.path].last()
        return tuple(slots)

    def frame_packer(self, leaf: Leaf) -> FramePacker:
        """The one packer of a leaf of frames."""
        return self._frame_packers.setdefault(leaf.path, FramePacker(leaf, self))

    def next_row(self) -> int:
        """The index, counted over all blocks, that the next row has."""
        return self._base + len(self.block.rows) // self._width

    def _position(self) -> int:
        return len(self.block.rows) // self._width

    # -- flushing, closing, errors ------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Returns when all steps so far can be read by others. Raises RecordingError."""
        self._out.work(everything=True)
        self._complain()
        self._report()

    def close(self) -> None:
        """Saves everything, seals the batch, ends the thread. Raises RecordingError if something could not be saved."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self.end(CLOSED)
        self._out.close(self._summary)
        forks.forget(self)
        self._complain()
        self._report()

    def save_at_exit(self, owner: object) -> None:
        """Closes the recorder when owner is collected, or the process ends in an orderly way, whichever comes first."""
        self._owner = weakref.ref(owner)
        self._save_when_owner_goes()

    def _save_when_owner_goes(self) -> None:
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            forks.close_with(owner, self)

    def _report(self) -> None:
        """Raises the failure, or warns of it, the first time."""
        failure = self._out.failure
        if failure is None or self._reported:
            return
        self._reported = True
        message = (
            f"recording to {self.directory} has stopped: {failure}; what was written before can be read, "
            "the environment can go on without being recorded"
        )
        if self._on_error == "raise":
            raise RecordingError(message) from failure
        warnings.warn(message, RuntimeWarning, stacklevel=4)

    def complain(self, column: str, complaint: str) -> None:
        """Has a warning given, once a column, at the next step."""
        self._encoder.complaints.setdefault(column, complaint)
        if column not in self._complained:
            self.limit = 0

    def _complain(self) -> None:
        """Warns of values that do not match their space. In the caller's thread, where it is seen."""
        for column, complaint in list(self._encoder.complaints.items()):
            self._warn_once(column, complaint)

    def _warn_once(self, column: str, complaint: str) -> None:
        if column not in self._complained:
            self._complained.add(column)
            warnings.warn(f"{column}: {complaint}", UserWarning, stacklevel=5)

    # -- forks and copies ---------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Before a fork: writes what there is and ends the thread."""
        self._paused = self._out.pause()

    def resume(self) -> None:
        """After a fork, in the parent."""
        if self._paused:
            self._out.start()

    def be_reborn(self) -> None:
        """After a fork, in the child: a writer of its own, going on in the middle of the episode."""
        self._out.abandon()
        run = self.open_run()
        self._schema = {**self._schema, "writer": new_writer_id(), "pid": os.getpid(), "forked_from": self.writer_id}
        self._start_afresh()
        self.go_on_with(run)
        self._save_when_owner_goes()
        register_after_fork(self, Recorder._save_when_owner_goes)  # multiprocessing clears what was registered so far

    def open_run(self) -> OpenRun | None:
        """What another recorder needs to go on with the run that is open here, or None."""
        if self._deferred is not None:
            return self._deferred
        if self.episode is None or self._ended or self.failed:
            return None
        return OpenRun(self.episode, self.steps_taken(), None if self.rows is None else self.last_observation())

    def go_on_with(self, run: OpenRun | None) -> None:
        """Takes over the run of another recorder when the next step comes; writes nothing if none comes."""
        if run is not None:
            self._deferred = run
            self.rows, self.limit = self.block.rows, 0

    def _go_on(self, run: OpenRun) -> None:
        self._deferred = None
        self.begin(run.start._replace(episode=self._episodes), None)
        if run.slots is not None:
            self.lead(run.steps, run.slots)
