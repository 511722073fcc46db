"""Rows in, batches out: the blocks being filled, the thread that encodes and writes them, flushing, and forks."""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing.util import Finalize, register_after_fork
from pathlib import Path
from typing import Any, NamedTuple

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
    Encoder,
    RowFormat,
    Start,
)
from gym_trace.errors import InvalidOption, RecordingError
from gym_trace.format import wire
from gym_trace.format.directory import new_writer_id
from gym_trace.format.writer import TraceWriter
from gym_trace.values import copied

_MAX_BLOCKS = 2  # that wait or are being encoded, beside the one being filled: what a slow disk can make us hold
_live: weakref.WeakSet[Recorder] = weakref.WeakSet()


class Recorder:
    """One writer of a trace, fed row by row from one thread.

    The hot path is the caller's: it appends whole rows to .rows while len(.rows) < .limit, and calls make_room() when
    that no longer holds. .rows is None while no run of steps is open.
    """

    def __init__(
        self,
        directory: Path,
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
        self._level, self._fsync = level, fsync
        self._interval = max(0.005, flush_seconds / 2)
        self._on_error = on_error
        self._summary = summary
        self._capacity = row_format.capacity * row_format.width
        self._episodes = 0
        self._closed = False
        self._paused = False
        self._owner: weakref.ref[object] | None = None
        self._start_afresh()
        if not lazy:
            self._open_writer()
        _live.add(self)

    def _start_afresh(self) -> None:
        """The state of a writer that has written nothing yet."""
        self._writer: TraceWriter | None = None
        self._encoder = Encoder(self.format)
        self._spare_frames: list[list[Any]] = []
        self._blocks: deque[Block] = deque()
        self._drain_lock = threading.Lock()
        self._wake = threading.Event()
        self._room = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stop = False
        self._finished = False
        self._failure: Exception | None = None
        self._complained: set[str] = set()
        self._ended = False  # the run is complete, and a further step would open another one
        self._value_bytes = 0
        self._base = 0  # rows in blocks before the one being filled
        self._run_base = 0  # absolute row of the leading observation, less the index of the first step
        self._last_row: tuple[Any, ...] = ()
        self._deferred: OpenRun | None = None
        self.episode: Start | None = None
        self.rows: list[Any] | None = None
        self._limit_reset()
        self._new_block()
        self._pid = os.getpid()

    def _limit_reset(self) -> None:
        self.limit = self._capacity

    @property
    def failed(self) -> bool:
        return self._failure is not None

    @property
    def writer_id(self) -> str:
        return str(self._schema["writer"])

    @property
    def next_episode(self) -> int:
        return self._episodes

    # -- the caller's side --------------------------------------------------------------------------------------------

    def skip_episode(self) -> None:
        """Counts an episode that is not to be recorded."""
        self._episodes += 1

    def begin(self, start: Start, lead: tuple[Any, ...] | None) -> None:
        """Starts an episode; lead: the slots of the reset observation, or None if the first frames are left out."""
        self._episodes += 1
        self.rows = None
        if self._failure is not None:
            return self._report()
        if self._closed:
            return self._warn_once("reset", "the recorder is closed: this episode is not recorded")
        self.episode = start
        self.block.marks.append((self._position(), BEGIN, (start, lead is not None)))
        self._run_base = self._base + self._position()
        if lead is not None:
            self._open_run(lead)

    def lead(self, first_step: int, slots: tuple[Any, ...]) -> None:
        """Starts a run of steps in the middle of the episode, with the observation before it."""
        if self._closed or self._failure is not None:
            return
        self.block.marks.append((self._position(), LEAD, first_step))
        self._run_base = self._base + self._position() - first_step
        self._open_run(slots)

    def _open_run(self, slots: tuple[Any, ...]) -> None:
        self._ended = False
        self._limit_reset()
        self.rows = self.block.rows
        self.rows.extend(slots + self.format.filler)
        if self._thread is None:
            self._start_thread()

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

    def end(self, outcome: int) -> None:
        """Ends the episode, if it has not ended, after the rows that are there."""
        if self.episode is not None and not self._ended:
            times = (time.time_ns(), time.monotonic_ns())
            self.block.marks.append((self._position(), END, (outcome, *times)))
        self._ended = False
        self.episode = self._deferred = None
        self.rows = None

    def cut(self) -> None:
        self.end(CUT)

    def annotate(self, values: dict[str, Any]) -> None:
        """Gives the next row more values."""
        if self.rows is not None and (len(self.rows) >= self.limit or self._value_bytes >= VALUES_BYTES):
            self.make_room()
        if self.rows is not None:
            self.block.notes.append((self._position(), {name: copied(value) for name, value in values.items()}))
            self._value_bytes += sum(getattr(value, "nbytes", 64) for value in values.values())

    def count_values(self, count: int) -> None:
        """Counts bytes of MessagePack values, whose size is not known beforehand, towards the size of a block."""
        self._value_bytes += count
        if self._value_bytes >= VALUES_BYTES:
            self.limit = 0

    def make_room(self) -> list[Any] | None:
        """What rows to go on with, or None if nothing is recorded any more. Raises RecordingError, once."""
        if self._failure is not None:
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
            self._restore_frames(slots)
            self.lead(first_step, slots[: len(self.format.observation_leaves)])
        if len(self.rows) >= self._capacity or self._value_bytes >= VALUES_BYTES:
            self._turn_over()
        self._limit_reset()
        if self._failure is not None:  # it may have come while the limit was being set
            self.limit = 0
        return self.rows

    def steps_taken(self) -> int:
        """Steps of the episode that the rows stand for."""
        return self._base + self._position() - 1 - self._run_base

    def last_observation(self) -> tuple[Any, ...]:
        """The slots of the last row, frames copied."""
        rows = self.block.rows
        if rows:
            at = len(rows) // self.format.width - 1
            frames = [frame[at].copy() for frame in self.block.frames]
            return (*rows[-self.format.width :][: len(self.format.observation_leaves)], frames)
        return self._last_row

    def _restore_frames(self, slots: tuple[Any, ...]) -> None:
        for frame, kept in zip(self.block.frames, slots[-1]):
            frame[self._position()] = kept

    def _position(self) -> int:
        return len(self.block.rows) // self.format.width

    def _turn_over(self) -> None:
        """Hands the block over to the thread and goes on in a new one; waits while too many are waiting."""
        self._last_row = self.last_observation()
        position = self._position()
        self._base += position
        # Annotations of a step that is still to come go with it.
        carried = [(0, values) for at, values in self.block.notes if at >= position]
        with self._room:
            while len(self._blocks) > _MAX_BLOCKS and self._failure is None and self._thread_lives():
                self._wake.set()
                self._room.wait(1.0)
        if len(self._blocks) > _MAX_BLOCKS and self._failure is None:
            self._drain(partial=False)
        filled = self.block
        self._value_bytes = 0
        self._new_block()
        self.block.notes += carried
        filled.full = True  # only now: the thread must always find the block that is being filled behind the full ones
        self._wake.set()
        if self.rows is not None:
            self.rows = self.block.rows

    def _thread_lives(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _new_block(self) -> None:
        frames = self._spare_frames.pop() if self._spare_frames else self.format.new_frames()
        self.block = Block(frames)
        self._blocks.append(self.block)

    def flush(self) -> None:
        """Returns when all steps so far can be read by others. Raises RecordingError."""
        self._drain(partial=True)
        self._complain()
        if self._failure is not None:
            self._report()

    def close(self) -> None:
        """Saves everything, seals the batch, ends the thread. Raises RecordingError if something could not be saved."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self.end(CLOSED)
        self._stop = True
        self._wake.set()
        if self._thread is threading.current_thread():
            return  # collected as garbage in our own thread, which saves everything on its way out
        if self._thread is not None:
            self._thread.join()
        self._finish()
        _live.discard(self)
        self._complain()
        if self._failure is not None:
            self._report()

    def save_at_exit(self, owner: object) -> None:
        """Closes the recorder when owner is collected, or the process ends in an orderly way, whichever comes first."""
        self._owner = weakref.ref(owner)
        self._save_when_owner_goes()

    def _save_when_owner_goes(self) -> None:
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            Finalize(owner, _close_quietly, args=(self,), exitpriority=100)

    def _report(self) -> None:
        """Raises the failure, or warns of it, the first time."""
        failure, self._failure = self._failure, _REPORTED
        if failure is _REPORTED or failure is None:
            return
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

    # -- the thread's side --------------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        if self._stop:
            return
        self._thread = threading.Thread(target=self._work, name=f"gym-trace {self.writer_id}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is shutting down: close() will write what is left
            self._thread = None

    def _work(self) -> None:
        due = time.monotonic() + self._interval
        while not self._stop:
            self._wake.wait(max(0.0, due - time.monotonic()))
            self._wake.clear()
            partial = time.monotonic() >= due
            self._drain(partial)
            if partial:
                due = time.monotonic() + self._interval
        if self._closed:
            self._finish()

    def _drain(self, partial: bool) -> None:
        """Writes all full blocks, and with partial=True what there is of the one being filled."""
        with self._drain_lock:
            try:
                while self._failure is None:
                    block = self._blocks[0]
                    if not (block.full or partial):
                        break
                    full = block.full  # asked before the rows are counted: nothing is added to a full block
                    self._write(block)
                    if not full:
                        break
                    with self._room:
                        self._blocks.popleft()
                        self._spare_frames.append(block.frames)
                        self._room.notify()
            except Exception as error:  # whatever it is, it must reach the caller's thread
                self._fail(error)

    def _write(self, block: Block) -> None:
        taken = self._encoder.take(block)
        if taken is None:
            if self._writer is not None:
                self._writer.seal_if_due()
            return
        self._open_writer().write(*taken)
        self._open_writer().seal_if_due()
        if any(column not in self._complained for column in self._encoder.complaints):
            self.limit = 0

    def _open_writer(self) -> TraceWriter:
        if self._writer is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._writer = TraceWriter(self.directory, self._schema, self._level, self._fsync)
        return self._writer

    def _fail(self, error: Exception) -> None:
        with self._room:
            self._failure = error
            self.limit = 0
            while len(self._blocks) > 1:
                self._blocks.popleft()
            self._room.notify()
        if self._writer is not None:
            self._writer.abandon()

    def _finish(self) -> None:
        self._drain(partial=True)
        with self._drain_lock:
            if self._finished:
                return
            self._finished = True
            if self._writer is not None and self._failure is None:
                try:
                    self._writer.close(self._summary())
                except Exception as error:  # as in _drain
                    self._fail(error)

    @property
    def written(self) -> tuple[int, int]:
        """Bytes on disk, and steps taken and not yet discarded, so far."""
        return (0 if self._writer is None else self._writer.bytes), self._base + self._position()

    # -- forks and copies ---------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Writes what there is and ends the thread, so that a fork finds one thread and no lock held."""
        thread, self._stop = self._thread, True
        self._wake.set()
        if thread is not None:
            thread.join()
        self._thread = None
        self._paused = thread is not None
        self._drain(partial=True)

    def resume(self) -> None:
        self._stop = False
        if self._paused:
            self._start_thread()

    def be_reborn(self) -> None:
        """In the child after a fork: a writer of its own, going on in the middle of the episode."""
        if self._writer is not None:
            self._writer.abandon()
        state = self.open_run()
        self._schema = {**self._schema, "writer": new_writer_id(), "pid": os.getpid(), "forked_from": self.writer_id}
        self._start_afresh()
        self._episodes = 0
        self.go_on_with(state)
        self._save_when_owner_goes()
        register_after_fork(self, Recorder._save_when_owner_goes)  # multiprocessing clears what was registered so far

    def open_run(self) -> OpenRun | None:
        """What another recorder needs to go on with the run that is open here, or None."""
        if self._deferred is not None:
            return self._deferred
        if self.episode is None or self._ended or self._failure is not None:
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
            self._restore_frames(run.slots)
            self.lead(run.steps, run.slots[:-1])


class OpenRun(NamedTuple):
    """A run of steps that another recorder began: slots of the last observation, None between filtered runs."""

    start: Start
    steps: int
    slots: tuple[Any, ...] | None


_REPORTED = RecordingError("reported already")


def _close_quietly(recorder: Recorder) -> None:
    """At exit and in garbage collection nobody can catch an error: say it and go on."""
    try:
        recorder.close()
    except RecordingError as error:
        warnings.warn(str(error), RuntimeWarning, stacklevel=2)


def _before_fork() -> None:
    for recorder in list(_live):
        recorder.pause()


def _after_fork_in_parent() -> None:
    for recorder in list(_live):
        recorder.resume()


def _after_fork_in_child() -> None:
    for recorder in list(_live):
        recorder.be_reborn()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
